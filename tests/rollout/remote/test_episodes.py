"""Episodes in workers: equal to those in threads, also after losses."""

import dataclasses

import numpy as np
import pytest

from posttrain.rollout import abandoned
from posttrain.rollout.remote import episodes
from tests.rollout.remote import toys
from tests.rollout.remote.toys import Cluster, play

CALLS = 4 * 2 + 2 + 3 + 2 + 3  # open and end of four episodes, and their steps


@pytest.fixture(autouse=True)
def no_earlier_threads(monkeypatch):
  """Forgets the calls that other tests have left behind."""
  monkeypatch.setattr(abandoned, '_threads', [])


@pytest.fixture(scope='module')
def truth():
  rollouts, _ = play()
  assert [r.stop_reason for r in rollouts] == ['env_done'] * 4
  return rollouts


def plain(rollout):
  """Returns a rollout with lists instead of arrays."""
  samples = [
    {
      field.name: np.asarray(value).tolist()
      for field in dataclasses.fields(sample)
      if field.name != 'task'
      and (value := getattr(sample, field.name)) is not None
      and field.name != 'versions'  # the fake engine counts completions
    }
    for sample in rollout.samples
  ]
  return dataclasses.replace(rollout, samples=(), turns=()), samples


def assert_same(rollouts, others):
  for a, b in zip(rollouts, others, strict=True):
    assert plain(a) == plain(b)


def test_episodes_in_workers_equal_those_in_threads(truth):
  cluster = Cluster()
  rollouts, workers = play(cluster)
  assert_same(rollouts, truth)
  assert workers.losses == 0 and len(cluster.processes) == 2
  assert len(cluster.calls) == CALLS


@pytest.mark.parametrize('lost', range(CALLS))
def test_a_worker_lost_in_any_call_changes_nothing(truth, lost):
  cluster = Cluster({lost})
  rollouts, workers = play(cluster, seconds=0.001)
  assert_same(rollouts, truth)
  assert workers.losses == 1
  assert len(cluster.calls) > CALLS


def test_many_losses_change_nothing(truth):
  cluster = Cluster({1, 5, 9, 16})
  rollouts, workers = play(cluster, num_workers=4)
  assert_same(rollouts, truth)
  assert workers.losses == 4


def test_an_episode_is_played_again_from_its_first_call():
  cluster = Cluster({2})
  play(cluster, count=1)
  methods = [args[2] for args in cluster.calls]
  assert methods == ['open', 'step', 'step', 'open', 'step', 'step', 'end']
  texts = [args[3] for args in cluster.calls if args[2] == 'step']
  assert texts[:2] == texts[2:] == [('0a', False, None), ('0b', False, None)]


def test_an_episode_that_ends_its_workers_costs_only_itself(truth):
  cluster = Cluster(exits=True)
  rollouts, workers = play(cluster, num_workers=1)
  assert rollouts[1].stop_reason == 'error' and rollouts[1].samples == ()
  assert rollouts[1].error == (
    'recall/t1: the worker of an episode must outlive it: 4 were lost in '
    'one call, the last in step: it was killed'
  )
  assert_same(rollouts[:1] + rollouts[2:], truth[:1] + truth[2:])
  assert workers.losses == episodes.MOST_LOSSES
  alone = [x for x in cluster.processes if x.tasks == {'t1'}]
  assert len(alone) >= episodes.MOST_LOSSES - episodes.SHARED_LOSSES


def test_workers_that_do_not_start_fail_their_episodes():
  rollouts, _ = play(Cluster(never_starts=True), count=2)
  for rollout in rollouts:
    assert rollout.error.endswith(
      '4 were lost in one call, the last in make: no start'
    )


def test_another_reply_after_a_loss_fails_the_episode(truth):
  rollouts, _ = play(Cluster(), fault='random', at=('t0',))
  assert rollouts[0].error is None
  calls = Cluster()
  play(calls, count=1, fault='random', at=('t0',))
  rollouts, workers = play(Cluster({2}), count=1, fault='random', at=('t0',))
  assert rollouts[0].error == (
    'recall/t0: step must give the same reply to the same turns: it gave '
    'another one after the loss of a worker'
  )
  assert workers.losses == 1


def test_an_exception_is_reported_as_in_a_thread_and_not_retried(truth):
  options = {'fault': 'raises', 'at': ('t1',)}
  rollouts, _ = play(**options)
  cluster = Cluster()
  others, workers = play(cluster, **options)
  assert 'KeyError' in rollouts[1].error and 'toys.py' in rollouts[1].error
  assert rollouts[1].error == others[1].error
  assert_same(rollouts, others)
  assert workers.losses == 0
  steps = [x for x in cluster.calls if x[1].id == 't1' and x[2] == 'step']
  assert len(steps) == 2


def test_a_call_over_its_limit_ends_as_in_a_thread_and_its_worker_too(truth):
  options = {'fault': 'hangs', 'at': ('t1',), 'timeout': 0.5}
  rollouts, _ = play(**options)
  others, workers = play(Cluster(), num_workers=1, **options)
  assert (
    rollouts[1].error
    == others[1].error
    == (
      'recall/t1: step must return within rollout.env_timeout=0.5 s: it did '
      'not, and was given up'
    )
  )
  assert_same(rollouts, others)
  assert workers.losses == 1 and abandoned.count() == 1  # that of the thread


def test_an_environment_that_cannot_be_built_fails_its_episodes():
  host_options = toys.options(unknown=1)
  from posttrain.rollout.remote import hosts

  host = hosts.Episodes(host_options)
  host.start()
  task = toys.fakes.spec(3).task
  error, method = host.call(0, task, 'open', ())
  assert method == 'make'
  assert str(error).startswith('recall/t3: ValueError: envs.recall.env.import_')
  assert host.call(0, task, 'abandon', ()) == (None, 'close')
