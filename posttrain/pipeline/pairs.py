"""Pairs -> choices -> batch, as one iterator with a state.

What `pipeline` is for token components; stages on pairs draw from it.

1. Both answers of each pair are rendered with its prompt, see `choices`.
2. A share of the prompts, or another file, is held out for evaluation.
3. The reference scores every answer once, see `prepare`: no model is asked
   while a stage runs.
4. Each step draws `prompts_per_step` choices, in an order of its own for every
   epoch, and packs them; with KTO also the answers that it compares with.
"""

import logging
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from posttrain import schema, types
from posttrain.chat import renderer as chat
from posttrain.data import pair_packing, preferences, sources, tokenized_pairs
from posttrain.pipeline import tokens as token_pipeline


class PairPipeline:
  """Infinite iterator of `pipeline.Item`s, deterministic in seed and state."""

  uses_policy, can_prefetch, players = False, True, frozenset()
  envs, reward_models = {}, {}

  def __init__(
    self,
    stage: schema.Stage,
    renderer: chat.Renderer,
    seed: int,
    index: int = 0,
  ):
    """Reads the pairs, if a file has them; else `open` brings them.

    Args:
      stage: its options.
      renderer: of the pairs' messages.
      seed: of the run.
      index: of the stage within the run.

    Raises:
      ValueError: a row of the file cannot train; names it.
    """
    self._stage, self._renderer = stage, renderer
    mixed = np.random.SeedSequence([seed, index, zlib.crc32(b'pairs')])
    self._seed = int(mixed.generate_state(1)[0])
    self._train = self.held_out = tokenized_pairs.TokenizedPairs(())
    if isinstance(stage.pairs, schema.PairFile):
      self._read(stage.pairs)

  @property
  def references(self) -> dict[schema.Reference, str]:
    """The model that scores the answers, with the key that says so."""
    reads = self._stage.kind == 'preference'
    model = getattr(self._stage.loss.preference, 'reference', None)
    return {model: 'loss.preference.reference'} if reads and model else {}

  @property
  def shape(self) -> tuple[int, int, int]:
    """[micro_batches, rows, row_tokens], of one choice per row."""
    batch = self._stage.batch
    rows = batch.micro_batch_tokens // batch.row_tokens
    count = math.ceil(batch.prompts_per_step / rows)
    return count, rows, batch.row_tokens

  def open(
    self,
    pairs: Sequence[preferences.Preference],
    held_out: Sequence[preferences.Preference] | None = None,
  ) -> None:
    """Takes pairs that were made for the stage.

    Args:
      pairs: all, or those that train.
      held_out: for evaluation; None = a share of `pairs` is.

    Raises:
      ValueError: there are none left to train on.
    """
    if held_out is None:
      pairs, held_out = _split(pairs, self._stage.pairs.eval_fraction)
    self._take(pairs, held_out, 'drop')

  def check(self) -> None:
    """All of a file was looked at when it was read."""

  def score(
    self, score: Callable[[Sequence[types.Sample]], Sequence[float]]
  ) -> None:
    """Stamps what the reference says on all choices.

    Args:
      score: of answers, behind their prompts: their log probabilities, nats.
    """
    told = iter(score([*self._train.samples, *self.held_out.samples]))
    self._train = tokenized_pairs.stamp(self._train, told)
    self.held_out = tokenized_pairs.stamp(self.held_out, told)

  @property
  def line(self) -> str:
    """What people read."""
    train, held_out = (
      sum(x.chosen is not None and x.rejected is not None for x in choices)
      for choices in (self._train.choices, self.held_out.choices)
    )
    alone = len(self._train.choices) - train
    single = f' and {alone} single answers' if alone else ''
    return f'{train} pairs{single} train, {held_out} pairs are held out'

  @property
  def fingerprint(self) -> str:
    """A hash of the pairs, of those held out too."""
    return sources.fingerprint(
      self._train.fingerprint.encode(), self.held_out.fingerprint.encode()
    )

  def __iter__(self):
    return self

  def __next__(self) -> token_pipeline.Item:
    count = self._stage.batch.prompts_per_step
    drawn = [next(self._source) for _ in range(count)]
    train = self._train
    batch = self.pack(
      tokenized_pairs.TokenizedPairs(
        tuple(train.choices[i] for i in drawn),
        tuple(train.others[i] for i in drawn) if train.others else (),
      )
    )
    tokens = int((batch.segment_ids[: batch.num_micro_batches] > 0).sum())
    _, rows, row_tokens = self.shape
    return token_pipeline.Item(
      batch,
      {
        'batch/pairs': float(batch.pairs),
        'batch/answers': float(batch.answers),
        'batch/tokens': tokens,
        'batch/completion_tokens': int(
          batch.mask[: batch.num_micro_batches].sum()
        ),
        'batch/micro_batches': int(batch.num_micro_batches),
        'batch/fill': tokens
        / max(int(batch.num_micro_batches) * rows * row_tokens, 1),
      },
      self.get_state(),
    )

  def pack(self, laid: tokenized_pairs.TokenizedPairs) -> types.PairBatch:
    """Packs choices of any number, as batches are."""
    _, rows, row_tokens = self.shape
    return pair_packing.pack(
      laid.choices,
      laid.others,
      rows=rows,
      row_tokens=row_tokens,
      per_row=self._per_row,
      pad_id=self._renderer.tokenizer.pad_id,
    )

  def get_state(self) -> dict[str, Any]:
    """JSON-able; with the seed it determines everything that follows."""
    return {'source': self._source.get_state()}

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes on where `get_state` was called."""
    self._source.set_state(state['source'])

  def _read(self, cfg: schema.PairFile) -> None:
    """Takes the pairs of a file, or of two."""
    pairs = preferences.read(cfg.path)
    if cfg.eval_path is not None:
      held_out = preferences.read(cfg.eval_path)
      _warn_of_both(pairs, held_out)
      self._take(pairs, held_out, cfg.too_long)
      return
    self._take(*_split(pairs, cfg.eval_fraction), cfg.too_long)

  def _take(self, train, held_out, too_long: str) -> None:
    """Lays pairs out, of those that train and those that are held out."""
    kto = self._stage.kind == 'preference' and isinstance(
      self._stage.loss.preference, schema.Kto
    )
    row_tokens = self._stage.batch.row_tokens

    def lay(pairs):
      made = tokenized_pairs.lay_out(
        pairs, self._renderer, row_tokens, too_long
      )
      others = tokenized_pairs.mismatched(made, row_tokens) if kto else ()
      return tokenized_pairs.TokenizedPairs(made, others)

    if not kto:
      _require_both((*train, *held_out))
    self._train, self.held_out = lay(train), lay(held_out)
    if not self._train.choices:
      raise ValueError(
        'a stage on pairs must have some to train on: got '
        f'{len(train)} pairs, of which none fits into batch.row_tokens='
        f'{row_tokens}; raise it, or look at what makes them'
      )
    missing = [
      side
      for side in ('chosen', 'rejected')
      if all(getattr(x, side) is None for x in self._train.choices)
    ]
    if missing:
      logging.getLogger('absl').warning(
        'no %s answer to train on: kto learns from both', missing[0]
      )
    every = (*self._train.choices, *self.held_out.choices)
    self._per_row = row_tokens // min(map(pair_packing.length, every))
    self._source = sources.Shuffled(
      range(len(self._train.choices)), self._seed, self.fingerprint
    )


def _split(pairs: Sequence[preferences.Preference], fraction: float):
  """(Pairs that train, pairs that are held out), by their prompts."""
  sides = [], []
  for pair in pairs:
    sides[preferences.held_out(pair, fraction)].append(pair)
  return sides


def _warn_of_both(
  pairs: Sequence[preferences.Preference],
  held_out: Sequence[preferences.Preference],
) -> None:
  """Says how many held-out prompts train as well."""
  train, others = ({repr(x.prompt) for x in y} for y in (pairs, held_out))
  if train & others:
    logging.getLogger('absl').warning(
      '%d of the %d prompts of pairs.eval_path are in pairs.path as well: '
      'what is measured on them is not held out',
      len(train & others),
      len(others),
    )


def _require_both(pairs: Sequence[preferences.Preference]) -> None:
  """Refuses single answers where the loss compares two."""
  for pair in pairs:
    if pair.chosen is None or pair.rejected is None:
      raise ValueError(
        f'{pair.where}: a pair must have a chosen and a rejected answer: got '
        "one, with a label; config.<stage>.loss.preference='kto' learns from "
        'single ones'
      )
