"""Families of HuggingFace models, as tables: one entry per `model_type`.

`hf_config` reads and writes `config.json` by an entry, `hf` maps tensors by it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

# Our fields, by the keys of config.json that determine them in every family.
KEYS = {
  'vocab_size': 'vocab_size',
  'layers': 'num_hidden_layers',
  'embed_dim': 'hidden_size',
  'heads': 'num_attention_heads',
  'kv_heads': 'num_key_value_heads',
  'head_dim': 'head_dim',
  'mlp_dim': 'intermediate_size',
  'activation': 'hidden_act',
  'norm_eps': 'rms_norm_eps',
  'tied_head': 'tie_word_embeddings',
}
# Keys of which only one value is supported where `Family.keys` has none.
PLAIN = {
  'attention_bias': False,
  'mlp_bias': False,
  'use_bidirectional_attention': False,
  'quantization_config': None,
  'partial_rotary_factor': 1.0,
  'is_causal': True,
  'per_layer_config': None,
  'transformers_weights': None,
}
ACTIVATIONS = {'silu': 'silu', 'gelu_pytorch_tanh': 'gelu'}
# Kinds of RoPE's scaling: theirs and ours; and of each of theirs (our field of
# `schema.RopeScaling`, their key).
ROPES = {'default': 'none', 'linear': 'linear', 'llama3': 'llama3'}
SCALING: dict[str, dict[str, str]] = {
  'default': {},
  'linear': {'factor': 'factor'},
  'llama3': {
    'factor': 'factor',
    'original_length': 'original_max_position_embeddings',
    'low_frequency': 'low_freq_factor',
    'high_frequency': 'high_freq_factor',
  },
}

LAYER = 'model.layers.{}.'
# Names of tensors by the paths of our leaves.
NAMES = {
  'embed/table': 'model.embed_tokens.weight',
  'final_norm/scale': 'model.norm.weight',
  'head/kernel': 'lm_head.weight',
  'reward/kernel': 'score.weight',
  'layers/attention_norm/scale': LAYER + 'input_layernorm.weight',
}
for _x in 'qkvo':
  NAMES |= {
    f'layers/attention/{_x}/kernel': f'{LAYER}self_attn.{_x}_proj.weight',
    f'layers/attention/{_x}/bias': f'{LAYER}self_attn.{_x}_proj.bias',
    f'layers/attention/{_x}_norm/scale': f'{LAYER}self_attn.{_x}_norm.weight',
  }
for _x in ('gate', 'up', 'down'):
  NAMES[f'layers/mlp/{_x}/kernel'] = f'{LAYER}mlp.{_x}_proj.weight'
  # One tensor per expert.
  name = f'{LAYER}mlp.experts.{{}}.{_x}_proj.weight'
  NAMES[f'layers/experts/{_x}/kernel'] = name
NAMES['layers/experts/router/kernel'] = LAYER + 'mlp.gate.weight'
# Those of the norms, by `post_norms`.
NORMS = {
  False: {'layers/mlp_norm/scale': LAYER + 'post_attention_layernorm.weight'},
  True: {
    'layers/attention_post_norm/scale': LAYER
    + 'post_attention_layernorm.weight',
    'layers/mlp_norm/scale': LAYER + 'pre_feedforward_layernorm.weight',
    'layers/mlp_post_norm/scale': LAYER + 'post_feedforward_layernorm.weight',
  },
}


@dataclasses.dataclass(frozen=True)
class Family:
  """What a `model_type` implies."""

  architecture: str
  # Fields of `schema.Model` that no key determines.
  fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  # Our fields by further keys; they precede those of KEYS.
  keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
  # Other names of keys.
  aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
  # Further keys of which only one value is supported.
  plain: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  # Values of missing keys.
  absent: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  # The layers with a window, unless `layer_types` lists them: '' = none,
  # whatever the keys; 'upper' = those from `max_window_layers` on, if
  # `use_sliding_window`; n, or a key with n = all but every n-th one.
  windows: str | int = ''
  # With a RoPE of their own, unscaled, for these layers: the key of its base.
  local_theta: str = ''
  # Names of tensors, as in NAMES; equal names are one tensor, which has our
  # leaves in the order of NAMES one after the other.
  names: Mapping[str, str] = dataclasses.field(default_factory=dict)
  divides: bool = True  # transformers wants heads to divide hidden_size


_GEMMA = {'norm_offset': True, 'post_norms': True, 'scale_embeddings': True}
_GEMMA_KEYS = {
  'activation': 'hidden_activation',
  'query_scale': 'query_pre_attn_scalar',
  'logit_softcap': 'final_logit_softcapping',
}
_GEMMA_ABSENT = {
  'num_key_value_heads': 4,
  'head_dim': 256,
  'query_pre_attn_scalar': 256,
  'sliding_window': 4096,
  'tie_word_embeddings': True,
  'hidden_activation': 'gelu_pytorch_tanh',
}
_QWEN_ABSENT = {
  'num_key_value_heads': 32,
  'sliding_window': 4096,
  'max_window_layers': 28,
}
_MIXTRAL = LAYER + 'block_sparse_moe.'
# A model is written as the first one that computes it.
FAMILIES = {
  'llama': Family('LlamaForCausalLM'),
  'qwen2': Family(
    'Qwen2ForCausalLM',
    fixed={'qkv_bias': True},
    absent=_QWEN_ABSENT,
    windows='upper',
    divides=False,
  ),
  'qwen3': Family(
    'Qwen3ForCausalLM',
    fixed={'qk_norm': True},
    absent={**_QWEN_ABSENT, 'head_dim': 128},
    windows='upper',
    divides=False,
  ),
  'gemma2': Family(
    'Gemma2ForCausalLM',
    fixed=_GEMMA,
    keys={**_GEMMA_KEYS, 'attention_softcap': 'attn_logit_softcapping'},
    absent={
      **_GEMMA_ABSENT,
      'attn_logit_softcapping': 50.0,
      'final_logit_softcapping': 30.0,
    },
    windows=2,
  ),
  # It has the key attn_logit_softcapping as well, which transformers ignores.
  'gemma3_text': Family(
    'Gemma3ForCausalLM',
    fixed={**_GEMMA, 'qk_norm': True},
    keys=_GEMMA_KEYS,
    absent={
      **_GEMMA_ABSENT,
      'sliding_window_pattern': 6,
      'rope_theta': 1e6,
      'rope_local_base_freq': 10_000.0,
    },
    windows='sliding_window_pattern',
    local_theta='rope_local_base_freq',
  ),
  # An MLP where the layer is in mlp_only_layers, or its number no multiple of
  # decoder_sparse_step.
  'qwen3_moe': Family(
    'Qwen3MoeForCausalLM',
    fixed={'qk_norm': True},
    keys={
      'experts.count': 'num_experts',
      'experts.per_token': 'num_experts_per_tok',
      'experts.mlp_dim': 'moe_intermediate_size',
      'experts.normalize': 'norm_topk_prob',
    },
    aliases={'num_local_experts': 'num_experts'},
    plain={'use_sliding_window': False},
    absent={
      'num_key_value_heads': 4,
      'num_experts': 128,
      'num_experts_per_tok': 8,
      'moe_intermediate_size': 768,
      'norm_topk_prob': False,
      'decoder_sparse_step': 1,
    },
    divides=False,
  ),
  'mixtral': Family(
    'MixtralForCausalLM',
    keys={
      'experts.count': 'num_local_experts',
      'experts.per_token': 'num_experts_per_tok',
      'experts.mlp_dim': 'intermediate_size',
    },
    plain={'sliding_window': None, 'router_jitter_noise': 0.0},
    absent={
      'num_key_value_heads': 8,
      'num_local_experts': 8,
      'num_experts_per_tok': 2,
      'rope_theta': 1e6,
    },
    names={
      'layers/experts/router/kernel': _MIXTRAL + 'gate.weight',
      'layers/experts/gate/kernel': _MIXTRAL + 'experts.{}.w1.weight',
      'layers/experts/up/kernel': _MIXTRAL + 'experts.{}.w3.weight',
      'layers/experts/down/kernel': _MIXTRAL + 'experts.{}.w2.weight',
    },
  ),
}
