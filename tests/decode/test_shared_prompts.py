"""Prompts that decoding reads once per group: tokens, rule, programs."""

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
SIZES = {'slots': 8, 'capacity': 96, 'prefill_tokens': 32, 'group_size': GROUP}
MODEL = dataclasses.replace(
  helpers.MODEL, local_layers=(0,), window=24, attention_softcap=20.0
)


def prompt(size, seed=0):
  return np.random.default_rng(seed).integers(0, 256, size)


@pytest.fixture
def reads(monkeypatch):
  """Shares all prompts; records the groups that `loop.decode` gets."""
  monkeypatch.setattr(schedule, 'LEAST_SAVED', 1)
  calls, decode = [], loop.decode

  def spy(*args):
    calls.append(args[7])
    return decode(*args)

  monkeypatch.setattr(loop, 'decode', spy)
  return calls


def assert_close(completions, expected):
  assert helpers.same(completions, expected)
  for a, b in zip(completions, expected, strict=True):
    np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=2e-5)


def test_completions_are_those_of_slots_that_read_their_own(reads):
  """Of groups of many sizes and lengths, that stop one by one."""
  batch = [
    requests.Request(10 * i + j, prompt(size, i), 4 + 9 * j, hold=i == 0)
    for i, (size, count) in enumerate(((40, 4), (33, 3), (20, 6), (45, 1)))
    for j in range(count)
  ]

  def play(**options):
    """Also of a second turn of the first group."""
    engine = helpers.make(MODEL, **(SIZES | options))
    for request in batch:
      engine.submit(request)
    first = helpers.poll(engine, len(batch))
    for i in range(4):
      engine.extend(i, prompt(3, i), 8)
    return sorted(first, key=lambda x: x.id) + sorted(
      helpers.poll(engine, 4), key=lambda x: x.id
    )

  expected = play(group_size=1)
  assert not any(reads)
  completions = play()
  assert sum(x is not None for x in reads) > 5
  assert_close(completions, expected)
  for a, b in zip(play(), completions, strict=True):
    assert a.logprobs.tobytes() == b.logprobs.tobytes()


def plan_of(*groups, slots=16):
  """Returns a schedule whose requests decode, by (tokens, count)."""
  plan = schedule.Schedule(slots)
  for i, (size, count) in enumerate(groups):
    for j in range(count):
      ids = prompt(size, i)
      new = plan.new(requests.Request(100 * i + j, ids, 4))
      plan.begin(new, ids, 0, 4, 10_000)
    plan.assign_slots()
    for group in plan.next_rows(9)[0]:
      plan.feed(group, size)
  return plan


def test_rows_have_the_slots_of_a_prompt():
  plan = plan_of((1700, 6), (300, 1), (1900, 4))
  plan.finish(next(plan.in_slots))
  members, length, shortest = plan.prompts(4)
  rows = [[1, 2, 3, 4], [5, 16, 16, 16], [6, 16, 16, 16], [7, 8, 9, 10]]
  assert members.tolist() == rows  # four are enough for 16 slots
  assert length.tolist() == [1700, 1700, 300, 1900]
  assert shortest == 300


def test_prompts_are_shared_where_that_saves_enough():
  most = schedule.LEAST_SAVED * 4
  assert plan_of((most // 3, 4)).prompts(4) is None
  assert plan_of((most // 3 + 1, 4)).prompts(4) is not None
  # As much, but of more prompts than there are rows.
  few = [(2 * most, 4), *((50, 1) for _ in range(8))]
  assert plan_of(*few).prompts(4) is None
  assert plan_of(*few[:-1]).prompts(4) is not None


B, N, K, S, H = 6, 4, 2, 48, 16
MEMBERS = np.array([[0, 3, 4], [1, 6, 6], [6, 6, 6]], np.int32)


@pytest.mark.parametrize('impl', ['xla', 'interpret'])
@pytest.mark.parametrize('window', [None, 7])
def test_attention_equals_that_over_whole_rows(impl, window):
  keys = jax.random.split(jax.random.key(0), 3)
  q = jax.random.normal(keys[0], (B, N, H))
  k, v = (jax.random.normal(key, (B, K, S, H)) for key in keys[1:])
  # Rows 2 and 5 are in no group; row 5 is empty.
  length, first = np.array([20, 16, 0], np.int32), np.int32(0)
  for group, size in zip(MEMBERS, length, strict=True):
    for row in group[group < B]:
      k, v = (x.at[row, :, :size].set(x[group[0], :, :size]) for x in (k, v))
  end = jnp.array([21, 40, 30, 33, 48, 0])
  start = jnp.maximum(end - (window or S), 0)
  expected = reference.decode(q, k, v, start, end, scale=0.25, softcap=5.0)

  @jax.jit
  def decode(cache, first, q, k, v, start, end):
    shared = attention.Shared(cache, MEMBERS, length, first)
    options = {'scale': 0.25, 'softcap': 5.0, 'impl': impl, 'shared': shared}
    return attention.decode(q, k, v, start, end, **options)

  pair = k[np.minimum(MEMBERS[:, 0], 5)], v[np.minimum(MEMBERS[:, 0], 5)]
  out = decode(pair, first, q, k, v, start, end)
  np.testing.assert_allclose(out, expected, rtol=0, atol=2e-6)
  # The caches of the rows of the groups may begin where the prompts end.
  rows = np.array([0, 1, 3, 4])
  out = decode(pair, np.int32(16), q, k[:, :, 16:], v[:, :, 16:], start, end)
  np.testing.assert_allclose(out[rows], expected[rows], rtol=0, atol=2e-6)
