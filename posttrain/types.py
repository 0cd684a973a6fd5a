"""Host types: what flows from a task to a packed batch. Numpy only, no jax.

The way of the data: `Task` -> `Rollout` (of `Sample`s, with a `Score`) ->
streams stamped on the samples -> `Batch`.

Axes: T tokens of a sample or a row; M micro-batches, B rows.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

Message = Mapping[str, Any]  # {'role': 'user', 'content': 'What is 1 + 2?'}
Messages = tuple[Message, ...]

ROLES = ('system', 'user', 'assistant', 'tool')  # index = `Sample.roles`
COMPONENTS = ('rl', 'ce', 'ref_kl')
STOP_REASONS = (
  'eos',
  'max_tokens',
  'max_turns',
  'env_done',
  'overflow',
  'error',
)


@dataclasses.dataclass(frozen=True)
class Task:
  """One problem instance: data only, drawn from an environment's source."""

  id: str  # unique within its environment; names the row in error messages
  env: str
  prompt: Messages
  answer: Any = None
  # What a perfect policy would say next (assistant turns, and the
  # environment's turns between them); None where nobody knows.
  demonstration: Messages | None = None
  info: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Score:
  """An episode's grade. None means "not scorable", never "zero"."""

  reward: float | None
  correct: bool | None = None
  formatted: bool | None = None  # the answer could be parsed
  metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
  # What was answered, in a form that answers share if and only if they agree;
  # None = it cannot be parsed, or the environment does not say.
  answer: str | None = None


@dataclasses.dataclass(frozen=True)
class StepOut:
  """What one environment move gives back."""

  messages: Messages = ()
  reward: float = 0.0
  done: bool = True
  info: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Sample:
  """A token sequence that trains. Every array is [T].

  The sampler fills the first block, `algorithms.streams.finalize` the second.
  `advantages=None` means "no credit was assigned", which is not "all zero".
  """

  env: str
  row: str  # id of the task it came from, for error messages
  ids: np.ndarray  # i32
  mask: np.ndarray  # bool, completion tokens, whoever sampled them
  roles: np.ndarray  # i8, index into ROLES
  is_content: np.ndarray  # bool, False on chat-template scaffold
  sampler_logprobs: np.ndarray  # f32, nats; 0 where not sampled
  temperatures: np.ndarray  # f32
  versions: np.ndarray  # i32, step of the weights that sampled; -1 = nobody
  # i32, of which of the rollout's messages; -1 = sampled, or a header.
  message_ids: np.ndarray | None = None
  task: Task | None = None

  advantages: np.ndarray | None = None  # f32
  rl_weights: np.ndarray | None = None  # f32
  ce_weights: np.ndarray | None = None  # f32
  ref_kl_weights: np.ndarray | None = None  # f32
  ref_logprobs: np.ndarray | None = None  # f32, nats

  def __len__(self) -> int:
    return len(self.ids)


@dataclasses.dataclass(frozen=True)
class Turn:
  """One turn of the policy, as tokens.

  Every turn was answered by the environment, the last one of an episode that
  was cut off too: its reward is for what had been said by then.
  """

  sample: int  # which of the rollout's samples it is in
  start: int  # its first token there
  length: int  # sampled tokens
  reward: float  # `StepOut.reward`; no part of the episode's grade
  stop_reason: str  # eos, max_tokens or overflow: how the turn ended


@dataclasses.dataclass(frozen=True)
class Rollout:
  """One complete attempt at a task."""

  uid: int  # unique over the whole run
  task: Task
  messages: Messages  # prompt and everything after it
  # Several only if the history was rewritten, or not all of it kept.
  samples: tuple[Sample, ...]
  score: Score
  stop_reason: str  # of `STOP_REASONS`
  error: str | None = None  # what went wrong, where stop_reason is 'error'
  # In order; none where nobody played, or an error ended it.
  turns: tuple[Turn, ...] = ()

  @property
  def prompt(self) -> Messages:
    """What was asked.

    An environment may make it of the task's, of as many messages. Where it
    failed before there were any, the task's.
    """
    return self.messages[: len(self.task.prompt)] or self.task.prompt

  @property
  def completion_messages(self) -> Messages:
    """The messages after the prompt."""
    return self.messages[len(self.task.prompt) :]


