"""The prefix cache: hits, bits, order of the slots, waits, weights."""

import dataclasses
import functools

import numpy as np
import pytest

from posttrain.decode import loop, requests, schedule
from tests.decode import helpers

MODEL = dataclasses.replace(helpers.MODEL, layers=1)
SIZES = {'slots': 4, 'capacity': 96, 'prefill_rows': 4, 'prefill_tokens': 8}


def prompt(size, seed=0):
  return np.random.default_rng(seed).integers(0, 256, size)


def after(prefix, size, seed):
  return np.concatenate([prefix, prompt(size, seed)])


def make(**options):
  return helpers.make(MODEL, **SIZES, **options)


def request(id, ids, max_tokens=6, **options):
  return requests.Request(id, ids, max_tokens, **options)


def assert_same_bits(completions, expected):
  for a, b in zip(completions, expected, strict=True):
    assert (a.id, a.stop_reason) == (b.id, b.stop_reason)
    np.testing.assert_array_equal(a.ids, b.ids)
    assert a.logprobs.tobytes() == b.logprobs.tobytes()


def test_hits_misses_and_evictions_have_the_same_bits():
  system = prompt(29)
  batch = [request(i, after(system, 3 + 9 * i, 1 + i)) for i in range(4)]
  cold = [make(prefix_cache=False).generate([x])[0] for x in batch]
  engine = make()
  warm = [engine.generate([x])[0] for x in batch]
  assert [x.cached for x in warm] == [0, 24, 24, 24]
  assert_same_bits(warm, cold)
  again = [engine.generate([x])[0] for x in batch]
  assert [x.cached for x in again] == [24, 40, 48, 56]
  assert_same_bits(again, cold)
  # Other prompts take the slots, the last one that of the oldest of them.
  for i in range(5):
    engine.generate([request(9, prompt(20, 20 + i))])
  evicted = [engine.generate([x])[0] for x in batch]
  assert [x.cached for x in evicted] == [0, 24, 24, 24]
  assert_same_bits(evicted, cold)
  engine.set_params(helpers.params(MODEL, seed=1), 1)
  other = engine.generate(batch[3:])
  assert other[0].cached == 0
  assert not np.array_equal(other[0].logprobs, cold[3].logprobs)


