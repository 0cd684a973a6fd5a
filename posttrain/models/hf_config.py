"""`config.json` of a HuggingFace directory <-> `schema.Model`.

1. `read` reads the keys that change a model's function as transformers does,
   in the formats of its versions 4 and 5: a family's defaults, and none of the
   keys that the family does not read. It refuses values that our models do not
   support.
2. `write` builds the keys that transformers needs, and checks that `read`
   returns the same model from them.
"""

import dataclasses
import math
import operator
import pathlib
import typing
from typing import Any

from posttrain import schema
from posttrain.models import families
from posttrain.util import disk

_FIELDS = {x.name: x.default for x in dataclasses.fields(schema.Model)}
_TYPES = typing.get_type_hints(schema.Model)
_NODES = {'experts': schema.Experts, 'delta': schema.Delta}
for _name, _node in _NODES.items():
  for _x, _kind in typing.get_type_hints(_node).items():
    _FIELDS[f'{_name}.{_x}'] = getattr(_node, _x)
    _TYPES[f'{_name}.{_x}'] = _kind
_KINDS = ('full_attention', 'sliding_attention')
_MIXERS = ('full_attention', 'linear_attention')


def read(folder: str | pathlib.Path) -> schema.Model:
  """Returns the model that a directory's `config.json` describes.

  `dtype`, `remat`, `rope_length` and `attention`, which the file does not
  determine, have their defaults.

  Raises:
    ValueError: the file is missing or no JSON, the architecture is unknown, or
      a key is missing or has an unsupported value.
  """
  path, text = _load(folder)
  try:
    return _parse(text)
  except (TypeError, ValueError) as error:
    keys = {
      **families.KEYS,
      **families.FAMILIES.get(str(text.get('model_type')), _LLAMA).keys,
      'window': 'sliding_window',
      'local_rope_theta': 'rope_theta of local layers',
    }
    key = keys.get(getattr(error, 'field', ''))
    where = f'{path}: {key}' if key else path
    raise ValueError(f'{where}: {error}') from error


def family_of(folder: str | pathlib.Path) -> families.Family:
  """Returns the family of a directory that `read` reads."""
  return families.FAMILIES[_load(folder)[1]['model_type']]


def _load(folder: str | pathlib.Path) -> tuple[pathlib.Path, dict[str, Any]]:
  path = pathlib.Path(folder) / 'config.json'
  if not path.is_file():
    raise ValueError(f'{folder} must hold a config.json: got none')
  return path, disk.read_json_object(path)


def best_family(cfg: schema.Model) -> families.Family:
  """Returns the family as which a model is written, or the nearest one."""
  return min(
    _candidates(cfg), key=lambda x: len(x[0]), default=([], {}, _LLAMA)
  )[2]


_LLAMA = families.FAMILIES['llama']


def write(cfg: schema.Model) -> dict[str, Any]:
  """Returns the `config.json` of a model, with `vocab_size` resolved.

  It has the format of version 4 of transformers, which all tools read.

  Raises:
    ValueError: no architecture of HuggingFace's computes this model.
  """
  options = _candidates(cfg)
  if not options:
    names = sorted({x for f in families.FAMILIES.values() for x in f.fixed})
    raise ValueError(
      f'model must have the features of one of {[*families.FAMILIES]}: got '
      f'{ {x: operator.attrgetter(x)(cfg) for x in names} }'
    )
  wrong, text, family = min(options, key=lambda x: len(x[0]))
  if wrong:
    raise ValueError(
      f'model.{wrong[0]} must be one that a {family.architecture} of '
      f'transformers has: got {getattr(cfg, wrong[0])!r}'
    )
  return text


def _candidates(
  cfg: schema.Model,
) -> list[tuple[list[str], dict[str, Any], families.Family]]:
  """Returns (differing fields, config.json, family), by families.

  They are those with the fixed features of the model. A field differs if the
  model that is read from config.json has another value.
  """
  every, options = families.FAMILIES.items(), []
  names = {x for _, family in every for x in family.fixed}
  for name, family in every:
    own = _FIELDS | family.fixed
    if any(
      operator.attrgetter(x)(cfg) != own[x] for x in names - family.keys.keys()
    ):
      continue
    if cfg.rope_scaling.kind not in family.ropes.values():
      continue
    text = _text(name, family, cfg)
    try:
      wrong = differing(_parse(text), cfg)
    except ValueError:  # some options cannot be told to this family
      continue
    if not cfg.local_layers:  # nothing reads their base
      wrong = [x for x in wrong if x != 'local_rope_theta']
    if family.divides and cfg.embed_dim % cfg.heads:
      wrong.append('heads')
    options.append((wrong, text, family))
  return options


