"""Preferences: rows of files -> pairs of token sequences -> batches.

    rows -> `parse` -> Preference -> `tokenize` -> Pair -> `pack` -> PairBatch

    {"prompt": ..., "chosen": ..., "rejected": ...}      a pair
    {"prompt": ..., "completion": ..., "label": true}    one answer, for KTO
    {"messages": ..., "label": true}                     the same

Each of prompt, chosen, rejected and completion is a string or a list of
messages; a prompt that an answer begins with is cut off. Where `prompt` is
missing, chosen and rejected are whole conversations, and the prompt is their
common beginning, up to the last message that is not an assistant's. A pair may
have a `margin`, which the ranking loss subtracts from the difference of the two
rewards. Other columns are kept in `info`. Columns of other names are renamed
first (`rows.renamed`).

Each answer is rendered after its prompt. KTO also compares with mismatched
answers: answers to other prompts.

Packing is first-fit-decreasing, as in `packing`, a pair whole in its row. The
pairs that train come first; the mismatched ones follow in micro-batches of
their own.

Axes: M micro-batches, B rows, T tokens of a row, K pairs that a row may hold.
"""

import contextlib
import dataclasses
import itertools
import json
import logging
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from posttrain import types
from posttrain.chat import rendering
from posttrain.data import packing, row_files, rows, sources
from posttrain.util import disk

_COLUMNS_KEY = 'config.STAGE.pairs.columns'
_PAIR = ('prompt', 'chosen', 'rejected', 'margin')
_LABELED = ('prompt', 'completion', 'label')
_MAX_MARGIN = 1e6  # of rewards; sums of its loss stay far from infinity


class Preference(NamedTuple):
  """Two answers to a prompt; a missing one is None."""

  prompt: types.Messages
  chosen: types.Messages | None
  rejected: types.Messages | None
  where: str  # 'file:line', for error messages
  margin: float = 0.0
  info: Mapping[str, Any] = {}
  # See `rows.Row`.
  tools: types.Tools | None = None
  variables: Mapping[str, Any] = {}


def read(
  path: str | pathlib.Path,
  columns: Mapping[str, str] | None = None,
  split: str = 'train',
) -> tuple[Preference, ...]:
  """Reads a data set, in its order.

  Args:
    path: see `row_files.objects`.
    columns: column -> its name among those above.
    split: see `row_files.objects`.

  Raises:
    ValueError: as `row_files.objects`; a row is not a preference; or no row has
      a column of `columns`.
  """
  columns = columns or {}
  objects = rows.check_columns(row_files.objects(path, split), columns)
  return tuple(parse(raw, where, columns) for raw, where in objects)


def write(path: str | pathlib.Path, pairs: Sequence[Preference]) -> None:
  """Writes pairs for `read`, atomically."""
  pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
  with disk.replacing(path) as file:
    for pair in pairs:
      row = {**pair.info, 'prompt': pair.prompt}
      if pair.chosen and pair.rejected:
        row |= {'chosen': pair.chosen, 'rejected': pair.rejected}
        row |= {'margin': pair.margin} if pair.margin else {}
      else:
        answer, label = pair.chosen or pair.rejected, pair.chosen is not None
        row |= {'completion': answer, 'label': label}
      file.write(json.dumps(row) + '\n')


def split(
  pairs: Sequence[Preference], fraction: float
) -> tuple[list[Preference], list[Preference]]:
  """Returns (pairs to train on, held-out pairs), by a hash of their prompts.

  Each has a pair at least, unless `fraction` is 0.

  Args:
    pairs: the pairs.
    fraction: the expected share of held-out prompts, in [0, 1).

  Raises:
    ValueError: the pairs have one prompt, or none, and `fraction` is not 0.
  """
  if not fraction:
    return list(pairs), []
  hashes = np.array([rows.hashed(pair.prompt) for pair in pairs], np.uint64)
  train, held_out = rows.split(hashes, fraction)
  return [pairs[i] for i in train], [pairs[i] for i in held_out]


