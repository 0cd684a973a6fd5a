"""Between the turns: groups, holding, extending, overflow, buckets, errors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.decode import engine as engines
from posttrain.decode import loop, requests, schedule, tree_spec
from tests.decode import helpers


def test_each_prompt_of_a_group_is_prefilled_once(monkeypatch):
  fed = []
  prefill = loop.prefill

  def spy(view, model, scratch, logits, tokens, start, count):
    fed.append(int(np.sum(count)))
    return prefill(view, model, scratch, logits, tokens, start, count)

  monkeypatch.setattr(loop, 'prefill', spy)
  rng = np.random.default_rng(0)
  prompts = [rng.integers(0, 256, n) for n in (5, 9, 13, 6)]
  asked = [
    requests.Request(4 * i + j, prompt, 8)
    for i, prompt in enumerate(prompts)
    for j in range(4)
  ]
  helpers.make(slots=8).generate(asked)
  assert sum(fed) == sum(len(prompt) for prompt in prompts)


def test_the_loop_stops_when_all_rows_have(monkeypatch):
  steps = []
  decode = loop.decode

  def spy(*args):
    before = np.asarray(args[2].length)
    state = decode(*args)
    steps.append(int((np.asarray(state.length) - before).max()))
    return state

  monkeypatch.setattr(loop, 'decode', spy)
  helpers.make().generate(
    [requests.Request(i, np.arange(4), 3 + i) for i in range(4)]
  )
  # The first token comes with the prompt; the longest has 5 more.
  assert steps == [5]


def test_extend_goes_on_as_if_it_had_all_been_the_prompt():
  asked = helpers.ask(3, seed=6, max_tokens=6, hold=True)
  engine = helpers.make()
  for request in asked:
    engine.submit(request)
  first = {c.id: c for c in helpers.poll(engine, 3)}
  new = [np.array([65, 66, 67]), np.zeros(0, np.int32), np.arange(70, 81)]
  for request, ids in zip(asked, new, strict=True):
    engine.extend(request.id, ids, 7)
  second = {c.id: c for c in helpers.poll(engine, 3)}
  for request, ids in zip(asked, new, strict=True):
    prompt = np.concatenate([request.ids, first[request.id].ids, ids])
    (fresh,) = helpers.make().generate(
      [requests.Request(request.id, prompt, 7, (helpers.EOS,))]
    )
    assert helpers.same([second[request.id]], [fresh])
    np.testing.assert_allclose(
      second[request.id].logprobs, fresh.logprobs, atol=1e-5
    )
    engine.release(request.id)
  assert engine.poll() == []


def test_queued_requests_go_on_beside_held_ones():
  engine = helpers.make(**helpers.SMALL)
  engine.submit(requests.Request(1, np.arange(3), 4, hold=True))
  for i in range(2, 6):
    engine.submit(requests.Request(i, np.arange(i), 4))
  assert sorted(c.id for c in helpers.poll(engine, 5)) == [1, 2, 3, 4, 5]
  engine.release(1)


def test_a_group_does_not_wait_for_held_slots():
  engine = helpers.make(**helpers.SMALL)
  engine.submit(requests.Request(1, np.arange(3), 4, hold=True))
  engine.poll()
  for i in range(2, 5):  # as many as there are slots, and more
    engine.submit(requests.Request(i, np.arange(5), 4))
  assert sorted(c.id for c in helpers.poll(engine, 3)) == [2, 3, 4]
  engine.release(1)


def seat(seats, id, prompt, hold=False):
  """Queues a request; only numbers, no engine."""
  made = seats.new(requests.Request(id, np.arange(prompt), 4, hold=hold))
  assert seats.begin(made, made.request.ids, 0, 4, helpers.WIDTH)


@pytest.mark.parametrize(
  'held, group, runs',
  [
    (0, 4, [4]),
    (0, 6, [4, 2]),
    (1, 4, [3, 1]),
    (1, 3, [3]),
    (2, 5, [2, 2, 1]),
    (3, 2, [1, 1]),
    (4, 1, []),
  ],
)
def test_a_group_is_split_by_what_can_be_free(held, group, runs):
  seats = schedule.Schedule(4)
  for id in range(held):
    seat(seats, id, 1 + id, hold=True)
  for (one,) in seats.seat_next(4):
    seats.finish(one)
  for id in range(10, 10 + group):
    seat(seats, id, 9)
  found = []
  while entries := seats.seat_next(1):
    found.append(len(entries[0]))
    for one in entries[0]:
      seats.finish(one)
  assert found == runs and seats.waiting == group - sum(runs)


def test_a_group_waits_for_what_runs():
  seats = schedule.Schedule(4)
  seat(seats, 0, 1)
  ((first,),) = seats.seat_next(4)
  for id in range(1, 5):
    seat(seats, id, 9)
  assert seats.seat_next(4) == []  # its prompt would go in twice
  seats.finish(first)
  assert [len(run) for run in seats.seat_next(4)] == [4]


def test_a_pool_of_held_slots_says_so():
  engine = helpers.make(**helpers.SMALL)
  for i in (1, 2):
    engine.submit(requests.Request(i, np.arange(3), 4, hold=True))
  engine.submit(requests.Request(3, np.arange(3), 4))
  helpers.poll(engine, 2)
  with pytest.raises(ValueError, match='all 2 are held; extend or release'):
    engine.poll()


def test_extensions_overflow():
  engine = helpers.make()
  engine.submit(requests.Request(1, np.arange(4), 4, hold=True))
  engine.poll()
  engine.extend(1, np.arange(37), 100)
  (completion,) = engine.poll()
  assert completion.stop_reason == 'overflow' and len(completion.ids) == 3
  engine.extend(1, np.arange(5), 100)
  (completion,) = engine.poll()
  assert completion.stop_reason == 'overflow' and len(completion.ids) == 0
  engine.release(1)
  assert engine.poll() == []


def test_capacity_grows_in_buckets():
  asked, expected = helpers.baseline()
  engine = helpers.make(capacity=None)
  assert helpers.same(engine.generate(asked), expected)
  longest = max(len(request.ids) + 16 for request in asked)
  assert engine.capacity == schedule.bucket(longest) == helpers.WIDTH
  engine.submit(requests.Request(99, np.arange(9), 10, hold=True))
  (held,) = helpers.poll(engine, 1)
  # It grows around what is held, for another and for itself.
  long = requests.Request(98, np.arange(40), 30)
  engine.submit(long)
  engine.submit(asked[4])
  assert engine.capacity == 96
  done = sorted(helpers.poll(engine, 2), key=lambda c: c.id)
  (wide,) = helpers.make(**helpers.WIDE).generate([long])
  assert helpers.same(done, [wide, expected[4]])
  engine.extend(99, np.arange(30), 20)
  (more,) = helpers.poll(engine, 1)
  assert engine.capacity == 96 and len(more.ids) == 20
  whole = np.concatenate([np.arange(9), held.ids, np.arange(30)])
  again = requests.Request(99, whole, 20)
  (fresh,) = helpers.make(**helpers.WIDE).generate([again])
  assert helpers.same([more], [fresh])
  with pytest.raises(ValueError, match='request 99 must ask for a token'):
    engine.extend(99, np.arange(200), 0)
  engine.extend(99, np.zeros(0), 50)  # an extension, too, may ask for more
  assert engine.capacity == 128


@pytest.mark.parametrize(
  'tokens, size',
  [
    (1, 32),
    (32, 32),
    (33, 48),
    (49, 64),
    (65, 96),
    (97, 128),
    (129, 192),
    (1000, 1024),
  ],
)
def test_buckets(tokens, size):
  assert schedule.bucket(tokens) == size


def test_errors_name_what_is_wrong():
  engine = helpers.make()
  request = requests.Request(7, np.arange(3), 4, hold=True)
  for wrong, message in (
    ({'ids': np.zeros(0)}, 'request 7 must have a prompt'),
    ({'max_tokens': 0}, 'request 7 must ask for a token'),
    ({'stop_ids': tuple(range(9))}, 'at most 8 stop ids'),
    ({'id': -1}, 'request -1 must have an id'),
  ):
    with pytest.raises(ValueError, match=message):
      engine.submit(dataclasses.replace(request, **wrong))
  with pytest.raises(ValueError, match='request 7 must be held'):
    engine.extend(7, np.arange(3), 4)
  engine.submit(request)
  with pytest.raises(ValueError, match='request 7 must not be in flight'):
    engine.submit(request)
  with pytest.raises(ValueError, match='no request is in flight: got 1'):
    engine.set_params(helpers.params(), 1)
  engine.poll()
  engine.release(7)
  with pytest.raises(ValueError, match='top_p must be in'):
    requests.Sampling(top_p=0.0)


def test_generate_queues_all_or_nothing():
  asked, expected = helpers.baseline()
  engine = helpers.make()
  for wrong, message in (
    ({'max_tokens': 0}, 'must ask for a token at least: got 0'),
    ({'ids': np.zeros(0)}, 'must have a prompt'),
    ({'hold': True}, 'must not ask to be held: got True; submit and poll'),
    ({'id': asked[0].id}, 'must be asked for once: got 2'),
  ):
    bad = dataclasses.replace(asked[1], **wrong)
    with pytest.raises(ValueError, match=message):
      engine.generate([asked[0], bad, asked[2]])
    assert engine.poll() == []
  # Neither what decodes nor what is yet to be polled gets lost.
  engine.submit(asked[0])
  engine.submit(requests.Request(5, np.arange(helpers.WIDTH + 1), 4))
  with pytest.raises(ValueError, match=r'in flight: got \[5, 1000\].*poll and'):
    engine.generate(asked[1:3])
  (cut,), (first,) = engine.poll(), engine.poll()
  assert cut.stop_reason == 'overflow'
  assert helpers.same([first], expected[:1])
  assert helpers.same(engine.generate(asked[1:3]), expected[1:3])


def test_weights_come_first():
  engine = engines.Engine(helpers.MODEL, slots=2)
  for call in (
    engine.poll,
    lambda: engine.generate([]),
    lambda: engine.score([]),
  ):
    with pytest.raises(ValueError, match='must be set before .*set_params fir'):
      call()


@pytest.mark.parametrize(
  'changed, got',
  [
    ({'norm': np.zeros(3, np.float32)}, 'norm = .*shape=\\(3,\\)'),
    ({'norm': np.zeros(2, np.float16)}, 'norm = .*float16'),
    ({'norm': None}, 'norm = None, expected Sha'),
    ({'extra': np.zeros(2, np.float32)}, 'extra = Shape.*expected None'),
  ],
)
def test_weights_must_stay_alike(changed, got):
  weights = {'embed': np.ones((2, 2)), 'norm': np.zeros(2, np.float32)}
  old = tree_spec.describe(weights)
  tree_spec.check_same(old, tree_spec.describe(jax.tree.map(np.copy, weights)))
  with pytest.raises(ValueError, match=f'weights must stay alike: got {got}'):
    tree_spec.check_same(old, tree_spec.describe({**weights, **changed}))


def test_weights_must_stay_where_they_are():
  """The old ones may be gone; an abstract mesh stands for many devices."""
  mesh = jax.sharding.AbstractMesh((2, 2), ('data', 'fsdp'))

  def described(*axes):
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
    like = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=place)
    return tree_spec.describe({'a': {'kernel': like}})

  tree_spec.check_same(described('fsdp'), described('fsdp', None))
  with pytest.raises(ValueError, match='got a/kernel = .*None, .fsdp.*; make'):
    tree_spec.check_same(described('fsdp'), described(None, 'fsdp'))
  weights = jax.tree.map(jnp.copy, helpers.params())
  engine = engines.Engine(helpers.MODEL, slots=2)
  engine.set_params(weights, 0)
  jax.tree.map(lambda x: x.delete(), weights)
  engine.set_params(helpers.params(), 1)
  with pytest.raises(ValueError, match='must stay alike: got .* = None'):
    engine.set_params({'embed': helpers.params()['embed']}, 1)