def _text(
  name: str, family: families.Family, cfg: schema.Model
) -> dict[str, Any]:
  """Returns a model's `config.json`, as far as a family has keys for it."""
  theirs = {ours: theirs for theirs, ours in families.ACTIVATIONS.items()}
  text: dict[str, Any] = {
    'architectures': [family.architecture],
    'model_type': name,
    'pad_token_id': None,  # some families have one above small vocabularies
    'hidden_act': theirs[cfg.activation],
  }
  for field, key in {**families.KEYS, **family.keys}.items():
    value = operator.attrgetter(field)(cfg)
    if key == 'query_pre_attn_scalar' and value is not None:
      value = int(value)
    text[key] = theirs[value] if field == 'activation' else value
  kind = cfg.rope_scaling.kind
  rope = {ours: theirs for theirs, ours in family.ropes.items()}[kind]
  scaling = {
    key: list(value) if isinstance(value, tuple) else value
    for field, key in families.SCALING[kind].items()
    if (value := getattr(cfg.rope_scaling, field)) is not None
  }
  # Some numbers are read from the top alone, or from below alone.
  if 'max_position_embeddings' in scaling:
    text['max_position_embeddings'] = scaling.pop('max_position_embeddings')
  elif kind == 'longrope':
    text[families.LENGTH] = scaling[families.LENGTH]
  if (key := 'llama_4_scaling_beta') in text:
    scaling[key] = text[key]
  text |= {
    'rope_theta': cfg.rope_theta,
    'rope_scaling': {'rope_type': rope, **scaling} if scaling else None,
  }
  theta_key = family.local_theta
  if isinstance(theta_key, str) and cfg.local_rope_theta is not None:
    text[theta_key] = cfg.local_rope_theta
  if kind == 'proportional':  # in the format of version 5 alone
    full = {'rope_type': rope, 'rope_theta': cfg.rope_theta, **scaling}
    full['partial_rotary_factor'] = cfg.partial_rotary
    local = {'rope_type': 'default', 'rope_theta': cfg.local_rope_theta}
    both = dict(zip(_KINDS, (full, local), strict=True))
    text |= {'rope_parameters': both}
    text['vocab_size_per_layer_input'] = cfg.vocab_size
    del text['rope_theta'], text['rope_scaling']
  if cfg.dense_layers:
    text['mlp_only_layers'] = [*cfg.dense_layers]
  if family.nope:
    nope = cfg.nope_layers
    text['no_rope_layers'] = [int(i not in nope) for i in range(cfg.layers)]
  used = cfg.local_layers or family.windows not in ('', 'upper', 'nope')
  if family.delta:
    mixers = [_MIXERS[i in cfg.delta_layers] for i in range(cfg.layers)]
    text['layer_types'] = mixers
  if family.windows == 'all':
    text['sliding_window'] = cfg.window
  elif used:
    text |= {
      # A Gemma wants one even if no layer uses it.
      'sliding_window': cfg.window or family.absent.get('sliding_window'),
      'use_sliding_window': True,
      'layer_types': [_KINDS[i in cfg.local_layers] for i in range(cfg.layers)],
    }
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
  """Returns the names of the fields that differ, but for `schema.UNSAVED`."""
  unread = schema.UNSAVED
  if a.experts.count and not a.dense_layers:
    unread = *unread, 'mlp_dim'
  return [
    x.name
    for x in dataclasses.fields(schema.Model)
    if x.name not in unread and getattr(a, x.name) != getattr(b, x.name)
  ]


