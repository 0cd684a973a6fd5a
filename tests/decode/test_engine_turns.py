"""Engine turns: groups, holding, extending, overflow, buckets, errors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.decode import engines, loop, requests, schedule
from tests.decode import helpers

pytestmark = pytest.mark.gate


def test_each_prompt_of_a_group_is_prefilled_once(monkeypatch):
  counts = []
  prefill = loop.prefill

  def spy(view, model, state, chunk, *args):
    counts.append(int(np.sum(chunk[2])))
    return prefill(view, model, state, chunk, *args)

  monkeypatch.setattr(loop, 'prefill', spy)
  rng = np.random.default_rng(0)
  prompts = [rng.integers(0, 256, n) for n in (5, 9, 13, 6)]
  batch = [
    requests.Request(4 * i + j, prompt, 8)
    for i, prompt in enumerate(prompts)
    for j in range(4)
  ]
  helpers.make(slots=8).generate(batch)
  assert sum(counts) == sum(len(prompt) for prompt in prompts)


def test_decode_loop_ends_when_all_rows_have_stopped(monkeypatch):
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


def test_turns_are_fed_until_as_many_slots_decode():
  """Seven wait beside one that decodes, of which four are fed at a time."""
  engine = helpers.make()
  for i in range(8):
    most = 2 if i else 40
    engine.submit(requests.Request(i, np.array([i]), most, hold=True))
  for done in helpers.poll(engine, 7):
    engine.extend(done.id, np.arange(9), 4)
  engine.launch()
  assert engine._schedule.num_active == 5


def test_extension_equals_a_prompt_of_all_tokens():
  batch = helpers.make_requests(3, seed=6, max_tokens=6, hold=True)
  engine = helpers.make()
  for request in batch:
    engine.submit(request)
  first = {c.id: c for c in helpers.poll(engine, 3)}
  new = [np.array([65, 66, 67]), np.zeros(0, np.int32), np.arange(70, 81)]
  for request, ids in zip(batch, new, strict=True):
    engine.extend(request.id, ids, 7)
  second = {c.id: c for c in helpers.poll(engine, 3)}
  for request, ids in zip(batch, new, strict=True):
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


def test_queued_requests_run_next_to_held_ones():
  engine = helpers.make(**helpers.SMALL)
  engine.submit(requests.Request(1, np.arange(3), 4, hold=True))
  for i in range(2, 6):
    engine.submit(requests.Request(i, np.arange(i), 4))
  assert sorted(c.id for c in helpers.poll(engine, 5)) == [1, 2, 3, 4, 5]
  engine.release(1)


def test_group_does_not_wait_for_held_slots():
  engine = helpers.make(**helpers.SMALL)
  engine.submit(requests.Request(1, np.arange(3), 4, hold=True))
  engine.poll()
  for i in range(2, 5):  # as many as there are slots, and more
    engine.submit(requests.Request(i, np.arange(5), 4))
  assert sorted(c.id for c in helpers.poll(engine, 3)) == [2, 3, 4]
  engine.release(1)


def queue(plan, id, prompt, hold=False):
  """Queues a request in a schedule without an engine."""
  entry = plan.new(requests.Request(id, np.arange(prompt), 4, hold=hold))
  assert plan.begin(entry, entry.request.ids, 0, 4, helpers.WIDTH)


def assign(plan):
  """Gives slots to the queue and prefills it; returns the requests by group."""
  plan.assign_slots()
  groups = plan.next_rows(8)[0]
  assert all(plan.feed(group, group.left) for group in groups)
  return [group.entries for group in groups]


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
def test_group_is_split_by_the_slots_that_are_not_held(held, group, runs):
  plan = schedule.Schedule(4)
  for id in range(held):
    queue(plan, id, 1 + id, hold=True)
  for (entry,) in assign(plan):
    plan.finish(entry)
  for id in range(10, 10 + group):
    queue(plan, id, 9)
  sizes = []
  while groups := assign(plan):
    for entries in groups:
      sizes.append(len(entries))
      for entry in entries:
        plan.finish(entry)
  assert sizes == runs and plan.num_waiting == group - sum(runs)


def test_group_waits_for_running_requests():
  plan = schedule.Schedule(4)
  queue(plan, 0, 1)
  ((first,),) = assign(plan)
  for id in range(1, 5):
    queue(plan, id, 9)
  assert assign(plan) == []  # prefilled twice otherwise
  plan.finish(first)
  assert [len(run) for run in assign(plan)] == [4]


def test_extensions_do_not_keep_new_prompts_waiting():
  """One row per call, and two conversations that go on in every round."""
  plan, fed = schedule.Schedule(3), []
  for id in range(2):
    queue(plan, id, 1 + id, hold=True)
  held = [entry for (entry,) in assign(plan)]
  queue(plan, 2, 3)
  for _ in range(3):
    for entry in [x for x in held if x.active]:
      plan.finish(entry)
      assert plan.begin(entry, entry.request.ids, 2, 4, helpers.WIDTH)
    plan.assign_slots()
    (group,) = plan.next_rows(1)[0]
    fed.append(group.head.request.id)
    assert plan.feed(group, group.left)
  assert 2 in fed


def test_poll_raises_if_all_slots_are_held():
  engine = helpers.make(**helpers.SMALL)
  for i in (1, 2):
    engine.submit(requests.Request(i, np.arange(3), 4, hold=True))
  engine.submit(requests.Request(3, np.arange(3), 4))
  helpers.poll(engine, 2)
  with pytest.raises(ValueError, match='all 2 are held; extend or release'):
    engine.poll()


def test_extensions_beyond_capacity_overflow():
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
  batch, expected = helpers.baseline()
  engine = helpers.make(capacity=None)
  assert helpers.same(engine.generate(batch), expected)
  longest = max(len(request.ids) + 16 for request in batch)
  assert engine.capacity == schedule.bucket(longest) == helpers.WIDTH
  engine.submit(requests.Request(99, np.arange(9), 10, hold=True))
  (held,) = helpers.poll(engine, 1)
  # It grows while a request is held, for that one and for others.
  long = requests.Request(98, np.arange(40), 30)
  engine.submit(long)
  engine.submit(batch[4])
  assert engine.capacity == 96
  completions = sorted(helpers.poll(engine, 2), key=lambda c: c.id)
  (wide,) = helpers.make(**helpers.WIDE).generate([long])
  assert helpers.same(completions, [wide, expected[4]])
  engine.extend(99, np.arange(30), 20)
  (more,) = helpers.poll(engine, 1)
  assert engine.capacity == 96 and len(more.ids) == 20
  whole = np.concatenate([np.arange(9), held.ids, np.arange(30)])
  again = requests.Request(99, whole, 20)
  (fresh,) = helpers.make(**helpers.WIDE).generate([again])
  assert helpers.same([more], [fresh])
  with pytest.raises(ValueError, match='request 99 must have max_tokens >= 1'):
    engine.extend(99, np.arange(200), 0)
  engine.extend(99, np.zeros(0), 50)  # an extension may grow it too
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
def test_bucket_sizes(tokens, size):
  assert schedule.bucket(tokens) == size


def test_invalid_requests_are_refused_by_id():
  engine = helpers.make()
  request = requests.Request(7, np.arange(3), 4, hold=True)
  for wrong, message in (
    ({'ids': np.zeros(0)}, 'request 7 must have a prompt'),
    ({'max_tokens': 0}, 'request 7 must have max_tokens >= 1'),
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
  with pytest.raises(AssertionError, match='release all requests'):
    engine.set_params(helpers.params(), 1)
  engine.poll()
  engine.release(7)
  with pytest.raises(ValueError, match='top_p must be in'):
    requests.Sampling(top_p=0.0)


def test_generate_queues_nothing_if_a_request_is_refused():
  batch, expected = helpers.baseline()
  engine = helpers.make()
  for wrong, message in (
    ({'max_tokens': 0}, 'must have max_tokens >= 1: got 0'),
    ({'ids': np.zeros(0)}, 'must have a prompt'),
    ({'hold': True}, 'submitted and polled'),
    ({'id': batch[0].id}, 'occurs twice'),
  ):
    bad = dataclasses.replace(batch[1], **wrong)
    with pytest.raises((AssertionError, ValueError), match=message):
      engine.generate([batch[0], bad, batch[2]])
    assert engine.poll() == []
  # Running requests and unread completions are kept.
  engine.submit(batch[0])
  engine.submit(requests.Request(5, np.arange(helpers.WIDTH + 1), 4))
  with pytest.raises(AssertionError, match='poll them first'):
    engine.generate(batch[1:3])
  (cut,), (first,) = engine.poll(), engine.poll()
  assert cut.stop_reason == 'overflow'
  assert helpers.same([first], expected[:1])
  assert helpers.same(engine.generate(batch[1:3]), expected[1:3])


def test_decoding_without_weights_raises():
  engine = engines.Engine(helpers.MODEL, engines.Options(slots=2))
  for call in (
    engine.poll,
    lambda: engine.generate([]),
    lambda: engine.score([]),
  ):
    with pytest.raises(ValueError, match='must be set before .*set_params fir'):
      call()


def test_weights_of_another_shape_are_refused():
  """The old arrays may be deleted."""
  weights = jax.tree.map(jnp.copy, helpers.params())
  engine = engines.Engine(helpers.MODEL, engines.Options(slots=2))
  engine.set_params(weights, 0)
  jax.tree.map(lambda x: x.delete(), weights)
  engine.set_params(helpers.params(), 1)
  with pytest.raises(AssertionError, match='another engine'):
    engine.set_params({'embed': helpers.params()['embed']}, 1)
