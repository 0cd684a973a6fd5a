"""What the steps of an episode are worth, in three layers.

    operational  steps that work and are new; repeats and steps cost
    progress     results that come nearer to the gold rows
    correctness  1 for the right answer

    v2   r_op  = -0.02 + 0.02 [no error] + 0.01 [no error, and new]
                 - 0.03 [repeat]
         r_prog = 0.15 (p - p_before)
         step  = clip(r_op + r_prog, -0.10, 0.15)
    v1   r_op  = -0.005 + 0.02 [no error] + 0.01 [no error, and new; at most
                 0.10 an episode] - 0.01 [repeat]
         r_prog = 0.15 max(p - best, 0)
         step  = what keeps the sum of steps in [-0.2, 0.5]
    both answer = 1 if correct else 0, without a step's cost

p is the `progress` of the last query that worked. v2's r_prog is a potential,
whose differences cannot change what is optimal (Ng, Harada and Russell, "Policy
invariance under reward transformations", 1999), as long as no step is clipped;
v1 has hidden caps, by which the same step in the same state earns different
rewards.

What an episode earns that never answers, in eight steps of weights 1:

    v2   0.12 on average, if it explores for ever (tests play it); at most
         0.15 of progress and 0.01 a step, 0.23; and 0.03 more each time that
         it loses all progress, which is clipped at -0.10, and wins it back:
         0.32 for one who knows the gold query, and so could answer for 1
    v1   at most 0.35; the cap of 0.5 is for longer ones
"""

import dataclasses
import math

from posttrain import schema
from posttrain.envs.sql import actions, cells, record


def progress(rows: record.Rows, gold: record.Rows) -> float:
  """Returns how near a result is to the gold one: 0, 0.25, 0.5, 0.75 or 1.

      p = round(4 (0.25 card + 0.5 J + 0.25 N)) / 4

  card = 1 - |n - m| / max(n, m, 1) of the numbers of rows, J the Jaccard index
  of the sets of cells, as lower-case text; N = 1 / (1 + ln(1 + |x - y|)) of
  the nearest numbers x of the result and y of the gold, J if gold has none.
  Halves are rounded to even, as Python does.
  """
  n, m = len(rows), len(gold)
  card = 1 - abs(n - m) / max(n, m, 1)
  said, meant = _texts(rows), _texts(gold)
  overlap = len(said & meant) / max(len(said | meant), 1)
  ours, theirs = _numbers(rows), _numbers(gold)
  near = overlap
  if theirs:
    apart = min((abs(x - y) for x in ours for y in theirs), default=math.inf)
    near = 1 / (1 + math.log1p(apart))
  return round(4 * (0.25 * card + 0.5 * overlap + 0.25 * near)) / 4


@dataclasses.dataclass(frozen=True)
class Move:
  """A step, as far as rewards look at it."""

  key: tuple[str, str]  # of `key`
  failed: bool
  rows: record.Rows | None = None  # of a query that worked, as shown


def key(action: actions.Action) -> tuple[str, str]:
  """Returns what tells an action from others: space and case do not."""
  return action.type, ' '.join(action.argument.split()).rstrip(' ;').lower()


class Ledger:
  """The rewards of one episode, step by step.

  `operational` is the sum of its layer so far, `nearest` the last query's p,
  `correct` what the answer was, None before it.
  """

  def __init__(self, cfg: schema.SqlReward, gold: record.Rows):
    self._cfg, self._gold = cfg, gold
    self._seen: set[tuple[str, str]] = set()
    self._news = 0  # steps that worked and were new
    self._best = self._sum = 0.0
    self.operational = self.nearest = 0.0
    self.correct: bool | None = None

  def step(self, move: Move) -> float:
    """Returns the reward of a step that is no answer."""
    operational, gained = self._operational(move), self._progress(move)
    self._seen.add(move.key)
    self.operational += operational
    cfg = self._cfg
    if cfg.version == 'binary':
      return 0.0
    value = cfg.operational * operational + cfg.progress * gained
    if cfg.version == 'v2':
      return min(max(value, -0.10), 0.15)
    before, self._sum = self._sum, min(max(self._sum + value, -0.2), 0.5)
    return self._sum - before

  def answer(self, correct: bool) -> float:
    """Returns the reward of the answer."""
    self.correct = correct
    return self._cfg.correctness * float(correct)

  def _operational(self, move: Move) -> float:
    v1, repeat = self._cfg.version == 'v1', move.key in self._seen
    value = -0.005 if v1 else -0.02
    if not move.failed:
      value += 0.02
      if not repeat and not (v1 and self._news == 10):
        value += 0.01
        self._news += 1
    return value - (0.01 if v1 else 0.03) * repeat

  def _progress(self, move: Move) -> float:
    if move.rows is None:
      return 0.0
    before, self.nearest = self.nearest, progress(move.rows, self._gold)
    if self._cfg.version == 'v1':
      before, self._best = self._best, max(self._best, self.nearest)
      return 0.15 * max(self.nearest - before, 0.0)
    return 0.15 * (self.nearest - before)


def _texts(rows: record.Rows) -> set[str]:
  return {cells.cell(value).lower() for row in rows for value in row}


def _numbers(rows: record.Rows) -> set[float]:
  return {
    float(value)
    for row in rows
    for value in row
    if isinstance(value, int | float) and abs(value) < 1e300
  }
