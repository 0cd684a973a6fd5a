"""Hints about keys that a config does not have.

A hint is the first of these that there is: exactly this key below the node;
what the option of another library is here; exactly this key in the rest of the
config; a near spelling. Without any, the error lists the node's options, or the
stages, and never guesses.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

from ml_collections import config_dict

from posttrain import schema
from posttrain.config import aliases
from posttrain.config.aliases import row as rows
from posttrain.util import foreign, spelling

_SHOWN = 3  # keys in a hint
_LISTED = 400  # characters of a list of options
_LONGEST = 900  # characters of a hint
# Kind of a stage -> its nodes that nothing reads.
_UNREAD = {
  'tokens': ('loss.preference', 'loss.ranking', 'pairs'),
  'preference': ('loss.rl', 'loss.ref_kl', 'loss.ranking'),
  'ranking': ('loss.rl', 'loss.ref_kl', 'loss.preference'),
}
# Flags of other programs for what follows the name of a recipe here.
_AFTER_RECIPE = (
  *('model', 'data', 'dataset', 'train', 'train_data', 'train_file'),
  *('eval_data', 'rewards', 'reward', 'reward_fn'),
)
# Nodes whose keys are the user's names -> the noun of one.
_NAMED = {
  'envs': 'environment',
  'eval_options': 'option',
  'kwargs': 'argument',
  'options': 'option',
  'rewards': 'reward',
  'roles': 'role',
}
_NODES = ('envs', 'rewards', 'roles')  # those whose values are nodes


def unknown(
  config: config_dict.ConfigDict,
  path: str,
  name: str,
  known: Iterable[str],
  rest: str = '',
) -> str:
  """Returns the error of an unknown key, with a hint.

  Args:
    config: the whole config, to find keys in.
    path: dotted key of the node, such as 'config.sft.optim'.
    name: the key that the node lacks.
    known: the keys that it has.
    rest: the rest of a dotted key after `name`, '' = none.
  """
  known = sorted(x for x in known if not x.startswith('_'))
  stages = _stages(config)
  parents = path.split('.')[1:]
  scope = stages if parents[:1] == [] else _only(stages, parents[0])
  place = _Place(config, path, name, scope or stages)
  noun, hint = _hint(place, known, rest)
  if hint is None:
    hint = _names(stages) if noun == 'stage' else _options(path, known, stages)
  elif not parents:
    names = _names(stages)
    hint += f' T{names[1:]}' if hint.endswith('?') else f'; {names}'
  hint = foreign.text(hint, _LONGEST)
  return f'{path} has no {noun} {foreign.quote(name)}: {hint}'


def flag(name: str) -> str:
  """Returns what an unknown flag is in a config, or ''.

  Args:
    name: the flag without dashes. The names of stages and environments are not
      known, so they are STAGE and ENV in the hint.
  """
  if name in _AFTER_RECIPE:
    return (
      "model, data and rewards follow the recipe's name, as in "
      '--config=grpo:DIR,data.jsonl,module:function'
    )
  entries = aliases.by_name().get(name, [])
  found = [
    _sentence(name, library, row, _flag_key(row))
    for library, row in entries
    if library == entries[0][0]
  ]
  if not found and (key := _only_key(name)):
    found = [f'did you mean --config.{key}?']
  hint = ', and '.join(found)
  return hint + (' (STAGE: such as sft or grpo)' if 'STAGE' in hint else '')


def _only_key(name: str) -> str | None:
  """Returns the shared key of a name, or the only one of a stage, if any."""
  stage = schema.Stage(envs={'ENV': schema.EnvEntry()})
  options = dataclasses.asdict(schema.Run(stages={'STAGE': stage}))
  options |= options.pop('stages')
  keys = _flat(config_dict.ConfigDict(options))
  nodes = {x.rpartition('.')[0] for x in keys}
  keys = [x for x in keys if x not in nodes]
  if name in keys:
    return name
  # Options of an environment's tasks depend on its type.
  stage_keys = [x for x in keys if x[:6] == 'STAGE.' and '.env.' not in x]
  found = [x for x in stage_keys if x.endswith(f'.{name}')]
  return found[0] if len(found) == 1 else None


def _flag_key(row: rows.Row) -> str:
  """Returns our key of a row, with the kinds of stages that read it."""
  if row.key.startswith('--'):
    return row.key
  kinds = ', '.join(row.kinds)
  where = '' if row.kinds == schema.KINDS else f' (kind of stage: {kinds})'
  return f'--config.{row.key}{where}'


def _hint(
  place: '_Place', known: list[str], rest: str
) -> tuple[str, str | None]:
  """Returns what the key would name, and a hint if there is one."""
  parents, name = place.path.split('.')[1:], place.wrong
  key = '.'.join(filter(None, [name, rest]))
  alias = _alias('.'.join([*parents, key]), place)
  if parents[-1:] and parents[-1] in _NAMED:
    return _NAMED[parents[-1]], _near(place, name, known, rest)
  if not parents and not alias and _names_stage(rest, place.stages):
    return 'stage', _near(place, name, known, rest)
  return 'option', (
    _below(place, key)
    or alias
    or _elsewhere(place, key)
    or _near(place, name, known, rest)
    or (_elsewhere_end(place, rest) if rest else None)
    or _near_elsewhere(place, rest or name)
  )


@dataclasses.dataclass(frozen=True)
class _Place:
  """The node that lacks a key."""

  config: config_dict.ConfigDict
  path: str  # dotted key of the node
  wrong: str  # the key, which a JSON object may have put there
  stages: Mapping[str, Any]  # of the node; of the config at its root

  @functools.cached_property
  def keys(self) -> list[str]:
    """Dotted keys of all nodes and options that something reads."""
    keys = [f'config.{x}' for x in _flat(self.config)]
    unread = [f'{self.path}.{self.wrong}.']
    stages = _stages(self.config)
    for name, stage in stages.items():
      unread += [f'config.{name}.{x}.' for x in _UNREAD.get(_kind(stage), ())]
    order = {name: i for i, name in enumerate(stages)}
    read = [x for x in keys if not f'{x}.'.startswith(tuple(unread))]
    return sorted(read, key=lambda x: order.get(x.split('.')[1], -1))

  @property
  def within(self) -> list[str]:
    """The starts of the keys in the node, in its stage, and of all keys."""
    stage = [f'config.{x}.' for x in self.stages if len(self.stages) == 1]
    return [f'{self.path}.', *stage, '']


def _names_stage(rest: str, stages: Mapping[str, Any]) -> bool:
  """Returns whether the key before `rest` is meant as a stage's name."""
  first = rest.partition('.')[0]
  return any(first in stage for stage in stages.values())


