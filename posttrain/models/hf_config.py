"""`config.json` of a HuggingFace directory <-> `schema.Model`.

1. `read` reads the keys that change a model's function as transformers does,
   in the formats of its versions 4 and 5: a family's defaults, and none of the
   keys that the family does not read. It refuses values that our models do not
   support.
2. `write` builds the keys that transformers needs, and checks that `read`
   returns the same model from them.
"""

import dataclasses
import pathlib
from typing import Any

from posttrain import schema
from posttrain.util import disk

# Fields that do not change a model's function.
_OURS = ('dtype', 'remat', 'attention')


@dataclasses.dataclass(frozen=True)
class _Family:
  """The settings that a `model_type` implies."""

  architecture: str
  fixed: dict[str, Any]  # fields of schema.Model
  absent: dict[str, Any]  # values of missing keys
  windows: str  # how keys name the local layers: see `_local_layers`
  divides: bool = True  # transformers wants heads to divide hidden_size

  @property
  def is_gemma(self) -> bool:
    return 'norm_offset' in self.fixed


_GEMMA = {
  'norm_offset': True,
  'post_norms': True,
  'scale_embeddings': True,
  'activation': 'gelu',
}
_QWEN_ABSENT = {
  'num_key_value_heads': 32,
  'sliding_window': 4096,
  'max_window_layers': 28,
}
_GEMMA_ABSENT = {
  'num_key_value_heads': 4,
  'head_dim': 256,
  'query_pre_attn_scalar': 256,
  'sliding_window': 4096,
  'tie_word_embeddings': True,
  'hidden_activation': 'gelu_pytorch_tanh',
}
_FAMILIES = {
  'llama': _Family('LlamaForCausalLM', {}, {}, 'none'),
  'qwen2': _Family(
    'Qwen2ForCausalLM', {'qkv_bias': True}, _QWEN_ABSENT, 'upper', divides=False
  ),
  'qwen3': _Family(
    'Qwen3ForCausalLM',
    {'qk_norm': True},
    {**_QWEN_ABSENT, 'head_dim': 128},
    'upper',
    divides=False,
  ),
  'gemma2': _Family(
    'Gemma2ForCausalLM',
    _GEMMA,
    {
      **_GEMMA_ABSENT,
      'attn_logit_softcapping': 50.0,
      'final_logit_softcapping': 30.0,
    },
    'alternate',
  ),
  'gemma3_text': _Family(
    'Gemma3ForCausalLM',
    {**_GEMMA, 'qk_norm': True},
    {**_GEMMA_ABSENT, 'sliding_window_pattern': 6},
    'pattern',
  ),
}
_ACTIVATIONS = {'silu': 'silu', 'gelu_pytorch_tanh': 'gelu'}
# Keys of which only one value is supported.
_PLAIN = {
  'attention_bias': False,
  'mlp_bias': False,
  'use_bidirectional_attention': False,
  'quantization_config': None,
  'partial_rotary_factor': 1.0,
  'is_causal': True,
  'per_layer_config': None,
  'transformers_weights': None,
}
_ROPES = {'default': 'none', 'linear': 'linear', 'llama3': 'llama3'}
_SCALING = {  # (our field, their key, its type)
  'default': (),
  'linear': (('factor', 'factor', float),),
  'llama3': (
    ('factor', 'factor', float),
    ('original_length', 'original_max_position_embeddings', int),
    ('low_frequency', 'low_freq_factor', float),
    ('high_frequency', 'high_freq_factor', float),
  ),
}
_KINDS = ('full_attention', 'sliding_attention')
_THETA, _GEMMA3_THETA, _GEMMA3_LOCAL_THETA = 10_000.0, 1e6, 10_000.0


# Our fields, by the keys from which they are read.
_KEYS = {
  'layers': 'num_hidden_layers',
  'embed_dim': 'hidden_size',
  'heads': 'num_attention_heads',
  'kv_heads': 'num_key_value_heads',
  'mlp_dim': 'intermediate_size',
  'norm_eps': 'rms_norm_eps',
  'tied_head': 'tie_word_embeddings',
  'window': 'sliding_window',
  'query_scale': 'query_pre_attn_scalar',
  'attention_softcap': 'attn_logit_softcapping',
  'logit_softcap': 'final_logit_softcapping',
  'local_rope_theta': 'rope_theta of local layers',
}


def read(folder: str | pathlib.Path) -> schema.Model:
  """Returns the model that a directory's `config.json` describes.

  `dtype`, `remat` and `attention`, which the file does not determine, have
  their defaults.

  Raises:
    ValueError: the file is missing or no JSON, the architecture is unknown, or
      a key is missing or has an unsupported value.
  """
  path = pathlib.Path(folder) / 'config.json'
  if not path.is_file():
    raise ValueError(f'{folder} must hold a config.json: got none')
  text = disk.read_json_object(path)
  try:
    return _parse(text)
  except (TypeError, ValueError) as error:
    key = _KEYS.get(getattr(error, 'field', ''))
    where = f'{path}: {key}' if key else path
    raise ValueError(f'{where}: {error}') from error


