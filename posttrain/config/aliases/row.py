"""One row of the table of other libraries' names, and how rows are written."""

import dataclasses
from collections.abc import Mapping

from posttrain import schema

PAIRS = ('preference', 'ranking')
# Argument of `equal` and `none` -> the library; `others`: names in common use.
LIBRARIES = {
  'trl': 'TRL',
  'verl': 'verl',
  'prime': 'prime-rl',
  'tunix': 'Tunix',
  'maxtext': 'MaxText',
  'others': 'other libraries',
}


@dataclasses.dataclass(frozen=True)
class Row:
  """One option of ours, and what other libraries call it.

  Fields:
    key: dotted key; STAGE, ENV and NAME stand for those of the config. A flag
      begins with --.
    names: library -> its names, with spaces between them. A name with a dot
      also matches after further nodes (`actor_rollout_ref.rollout.n`).
    note: how ours differs, '' = not at all.
    equal: whether ours has the same purpose; else there is no such option, and
      the note, in which {} is our key, says how that need is met.
    kinds: the kinds of stages that read it.
  """

  key: str
  names: Mapping[str, str]
  note: str = ''
  equal: bool = True
  kinds: tuple[str, ...] = schema.KINDS


def equal(key: str, note: str = '', /, **names: str) -> Row:
  """Returns the row of names whose purpose is that of our key."""
  return Row(key, {LIBRARIES[k]: x for k, x in names.items()}, note)


def none(key: str, note: str, /, **names: str) -> Row:
  """Returns the row of names of options that do not exist here."""
  return dataclasses.replace(equal(key, note, **names), equal=False)


def of(kinds: tuple[str, ...], *rows: Row) -> tuple[Row, ...]:
  """Returns rows for stages of some kinds."""
  return tuple(dataclasses.replace(row, kinds=kinds) for row in rows)
