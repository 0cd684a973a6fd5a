"""Prefill into the slots: rows, prefixes, interleaving, groups, memory."""

import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain import compilation
from posttrain.decode import loop, requests, schedule
from posttrain.models import transformer
from tests.decode import helpers

MODEL = dataclasses.replace(helpers.MODEL, layers=1)
# Rows of 32 x 16 tokens, so that calls have 4 rows or 32; prefixes of 128, 512
# and 1,024 tokens.
LONG = {'slots': 32, 'capacity': 1024, 'prefill_rows': 32, 'prefill_tokens': 16}


class Calls:
  """Records calls: ('prefill', rows, tokens, prefix) and ('decode',)."""

  def __init__(self, monkeypatch):
    self.log = []
    prefill, decode = loop.prefill, loop.decode

    def spy_prefill(view, model, state, chunk, *args):
      tokens, _, count, _ = chunk
      self.log.append(('prefill', len(tokens), int(np.sum(count)), args[0]))
      return prefill(view, model, state, chunk, *args)

    def spy_decode(*args):
      self.log.append(('decode',))
      return decode(*args)

    monkeypatch.setattr(loop, 'prefill', spy_prefill)
    monkeypatch.setattr(loop, 'decode', spy_decode)

  @property
  def prefills(self):
    return [call[1:] for call in self.log if call[0] == 'prefill']


def prompt(size, seed=0):
  return np.random.default_rng(seed).integers(0, 256, size)


def shapes(capacity):
  """Returns (view, state) as shapes, of 8 slots."""
  params = jax.eval_shape(lambda: transformer.init(jax.random.key(0), MODEL))
  view = jax.eval_shape(lambda p: loop.view(p, MODEL, None), params)
  state = jax.eval_shape(lambda: loop.fit(None, MODEL, 8, capacity, None))
  return view, state


def ints(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.int32)


@functools.cache
def compiled(capacity):
  """Returns prefill of 4 rows and 128 tokens, and the copy, compiled."""
  view, state = shapes(capacity)
  rows = (ints(4, 32), ints(4), ints(4), ints(4))
  return (
    loop.prefill.lower(view, MODEL, state, rows, 128, 4, None).compile(),
    loop.share.lower(state, ints(8), ints(8), ints(), 128, None).compile(),
  )


def test_memory_of_prefill_does_not_grow_with_capacity():
  small, large = compiled(512), compiled(8192)
  for a, b in zip(small, large, strict=True):
    a, b = a.memory_analysis(), b.memory_analysis()
    assert a.temp_size_in_bytes == b.temp_size_in_bytes
  cache = sum(
    x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes(8192)[1].cache)
  )
  for program in large:
    assert program.memory_analysis().alias_size_in_bytes >= cache


def test_prefill_updates_the_cache_in_place():
  """Arrays of the cache's size are arguments, and results of updates."""
  for program in compiled(512):
    text = program.as_text()
    ops = collections.Counter(
      re.findall(r'= f32\[8,2,512,16\]\S* (\S+?)\(', text)
    )
    assert ops and not ops.keys() - {
      'parameter',
      'get-tuple-element',
      'scatter',
      'dynamic-update-slice',
      'fusion',
    }, ops
    assert not re.search(r'f32\[4,2,512,16\]', text)  # no whole slots
    assert 'input_output_alias' in text.splitlines()[0]


def test_rows_and_prefixes_fit_what_waits(monkeypatch):
  engine = helpers.make(MODEL, **LONG)
  calls = Calls(monkeypatch)
  engine.generate([requests.Request(0, prompt(9), 2)])
  assert calls.prefills == [(4, 9, 128)]
  calls.log.clear()
  engine.generate([requests.Request(0, prompt(140), 2)])
  assert calls.prefills == 8 * [(4, 16, 128)] + [(4, 12, 512)]
  calls.log.clear()
  engine.generate([requests.Request(i, prompt(5, i), 2) for i in range(20)])
  assert calls.prefills == [(32, 100, 128)]
  calls.log.clear()
  engine.generate([requests.Request(i, prompt(5, i), 2) for i in range(6)])
  assert calls.prefills == [(4, 20, 128), (4, 10, 128)]


