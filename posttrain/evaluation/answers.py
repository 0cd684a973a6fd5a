"""Answers of an evaluation, to its tasks and to the prompts of its suite."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from posttrain import types


@dataclasses.dataclass(frozen=True)
class Answer:
  """One greedy attempt at a held-out task."""

  env: str
  id: str
  prompt: str = ''
  text: str = ''
  answer: Any = None
  correct: bool | None = None
  formatted: bool | None = None
  reward: float | None = None
  stop_reason: str = 'eos'
  tokens: int = 0
  error: str | None = None
  question: str = ''  # the last message of the prompt
  tools: bool = False  # whether the prompt describes tools
  messages: tuple[types.Message, ...] = ()  # after the prompt
  turn_rewards: tuple[float, ...] = ()  # of the policy's turns, in their order
  # Of the score.
  metrics: dict[str, float] = dataclasses.field(default_factory=dict)
  # Of `measures`, as 'pass_rate', 'sampled_reward/<name>', 'nll' and 'kl'; of
  # pairs: 'accuracy' and 'margin'.
  measures: dict[str, float] = dataclasses.field(default_factory=dict)
  # Of each answer at temperature 1: whether it is correct, None = not graded.
  sampled: tuple[bool | None, ...] = ()
  sampled_texts: tuple[str, ...] = ()  # the same answers


@dataclasses.dataclass(frozen=True)
class SuiteAnswer:
  """The greedy answer to a prompt of the suite."""

  prompt: str
  text: str
  stop_reason: str
  tokens: int
  # Grader -> value of the text; no entry where it had nothing to measure.
  grades: dict[str, float] = dataclasses.field(default_factory=dict)

  @property
  def values(self) -> dict[str, float]:
    """The grades, the length in tokens, and whether a budget cut the answer."""
    return {
      'length': float(self.tokens),
      'truncated': float(self.stop_reason in ('max_tokens', 'overflow')),
      **self.grades,
    }


def suite_metrics(answers: Sequence[SuiteAnswer]) -> dict[str, float]:
  """Returns {'eval/suite/<name>': mean over the answers that have it}."""
  values: dict[str, list[float]] = {}
  for suite_answer in answers:
    for name, value in suite_answer.values.items():
      values.setdefault(name, []).append(value)
  return {f'eval/suite/{k}': float(np.mean(x)) for k, x in values.items()}


def of(
  rollout: types.Rollout,
  sampled: Sequence[types.Rollout] = (),
  measures: Mapping[str, float] | None = None,
) -> Answer:
  """Returns a greedy rollout as an `Answer`.

  Args:
    rollout: the greedy rollout.
    sampled: rollouts of the same task at temperature 1; their grades and
      texts are kept.
    measures: the task's measures beside the grade.
  """
  task, score = rollout.task, rollout.score
  messages = rollout.completion_messages
  return Answer(
    env=task.env,
    id=task.id,
    prompt='\n'.join(turn['content'] for turn in rollout.prompt),
    text=_text(rollout),
    answer=task.answer,
    correct=score.correct,
    formatted=score.formatted,
    reward=score.reward,
    stop_reason=rollout.stop_reason,
    tokens=int(sum(sample.mask.sum() for sample in rollout.samples)),
    error=rollout.error,
    question=rollout.prompt[-1]['content'],
    tools=task.tools is not None,
    messages=tuple(
      {'role': x['role'], 'content': x['content']} for x in messages
    ),
    turn_rewards=tuple(float(turn.reward) for turn in rollout.turns),
    metrics={key: float(value) for key, value in score.metrics.items()},
    measures=dict(measures or {}),
    sampled=tuple(other.score.correct for other in sampled),
    sampled_texts=tuple(map(_text, sampled)),
  )


def _text(rollout: types.Rollout) -> str:
  """Returns the completion: one message's text, or a line per message."""
  messages = rollout.completion_messages
  if len(messages) == 1:
    return messages[0]['content']
  return '\n'.join(f'{x["role"]}: {x["content"]}' for x in messages)
