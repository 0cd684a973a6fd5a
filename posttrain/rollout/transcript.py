"""The conversation of an episode as messages and as tokens.

    prompt | header  sampled ids | close, environment, header  sampled ids | ...
    mask:    False   True          False                       True

Sampled ids are kept as they were sampled, whatever text they decode to; the
environment's messages are tokenized once and appended. Only this module records
which tokens the policy sampled.

If the history changes, the episode continues as another sample, which begins
with the new history, masked out: so each sampled token is trained in exactly
one sample, the one with the history that it was sampled after. The history
changes if the chat template rewrites earlier turns (it drops thoughts, say), or
if only the last exchanges are in the policy's context: an exchange is a turn of
the policy with the environment's reply. The prompt is always in the context.

Axes: T tokens of a sample.
"""

import contextlib
import dataclasses
from collections.abc import Sequence

import numpy as np

from posttrain import types
from posttrain.chat import rendering
from posttrain.decode import requests


class Transcript:
  """The conversation of one episode, from its prompt on."""

  def __init__(
    self, renderer: rendering.Renderer, keep_exchanges: int | None = None
  ):
    """Starts an empty conversation.

    Args:
      renderer: turns messages into tokens.
      keep_exchanges: the number of last exchanges in the policy's context, at
        least 1; None = all.
    """
    self._renderer, self._keep = renderer, keep_exchanges
    self._parts = [_Part(rendering.EMPTY, ())]
    self._prompt_messages = 0  # number of messages of the prompt
    self._turn_messages: list[int] = []  # index of each turn's message
    self._outcomes: list[tuple[float, str]] = []  # per turn
    self.messages: types.Messages = ()  # the whole conversation
    self.num_added = 0  # tokens after the prompt; a repeated history is none

  def __len__(self) -> int:
    """Returns the number of tokens of the current sample."""
    return len(self._parts[-1].rendered)

  @property
  def num_turns(self) -> int:
    """The number of the policy's turns."""
    return len(self._turn_messages)

  @property
  def restarts(self) -> int:
    """The number of times that the history changed."""
    return len(self._parts) - 1

  def append_environment(self, messages: Sequence[types.Message]) -> np.ndarray:
    """Appends the environment's messages, and the header of the next turn.

    A turn of the policy that was cut off is closed first, with an eos that was
    not sampled.

    Returns:
      The appended ids, i32[n]; if the history has changed, and `restarts` with
      it, all ids of the new history.

    Raises:
      ValueError: the messages cannot be rendered.
    """
    conversation = (*self.messages, *messages)
    part = self._parts[-1]
    extended = (*part.visible, *range(len(self.messages), len(conversation)))
    visible, rendered = self._visible(extended), None
    if visible == extended:
      with contextlib.suppress(rendering.Rewritten):
        rendered = self._renderer.extend(
          part.rendered,
          tuple(conversation[i] for i in part.visible),
          messages,
          add_generation_prompt=True,
        )
    if rendered is not None:
      start = len(part.rendered)
      assert np.array_equal(rendered.ids[:start], part.rendered.ids), (
        'the ids that the engine holds must be a prefix of the new ids'
      )
      part.rendered, part.visible = rendered, visible
      num_new = len(rendered) - start
    else:
      start, num_old = 0, len(visible) - len(messages)
      rendered = self._renderer.render(
        [conversation[i] for i in visible], add_generation_prompt=True
      )
      self._parts.append(_Part(rendered, visible))
      is_new = (rendered.messages < 0) | (rendered.messages >= num_old)
      num_new = int(is_new.sum())
    if self.num_turns:
      self.num_added += num_new
    else:
      self._prompt_messages = len(conversation)
    self.messages = conversation
    return rendered.ids[start:]

  def _visible(self, indices: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the indices of messages that are in the policy's context."""
    if self._keep is None or self.num_turns <= self._keep:
      return indices
    first = self._turn_messages[-self._keep]
    return tuple(i for i in indices if i < self._prompt_messages or i >= first)

  def append_completion(self, completion: requests.Completion) -> str:
    """Appends the policy's turn; returns its text without the stop token."""
    ids = completion.ids
    if completion.stop_reason == 'eos':
      assert ids[-1] in self._renderer.stop_ids, 'eos is a stop token'
      ids = ids[:-1]
    text = self._renderer.tokenizer.decode(ids.tolist())
    part = self._parts[-1]
    part.turns.append((len(self), completion))
    part.rendered = self._renderer.append(part.rendered, completion.ids)
    part.visible += (len(self.messages),)
    self._turn_messages.append(len(self.messages))
    self.messages += ({'role': 'assistant', 'content': text},)
    self.num_added += len(completion.ids)
    return text

  def add_outcome(self, reward: float, stop_reason: str) -> None:
    """Records the last turn's reward and stop reason."""
    self._outcomes.append((reward, stop_reason))

  def turns(self) -> tuple[types.Turn, ...]:
    """Returns the policy's turns; each must have its outcome."""
    places = [
      (sample, start, len(turn.ids))
      for sample, part in enumerate(self._sampled_parts)
      for start, turn in part.turns
    ]
    return tuple(
      types.Turn(*place, *outcome)
      for place, outcome in zip(places, self._outcomes, strict=True)
    )

  def samples(
    self, task: types.Task, temperature: float
  ) -> tuple[types.Sample, ...]:
    """Returns the samples, each up to the last token that the policy sampled.

    Later messages of the environment precede no sampled token. There is one
    sample, and one more for each restart that was followed by a turn; none if
    the episode has no turn.

    Args:
      task: the episode's task.
      temperature: the temperature of the sampled tokens; the others have 1.
    """
    return tuple(part.sample(task, temperature) for part in self._sampled_parts)

  @property
  def _sampled_parts(self) -> list['_Part']:
    return [part for part in self._parts if part.turns]


@dataclasses.dataclass
class _Part:
  """One sample: a history, and the turns that continue it."""

  rendered: rendering.Rendered  # its `messages` are indices into `visible`
  visible: tuple[int, ...]  # indices of the conversation's rendered messages
  # (index of the first token, completion) of each turn.
  turns: list[tuple[int, requests.Completion]] = dataclasses.field(
    default_factory=list
  )

  def sample(self, task: types.Task, temperature: float) -> types.Sample:
    """Returns the sample, without what follows the last sampled token."""
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
    indices = np.array(self.visible, np.int32)
    return types.Sample(
      env=task.env,
      row=task.id,
      ids=self.rendered.ids[:n],
      # Not the renderer's `sampled`, which includes assistant turns of the
      # prompt and of the environment.
      mask=mask,
      roles=self.rendered.roles[:n],
      is_content=self.rendered.is_content[:n],
      sampler_logprobs=logprobs,
      temperatures=np.where(mask, temperature, 1).astype(np.float32),
      versions=versions,
      message_ids=np.where(messages < 0, messages, indices[messages]),
      task=task,
    )
