"""Tokens of the environment's messages, each message once."""

import numpy as np

from posttrain import types

_ASSISTANT = types.ROLES.index('assistant')


def contents(rollout: types.Rollout) -> list[np.ndarray]:
  """Returns masks of the contents of messages after the prompt.

  The prompt is all messages before the first sampled token. If the history was
  rewritten, a later sample begins with the whole history: its mask leaves out
  messages of earlier samples, and assistant turns before its first sampled
  token, which are the policy's. (An assistant turn of the environment cannot be
  distinguished from them, and is left out as well.)

  Returns:
    bool[T] per sample.
  """
  masks: list[np.ndarray] = []
  known: set[int] | None = None  # messages of the prompt or an earlier sample
  for sample in rollout.samples:
    ids, is_prefix = sample.message_ids, np.cumsum(sample.mask) == 0
    assert ids is not None, 'message_ids'
    if known is None:
      known = set(ids[is_prefix].tolist())
    masks.append(
      sample.is_content
      & ~sample.mask
      & (ids >= 0)
      & ~np.isin(ids, list(known))
      & ~(is_prefix & (sample.roles == _ASSISTANT))
    )
    known |= set(ids.tolist())
  return masks
