"""One API request in progress: an `ApiRequest` -> worker jobs -> a response.

1. Every choice is a job, and every prompt to score; they are accepted together,
   or not at all.
2. The worker's events arrive in an asyncio queue, from the worker's thread.
3. Alternatives to sampled tokens come from a forward over the finished choice.
4. `close` drops the open jobs, however a call ends.
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
from posttrain.serve import (
  detokenizer,
  output,
  protocol,
  token_logprobs,
  worker,
)

_Scores = list[token_logprobs.TokenLogprobs | None]


class Call:
  """One request and its response; belongs to one event loop."""

  def __init__(
    self,
    request: protocol.ApiRequest,
    engine: worker.Worker,
    policy: policies.Policy,
    name: str,
  ):
    """Submits the jobs.

    Args:
      request: the parsed request.
      engine: samples and scores.
      policy: the served model.
      name: the model's name in responses.

    Raises:
      Full: too many jobs are open.
    """
    self._request, self._worker = request, engine
    self._writer = output.Writer(request, policy, name)
    self._loop, self._events = asyncio.get_running_loop(), asyncio.Queue()
    self._choices = [
      detokenizer.Detokenizer(policy.text, request.stop)
      for _ in range(len(request.prompts) * request.n)
    ]
    # Per prompt: its logprobs, if it is scored. Per choice: the logprobs of
    # prompt and choice, if alternatives are requested.
    self._prompt_scores: _Scores = [None] * len(request.prompts)
    self._choice_scores: _Scores = [None] * len(self._choices)
    self._open: set[worker.Job] = set()
    self._submit(self._jobs())

  def close(self) -> None:
    """Drops the open jobs."""
    self._worker.drop(self._open)
    self._open = set()

  async def finished(self) -> dict[str, Any]:
    """Waits for all jobs; returns the response.

    Raises:
      Refused: the engine failed.
    """
    async for _ in self._steps(self._prompt_scores):
      pass
    if self._request.logprobs and any(choice.ids for choice in self._choices):
      await self._score_choices()
    return self._writer.whole(
      self._choices, self._prompt_scores, self._choice_scores
    )

  async def chunks(self) -> AsyncIterator[dict[str, Any]]:
    """Yields the chunks of a streamed response.

    Raises:
      Refused: the engine failed.
    """
    request = self._request
    for index in range(len(self._choices)):
      if (chunk := self._writer.first(index)) is not None:
        yield chunk
    sent = [0] * len(self._choices)
    for index, choice in enumerate(self._choices):
      if choice.finish is not None:  # max_tokens is 0
        yield self._writer.more(index, choice, '', 0)
    async for index, text in self._steps(self._prompt_scores):
      choice = self._choices[index]
      tokens = request.logprobs is not None or request.return_token_ids
      if text or choice.finish or tokens and len(choice.ids) > sent[index]:
        yield self._writer.more(index, choice, text, sent[index])
        sent[index] = len(choice.ids)
    if request.include_usage:
      yield self._writer.last(self._choices)

  def _jobs(self) -> list[worker.Job]:
    request, jobs = self._request, []
    for i, prompt in enumerate(request.prompts):
      if request.scores_prompt:
        jobs.append(
          worker.ScoreJob(self._notify, i, prompt.ids, request.temperature)
        )
      for choice in range(request.n):
        index = i * request.n + choice
        if not request.max_tokens[i]:
          self._choices[index].append([], [], 'max_tokens')
          continue
        engine_request = requests.Request(
          -1,
          prompt.ids,
          request.max_tokens[i],
          request.stop_ids,
          request.sampling,
          key=_key(request.seed, prompt.ids, choice),
        )
        streamed = request.stream or bool(request.stop)
        jobs.append(
          worker.SampleJob(self._notify, index, engine_request, streamed)
        )
    return jobs

  def _submit(self, jobs: list[worker.Job], *, more: bool = False) -> None:
    self._open.update(jobs)
    try:
      self._worker.accept(jobs, more=more)
    except worker.Full:
      self._open = set()
      raise

  def _notify(self, job: worker.Job, event: worker.Event) -> None:
    """Queues an event; called in the worker's thread."""
    with contextlib.suppress(RuntimeError):  # the event loop is closed
      self._loop.call_soon_threadsafe(self._events.put_nowait, (job, event))

  async def _steps(self, scored: _Scores) -> AsyncIterator[tuple[int, str]]:
    """Yields (index of the choice, new text) until all jobs are finished.

    Args:
      scored: receives the results of scoring jobs, by their indices.
    """
    while self._open:
      job, event = await self._events.get()
      if job not in self._open:
        continue
      if isinstance(event, worker.Failed):
        self._open.discard(job)
        raise protocol.Refused(event.status, event.message)
      if isinstance(event, token_logprobs.TokenLogprobs):
        self._open.discard(job)
        scored[job.index] = event
        continue
      choice = self._choices[job.index]
      text = choice.append(event.ids, event.logprobs, event.stop_reason)
      if choice.finish:
        self._open.discard(job)
        self._worker.drop([job])  # a stop string may end it early
      yield job.index, text

  async def _score_choices(self) -> None:
    """Scores the choices, prompts included, for their alternatives."""
    request = self._request
    self._submit(
      [
        worker.ScoreJob(
          self._notify,
          i,
          np.append(request.prompts[i // request.n].ids, choice.ids).astype(
            np.int32
          ),
          request.temperature,
        )
        for i, choice in enumerate(self._choices)
        if choice.ids
      ],
      more=True,
    )
    async for _ in self._steps(self._choice_scores):
      pass


def _key(seed: int | None, ids: np.ndarray, choice: int) -> int:
  """Returns the number that a choice's draws depend on, below 2**63.

  The same seed, prompt and index of the choice give the same draws, whatever
  the other fields of the request are.
  """
  if seed is None:
    return secrets.randbits(63)
  data = f'{seed} {choice} '.encode() + ids.astype('<i4').tobytes()
  return int.from_bytes(hashlib.sha256(data).digest()[:8], 'big') >> 1