def parse(
  raw: Mapping[str, Any], where: str, columns: Mapping[str, str] | None = None
) -> Preference:
  """Reads a row.

  Args:
    raw: a mapping with the columns above.
    where: the row's name in error messages.
    columns: column -> its name among those above, see `rows.renamed`.

  Raises:
    ValueError: a column is missing, or has another form; the two answers are
      equal.
  """
  raw = rows.renamed(raw, columns or {}, where)
  is_pair = {'chosen', 'rejected'} <= raw.keys()
  turns = raw.get('messages')
  if not is_pair and 'label' in raw and isinstance(turns, list):
    if 'prompt' in raw:  # as data sets repeat it; checks that
      rows.parse(raw, where)
    raw |= {'prompt': turns[:-1], 'completion': turns[-1:]}
    del raw['messages']
  is_label = not is_pair and set(_LABELED) <= raw.keys()
  read = _PAIR if is_pair else _LABELED
  info = {key: value for key, value in raw.items() if key not in read}
  options = rows.template_options(info, where)
  if not is_pair and not is_label:
    got = rows.wrong_columns(raw, columns, _COLUMNS_KEY)
    raise ValueError(
      f"{where}: a preference must have 'prompt', 'chosen' and 'rejected', or "
      f"'prompt', 'completion' and 'label': {got}"
    )
  if 'prompt' in raw:
    prompt = rows.turns_of(raw['prompt'], 'prompt', 'user', where)
  else:
    # The common beginning of two conversations.
    both = [
      rows.turns_of(raw[column], column, 'assistant', where)
      for column in ('chosen', 'rejected')
    ]
    shared = itertools.takewhile(
      lambda turns: turns[0] == turns[1], zip(*both, strict=False)
    )
    prompt = tuple(turn for turn, _ in shared)
    while prompt and prompt[-1]['role'] == 'assistant':
      prompt = prompt[:-1]
    if all(turn['role'] == 'system' for turn in prompt):
      got = rows.wrong_columns(raw, columns, _COLUMNS_KEY)
      raise ValueError(
        f"{where}: without a column 'prompt', chosen and rejected must begin "
        'with the same question, and a dialogue that is one text must be split '
        f"into 'prompt' and the two last answers: {got}"
      )
  if is_label:
    answer = rows.answer_of(raw, 'completion', prompt, where)
    is_good = rows.flag(raw, 'label', where)
    answers = (answer, None) if is_good else (None, answer)
    return Preference(prompt, *answers, where, info=info, **options)
  chosen, rejected = (
    rows.answer_of(raw, column, prompt, where)
    for column in ('chosen', 'rejected')
  )
  if chosen == rejected:
    raise ValueError(
      f'{where}: rejected must be another answer than chosen: got '
      f'{raw["rejected"]!r:.200} twice'
    )
  margin = math.nan
  with contextlib.suppress(ValueError):  # a .csv has texts
    margin = float(str(raw.get('margin', 0)))
  if not abs(margin) <= _MAX_MARGIN:  # NaN compares false
    raise ValueError(
      f'{where}: margin must be a number of at most {_MAX_MARGIN:g}: got '
      f'{raw["margin"]!r:.200}'
    )
  return Preference(prompt, chosen, rejected, where, margin, info, **options)


# The arrays of an answer, see `_sample`.
_PER_TOKEN = ('ids', 'mask', 'roles', 'is_content', 'sampler_logprobs')
_PER_TOKEN += ('temperatures', 'versions')


@dataclasses.dataclass(frozen=True)
class TokenizedPairs:
  """Pairs, and the mismatched answer of each, as KTO needs it.

  `mismatched` is empty for the other losses. An entry is None where the answer
  does not fit into a row after the other prompt, or there is no other prompt.
  """

  pairs: tuple[types.Pair, ...]
  mismatched: tuple[types.Pair | None, ...] = ()

  def take(self, indices: Sequence[int]) -> 'TokenizedPairs':
    """Returns some of the pairs, in the given order."""
    parts = (self.pairs, self.mismatched)
    return TokenizedPairs(
      *(tuple(x[i] for i in indices) if x else () for x in parts)
    )

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
  preference_rows: Sequence[Preference],
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
  pairs, long = [], []
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
    else:
      long.append((tokens, preference.where))
  if long:
    text = (
      f'pairs.too_long={too_long!r}: both answers, each after its prompt, must '
      f'fit into batch.row_tokens={row_tokens}: got {len(long)} of '
      f'{len(preference_rows)} pairs that do not; the longest, {max(long)[1]}, '
      f'has {max(long)[0]} tokens'
    )
    if too_long == 'error':
      raise ValueError(f"{text}; raise row_tokens, or set 'drop'")
    logging.getLogger('absl').warning('%s', text)
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
  prompts_end = [int(np.argmax(x.mask)) for x in answers]
  prompts = [
    x.ids[:end].tobytes() for x, end in zip(answers, prompts_end, strict=True)
  ]
  result, count, other = [None] * len(answers), len(answers), None
  for i in reversed(range(2 * count)):  # around the end, once
    if prompts[i % count] != prompts[(i + 1) % count]:
      other = (i + 1) % count
    if i < count and other is not None:
      # The prompt of one with the answer of the other.
      halves = (
        (answers[i], slice(prompts_end[i])),
        (answers[other], slice(prompts_end[other], None)),
      )
      fields = {
        field: np.concatenate([getattr(x, field)[part] for x, part in halves])
        for field in _PER_TOKEN
      }
      answer = dataclasses.replace(answers[i], **fields)
      swapped = types.Pair(answer, None, np.zeros(2, np.float32))
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
  row: Preference, answer: types.Messages | None, renderer: rendering.Renderer
) -> types.Sample | None:
  """Renders an answer after its prompt."""
  if answer is None:
    return None
  try:
    parts = renderer.of(row).demonstrate(
      (*row.prompt, *answer), len(row.prompt)
    )
  except ValueError as error:
    raise ValueError(f'{row.where}: {error}') from None
  if len(parts) != 1:
    raise ValueError(
      f'{row.where}: the turns of an answer must be one sequence of tokens: '
      f'got {len(parts)}; the template rewrites earlier ones, or all weigh 0'
    )
  (part,) = parts
  return types.Sample(
    env='',
    row=row.where,
    ids=part.ids,
    mask=part.sampled,
    roles=part.roles,
    is_content=part.is_content,
    **types.not_sampled(len(part)),
  )


