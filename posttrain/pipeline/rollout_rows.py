"""The rollouts of a training step as rows, to be read.

A row is one rollout: `env`, `task`, `group` (its number in the step), `prompt`
and `completion` (messages), `rendered` (the prompt as the model read it: the
text of its tokens, with tools and template), `answer`, `reward`, `rewards` (the
value of each summand), `correct`, `advantage` (the mean over its completion
tokens; null if it does not train), `stop_reason`, `tokens` (sampled ones),
`version` (the step whose weights sampled its first token), `turn_rewards`,
`error`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from posttrain import types
from posttrain.chat import tokenizers

MAX_GROUPS = 64  # per environment and step


class Played(NamedTuple):
  """The groups of an environment in a step."""

  groups: Sequence[Sequence[types.Rollout]]  # all
  trained: Sequence[Sequence[types.Rollout]]  # those whose samples follow
  samples: Sequence[types.Sample]  # with streams, in order
  tokenizer: tokenizers.Tokenizer


def rows(played: Mapping[str, Played]) -> Iterator[dict[str, Any]]:
  """Yields the rows of the first `MAX_GROUPS` groups of each environment."""
  for env, step in played.items():
    advantages = _advantages(step)
    for number, group in enumerate(step.groups[:MAX_GROUPS]):
      for rollout in group:
        yield {
          'env': env,
          'task': rollout.task.id,
          'group': number,
          **_row(rollout, step.tokenizer),
          'advantage': advantages.get(rollout.uid),
        }


def _row(
  rollout: types.Rollout, tokenizer: tokenizers.Tokenizer
) -> dict[str, Any]:
  score = rollout.score
  versions = [x.versions[x.mask] for x in rollout.samples if x.mask.any()]
  return {
    'prompt': list(rollout.prompt),
    'completion': list(rollout.completion_messages),
    'rendered': tokenizers.show(tokenizer, _prompt_ids(rollout)),
    'answer': rollout.task.answer,
    'reward': score.reward,
    'rewards': dict(score.summands),
    'correct': score.correct,
    'stop_reason': rollout.stop_reason,
    'tokens': sum(len(x) for x in versions),
    'version': int(versions[0][0]) if versions else None,
    'turn_rewards': [float(turn.reward) for turn in rollout.turns],
    'error': rollout.error,
  }


def _prompt_ids(rollout: types.Rollout) -> Sequence[int]:
  """Returns the tokens before the first sampled one; () without samples."""
  if not rollout.samples:
    return ()
  first = rollout.samples[0]
  return first.ids[: int(first.mask.argmax())].tolist()


def _advantages(step: Played) -> dict[int, float]:
  """Returns {uid: mean advantage over the completion tokens}."""
  samples, means = iter(step.samples), {}
  for rollout in (rollout for group in step.trained for rollout in group):
    own = [next(samples) for _ in rollout.samples]
    values = [x.advantages[x.mask] for x in own if x.advantages is not None]
    if values and sum(map(len, values)):
      means[rollout.uid] = float(np.concatenate(values).mean())
  return means
