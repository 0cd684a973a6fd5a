"""Pairs -> batch, as one iterator with a state: data of preference stages.

1. Both answers of each pair are rendered with its prompt, see
   `data.preferences`.
2. A share of the prompts, or another file, is held out for evaluation.
3. The reference scores every answer once, before the stage trains, see
   `stage.pairs`.
4. Each step draws `prompts_per_step` pairs, in another order for every epoch,
   and packs them; with KTO also the answers that it compares with.
"""

import dataclasses
import logging
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from posttrain import schema, types
from posttrain.chat import rendering
from posttrain.data import packing, preferences, sources
from posttrain.envs import base
from posttrain.pipeline import batches

Preferences = Sequence[preferences.Preference]


@dataclasses.dataclass(frozen=True)
class PairSplits:
  """Tokenized pairs to train on, and held-out ones."""

  train: preferences.TokenizedPairs
  held_out: preferences.TokenizedPairs

  @property
  def samples(self) -> list[types.Sample]:
    """All answers with their prompts, in a fixed order."""
    return [*self.train.samples, *self.held_out.samples]

  @property
  def fingerprint(self) -> str:
    """Hash of all pairs, without their reference logprobs."""
    return sources.fingerprint(
      self.train.fingerprint.encode(), self.held_out.fingerprint.encode()
    )

  @property
  def summary(self) -> str:
    """One line with the numbers of pairs."""
    train, held_out = (
      sum(x.chosen is not None and x.rejected is not None for x in pairs)
      for pairs in (self.train.pairs, self.held_out.pairs)
    )
    alone = len(self.train.pairs) - train
    single = f' and {alone} single answers' if alone else ''
    return f'{train} pairs{single} train, {held_out} pairs are held out'

  def evaluated(
    self, selects: bool
  ) -> tuple[preferences.TokenizedPairs, preferences.TokenizedPairs | None]:
    """Returns (held-out pairs to report, those to select by or None).

    Args:
      selects: whether `eval.best` is measured on pairs.

    Raises:
      ValueError: it is, and there are too few.
    """
    held_out = self.held_out
    if not selects:
      return held_out, None
    # Halves, by a hash of the prompts' tokens.
    halves: tuple[list[int], list[int]] = [], []
    for index, pair in enumerate(held_out.pairs):
      answer = pair.chosen if pair.chosen is not None else pair.rejected
      assert answer is not None, 'a pair has an answer'
      prompt = answer.ids[: int(np.argmax(answer.mask))]
      halves[zlib.crc32(prompt.tobytes()) % 2].append(index)
    if not all(halves):
      raise ValueError(
        'eval.best must have held-out pairs of several prompts, half of which '
        f'it is measured on: got {len(held_out.pairs)} pairs; raise '
        'pairs.eval_fraction or pairs.eval_prompts, or add to pairs.eval_path'
      )
    return held_out.take(halves[0]), held_out.take(halves[1])

  def with_ref_logprobs(self, logprobs: Iterator[float]) -> 'PairSplits':
    """Returns the pairs with the reference's logprob of each of `samples`.

    Args:
      logprobs: log probability of each answer after its prompt, nats.
    """
    return PairSplits(
      preferences.with_ref_logprobs(self.train, logprobs),
      preferences.with_ref_logprobs(self.held_out, logprobs),
    )


