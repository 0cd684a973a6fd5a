"""Prompts that are stored and read once per group: tokens, places, programs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import reference
from posttrain.decode import loop, requests, schedule
from posttrain.ops import attention
from tests.decode import helpers

GROUP = 4
SIZES = {'slots': 8, 'capacity': 128, 'prefill_tokens': 32}
STORE = {'group_size': GROUP, 'prompt_tokens': 48, 'prefix_cache': False}
MODEL = dataclasses.replace(
  helpers.MODEL, local_layers=(0,), window=24, attention_softcap=20.0
)


def prompt(size, seed=0):
  return np.random.default_rng(seed).integers(0, 256, size)


@pytest.fixture
def reads(monkeypatch):
  """Records what `loop.decode` reads once."""
  calls, decode = [], loop.decode

  def spy(*args):
    calls.append(args[6])
    return decode(*args)

  monkeypatch.setattr(loop, 'decode', spy)
  return calls


def assert_close(completions, expected, atol):
  assert helpers.same(completions, expected)
  for a, b in zip(completions, expected, strict=True):
    np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=atol)


# (tokens of a prompt, requests): some of more requests than a stored prompt
# serves, some of more tokens, and one that fits in a slot.
GROUPS = (40, 4), (33, 3), (20, 6), (45, 1), (60, 2), (8, 1)


def play(**options):
  """Returns the completions of groups, and second turns of the first two."""
  batch = [
    requests.Request(10 * i + j, prompt(size, i), 4 + 9 * j, hold=i < 2)
    for i, (size, count) in enumerate(GROUPS)
    for j in range(count)
  ]
  engine = helpers.make(MODEL, **SIZES, **options)
  for request in batch:
    engine.submit(request)
  held, done = [0, 1, 2, 3, 10, 11, 12], []
  while len(done) < len(batch) + len(held):
    for x in engine.poll():
      done.append(x)
      if sum(y.id == x.id for y in done) == 2:
        engine.release(x.id)
      elif x.id in held:
        engine.extend(x.id, prompt(3 + x.id % 2 * 30, x.id), 8)
  return sorted(done, key=lambda x: (x.id, x.ids.size)), engine


@pytest.mark.parametrize(
  'dtype', ['auto', pytest.param('int8', marks=pytest.mark.slow)]
)
def test_completions_are_those_of_slots_that_store_their_own(reads, dtype):
  """Of groups of many sizes and lengths, that stop one by one."""
  expected, _ = play(cache_dtype=dtype)
  assert not any(reads)
  options = {**STORE, 'cache_dtype': dtype}
  completions, engine = play(**options)
  assert sum(x is not None for x in reads) > 5
  # What lies between two values of int8 may round to either.
  assert_close(completions, expected, 5e-4 if dtype == 'int8' else 2e-5)
  assert engine._state.prompts[0][0].shape == (4, 2, 48, 16)
  assert engine._state.cache[0][0].shape == (8, 2, 80, 16)
  again, _ = play(**options)
  for a, b in zip(again, completions, strict=True):
    assert a.logprobs.tobytes() == b.logprobs.tobytes()


def plan_of(*groups, slots=16, ways=1, hold=True):
  """Returns a schedule whose requests decode, by (tokens, count)."""
  store = schedule.Store(4 * ways, 1000, 4)
  plan = schedule.Schedule(slots, ways, store=store)
  for i, (size, count) in enumerate(groups):
    for j in range(count):
      ids = prompt(size, i)
      new = plan.new(requests.Request(100 * i + j, ids, 4, hold=hold))
      plan.begin(new, ids, 0, 4, 1010)
    plan.assign_slots()
    for own in plan.next_rows(9):
      for group in own:
        plan.feed(group, size)
  return plan


def test_prompts_have_their_slots():
  plan = plan_of((1005, 6), (300, 1), (900, 4))
  plan.finish(next(plan.in_slots))
  members, length, base = plan.prompts()
  rows = [[1, 2, 3, 16], [4, 5, 16, 16], [6, 16, 16, 16], [7, 8, 9, 10]]
  assert members.tolist() == rows
  assert length.tolist() == [1000, 1000, 300, 900]
  assert base.tolist() == [0, *[1000] * 5, 300, *[900] * 4, *[0] * 5]
  # What fits in a slot needs no place.
  assert plan_of((6, 4), hold=False).prompts() is None
  assert plan_of((6, 4)).prompts() is not None


def test_a_group_waits_for_a_place():
  plan = plan_of(*((50 + i, 1) for i in range(6)), (5, 3))
  assert [x.request.id for x in plan.in_slots] == [0, 100, 200, 300]
  assert plan.num_waiting == 5
  plan.remove(plan.in_flight[200])
  plan.assign_slots()
  places = {x.request.id: x.prompt_index for x in plan.in_slots}
  assert places == {0: 0, 100: 1, 400: 2, 300: 3}
  # On each of two devices.
  plan = plan_of(*((50 + i, 2) for i in range(9)), slots=64, ways=2)
  members, length, _ = plan.prompts()
  assert len(members) == 8 and min(length) == 50 and max(length) == 57
  plan = plan_of((50, 3), (51, 3), slots=64, ways=2)
  assert plan.prompts()[0].shape == (4, 4)


def test_a_sequence_ends_where_its_slot_is_full():
  plan = plan_of((900, 1))
  new = plan.new(requests.Request(1, prompt(900), 50, hold=True))
  plan.begin(new, prompt(900), 0, 50, 1010)
  assert (new.limit, new.cut) == (910, True)


B, N, K, S, H = 6, 4, 2, 48, 16
MEMBERS = np.array([[0, 3, 4], [1, 6, 6], [6, 6, 6]], np.int32)
BASE = np.array([20, 16, 0, 20, 20, 0], np.int32)


@pytest.mark.parametrize('impl', ['xla', 'interpret'])
@pytest.mark.parametrize('window', [None, 7])
def test_attention_equals_that_over_whole_rows(impl, window):
  keys = jax.random.split(jax.random.key(0), 3)
  q = jax.random.normal(keys[0], (B, N, H))
  k, v = (jax.random.normal(key, (B, K, S, H)) for key in keys[1:])
  # Rows 2 and 5 are in no group; row 5 is empty.
  length = np.array([20, 16, 0], np.int32)
  for group, size in zip(MEMBERS, length, strict=True):
    for row in group[group < B]:
      k, v = (x.at[row, :, :size].set(x[group[0], :, :size]) for x in (k, v))
  end = jnp.array([21, 40, 30, 33, 48, 0])
  start = jnp.maximum(end - (window or S), 0)
  expected = reference.decode(q, k, v, start, end, scale=0.25, softcap=5.0)

  @jax.jit
  def decode(cache, q, k, v, start, end):
    shared = attention.Shared(cache, MEMBERS, length, BASE, longest=S)
    options = {'scale': 0.25, 'softcap': 5.0, 'impl': impl, 'shared': shared}
    return attention.decode(q, k, v, start, end, **options)

  pair = k[np.minimum(MEMBERS[:, 0], 5)], v[np.minimum(MEMBERS[:, 0], 5)]
  own = (
    jnp.stack([jnp.roll(y, -n, axis=1) for y, n in zip(x, BASE, strict=True)])
    for x in (k, v)
  )
  out = decode(pair, q, *own, start, end)
  np.testing.assert_allclose(out, expected, rtol=0, atol=2e-6)
