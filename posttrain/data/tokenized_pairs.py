"""Pairs as tokens: what `choice_pipeline` draws from and packs.

    data.pairs -> `lay_out` -> types.Pair

Each answer is rendered behind its prompt. KTO also compares with `mismatched`
answers: those to other prompts.
"""

import dataclasses
import logging
from collections.abc import Iterator, Sequence

import numpy as np

from posttrain import types
from posttrain.chat import renderer as chat
from posttrain.data import pair_packing, preferences, sources


@dataclasses.dataclass(frozen=True)
class TokenizedPairs:
  """Choices, and for each the mismatched answer that KTO compares with.

  `others` is empty where the loss compares with none. An answer that does not
  fit into a row behind another's prompt is None.
  """

  choices: tuple[types.Pair, ...]
  others: tuple[types.Pair | None, ...] = ()

  @property
  def samples(self) -> list[types.Sample]:
    """All answers, in a fixed order."""
    return [
      answer
      for choice in (*self.choices, *self.others)
      if choice is not None
      for answer in (choice.chosen, choice.rejected)
      if answer is not None
    ]

  @property
  def fingerprint(self) -> str:
    """A hash of all that they are but what a reference says of them."""
    return sources.fingerprint(
      *(
        part
        for choice in (*self.choices, *self.others)
        if choice is not None
        for part in (
          np.float64(choice.margin).tobytes(),
          *(
            part
            for answer in (choice.chosen, choice.rejected)
            for part in _bytes(answer)
          ),
        )
      )
    )


def lay_out(
  pairs: Sequence[preferences.Preference],
  renderer: chat.Renderer,
  row_tokens: int,
  too_long: str,
) -> tuple[types.Pair, ...]:
  """Renders pairs as choices that nobody has scored yet.

  Args:
    pairs: of a file.
    renderer: of their messages.
    row_tokens: what a choice may take of a row, prompts and answers.
    too_long: 'error', or 'drop': leave such a pair out, and say how many.

  Raises:
    ValueError: a pair cannot be rendered, or is too long; names its row.
  """
  choices = []
  for pair in pairs:
    made = types.Pair(
      _sample(pair, pair.chosen, renderer),
      _sample(pair, pair.rejected, renderer),
      np.zeros(2, np.float32),
      pair.margin,
    )
    length = pair_packing.length(made)
    if length <= row_tokens:
      choices.append(made)
    elif too_long == 'error':
      raise ValueError(
        f'{pair.where}: both answers, with the prompt before each, must fit '
        f'into batch.row_tokens={row_tokens}: got {length} tokens; raise it, '
        "or set pairs.too_long to 'drop'"
      )
  if dropped := len(pairs) - len(choices):
    logging.getLogger('absl').warning(
      '%d of %d pairs are left out: longer than batch.row_tokens=%d',
      dropped,
      len(pairs),
      row_tokens,
    )
  return tuple(choices)


def mismatched(
  choices: Sequence[types.Pair], row_tokens: int
) -> tuple[types.Pair | None, ...]:
  """Returns each prompt with an answer to the next: what KTO compares with.

  The next one that is another. The answer is the chosen one where there is one;
  None where it is too long, or all ask the same.
  """
  sides = [x.chosen or x.rejected for x in choices]
  prompts = [x.ids[: np.argmax(x.mask)].tobytes() for x in sides]
  made, count, other = [None] * len(sides), len(sides), None
  for i in reversed(range(2 * count)):  # around the end, once
    if prompts[i % count] != prompts[(i + 1) % count]:
      other = (i + 1) % count
    if i < count and other is not None:
      swapped = types.Pair(
        _swap(sides[i], sides[other]), None, np.zeros(2, np.float32)
      )
      if pair_packing.length(swapped) <= row_tokens:
        made[i] = swapped
  if missing := made.count(None):
    logging.getLogger('absl').warning(
      "%d of %d prompts have no other's answer that kto could compare with: "
      'all ask the same, or it does not fit into batch.row_tokens=%d',
      missing,
      count,
      row_tokens,
    )
  return tuple(made)


def _swap(ours: types.Sample, theirs: types.Sample) -> types.Sample:
  """One's prompt with the other's answer."""
  begins, begin = int(np.argmax(ours.mask)), int(np.argmax(theirs.mask))
  return dataclasses.replace(
    ours,
    **{
      field: np.concatenate(
        [getattr(ours, field)[:begins], getattr(theirs, field)[begin:]]
      )
      for field in (
        'ids',
        'mask',
        'roles',
        'is_content',
        'sampler_logprobs',
        'temperatures',
        'versions',
      )
    },
  )


def stamp(laid: TokenizedPairs, told: Iterator[float]) -> TokenizedPairs:
  """Takes what the reference says of each of `laid.samples`, in nats."""

  def one(choice):
    if choice is None:
      return None
    sides = choice.chosen, choice.rejected
    values = [0.0 if x is None else next(told) for x in sides]
    return dataclasses.replace(choice, ref_logprobs=np.float32(values))

  return TokenizedPairs(
    *(tuple(map(one, x)) for x in (laid.choices, laid.others))
  )


def _bytes(sample: types.Sample | None) -> tuple[bytes, ...]:
  if sample is None:
    return (b'', b'')
  return sample.ids.tobytes(), sample.mask.tobytes()


def _sample(
  pair: preferences.Preference,
  answer: types.Messages | None,
  renderer: chat.Renderer,
) -> types.Sample | None:
  """An answer behind its prompt, as tokens."""
  if answer is None:
    return None
  try:
    parts = renderer.demonstrate((*pair.prompt, *answer), len(pair.prompt))
  except ValueError as error:
    raise ValueError(f'{pair.where}: {error}') from None
  if len(parts) != 1:
    raise ValueError(
      f'{pair.where}: an answer must be one sequence of tokens: got '
      f'{len(parts)}; the chat template shows earlier turns otherwise once '
      'others follow; use answers of one turn'
    )
  (part,) = parts
  n = len(part)
  return types.Sample(
    env='',
    row=pair.where,
    ids=part.ids,
    mask=part.sampled,
    roles=part.roles,
    is_content=part.is_content,
    sampler_logprobs=np.zeros(n, np.float32),
    temperatures=np.ones(n, np.float32),
    versions=np.full(n, -1, np.int32),
  )
