"""What the environment said in an episode, token by token, each word once."""

import numpy as np

from posttrain import types

_ASSISTANT = types.ROLES.index('assistant')


def contents(rollout: types.Rollout) -> list[np.ndarray]:
  """Marks the contents of messages that came behind the prompt.

  The prompt is what stands before the first token that the policy sampled.
  Where a history was rewritten, a later sample begins with all of it: what was
  said in between is marked there, what an earlier sample has is not again, and
  neither are the policy's own turns, which are given there. (An assistant turn
  by the environment cannot be told from them, and is left out as well.)

  Returns:
    bool[T] per sample.
  """
  marked, seen = [], None
  for sample in rollout.samples:
    ids, given = sample.message_ids, np.cumsum(sample.mask) == 0
    if seen is None:
      seen = set(ids[given].tolist())
    marked.append(
      sample.is_content
      & ~sample.mask
      & (ids >= 0)
      & ~np.isin(ids, list(seen))
      & ~(given & (sample.roles == _ASSISTANT))
    )
    seen |= set(ids.tolist())
  return marked
