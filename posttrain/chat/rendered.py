"""Token ids of a conversation, with whose each of them is.

Axes: T tokens.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from posttrain import types
from posttrain.chat import layout


@dataclasses.dataclass(frozen=True)
class Rendered:
  """Token ids of a conversation; every array is [T]."""

  ids: np.ndarray  # i32
  roles: np.ndarray  # i8, index into types.ROLES
  is_content: np.ndarray  # bool, False on template scaffold
  sampled: np.ndarray  # bool, what the policy sampled, or is to imitate
  messages: np.ndarray  # i32, of which message; -1 = sampled, or a header
  text: str = ''  # what the ids stand for, but those that were sampled last
  # The last assistant turn is not closed: a generation prompt comes last, or
  # sampled ids follow it.
  open: bool = False

  def __len__(self) -> int:
    return len(self.ids)

  @property
  def spoken(self) -> bool:
    """Whether sampled ids follow the generation prompt."""
    return self.open and len(self) > 0 and bool(self.sampled[-1])


EMPTY = Rendered(
  np.zeros(0, np.int32),
  np.zeros(0, np.int8),
  np.zeros(0, bool),
  np.zeros(0, bool),
  np.zeros(0, np.int32),
)


def join(pieces: Sequence[Rendered], text: str, *, open: bool) -> Rendered:
  """One behind the other; `text` and `open` are those of the whole."""
  return Rendered(
    *(
      np.concatenate([getattr(piece, field) for piece in pieces])
      for field in ('ids', 'roles', 'is_content', 'sampled', 'messages')
    ),
    text,
    open,
  )


def lay(
  pieces: Sequence[layout.Piece], ids: Sequence[Sequence[int]]
) -> Rendered:
  """Lays out pieces, each with its token ids; without their text."""
  lengths = [len(some) for some in ids]

  # All at once: a turn has many pieces, of a few tokens each.
  def spread(values, kind) -> np.ndarray:
    return np.repeat(np.array(list(values), kind), lengths)

  return Rendered(
    ids=np.array([i for some in ids for i in some], np.int32),
    roles=spread((types.ROLES.index(p.role) for p in pieces), np.int8),
    is_content=spread((p.is_content for p in pieces), bool),
    sampled=spread((p.sampled for p in pieces), bool),
    messages=spread((p.message for p in pieces), np.int32),
  )