@dataclasses.dataclass(frozen=True)
class Pair:
  """Answers to one prompt: the chosen and the rejected; or one of them."""

  chosen: Sample | None
  rejected: Sample | None
  # f32[2], log probability of each answer under the reference, nats.
  ref_logprobs: np.ndarray
  margin: float = 0.0  # by which a reward model is to tell them apart


# Per-token fields that `Sample` and `Batch` share, with their dtypes. They
# are padded with 0, but ids (the pad id), temperatures (1), versions (-1).
TOKEN_FIELDS = {
  'ids': np.int32,
  'mask': np.bool_,
  'sampler_logprobs': np.float32,
  'temperatures': np.float32,
  'versions': np.int32,
  'advantages': np.float32,
  'rl_weights': np.float32,
  'ce_weights': np.float32,
  'ref_kl_weights': np.float32,
  'ref_logprobs': np.float32,
}


@dataclasses.dataclass(frozen=True)
class Batch:
  """Packed samples: `[M, B, T]` per-token arrays (a pytree, see `arrays`).

  Only the first `num_micro_batches` micro-batches hold tokens; the rest is
  padding that keeps the shape fixed. The counts are those of member tokens
  (weight != 0) over the whole global batch, and of samples that have one; they
  are the losses' denominators.
  """

  ids: np.ndarray  # i32
  mask: np.ndarray  # bool
  sampler_logprobs: np.ndarray  # f32, nats
  temperatures: np.ndarray  # f32
  versions: np.ndarray  # i32
  advantages: np.ndarray  # f32
  rl_weights: np.ndarray  # f32
  ce_weights: np.ndarray  # f32
  ref_kl_weights: np.ndarray  # f32
  ref_logprobs: np.ndarray  # f32, nats
  segment_ids: np.ndarray  # i32, 1, 2, ... within a row; 0 = pad
  positions: np.ndarray  # i32, RoPE index, restarts per segment
  env_ids: np.ndarray  # i32, index into the stage's environments; -1 = pad
  rl_count: np.ndarray  # f32[]
  ce_count: np.ndarray  # f32[]
  ref_kl_count: np.ndarray  # f32[]
  rl_sequences: np.ndarray  # f32[], samples with an rl member
  num_micro_batches: np.ndarray  # i32[], those that hold tokens

  @property
  def members(self) -> np.ndarray:
    """f32[]; where it is 0 there is nothing to train on."""
    return self.rl_count + self.ce_count + self.ref_kl_count


@dataclasses.dataclass(frozen=True)
class PairBatch:
  """Packed choices: per-token arrays `[M, B, T]`, per-choice `[M, B, K]`.

  A choice lies whole in its row. Answer a (0 chosen, 1 rejected) of choice k
  of a row is segment 2 k + a + 1 there, prompt included.

  The first `num_micro_batches` micro-batches train. Those after them, up to
  `scored`, hold answers to other prompts, with which KTO compares (as
  `chosen`).
  """

  ids: np.ndarray  # i32
  mask: np.ndarray  # bool, tokens of the answers
  segment_ids: np.ndarray  # i32, see above; 0 = pad
  positions: np.ndarray  # i32, RoPE index, restarts per segment
  present: np.ndarray  # bool[M, B, K, 2], answers that are there
  ref_logprobs: np.ndarray  # f32[M, B, K, 2], see `Choice`
  margins: np.ndarray  # f32[M, B, K]
  pairs: (
    np.ndarray
  )  # f32[], choices that have both answers in the first `num_micro_batches`
  answers: np.ndarray  # f32[], answers in the first `num_micro_batches`
  num_micro_batches: np.ndarray  # i32[], those that train
  scored: np.ndarray  # i32[], those, and the ones behind them
  baseline: np.ndarray  # f32[], KTO's z, once it is known

  @property
  def members(self) -> np.ndarray:
    """f32[]; where it is 0 there is nothing to train on."""
    return self.answers
