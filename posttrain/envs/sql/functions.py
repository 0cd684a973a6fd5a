"""Rewards of an episode in three layers, and each layer as a reward function.

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

    v2   0.12 on average for endless exploration; at most
         0.15 of progress and 0.01 a step, 0.23; plus 0.03 each time that the
         policy loses all progress, which is clipped at -0.10, and regains it:
         0.32 with the gold query known, when the answer would give 1
    v1   at most 0.35; the cap of 0.5 matters for longer episodes

The reward functions read the messages:

    fn(completions, gold_rows, answer_type, **columns) -> list[float | None]

TRL's signature. A completion is the messages after the prompt: actions, and
observations in either style between them. The columns are those of the tasks'
`info`. The functions need no environment, so they also grade recorded episodes:
`--config.grpo.envs.sql.rewards='{"right": {"fn":
"posttrain.envs.sql.functions:reward_correctness", "weight": 1.0}}'`. An episode
without a turn is not scorable. An answer with an observation after it was
truncated and counts as a failed step.
"""

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posttrain import schema, types
from posttrain.envs.sql import database, dialogue, verifier

Completion = Sequence[types.Message]
# A number in the form of `dialogue.cell`.
_NUMBER = re.compile(r'-?[0-9]{1,300}((?:\.[0-9]+)?(?:e[+-][0-9]+)?)')


def progress(rows: database.Rows, gold: database.Rows) -> float:
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
  own, golds = texts(rows), texts(gold)
  overlap = len(own & golds) / max(len(own | golds), 1)
  numbers, gold_numbers = _numbers(rows), _numbers(gold)
  near = overlap
  if gold_numbers:
    distances = (abs(x - y) for x in numbers for y in gold_numbers)
    near = 1 / (1 + math.log1p(min(distances, default=math.inf)))
  return round(4 * (0.25 * card + 0.5 * overlap + 0.25 * near)) / 4


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
    gold: database.Rows,
    others: Sequence[database.Rows] = (),
  ):
    """Builds the ledger of an episode with these gold rows, or `others`."""
    self._cfg, self._golds = cfg, (gold, *others)
    self._keys: set[tuple[str, str]] = set()
    self._num_new = 0  # steps that worked and were new
    self._best = self._sum = 0.0
    self.operational = self.progress = 0.0
    self.correct: bool | None = None

  def step(
    self, action: dialogue.Action, failed: bool, rows: database.Rows | None
  ) -> float:
    """Returns the reward of a step other than the answer.

    Args:
      action: the step's action; a repeat may differ in white space and case.
      failed: whether it had an error.
      rows: shown rows of a successful query.
    """
    cfg, v1 = self._cfg, self._cfg.version == 'v1'
    words = ' '.join(action.argument.split()).rstrip(' ;').lower()
    repeat = (action.type, words) in self._keys
    self._keys.add((action.type, words))
    operational = -0.005 if v1 else -0.02
    if not failed:
      operational += 0.02
      if not repeat and not (v1 and self._num_new == 10):
        operational += 0.01
        self._num_new += 1
    operational -= (0.01 if v1 else 0.03) * repeat
    self.operational += operational
    gain = 0.0
    if rows is not None:
      before = self.progress
      self.progress = max(progress(rows, gold) for gold in self._golds)
      if v1:
        before, self._best = self._best, max(self._best, self.progress)
        gain = 0.15 * max(self.progress - before, 0.0)
      else:
        gain = 0.15 * (self.progress - before)
    if cfg.version == 'binary':
      return 0.0
    value = cfg.operational * operational + cfg.progress * gain
    if not v1:
      return min(max(value, -0.10), 0.15)
    total, self._sum = self._sum, min(max(self._sum + value, -0.2), 0.5)
    return self._sum - total

  def answer(self, correct: bool) -> float:
    """Returns the reward of the answer."""
    self.correct = correct
    return self._cfg.correctness * float(correct)


def texts(rows: database.Rows) -> set[str]:
  """Returns the cells as lower-case text."""
  return {dialogue.cell(value).lower() for row in rows for value in row}


def _numbers(rows: database.Rows) -> set[float]:
  return {
    float(value)
    for row in rows
    for value in row
    if isinstance(value, int | float) and abs(value) < 1e300
  }


def reward_correctness(
  completions: Sequence[Completion], **columns: Any
) -> list[float | None]:
  """Returns 1 for a correct answer, 0 for a wrong or missing one."""
  return _replay(completions, columns, lambda x: float(bool(x.correct)))


def reward_progress(
  completions: Sequence[Completion], **columns: Any
) -> list[float | None]:
  """Returns the progress of the last query to a gold, in [0, 1]."""
  return _replay(completions, columns, lambda x: x.progress)


def reward_operational(
  completions: Sequence[Completion], **columns: Any
) -> list[float | None]:
  """Returns the sum of the steps' operational rewards, by version 2."""
  return _replay(completions, columns, lambda x: x.operational)


def _replay(
  completions: Sequence[Completion],
  columns: Mapping[str, Sequence[Any]],
  value: Callable[[Ledger], float],
) -> list[float | None]:
  """Returns a value of each completion's ledger; None if it has no turn."""
  fields = ('gold_rows', 'answer_type', 'other_golds', 'ranks')
  values: list[float | None] = []
  for i, messages in enumerate(completions):
    info = {x: columns[x][i] for x in fields if x in columns}
    others = info.get('other_golds') or ()
    ledger = Ledger(schema.SqlReward(), info['gold_rows'], others)
    for message, after in itertools.zip_longest(messages, messages[1:]):
      if message['role'] != 'assistant':
        continue
      action = dialogue.parse(message['content'])
      observation = after['content'] if after else ''
      if action.type == 'ANSWER' and not observation:
        ledger.answer(verifier.equals_any(action.argument, info))
        break
      rows, (result, _) = None, dialogue.read(observation)
      if result is not None and action.type == 'QUERY':
        shown = dialogue.read_rows(result.removesuffix(dialogue.CUT))
        rows = tuple(tuple(map(_cell, row)) for row in shown)
      ledger.step(action, result is None, rows)
    plays = any(message['role'] == 'assistant' for message in messages)
    values.append(value(ledger) if plays else None)
  return values


def _cell(text: str | None) -> database.Cell:
  """Returns a shown cell; text in the form of a number becomes one."""
  if text is None or not (number := _NUMBER.fullmatch(text)):
    return text
  return float(text) if number[1] else int(text)
