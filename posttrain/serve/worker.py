"""The thread that owns the engine.

1. `accept` takes jobs, of any thread: tokens to draw, or to score.
2. The thread hands what is to be drawn to the engine, where requests that come
   while others decode join them, and scores one batch between two chunks.
3. What comes of a job goes to its `tell`, in the worker's thread; `drop` gives
   a job up, and frees its slot.
4. An exception fails what is under way, and the next jobs meet a new engine.
"""

import dataclasses
import itertools
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from posttrain.checkpoints import policies
from posttrain.decode import engine as engines
from posttrain.decode import requests
from posttrain.serve import laws

_PREFILL = {'prefill_rows': 8, 'prefill_tokens': 64}


@dataclasses.dataclass(frozen=True)
class Drawn:
  """Tokens that a job has drawn since the last time."""

  ids: list[int]
  logprobs: list[float]
  stop_reason: str | None  # of `requests.Completion`; None = it goes on


@dataclasses.dataclass(frozen=True)
class Failed:
  """Nothing more comes of a job."""

  status: int  # of HTTP
  message: str


@dataclasses.dataclass(eq=False)
class Job:
  """Something that is wanted of the model."""

  tell: Callable[['Job', Drawn | Failed | laws.Law], None]
  index: int  # the asker's


@dataclasses.dataclass(eq=False)
class Draw(Job):
  """A sequence to go on with."""

  asked: requests.Request  # its id is given when it is accepted
  watched: bool  # tell every chunk, not only the whole
  told: int = 0  # tokens so far


@dataclasses.dataclass(eq=False)
class Read(Job):
  """A sequence to score."""

  ids: np.ndarray  # i32[T]
  temperature: float
  alternatives: int | None  # as of `laws.read`


class Full(Exception):
  """There is no room for more jobs."""


