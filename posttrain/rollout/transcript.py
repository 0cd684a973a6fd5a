"""What was said in an episode, as text and as tokens: token in, token out.

    prompt | header  sampled ids | close, environment, header  sampled ids | ...
    mask:    False   True          False                       True

Sampled ids are kept as they were sampled, whatever text they decode to; what
the environment says is tokenized once and appended. Here and nowhere else it
is booked who wrote a token.

Axes: T tokens of the episode.
"""

from collections.abc import Sequence

import numpy as np

from posttrain import types
from posttrain.chat import renderer as chat
from posttrain.decode import requests


class Transcript:
  """The conversation of one episode, from its prompt on."""

  def __init__(self, renderer: chat.Renderer):
    self._renderer = renderer
    self._rendered = chat.EMPTY
    self._turns: list[tuple[int, requests.Completion]] = []  # (start, turn)
    self.messages: types.Messages = ()  # all that was said

  def __len__(self) -> int:
    """Tokens up to where the policy goes on."""
    return len(self._rendered)

  @property
  def turns(self) -> int:
    """Turns that the policy has taken."""
    return len(self._turns)

  def hear(self, messages: Sequence[types.Message]) -> np.ndarray:
    """Appends what the environment says, and the header of the next turn.

    A turn of the policy that was cut off is closed first, with an eos that
    nobody sampled.

    Returns:
      The ids that this adds: i32[n].

    Raises:
      ValueError: the messages cannot be rendered.
    """
    before = self._rendered
    after = self._renderer.extend(
        before, self.messages, messages, add_generation_prompt=True
    )
    assert np.array_equal(after.ids[:len(before)], before.ids), (
        'the ids that the engine holds must be a prefix of those that follow'
    )
    self._rendered, self.messages = after, (*self.messages, *messages)
    return after.ids[len(before):]

  def say(self, completion: requests.Completion) -> str:
    """Appends the policy's turn; returns its text, without the stop token."""
    ids = completion.ids
    if completion.stop_reason == 'eos':
      assert ids[-1] in self._renderer.stop_ids, 'eos is a stop token'
      ids = ids[:-1]
    text = self._renderer.tokenizer.decode(ids.tolist())
    self._turns.append((len(self), completion))
    self._rendered = self._renderer.append(self._rendered, completion.ids)
    self.messages += ({'role': 'assistant', 'content': text},)
    return text

  def sample(self, task: types.Task, temperature: float) -> types.Sample:
    """Returns the tokens up to the last one that the policy sampled.

    What the environment said after it has no successor to condition.

    Args:
      task: what was played.
      temperature: that of the sampled tokens; the others have 1.
    """
    assert self._turns, 'an episode without a turn has nothing to train on'
    start, last = self._turns[-1]
    n = start + len(last.ids)
    mask, logprobs = np.zeros(n, bool), np.zeros(n, np.float32)
    versions = np.full(n, -1, np.int32)
    for start, turn in self._turns:
      place = slice(start, start + len(turn.ids))
      mask[place] = True
      logprobs[place] = turn.logprobs
      versions[place] = turn.version
    return types.Sample(
        env=task.env,
        row=task.id,
        ids=self._rendered.ids[:n],
        # Not the renderer's `sampled`: an assistant turn that came with the
        # prompt, or from the environment, was sampled by nobody.
        mask=mask,
        roles=self._rendered.roles[:n],
        is_content=self._rendered.is_content[:n],
        sampler_logprobs=logprobs,
        temperatures=np.where(mask, temperature, 1).astype(np.float32),
        versions=versions,
    )
