"""`config.json` of a HuggingFace directory <-> `schema.Model`.

1. `read` knows the keys that change what a model computes, as versions 4 and 5
   of transformers write them, and refuses values that ours cannot compute.
2. `write` gives what transformers needs, and proves that `read` gets the same
   model back from it.
"""

import dataclasses
import json
import pathlib
from typing import Any

from posttrain import schema

# What in a schema is not part of the model's law.
_OURS = ('dtype', 'remat')


@dataclasses.dataclass(frozen=True)
class _Family:
  """What a `model_type` implies."""

  architecture: str
  # Fields of schema.Model.
  fixed: dict[str, Any]
  # What a key means that is absent.
  absent: dict[str, Any]
  # Every so many-th layer is not local, where no key says otherwise.
  pattern: int | None = None


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
# Keys of which we compute one value only.
_PLAIN = {
  'attention_bias': False,
  'mlp_bias': False,
  'use_bidirectional_attention': False,
  'quantization_config': None,
  'partial_rotary_factor': 1.0,
}


def read(folder: str | pathlib.Path) -> schema.Model:
  """Returns the model that a directory's `config.json` describes.

  `dtype` and `remat` are ours to choose: they are left at their defaults.

  Raises:
    ValueError: the file is missing or no JSON, the architecture is none of
      ours, a key is missing, or has a value that ours cannot compute.
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
  except KeyError as error:  # of the nested ones; `_parse` asks for the others
    raise ValueError(
      f'{path}: {error.args[0]} must be given: got none'
    ) from error
  except (_Refused, schema.FieldError) as error:
    raise ValueError(f'{path}: {error}') from error
  except (TypeError, AttributeError, ValueError) as error:
    raise ValueError(
      f'{path} must hold values of the kinds that transformers writes: {error}'
    ) from error


def write(cfg: schema.Model) -> dict[str, Any]:
  """Returns the `config.json` of a model, with `vocab_size` resolved.

  Raises:
    ValueError: no architecture computes this.
  """
  given = _unparse(cfg)
  back = dataclasses.replace(_parse(given), dtype=cfg.dtype, remat=cfg.remat)
  for field in dataclasses.fields(cfg):
    ours, theirs = getattr(cfg, field.name), getattr(back, field.name)
    if ours != theirs:
      raise ValueError(
        f'model.{field.name} must be {theirs!r} to be written as a '
        f'{given["architectures"][0]}: got {ours!r}'
      )
  return given


def differing(a: schema.Model, b: schema.Model) -> list[str]:
  """Names the fields by which two models compute differently.

  Not so dtype and remat, which are ours to choose.
  """
  names = [field.name for field in dataclasses.fields(schema.Model)]
  return [
    name
    for name in names
    if name not in _OURS and getattr(a, name) != getattr(b, name)
  ]


class _Refused(Exception):
  """A key or its value; says which, what was expected, what was found."""


def _parse(text: dict[str, Any]) -> schema.Model:
  family = _FAMILIES.get(text.get('model_type'))
  if family is None or family.architecture not in text.get(
    'architectures', [family.architecture]
  ):
    raise _Refused(
      'model_type must be one of '
      f'{ {name: f.architecture for name, f in _FAMILIES.items()} }: got '
      f'{text.get("model_type")!r}, architectures '
      f'{text.get("architectures")!r}'
    )
  for key, value in _PLAIN.items():
    if text.get(key) not in (None, value):
      raise _Refused(f'{key} must be {value!r}: got {text[key]!r}')
  c = {**family.absent, **text}

  def get(key):
    if c.get(key) is None:
      raise _Refused(f'{key} must be given: got none')
    return c[key]

  layers, heads = get('num_hidden_layers'), get('num_attention_heads')
  gemma = 'norm_offset' in family.fixed
  act = get('hidden_activation' if gemma else 'hidden_act')
  if _ACTIVATIONS.get(act) != family.fixed.get('activation', 'silu'):
    raise _Refused(f'the activation of a {c["model_type"]} is not {act!r}')
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


def _local_layers(c, layers: int, pattern: int | None) -> tuple[int, ...]:
  """Which layers see a window only."""
  pattern = c.get('sliding_window_pattern', pattern)
  kinds = c.get('layer_types')
  if kinds is not None:
    if len(kinds) != layers or set(kinds) - {
      'full_attention',
      'sliding_attention',
    }:
      raise _Refused(
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
  return tuple(i for i, near in enumerate(local) if near)


def _rope(c, two: bool) -> tuple[float, schema.RopeScaling, float | None]:
  """(base, its scaling, base of local layers where there are two)."""
  wide, near = c.get('rope_parameters'), {}
  if wide is None:  # version 4
    wide = {'rope_theta': c.get('rope_theta', 10_000.0)}
    wide |= c.get('rope_scaling') or {}
    near = {'rope_theta': c.get('rope_local_base_freq')}
  elif two:
    wide, near = wide['full_attention'], wide['sliding_attention']
  if near.get('rope_type', 'default') != 'default':
    raise _Refused(f'RoPE of local layers must not be scaled: got {near!r}')
  kind = wide.get('rope_type', wide.get('type', 'default'))
  if kind not in _ROPE_TYPES:
    raise _Refused(
      f'rope_type must be one of {tuple(_ROPE_TYPES)}: got {kind!r}'
    )
  scaling = schema.RopeScaling(
    kind=_ROPE_TYPES[kind],
    **{ours: type_(wide[theirs]) for ours, theirs, type_ in _SCALING[kind]},
  )
  local_theta = float(near['rope_theta']) if two else None
  return float(wide['rope_theta']), scaling, local_theta


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
  """`config.json` as version 4 wrote it, which everybody reads."""
  features = {
    name: getattr(cfg, name)
    for name in {key for f in _FAMILIES.values() for key in f.fixed}
  }
  off = {**dict.fromkeys(features, False), 'activation': 'silu'}
  fitting = [
    name
    for name, family in _FAMILIES.items()
    if {**off, **family.fixed} == features
  ]
  if not fitting:
    raise ValueError(
      'model must be of one architecture to be written as a HuggingFace '
      f'directory: got a mixture, {features}'
    )
  name, family = fitting[0], _FAMILIES[fitting[0]]
  kind = {ours: theirs for theirs, ours in _ROPE_TYPES.items()}[
    cfg.rope_scaling.kind
  ]
  scaling = {
    theirs: getattr(cfg.rope_scaling, ours)
    for ours, theirs, _ in _SCALING[kind]
  }
  act = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}[cfg.activation]
  given = {
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
    'rope_scaling': {'rope_type': kind, **scaling} if scaling else None,
    'hidden_act': act,
  }
  if family.pattern:
    given |= {
      'hidden_activation': act,
      'query_pre_attn_scalar': int(cfg.query_scale or cfg.head_dim),
      'attn_logit_softcapping': cfg.attention_softcap,
      'final_logit_softcapping': cfg.logit_softcap,
    }
    if cfg.local_rope_theta is not None:
      given['rope_local_base_freq'] = cfg.local_rope_theta
  if family.pattern or cfg.local_layers:
    given |= {
      'sliding_window': cfg.window,
      'use_sliding_window': True,
      'layer_types': [
        'sliding_attention' if i in cfg.local_layers else 'full_attention'
        for i in range(cfg.layers)
      ],
    }
  return given
