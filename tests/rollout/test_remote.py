"""Episodes and rewards in workers: equal to those in threads, after losses."""

import pytest

from posttrain import schema
from posttrain.rollout import calls, grading, remote
from tests.rollout import fakes
from tests.rollout import remote_toys as toys
from tests.rollout.remote_toys import Cluster, play
from tests.rollout.test_worker import score

CALLS = 4 * 2 + 2 + 3 + 2 + 3  # open and end of four episodes, and their steps


@pytest.fixture(autouse=True)
def no_earlier_threads(monkeypatch):
  """Forgets the calls that other tests have left behind."""
  monkeypatch.setattr(calls, '_hung', [])


@pytest.fixture(scope='module')
def truth():
  rollouts, _ = play()
  assert [r.stop_reason for r in rollouts] == ['env_done'] * 4
  return rollouts


def test_episodes_in_workers_equal_those_in_threads(truth):
  cluster = Cluster()
  rollouts, workers = play(cluster)
  fakes.assert_same(rollouts, truth)
  assert workers.losses == 0 and len(cluster.processes) == 2
  assert len(cluster.calls) == CALLS


@pytest.mark.parametrize('lost', range(CALLS))
def test_a_worker_lost_in_any_call_changes_nothing(truth, lost):
  cluster = Cluster({lost})
  rollouts, workers = play(cluster, seconds=0.001)
  fakes.assert_same(rollouts, truth)
  assert workers.losses == 1
  assert len(cluster.calls) > CALLS


def test_an_episode_that_ends_its_workers_costs_only_itself(truth):
  cluster = Cluster(exits=True)
  rollouts, workers = play(cluster, num_workers=1)
  assert rollouts[1].stop_reason == 'error' and rollouts[1].samples == ()
  assert '4 were lost in one call, the last in step' in rollouts[1].error
  fakes.assert_same(rollouts[:1] + rollouts[2:], truth[:1] + truth[2:])
  assert workers.losses == remote.MOST_LOSSES
  alone = [x for x in cluster.processes if x.tasks == {'t1'}]
  assert len(alone) >= remote.MOST_LOSSES - remote.SHARED_LOSSES


def test_workers_that_do_not_start_fail_their_episodes():
  rollouts, _ = play(Cluster(never_starts=True), count=2)
  for rollout in rollouts:
    assert rollout.error.endswith(
      '4 were lost in one call, the last in make: no start'
    )


def test_another_reply_after_a_loss_fails_the_episode(truth):
  rollouts, _ = play(Cluster(), fault='random', at=('t0',))
  assert rollouts[0].error is None
  rollouts, workers = play(Cluster({2}), count=1, fault='random', at=('t0',))
  assert 'step must give the same reply' in rollouts[0].error
  assert workers.losses == 1


def test_a_call_over_its_limit_ends_as_in_a_thread_and_its_worker_too(truth):
  options = {'fault': 'hangs', 'at': ('t1',), 'timeout': 0.5}
  rollouts, _ = play(**options)
  others, workers = play(Cluster(), num_workers=1, **options)
  assert 'step must return within rollout.env_timeout=0.5' in rollouts[1].error
  fakes.assert_same(rollouts, others)
  assert workers.losses == 1 and calls.hung() == 1  # that of the thread


def test_an_environment_that_cannot_be_built_fails_its_episodes():
  host = remote.EpisodeHost(toys.options(unknown=1))
  host.start()
  task = fakes.spec(3).task
  error, method = host.call(0, task, 'open', ())
  assert method == 'make'
  assert str(error).startswith('recall/t3: ValueError: envs.recall.env.import_')
  assert host.call(0, task, 'close', ()) == (None, 'close')


@pytest.fixture
def cluster():
  return Cluster()


def total(name, cluster=None):
  """Returns the rewards of a function, in a worker of `cluster` or a thread."""
  entry = schema.RewardFn(fn=f'tests.rollout.hostile:{name}', isolate=False)
  workers = None
  if cluster is not None:
    workers = remote.Remote(schema.Rollout(), {}, cluster.start)
  return grading.Rewards('e', {'x': entry}, workers=workers), workers


@pytest.mark.parametrize('name', ['length', 'later'])
@pytest.mark.parametrize('lost', [(), (0,), (2,)])
def test_rewards_equal_those_in_a_thread(name, lost, cluster):
  rewards, _ = total(name)
  cluster.lost = lost
  others, workers = total(name, cluster)
  for _ in range(3):
    truth = score(rewards)
    assert score(others) == truth
    assert None not in truth[0] and truth[2] == ()
  assert workers.losses == len(lost)


def test_a_call_is_made_once_more_and_no_further(cluster):
  cluster.lost = (0, 1)
  rewards, _ = total('length', cluster)
  values, metrics, (error,) = score(rewards)
  assert values == [None, None] and metrics['rewards/x/faults'] == 1
  assert '2 workers were lost' in error and len(cluster.calls) == 2
  values, _, errors = score(rewards)
  assert None not in values and errors == ()
