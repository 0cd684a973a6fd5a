"""Preferences as pairs of token sequences, and their packing into batches.

    preferences.Preference -> `tokenize` -> types.Pair -> `pack` -> PairBatch

Each answer is rendered after its prompt. KTO also compares with mismatched
answers: answers to other prompts.

Packing is first-fit-decreasing, as in `packing`, a pair whole in its row. The
pairs that train come first; the mismatched ones follow in micro-batches of
their own.

Axes: M micro-batches, B rows, T tokens of a row, K pairs that a row may hold.
"""

import dataclasses
import logging
import math
from collections.abc import Iterator, Sequence

import numpy as np

from posttrain import types
from posttrain.chat import rendering
from posttrain.data import packing, preferences, sources


@dataclasses.dataclass(frozen=True)
class TokenizedPairs:
  """Pairs, and the mismatched answer of each, as KTO needs it.

  `mismatched` is empty for the other losses. An entry is None where the answer
  does not fit into a row after the other prompt, or there is no other prompt.
  """

  pairs: tuple[types.Pair, ...]
  mismatched: tuple[types.Pair | None, ...] = ()

  @property
  def samples(self) -> list[types.Sample]:
    """All answers, in a fixed order."""
    return [
      answer
      for pair in (*self.pairs, *self.mismatched)
      if pair is not None
      for answer in (pair.chosen, pair.rejected)
      if answer is not None
    ]

  @property
  def fingerprint(self) -> str:
    """A hash of tokens, masks and margins; without the reference logprobs."""
    parts = []
    for pair in filter(None, (*self.pairs, *self.mismatched)):
      parts.append(np.float64(pair.margin).tobytes())
      for answer in (pair.chosen, pair.rejected):
        parts += (
          (b'', b'')
          if answer is None
          else (answer.ids.tobytes(), answer.mask.tobytes())
        )
    return sources.fingerprint(*parts)


def tokenize(
  preference_rows: Sequence[preferences.Preference],
  renderer: rendering.Renderer,
  row_tokens: int,
  too_long: str,
) -> tuple[types.Pair, ...]:
  """Renders preferences as pairs; their reference logprobs are 0.

  Args:
    preference_rows: the rows of a file.
    renderer: renders the messages to tokens.
    row_tokens: the most tokens of a pair: both answers, each with its prompt.
    too_long: 'error', or 'drop': leaves longer pairs out and logs how many.

  Raises:
    ValueError: a row cannot be rendered, or is too long; names the row.
  """
  pairs = []
  for preference in preference_rows:
    pair = types.Pair(
      _sample(preference, preference.chosen, renderer),
      _sample(preference, preference.rejected, renderer),
      np.zeros(2, np.float32),
      preference.margin,
    )
    tokens = length(pair)
    if tokens <= row_tokens:
      pairs.append(pair)
    elif too_long == 'error':
      raise ValueError(
        f'{preference.where}: both answers, with the prompt before each, must '
        f'fit into batch.row_tokens={row_tokens}: got {tokens} tokens; raise '
        "it, or set pairs.too_long to 'drop'"
      )
  if dropped := len(preference_rows) - len(pairs):
    logging.getLogger('absl').warning(
      '%d of %d pairs are left out: longer than batch.row_tokens=%d',
      dropped,
      len(preference_rows),
      row_tokens,
    )
  return tuple(pairs)


def mismatched(
  pairs: Sequence[types.Pair], row_tokens: int
) -> tuple[types.Pair | None, ...]:
  """Returns each prompt with an answer to another, which KTO compares with.

  The other prompt is the next different one, cyclically. Of its answers it is
  the chosen one where there is one. None where the result is longer than
  `row_tokens`, or all prompts are equal.
  """
  answers = [x.chosen or x.rejected for x in pairs]
  prompts = [x.ids[: np.argmax(x.mask)].tobytes() for x in answers]
  result, count, other = [None] * len(answers), len(answers), None
  for i in reversed(range(2 * count)):  # around the end, once
    if prompts[i % count] != prompts[(i + 1) % count]:
      other = (i + 1) % count
    if i < count and other is not None:
      swapped = types.Pair(
        _swap(answers[i], answers[other]), None, np.zeros(2, np.float32)
      )
      if length(swapped) <= row_tokens:
        result[i] = swapped
  if missing := result.count(None):
    logging.getLogger('absl').warning(
      '%d of %d prompts have no mismatched answer for kto: '
      'all prompts are equal, or it does not fit into batch.row_tokens=%d',
      missing,
      count,
      row_tokens,
    )
  return tuple(result)