def _names(stages: Mapping[str, Any]) -> str:
  return f'the stage{"s are" if len(stages) > 1 else " is"} {", ".join(stages)}'


def _only(stages: Mapping[str, Any], name: str) -> dict[str, Any]:
  return {name: stages[name]} if name in stages else {}


def _stages(config: config_dict.ConfigDict) -> dict[str, Any]:
  """Returns the nodes of the stages by name."""
  names = config.get('stages') or ()
  return {
    name: config[name]
    for name in names
    if isinstance(name, str) and _is_node(config.get(name))
  }


def _is_node(value: Any) -> bool:
  return isinstance(value, config_dict.ConfigDict)


def _alias(dotted: str, place: _Place) -> str | None:
  """Returns what another library's name is here, None if it is no such name."""
  parts = dotted.split('.')
  kinds = {_kind(stage) for stage in place.stages.values()}
  for i in range(len(parts)):
    name = '.'.join(parts[i:])
    named: dict[str, str] = {}  # our key -> the sentence, of the first library
    for library, row in aliases.by_name().get(name, []):
      if kinds & set(row.kinds) and row.key not in named:
        named[row.key] = _sentence(name, library, row, _keys(row, place))
    if named:
      return ', and '.join(named.values())
    if entries := aliases.by_name().get(name):
      others = sorted({kind for _, row in entries for kind in row.kinds})
      return (
        f'{_owner(name, entries[0][0])} has a counterpart only in stages of '
        f'kind {" or ".join(map(repr, others))}'
      )
  return None


def _sentence(name: str, library: str, row: rows.Row, key: str) -> str:
  """Returns `TRL's learning_rate is config.sft.optim.lr`."""
  owner = _owner(name, library)
  if not row.equal:
    return f'{owner} has no counterpart: {row.note.replace("{}", key)}'
  return f'{owner} is {key}' + (f'; {row.note}' if row.note else '')


def _owner(name: str, library: str) -> str:
  is_common = library == rows.LIBRARIES['others']
  return (
    f'{name}, as in other libraries,' if is_common else f"{library}'s {name}"
  )


