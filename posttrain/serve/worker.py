"""The threads that run the model: one owns the engine, the other scores.

1. `accept` takes jobs from any thread: tokens to sample, or to score.
2. The engine's thread submits sampling jobs to the engine, where they join the
   requests that decode. Jobs of another policy wait until these have ended.
   The scoring thread scores a batch at a time; while it compiles a program for
   a new shape, decoding goes on.
3. Results of a job are passed to its `notify`, in the thread of its kind;
   `drop` cancels a job, and the next chunk frees its slot.
4. An exception of the engine fails all open jobs, and later jobs run on a new
   engine; one of scoring fails the jobs of its batch.

`score` is a forward like `scoring.score`'s, over the same distribution; ranks
and alternatives need the logits. Shapes are buckets, and one program serves all
requests of a shape, so that few are compiled: powers of two as lengths, one row
or `ROWS`, always `MAX_ALTERNATIVES` alternatives.

Axes: B rows, T tokens, D model, V vocab, A alternatives.
"""

import dataclasses
import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from posttrain import scoring, sharding
from posttrain.checkpoints import policies
from posttrain.decode import engines, requests
from posttrain.models import transformer
from posttrain.util import memory

ROWS = 8  # sequences scored, or prefilled, at a time
MAX_ALTERNATIVES = 20  # per token, as in OpenAI's API
GATHER = 0.01  # seconds without a new job until an exact engine begins
_LOGITS = 2**24  # the most f32 logits of a block


class NewTokens(NamedTuple):
  """Tokens that a job has sampled since its last event."""

  ids: list[int]
  logprobs: list[float]
  stop_reason: str | None  # as in `requests.Completion`; None = more follow
  cached: int = 0  # tokens of the prompt, as in `requests.Completion`


class TokenLogprobs(NamedTuple):
  """Logprobs of a sequence's tokens; entry 0 has no meaning."""

  logprobs: np.ndarray  # f32[T], in nats
  ranks: np.ndarray  # i32[T], 1 = no token is likelier
  # i32[T, A], the likeliest first; A = MAX_ALTERNATIVES or the vocabulary.
  top_ids: np.ndarray
  top_logprobs: np.ndarray  # f32[T, A]


class Failed(NamedTuple):
  """The end of a job without a result."""

  status: int  # the HTTP status
  message: str


Event = NewTokens | Failed | TokenLogprobs | float  # a reward


@dataclasses.dataclass(eq=False)
class Job:
  """Work for the model, with a callback for its results."""

  notify: Callable[['Job', Event], None]
  index: int  # the submitter's own
  policy: policies.Policy


@dataclasses.dataclass(eq=False)
class SampleJob(Job):
  """A sequence to continue."""

  request: requests.Request  # its id is set when the job is accepted
  streamed: bool  # notify after every chunk, not only at the end
  num_sent: int = 0  # tokens in events so far


@dataclasses.dataclass(eq=False)
class ScoreJob(Job):
  """A sequence to score."""

  ids: np.ndarray  # i32[T]
  temperature: float


class Full(Exception):
  """Too many jobs are open."""