class Worker:
  """Runs jobs on one engine."""

  def __init__(
    self,
    policy: policies.Policy,
    *,
    slots: int,
    capacity: int,
    chunk: int,
    room: int,
  ):
    """Starts nothing.

    Args:
      policy: whose weights.
      slots: sequences decoded at a time.
      capacity: tokens of a sequence.
      chunk: tokens between two looks at who came and went.
      room: jobs that may be under way, waiting ones included.
    """
    self.slots, self.capacity, self.room = slots, capacity, room
    self._policy, self._chunk = policy, chunk
    self._ids = itertools.count()
    self._lock = threading.Lock()  # of the jobs
    self._jobs: set[Job] = set()
    self._inbox: queue.SimpleQueue[tuple[str, Sequence[Job]]] = (
      queue.SimpleQueue()
    )
    self._drawing: dict[int, Draw] = {}
    self._reading: list[Read] = []
    self._counts = dict.fromkeys(('accepted', 'finished', 'dropped'), 0)
    self._over: Failed | None = None  # why nothing is accepted any more
    self._thread = threading.Thread(
      target=self._run, name='posttrain-engine', daemon=True
    )

  def start(self) -> None:
    """Compiles what decoding needs, and begins to work.

    Raises:
      Exception: of the engine, which cannot decode.
    """
    self._engine = self._make()
    self._engine.submit(
      requests.Request(
        next(self._ids), np.zeros(1, np.int32), self.capacity - 1
      )
    )
    if not self._engine.step():
      self._engine.cancel(0)
    self._thread.start()

  def stop(self, wait: float) -> bool:
    """Fails all jobs; False if the thread goes on for longer than `wait` s."""
    self._give_up(Failed(503, 'the server must be running: it shuts down'))
    self._inbox.put(('stop', ()))
    self._thread.join(wait)
    return not self._thread.is_alive()

  def accept(self, jobs: Sequence[Job], *, more: bool = False) -> None:
    """Takes jobs; neighbours with one prompt have it prefilled once.

    Args:
      jobs: all are taken, or none.
      more: they belong to a call that has been let in.

    Raises:
      Full: too many are under way.
    """
    with self._lock:
      over = self._over
      if over is None:
        if not more and len(self._jobs) + len(jobs) > self.room:
          raise Full(f'{len(self._jobs)} sequences of {self.room}')
        self._jobs.update(jobs)
        self._counts['accepted'] += len(jobs)
    if over is None:
      self._inbox.put(('accept', tuple(jobs)))
    else:
      for job in jobs:
        job.tell(job, over)

  def drop(self, jobs: Iterable[Job]) -> None:
    """Gives jobs up; those that are done already are left alone."""
    with self._lock:
      jobs = self._jobs.intersection(jobs)
      self._jobs -= jobs
      self._counts['dropped'] += len(jobs)
    if jobs:
      self._inbox.put(('drop', tuple(jobs)))

  def counts(self) -> dict[str, int]:
    """What is under way, and what was."""
    with self._lock:
      return {
        'slots': self.slots,
        'under_way': len(self._jobs),
        'drawing': len(self._drawing),
        **self._counts,
      }

  @property
  def over(self) -> Failed | None:
    """Why nothing is accepted any more; None while it is."""
    return self._over

  def _make(self) -> engines.Engine:
    engine = engines.Engine(
      self._policy.model,
      slots=self.slots,
      capacity=self.capacity,
      chunk=self._chunk,
      share_prefill=False,
      **_PREFILL,
    )
    engine.set_params(self._policy.params, 0)
    return engine

  def _run(self) -> None:
    while self._over is None:
      try:
        self._hear()
        self._read()
        self._draw()
      except Exception:  # whatever it is, nobody may wait for ever
        logging.getLogger('absl').exception('the engine failed')
        self._fail_all(Failed(500, 'the engine failed; the log says why'))
        self._remake()

  def _remake(self) -> None:
    self._drawing, self._reading, self._engine = {}, [], None
    try:
      self._engine = self._make()
    except Exception:
      logging.getLogger('absl').exception('the engine cannot be made again')
      self._give_up(Failed(500, 'the engine failed for good; start it again'))

  def _hear(self) -> None:
    """Does what others said since the last time; waits if all is done."""
    idle = not (self._drawing or self._reading)
    while idle or not self._inbox.empty():
      what, jobs = self._inbox.get()
      idle = False
      with self._lock:
        known = [job for job in jobs if job in self._jobs]
      if what == 'drop':
        self._forget(jobs)
        continue
      for job in known:
        if isinstance(job, Draw):
          job.asked = dataclasses.replace(job.asked, id=next(self._ids))
          self._engine.submit(job.asked)
          self._drawing[job.asked.id] = job
        else:
          self._reading.append(job)

  def _forget(self, jobs: Sequence[Job]) -> None:
    self._reading = [job for job in self._reading if job not in jobs]
    for job in jobs:
      if isinstance(job, Draw) and self._drawing.pop(job.asked.id, None):
        self._engine.cancel(job.asked.id)

  def _read(self) -> None:
    """Scores the oldest that wait, as many as one forward takes."""
    if not self._reading:
      return
    asks = self._reading[0].alternatives
    some = [j for j in self._reading if j.alternatives == asks][: laws.ROWS]
    told = laws.read(
      self._policy.params,
      self._policy.model,
      [job.ids for job in some],
      [job.temperature for job in some],
      asks,
    )
    self._reading = [job for job in self._reading if job not in some]
    for job, law in zip(some, told, strict=True):
      self._finish(job, law)

  def _draw(self) -> None:
    """Decodes a chunk, and tells what came of it."""
    if not self._drawing:
      return
    for done in self._engine.step():
      job = self._drawing.pop(done.id)
      self._finish(job, _news(job, done.ids, done.logprobs, done.stop_reason))
    if not any(job.watched for job in self._drawing.values()):
      return
    for id, (ids, logprobs) in self._engine.partial().items():
      job = self._drawing[id]
      if job.watched and len(ids) > job.told:
        job.tell(job, _news(job, ids, logprobs, None))
        job.told = len(ids)

  def _finish(self, job: Job, event: Drawn | laws.Law) -> None:
    with self._lock:
      wanted = job in self._jobs
      self._jobs.discard(job)
      self._counts['finished'] += wanted
    if wanted:
      job.tell(job, event)

  def _fail_all(self, why: Failed) -> None:
    with self._lock:
      jobs, self._jobs = self._jobs, set()
    for job in jobs:
      job.tell(job, why)

  def _give_up(self, why: Failed) -> None:
    with self._lock:
      self._over = self._over or why
    self._fail_all(why)


def _news(job: Draw, ids, logprobs, reason: str | None) -> Drawn:
  new = slice(job.told, None)
  return Drawn(ids[new].tolist(), logprobs[new].tolist(), reason)