def _parse(text: dict[str, Any]) -> schema.Model:
  name, architectures = text.get('model_type'), text.get('architectures')
  family = families.FAMILIES.get(str(name))
  if family is None or family.architecture not in (
    architectures or [family.architecture]
  ):
    raise ValueError(
      'model_type and architectures must be one of '
      f'{ {x: f.architecture for x, f in families.FAMILIES.items()} }: got '
      f'{name!r}, {architectures!r}'
    )
  tied = {x: text[x] for x in ('tie_word_embeddings',) if x in text}
  if family.nested:
    text = {**text, **text.get(family.nested, {}), **tied}
  text = {family.aliases.get(key, key): value for key, value in text.items()}
  c = {**families.ABSENT, **family.absent, **text}
  packing = c.get('quantization_config') or {}
  if family.alternates and packing.get('quant_method') == 'mxfp4':
    del c['quantization_config']  # `hf` unpacks it
  if 'global_head_dim' in c:
    if not c['attention_k_eq_v']:
      c['num_global_key_value_heads'] = None
    # Version 5 writes the sizes of each global layer, all alike; none = they
    # are those of other layers.
    each = c.pop('per_layer_config') or {} if 'per_layer_config' in c else None
    for sizes in () if each is None else ({}, *each.values()):
      c['global_head_dim'] = sizes.get('head_dim', c['head_dim'])
      c['num_global_key_value_heads'] = sizes.get('num_key_value_heads')
  rope, fields = _rope(family, c)
  c |= rope
  fields |= family.fixed
  keys = {**families.KEYS, **family.keys}
  if c.get('num_key_value_heads') is None:
    c['num_key_value_heads'] = c.get('num_attention_heads')
  if c.get('head_dim') is None and c.get('num_attention_heads'):
    c['head_dim'] = (c.get('hidden_size') or 0) // c['num_attention_heads']
  for key, value in {**families.PLAIN, **family.plain}.items():
    if key not in keys.values() and c.get(key) not in (None, value):
      raise ValueError(
        f'{key} of a {name} must be {value!r}, or absent: got {c[key]!r}'
      )
  for field, key in keys.items():
    value = c.get(key)
    if value is None and (_FIELDS[field] is not None or field == 'vocab_size'):
      raise ValueError(f'{key} must be given: got none')
    if field == 'activation':
      if value not in families.ACTIVATIONS:
        must = f'be one of {[*families.ACTIVATIONS]}'
        raise ValueError(f'{key} of a {name} must {must}: got {value!r}')
      value = families.ACTIVATIONS[value]
    fields[field] = _as(_TYPES[field], value)
  for name, node in _NODES.items():
    own = [x for x in fields if x.startswith(f'{name}.')]
    fields[name] = node(**{x.partition('.')[2]: fields.pop(x) for x in own})
  if 'decoder_sparse_step' in family.absent:
    fields['dense_layers'] = tuple(
      i
      for i in range(fields['layers'])
      if i in (c.get('mlp_only_layers') or ())
      or (i + 1) % c['decoder_sparse_step']
    )
  model = schema.Model(**fields)
  # The layers are counted by now: a list of them is short.
  nope = _nope_layers(c, model.layers) if family.nope else ()
  local = _local_layers(c, model.layers, family.windows, nope)
  window = c.get('sliding_window') if local else None
  return dataclasses.replace(
    model,
    nope_layers=nope,
    local_layers=local,
    window=window,
    delta_layers=_delta_layers(c, model.layers) if family.delta else (),
  )


def _delta_layers(c: dict[str, Any], layers: int) -> tuple[int, ...]:
  """Returns the indices of the layers with a gated DeltaNet."""
  kinds, every = c.get('layer_types'), c['full_attention_interval']
  if kinds is None:
    kinds = [_MIXERS[(i + 1) % every != 0] for i in range(layers)]
  if len(kinds) != layers or {*kinds} - {*_MIXERS}:
    raise ValueError(
      f'layer_types must be one of {_MIXERS} for each of {layers} layers: got '
      f'{kinds!r}'
    )
  return tuple(i for i, kind in enumerate(kinds) if kind == _MIXERS[True])


def _nope_layers(c: dict[str, Any], layers: int) -> tuple[int, ...]:
  """Returns the indices of the layers without RoPE."""
  rotates, every = c.get('no_rope_layers'), c['no_rope_layer_interval']
  if rotates is None:
    rotates = [(i + 1) % every for i in range(layers)]
  if len(rotates) != layers:
    raise ValueError(
      f'no_rope_layers must have {layers} entries: got {rotates!r}'
    )
  return tuple(i for i, rotated in enumerate(rotates) if not rotated)