@pytest.mark.parametrize(
  'tokens, capacity, length',
  [
    (1, 48, 48),
    (100, 255, 255),
    (100, 256, 128),
    (129, 8192, 512),
    (512, 8192, 512),
    (513, 8192, 2048),
    (2049, 8192, 8192),
    (513, 4000, 4000),
  ],
)
def test_prefix_lengths(tokens, capacity, length):
  assert schedule.prefix_length(tokens, capacity) == length


@pytest.mark.parametrize(
  'capacity, calls',
  [
    (48, [(8, 48), (64, 48)]),
    (1024, [(8, 128), (64, 128), (8, 512), (64, 512), (8, 1024), (64, 1024)]),
    (6000, [(8, 128), (64, 128), (8, 512), (64, 512), (8, 2048), (8, 6000)]),
  ],
)
def test_shapes_of_calls(capacity, calls):
  assert schedule.Shapes(64, 64, 64).calls(capacity) == calls


def test_long_prefixes_have_few_rows():
  sizes = schedule.Shapes(64, 64, 64)
  plan = schedule.Schedule(64)
  for i in range(40):
    ids = prompt(100 if i else 1200, i)
    plan.begin(plan.new(requests.Request(i, ids, 4)), ids, 0, 4, 8192)
  plan.assign_slots()
  for group in plan.next_rows(1)[0]:
    plan.feed(group, 1088)
  call = sizes.next_call(plan, 8192)
  assert (call.count, call.length, len(call.rows[0])) == (8, 2048, 8)


def test_completions_do_not_depend_on_rows_prefixes_and_companions():
  lengths = (3, 100, 127, 128, 129, 300, 530, 700)
  batch = [
    requests.Request(i, prompt(size, i), 12) for i, size in enumerate(lengths)
  ]
  together = helpers.make(MODEL, **LONG).generate(batch)
  engine = helpers.make(
    MODEL, slots=4, capacity=1024, prefill_rows=4, prefill_tokens=64
  )
  assert helpers.same(engine.generate(batch), together)
  alone = [helpers.make(MODEL, **LONG).generate([x])[0] for x in batch]
  assert helpers.same(alone, together)
  again = helpers.make(MODEL, **LONG).generate(batch)
  for a, b in zip(again, together, strict=True):
    assert a.logprobs.tobytes() == b.logprobs.tobytes()


def test_decoding_slots_wait_for_one_chunk(monkeypatch):
  """At most 32 rows of 16 tokens are fed between two chunks of decoding."""
  running = [requests.Request(i, prompt(8, i), 60) for i in range(3)]
  late = [
    requests.Request(10 + i, prompt(size, 10 + i), 12)
    for i, size in enumerate((400, 30, 300, 9, 250, 170, 200))
  ]
  expected = helpers.make(MODEL, **LONG).generate([*running, *late])
  engine = helpers.make(MODEL, **LONG)
  for request in running:
    engine.submit(request)
  engine.step()
  calls, completions = Calls(monkeypatch), []
  for request in late:
    engine.submit(request)
  while len(completions) < len(expected):
    completions += engine.step()
  completions = sorted(completions, key=lambda completion: completion.id)
  assert helpers.same(completions, expected)
  between, rows = [], 0
  for call in calls.log:
    if call[0] == 'decode':
      between.append(rows)
    rows = 0 if call[0] == 'decode' else rows + call[1]
  assert max(between) == 32
  assert sum(x > 0 for x in between) >= 3
  assert sum(tokens for _, tokens, _ in calls.prefills) == sum(
    len(request.ids) for request in late
  )


def test_prompts_are_prefilled_to_the_end_while_no_slot_decodes(monkeypatch):
  engine = helpers.make(MODEL, **LONG)
  calls = Calls(monkeypatch)
  batch = [requests.Request(i, prompt(200, i), 4) for i in range(12)]
  engine.generate(batch)
  names = [call[0] for call in calls.log]
  assert names == ['prefill'] * (len(names) - 1) + ['decode']
  assert sum(tokens for _, tokens, _ in calls.prefills) == 12 * 200


def test_partial_is_empty_while_a_prompt_is_fed():
  engine = helpers.make(MODEL, **LONG)
  engine.generate([requests.Request(i, prompt(700, i), 4) for i in range(32)])
  engine.submit(requests.Request(1, prompt(8), 500))
  engine.step()
  engine.submit(requests.Request(2, prompt(600), 20))  # 38 chunks, 8 a step
  for _ in range(4):
    engine.step()
    assert len(engine.partial()[2][0]) == 0
  engine.step()
  assert len(engine.partial()[2][0]) == 5
  engine.cancel(1)
  engine.cancel(2)


