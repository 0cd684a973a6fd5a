"""One request under way: an `Ask` -> jobs of the worker -> an answer.

1. Every choice is a job, and every prompt that is scored; they are accepted
   together, or none is.
2. What the worker tells comes into an asyncio queue, from another thread.
3. Alternatives to drawn tokens are read off a forward over what was drawn.
4. Whatever ends a call, `close` gives up the jobs that are still under way.
"""

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from posttrain.checkpoints import policies
from posttrain.decode import requests
from posttrain.serve import fields, laws, output, protocol, speech
from posttrain.serve import worker as workers


class Call:
  """Answers one request; belongs to one event loop."""

  def __init__(
    self,
    ask: protocol.Ask,
    worker: workers.Worker,
    policy: policies.Policy,
    name: str,
  ):
    """Asks the worker.

    Args:
      ask: the request.
      worker: draws and scores.
      policy: that is served.
      name: of the model.

    Raises:
      Refused: with 429; too much is under way.
    """
    self._ask, self._worker = ask, worker
    self._writer = output.Writer(ask, policy, name)
    self._loop, self._events = asyncio.get_running_loop(), asyncio.Queue()
    self._said = [
      speech.Speech(policy.text, ask.stop)
      for _ in range(len(ask.prompts) * ask.n)
    ]
    self._reads: list[laws.Law | None] = [None] * len(ask.prompts)
    self._tops: list[laws.Law | None] = [None] * len(self._said)
    self._pending: set[workers.Job] = set()
    self._submit(self._jobs())

  def close(self) -> None:
    """Gives up what is under way."""
    self._worker.drop(self._pending)
    self._pending = set()

  async def whole(self) -> dict[str, Any]:
    """Returns the answer.

    Raises:
      Refused: the engine failed.
    """
    async for _ in self._steps(self._reads):
      pass
    if self._ask.logprobs and any(one.ids for one in self._said):
      await self._look_beside()
    return self._writer.whole(self._said, self._reads, self._tops)

  async def chunks(self) -> AsyncIterator[dict[str, Any]]:
    """Yields the answer in pieces.

    Raises:
      Refused: the engine failed.
    """
    for index in range(len(self._said)):
      if (chunk := self._writer.first(index)) is not None:
        yield chunk
    sent = [0] * len(self._said)
    for index, one in enumerate(self._said):
      if one.finish is not None:  # nothing was to be drawn
        yield self._writer.more(index, one, '', 0)
    async for index, text in self._steps(self._reads):
      one = self._said[index]
      tokens = self._ask.logprobs is not None or self._ask.return_token_ids
      if text or one.finish or tokens and len(one.ids) > sent[index]:
        yield self._writer.more(index, one, text, sent[index])
        sent[index] = len(one.ids)
    if self._ask.include_usage:
      yield self._writer.last(self._said)

  def _jobs(self) -> list[workers.Job]:
    ask, jobs = self._ask, []
    for at, prompt in enumerate(ask.prompts):
      if ask.scores_prompt:
        jobs.append(
          workers.Read(
            self._tell, at, prompt.ids, ask.temperature, ask.prompt_alternatives
          )
        )
      for choice in range(ask.n):
        index = at * ask.n + choice
        if not ask.max_tokens[at]:
          self._said[index].hear([], [], 'max_tokens')
          continue
        asked = requests.Request(
          -1,
          prompt.ids,
          ask.max_tokens[at],
          ask.stop_ids,
          ask.sampling,
          key=_key(ask.seed, prompt.ids, choice),
        )
        watched = ask.stream or bool(ask.stop)
        jobs.append(workers.Draw(self._tell, index, asked, watched))
    return jobs

  def _submit(self, jobs: list[workers.Job], *, more: bool = False) -> None:
    self._pending.update(jobs)
    try:
      self._worker.accept(jobs, more=more)
    except workers.Full as error:
      self._pending = set()
      raise fields.Refused(
        429,
        f'the server must have room for the request: got {error} under '
        'way; try again later',
        code='rate_limit_exceeded',
      ) from error

  def _tell(self, job: workers.Job, event: Any) -> None:
    """Called by the worker, in its thread."""
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
      self._loop.call_soon_threadsafe(self._events.put_nowait, (job, event))

  async def _steps(
    self, read: list[laws.Law | None]
  ) -> AsyncIterator[tuple[int, str]]:
    """Yields (choice, text that is new), until all jobs are done.

    Args:
      read: where what was scored goes.
    """
    while self._pending:
      job, event = await self._events.get()
      if job not in self._pending:
        continue
      if isinstance(event, workers.Failed):
        self._pending.discard(job)
        raise fields.Refused(event.status, event.message)
      if isinstance(event, laws.Law):
        self._pending.discard(job)
        read[job.index] = event
        continue
      one = self._said[job.index]
      text = one.hear(event.ids, event.logprobs, event.stop_reason)
      if one.finish:
        self._pending.discard(job)
        self._worker.drop([job])  # a stop string may end it early
      yield job.index, text

  async def _look_beside(self) -> None:
    """Reads the alternatives of what was drawn."""
    ask = self._ask
    self._submit(
      [
        workers.Read(
          self._tell,
          index,
          np.append(ask.prompts[index // ask.n].ids, one.ids).astype(np.int32),
          ask.temperature,
          ask.logprobs,
        )
        for index, one in enumerate(self._said)
        if one.ids
      ],
      more=True,
    )
    async for _ in self._steps(self._tops):
      pass


def _key(seed: int | None, ids: np.ndarray, choice: int) -> int:
  """What decides on the random numbers of a choice, below 2**63.

  The same seed, prompt and place among the choices give the same numbers,
  whatever else is asked.
  """
  if seed is None:
    return secrets.randbits(63)
  said = f'{seed} {choice} '.encode() + ids.astype('<i4').tobytes()
  return int.from_bytes(hashlib.sha256(said).digest()[:8], 'big') >> 1
