"""RoPE in `config.json` of a HuggingFace directory <-> `schema.Model`.

    version 4   rope_theta, rope_scaling, rope_local_base_freq (Gemma 3)
    version 5   rope_parameters; of Gemma 3 one for each kind of layer

Where both are there, each key of version 4 precedes or fills in those of
version 5 as it does in transformers.
"""

from typing import Any

from posttrain import schema
from posttrain.util import foreign

_TYPES = {'default': 'none', 'linear': 'linear', 'llama3': 'llama3'}
_SCALING = {  # (our field, their key, whether it is an integer)
  'default': (),
  'linear': (('factor', 'factor', False),),
  'llama3': (
    ('factor', 'factor', False),
    ('original_length', 'original_max_position_embeddings', True),
    ('low_frequency', 'low_freq_factor', False),
    ('high_frequency', 'high_freq_factor', False),
  ),
}
_KINDS = ('full_attention', 'sliding_attention')
_THETA, _GEMMA3_THETA, _GEMMA3_LOCAL_THETA = 10_000.0, 1e6, 10_000.0


class Unsupported(Exception):
  """An unsupported key or value; the message names it."""


def read(c: dict[str, Any], two_bases: bool) -> dict[str, Any]:
  """Returns rope_theta, rope_scaling and local_rope_theta of `schema.Model`.

  Args:
    c: the config.
    two_bases: whether local layers have a base of their own (Gemma 3).

  Raises:
    Unsupported: names the key.
  """
  scaling, parameters = _node(c, 'rope_scaling'), _node(c, 'rope_parameters')
  if not two_bases:
    full = {'rope_theta': c.get('rope_theta', _THETA)}
    full |= _flat(scaling or parameters, 'rope_parameters')
    return {
      'rope_theta': as_float(full['rope_theta']),
      'rope_scaling': _scaling(full, c),
    }
  for key in parameters.keys() - set(_KINDS):
    raise Unsupported(
      f'rope_parameters must have keys of {_KINDS}: got {foreign.quote(key)}'
    )
  full, local = (
    _flat(_node(parameters, kind), f'rope_parameters.{kind}') for kind in _KINDS
  )
  full = {'rope_theta': c.get('rope_theta', _GEMMA3_THETA), **full, **scaling}
  theta = c.get('rope_local_base_freq', _GEMMA3_LOCAL_THETA)
  local = {'rope_theta': theta, **local}
  if _type(local) != 'default':
    raise Unsupported(
      f'RoPE of local layers must not be scaled: got {foreign.quote(local)}'
    )
  _check_whole(local)
  return {
    'rope_theta': as_float(full['rope_theta']),
    'rope_scaling': _scaling(full, c),
    'local_rope_theta': as_float(local['rope_theta']),
  }


def write(scaling: schema.RopeScaling) -> dict[str, Any] | None:
  """Returns `rope_scaling`, in the format of version 4."""
  kinds = {ours: theirs for theirs, ours in _TYPES.items()}
  kind = kinds[scaling.kind]
  values = {key: getattr(scaling, ours) for ours, key, _ in _SCALING[kind]}
  return {'rope_type': kind, **values} if values else None


def as_float(value: Any) -> Any:
  """Returns an integer as a float, anything else as it is."""
  return float(value) if type(value) is int and abs(value) < 2**53 else value


def _node(c: dict[str, Any], key: str) -> dict[str, Any]:
  """Returns an object in the config; {} if it is missing or null."""
  value = c.get(key)
  if not isinstance(value, dict | None):
    raise Unsupported(
      f'{key} must be an object or null: got {foreign.quote(value)}'
    )
  return value or {}


def _flat(node: dict[str, Any], name: str) -> dict[str, Any]:
  """Refuses an object with an object in it."""
  for key, value in node.items():
    if isinstance(value, dict):
      raise Unsupported(
        f'{name} must be the same for all layers of this model_type: got an '
        f'object at {foreign.quote(key)}'
      )
  return node


def _type(node: dict[str, Any]) -> Any:
  return node.get('rope_type', node.get('type', 'default'))


def _check_whole(node: dict[str, Any]) -> None:
  """Checks that all of a head is rotated."""
  part = node.get('partial_rotary_factor')
  if part not in (None, 1.0):
    raise Unsupported(
      f'partial_rotary_factor must be 1.0: got {foreign.quote(part)}'
    )


def _scaling(node: dict[str, Any], c: dict[str, Any]) -> schema.RopeScaling:
  kind = _type(node)
  if not isinstance(kind, str) or kind not in _TYPES:
    raise Unsupported(
      f'rope_type must be one of {tuple(_TYPES)}: got {foreign.quote(kind)}'
    )
  _check_whole(node)
  key = 'original_max_position_embeddings'
  if key in c:  # precedes the one beside the other numbers
    node = {**node, key: c[key]}
  values = {}
  for ours, theirs, is_int in _SCALING[kind]:
    if node.get(theirs) is None:
      raise Unsupported(f'{theirs} must be given: got none')
    value = node[theirs]
    whole = isinstance(value, float) and value.is_integer()
    values[ours] = int(value) if is_int and whole else value
    if not is_int:
      values[ours] = as_float(value)
  try:
    return schema.RopeScaling(kind=_TYPES[kind], **values)
  except schema.FieldError as error:
    keys = {ours: theirs for ours, theirs, _ in _SCALING[kind]}
    key = keys.get(error.field, error.field)
    raise Unsupported(f'rope_scaling.{key} {error.detail}') from error
