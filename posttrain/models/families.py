"""Families of HuggingFace models, as tables: one entry per `model_type`.

`hf_config` reads and writes `config.json` by an entry, `hf` maps tensors by it.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from posttrain import schema

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
# Values of missing keys, where `Family.absent` has none.
ABSENT = {
  'tie_word_embeddings': False,
  'attention_bias': False,
  'mlp_bias': False,
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
# Kinds of RoPE's scaling, theirs and ours; and their keys of each of ours, by
# the fields of `schema.RopeScaling`.
ROPES = {'default': 'none', **{x: x for x in schema.ROPE_KINDS[1:-1]}}
LENGTH = 'original_max_position_embeddings'
SCALING: dict[str, dict[str, str]] = {
  'none': {},
  'linear': {'factor': 'factor'},
  'llama3': {
    'factor': 'factor',
    'original_length': LENGTH,
    'low_frequency': 'low_freq_factor',
    'high_frequency': 'high_freq_factor',
  },
  'yarn': {
    'factor': 'factor',
    'original_length': LENGTH,
    'fast_turns': 'beta_fast',
    'slow_turns': 'beta_slow',
    'truncate': 'truncate',
    'attention_factor': 'attention_factor',
  },
  'dynamic': {'factor': 'factor', 'original_length': 'max_position_embeddings'},
  'longrope': {
    'factor': 'factor',
    'original_length': LENGTH,
    'attention_factor': 'attention_factor',
    'short_factors': 'short_factor',
    'long_factors': 'long_factor',
  },
  'proportional': {'factor': 'factor'},
}
# Keys of SCALING that may be missing; the fields have transformers' defaults.
OPTIONAL = ('beta_fast', 'beta_slow', 'truncate', 'attention_factor')

LAYER = 'model.layers.{}.'
# Names of tensors by the paths of our leaves.
NAMES = {
  'embed/table': 'model.embed_tokens.weight',
  'final_norm/scale': 'model.norm.weight',
  'head/kernel': 'lm_head.weight',
  'reward/kernel': 'score.weight',
}
for _x in 'qkvo':
  NAMES |= {
    f'layers/attention/{_x}/kernel': f'{LAYER}self_attn.{_x}_proj.weight',
    f'layers/attention/{_x}/bias': f'{LAYER}self_attn.{_x}_proj.bias',
    f'layers/attention/{_x}_norm/scale': f'{LAYER}self_attn.{_x}_norm.weight',
  }
for _x in ('gate', 'up', 'down'):
  NAMES[f'layers/mlp/{_x}/kernel'] = f'{LAYER}mlp.{_x}_proj.weight'
  NAMES[f'layers/experts/shared/{_x}/kernel'] = (
    f'{LAYER}mlp.shared_expert.{_x}_proj.weight'
  )
  NAMES[f'layers/mlp/{_x}/bias'] = f'{LAYER}mlp.{_x}_proj.bias'
  # One tensor per expert.
  NAMES[f'layers/experts/{_x}/kernel'] = (
    f'{LAYER}mlp.experts.{{}}.{_x}_proj.weight'
  )
NAMES |= {
  'layer_embed/embed/table': 'model.embed_tokens_per_layer.weight',
  'layer_embed/projection/kernel': 'model.per_layer_model_projection.weight',
  'layer_embed/norm/scale': 'model.per_layer_projection_norm.weight',
}
for _x, _name in {
  'attention_norm/scale': 'input_layernorm.weight',
  'attention/sinks': 'self_attn.sinks',
  'experts/router/kernel': 'mlp.gate.weight',
  'experts/shared_gate/kernel': 'mlp.shared_expert_gate.weight',
  'layer_mlp/gate/kernel': 'per_layer_input_gate.weight',
  'layer_mlp/down/kernel': 'per_layer_projection.weight',
  'layer_mlp_post_norm/scale': 'post_per_layer_input_norm.weight',
  'scalar': 'layer_scalar',
  'delta/qkv/kernel': 'linear_attn.in_proj_qkv.weight',
  'delta/z/kernel': 'linear_attn.in_proj_z.weight',
  'delta/b/kernel': 'linear_attn.in_proj_b.weight',
  'delta/a/kernel': 'linear_attn.in_proj_a.weight',
  'delta/taps': 'linear_attn.conv1d.weight',
  'delta/log_scale': 'linear_attn.A_log',
  'delta/bias': 'linear_attn.dt_bias',
  'delta/norm_scale': 'linear_attn.norm.weight',
  'delta/o/kernel': 'linear_attn.out_proj.weight',
}.items():
  NAMES[f'layers/{_x}'] = LAYER + _name
# Tensors of vision towers and of the prediction of further tokens; and those,
# and redundant ones, that a model may do without.
OTHERS = (
  r'(model\.visual|mtp|(model\.)?(vision|audio)_tower'
  r'|model\.embed_(vision|audio)|multi_modal_projector)\.'
)
# Layers that read other layers' keys and values may have unused matrices.
UNUSED = (
  rf'^({OTHERS}|lm_head\.weight$)|rotary_emb\.inv_freq$'
  r'|self_attn\.[kv]_(proj|norm)\.weight$'
)
# Those of the norms of the MLP and after branches, by `pre_norms` and
# `post_norms`.
_MLP_NORM, _AFTER = 'layers/mlp_norm/scale', 'post_attention_layernorm.weight'
_POST_NORMS = {
  'layers/attention_post_norm/scale': LAYER + _AFTER,
  'layers/mlp_post_norm/scale': LAYER + 'post_feedforward_layernorm.weight',
}
NORMS = {
  (True, False): {_MLP_NORM: LAYER + _AFTER},
  (True, True): {
    **_POST_NORMS,
    _MLP_NORM: LAYER + 'pre_feedforward_layernorm.weight',
  },
  (False, True): _POST_NORMS,
}
# A field of `Family` that is empty by default.
_table: Any = functools.partial(dataclasses.field, default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Family:
  """What a `model_type` implies."""

  architecture: str
  # Fields of `schema.Model` that no key determines.
  fixed: Mapping[str, Any] = _table()
  # Our fields by further keys; they precede those of KEYS.
  keys: Mapping[str, str] = _table()
  # Other names of keys.
  aliases: Mapping[str, str] = _table()
  # Further keys of which only one value is supported.
  plain: Mapping[str, Any] = _table()
  # Values of missing keys.
  absent: Mapping[str, Any] = _table()
  # The layers with a window: '' = none, 'all' = all if `sliding_window`,
  # whatever the other keys. The others, unless `layer_types` lists them:
  # 'upper' = those from `max_window_layers` on, if `use_sliding_window`; 'nope'
  # = those without RoPE, likewise; n, or a key with n = all but every n-th one;
  # -n = and the last one in any case.
  windows: str | int = ''
  # With a RoPE of their own, unscaled, for local layers: the key of its base in
  # version 4, or its value there.
  local_theta: str | float = ''
  # Whether `no_rope_layers` or `no_rope_layer_interval` name layers without it.
  nope: bool = False
  # Whether there are delta layers. `layer_types` names them; without it, every
  # `full_attention_interval`-th layer is attention and all others are delta.
  delta: bool = False
  # The key of the object that has the others; '' = none.
  nested: str = ''
  # Kinds of scaling, as in ROPES; the last one of equals is written.
  ropes: Mapping[str, str] = dataclasses.field(default_factory=lambda: ROPES)
  # Names of tensors, as in NAMES; equal names are one tensor, which has our
  # leaves in the order of NAMES one after the other, and in delta layers head
  # by head.
  names: Mapping[str, str] = _table()
  # Names of further tensors that stand for those of `names` where a directory
  # has them: of all experts together.
  joined: Mapping[str, str] = _table()
  # Whether tensors of all experts are [in, out], and alternate gate and up; and
  # may be packed as MXFP4.
  alternates: bool = False
  divides: bool = True  # transformers wants heads to divide hidden_size


_BIASES = {'qkv_bias': 'attention_bias', 'output_bias': 'attention_bias'}
_ALL_BIASES = {**_BIASES, 'mlp_bias': 'mlp_bias'}
_GEMMA = {'norm_offset': True, 'post_norms': True, 'scale_embeddings': True}
_GEMMA_KEYS = {
  **_BIASES,
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
_MULTIPLIERS = {
  'embedding_multiplier': 'embedding_multiplier',
  'residual_multiplier': 'residual_multiplier',
  'logit_divisor': 'logits_scaling',
  'attention_multiplier': 'attention_multiplier',
}
_EXPERTS = {
  'experts.count': 'num_experts',
  'experts.per_token': 'num_experts_per_tok',
  'experts.normalize': 'norm_topk_prob',
}
_JOINED = {
  'layers/experts/gate/kernel': LAYER + 'mlp.experts.gate_up_proj',
  'layers/experts/up/kernel': LAYER + 'mlp.experts.gate_up_proj',
  'layers/experts/down/kernel': LAYER + 'mlp.experts.down_proj',
}
_OLMO = {
  'pre_norms': False,
  'post_norms': True,
  'qk_norm': True,
  'wide_qk_norm': True,
}
_HYBRID = Family(
  'Qwen3_5ForCausalLM',
  fixed={'attention_gate': True, 'norm_offset': True, 'qk_norm': True},
  keys={
    'partial_rotary': 'partial_rotary_factor',
    'delta.key_heads': 'linear_num_key_heads',
    'delta.value_heads': 'linear_num_value_heads',
    'delta.key_dim': 'linear_key_head_dim',
    'delta.value_dim': 'linear_value_head_dim',
    'delta.conv_width': 'linear_conv_kernel_dim',
  },
  absent={
    'num_key_value_heads': 4,
    'head_dim': 256,
    'partial_rotary_factor': 0.25,
    'full_attention_interval': 4,
    'linear_num_key_heads': 16,
    'linear_num_value_heads': 32,
    'linear_key_head_dim': 128,
    'linear_value_head_dim': 128,
    'linear_conv_kernel_dim': 4,
  },
  delta=True,
  divides=False,
)
_SHARED = {
  'experts.count': 'num_experts',
  'experts.per_token': 'num_experts_per_tok',
  'experts.mlp_dim': 'moe_intermediate_size',
  'experts.shared_dim': 'shared_expert_intermediate_size',
}
_HYBRID_EXPERTS = dataclasses.replace(
  _HYBRID,
  architecture='Qwen3_5MoeForCausalLM',
  # No layer has an MLP.
  keys={**_HYBRID.keys, **_SHARED, 'mlp_dim': 'moe_intermediate_size'},
  joined=_JOINED,
)


def _nested(names: Mapping[str, str]) -> dict[str, str]:
  return {
    path: name.replace('model.', 'model.language_model.', 1)
    for path, name in names.items()
  }


_NESTED = _nested({**NAMES, **NORMS[True, False]})
_MINISTRAL = Family(
  'Ministral3ForCausalLM',
  keys={'query_beta': 'llama_4_scaling_beta'},
  absent={
    'num_key_value_heads': 8,
    'head_dim': 128,
    'rope_parameters': {
      'rope_type': 'yarn',
      'rope_theta': 1e6,
      'factor': 16.0,
      LENGTH: 16_384,
      'mscale': 1.0,
      'mscale_all_dim': 1.0,
      'llama_4_scaling_beta': 0.1,
    },
  },
  windows='all',
  divides=False,
)
_GEMMA4 = Family(
  'Gemma4ForCausalLM',
  fixed={
    'post_norms': True,
    'scale_embeddings': True,
    'qk_norm': True,
    'v_norm': True,
    'layer_scalars': True,
    'query_scale': 1.0,
  },
  keys={
    **_BIASES,
    'activation': 'hidden_activation',
    'logit_softcap': 'final_logit_softcapping',
    'partial_rotary': 'partial_rotary_factor',
    'global_head_dim': 'global_head_dim',
    'global_kv_heads': 'num_global_key_value_heads',
    'keys_as_values': 'attention_k_eq_v',
    'shared_kv_layers': 'num_kv_shared_layers',
    'double_mlp': 'use_double_wide_mlp',
    'layer_embed_dim': 'hidden_size_per_layer_input',
  },
  plain={'enable_moe_block': False, 'use_bidirectional_attention': 'vision'},
  absent={
    'num_key_value_heads': 4,
    'head_dim': 256,
    'global_head_dim': 512,
    'sliding_window': 512,
    'tie_word_embeddings': True,
    'hidden_activation': 'gelu_pytorch_tanh',
    'partial_rotary_factor': 1.0,
    'attention_k_eq_v': False,
    'num_kv_shared_layers': 0,
    'use_double_wide_mlp': False,
    'hidden_size_per_layer_input': 256,
    'rope_parameters': {
      'full_attention': {
        'rope_type': 'proportional',
        'partial_rotary_factor': 0.25,
        'rope_theta': 1e6,
      }
    },
  },
  windows=-6,
  local_theta=10_000.0,
  ropes={'proportional': 'proportional', 'default': 'none'},
)
# A model is written as the first one that computes it.
FAMILIES = {
  'llama': Family('LlamaForCausalLM', keys=_ALL_BIASES),
  'mistral': Family(
    'MistralForCausalLM',
    absent={'num_key_value_heads': 8, 'sliding_window': 4096},
    windows='all',
    divides=False,
  ),
  'ministral3': _MINISTRAL,
  'mistral3': dataclasses.replace(
    _MINISTRAL,
    architecture='Mistral3ForConditionalGeneration',
    nested='text_config',
    plain={'model_type': 'ministral3'},
    names={
      path: f'language_model.{name}'
      for path, name in {**NAMES, **NORMS[True, False]}.items()
    },
  ),
  'smollm3': Family(
    'SmolLM3ForCausalLM',
    keys=_ALL_BIASES,
    absent={
      'num_key_value_heads': 4,
      'rope_theta': 2e6,
      'no_rope_layer_interval': 4,
      'tie_word_embeddings': True,
    },
    windows='nope',
    nope=True,
  ),
  'granite': Family(
    'GraniteForCausalLM',
    keys={**_ALL_BIASES, **_MULTIPLIERS},
    absent=dict.fromkeys(_MULTIPLIERS.values(), 1.0),
  ),
  'phi3': Family(
    'Phi3ForCausalLM',
    keys={'partial_rotary': 'partial_rotary_factor'},
    absent={'partial_rotary_factor': 1.0, LENGTH: 4096},
    windows='all',
    ropes={
      'default': 'none',
      **dict.fromkeys(('su', 'yarn', 'longrope'), 'longrope'),
    },
    names={
      **{
        f'layers/attention/{x}/kernel': f'{LAYER}self_attn.qkv_proj.weight'
        for x in 'qkv'
      },
      **{
        f'layers/mlp/{x}/kernel': f'{LAYER}mlp.gate_up_proj.weight'
        for x in ('gate', 'up')
      },
    },
  ),
  'olmo2': Family('Olmo2ForCausalLM', fixed=_OLMO, keys=_BIASES),
  'olmo3': Family(
    'Olmo3ForCausalLM',
    fixed=_OLMO,
    keys=_BIASES,
    absent={'rope_theta': 5e5, 'sliding_window': 4096},
    windows=4,
    local_theta=5e5,
  ),
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
    keys=_BIASES,
    absent={**_QWEN_ABSENT, 'head_dim': 128},
    windows='upper',
    divides=False,
  ),
  'qwen3_5_text': _HYBRID,
  'qwen3_5': dataclasses.replace(
    _HYBRID,
    architecture='Qwen3_5ForConditionalGeneration',
    nested='text_config',
    names=_NESTED,
  ),
  'qwen3_5_moe_text': _HYBRID_EXPERTS,
  'qwen3_5_moe': dataclasses.replace(
    _HYBRID_EXPERTS,
    architecture='Qwen3_5MoeForConditionalGeneration',
    nested='text_config',
    names=_NESTED,
    joined=_nested(_JOINED),
  ),
  'qwen3_next': dataclasses.replace(
    _HYBRID,
    architecture='Qwen3NextForCausalLM',
    keys={**_HYBRID.keys, **_SHARED, 'experts.normalize': 'norm_topk_prob'},
    absent={**_HYBRID.absent, 'decoder_sparse_step': 1},
    names={
      f'layers/delta/{x}/kernel': f'{LAYER}linear_attn.in_proj_{name}.weight'
      for x, name in {'qkv': 'qkvz', 'z': 'qkvz', 'b': 'ba', 'a': 'ba'}.items()
    },
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
  'gemma4_text': _GEMMA4,
  'gemma4': dataclasses.replace(
    _GEMMA4,
    architecture='Gemma4ForConditionalGeneration',
    nested='text_config',
    names=_nested({**NAMES, **NORMS[True, True]}),
  ),
  # An MLP where the layer is in mlp_only_layers, or its number no multiple of
  # decoder_sparse_step.
  'qwen3_moe': Family(
    'Qwen3MoeForCausalLM',
    fixed={'qk_norm': True},
    keys={**_EXPERTS, 'experts.mlp_dim': 'moe_intermediate_size'},
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
  'olmoe': Family(
    'OlmoeForCausalLM',
    fixed={'qk_norm': True, 'wide_qk_norm': True},
    keys={**_EXPERTS, 'experts.mlp_dim': 'intermediate_size'},
    aliases={'num_local_experts': 'num_experts'},
    plain={'clip_qkv': None},
    absent={
      'num_experts': 64,
      'num_experts_per_tok': 8,
      'norm_topk_prob': False,
    },
  ),
  'gpt_oss': Family(
    'GptOssForCausalLM',
    fixed={'attention_sinks': True, 'experts.bias': True},
    keys={
      **_BIASES,
      'experts.count': 'num_local_experts',
      'experts.per_token': 'num_experts_per_tok',
      'experts.mlp_dim': 'intermediate_size',
      'experts.clamp': 'swiglu_limit',
    },
    plain={'swiglu_alpha': 1.702},
    absent={
      'swiglu_limit': 7.0,
      'rope_theta': 150_000.0,
      'rope_parameters': {
        'rope_type': 'yarn',
        'factor': 32.0,
        LENGTH: 4096,
        'truncate': False,
      },
    },
    windows=2,
    names={
      **_JOINED,
      **{
        path.replace('kernel', 'bias'): f'{name}_bias'
        for path, name in _JOINED.items()
      },
      'layers/experts/router/kernel': LAYER + 'mlp.router.weight',
      'layers/experts/router/bias': LAYER + 'mlp.router.bias',
    },
    alternates=True,
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