def _keys(row: rows.Row, place: _Place) -> str:
  """Returns our keys of a row in the stages of a place."""
  if not row.key.startswith('STAGE.'):
    return row.key if row.key.startswith('--') else f'config.{row.key}'
  keys = []
  for name, stage in place.stages.items():
    if _kind(stage) in row.kinds:
      key = row.key.replace('STAGE', f'config.{name}')
      envs = list(stage.get('envs') or ()) if 'ENV' in key else []
      keys += [key.replace('ENV', env) for env in envs or ['ENV']]
  parts = place.path.split('.')
  if len(parts) > 3 and parts[2] == 'envs':  # the environment of the place
    keys = [x for x in keys if x.startswith(f'{".".join(parts[:4])}.')] or keys
  existing = [x for x in keys if x.partition('.NAME')[0] in place.keys]
  keys = existing or keys
  return ' or '.join(keys) if len(keys) <= _SHOWN else f'config.{row.key}'


def _below(place: _Place, key: str) -> str | None:
  """Returns the places of the key below a node that is smaller than a stage."""
  if place.path.count('.') < 2 or key == 'type':  # a type replaces its node
    return None
  inside = [x for x in place.keys if x.startswith(f'{place.path}.')]
  named = [x for x in inside if x.endswith(f'.{key}')]
  return _did_you_mean(named) if named else None


def _elsewhere(place: _Place, key: str) -> str | None:
  """Returns the nearest places that have exactly the key."""
  for start in place.within:
    named = [x for x in place.keys if f'{x}.'.startswith(start)]
    if named := [x for x in named if x.endswith(f'.{key}')]:
      return _did_you_mean(named)
  return None


def _elsewhere_end(place: _Place, key: str) -> str | None:
  """Returns the places that have the key, or the longest end of it."""
  parts = key.split('.')
  ends = ('.'.join(parts[i:]) for i in range(len(parts)))
  return next(filter(None, (_elsewhere(place, end) for end in ends)), None)


def _near(
  place: _Place, name: str, known: Iterable[str], rest: str
) -> str | None:
  """Returns the near spellings in the node."""
  keys = [f'{place.path}.{x}' for x in spelling.near(name, known)]
  whole = [f'{x}.{rest}' for x in keys if rest]
  whole = [x for x in whole if x in place.keys]
  return _did_you_mean(whole or keys) if keys else None


def _near_elsewhere(place: _Place, key: str) -> str | None:
  """Returns near spellings in the stage, or among other libraries' names."""
  name = key.rpartition('.')[2]
  inside = tuple(f'config.{x}.' for x in place.stages)
  keys = [x for x in place.keys if x.startswith(inside)]
  if near := spelling.near(name, {x.rpartition('.')[2] for x in keys}):
    ends = tuple(f'.{x}' for x in near)
    return _did_you_mean([x for x in keys if x.endswith(ends)])
  if near := spelling.near(name, aliases.by_name()):
    hint = _alias(near[0], place)
    return hint and f'did you mean {near[0]}? {hint}'
  return None


def _did_you_mean(keys: list[str]) -> str:
  rest = len(keys) - _SHOWN
  more = f', or {rest} more' if rest > 0 else ''
  return f'did you mean {" or ".join(keys[:_SHOWN])}{more}?'


def _options(path: str, known: list[str], stages: Mapping[str, Any]) -> str:
  """Returns the list of the keys that a node has."""
  if path == 'config':
    shared = [x for x in known if x not in stages]
    return f'{_names(stages)}, the shared options are {_list(shared)}'
  last = path.rpartition('.')[2]
  key = path.removeprefix('config.')
  if not known:
    value = _value(last)
    return f"it has none yet: --config.{key}='{value}' sets it"
  if last in _NAMED:
    return (
      f'it has {_list(known)}; a JSON object replaces them all, as in '
      f"--config.{key}='{_value(last)}'"
    )
  return f'its options are {_list(known)}'


def _value(last: str) -> str:
  """Returns how the value of a node is written."""
  named = '{"NAME": {...}}' if last in _NODES else '{"NAME": ...}'
  return named if last in _NAMED else '{...}'


def _list(names: list[str]) -> str:
  """Returns names with commas, shortened."""
  shown = names
  while len(', '.join(shown)) > _LISTED:
    shown = shown[:-1]
  more = len(names) - len(shown)
  return ', '.join(shown) + (f' and {more} more' if more else '')


def _flat(node: config_dict.ConfigDict) -> list[str]:
  keys = []
  for key, value in node.items():
    keys.append(key)
    if _is_node(value):
      keys += [f'{key}.{x}' for x in _flat(value)]
  return keys


def _kind(stage: Any) -> str:
  return stage.get('kind', 'tokens')
