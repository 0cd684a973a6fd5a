"""The driver's engine over HTTP, for a model on a server.

The server keeps no state between turns: the tokens of a held sequence are kept
here, and each turn sends the whole sequence. (A server may cache prefixes.)
"""

import concurrent.futures
import dataclasses

import numpy as np

from posttrain.decode import requests
from posttrain.rollout import side_by_side
from posttrain.rollout.endpoint import client


@dataclasses.dataclass
class _Sequence:
  request: requests.Request
  ids: np.ndarray  # i32[n], all so far


class Engine:
  """The `driver.Engine` of one environment; not thread-safe."""

  def __init__(
    self, endpoint: client.Endpoint, caller: str | None = None, seed: int = 0
  ):
    """Makes an engine without requests.

    Args:
      endpoint: the client of the model.
      caller: the caller's name in logs and errors, as in 'environment sums'.
      seed: the seed of all draws, with a request's id and the length of its
        prompt.
    """
    self._endpoint, self._caller, self._seed = endpoint, caller, seed
    self._sequences: dict[int, _Sequence] = {}
    # By request id, in the order of submission.
    self._running: dict[int, concurrent.futures.Future] = {}

  def submit(self, request: requests.Request) -> None:
    """Requests a completion."""
    assert request.id not in self._sequences, 'request ids are unique'
    ids = np.asarray(request.ids, np.int32)
    self._sequences[request.id] = _Sequence(request, ids)
    self._start(request.id, request.max_tokens)

  def extend(self, id: int, ids: np.ndarray, max_tokens: int) -> None:
    """Appends tokens to a held sequence and requests its next completion."""
    assert id not in self._running, 'only a stopped sequence is extended'
    sequence = self._sequences[id]
    sequence.ids = np.concatenate([sequence.ids, ids]).astype(np.int32)
    self._start(id, max_tokens)

  def poll(self) -> list[requests.Completion]:
    """Waits until a request stops; returns all stopped ones, oldest first.

    Raises:
      EndpointError: the server does not answer.
      ValueError: its response is invalid. After either no request is in flight.
    """
    if not self._running:
      return []
    try:
      side_by_side.wait(self._running.values())
      done = [id for id, future in self._running.items() if future.done()]
      return [self._stop(id, self._running.pop(id).result()) for id in done]
    except concurrent.futures.CancelledError as error:
      self.drop()
      text = f'{self._endpoint} must be open for {self._caller}: got closed'
      raise client.EndpointError(text) from error
    except BaseException:
      self.drop()
      raise

  @property
  def futures(self) -> list[concurrent.futures.Future]:
    """The completions in flight, for one of which `poll` waits."""
    return list(self._running.values())

  def release(self, id: int) -> None:
    """Removes a held sequence."""
    del self._sequences[id]

  def _start(self, id: int, max_tokens: int) -> None:
    sequence = self._sequences[id]
    entropy = [self._seed, id, len(sequence.ids)]
    (word,) = np.random.SeedSequence(entropy).generate_state(1)
    self._running[id] = self._endpoint.sample(
      sequence.request, sequence.ids, max_tokens, self._caller, int(word) >> 1
    )

  def _stop(
    self, id: int, completion: requests.Completion
  ) -> requests.Completion:
    sequence = self._sequences[id]
    sequence.ids = np.concatenate([sequence.ids, completion.ids])
    if not sequence.request.hold:
      self.release(id)
    return completion

  def drop(self) -> None:
    """Removes all requests: their episodes have failed."""
    for future in self._running.values():
      future.cancel()
    self._running.clear()
    self._sequences.clear()
