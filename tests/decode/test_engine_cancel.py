"""Step by step: what has been drawn so far, and requests that are given up."""

import dataclasses

import numpy as np
import pytest

from posttrain.decode import requests, schedule
from tests.decode import helpers


def finish(engine, count):
  done = []
  while len(done) < count:
    done += engine.step()
  return done


def by_id(done):
  return sorted(done, key=lambda completion: completion.id)


def test_steps_give_what_polling_gives():
  asked, expected = helpers.baseline()
  engine = helpers.make()
  assert engine.step() == [] and engine.partial() == {}
  for request in asked:
    engine.submit(request)
  assert helpers.same(by_id(finish(engine, len(asked))), expected)


def test_what_is_drawn_so_far_is_the_beginning_of_the_completion():
  asked, expected = helpers.baseline()
  whole = {completion.id: completion for completion in expected}
  engine = helpers.make()
  for request in asked:
    engine.submit(request)
  seen, lengths = 0, set()
  while seen < len(asked):
    seen += len(engine.step())
    for id, (ids, logprobs) in engine.partial().items():
      np.testing.assert_array_equal(ids, whole[id].ids[: len(ids)])
      np.testing.assert_allclose(
        logprobs, whole[id].logprobs[: len(ids)], rtol=0, atol=1e-5
      )
      lengths.add(len(ids))
  # A token comes with the prompt, and four with every chunk.
  assert lengths == {5, 9, 13}
  assert engine.partial() == {}


def test_a_turn_that_goes_on_shows_its_own_tokens_only():
  (request,) = helpers.ask(1, seed=6, max_tokens=6, hold=True)
  engine = helpers.make()
  engine.submit(request)
  finish(engine, 1)
  assert engine.partial() == {}
  engine.extend(request.id, np.array([65, 66]), 9)
  assert [len(ids) for ids, _ in engine.partial().values()] == [0]
  engine.step()
  assert [len(ids) for ids, _ in engine.partial().values()] == [5]


@pytest.mark.parametrize('steps', [0, 1, 2])
def test_cancelling_leaves_the_others_as_they_were(steps):
  """While they wait (no step), and in mid-decode; the slots are used again."""
  asked, expected = helpers.baseline()
  given_up = {asked[i].id for i in (0, 3, 4, 11)}
  engine = helpers.make()
  for request in asked:
    engine.submit(request)
  done = [c for _ in range(steps) for c in engine.step()]
  for id in given_up - {completion.id for completion in done}:
    engine.cancel(id)
  rest = len(asked) - len(given_up | {completion.id for completion in done})
  done += finish(engine, rest)
  kept = [c for c in expected if c.id not in given_up]
  got = [c for c in by_id(done) if c.id not in given_up]
  assert helpers.same(got, kept)
  for a, b in zip(got, kept, strict=True):
    np.testing.assert_array_equal(a.logprobs, b.logprobs)
  # All slots can be had again, by the very requests that were given up.
  again = engine.generate(asked)
  assert helpers.same(again, expected)


def test_a_slot_is_free_at_once():
  long, other, third = helpers.ask(3, seed=3, max_tokens=20)
  engine = helpers.make(**helpers.SMALL)
  # Both slots are taken; a third request waits until one of them is given up.
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


def test_held_and_finished_ones_can_be_cancelled_too():
  asked = helpers.ask(2, seed=6, max_tokens=6, hold=True)
  engine = helpers.make()
  for request in asked:
    engine.submit(request)
  helpers.poll(engine, 2)
  engine.cancel(asked[0].id)
  engine.extend(asked[1].id, np.array([65]), 4)
  engine.cancel(asked[1].id)
  assert engine.poll() == []
  too_long = requests.Request(5, np.arange(48), 4)  # stops at once: no room
  engine.submit(too_long)
  engine.cancel(5)
  assert engine.poll() == []
  for id in (5, asked[0].id, 12345):
    with pytest.raises(ValueError, match=f'request {id} must be in flight'):
      engine.cancel(id)


def test_a_key_stands_in_for_the_id():
  asked, expected = helpers.baseline()
  renamed = [
    dataclasses.replace(r, id=10_000 + i, key=r.id) for i, r in enumerate(asked)
  ]
  done = helpers.make().generate(renamed)
  for a, b in zip(done, expected, strict=True):
    np.testing.assert_array_equal(a.ids, b.ids)
  twins = [dataclasses.replace(asked[0], id=i, key=5) for i in (1, 2)]
  first, second = helpers.make().generate(twins)
  np.testing.assert_array_equal(first.ids, second.ids)
  with pytest.raises(ValueError, match='have a key in'):
    helpers.make().submit(dataclasses.replace(asked[0], key=-1))


@pytest.mark.parametrize(('patient', 'expected'), [(True, 0), (False, 1)])
def test_only_the_patient_wait_for_slots_for_all(patient, expected):
  plan = schedule.Schedule(2, patient)
  for id, prompt in enumerate(([1], [2], [2])):
    request = requests.Request(id, np.array(prompt), 4)
    plan.begin(plan.new(request), np.array(prompt), 0, 4, 32)
  entries = plan.seat_next(4)
  assert [len(entry) for entry in entries] == [1] + [1] * expected
  plan.cancel(0)
  entries = plan.seat_next(4)
  assert [len(entry) for entry in entries] == [2 - expected]
