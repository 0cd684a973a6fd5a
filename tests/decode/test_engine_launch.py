"""Chunks that run while requests are submitted, extended or cancelled."""

import numpy as np
import pytest

from posttrain.decode import loop, requests
from tests.decode import helpers


def by_id(completions):
  return sorted(completions, key=lambda completion: completion.id)


@pytest.mark.parametrize('method', ['step', 'poll'])
def test_launched_chunks_and_polls_give_equal_completions(method):
  batch, expected = helpers.baseline()
  engine = helpers.make()
  engine.launch()  # without requests
  for request in batch:
    engine.submit(request)
  completions = []
  while len(completions) < len(batch):
    completions += getattr(engine, method)()
    engine.launch()
  assert helpers.same(by_id(completions), expected)
  assert engine.step() == [] == engine.poll()


def test_launch_starts_one_chunk(monkeypatch):
  calls, decode = [], loop.decode
  monkeypatch.setattr(
    loop, 'decode', lambda *args: calls.append(1) or decode(*args)
  )
  engine = helpers.make()
  engine.submit(requests.Request(1, np.arange(3), 16))
  engine.launch()
  engine.launch()
  assert len(calls) == 1
  assert engine.step() == [] and len(calls) == 1
  assert [len(ids) for ids, *_ in engine.partial().values()] == [5]


def test_request_extended_during_a_chunk_has_not_stopped():
  first, second = helpers.make_requests(2, seed=6, max_tokens=6, hold=True)
  long = requests.Request(second.id, second.ids, 16, hold=True)
  engine = helpers.make()
  engine.submit(first)
  engine.submit(long)
  (stopped,) = helpers.poll(engine, 1)
  assert stopped.id == first.id
  engine.launch()
  engine.extend(first.id, np.array([65, 66]), 7)
  assert engine.step() == []  # its slot does not decode yet
  by_request = {c.id: c for c in helpers.poll(engine, 2)}
  whole = np.concatenate([first.ids, stopped.ids, [65, 66]])
  (fresh,) = helpers.make().generate(
    [requests.Request(first.id, whole, 7, (helpers.EOS,))]
  )
  assert helpers.same([by_request[first.id]], [fresh])
  (alone,) = helpers.make().generate([requests.Request(long.id, long.ids, 16)])
  assert helpers.same([by_request[long.id]], [alone])
  engine.release(first.id)
  engine.release(long.id)
  assert engine.poll() == []


def test_request_cancelled_during_a_chunk_is_not_waited_for():
  batch, expected = helpers.baseline()
  engine = helpers.make(**helpers.SMALL)
  engine.submit(batch[0])
  engine.launch()
  engine.cancel(batch[0].id)
  engine.submit(batch[1])
  assert helpers.same(helpers.poll(engine, 1), expected[1:2])
  engine.set_params(helpers.params(), 1)


def test_step_returns_nothing_if_all_slots_are_held():
  engine = helpers.make(**helpers.SMALL)
  for i in (1, 2):
    engine.submit(requests.Request(i, np.arange(3), 4, hold=True))
  engine.submit(requests.Request(3, np.arange(3), 4))
  helpers.poll(engine, 2)
  assert engine.step() == []
  with pytest.raises(ValueError, match='all 2 are held; extend or release'):
    engine.poll()
  engine.release(1)
  completions = []
  while not completions:
    completions = engine.step()
  assert [completion.id for completion in completions] == [3]
