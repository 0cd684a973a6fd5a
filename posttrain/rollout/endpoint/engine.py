"""Plays episodes with a model behind a server: the driver's engine, by HTTP.

The server keeps nothing between turns: what a slot of `decode.engine` holds is
kept here, and each turn sends the whole sequence. (Its cache of prefixes may
remember the earlier turns; that is its own affair.)
"""

import concurrent.futures
import dataclasses

import numpy as np

from posttrain.decode import requests
from posttrain.rollout.endpoint import client


@dataclasses.dataclass
class _Sequence:
  request: requests.Request
  ids: np.ndarray  # i32[n], all so far


class Engine:
  """`driver.Engine` of one environment; one thread may use it."""

  def __init__(
    self, endpoint: client.Endpoint, who: str | None = None, seed: int = 0
  ):
    """Args:
    endpoint: of whose model.
    who: waits for the completions, as in 'environment sums'.
    seed: of all draws, with a request's id and the length of its prompt.
    """
    self._endpoint, self._who, self._seed = endpoint, who, seed
    self._sequences: dict[int, _Sequence] = {}
    # By request, in the order of submission.
    self._running: dict[int, concurrent.futures.Future] = {}

  def submit(self, request: requests.Request) -> None:
    """Asks for a completion."""
    assert request.id not in self._sequences, 'the id of a request is its own'
    ids = np.asarray(request.ids, np.int32)
    self._sequences[request.id] = _Sequence(request, ids)
    self._go(request.id, request.max_tokens)

  def extend(self, id: int, ids: np.ndarray, max_tokens: int) -> None:
    """Lets a held sequence that has stopped go on behind more tokens."""
    assert id not in self._running, 'only what has stopped goes on'
    sequence = self._sequences[id]
    sequence.ids = np.concatenate([sequence.ids, ids]).astype(np.int32)
    self._go(id, max_tokens)

  def poll(self) -> list[requests.Completion]:
    """Waits until a request stops; returns all that did, oldest first.

    Raises:
      EndpointError: the server does not answer; nothing is in flight then.
      ValueError: it answers something else; the same.
    """
    if not self._running:
      return []
    try:
      concurrent.futures.wait(
        self._running.values(), return_when=concurrent.futures.FIRST_COMPLETED
      )
      done = [id for id, future in self._running.items() if future.done()]
      return [self._stop(id, self._running.pop(id).result()) for id in done]
    except concurrent.futures.CancelledError as error:
      self._drop()
      words = f'{self._endpoint} must be open for {self._who}: got closed'
      raise client.EndpointError(words) from error
    except BaseException:
      self._drop()
      raise

  def release(self, id: int) -> None:
    """Forgets a held sequence."""
    del self._sequences[id]

  def _go(self, id: int, max_tokens: int) -> None:
    sequence = self._sequences[id]
    entropy = [self._seed, id, len(sequence.ids)]
    (word,) = np.random.SeedSequence(entropy).generate_state(1)
    self._running[id] = self._endpoint.sample(
      sequence.request, sequence.ids, max_tokens, self._who, int(word) >> 1
    )

  def _stop(
    self, id: int, completion: requests.Completion
  ) -> requests.Completion:
    sequence = self._sequences[id]
    sequence.ids = np.concatenate([sequence.ids, completion.ids])
    if not sequence.request.hold:
      self.release(id)
    return completion

  def _drop(self) -> None:
    """Forgets everything: the episodes that asked have failed."""
    for future in self._running.values():
      future.cancel()
    self._running.clear()
    self._sequences.clear()