@pytest.mark.parametrize('size', [100, 200])
@pytest.mark.parametrize('rows, count', [(2, 1), (16, 9)])
def test_hits_have_the_bits_of_misses_in_calls_of_one_shape(
  wide, calls, rows, count, size
):
  """Also those of an engine that has just been made, as by a resumed run."""
  batch = [request(i, prompt(size, i), 2) for i in range(count)]
  cold = wide(prefix_cache=False).generate(batch)
  engine = wide()
  for x in batch:
    engine.submit(dataclasses.replace(x, id=100 + x.id, hold=True))
  helpers.poll(engine, count)
  for x in batch:
    engine.submit(x)
  warm = helpers.poll(engine, count)
  assert [x.cached for x in warm] == [(size - 1) // 16 * 16] * count
  assert calls[-1] == (rows, 128 if size == 100 else 256)
  assert_same_bits(warm, cold)
  resumed = wide().generate(batch)
  assert not any(x.cached for x in resumed)
  assert_same_bits(resumed, cold)


@pytest.fixture
def wide():
  """Engines with calls of two numbers of rows and of two lengths."""
  sizes = {'slots': 32, 'capacity': 256, 'prefill_rows': 16}
  return functools.partial(helpers.make, MODEL, **sizes, prefill_tokens=16)


@pytest.fixture
def calls(monkeypatch):
  """Records (rows, tokens of a slot read) of the calls of prefill."""
  calls, prefill = [], loop.prefill

  def spy(*args):
    calls.append((len(args[3][0]), args[4]))
    return prefill(*args)

  monkeypatch.setattr(loop, 'prefill', spy)
  return calls


def test_prompts_that_are_fed_at_once_share_their_chunks():
  """Also by those that wait for a slot; and bits are those of one by one."""
  system = prompt(40)
  batch = [request(i, after(system, 2 + 5 * i, 1 + i)) for i in range(6)]
  completions = make().generate(batch)
  assert [x.cached for x in completions] == [0, 40, 40, 40, 40, 40]
  cold = make(prefix_cache=False).generate(batch)
  assert helpers.same(completions, cold)
  assert all(x.cached == 0 for x in cold)


def test_a_dialogue_goes_on_in_its_slot():
  engine, ids = make(), prompt(20)
  for turn, cached in enumerate((0, 16, 24, 40)):
    (completion,) = engine.generate([request(turn, ids)])
    assert completion.cached == cached
    (alone,) = make(prefix_cache=False).generate([request(turn, ids)])
    assert_same_bits([completion], [alone])
    ids = np.concatenate([ids, completion.ids, prompt(5, turn)])
  assert len(engine._schedule._prefixes) == 1


def begin(plan, id, ids, count=1):
  for i in range(count):
    one = request(id + i, ids)
    plan.begin(plan.new(one), ids, 0, 6, 96)


def feed(plan):
  """Feeds a chunk to each group that does not wait; returns their ids."""
  groups = plan.next_rows(9)[0]
  for group in groups:
    plan.feed(group, min(group.left, 8))
  return [group.head.request.id for group in groups]


def run(plan, id, ids, count=1):
  """Returns (slots, copies) of a group that stops at once."""
  begin(plan, id, ids, count)
  plan.assign_slots()
  slots, copies = [x.slot for x in plan.in_slots], plan.copy()
  while plan.num_waiting:
    feed(plan)
  for entry in plan.stopped(np.zeros(4, bool)):
    plan.finish(entry)
  return slots, copies


def test_slots_without_a_prefix_and_then_the_oldest_are_taken():
  plan = schedule.Schedule(4, chunk=8)
  a, b = prompt(20, 1), prompt(20, 2)
  assert run(plan, 0, a) == ([0], [])
  # One slot of a group keeps the prefix.
  assert run(plan, 1, b, count=2) == ([1, 2], [])
  assert run(plan, 3, prompt(20, 3)) == ([2], [])
  assert run(plan, 4, prompt(5, 4)) == ([3], [])  # less than a chunk
  # What follows in a slot is kept while there are others ...
  assert run(plan, 5, after(a[:8], 9, 5)) == ([3], [(3, 0, 8)])
  # ... and a whole prefix goes on in place.
  assert run(plan, 6, after(a, 9, 6)) == ([0], [])
  assert run(plan, 7, prompt(20, 7)) == ([1], [])
  # Of a group that needs all slots, the source's is the first.
  begin(plan, 8, after(a, 3, 8), count=4)
  plan.assign_slots()
  (group,) = plan._groups
  assert [x.slot for x in group.entries] == [0, 2, 3, 1]
  assert (group.fed, plan.copy()) == (16, [])


def test_the_last_token_of_a_prompt_is_fed():
  plan, ids = schedule.Schedule(4, chunk=8), prompt(16)
  run(plan, 0, ids)
  begin(plan, 1, ids)
  plan.assign_slots()
  assert [x.cached for x in plan.in_slots] == [8]


def test_a_source_is_copied_before_it_is_taken():
  plan, ids = schedule.Schedule(2, chunk=8), prompt(20)
  run(plan, 0, ids)
  begin(plan, 1, after(ids[:8], 9, 1))
  begin(plan, 2, prompt(20, 2))
  plan.assign_slots()
  assert [x.slot for x in plan.in_slots] == [1]
  assert plan.copy() == [(1, 0, 8)]
  plan.assign_slots()
  assert [x.request.id for x in plan.in_slots] == [2, 1]


@pytest.mark.parametrize('cancelled', [False, True])
def test_prompts_wait_for_chunks_that_are_fed(cancelled):
  plan, ids = schedule.Schedule(4, chunk=8), prompt(30)
  begin(plan, 0, after(ids[:16], 9, 1))
  begin(plan, 1, ids, count=2)
  begin(plan, 3, prompt(12, 3))
  plan.assign_slots()
  assert plan.copy() == [] and feed(plan) == [0, 3]
  assert plan.copy() == [] and feed(plan) == [0, 3]
  if cancelled:
    plan.cancel(0)
    assert plan.copy() == [] and feed(plan) == [1]
    return
  assert plan.copy() == [(1, 0, 16)]
  assert feed(plan) == [0, 1]
  assert [x.cached for x in plan.in_slots] == [0, 16, 16, 0]


def test_what_two_prompts_have_in_common_is_computed_on_each_device():
  plan, ids = schedule.Schedule(4, ways=2, chunk=8), prompt(20)
  for i in range(4):
    begin(plan, i, after(ids, 4, i))
  plan.assign_slots()
  rows = plan.next_rows(4)
  assert [[x.head.request.id for x in own] for own in rows] == [[0], [1]]
  for _ in range(2):
    assert plan.copy() == []
    for own in plan.next_rows(4):
      for group in own:
        plan.feed(group, 8)
  assert plan.copy() == [(1, 0, 16), (3, 2, 16)]
  copied = schedule.Shapes(4, 4, 8, ways=2).copies([(1, 0, 16), (3, 2, 16)])
  np.testing.assert_array_equal(copied[0], [1, 2, 1, 2])
  np.testing.assert_array_equal(copied[1][[0, 2]], [0, 0])
  assert copied[2] == 16


def test_held_slots_are_sources_until_the_weights_change():
  engine, ids = make(), prompt(20)
  engine.submit(request(0, ids, hold=True))
  engine.poll()
  engine.submit(request(1, after(ids, 5, 1)))
  assert helpers.poll(engine, 1)[0].cached == 16
  engine.set_params(helpers.params(MODEL), 1)
  engine.extend(0, prompt(9, 2), 4)
  engine.submit(request(2, after(ids, 5, 2)))
  assert [x.cached for x in helpers.poll(engine, 2)] == [0, 0]
  engine.release(0)


def test_set_aside_and_asleep_engines_forget():
  engine, ids = make(), prompt(20)
  engine.generate([request(0, ids)])
  with engine.aside():
    assert engine.generate([request(0, ids)])[0].cached == 0
  assert engine.generate([request(0, ids)])[0].cached == 0
  assert engine.generate([request(0, ids)])[0].cached == 16
  engine.sleep()
  assert engine.generate([request(0, ids)])[0].cached == 0