def length(pair: types.Pair, trees: bool = False) -> int:
  """Returns the tokens of a pair: both answers, each with its prompt.

  Args:
    pair: the pair.
    trees: whether the answers share the tokens that they begin with.
  """
  return sum(size - same for size, same in _sizes(pair, trees))


def _sizes(pair: types.Pair, trees: bool) -> list[tuple[int, int]]:
  """Returns the answers' `packing.row_sizes`."""
  answers = [x for x in (pair.chosen, pair.rejected) if x is not None]
  sizes = [(len(x), 0) for x in answers]
  if trees and len(answers) == 2:
    most = min(int(x.mask.argmax()) for x in answers)
    differ = answers[0].ids[:most] != answers[1].ids[:most]
    same = int(np.append(differ, True).argmax())
    sizes[1] = len(answers[1]), same
  return sizes


def pack(
  pairs: Sequence[types.Pair],
  mismatched: Sequence[types.Pair | None] = (),
  *,
  rows: int,
  row_tokens: int,
  per_row: int,
  longest_pairs: int = 1,
  pad_id: int = 0,
  trees: bool = False,
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
    trees: whether the answers of a pair share the tokens of the prompt.
  """
  bins = []
  for some in (pairs, [x for x in mismatched if x is not None]):
    lengths = [length(pair, trees) for pair in some]
    assert max(lengths, default=0) <= row_tokens, 'a pair is longer than a row'
    rows_of_pairs, _ = packing.first_fit(
      lengths, row_tokens, len(some), per_row
    )
    bins.append([[some[i] for i in row] for row in rows_of_pairs])
  num_micro_batches, num_mismatched = (math.ceil(len(x) / rows) for x in bins)
  max_micro_batches = max(
    sum(
      math.ceil(len(x) / (rows * longest_pairs)) for x in (pairs, mismatched)
    ),
    num_micro_batches + num_mismatched,
  )
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
  if trees:
    arrays |= {x: np.zeros(shape, np.int32) for x in ('parents', 'ends')}
  for first_row, members in zip(
    (0, num_micro_batches * rows), bins, strict=True
  ):
    for row, row_pairs in enumerate(members, first_row):
      sizes = [size for pair in row_pairs for size in _sizes(pair, trees)]
      paths = packing.paths(sizes)
      if trees:
        packing.link(sizes, arrays['parents'][row], arrays['ends'][row])
      for k, pair in enumerate(row_pairs):
        arrays['margins'][row, k] = pair.margin
        for a, sample in enumerate((pair.chosen, pair.rejected)):
          if sample is None:
            continue
          path = next(paths)
          fresh = arrays['segment_ids'][row, path] == 0
          arrays['segment_ids'][row, path[fresh]] = 2 * k + a + 1
          arrays['ids'][row, path] = sample.ids
          arrays['mask'][row, path] = sample.mask
          arrays['positions'][row, path] = np.arange(len(sample))
          arrays['present'][row, k, a] = True
          arrays['ref_logprobs'][row, k, a] = pair.ref_logprobs[a]
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