def write(cfg: schema.Model) -> dict[str, Any]:
  """Returns the `config.json` of a model, with `vocab_size` resolved.

  It has the format of version 4 of transformers, which all tools read.

  Raises:
    ValueError: no architecture of HuggingFace's computes this model.
  """
  # The family with the model's features.
  features = {
    name: getattr(cfg, name)
    for name in {key for f in _FAMILIES.values() for key in f.fixed}
  }
  off = {**dict.fromkeys(features, False), 'activation': 'silu'}
  name = next(
    (x for x, f in _FAMILIES.items() if off | f.fixed == features), ''
  )
  if not name:
    raise ValueError(
      f'model must have the features of one of {[*_FAMILIES]}: got {features}'
    )
  family = _FAMILIES[name]
  activation = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}[
    cfg.activation
  ]
  rope = {ours: theirs for theirs, ours in _ROPES.items()}[
    cfg.rope_scaling.kind
  ]
  scaling = {
    key: getattr(cfg.rope_scaling, ours) for ours, key, _ in _SCALING[rope]
  }
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
    'rope_scaling': {'rope_type': rope, **scaling} if scaling else None,
    'hidden_act': activation,
  }
  if family.is_gemma:
    text |= {
      'hidden_activation': activation,
      'query_pre_attn_scalar': int(cfg.query_scale or cfg.head_dim),
      'attn_logit_softcapping': cfg.attention_softcap,
      'final_logit_softcapping': cfg.logit_softcap,
    }
    if cfg.local_rope_theta is not None:
      text['rope_local_base_freq'] = cfg.local_rope_theta
  if family.is_gemma or cfg.local_layers:
    text |= {
      # Of a Gemma, transformers wants one even if no layer uses it.
      'sliding_window': cfg.window or family.absent.get('sliding_window'),
      'use_sliding_window': True,
      'layer_types': [_KINDS[i in cfg.local_layers] for i in range(cfg.layers)],
    }
  # The model that is read from it must be the same.
  parsed = _parse(text)
  wrong = differing(parsed, cfg)
  if not cfg.local_layers:  # nothing reads their base
    wrong = [field for field in wrong if field != 'local_rope_theta']
  if family.divides and cfg.embed_dim % cfg.heads:
    wrong.append('heads')
  if wrong:
    raise ValueError(
      f'model.{wrong[0]} must be one that a {family.architecture} of '
      f'transformers has: got {getattr(cfg, wrong[0])!r}'
    )
  return text


def check_same(theirs: schema.Model, ours: schema.Model, what: str) -> None:
  """Raises ValueError unless two models compute the same; names a field.

  Args:
    theirs: the options of given weights.
    ours: the options of the config.
    what: the beginning of the message.
  """
  for field in differing(theirs, ours):
    raise ValueError(
      f'{what}: its {field} is {getattr(theirs, field)!r}, and '
      f'config.model.{field} is {getattr(ours, field)!r}'
    )


def differing(a: schema.Model, b: schema.Model) -> list[str]:
  """Returns the names of the fields that differ, except those of `_OURS`."""
  names = [field.name for field in dataclasses.fields(schema.Model)]
  return [
    name
    for name in names
    if name not in _OURS and getattr(a, name) != getattr(b, name)
  ]


def _parse(text: dict[str, Any]) -> schema.Model:
  name, architectures = text.get('model_type'), text.get('architectures')
  family = _FAMILIES.get(str(name))
  if family is None or family.architecture not in (
    architectures or [family.architecture]
  ):
    raise ValueError(
      'model_type and architectures must be one of '
      f'{ {x: f.architecture for x, f in _FAMILIES.items()} }: got '
      f'{name!r}, {architectures!r}'
    )
  activation = 'hidden_activation' if family.is_gemma else 'hidden_act'
  c = {**family.absent, **text}
  required = ('vocab_size', 'num_hidden_layers', 'hidden_size', activation)
  required += ('num_attention_heads', 'intermediate_size', 'rms_norm_eps')
  for key in required:
    if c.get(key) is None:
      raise ValueError(f'{key} must be given: got none')
  expected = family.fixed.get('activation', 'silu')
  expected = {k for k, ours in _ACTIVATIONS.items() if ours == expected}
  plain = {**{k: (None, x) for k, x in _PLAIN.items()}, activation: expected}
  for key, values in plain.items():
    if c.get(key) not in values:
      raise ValueError(
        f'{key} of a {name} must be one of {values}: got {c[key]!r}'
      )
  heads, width = c['num_attention_heads'], c['hidden_size']
  kv_heads, head_dim = c.get('num_key_value_heads'), c.get('head_dim')
  scores = {}
  if family.is_gemma:
    scores = {
      'query_scale': _as_float(c['query_pre_attn_scalar']),
      # Gemma 3 has the key as well, but transformers does not read it there.
      'attention_softcap': c['attn_logit_softcapping']
      if family.windows == 'alternate'
      else None,
      'logit_softcap': c.get('final_logit_softcapping'),
    }
  model = schema.Model(
    vocab_size=c['vocab_size'],
    layers=c['num_hidden_layers'],
    embed_dim=width,
    heads=heads,
    kv_heads=heads if kv_heads is None else kv_heads,
    head_dim=width // max(heads, 1) if head_dim is None else head_dim,
    mlp_dim=c['intermediate_size'],
    norm_eps=c['rms_norm_eps'],
    tied_head=c.get('tie_word_embeddings', False),
    **scores,
    **_rope(c, two_bases=family.windows == 'pattern'),
    **family.fixed,
  )
  # The layers are counted by now: a list of them is short.
  local = _local_layers(c, model.layers, family.windows)
  window = c.get('sliding_window') if local else None
  return dataclasses.replace(model, local_layers=local, window=window)


