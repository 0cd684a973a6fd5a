"""Token ids of a conversation, with role and content per token.

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
  sampled: np.ndarray  # bool, tokens sampled by the policy, or demonstrated
  messages: np.ndarray  # i32, index of the message; -1 = sampled, or a header
  text: str = ''  # the text of the ids, without a completion at the end
  # Whether the last assistant turn is not closed: the ids end in a generation
  # prompt, or in a completion after one.
  open: bool = False

  def __len__(self) -> int:
    return len(self.ids)

  @property
  def ends_in_completion(self) -> bool:
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
  """Concatenates pieces; `text` and `open` are those of the result."""
  return Rendered(
    *(
      np.concatenate([getattr(piece, field) for piece in pieces])
      for field in ('ids', 'roles', 'is_content', 'sampled', 'messages')
    ),
    text,
    open,
  )


def from_pieces(
  pieces: Sequence[layout.Piece], ids: Sequence[Sequence[int]]
) -> Rendered:
  """Builds the arrays of pieces, from the token ids of each; without text."""
  lengths = [len(piece_ids) for piece_ids in ids]

  # One array for all: a turn has many pieces of a few tokens each.
  def spread(values, kind) -> np.ndarray:
    return np.repeat(np.array(list(values), kind), lengths)

  return Rendered(
    ids=np.array([i for piece_ids in ids for i in piece_ids], np.int32),
    roles=spread((types.ROLES.index(p.role) for p in pieces), np.int8),
    is_content=spread((p.is_content for p in pieces), bool),
    sampled=spread((p.sampled for p in pieces), bool),
    messages=spread((p.message for p in pieces), np.int32),
  )
