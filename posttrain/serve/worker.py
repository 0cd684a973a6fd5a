"""The threads that run the model: one owns the engine, the other scores.

1. `accept` takes jobs from any thread: tokens to sample, or to score.
2. The engine's thread submits sampling jobs to the engine, where they join the
   requests that decode. The scoring thread scores a batch at a time; while it
   compiles a program for a new shape, decoding goes on.
3. Results of a job are passed to its `notify`, in the thread of its kind;
   `drop` cancels a job, and frees its slot.
4. An exception of the engine fails all open jobs, and later jobs run on a new
   engine; one of scoring fails the jobs of its batch.
"""

import dataclasses
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from posttrain import sharding
from posttrain.checkpoints import policies
from posttrain.decode import engines, requests
from posttrain.serve import token_logprobs

_PREFILL = {'prefill_rows': 8, 'prefill_tokens': 64}


@dataclasses.dataclass(frozen=True)
class NewTokens:
  """Tokens that a job has sampled since its last event."""

  ids: list[int]
  logprobs: list[float]
  stop_reason: str | None  # as in `requests.Completion`; None = more follow


@dataclasses.dataclass(frozen=True)
class Failed:
  """The end of a job without a result."""

  status: int  # of HTTP
  message: str


Event = NewTokens | Failed | token_logprobs.TokenLogprobs