class PairData(batches.StageData):
  """The pairs of a stage, see `batches.StageData`.

  `splits` are those of a file; None where pairs are made when the stage begins.
  """

  group_sizes = {'pairs': 2}

  def __init__(
    self,
    stage: schema.Stage,
    envs: Mapping[str, base.Env],
    renderer: rendering.Renderer,
    seed: int,
    index: int = 0,
  ):
    """Reads and tokenizes the pairs of a file.

    Args:
      stage: the stage's options.
      envs: the environments whose answers make pairs, or are evaluated.
      renderer: renders the pairs' messages.
      seed: the run's seed.
      index: index of the stage within the run.

    Raises:
      ValueError: a row of the file cannot train; names it.
    """
    self.stage, self.envs, self._renderer = stage, envs, renderer
    mixed = np.random.SeedSequence([seed, index, zlib.crc32(b'pairs')])
    self.seed = int(mixed.generate_state(1)[0])
    # The options of the loss: `loss.preference`, or `loss.ranking`.
    loss: Any = getattr(stage.loss, stage.kind)
    self._kto = isinstance(loss, schema.Kto)
    reference = getattr(loss, 'reference', None)
    self.references = (
      {reference: 'loss.preference.reference'} if reference else {}
    )
    batch = stage.batch
    micro_batches = math.ceil(batch.prompts_per_step / batch.bins)
    self.shape = micro_batches, batch.packed_rows, batch.packed_tokens
    self.min_capacity = batch.row_tokens
    self.tokenizer = renderer.tokenizer
    self.splits: PairSplits | None = None
    self.task_counts = {}
    if isinstance(stage.pairs, schema.PairFile):
      try:
        self.splits = splits = self._read(stage.pairs)
      except ValueError as error:
        key = 'config.STAGE.pairs'
        raise ValueError(f'{key} cannot be used: {error}') from error
      pairs = splits.train.pairs
      first = [(x.ids, x.mask) for x in splits.train.samples[:2]]
      self.checked = {'pairs': ([*map(preferences.length, pairs)], first)}
      held_out = 'pairs.eval_path' if stage.pairs.eval_path else 'pairs'
      self.hashes = {
        'pairs.path': splits.train.fingerprint,
        held_out: splits.held_out.fingerprint,
      }
      self.task_counts = {'pairs': len(pairs)}
      self.held_out_counts = {'pairs': len(splits.held_out.pairs)}

  def split(
    self, pairs: Preferences, held_out: Preferences | None = None
  ) -> PairSplits:
    """Tokenizes pairs that were made for the stage.

    Args:
      pairs: all pairs, or those to train on.
      held_out: pairs for evaluation; None = a share of `pairs`.

    Raises:
      ValueError: no pair is left to train on.
    """
    if held_out is None:
      fraction = self.stage.pairs.eval_fraction
      if fraction and len({repr(x.prompt) for x in pairs}) == 1:
        fraction = 0.0
        logging.getLogger('absl').warning(
          'all %d pairs have the same prompt: none is held out', len(pairs)
        )
      pairs, held_out = preferences.split(pairs, fraction)
    return self._tokenize(pairs, held_out, 'drop')

  def _read(self, cfg: schema.PairFile) -> PairSplits:
    """Tokenizes the pairs of a file, or of two."""
    pairs = preferences.read(cfg.path, cfg.columns)
    if cfg.eval_path is not None:
      held_out = preferences.read(cfg.eval_path, cfg.columns, 'eval')
      train, others = ({repr(x.prompt) for x in y} for y in (pairs, held_out))
      if train & others:
        logging.getLogger('absl').warning(
          '%d of the %d prompts of pairs.eval_path are in pairs.path as well: '
          'measurements on them are not held out',
          len(train & others),
          len(others),
        )
    else:
      pairs, held_out = preferences.split(pairs, cfg.eval_fraction)
    return self._tokenize(pairs, held_out, cfg.too_long)

  def _tokenize(
    self, train: Preferences, held_out: Preferences, too_long: str
  ) -> PairSplits:
    row_tokens = self.stage.batch.row_tokens

    def tokenize(pairs):
      tokenized = preferences.tokenize(
        pairs, self._renderer, row_tokens, too_long
      )
      others = (
        preferences.mismatched(tokenized, row_tokens) if self._kto else ()
      )
      return preferences.TokenizedPairs(tokenized, others)

    for pair in (*train, *held_out):
      if not self._kto and None in (pair.chosen, pair.rejected):
        raise ValueError(
          f'{pair.where}: a pair must have a chosen and a rejected answer: got '
          "one, with a label; config.STAGE.loss.preference='kto' learns from "
          'single ones'
        )
    splits = PairSplits(tokenize(train), tokenize(held_out))
    if not splits.train.pairs:
      raise ValueError(
        'a stage on pairs must have some to train on: got '
        f'{len(train)} pairs, of which none fits into batch.row_tokens='
        f'{row_tokens}; raise it, or look at what makes them'
      )
    for side in ('chosen', 'rejected'):
      if all(getattr(x, side) is None for x in splits.train.pairs):
        logging.getLogger('absl').warning(
          'no %s answer to train on: kto learns from both', side
        )
        break
    return splits


class PairPipeline(batches.Pipeline):
  """Batches of pairs, see `batches.Pipeline`."""

  def __init__(self, data: PairData, splits: PairSplits):
    """Starts at the first epoch.

    Args:
      data: the stage's data.
      splits: its pairs, with reference logprobs where the loss reads them.
    """
    self._data, self._train = data, splits.train
    self._trees = bool(data.stage.batch.trees)
    every = (*splits.train.pairs, *splits.held_out.pairs)
    shortest = min(preferences.length(x, self._trees) for x in every)
    self._per_row = data.stage.batch.packed_tokens // shortest
    self._source = sources.Shuffled(
      range(len(splits.train.pairs)), data.seed, splits.fingerprint
    )
    self._widths = self._new_widths()
    held_out, selecting = splits.evaluated(data.stage.eval.selects_pairs)
    self.held_out = self.pack(held_out) if held_out.pairs else None
    self.selecting = self.pack(selecting) if selecting else None

  def __next__(self) -> batches.Item:
    count = self._data.stage.batch.prompts_per_step
    drawn = [next(self._source) for _ in range(count)]
    batch = self.pack(self._train.take(drawn), self._widths)
    metrics = {
      'batch/pairs': float(batch.pairs),
      'batch/answers': float(batch.answers),
      **batches.metrics(batch),
      **batches.epochs('pairs', self._source.get_state()),
    }
    return batches.Item(batch, metrics, self.get_state())

  def _new_widths(self) -> packing.Widths:
    return batches.widths(self._data.stage, self._data.shape[0])

  def pack(
    self,
    pairs: preferences.TokenizedPairs,
    widths: packing.Widths | None = None,
  ) -> types.PairBatch:
    """Packs any number of pairs in rows of the stage's shape.

    Args:
      pairs: the pairs.
      widths: chooses the rows' length; None = as the pairs need, or fixed.
    """
    batch, answers = self._data.stage.batch, (*pairs.pairs, *pairs.mismatched)
    lengths = [
      preferences.length(x, self._trees) for x in answers if x is not None
    ]
    return preferences.pack(
      pairs.pairs,
      pairs.mismatched,
      rows=self._data.shape[1],
      row_tokens=(widths or self._new_widths())(lengths),
      per_row=self._per_row,
      longest_pairs=batch.joined_rows if batch.bins == batch.rows else 1,
      pad_id=self._data.tokenizer.pad_id,
      trees=self._trees,
    )

  def get_state(self) -> dict[str, Any]:
    """Returns JSON-able state that, with the seed, determines what follows."""
    return {
      'source': self._source.get_state(),
      'widths': self._widths.get_state(),
    }

  def set_state(self, state: dict[str, Any]) -> None:
    """Continues from a state of `get_state`."""
    self._source.set_state(state['source'])
    self._widths.set_state(state.get('widths', [0.0]))
