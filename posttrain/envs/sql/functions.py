"""The three layers as reward functions of their own, from what was said.

    fn(completions, gold_rows, answer_type, **columns) -> list[float | None]

TRL's signature. A completion is the messages behind the prompt: actions, and
observations of either style in between; the columns are what tasks carry. They
ask no environment, so they also grade episodes that were recorded elsewhere:
`--config.grpo.envs.sql.rewards='{"right": {"fn":
"posttrain.envs.sql.functions:reward_correctness", "weight": 1.0}}'`. An episode
without a turn is not scorable. An answer that got an observation was cut off,
and counts as a step that failed.
"""

import re
from collections.abc import Iterator, Sequence

from posttrain import schema, types
from posttrain.envs.sql import (
  actions,
  cells,
  observations,
  record,
  rewards,
  verifier,
)

Completion = Sequence[types.Message]
# As `cells` writes them.
_NUMBER = re.compile(r'-?[0-9]{1,300}((?:\.[0-9]+)?(?:e[+-][0-9]+)?)')


def reward_correctness(
  completions: Sequence[Completion],
  gold_rows: Sequence[record.Rows],
  answer_type: Sequence[str],
  **columns,
) -> list[float | None]:
  """Returns 1 for a right answer, 0 for a wrong one or none."""
  del columns
  found = []
  for said, gold, kind in zip(completions, gold_rows, answer_type, strict=True):
    moves = list(_moves(said))
    answers = [a.argument for a, heard in moves if _answers(a, heard)]
    right = bool(answers) and verifier.correct(answers[0], gold, kind)
    found.append(float(right) if moves else None)
  return found


def reward_progress(
  completions: Sequence[Completion], gold_rows: Sequence[record.Rows], **columns
) -> list[float | None]:
  """Returns how near the last query came to the gold rows, in [0, 1]."""
  del columns
  return [
    None if ledger is None else ledger.nearest
    for ledger in _replay(completions, gold_rows)
  ]


def reward_operational(
  completions: Sequence[Completion], gold_rows: Sequence[record.Rows], **columns
) -> list[float | None]:
  """Returns the sum of what single steps are worth, by version 2."""
  del columns
  return [
    None if ledger is None else ledger.operational
    for ledger in _replay(completions, gold_rows)
  ]


def _replay(completions, gold_rows) -> Iterator[rewards.Ledger | None]:
  for said, gold in zip(completions, gold_rows, strict=True):
    ledger, moves = rewards.Ledger(schema.SqlReward(), gold), list(_moves(said))
    for action, heard in moves:
      if _answers(action, heard):
        break
      result, _ = observations.read(heard)
      rows = None
      if result is not None and action.type == 'QUERY':
        rows = _rows(result)
      ledger.step(rewards.Move(rewards.key(action), result is None, rows))
    yield ledger if moves else None


def _answers(action: actions.Action, heard: str) -> bool:
  return action.type == 'ANSWER' and not heard


def _moves(said: Completion) -> Iterator[tuple[actions.Action, str]]:
  """Yields each action, with the observation behind it; '' = none."""
  for at, message in enumerate(said):
    if message['role'] == 'assistant':
      heard = said[at + 1]['content'] if at + 1 < len(said) else ''
      yield actions.parse(message['content']), heard


def _rows(result: str) -> record.Rows:
  """Reads shown rows; what reads as a number is one."""
  if result == 'empty':
    return ()
  text = result.removesuffix(cells.CUT)
  return tuple(tuple(map(_cell, row)) for row in cells.read(text))


def _cell(text: str | None) -> record.Cell:
  if text is None or not (number := _NUMBER.fullmatch(text)):
    return text
  return float(text) if number[1] else int(text)