def _rope(
  family: families.Family, c: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Returns the numbers of RoPE, and fields of `schema.Model` from them.

  Version 4 of transformers has rope_theta, rope_scaling and, for Gemma 3,
  rope_local_base_freq; version 5 rope_parameters, of Gemma 3 one for each kind
  of layer. Where both are there, each key of version 4 precedes or fills in
  those of version 5 as it does in transformers.
  """
  scaling = c.get('rope_scaling') or {}
  full, local = c.get('rope_parameters') or {}, {}
  theta = {'rope_theta': c.get('rope_theta', _FIELDS['rope_theta'])}
  if family.local_theta:
    unknown = full.keys() - {*_KINDS}
    full, local = (full.get(kind) or {} for kind in _KINDS)
    full = {**theta, **full, **scaling}
  else:
    full = {**theta, **(scaling or full)}
    unknown = {key for key, value in full.items() if isinstance(value, dict)}
  if unknown:
    raise ValueError(
      f'rope_parameters must be of {_KINDS if family.local_theta else "all"} '
      f'layers: got {unknown}'
    )
  fields = {
    'rope_theta': _as(float, full['rope_theta']),
    'rope_scaling': _scaling(family, full, c),
  }
  if theta := family.local_theta:
    theta = c[theta] if isinstance(theta, str) else theta
    local = {'rope_theta': theta, **local}
    fields['local_rope_theta'] = _as(float, local['rope_theta'])
    if _scaling(family, local, {}).kind != 'none':
      raise ValueError(f'RoPE of local layers must not be scaled: got {local}')
  return full, fields


def _scaling(
  family: families.Family, node: dict[str, Any], c: dict[str, Any]
) -> schema.RopeScaling:
  kind = node.get('rope_type', node.get('type', 'default'))
  if kind not in family.ropes:
    must = f'be one of {[*family.ropes]}'
    raise ValueError(f'rope_type must {must}: got {kind!r}')
  kind, length = family.ropes[kind], families.LENGTH
  # The one at the top precedes that beside the other numbers.
  node = {
    **node,
    **{x: c[x] for x in c.keys() & {length, 'max_position_embeddings'}},
  }
  if kind in ('yarn', 'longrope') and node.get('factor') is None:
    counts = node.get('max_position_embeddings'), node.get(length)
    node['factor'] = counts[0] / counts[1] if all(counts) else None
  mscales = [node.get(x) for x in ('mscale', 'mscale_all_dim')]
  if all(mscales) and node.get('attention_factor') is None:
    log = 0.1 * math.log(max(node.get('factor') or 1, 1))
    up, down = (log * x + 1 for x in mscales)
    node['attention_factor'] = up / down
  types, values = typing.get_type_hints(schema.RopeScaling), {}
  for field, key in families.SCALING[kind].items():
    if node.get(key) is not None:
      values[field] = _as(types[field], node[key])
    elif key not in families.OPTIONAL and kind != 'proportional':
      raise ValueError(f'{key} must be given: got none')
  try:
    return schema.RopeScaling(kind=kind, **values)
  except ValueError as error:
    raise ValueError(f'rope_scaling: {error}') from error


def _as(kind: Any, value: Any) -> Any:
  """Returns integers as floats, and lists as tuples, where a type is one."""
  if isinstance(value, list) and kind == tuple[float, ...]:
    return tuple(_as(float, x) for x in value)
  is_float = kind in (float, float | None)
  exact = type(value) is int and abs(value) < 2**53
  return float(value) if is_float and exact else value


def _local_layers(
  c: dict[str, Any], layers: int, windows: str | int, nope: tuple[int, ...]
) -> tuple[int, ...]:
  """Returns the indices of the layers with a window, by `Family.windows`."""
  kinds = c.get('layer_types')
  if not windows:
    return ()
  if windows == 'all':
    used = c.get('sliding_window') is not None
    if kinds is not None and {*kinds} != {_KINDS[used]}:
      must = f'be {_KINDS[used]} in all layers, by sliding_window'
      raise ValueError(f'layer_types must {must}: got {kinds!r}')
    return tuple(range(layers)) if used else ()
  used = windows not in ('upper', 'nope') or (
    c.get('use_sliding_window') and c.get('sliding_window') is not None
  )
  if kinds is not None:
    local = [kind == 'sliding_attention' for kind in kinds]
    is_known = len(kinds) == layers and not {*kinds} - {*_KINDS}
    if not is_known or (any(local) and not used):
      raise ValueError(
        f'layer_types must be one of {_KINDS} for each of {layers} layers, '
        'sliding_attention only with use_sliding_window and sliding_window: '
        f'got {kinds!r}'
      )
  elif windows == 'nope':
    local = [used and i in nope for i in range(layers)]
  elif windows == 'upper':
    local = [used and i >= c['max_window_layers'] for i in range(layers)]
  else:
    pattern = c[windows] if isinstance(windows, str) else windows
    if not pattern:
      raise ValueError(f'{windows} must be > 0: got {pattern!r}')
    local = [(i + 1) % pattern != 0 for i in range(layers)]
  if isinstance(windows, int) and windows < 0:
    local[-1] = False
  return tuple(i for i, is_local in enumerate(local) if is_local)