@dataclasses.dataclass(eq=False)
class Job:
  """Work for the model, with a callback for its results."""

  notify: Callable[['Job', Event], None]
  index: int  # the submitter's own


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
    *,
    slots: int,
    capacity: int,
    chunk: int,
    max_jobs: int,
  ):
    """Makes a worker without starting its threads.

    Args:
      policy: the model to serve.
      slots: sequences decoded at a time.
      capacity: tokens of a sequence.
      chunk: tokens decoded between two looks at the inbox.
      max_jobs: the most open jobs, waiting ones included.
    """
    self.slots, self.capacity, self.max_jobs = slots, capacity, max_jobs
    self._policy, self._chunk = policy, chunk
    self._ids = itertools.count()
    self._lock = threading.Lock()  # of the jobs
    self._jobs: set[Job] = set()
    self._inbox: queue.SimpleQueue[tuple[str, Sequence[SampleJob]]] = (
      queue.SimpleQueue()
    )
    self._sampling: dict[int, SampleJob] = {}
    self._to_score: list[ScoreJob] = []  # in the order of arrival
    self._score_changed = threading.Condition(self._lock)
    self._counts = dict.fromkeys(('accepted', 'finished', 'dropped'), 0)
    self._failure: Failed | None = None
    self._threads = [
      threading.Thread(target=target, name=f'posttrain-{name}', daemon=True)
      for name, target in (('engine', self._run), ('score', self._run_scoring))
    ]

  def start(self) -> None:
    """Compiles the decoding programs, and starts the threads.

    Raises:
      Exception: the engine cannot decode.
    """
    self._engine = self._make_engine()
    self._engine.warm_up()
    # Twice: some programs have other inputs once there is a state.
    for _ in range(2):
      request_id = next(self._ids)
      self._engine.submit(
        requests.Request(request_id, np.zeros(1, np.int32), self.capacity - 1)
      )
      if not self._engine.step():
        self._engine.cancel(request_id)
    for thread in self._threads:
      thread.start()

  def stop(self, wait: float) -> bool:
    """Fails all jobs; returns False if a thread runs on after `wait` s."""
    self._shut_down(Failed(503, 'the server must be running: it shuts down'))
    self._inbox.put(('stop', ()))
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
    with self._lock:
      failure = self._failure
      if failure is None:
        if not more and len(self._jobs) + len(jobs) > self.max_jobs:
          raise Full(f'{len(self._jobs)} sequences of {self.max_jobs}')
        self._jobs.update(jobs)
        self._counts['accepted'] += len(jobs)
        self._to_score += [x for x in jobs if isinstance(x, ScoreJob)]
        self._score_changed.notify()
    if failure is None:
      sampling = tuple(x for x in jobs if isinstance(x, SampleJob))
      if sampling:
        self._inbox.put(('accept', sampling))
    else:
      for job in jobs:
        job.notify(job, failure)

  def drop(self, jobs: Iterable[Job]) -> None:
    """Cancels jobs; ignores those that have finished."""
    with self._lock:
      jobs = self._jobs.intersection(jobs)
      self._jobs -= jobs
      self._counts['dropped'] += len(jobs)
      self._to_score = [x for x in self._to_score if x not in jobs]
    sampling = tuple(x for x in jobs if isinstance(x, SampleJob))
    if sampling:
      self._inbox.put(('drop', sampling))

  def counts(self) -> dict[str, int]:
    """Returns the numbers of slots and jobs, for the health route."""
    with self._lock:
      return {
        'slots': self.slots,
        'under_way': len(self._jobs),
        'drawing': len(self._sampling),
        **self._counts,
      }

  @property
  def failure(self) -> Failed | None:
    """The reason for accepting no more jobs; None while it accepts them."""
    return self._failure

  def _make_engine(self) -> engines.Engine:
    made = engines.Engine(
      self._policy.model,
      slots=self.slots,
      capacity=self.capacity,
      chunk=self._chunk,
      mesh=sharding.one_device(),
      **_PREFILL,
    )
    made.take_free_slots()
    made.set_params(self._policy.params, 0)
    return made

  def _run(self) -> None:
    while self._failure is None:
      try:
        self._receive()
        self._sample()
      except Exception:  # any: no client may wait for ever
        logging.getLogger('absl').exception('the engine failed')
        self._fail_all(Failed(500, "the engine failed; see the server's log"))
        self._restart()

  def _restart(self) -> None:
    self._sampling, self._engine = {}, None
    try:
      self._engine = self._make_engine()
    except Exception:
      logging.getLogger('absl').exception('the engine cannot be made again')
      self._shut_down(Failed(500, 'the engine failed for good; start it again'))

  def _receive(self) -> None:
    """Handles the inbox; waits for a message if there is no work."""
    idle = not self._sampling
    while idle or not self._inbox.empty():
      action, jobs = self._inbox.get()
      idle = False
      with self._lock:
        known = [job for job in jobs if job in self._jobs]
      if action == 'drop':
        self._cancel(jobs)
        continue
      for job in known:
        job.request = dataclasses.replace(job.request, id=next(self._ids))
        self._engine.submit(job.request)
        self._sampling[job.request.id] = job

  def _cancel(self, jobs: Sequence[SampleJob]) -> None:
    for job in jobs:
      if self._sampling.pop(job.request.id, None):
        self._engine.cancel(job.request.id)

  def _run_scoring(self) -> None:
    while batch := self._next_batch():
      try:
        results = token_logprobs.score(
          self._policy.params,
          self._policy.model,
          [job.ids for job in batch],
          [job.temperature for job in batch],
        )
      except Exception:  # any: no client may wait for ever
        logging.getLogger('absl').exception('scoring failed')
        failure = Failed(500, "scoring failed; see the server's log")
        results = [failure] * len(batch)
      for job, result in zip(batch, results, strict=True):
        self._finish(job, result)

  def _next_batch(self) -> list[ScoreJob]:
    """Waits for the oldest jobs, which share a forward; [] at the end."""
    with self._lock:
      while not self._to_score and self._failure is None:
        self._score_changed.wait()
      if self._failure is not None:
        return []
      batch = self._to_score[: token_logprobs.ROWS]
      del self._to_score[: token_logprobs.ROWS]
      return batch

  def _sample(self) -> None:
    """Decodes a chunk, and sends its events."""
    if not self._sampling:
      return
    for x in self._engine.step():
      job = self._sampling.pop(x.id)
      self._finish(job, _new_tokens(job, x.ids, x.logprobs, x.stop_reason))
    if not any(job.streamed for job in self._sampling.values()):
      return
    for id, (ids, logprobs) in self._engine.partial().items():
      job = self._sampling[id]
      if job.streamed and len(ids) > job.num_sent:
        job.notify(job, _new_tokens(job, ids, logprobs, None))
        job.num_sent = len(ids)

  def _finish(self, job: Job, event: Event) -> None:
    with self._lock:
      is_open = job in self._jobs
      self._jobs.discard(job)
      self._counts['finished'] += is_open
    if is_open:
      job.notify(job, event)

  def _fail_all(self, failure: Failed) -> None:
    with self._lock:
      jobs, self._jobs = self._jobs, set()
      self._to_score = []
    for job in jobs:
      job.notify(job, failure)

  def _shut_down(self, failure: Failed) -> None:
    with self._lock:
      self._failure = self._failure or failure
      self._score_changed.notify()
    self._fail_all(failure)


def _new_tokens(job: SampleJob, ids, logprobs, reason: str | None) -> NewTokens:
  new = slice(job.num_sent, None)
  return NewTokens(ids[new].tolist(), logprobs[new].tolist(), reason)
