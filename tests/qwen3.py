"""The `config.json` of a small HuggingFace directory of Qwen 3."""

CONFIG = {
  'model_type': 'qwen3',
  'vocab_size': 300,
  'hidden_size': 64,
  'intermediate_size': 128,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'head_dim': 16,
  'hidden_act': 'silu',
  'rms_norm_eps': 1e-6,
  'rope_theta': 1e6,
  'tie_word_embeddings': True,
  'attention_bias': False,
}