class Worker:
  """Runs jobs on one engine."""

  def __init__(
    self,
    policy: policies.Policy,
    name: str,
    *,
    slots: int,
    capacity: int,
    chunk: int,
    max_jobs: int,
    tool_format: str = 'auto',
    exact: bool = False,
  ):
    """Makes a worker without starting its threads.

    Args:
      policy: the model to serve; jobs may have others of its shapes.
      name: its name in requests and responses.
      slots: sequences decoded at a time.
      capacity: tokens of a sequence.
      chunk: tokens decoded between two looks at new and dropped jobs.
      max_jobs: the most open jobs, waiting ones included.
      tool_format: how the policy writes calls of tools, see `types.Tools`.
      exact: whether the bits of a job depend on no other job; programs are
        compiled at their first use.
    """
    self.policy, self.name = policy, name
    self.slots, self.capacity, self.max_jobs = slots, capacity, max_jobs
    self.tool_format = tool_format
    self._rows = 1 if exact else ROWS
    self._engine: Any = None  # made for the first job
    self.is_reward = 'reward' in policy.params
    # Why no more jobs are accepted; None while they are.
    self.failure: Failed | None = None
    self._chunk, self._ids = chunk, itertools.count()
    self._changed = threading.Condition()  # guards what follows
    self._jobs: set[Job] = set()  # the open ones
    self._to_sample: list[SampleJob] = []  # in the order of arrival
    self._to_score: list[ScoreJob] = []
    self._dropped: list[Job] = []  # their slots are not free yet
    self._counts = dict.fromkeys(
      ('accepted', 'finished', 'dropped', 'prompt_tokens', 'cached_tokens'), 0
    )
    self._sampling: dict[int, SampleJob] = {}  # submitted, by id
    self._drawn: policies.Policy | None = None  # whose weights the engine has
    loops = {'engine': self._run, 'score': self._run_scoring}
    if self.is_reward:
      del loops['engine']
    self._threads = [
      threading.Thread(target=loop, name=f'posttrain-{name}', daemon=True)
      for name, loop in loops.items()
    ]

  def start(self) -> None:
    """Compiles the decoding programs, unless `exact`, and starts the threads.

    Raises:
      Exception: the engine cannot decode.
    """
    if not self.is_reward and self._rows > 1:
      self._set_policy(self.policy)
      self._engine.warm_up()
      # Twice: some programs have other inputs once there is a state.
      for _ in range(2):
        request = requests.Request(
          next(self._ids), np.zeros(1, np.int32), self.capacity - 1
        )
        self._engine.submit(request)
        if not self._engine.step():
          self._engine.cancel(request.id)
    for thread in self._threads:
      thread.start()

  def stop(self, wait: float) -> bool:
    """Fails all jobs; returns False if a thread runs on after `wait` s."""
    self._fail(Failed(503, 'the server must be running: it shuts down'), True)
    end = time.monotonic() + wait
    for thread in self._threads:
      thread.join(max(end - time.monotonic(), 0))
    return not any(thread.is_alive() for thread in self._threads)

  def accept(self, jobs: Sequence[Job], *, more: bool = False) -> None:
    """Takes jobs; neighbours with one prompt have it prefilled once.

    Args:
      jobs: accepted all together, or not at all.
      more: the jobs belong to an accepted call, so that `max_jobs` does not
        count.

    Raises:
      Full: too many jobs are open.
    """
    with self._changed:
      if self.failure is None:
        if not more and len(self._jobs) + len(jobs) > self.max_jobs:
          raise Full(f'{len(self._jobs)} sequences of {self.max_jobs}')
        self._jobs.update(jobs)
        self._counts['accepted'] += len(jobs)
        self._to_sample += [x for x in jobs if isinstance(x, SampleJob)]
        self._to_score += [x for x in jobs if isinstance(x, ScoreJob)]
        self._changed.notify_all()
        return
    for job in jobs:
      job.notify(job, self.failure)

  def drop(self, jobs: Iterable[Job]) -> None:
    """Cancels jobs; ignores those that have finished."""
    with self._changed:
      jobs = self._jobs.intersection(jobs)
      self._jobs -= jobs
      self._counts['dropped'] += len(jobs)
      self._dropped += jobs
      self._to_sample = [x for x in self._to_sample if x not in jobs]
      self._to_score = [x for x in self._to_score if x not in jobs]

  def counts(self) -> dict[str, int]:
    """Returns the numbers of slots and jobs, for the health route."""
    with self._changed:
      return {
        'slots': self.slots,
        'under_way': len(self._jobs),
        'drawing': len(self._sampling),
        **self._counts,
      }

  def _set_policy(self, policy: policies.Policy) -> None:
    """Gives the engine the weights of a policy; makes the engine first."""
    if self._engine is None:
      options = engines.Options(
        self.slots,
        self.capacity,
        self._chunk,
        prefill_rows=self._rows,
        prefill_tokens=64,
        exact=self._rows == 1,
      )
      self._engine = engines.Engine(
        self.policy.model, options, sharding.one_device()
      )
      self._engine.take_free_slots()
    self._engine.set_params(policy.params, 0)
    self._drawn = policy

  def _run(self) -> None:
    while self.failure is None:
      try:
        self._receive()
        self._sample()
      except Exception as error:  # any: no client may wait for ever
        _log('the engine failed', error)
        self._fail(Failed(500, "the engine failed; see the server's log"))
        self._sampling, self._engine, self._drawn = {}, None, None

  def _receive(self) -> None:
    """Waits for work; submits new jobs, and frees the slots of dropped ones."""
    with self._changed:
      while not (self._to_sample or self._sampling or self.failure):
        self._changed.wait()
      if self._rows == 1 and not self._sampling:
        # A token of one sequence costs as much as that of all slots. It ends,
        # as clients wait for what they have requested.
        while self._changed.wait(GATHER):
          pass
      accepted, waiting = [], self._to_sample
      policy = waiting[0].policy if waiting else None
      if policy is self._drawn or not self._sampling:
        accepted = [x for x in waiting if x.policy is policy]
        self._to_sample = [x for x in waiting if x.policy is not policy]
      dropped, self._dropped = self._dropped, []
    for job in dropped:
      if isinstance(job, SampleJob) and self._sampling.pop(job.request.id, 0):
        self._engine.cancel(job.request.id)
    if accepted and policy is not self._drawn:
      self._set_policy(policy)
    for job in accepted:
      job.request = dataclasses.replace(job.request, id=next(self._ids))
      self._engine.submit(job.request)
      self._sampling[job.request.id] = job

  def _run_scoring(self) -> None:
    while True:
      with self._changed:
        while not self._to_score and self.failure is None:
          self._changed.wait()
        if self.failure is not None:
          return
        waiting = self._to_score  # the oldest ones share a forward
        same = [x for x in waiting if x.policy is waiting[0].policy]
        batch = same[: self._rows]
        self._to_score = [x for x in waiting if x not in batch]
      try:
        results = score(batch)
      except Exception as error:  # any: no client may wait for ever
        _log('scoring failed', error)
        failure = Failed(500, "scoring failed; see the server's log")
        results = [failure] * len(batch)
      for job, result in zip(batch, results, strict=True):
        self._finish(job, result)

  def _sample(self) -> None:
    """Decodes a chunk, and sends its events."""
    if not self._sampling:
      return
    for x in self._engine.step():
      job = self._sampling.pop(x.id)
      new = _new_tokens(job, x.ids, x.logprobs, x.stop_reason, x.cached)
      with self._changed:
        self._counts['prompt_tokens'] += len(job.request.ids)
        self._counts['cached_tokens'] += x.cached
      self._finish(job, new)
    if not any(job.streamed for job in self._sampling.values()):
      return
    for id, (ids, logprobs, cached) in self._engine.partial().items():
      job = self._sampling[id]
      if job.streamed and len(ids) > job.num_sent:
        job.notify(job, _new_tokens(job, ids, logprobs, None, cached))
        job.num_sent = len(ids)

  def _finish(self, job: Job, event: Event) -> None:
    with self._changed:
      is_open = job in self._jobs
      self._jobs.discard(job)
      self._counts['finished'] += is_open
    if is_open:
      job.notify(job, event)

  def _fail(self, failure: Failed, for_good: bool = False) -> None:
    """Fails the open jobs; with `for_good`, later ones as well."""
    with self._changed:
      if for_good:
        self.failure = self.failure or failure
      jobs, self._jobs = self._jobs, set()
      self._to_sample, self._to_score = [], []
      self._changed.notify_all()
    for job in jobs:
      job.notify(job, failure)


