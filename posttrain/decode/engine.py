"""The slot engine: many requests through one jitted decode loop.

    engine.set_params(params, version=0)
    for completion in engine.generate(requests): ...

or, for whoever has something to say between the turns:

    engine.submit(request)           # queued; with hold=True the slot is kept
    for completion in engine.poll(): # decodes until something has stopped
      engine.extend(completion.id, ids, max_tokens)   # or engine.release(id)

`launch` lets the device go on meanwhile; `step` is a poll of one chunk.

1. Queued requests wait for free slots. Neighbours with the same prompt are
   admitted together, and their prompt is prefilled once.
2. The loop runs until all have stopped; while a request waits for a slot, or
   holds one, for `chunk` tokens at a time.
3. What a request gets depends on the weights, the seed, its id and its prompt;
   on its slot, its company and the chunks only as far as matrix products round
   differently. Scheduling depends on token counts alone, so that a rerun is
   bitwise the same.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from posttrain import schema, scoring
from posttrain.decode import admission, loop, requests, schedule, tree_spec


class Engine:
  """Decodes with one set of weights at a time."""

  def __init__(
    self,
    model: schema.Model,
    *,
    slots: int,
    capacity: int | None = None,
    chunk: int = 16,
    prefill_rows: int = 16,
    prefill_tokens: int = 32,
    seed: int = 0,
    mesh: Mesh | None = None,
    patient: bool = True,
  ):
    """Makes an engine without weights.

    Args:
      model: its options, with the vocabulary resolved.
      slots: sequences decoded at a time.
      capacity: tokens of a sequence, prompt included; None = what the requests
        need, in buckets, each of which compiles anew.
      chunk: tokens between two looks at the slots, while a request waits for
        one or holds one.
      prefill_rows: prompts prefilled at a time.
      prefill_tokens: tokens of a prompt that go in at a time.
      seed: of every draw.
      mesh: splits slots over its axes data and fsdp; weights are whole on
        every device. None = one device.
      patient: neighbours with the same prompt wait for slots for all of them,
        rather than some go ahead and their prompt is prefilled once more.

    Raises:
      ValueError: the slots do not divide over the mesh.
    """
    self.slots, self.capacity = slots, capacity
    self._grows = capacity is None
    self._model, self._chunk = model, chunk
    self._place = loop.placement(mesh, slots)
    self._shapes = admission.Shapes(
      slots, min(prefill_rows, slots), prefill_tokens, seed, self._place
    )
    self._params = self._view = self._state = self._asked = None
    self._like: dict[str, jax.ShapeDtypeStruct] = {}
    self._version = -1
    self._schedule = schedule.Schedule(slots, patient)
    self._ready: list[requests.Completion] = []
    self._launched: set[int] | None = None  # seats that a chunk decodes for

  def set_params(self, params: Any, version: int) -> None:
    """Decodes with other weights from here on.

    Args:
      params: the model's parameters. Decoding has its own copy; `score` reads
        these, so they must live until the next call.
      version: what completions say sampled them.

    Raises:
      ValueError: a request is in flight, whose cache the old weights made; or
        a leaf's path, shape, dtype or sharding is not what the last one's was.
    """
    if len(self._schedule):
      raise ValueError(
        'weights must be set while no request is in flight: got '
        f'{len(self._schedule)}; poll and release them first'
      )
    like = tree_spec.describe(params)
    tree_spec.check_same(self._like or like, like)
    self._params, self._version, self._like = params, version, like
    self._view = loop.view(params, self._model, self._place)

  def submit(self, request: requests.Request) -> None:
    """Queues a request.

    Raises:
      ValueError: its id is in flight or out of range, its prompt is empty, it
        has too many stop ids, or asks for no token.
    """
    self._schedule.check(request)
    seat = self._schedule.new(request)
    self._begin(seat, seat.request.ids, 0, request.max_tokens)

  def extend(self, id: int, ids: np.ndarray, max_tokens: int) -> None:
    """Appends tokens to a held sequence, and goes on.

    Args:
      id: of a request that was submitted with `hold` and has stopped.
      ids: i32[n], what follows the tokens drawn so far; may be empty.
      max_tokens: of the next completion.

    Raises:
      ValueError: the request is not held, or asks for no token.
    """
    seat = self._schedule.held(id, 'extended')
    schedule.require(max_tokens > 0, id, 'ask for a token at least', max_tokens)
    ids = np.concatenate([[seat.token], np.asarray(ids)]).astype(np.int32)
    self._begin(seat, ids, seat.length, max_tokens)

  def release(self, id: int) -> None:
    """Forgets a held request; its slot is free."""
    self._schedule.leave(self._schedule.held(id, 'released'))

  def poll(self) -> list[requests.Completion]:
    """Decodes until something has stopped; [] if nothing is in flight.

    Returns:
      What has stopped, in the order of submission.

    Raises:
      ValueError: no weights are set; or requests wait, and all slots are held.
    """
    self._need_weights()
    self._harvest()  # what has been launched
    while not self._ready and self._schedule.running:
      self._decode()
      self._schedule.check_some_run()
      self._harvest()
    return self._collect()

  def step(self) -> list[requests.Completion]:
    """Admits what waits and decodes a chunk; returns what has stopped.

    The chunk is the one that was launched, if one was. Where all slots are
    held, nothing happens.
    """
    self.launch()
    self._harvest()
    return self._collect()

  def launch(self) -> None:
    """Starts the chunk that `step` or `poll` will wait for.

    The caller goes on while the device decodes: what is submitted, extended or
    released until then is seen to after the chunk.
    """
    self._need_weights()
    if self._launched is None:
      self._decode(self._chunk)

  def partial(self) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """What those that are decoding have drawn: (i32[n], f32[n]) by id.

    Ids and logprobs of the turn so far, as the completion will have them.
    """
    if self._state is None:
      return {}
    length, ids, logprobs = jax.device_get(
      (self._state.length, self._state.ids, self._state.logprobs)
    )
    return {
      seat.request.id: (ids[turn].copy(), logprobs[turn].copy())
      for seat in self._schedule.seated
      if not seat.held
      for turn in [seat.turn(length[seat.slot])]
    }

  def cancel(self, id: int) -> None:
    """Forgets a request, and a completion not collected; its slot is free.

    Raises:
      ValueError: no such request is in flight.
    """
    ready = [done for done in self._ready if done.id != id]
    if len(ready) == len(self._ready) or self._schedule.knows(id):
      if (slot := self._schedule.cancel(id)) is not None:
        self._state = loop.stop(self._state, slot, self._place)
    self._ready = ready

  def generate(
    self, asked: Sequence[requests.Request]
  ) -> list[requests.Completion]:
    """Answers all requests, in their order; or queues none of them.

    Raises:
      ValueError: no weights are set; others are in flight or not yet polled;
        two have one id; one asks to be held, or `submit` refuses it.
    """
    self._need_weights()
    self._schedule.check_all(asked, {done.id for done in self._ready})
    for request in asked:
      self.submit(request)
    done = {}
    while len(done) < len(asked):
      done |= {completion.id: completion for completion in self.poll()}
    return [done[request.id] for request in asked]

  def score(
    self, sequences: Sequence[np.ndarray], temperature: float = 1.0
  ) -> list[np.ndarray]:
    """Logprobs of every token of each sequence, under the engine's weights.

    Args:
      sequences: i32[T] each, prompt and completion.
      temperature: > 0.

    Returns:
      f32[T] each, in nats, by `scoring.score`; entry 0 is 0.

    Raises:
      ValueError: no weights are set.
    """
    self._need_weights()
    width = schedule.bucket(max(map(len, sequences)))
    scorer = scoring.Scorer(self._model, self._shapes.rows, width)
    heat = [np.full(len(ids), temperature, np.float32) for ids in sequences]
    return scorer(self._params, sequences, heat)

  def _need_weights(self) -> None:
    if self._view is None:
      raise ValueError(
        'weights must be set before decoding: got None; call set_params first'
      )

  def _begin(self, seat: schedule.Seat, ids, start: int, max_tokens: int):
    """Starts a turn, or ends it at once where there is no room for it."""
    if self._grows:
      end = start + len(ids) + max_tokens
      self.capacity = max(self.capacity or 0, schedule.bucket(end))
    if not self._schedule.begin(seat, ids, start, max_tokens, self.capacity):
      self._finish(seat, [], [], 'overflow')

  def _decode(self, steps: int | None = None) -> None:
    """Admits, and starts on so many tokens, or as many as poll may."""
    self._state, self._asked = admission.admit(
      self._schedule,
      self._state,
      self._asked,
      self._view,
      self._model,
      self.capacity,
      self._shapes,
    )
    running = {seat.order for seat in self._schedule.seated if not seat.held}
    if not running:
      return
    # Whoever holds a slot may have something to say, and a free one is used.
    most = self._chunk if self._schedule.pressing else self.capacity
    self._state = loop.decode(
      self._view,
      self._model,
      self._state,
      self._asked,
      steps or most,
      self._place,
    )
    self._launched = running

  def _harvest(self) -> None:
    """Waits for the device; takes what has stopped."""
    launched, self._launched = self._launched, None
    if launched is None:
      return
    active, length = jax.device_get((self._state.active, self._state.length))
    # Those extended meanwhile are not active either, and have not begun.
    done = [s for s in self._schedule.stopped(active) if s.order in launched]
    if not done:
      return
    ids, logprobs = jax.device_get((self._state.ids, self._state.logprobs))
    for seat in done:
      seat.length = int(length[seat.slot])
      turn = seat.turn(seat.length)
      seat.token = int(ids[turn][-1])
      self._finish(seat, ids[turn], logprobs[turn], seat.stop_reason)

  def _collect(self) -> list[requests.Completion]:
    done, self._ready = self._ready, []
    return done

  def _finish(self, seat: schedule.Seat, ids, logprobs, reason: str) -> None:
    ids, logprobs = np.array(ids, np.int32), np.array(logprobs, np.float32)
    self._ready.append(
      requests.Completion(seat.request.id, ids, logprobs, reason, self._version)
    )
    self._schedule.finish(seat)
