"""Host types of the data flow, from a task to a packed batch. Numpy, no jax.

`Task` -> `Rollout` (with `Sample`s and a `Score`) -> streams stamped on the
samples -> `Batch`; or `Pair` -> `PairBatch`.

Axes: T tokens of a sample or a row; M micro-batches, B rows.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Message = Mapping[str, Any]  # {'role': 'user', 'content': 'What is 1 + 2?'}
Messages = tuple[Message, ...]
# A numpy array on the host, a jax array inside of a train step.
Array = Any

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


def begins_turn(messages: Sequence[Message]) -> bool:
  """Returns whether messages end in an assistant turn, to be continued."""
  last = messages[-1] if messages else {}
  is_begun = str(last.get('content') or '').strip() != ''
  return is_begun and last['role'] == 'assistant' and not last.get('tool_calls')


@dataclasses.dataclass(frozen=True)
class Tools:
  """The tools of a task, described in its prompt."""

  # As the APIs of models have them; `posttrain.envs.tools.of` builds them.
  schemas: tuple[Mapping[str, Any], ...]
  # How the policy writes calls: 'hermes', 'llama3' or 'plain', see
  # `posttrain.chat.tool_calls`; 'auto' = as its chat template does; 'text' =
  # calls are not read, and every turn is passed to `Episode.step`.
  format: str = 'auto'


@dataclasses.dataclass(frozen=True)
class Task:
  """One problem instance: data only, drawn from an environment's source."""

  id: str  # unique within its environment; names the row in error messages
  env: str
  prompt: Messages
  answer: Any = None
  # A correct completion: assistant turns, and the environment's turns between
  # them; None = unknown.
  demonstration: Messages | None = None
  info: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  # Whether reward functions get prompt and completion as strings, as in TRL's
  # standard format, and not as messages.
  as_text: bool = False
  tools: Tools | None = None
  # Variables of the chat template for this task, such as enable_thinking.
  variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Score:
  """An episode's grade. None means "not scorable", never "zero"."""

  reward: float | None
  correct: bool | None = None
  formatted: bool | None = None  # the answer could be parsed
  metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
  # The parsed answer in a canonical form, equal for equivalent answers; None =
  # not parseable, or not provided by the environment.
  answer: str | None = None
  # Value of each summand of the reward, without its weight; {} = the grade.
  summands: Mapping[str, float | None] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class StepOut:
  """The environment's reply to one turn."""

  messages: Messages = ()
  reward: float = 0.0
  done: bool = True
  info: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Sample:
  """A token sequence that trains. Every array but `routes` is [T].

  The sampler fills the first block, `algorithms.streams` the second.
  `advantages=None` means "no credit was assigned", which is not "all zero".
  """

  env: str
  row: str  # id of the task it came from, for error messages
  ids: np.ndarray  # i32
  mask: np.ndarray  # bool, completion tokens, sampled or from a data set
  roles: np.ndarray  # i8, index into ROLES
  is_content: np.ndarray  # bool, False on tokens of the chat template
  sampler_logprobs: np.ndarray  # f32, nats; 0 where not sampled
  temperatures: np.ndarray  # f32
  # i32, step of the weights that sampled the token; -1 = not sampled.
  versions: np.ndarray
  # i16[T, L, k], the sampler's experts in the L layers with experts; -1 = not
  # recorded, as of the last token.
  routes: np.ndarray | None = None
  # i32, index of the token's message in the rollout; -1 = sampled, or a header.
  message_ids: np.ndarray | None = None
  task: Task | None = None

  advantages: np.ndarray | None = None  # f32
  rl_weights: np.ndarray | None = None  # f32
  ce_weights: np.ndarray | None = None  # f32
  ref_kl_weights: np.ndarray | None = None  # f32
  ref_logprobs: np.ndarray | None = None  # f32, nats
  # Of algorithms with a critic, see `VALUE_FIELDS`.
  rewards: np.ndarray | None = None  # f32
  value_weights: np.ndarray | None = None  # f32
  bootstraps: np.ndarray | None = None  # f32

  def __len__(self) -> int:
    return len(self.ids)


def not_sampled(length: int) -> dict[str, Any]:
  """Returns the fields of a sample whose tokens the policy did not sample."""
  return {
    'sampler_logprobs': np.zeros(length, np.float32),
    'temperatures': np.ones(length, np.float32),
    'versions': np.full(length, -1, np.int32),
    'routes': None,
  }


@dataclasses.dataclass(frozen=True)
class Turn:
  """One turn of the policy, as tokens.

  The environment replies to every turn, also to the truncated last turn of an
  episode, whose reward is for the truncated text.
  """

  sample: int  # index of the turn's sample in the rollout
  start: int  # index of the turn's first token in the sample
  length: int  # number of sampled tokens
  reward: float  # `StepOut.reward`; not part of the episode's grade
  stop_reason: str  # eos, max_tokens or overflow
  # In a sample's first turn, tokens before it that its engine did not compute.
  cached: int = 0


