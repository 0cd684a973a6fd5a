"""Environments that wait: in threads, side by side, never in another order."""

import threading
import time

import jax
import numpy as np
import pytest

from posttrain import schema
from posttrain.decode import engine as engines
from posttrain.models import transformer
from posttrain.rollout import driver, pool
from tests import fixtures
from tests.rollout import fakes

EOS = fixtures.RENDERER.tokenizer.eos_id
WAITS = 10  # seconds after which a test that hangs fails


def test_a_call_is_due_after_so_many_chunks_and_in_order():
  begun = threading.Event()

  def slow():
    assert begun.wait(WAITS)  # the other has run
    return 'slow'

  with pool.Pool(threads=2, chunks=2) as calls:
    assert calls.due(idle=True) == []
    calls.add(1, slow)
    calls.tick()
    calls.add(2, lambda: begun.set() or 'quick')
    assert calls.due(idle=False) == [] and len(calls) == 2
    assert begun.wait(WAITS)  # it has long returned: its time has not come
    assert calls.due(idle=False) == []
    calls.tick()
    assert calls.due(idle=False) == [(1, 'slow')]
    assert calls.due(idle=False) == []
    calls.tick()
    assert calls.due(idle=False) == [(2, 'quick')] and not len(calls)


def test_where_nothing_decodes_the_next_time_comes_at_once():
  with pool.Pool(threads=1, chunks=3) as calls:
    calls.add(5, lambda: 'a')
    calls.add(4, lambda: 'b')
    calls.tick()
    calls.add(3, lambda: 'c')
    assert calls.due(idle=True) == [(5, 'a'), (4, 'b')]
    assert calls.due(idle=True) == [(3, 'c')]
    # Time does not run back.
    calls.add(2, lambda: 'd')
    calls.tick()
    assert calls.due(idle=False) == []


def test_what_has_not_begun_is_forgotten_at_the_end():
  begun, gate, ran = threading.Event(), threading.Event(), []

  def first():
    begun.set()
    assert gate.wait(WAITS)
    ran.append(1)

  with pytest.raises(KeyError), pool.Pool(threads=1, chunks=1) as calls:
    calls.add(1, first)
    calls.add(2, lambda: ran.append(2))
    (_, _, second) = calls._calls[-1]
    second.add_done_callback(lambda future: gate.set())  # once it is cancelled
    assert begun.wait(WAITS)
    raise KeyError
  assert ran == [1]


class Slow(fakes.Recall):
  """Takes now this long and now that, by nobody's seed."""

  def make(self, task):
    self.nap()
    made = super().make(task)
    step, reset, grade = made.step, made.reset, made.grade
    made.step = lambda *args: self.nap() or step(*args)
    made.reset = lambda: self.nap() or reset()
    made.grade = lambda: self.nap() or grade()
    return made

  def nap(self):
    time.sleep(np.random.default_rng().uniform(0, 0.004))


@pytest.fixture(scope='module')
def params():
  """The tiny model, made to end some of its turns before they are cut."""
  params = transformer.init(jax.random.key(0), fixtures.MODEL)
  table = params['embed']['table']
  params['embed']['table'] = table.at[EOS].multiply(4)
  return params


def run(params, env, **options):
  """Twelve episodes of one to four turns; all slots can be held at once."""
  engine = engines.Engine(fixtures.MODEL, slots=3, capacity=48, chunk=4, seed=1)
  engine.set_params(params, version=5)
  made = driver.Driver(engine, fixtures.RENDERER, 48, schema.Rollout(**options))
  rollouts = made.run(
    [
      fakes.spec(
        uid,
        env(max_turns=1 + uid % 4, blocking=env is Slow),
        turns=9,
        max_tokens=9,
      )
      for uid in range(12)
    ]
  )
  engine.set_params(params, version=6)  # no slot is taken
  return rollouts


def assert_same(found, expected, atol=0.0):
  for a, b in zip(found, expected, strict=True):
    assert (a.uid, a.messages, a.stop_reason, a.turns, a.score) == (
      b.uid,
      b.messages,
      b.stop_reason,
      b.turns,
      b.score,
    )
    (x,), (y,) = a.samples, b.samples
    np.testing.assert_array_equal(x.ids, y.ids)
    np.testing.assert_array_equal(x.mask, y.mask)
    np.testing.assert_allclose(
      x.sampler_logprobs, y.sampler_logprobs, rtol=0, atol=atol
    )


@pytest.mark.parametrize('chunks', [1, 4])
def test_how_long_it_takes_changes_nothing(params, chunks, monkeypatch):
  options = {'env_chunks': chunks}
  slow = run(params, Slow, **options)
  assert_same(run(params, Slow, env_threads=2, **options), slow)
  monkeypatch.setattr(Slow, 'nap', lambda self: None)
  assert_same(run(params, Slow, **options), slow)
  # Others stand beside each other in the slots, and are rounded otherwise.
  assert_same(run(params, fakes.Recall), slow, atol=1e-5)


@pytest.mark.parametrize('env', [fakes.Recall, Slow])
def test_overlap_changes_nothing(params, env, monkeypatch):
  monkeypatch.setattr(Slow, 'nap', lambda self: None)
  plain, found = run(params, env), run(params, env, overlap=True)
  assert_same(found, plain, atol=1e-5)
  assert_same(run(params, env, overlap=True), found)


class Together(fakes.Recall):
  """Every call waits until all episodes are in one."""

  def make(self, task):
    made, wait = super().make(task), self.fails['barrier'].wait
    step, reset, grade = made.step, made.reset, made.grade
    made.reset = lambda: (wait(WAITS), reset())[1]
    made.step = lambda *args: (wait(WAITS), step(*args))[1]
    made.grade = lambda: (wait(WAITS), grade())[1]
    return made


def test_episodes_wait_side_by_side():
  """One after the other, none of them would ever return."""
  count = 16
  env = Together(blocking=True, fails={'barrier': threading.Barrier(count)})
  engine = fakes.Engine(
    {uid: ['red', 'red'] for uid in range(count)}, pick=lambda uids: uids
  )
  rollouts = driver.Driver(engine, fakes.RENDERER, 64).run(
    [fakes.spec(uid, env) for uid in range(count)]
  )
  assert {rollout.error for rollout in rollouts} == {None}
  assert {rollout.score.reward for rollout in rollouts} == {1.0}


def test_the_engine_goes_on_while_environments_wait():
  """A call is taken up so many chunks later, though it returned at once."""
  log = []

  class Engine(fakes.Engine):
    def step(self):
      log.append('step')
      return self.poll()

    def extend(self, id, ids, max_tokens):
      log.append(id)
      super().extend(id, ids, max_tokens)

  turns = {1: 2, 2: 9}
  engine = Engine(
    {uid: ['x'] * n for uid, n in turns.items()},
    pick=lambda uids: sorted(uids)[:1],
  )
  specs = [
    fakes.spec(uid, fakes.Recall(9, blocking=uid == 1), n)
    for uid, n in turns.items()
  ]
  rollouts = driver.Driver(
    engine, fakes.RENDERER, 200, schema.Rollout(env_chunks=3)
  ).run(specs)
  assert [len(rollout.turns) for rollout in rollouts] == [2, 9]
  # Who blocks is begun after three turns of the other, and goes on after
  # three more.
  assert log[: log.index(1)].count(2) == 6
