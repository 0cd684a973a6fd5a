"""What was said in an episode, as text and as tokens: token in, token out.

    prompt | header  sampled ids | close, environment, header  sampled ids | ...
    mask:    False   True          False                       True

Sampled ids are kept as they were sampled, whatever text they decode to; what
the environment says is tokenized once and appended. Here and nowhere else it
is booked who wrote a token.

Where the history is another than before, the episode goes on as another
sample, which begins with that history: all of it given, so that each sampled
token is trained on in one sample, the one whose history it was sampled after.
It is another where the chat template rewrites earlier turns (it forgets
thoughts, say), and where the policy sees no more than the last exchanges: an
exchange is a turn of the policy with what the environment said to it. The
prompt is always seen.

Axes: T tokens of a sample.
"""

import contextlib
import dataclasses
from collections.abc import Sequence

import numpy as np

from posttrain import types
from posttrain.chat import renderer as chat
from posttrain.decode import requests


class Transcript:
  """The conversation of one episode, from its prompt on."""

  def __init__(
    self, renderer: chat.Renderer, keep_exchanges: int | None = None
  ):
    """Args: keep_exchanges: that the policy sees, at least 1; None = all."""
    self._renderer, self._keep = renderer, keep_exchanges
    self._parts = [_Part(chat.EMPTY, ())]
    self._prompt = 0  # messages of it
    self._credits: list[tuple[float, str]] = []  # per turn
    self.messages: types.Messages = ()  # all that was said
    self.said: list[int] = []  # which of them the policy did
    self.added = 0  # tokens behind the prompt; a history given again is none

  def __len__(self) -> int:
    """Tokens of the sample up to where the policy goes on."""
    return len(self._parts[-1].rendered)

  @property
  def restarts(self) -> int:
    """How often the history became another."""
    return len(self._parts) - 1

  def hear(self, messages: Sequence[types.Message]) -> np.ndarray:
    """Appends what the environment says, and the header of the next turn.

    A turn of the policy that was cut off is closed first, with an eos that
    nobody sampled.

    Returns:
      The ids that this adds, i32[n]; all of the history's, if it is another:
      `restarts` has grown then.

    Raises:
      ValueError: the messages cannot be rendered.
    """
    everything = (*self.messages, *messages)
    part = self._parts[-1]
    shown = (*part.shown, *range(len(self.messages), len(everything)))
    kept, after = self._kept(shown), None
    if kept == shown:
      with contextlib.suppress(chat.Rewritten):
        after = self._renderer.extend(
          part.rendered,
          tuple(everything[i] for i in part.shown),
          messages,
          add_generation_prompt=True,
        )
    if after is not None:
      start = len(part.rendered)
      assert np.array_equal(after.ids[:start], part.rendered.ids), (
        'the ids that the engine holds must be a prefix of those that follow'
      )
      part.rendered, part.shown, new = after, shown, len(after) - start
    else:
      start, old = 0, len(kept) - len(messages)
      after = self._renderer.render(
        [everything[i] for i in kept], add_generation_prompt=True
      )
      self._parts.append(_Part(after, kept))
      new = int(((after.messages < 0) | (after.messages >= old)).sum())
    if self.said:
      self.added += new
    else:
      self._prompt = len(everything)
    self.messages = everything
    return after.ids[start:]

  def _kept(self, shown: tuple[int, ...]) -> tuple[int, ...]:
    """The messages of these that the policy sees from here on."""
    if self._keep is None or len(self.said) <= self._keep:
      return shown
    since = self.said[-self._keep]
    return tuple(i for i in shown if i < self._prompt or i >= since)

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
    part.shown += (len(self.messages),)
    self.said.append(len(self.messages))
    self.messages += ({'role': 'assistant', 'content': text},)
    self.added += len(completion.ids)
    return text

  def credit(self, reward: float, stop_reason: str) -> None:
    """Books what the environment gave for the last turn, and how it stopped."""
    self._credits.append((reward, stop_reason))

  def turns(self) -> tuple[types.Turn, ...]:
    """Returns the policy's turns, each of which has had its credit."""
    places = [
      (sample, start, len(turn.ids))
      for sample, part in enumerate(self._spoken)
      for start, turn in part.turns
    ]
    return tuple(
      types.Turn(*place, *credit)
      for place, credit in zip(places, self._credits, strict=True)
    )

  def samples(
    self, task: types.Task, temperature: float
  ) -> tuple[types.Sample, ...]:
    """Returns the tokens up to the last one that the policy sampled.

    What the environment said after it has no successor to condition. One
    sample, and one more for every restart that the policy answered to; none of
    an episode without a turn.

    Args:
      task: what was played.
      temperature: that of the sampled tokens; the others have 1.
    """
    return tuple(part.sample(task, temperature) for part in self._spoken)

  @property
  def _spoken(self) -> list['_Part']:
    return [part for part in self._parts if part.turns]


@dataclasses.dataclass
class _Part:
  """What the engine held at a time: one sample."""

  rendered: chat.Rendered  # its `messages` are indices into `shown`
  shown: tuple[int, ...]  # which of the conversation's messages it renders
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
    messages = self.rendered.messages[:n]
    places = np.array(self.shown, np.int32)
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
      message_ids=np.where(messages < 0, messages, places[messages]),
      task=task,
    )