@pytest.mark.parametrize('cancelled', [(10,), (10, 11), (11,), (10, 11, 12)])
def test_members_of_a_group_can_be_cancelled_while_it_is_fed(cancelled):
  ids = prompt(300, 5)
  group = [requests.Request(10 + i, ids, 12) for i in range(3)]
  expected = helpers.make(MODEL, **LONG).generate(group)
  engine = helpers.make(MODEL, **LONG)
  engine.submit(requests.Request(1, prompt(8), 100))
  engine.step()
  for request in group:
    engine.submit(request)
  engine.step()
  for id in cancelled:
    engine.cancel(id)
  engine.submit(requests.Request(2, prompt(50, 3), 40))  # takes a free slot
  completions = sorted(
    helpers.poll(engine, 5 - len(cancelled)), key=lambda x: x.id
  )
  kept = [x for x in expected if x.id not in cancelled]
  assert helpers.same(completions[2:], kept)
  (other,) = helpers.make(MODEL, **LONG).generate(
    [requests.Request(2, prompt(50, 3), 40)]
  )
  assert helpers.same([completions[1]], [other])
  engine.set_params(helpers.params(MODEL), 1)  # nothing is in flight


def begin(plan, id, size, seed=0):
  ids = prompt(size, seed)
  plan.begin(plan.new(requests.Request(id, ids, 4)), ids, 0, 4, 1024)


def placed(plan):
  """Gives slots to the queue; returns (device, slots) of each new group."""
  before = list(plan._groups)
  plan.assign_slots()
  return [
    (group.device, [entry.slot for entry in group.entries])
    for group in plan._groups
    if group not in before
  ]


def test_groups_are_placed_on_one_device():
  plan = schedule.Schedule(16, ways=4)
  for seed, size in enumerate((3, 2, 4, 1, 2)):
    for i in range(size):
      begin(plan, 10 * seed + i, 5, seed)
  assert placed(plan) == [
    (0, [0, 1, 2]),
    (1, [4, 5]),
    (2, [8, 9, 10, 11]),
    (3, [12]),
    (3, [13, 14]),
  ]
  assert [len(groups) for groups in plan.next_rows(1)] == [1, 1, 1, 1]


def test_groups_that_fit_on_no_device_are_split():
  plan = schedule.Schedule(8, ways=2)
  begin(plan, 0, 5, 0)
  for i in range(6):
    begin(plan, 1 + i, 9, 1)
  assert placed(plan) == [(0, [0]), (1, [4, 5, 6, 7]), (0, [1, 2])]


def test_one_device_fills_slots_in_order():
  plan = schedule.Schedule(6)
  for i in range(2):
    begin(plan, i, 5, 0)
  for i in range(2, 5):
    begin(plan, i, 5, 1)
  assert placed(plan) == [(0, [0, 1]), (0, [2, 3, 4])]


def test_sleeping_frees_the_cache():
  batch, expected = helpers.baseline()
  engine = helpers.make()
  engine.sleep()  # before there is one
  assert helpers.same(engine.generate(batch), expected)
  engine.submit(batch[0])
  engine.step()
  with pytest.raises(AssertionError, match='release all requests'):
    engine.sleep()
  engine.cancel(batch[0].id)
  engine.sleep()
  assert engine._state is None and engine.partial() == {}
  with compilation.CompileCounter() as compiles:
    for a, b in zip(engine.generate(batch), expected, strict=True):
      assert a.logprobs.tobytes() == b.logprobs.tobytes()
    engine.sleep()
    assert helpers.same(engine.generate(batch), expected)
  assert compiles.count == 0


def test_nothing_compiles_after_warm_up():
  engine = helpers.make(MODEL, **LONG)
  engine.warm_up()
  with compilation.CompileCounter() as compiles:
    engine.warm_up()
  assert compiles.count == 0
  few = [requests.Request(i, prompt(5), 4) for i in range(2)]
  engine.generate(few)  # the other programs
  with compilation.CompileCounter() as compiles:
    for sizes in ((3, 100), (500,), (800,), range(2, 30)):
      engine.generate(
        [requests.Request(i, prompt(n, i), 4) for i, n in enumerate(sizes)]
      )
  assert compiles.count == 0
