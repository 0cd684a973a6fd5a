"""`config.json` of a HuggingFace directory <-> `schema.Model`.

1. `read` reads the keys that change a model's function, in the formats of
   versions 4 and 5 of transformers, and refuses values that our models do not
   support.
2. `write` builds the keys that transformers needs, and checks that `read`
   returns the same model from them.
"""

import dataclasses
import json
import pathlib
from typing import Any

from posttrain import schema

# Fields that do not change a model's function.
_OURS = ('dtype', 'remat')


@dataclasses.dataclass(frozen=True)
class _Family:
  """The settings that a `model_type` implies."""

  architecture: str
  fixed: dict[str, Any]  # fields of schema.Model
  absent: dict[str, Any]  # defaults of keys
  pattern: int | None = None  # by default, every so many-th layer is not local


_GEMMA = {
  'norm_offset': True,
  'post_norms': True,
  'scale_embeddings': True,
  'activation': 'gelu',
}
_GEMMA_ABSENT = {
  'head_dim': 256,
  'query_pre_attn_scalar': 256,
  'sliding_window': 4096,
  'tie_word_embeddings': True,
  'hidden_activation': 'gelu_pytorch_tanh',
}
_FAMILIES = {
  'llama': _Family('LlamaForCausalLM', {}, {}),
  'qwen2': _Family('Qwen2ForCausalLM', {'qkv_bias': True}, {}),
  'qwen3': _Family('Qwen3ForCausalLM', {'qk_norm': True}, {'head_dim': 128}),
  'gemma2': _Family(
    'Gemma2ForCausalLM',
    _GEMMA,
    {
      **_GEMMA_ABSENT,
      'attn_logit_softcapping': 50.0,
      'final_logit_softcapping': 30.0,
    },
    pattern=2,
  ),
  'gemma3_text': _Family(
    'Gemma3ForCausalLM',
    {**_GEMMA, 'qk_norm': True},
    {**_GEMMA_ABSENT, 'rope_theta': 1e6, 'rope_local_base_freq': 1e4},
    pattern=6,
  ),
}
_ACTIVATIONS = {'silu': 'silu', 'gelu_pytorch_tanh': 'gelu'}
_ROPE_TYPES = {'default': 'none', 'linear': 'linear', 'llama3': 'llama3'}
# Keys of which only one value is supported.
_PLAIN = {
  'attention_bias': False,
  'mlp_bias': False,
  'use_bidirectional_attention': False,
  'quantization_config': None,
  'partial_rotary_factor': 1.0,
}


def read(folder: str | pathlib.Path) -> schema.Model:
  """Returns the model that a directory's `config.json` describes.

  `dtype` and `remat`, which the file does not determine, have their defaults.

  Raises:
    ValueError: the file is missing or no JSON, the architecture is unknown, or
      a key is missing or has an unsupported value.
  """
  path = pathlib.Path(folder) / 'config.json'
  if not path.is_file():
    raise ValueError(
      f'{folder} must hold a config.json: got none; name the directory of a '
      'HuggingFace model'
    )
  try:
    return _parse(json.loads(path.read_text()))
  except json.JSONDecodeError as error:
    raise ValueError(f'{path} must be JSON: {error}') from error
  except KeyError as error:  # a nested key; `_parse` checks the others
    raise ValueError(
      f'{path}: {error.args[0]} must be given: got none'
    ) from error
  except (_Unsupported, schema.FieldError) as error:
    raise ValueError(f'{path}: {error}') from error
  except (TypeError, AttributeError, ValueError) as error:
    raise ValueError(
      f'{path} must hold values of the kinds that transformers writes: {error}'
    ) from error


def write(cfg: schema.Model) -> dict[str, Any]:
  """Returns the `config.json` of a model, with `vocab_size` resolved.

  Raises:
    ValueError: no architecture of HuggingFace's computes this model.
  """
  text = _unparse(cfg)
  parsed = dataclasses.replace(_parse(text), dtype=cfg.dtype, remat=cfg.remat)
  for field in dataclasses.fields(cfg):
    ours, theirs = getattr(cfg, field.name), getattr(parsed, field.name)
    if ours != theirs:
      raise ValueError(
        f'model.{field.name} must be {theirs!r} to be written as a '
        f'{text["architectures"][0]}: got {ours!r}'
      )
  return text