@dataclasses.dataclass(frozen=True)
class Rollout:
  """One complete attempt at a task."""

  uid: int  # unique over the whole run
  task: Task
  messages: Messages  # the whole conversation, from the prompt on
  # Several only if the history was rewritten or shortened.
  samples: tuple[Sample, ...]
  score: Score
  stop_reason: str  # one of `STOP_REASONS`
  error: str | None = None  # why its episode or a reward failed
  # In order; () for a replayed demonstration, or after an error.
  turns: tuple[Turn, ...] = ()

  @property
  def prompt(self) -> Messages:
    """The messages before the first turn, which the prompt's end may begin.

    The environment may rewrite the task's prompt, with the same number of
    messages. The task's prompt if an error came before the first message.
    """
    return self.messages[: self._first_turn] or self.task.prompt

  @property
  def is_truncated(self) -> bool:
    """Whether a token budget cut it off."""
    return self.stop_reason in ('max_tokens', 'overflow')

  @property
  def completion_messages(self) -> Messages:
    """The messages after the prompt."""
    return self.messages[self._first_turn :]

  @property
  def _first_turn(self) -> int:
    return len(self.task.prompt) - begins_turn(self.task.prompt)


@dataclasses.dataclass(frozen=True)
class Pair:
  """A chosen and a rejected answer to one prompt, or only one of the two."""

  chosen: Sample | None
  rejected: Sample | None
  # f32[2], log probability of each answer under the reference, nats.
  ref_logprobs: np.ndarray
  margin: float = 0.0  # minimum difference of the reward model's rewards


# Per-token fields that `Sample` and `Batch` share, with their dtypes. The
# padding is 0, except for ids (the pad id), temperatures (1), versions (-1).
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

# Further fields, in a stage with a critic: the reward of each token;
# the weight of its value, not 0 where the critic gives the advantage; and 1 at
# the last of these in a sample if the value after it stands for what follows.
VALUE_FIELDS = dict.fromkeys(
  ('rewards', 'value_weights', 'bootstraps'), np.float32
)


@dataclasses.dataclass(frozen=True)
class Batch:
  """Packed samples: `[M, B, T]` per-token arrays (a pytree, see `arrays`).

  Only the first `num_micro_batches` micro-batches hold tokens; the others are
  padding that keeps the shape fixed. The counts are numbers of member tokens
  (weight != 0), and of samples with a member, in the whole global batch; they
  are the losses' denominators.
  """

  ids: Array  # i32
  mask: Array  # bool
  sampler_logprobs: Array  # f32, nats
  temperatures: Array  # f32
  versions: Array  # i32
  advantages: Array  # f32
  rl_weights: Array  # f32
  ce_weights: Array  # f32
  ref_kl_weights: Array  # f32
  ref_logprobs: Array  # f32, nats
  segment_ids: Array  # i32, 1, 2, ... within a row; 0 = pad
  positions: Array  # i32, RoPE index, restarts per segment
  env_ids: Array  # i32, index into the stage's environments; -1 = pad
  rl_count: Array  # f32[]
  ce_count: Array  # f32[]
  ref_kl_count: Array  # f32[]
  rl_sequences: Array  # f32[], samples with an rl member
  num_micro_batches: Array  # i32[], micro-batches with tokens
  # Of rows with trees, see `data.packing`; None = a row holds whole samples.
  parents: Array | None = None  # i32, index in the row of the token before
  ends: Array | None = None  # i32, one past the last token of the subtree
  copies: Array | None = None  # i32, samples that have the token
  # Of a stage with a critic, see `VALUE_FIELDS`; the tokens with a value are rl
  # members, whose advantages the train step computes.
  rewards: Array | None = None  # f32
  value_weights: Array | None = None  # f32
  bootstraps: Array | None = None  # f32
  value_count: Array | None = None  # f32[]
  routes: Array | None = None  # i16[M, B, T, L, k], where a sample has them

  @property
  def members(self) -> Array:
    """Number of members, f32[]; a batch with 0 trains nothing."""
    return self.rl_count + self.ce_count + self.ref_kl_count


@dataclasses.dataclass(frozen=True)
class PairBatch:
  """Packed pairs: per-token arrays `[M, B, T]`, per-pair arrays `[M, B, K]`.

  A pair lies whole in its row. Answer a (0 chosen, 1 rejected) of pair k of a
  row is segment 2 k + a + 1, with its prompt; in a tree, with that of the pair
  if it is the first of the two.

  The first `num_micro_batches` micro-batches train. The following ones, up to
  `scored`, hold mismatched answers for KTO's baseline (as `chosen`).
  """

  ids: Array  # i32
  mask: Array  # bool, tokens of the answers
  segment_ids: Array  # i32, see above; 0 = pad
  positions: Array  # i32, RoPE index, restarts per segment
  present: Array  # bool[M, B, K, 2], False where an answer is missing
  ref_logprobs: Array  # f32[M, B, K, 2], nats, see `Pair`
  margins: Array  # f32[M, B, K]
  pairs: Array  # f32[], trained pairs with both answers
  answers: Array  # f32[], trained answers
  num_micro_batches: Array  # i32[], micro-batches that train
  scored: Array  # i32[], micro-batches that train or hold mismatches
  baseline: Array  # f32[], KTO's z; 0 until it is computed
  parents: Array | None = None  # see `Batch`
  ends: Array | None = None

  @property
  def members(self) -> Array:
    """Number of members, f32[]; a batch with 0 trains nothing."""
    return self.answers


@dataclasses.dataclass(frozen=True)
class Samplers:
  """The processes that decode with the policy in place of the run's own.

  Attributes:
    urls: their addresses.
    api_key_env: the environment variable with their key; '' = none.
    vllm_folder: a folder that they see, for weights: they are vLLM's; '' = they
      are ours.
  """

  urls: tuple[str, ...]
  api_key_env: str = ''
  vllm_folder: str = ''
