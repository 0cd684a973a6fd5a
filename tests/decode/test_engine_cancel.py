"""Single steps, partial completions, and cancelled requests."""

import dataclasses

import numpy as np
import pytest

from posttrain.decode import requests, schedule
from tests.decode import helpers


def finish(engine, count):
  completions = []
  while len(completions) < count:
    completions += engine.step()
  return completions


def by_id(completions):
  return sorted(completions, key=lambda completion: completion.id)


def test_steps_and_polls_give_equal_completions():
  batch, expected = helpers.baseline()
  engine = helpers.make()
  assert engine.step() == [] and engine.partial() == {}
  for request in batch:
    engine.submit(request)
  assert helpers.same(by_id(finish(engine, len(batch))), expected)


def test_partial_is_a_prefix_of_the_completion():
  batch, expected = helpers.baseline()
  whole = {completion.id: completion for completion in expected}
  engine = helpers.make()
  for request in batch:
    engine.submit(request)
  count, lengths = 0, set()
  while count < len(batch):
    count += len(engine.step())
    for id, (ids, logprobs, _) in engine.partial().items():
      np.testing.assert_array_equal(ids, whole[id].ids[: len(ids)])
      np.testing.assert_allclose(
        logprobs, whole[id].logprobs[: len(ids)], rtol=0, atol=1e-5
      )
      lengths.add(len(ids))
  # None while its prompt is fed; a token comes with the last of it, and four
  # with every chunk, fewer if another request stops.
  assert lengths == {0, 4, 5, 8, 9, 12, 13, 14}
  assert engine.partial() == {}


def test_partial_of_an_extension_has_only_its_own_tokens():
  (request,) = helpers.make_requests(1, seed=6, max_tokens=6, hold=True)
  engine = helpers.make()
  engine.submit(request)
  finish(engine, 1)
  assert engine.partial() == {}
  engine.extend(request.id, np.array([65, 66]), 9)
  assert [len(ids) for ids, *_ in engine.partial().values()] == [0]
  engine.step()
  assert [len(ids) for ids, *_ in engine.partial().values()] == [5]


@pytest.mark.parametrize('steps', [0, 1, 2])
def test_cancelling_does_not_change_other_completions(steps):
  """Cancels while requests wait (no step), and while they decode."""
  batch, expected = helpers.baseline()
  cancelled = {batch[i].id for i in (0, 3, 4, 11)}
  engine = helpers.make()
  for request in batch:
    engine.submit(request)
  completions = [c for _ in range(steps) for c in engine.step()]
  for id in cancelled - {completion.id for completion in completions}:
    engine.cancel(id)
  rest = len(batch) - len(
    cancelled | {completion.id for completion in completions}
  )
  completions += finish(engine, rest)
  kept = [c for c in expected if c.id not in cancelled]
  got = [c for c in by_id(completions) if c.id not in cancelled]
  assert helpers.same(got, kept)
  for a, b in zip(got, kept, strict=True):
    # Fewer requests may be prefilled in fewer rows, which round differently.
    np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=1e-5)
  # All slots are free again, also for the cancelled requests.
  again = engine.generate(batch)
  assert helpers.same(again, expected)


def test_cancelled_slot_is_free_at_once():
  long, other, third = helpers.make_requests(3, seed=3, max_tokens=20)
  engine = helpers.make(**helpers.SMALL)
  # Both slots are taken; a third request waits until one is cancelled.
  for request in (long, other, third):
    engine.submit(dataclasses.replace(request, stop_ids=()))
  engine.step()
  assert engine.partial().keys() == {long.id, other.id}
  engine.cancel(long.id)
  assert engine.partial().keys() == {other.id}
  engine.step()
  assert engine.partial().keys() == {other.id, third.id}
  engine.cancel(other.id)
  engine.cancel(third.id)
  assert engine.poll() == [] == engine.step()
  engine.set_params(helpers.params(), 1)  # nothing is in flight


def test_held_and_finished_requests_can_be_cancelled():
  batch = helpers.make_requests(2, seed=6, max_tokens=6, hold=True)
  engine = helpers.make()
  for request in batch:
    engine.submit(request)
  helpers.poll(engine, 2)
  engine.cancel(batch[0].id)
  engine.extend(batch[1].id, np.array([65]), 4)
  engine.cancel(batch[1].id)
  assert engine.poll() == []
  too_long = requests.Request(5, np.arange(48), 4)  # overflows at once
  engine.submit(too_long)
  engine.cancel(5)
  assert engine.poll() == []
  for id in (5, batch[0].id, 12345):
    with pytest.raises(ValueError, match=f'request {id} must be in flight'):
      engine.cancel(id)


def test_key_replaces_the_id_in_draws():
  batch, expected = helpers.baseline()
  renamed = [
    dataclasses.replace(r, id=10_000 + i, key=r.id) for i, r in enumerate(batch)
  ]
  completions = helpers.make().generate(renamed)
  for a, b in zip(completions, expected, strict=True):
    np.testing.assert_array_equal(a.ids, b.ids)
  twins = [dataclasses.replace(batch[0], id=i, key=5) for i in (1, 2)]
  first, second = helpers.make().generate(twins)
  np.testing.assert_array_equal(first.ids, second.ids)
  with pytest.raises(ValueError, match='have a key in'):
    helpers.make().submit(dataclasses.replace(batch[0], key=-1))


@pytest.mark.parametrize(('share_prefill', 'expected'), [(True, 0), (False, 1)])
def test_only_shared_prefill_waits_for_slots_for_all(share_prefill, expected):
  plan = schedule.Schedule(2)
  plan.share_prefill = share_prefill
  for id, prompt in enumerate(([1], [2], [2])):
    request = requests.Request(id, np.array(prompt), 4)
    plan.begin(plan.new(request), np.array(prompt), 0, 4, 32)
  plan.assign_slots()
  (groups,) = plan.next_rows(4)
  assert [len(group.entries) for group in groups] == [1] + [1] * expected
  for group in groups:
    plan.feed(group, 1)
  plan.cancel(0)
  plan.assign_slots()
  (groups,) = plan.next_rows(4)
  assert [len(group.entries) for group in groups] == [2 - expected]