def differing(a: schema.Model, b: schema.Model) -> list[str]:
  """Returns the names of the fields that differ, except dtype and remat."""
  names = [field.name for field in dataclasses.fields(schema.Model)]
  return [
    name
    for name in names
    if name not in _OURS and getattr(a, name) != getattr(b, name)
  ]


class _Unsupported(Exception):
  """An unsupported key or value; the message names it."""


def _parse(text: dict[str, Any]) -> schema.Model:
  family = _family(text)
  for key, value in _PLAIN.items():
    if text.get(key) not in (None, value):
      raise _Unsupported(f'{key} must be {value!r}: got {text[key]!r}')
  c = {**family.absent, **text}

  def get(key):
    if c.get(key) is None:
      raise _Unsupported(f'{key} must be given: got none')
    return c[key]

  layers, heads = get('num_hidden_layers'), get('num_attention_heads')
  gemma = 'norm_offset' in family.fixed
  activation = get('hidden_activation' if gemma else 'hidden_act')
  _check_activation(activation, c['model_type'], family)
  local = _local_layers(c, layers, family.pattern)
  theta, scaling, local_theta = _rope(c, 'qk_norm' in family.fixed and gemma)
  return schema.Model(
    vocab_size=get('vocab_size'),
    layers=layers,
    embed_dim=get('hidden_size'),
    heads=heads,
    kv_heads=c.get('num_key_value_heads') or heads,
    head_dim=c.get('head_dim') or get('hidden_size') // heads,
    mlp_dim=get('intermediate_size'),
    norm_eps=get('rms_norm_eps'),
    tied_head=c.get('tie_word_embeddings', False),
    rope_theta=theta,
    rope_scaling=scaling,
    local_rope_theta=local_theta,
    local_layers=local,
    window=get('sliding_window') if local else None,
    query_scale=float(get('query_pre_attn_scalar')) if gemma else None,
    attention_softcap=c.get('attn_logit_softcapping'),
    logit_softcap=c.get('final_logit_softcapping'),
    **family.fixed,
  )


def _family(text: dict[str, Any]) -> _Family:
  """Returns the family of `model_type` and `architectures`."""
  family = _FAMILIES.get(text.get('model_type'))
  if family is None or family.architecture not in text.get(
    'architectures', [family.architecture]
  ):
    raise _Unsupported(
      'model_type must be one of '
      f'{ {name: f.architecture for name, f in _FAMILIES.items()} }: got '
      f'{text.get("model_type")!r}, architectures '
      f'{text.get("architectures")!r}'
    )
  return family


def _check_activation(name: str, model_type: str, family: _Family) -> None:
  expected = family.fixed.get('activation', 'silu')
  if _ACTIVATIONS.get(name) != expected:
    raise _Unsupported(
      f'the activation of a {model_type} must be {expected!r}: got {name!r}'
    )


def _local_layers(c, layers: int, pattern: int | None) -> tuple[int, ...]:
  """Returns the indices of the layers with a sliding window."""
  pattern = c.get('sliding_window_pattern', pattern)
  kinds = c.get('layer_types')
  if kinds is not None:
    if len(kinds) != layers or set(kinds) - {
      'full_attention',
      'sliding_attention',
    }:
      raise _Unsupported(
        f'layer_types must name full_attention or sliding_attention for each '
        f'of {layers} layers: got {kinds!r}'
      )
    local = [kind == 'sliding_attention' for kind in kinds]
  elif pattern is not None:
    local = [(i + 1) % pattern != 0 for i in range(layers)]
  else:
    first = c.get('max_window_layers', 0)
    local = [
      bool(c.get('use_sliding_window')) and i >= first for i in range(layers)
    ]
  return tuple(i for i, is_local in enumerate(local) if is_local)