def _rope(c: dict[str, Any], two_bases: bool) -> dict[str, Any]:
  """Returns rope_theta, rope_scaling and local_rope_theta of `schema.Model`.

  Version 4 of transformers has rope_theta, rope_scaling and, for Gemma 3,
  rope_local_base_freq; version 5 rope_parameters, of Gemma 3 one for each kind
  of layer. Where both are there, each key of version 4 precedes or fills in
  those of version 5 as it does in transformers.

  Args:
    c: the config.
    two_bases: whether local layers have a base of their own (Gemma 3).
  """
  scaling = c.get('rope_scaling') or {}
  full, local = c.get('rope_parameters') or {}, {}
  if two_bases:
    unknown = full.keys() - {*_KINDS}
    full, local = (full.get(kind) or {} for kind in _KINDS)
    theta = c.get('rope_theta', _GEMMA3_THETA)
    full = {'rope_theta': theta, **full, **scaling}
  else:
    theta = c.get('rope_theta', _THETA)
    full = {'rope_theta': theta, **(scaling or full)}
    unknown = {key for key, value in full.items() if isinstance(value, dict)}
  if unknown:
    raise ValueError(
      f'rope_parameters must be of {_KINDS if two_bases else "all"} layers: '
      f'got {unknown}'
    )
  fields = {
    'rope_theta': _as_float(full['rope_theta']),
    'rope_scaling': _scaling(full, c),
  }
  if two_bases:
    theta = c.get('rope_local_base_freq', _GEMMA3_LOCAL_THETA)
    local = {'rope_theta': theta, **local}
    fields['local_rope_theta'] = _as_float(local['rope_theta'])
    if _scaling(local, {}).kind != 'none':
      raise ValueError(f'RoPE of local layers must not be scaled: got {local}')
  return fields


def _scaling(node: dict[str, Any], c: dict[str, Any]) -> schema.RopeScaling:
  kind = node.get('rope_type', node.get('type', 'default'))
  if kind not in _ROPES:
    raise ValueError(f'rope_type must be one of {tuple(_ROPES)}: got {kind!r}')
  if node.get('partial_rotary_factor') not in (None, 1.0):
    got = node['partial_rotary_factor']
    raise ValueError(f'partial_rotary_factor must be 1.0: got {got!r}')
  key = 'original_max_position_embeddings'
  if key in c:  # precedes the one beside the other numbers
    node = {**node, key: c[key]}
  values = {}
  for ours, theirs, kind_of in _SCALING[kind]:
    if node.get(theirs) is None:
      raise ValueError(f'{theirs} must be given: got none')
    values[ours] = kind_of(node[theirs])
  try:
    return schema.RopeScaling(kind=_ROPES[kind], **values)
  except ValueError as error:
    raise ValueError(f'rope_scaling: {error}') from error


def _as_float(value: Any) -> Any:
  """Returns an integer as a float, anything else as it is."""
  return float(value) if type(value) is int and abs(value) < 2**53 else value


def _local_layers(c, layers: int, windows: str) -> tuple[int, ...]:
  """Returns the indices of the layers with a sliding window.

  Args:
    c: the config.
    layers: their number.
    windows: 'none': there are none, whatever the keys; 'upper': those from
      `max_window_layers` on, if `use_sliding_window`; 'alternate': every
      second one is not local; 'pattern': every `sliding_window_pattern`-th one
      is not local. A list in `layer_types` precedes the last three.
  """
  if windows == 'none':
    return ()
  used = windows != 'upper' or (
    c.get('use_sliding_window') and c['sliding_window'] is not None
  )
  kinds = c.get('layer_types')
  if kinds is not None:
    local = [kind == 'sliding_attention' for kind in kinds]
    is_known = len(kinds) == layers and not {*kinds} - {*_KINDS}
    if not is_known or (any(local) and not used):
      raise ValueError(
        f'layer_types must be one of {_KINDS} for each of {layers} layers, '
        'sliding_attention only with use_sliding_window and sliding_window: '
        f'got {kinds!r}'
      )
  elif windows == 'upper':
    local = [used and i >= c['max_window_layers'] for i in range(layers)]
  else:
    pattern = c['sliding_window_pattern'] if windows == 'pattern' else 2
    if not pattern:
      raise ValueError(f'sliding_window_pattern must be > 0: got {pattern!r}')
    local = [(i + 1) % pattern != 0 for i in range(layers)]
  return tuple(i for i, is_local in enumerate(local) if is_local)
