"""Rewards of the steps of an episode, in three layers.

    operational  for steps that work and are new; steps and repeats cost
    progress     for results that are closer to the gold rows
    correctness  1 for the correct answer

    v2   r_op  = -0.02 + 0.02 [no error] + 0.01 [no error, and new]
                 - 0.03 [repeat]
         r_prog = 0.15 (p - p_before)
         step  = clip(r_op + r_prog, -0.10, 0.15)
    v1   r_op  = -0.005 + 0.02 [no error] + 0.01 [no error, and new; at most
                 0.10 an episode] - 0.01 [repeat]
         r_prog = 0.15 max(p - best, 0)
         step  = change of the running sum, which is clipped to [-0.2, 0.5]
    both answer = 1 if correct else 0, without the cost of a step

p is the `progress` of the last successful query, to the nearest of several
golds. v2's r_prog is a difference of
potentials, which does not change the optimal policy (Ng, Harada and Russell,
"Policy invariance under reward transformations", 1999) as long as no step is
clipped. v1 has hidden caps, so the same step in the same state may have
different rewards.

Rewards of an episode of eight steps without an answer, with all weights 1:

    v2   0.12 on average for endless exploration (played in the tests); at most
         0.15 of progress and 0.01 a step, 0.23; plus 0.03 each time that the
         policy loses all progress, which is clipped at -0.10, and regains it:
         0.32 with the gold query known, when the answer would give 1
    v1   at most 0.35; the cap of 0.5 matters for longer episodes
"""

import dataclasses
import math
from collections.abc import Sequence

from posttrain import schema
from posttrain.envs.sql import cells, dialogue


def progress(rows: cells.Rows, gold: cells.Rows) -> float:
  """Returns the similarity of a result to the gold rows, in quarters.

      p = round(4 (0.25 card + 0.5 J + 0.25 N)) / 4

  card = 1 - |n - m| / max(n, m, 1) with the numbers of rows n and m. J is the
  Jaccard index of the sets of cells, as lower-case text. N is
  1 / (1 + ln(1 + |x - y|)) with the closest numbers x of the result and y of
  the gold rows, and J if these have no number. Halves are rounded to even.

  Args:
    rows: the result.
    gold: the gold rows.

  Returns:
    0, 0.25, 0.5, 0.75 or 1.
  """
  n, m = len(rows), len(gold)
  card = 1 - abs(n - m) / max(n, m, 1)
  texts, gold_texts = _texts(rows), _texts(gold)
  overlap = len(texts & gold_texts) / max(len(texts | gold_texts), 1)
  numbers, gold_numbers = _numbers(rows), _numbers(gold)
  near = overlap
  if gold_numbers:
    distances = (abs(x - y) for x in numbers for y in gold_numbers)
    near = 1 / (1 + math.log1p(min(distances, default=math.inf)))
  return round(4 * (0.25 * card + 0.5 * overlap + 0.25 * near)) / 4


@dataclasses.dataclass(frozen=True)
class Step:
  """The parts of a step that its reward depends on."""

  key: tuple[str, str]  # from `key`
  failed: bool
  rows: cells.Rows | None = None  # shown rows of a successful query


def key(action: dialogue.Action) -> tuple[str, str]:
  """Returns the identity of an action, without space and case."""
  return action.type, ' '.join(action.argument.split()).rstrip(' ;').lower()


class Ledger:
  """The rewards of one episode, step by step.

  Attributes:
    operational: sum of the operational layer so far.
    progress: p of the last successful query.
    correct: whether the answer is correct, None before it.
  """

  def __init__(
    self,
    cfg: schema.SqlReward,
    gold: cells.Rows,
    others: Sequence[cells.Rows] = (),
  ):
    """Builds the ledger of an episode with these gold rows, or `others`."""
    self._cfg, self._golds = cfg, (gold, *others)
    self._keys: set[tuple[str, str]] = set()
    self._num_new = 0  # steps that worked and were new
    self._best = self._sum = 0.0
    self.operational = self.progress = 0.0
    self.correct: bool | None = None

  def step(self, step: Step) -> float:
    """Returns the reward of a step other than the answer."""
    operational, gain = self._operational(step), self._progress(step)
    self._keys.add(step.key)
    self.operational += operational
    cfg = self._cfg
    if cfg.version == 'binary':
      return 0.0
    value = cfg.operational * operational + cfg.progress * gain
    if cfg.version == 'v2':
      return min(max(value, -0.10), 0.15)
    before, self._sum = self._sum, min(max(self._sum + value, -0.2), 0.5)
    return self._sum - before

  def answer(self, correct: bool) -> float:
    """Returns the reward of the answer."""
    self.correct = correct
    return self._cfg.correctness * float(correct)

  def _operational(self, step: Step) -> float:
    v1, repeat = self._cfg.version == 'v1', step.key in self._keys
    value = -0.005 if v1 else -0.02
    if not step.failed:
      value += 0.02
      if not repeat and not (v1 and self._num_new == 10):
        value += 0.01
        self._num_new += 1
    return value - (0.01 if v1 else 0.03) * repeat

  def _progress(self, step: Step) -> float:
    if step.rows is None:
      return 0.0
    before = self.progress
    self.progress = max(progress(step.rows, gold) for gold in self._golds)
    if self._cfg.version == 'v1':
      before, self._best = self._best, max(self._best, self.progress)
      return 0.15 * max(self.progress - before, 0.0)
    return 0.15 * (self.progress - before)


def _texts(rows: cells.Rows) -> set[str]:
  return {cells.cell(value).lower() for row in rows for value in row}


def _numbers(rows: cells.Rows) -> set[float]:
  return {
    float(value)
    for row in rows
    for value in row
    if isinstance(value, int | float) and abs(value) < 1e300
  }
