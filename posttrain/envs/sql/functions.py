"""The three reward layers as separate reward functions of the messages.

    fn(completions, gold_rows, answer_type, **columns) -> list[float | None]

TRL's signature. A completion is the messages after the prompt: actions, and
observations in either style between them. The columns are those of the tasks'
`info`. The functions need no environment, so they also grade recorded episodes:
`--config.grpo.envs.sql.rewards='{"right": {"fn":
"posttrain.envs.sql.functions:reward_correctness", "weight": 1.0}}'`. An episode
without a turn is not scorable. An answer with an observation after it was
truncated and counts as a failed step.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from posttrain import schema, types
from posttrain.envs.sql import cells, dialogue, rewards, verifier

Completion = Sequence[types.Message]
# A number in the form of `cells`.
_NUMBER = re.compile(r'-?[0-9]{1,300}((?:\.[0-9]+)?(?:e[+-][0-9]+)?)')


def reward_correctness(
  completions: Sequence[Completion],
  gold_rows: Sequence[cells.Rows],
  answer_type: Sequence[str],
  **columns: Any,
) -> list[float | None]:
  """Returns 1 for a correct answer, 0 for a wrong or missing one."""
  info_columns = {'gold_rows': gold_rows, 'answer_type': answer_type}
  info_columns |= {
    k: columns[k] for k in ('other_golds', 'ranks') if k in columns
  }
  values = []
  for i, messages in enumerate(completions):
    steps = list(_steps(messages))
    answers = [a.argument for a, text in steps if _is_answer(a, text)]
    info = {key: column[i] for key, column in info_columns.items()}
    right = bool(answers) and verifier.equals_any(answers[0], info)
    values.append(float(right) if steps else None)
  return values


def reward_progress(
  completions: Sequence[Completion],
  gold_rows: Sequence[cells.Rows],
  other_golds: Sequence[Sequence[cells.Rows] | None] | None = None,
  **columns: Any,
) -> list[float | None]:
  """Returns the progress of the last query to a gold, in [0, 1]."""
  del columns
  return [
    None if ledger is None else ledger.progress
    for ledger in _replay(completions, gold_rows, other_golds)
  ]


def reward_operational(
  completions: Sequence[Completion],
  gold_rows: Sequence[cells.Rows],
  **columns: Any,
) -> list[float | None]:
  """Returns the sum of the steps' operational rewards, by version 2."""
  del columns
  return [
    None if ledger is None else ledger.operational
    for ledger in _replay(completions, gold_rows)
  ]


def _replay(
  completions: Sequence[Completion],
  gold_rows: Sequence[cells.Rows],
  other_golds: Sequence[Sequence[cells.Rows] | None] | None = None,
) -> Iterator[rewards.Ledger | None]:
  """Yields the ledger of each completion; None if it has no turn."""
  others = other_golds or [None] * len(gold_rows)
  for messages, *golds in zip(completions, gold_rows, others, strict=True):
    ledger = rewards.Ledger(schema.SqlReward(), golds[0], golds[1] or ())
    steps = list(_steps(messages))
    for action, text in steps:
      if _is_answer(action, text):
        break
      result, _ = dialogue.read(text)
      rows = None
      if result is not None and action.type == 'QUERY':
        rows = _rows(result)
      ledger.step(rewards.Step(rewards.key(action), result is None, rows))
    yield ledger if steps else None


def _is_answer(action: dialogue.Action, observation: str) -> bool:
  return action.type == 'ANSWER' and not observation


def _steps(messages: Completion) -> Iterator[tuple[dialogue.Action, str]]:
  """Yields each action with the observation after it; '' = none."""
  for i, message in enumerate(messages):
    if message['role'] == 'assistant':
      rest = messages[i + 1 : i + 2]
      observation = rest[0]['content'] if rest else ''
      yield dialogue.parse(message['content']), observation


def _rows(result: str) -> cells.Rows:
  """Reads shown rows; text in the form of a number becomes one."""
  if result == 'empty':
    return ()
  text = result.removesuffix(cells.CUT)
  return tuple(tuple(map(_cell, row)) for row in cells.read(text))


def _cell(text: str | None) -> cells.Cell:
  if text is None or not (number := _NUMBER.fullmatch(text)):
    return text
  return float(text) if number[1] else int(text)