def _log(what: str, error: Any) -> None:
  """Logs a failure, out of device memory as a line with the remedy."""
  if memory.is_oom(error):
    what += f'; lower --slots or --max_model_len: {error!s:.200}'
    error = None
  logging.getLogger('absl').error(what, exc_info=error)


def _new_tokens(
  job: SampleJob, ids, logprobs, reason: str | None, cached: int
) -> NewTokens:
  new = slice(job.num_sent, None)
  return NewTokens(ids[new].tolist(), logprobs[new].tolist(), reason, cached)


def score(batch: Sequence[ScoreJob]):
  """Returns the `TokenLogprobs` of jobs of one policy, or their rewards.

  Args:
    batch: at most `ROWS` jobs.
  """
  policy = batch[0].policy
  # The smallest power of two that is no less than the longest, at least 32.
  longest = max(len(job.ids) for job in batch)
  shape = (
    1 if len(batch) == 1 else ROWS,
    max(32, 1 << (longest - 1).bit_length()),
  )
  ids, valid = np.zeros((2, *shape), np.int32)
  temperatures = np.ones(shape[0], np.float32)
  for row, job in enumerate(batch):
    ids[row, : len(job.ids)], valid[row, : len(job.ids)] = job.ids, 1
    temperatures[row] = job.temperature
  with sharding.use(sharding.one_device()):
    arrays = jax.device_get(
      _forward(policy.params, ids, valid, temperatures, policy.model)
    )
  if 'reward' in policy.params:
    return [float(arrays[i, len(job.ids) - 1]) for i, job in enumerate(batch)]
  return [
    TokenLogprobs(*(x[row, : len(job.ids)].copy() for x in arrays))
    for row, job in enumerate(batch)
  ]


@functools.partial(jax.jit, static_argnames='cfg')
def _forward(params, ids, valid, temperatures, cfg):
  """Returns logprobs f32[B, T], ranks i32[B, T], alternatives [B, T, A].

  For a reward model returns the rewards alone, f32[B, T].
  """
  rows, width = ids.shape
  positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), ids.shape)
  hidden, _ = transformer.trunk(params, cfg, ids, positions, valid)
  if 'reward' in params:
    return transformer.rewards(params, hidden)
  # An adapter of the head is merged once.
  params = {**params, 'head': {'kernel': transformer.head(params, cfg)[0]}}

  def score_token(inputs):
    hidden, target, temperature = inputs  # [D], next token, temperature
    logits = scoring.next_logits(params, cfg, hidden[None])[0]
    logprobs = jax.nn.log_softmax(logits / temperature)
    own = logprobs[target]
    rank = 1 + jnp.sum(logprobs > own, dtype=jnp.int32)
    count = min(cfg.vocab_size, MAX_ALTERNATIVES)
    top, top_ids = jax.lax.top_k(logprobs, count)
    return own, rank, top_ids.astype(jnp.int32), top

  # Each place predicts its right neighbour; the last prediction wraps around
  # to entry 0, which has no meaning.
  outputs = jax.lax.map(
    score_token,
    (
      hidden.reshape(ids.size, -1),
      jnp.roll(ids, -1, axis=1).reshape(-1),
      jnp.repeat(temperatures, width),
    ),
    batch_size=max(min(_LOGITS // cfg.vocab_size, ids.size), 1),
  )
  return jax.tree.map(
    lambda x: jnp.roll(x.reshape(rows, width, *x.shape[1:]), 1, axis=1), outputs
  )
