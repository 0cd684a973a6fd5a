"""A chunk that is under way while others speak to the engine."""

import numpy as np
import pytest

from posttrain.decode import loop, requests
from tests.decode import helpers


def by_id(done):
  return sorted(done, key=lambda completion: completion.id)


@pytest.mark.parametrize('method', ['step', 'poll'])
def test_launched_chunks_give_what_polling_gives(method):
  asked, expected = helpers.baseline()
  engine = helpers.make()
  engine.launch()  # of nothing
  for request in asked:
    engine.submit(request)
  done = []
  while len(done) < len(asked):
    done += getattr(engine, method)()
    engine.launch()
  assert helpers.same(by_id(done), expected)
  assert engine.step() == [] == engine.poll()


def test_a_chunk_is_launched_once(monkeypatch):
  decoded, real = [], loop.decode
  monkeypatch.setattr(
    loop, 'decode', lambda *args: decoded.append(1) or real(*args)
  )
  engine = helpers.make()
  engine.submit(requests.Request(1, np.arange(3), 16))
  engine.launch()
  engine.launch()
  assert len(decoded) == 1
  assert engine.step() == [] and len(decoded) == 1
  assert [len(ids) for ids, _ in engine.partial().values()] == [5]


def test_who_is_extended_meanwhile_has_not_stopped():
  first, second = helpers.ask(2, seed=6, max_tokens=6, hold=True)
  long = requests.Request(second.id, second.ids, 16, hold=True)
  engine = helpers.make()
  engine.submit(first)
  engine.submit(long)
  (done,) = helpers.poll(engine, 1)
  assert done.id == first.id
  engine.launch()
  engine.extend(first.id, np.array([65, 66]), 7)
  assert engine.step() == []  # its slot does not decode yet
  found = {c.id: c for c in helpers.poll(engine, 2)}
  whole = np.concatenate([first.ids, done.ids, [65, 66]])
  (fresh,) = helpers.make().generate(
    [requests.Request(first.id, whole, 7, (helpers.EOS,))]
  )
  assert helpers.same([found[first.id]], [fresh])
  (alone,) = helpers.make().generate([requests.Request(long.id, long.ids, 16)])
  assert helpers.same([found[long.id]], [alone])
  engine.release(first.id)
  engine.release(long.id)
  assert engine.poll() == []


def test_who_leaves_meanwhile_is_not_waited_for():
  asked, expected = helpers.baseline()
  engine = helpers.make(**helpers.SMALL)
  engine.submit(asked[0])
  engine.launch()
  engine.cancel(asked[0].id)
  engine.submit(asked[1])
  assert helpers.same(helpers.poll(engine, 1), expected[1:2])
  engine.set_params(helpers.params(), 1)


def test_steps_wait_where_all_slots_are_held():
  engine = helpers.make(**helpers.SMALL)
  for i in (1, 2):
    engine.submit(requests.Request(i, np.arange(3), 4, hold=True))
  engine.submit(requests.Request(3, np.arange(3), 4))
  helpers.poll(engine, 2)
  assert engine.step() == []
  with pytest.raises(ValueError, match='all 2 are held; extend or release'):
    engine.poll()
  engine.release(1)
  done = []
  while not done:
    done = engine.step()
  assert [completion.id for completion in done] == [3]