def _swap(ours: types.Sample, theirs: types.Sample) -> types.Sample:
  """Returns the prompt of `ours` with the answer of `theirs`."""
  our_start = int(np.argmax(ours.mask))
  their_start = int(np.argmax(theirs.mask))
  return dataclasses.replace(
    ours,
    **{
      field: np.concatenate(
        [getattr(ours, field)[:our_start], getattr(theirs, field)[their_start:]]
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


def with_ref_logprobs(
  tokenized: TokenizedPairs, logprobs: Iterator[float]
) -> TokenizedPairs:
  """Returns the pairs with reference logprobs, and 0 for a missing answer.

  Args:
    tokenized: the pairs.
    logprobs: log probability of each of `tokenized.samples` under the
      reference, in their order, in nats; takes no more of the iterator.
  """

  def replace(pair: types.Pair | None) -> types.Pair | None:
    if pair is None:
      return None
    answers = pair.chosen, pair.rejected
    values = [0.0 if x is None else next(logprobs) for x in answers]
    return dataclasses.replace(pair, ref_logprobs=np.float32(values))

  return TokenizedPairs(
    *(tuple(map(replace, x)) for x in (tokenized.pairs, tokenized.mismatched))
  )


def _sample(
  row: preferences.Preference,
  answer: types.Messages | None,
  renderer: rendering.Renderer,
) -> types.Sample | None:
  """Renders an answer after its prompt."""
  if answer is None:
    return None
  try:
    parts = renderer.demonstrate((*row.prompt, *answer), len(row.prompt))
  except ValueError as error:
    raise ValueError(f'{row.where}: {error}') from None
  if len(parts) != 1:
    raise ValueError(
      f'{row.where}: an answer must be one sequence of tokens: got '
      f'{len(parts)}; the chat template rewrites earlier turns once '
      'later ones follow; use answers of one turn'
    )
  (part,) = parts
  n = len(part)
  return types.Sample(
    env='',
    row=row.where,
    ids=part.ids,
    mask=part.sampled,
    roles=part.roles,
    is_content=part.is_content,
    sampler_logprobs=np.zeros(n, np.float32),
    temperatures=np.ones(n, np.float32),
    versions=np.full(n, -1, np.int32),
  )


def length(pair: types.Pair) -> int:
  """Returns the tokens of a pair: both answers, each with its prompt."""
  return sum(
    len(answer) for answer in (pair.chosen, pair.rejected) if answer is not None
  )


def pack(
  pairs: Sequence[types.Pair],
  mismatched: Sequence[types.Pair | None] = (),
  *,
  rows: int,
  row_tokens: int,
  per_row: int,
  longest_pairs: int = 1,
  pad_id: int = 0,
) -> types.PairBatch:
  """Packs pairs into `[M, rows, row_tokens]`.

  M is computed for the pairs that surely fit into a row, even if fewer rows
  suffice, so that batches of equally many pairs have the same shape.

  Args:
    pairs: the pairs that train.
    mismatched: the pairs that KTO compares with, each with one answer, as
      `chosen`; None = there is none for that pair.
    rows: B.
    row_tokens: T.
    per_row: K, the most pairs in a row.
    longest_pairs: the number of the longest pairs that fit into a row.
    pad_id: token id of the padding.

  Raises:
    ValueError: a pair is longer than a row; names the data row.
  """
  bins = []
  for some in (pairs, [x for x in mismatched if x is not None]):
    for pair in some:
      if length(pair) > row_tokens:
        row = (pair.chosen or pair.rejected).row
        raise ValueError(
          f'row {row}: both answers, with the prompt before each, must fit '
          f'into batch.row_tokens={row_tokens}: got {length(pair)} tokens; '
          "raise row_tokens, or set pairs.too_long to 'drop'"
        )
    rows_of_pairs, _ = packing.first_fit(
      [length(pair) for pair in some], row_tokens, len(some), per_row
    )
    bins.append([[some[i] for i in row] for row in rows_of_pairs])
  max_micro_batches = sum(
    math.ceil(len(x) / (rows * longest_pairs)) for x in (pairs, mismatched)
  )
  num_micro_batches, num_mismatched = (math.ceil(len(x) / rows) for x in bins)
  shape = max_micro_batches * rows, row_tokens
  arrays = {
    'ids': np.full(shape, pad_id, np.int32),
    'mask': np.zeros(shape, bool),
    'segment_ids': np.zeros(shape, np.int32),
    'positions': np.zeros(shape, np.int32),
    'present': np.zeros((shape[0], per_row, 2), bool),
    'ref_logprobs': np.zeros((shape[0], per_row, 2), np.float32),
    'margins': np.zeros((shape[0], per_row), np.float32),
  }
  for first_row, members in zip(
    (0, num_micro_batches * rows), bins, strict=True
  ):
    for row, row_pairs in enumerate(members, first_row):
      start = 0
      for k, pair in enumerate(row_pairs):
        arrays['margins'][row, k] = pair.margin
        for a, sample in enumerate((pair.chosen, pair.rejected)):
          if sample is None:
            continue
          place = (row, slice(start, start + len(sample)))
          arrays['ids'][place] = sample.ids
          arrays['mask'][place] = sample.mask
          arrays['segment_ids'][place] = 2 * k + a + 1
          arrays['positions'][place] = np.arange(len(sample))
          arrays['present'][row, k, a] = True
          arrays['ref_logprobs'][row, k, a] = pair.ref_logprobs[a]
          start += len(sample)
  present = arrays['present'][: num_micro_batches * rows]
  return types.PairBatch(
    **{
      name: x.reshape(max_micro_batches, rows, *x.shape[1:])
      for name, x in arrays.items()
    },
    pairs=np.float32(present.all(-1).sum()),
    answers=np.float32(present.sum()),
    num_micro_batches=np.int32(num_micro_batches),
    scored=np.int32(num_micro_batches + num_mismatched),
    baseline=np.float32(0),
  )