def _rope(c, two: bool) -> tuple[float, schema.RopeScaling, float | None]:
  """Returns (base, scaling, base of local layers or None).

  Args:
    c: the config.
    two: whether local layers have their own base.
  """
  full, local = c.get('rope_parameters'), {}
  if full is None:  # version 4
    full = {'rope_theta': c.get('rope_theta', 10_000.0)}
    full |= c.get('rope_scaling') or {}
    local = {'rope_theta': c.get('rope_local_base_freq')}
  elif two:
    full, local = full['full_attention'], full['sliding_attention']
  if local.get('rope_type', 'default') != 'default':
    raise _Unsupported(
      f'RoPE of local layers must not be scaled: got {local!r}'
    )
  kind = full.get('rope_type', full.get('type', 'default'))
  if kind not in _ROPE_TYPES:
    raise _Unsupported(
      f'rope_type must be one of {tuple(_ROPE_TYPES)}: got {kind!r}'
    )
  scaling = schema.RopeScaling(
    kind=_ROPE_TYPES[kind],
    **{ours: type_(full[theirs]) for ours, theirs, type_ in _SCALING[kind]},
  )
  local_theta = float(local['rope_theta']) if two else None
  return float(full['rope_theta']), scaling, local_theta


_SCALING = {
  'default': (),
  'linear': (('factor', 'factor', float),),
  'llama3': (
    ('factor', 'factor', float),
    ('original_length', 'original_max_position_embeddings', int),
    ('low_frequency', 'low_freq_factor', float),
    ('high_frequency', 'high_freq_factor', float),
  ),
}


def _unparse(cfg: schema.Model) -> dict[str, Any]:
  """Returns `config.json` in the format of version 4, which all tools read."""
  name, family = _matching_family(cfg)
  activations = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
  activation = activations[cfg.activation]
  text = {
    'architectures': [family.architecture],
    'model_type': name,
    'vocab_size': cfg.vocab_size,
    'num_hidden_layers': cfg.layers,
    'hidden_size': cfg.embed_dim,
    'intermediate_size': cfg.mlp_dim,
    'num_attention_heads': cfg.heads,
    'num_key_value_heads': cfg.kv_heads,
    'head_dim': cfg.head_dim,
    'rms_norm_eps': cfg.norm_eps,
    'tie_word_embeddings': cfg.tied_head,
    'rope_theta': cfg.rope_theta,
    'rope_scaling': _rope_scaling(cfg.rope_scaling),
    'hidden_act': activation,
  }
  if family.pattern:
    text |= {'hidden_activation': activation, **_gemma_keys(cfg)}
  if family.pattern or cfg.local_layers:
    text |= _window_keys(cfg)
  return text


def _matching_family(cfg: schema.Model) -> tuple[str, _Family]:
  """Returns the `model_type`, and its family, with the model's features."""
  features = {
    name: getattr(cfg, name)
    for name in {key for f in _FAMILIES.values() for key in f.fixed}
  }
  off = {**dict.fromkeys(features, False), 'activation': 'silu'}
  for name, family in _FAMILIES.items():
    if {**off, **family.fixed} == features:
      return name, family
  raise ValueError(
    'model must be of one architecture to be written as a HuggingFace '
    f'directory: got a mixture, {features}'
  )


def _rope_scaling(scaling: schema.RopeScaling) -> dict[str, Any] | None:
  kinds = {ours: theirs for theirs, ours in _ROPE_TYPES.items()}
  kind = kinds[scaling.kind]
  values = {
    theirs: getattr(scaling, ours) for ours, theirs, _ in _SCALING[kind]
  }
  return {'rope_type': kind, **values} if values else None


def _gemma_keys(cfg: schema.Model) -> dict[str, Any]:
  keys = {
    'query_pre_attn_scalar': int(cfg.query_scale or cfg.head_dim),
    'attn_logit_softcapping': cfg.attention_softcap,
    'final_logit_softcapping': cfg.logit_softcap,
  }
  if cfg.local_rope_theta is not None:
    keys['rope_local_base_freq'] = cfg.local_rope_theta
  return keys


def _window_keys(cfg: schema.Model) -> dict[str, Any]:
  return {
    'sliding_window': cfg.window,
    'use_sliding_window': True,
    'layer_types': [
      'sliding_attention' if i in cfg.local_layers else 'full_attention'
      for i in range(cfg.layers)
    ],
  }
