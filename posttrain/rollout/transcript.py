"""What was said in an episode, as text and as tokens: token in, token out.

    prompt | header  sampled ids | close, environment, header  sampled ids | ...
    mask:    False   True          False                       True

Sampled ids are kept as they were sampled, whatever text they decode to; what
the environment says is tokenized once and appended. Here and nowhere else it
is booked who wrote a token.

Where the chat template rewrites earlier turns (it forgets thoughts, say), the
episode goes on as another sample, which begins with the history as the
template shows it then: all of it given, so that each sampled token is trained
on in one sample, the one whose history it was sampled after.

Axes: T tokens of a sample.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from posttrain import types
from posttrain.chat import renderer as chat
from posttrain.decode import requests


class Transcript:
  """The conversation of one episode, from its prompt on."""

  def __init__(self, renderer: chat.Renderer):
    self._renderer = renderer
    self._parts = [_Part(chat.EMPTY)]
    self.messages: types.Messages = ()  # all that was said

  def __len__(self) -> int:
    """Tokens of the sample up to where the policy goes on."""
    return len(self._parts[-1].rendered)

  @property
  def turns(self) -> int:
    """Turns that the policy has taken."""
    return sum(len(part.turns) for part in self._parts)

  @property
  def restarts(self) -> int:
    """How often the history was rewritten."""
    return len(self._parts) - 1

  def hear(self, messages: Sequence[types.Message]) -> np.ndarray:
    """Appends what the environment says, and the header of the next turn.

    A turn of the policy that was cut off is closed first, with an eos that
    nobody sampled.

    Returns:
      The ids that this adds, i32[n]; all of the history's, if it was rewritten:
      `restarts` has grown then.

    Raises:
      ValueError: the messages cannot be rendered.
    """
    part, everything = self._parts[-1], (*self.messages, *messages)
    before = part.rendered
    try:
      after = self._renderer.extend(
          before, self.messages, messages, add_generation_prompt=True
      )
    except chat.Rewritten:
      before = chat.EMPTY
      after = self._renderer.render(everything, add_generation_prompt=True)
      part = _Part(after)
      self._parts.append(part)
    assert np.array_equal(after.ids[:len(before)], before.ids), (
        'the ids that the engine holds must be a prefix of those that follow'
    )
    part.rendered, self.messages = after, everything
    return after.ids[len(before):]

  def say(self, completion: requests.Completion) -> str:
    """Appends the policy's turn; returns its text, without the stop token."""
    ids = completion.ids
    if completion.stop_reason == 'eos':
      assert ids[-1] in self._renderer.stop_ids, 'eos is a stop token'
      ids = ids[:-1]
    text = self._renderer.tokenizer.decode(ids.tolist())
    part = self._parts[-1]
    part.turns.append((len(self), completion))
    part.rendered = self._renderer.append(part.rendered, completion.ids)
    self.messages += ({'role': 'assistant', 'content': text},)
    return text

  def samples(
      self, task: types.Task, temperature: float
  ) -> tuple[types.Sample, ...]:
    """Returns the tokens up to the last one that the policy sampled.

    What the environment said after it has no successor to condition. One
    sample, and one more for every restart that the policy answered to.

    Args:
      task: what was played.
      temperature: that of the sampled tokens; the others have 1.
    """
    parts = [part for part in self._parts if part.turns]
    assert parts, 'an episode without a turn has nothing to train on'
    return tuple(part.sample(task, temperature) for part in parts)


@dataclasses.dataclass
class _Part:
  """What the engine held at a time: one sample."""

  rendered: chat.Rendered
  # (first token, turn) of the policy.
  turns: list[tuple[int, requests.Completion]] = dataclasses.field(
      default_factory=list
  )

  def sample(self, task: types.Task, temperature: float) -> types.Sample:
    start, last = self.turns[-1]
    n = start + len(last.ids)
    mask, logprobs = np.zeros(n, bool), np.zeros(n, np.float32)
    versions = np.full(n, -1, np.int32)
    for start, turn in self.turns:
      place = slice(start, start + len(turn.ids))
      mask[place] = True
      logprobs[place] = turn.logprobs
      versions[place] = turn.version
    return types.Sample(
        env=task.env,
        row=task.id,
        ids=self.rendered.ids[:n],
        # Not the renderer's `sampled`: an assistant turn that came with the
        # prompt, or from the environment, was sampled by nobody.
        mask=mask,
        roles=self.rendered.roles[:n],
        is_content=self.rendered.is_content[:n],
        sampler_logprobs=logprobs,
        temperatures=np.where(mask, temperature, 1).astype(np.float32),
        versions=versions,
        message_ids=self.rendered.messages[:n],
        task=task,
    )
