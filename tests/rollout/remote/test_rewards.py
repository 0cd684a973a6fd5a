"""Reward functions in workers: equal rewards, one more try, equal faults."""

import pytest

from posttrain import schema
from posttrain.rollout import abandoned
from posttrain.rollout.grading import rewards as rewarding
from posttrain.rollout.remote import remote
from tests.algorithms import two_turns
from tests.rollout.remote import toys

PATH, JUDGED = 'tests.rollout.grading.hostile', 'tests.rollout.grading.judged'


@pytest.fixture(autouse=True)
def no_earlier_threads(monkeypatch):
  """Forgets the calls that other tests have left behind."""
  monkeypatch.setattr(abandoned, '_threads', [])


@pytest.fixture
def cluster():
  """Returns a function that makes clusters; their event loops end with it."""
  clusters = []

  def make(lost=()):
    clusters.append(toys.Cluster(lost))
    return clusters[-1]

  yield make
  for process in [x for y in clusters for x in y.processes]:
    process._host._runner.close()


def total(name, cluster=None, path=PATH, **options):
  """Returns the rewards of a function, in a worker of `cluster` or a thread."""
  entry = schema.RewardFn(fn=f'{path}:{name}', **options)
  workers = None
  if cluster is not None:
    workers = remote.Remote(schema.Rollout(), {}, cluster.start)
  return rewarding.Rewards('e', {'x': entry}, remote=workers), workers


def score(rewards):
  scored, metrics, errors = rewards(two_turns.group(1.0, 0.0))
  metrics.pop('rewards/x/seconds')
  return [r.score.reward for r in scored], metrics, errors


@pytest.mark.parametrize('name', ['length', 'later'])
@pytest.mark.parametrize('lost', [(), (0,), (2,)])
def test_rewards_equal_those_in_a_thread(name, lost, cluster):
  rewards, _ = total(name)
  others, workers = total(name, cluster(lost))
  for _ in range(3):
    truth = score(rewards)
    assert score(others) == truth
    assert None not in truth[0] and truth[2] == ()
  assert workers.losses == len(lost)


def test_a_call_is_made_once_more_and_no_further(cluster):
  cluster = cluster((0, 1))
  rewards, workers = total('length', cluster)
  values, metrics, errors = score(rewards)
  assert values == [None, None] and metrics['rewards/x/faults'] == 1
  assert (
    'must return rewards: 2 workers were lost, the last: it was' in errors[0]
  )
  assert len(cluster.calls) == 2 and workers.losses == 2
  values, _, errors = score(rewards)
  assert None not in values and errors == ()


def test_an_exception_is_a_fault_as_in_a_thread_and_not_retried(cluster):
  cluster = cluster()
  rewards, _ = total('raises')
  others, workers = total('raises', cluster)
  truth = score(rewards)
  assert truth[0] == [None, None] and 'raised' in truth[2][0]
  assert score(others) == truth
  assert len(cluster.calls) == 1 and workers.losses == 0


def test_a_call_over_its_timeout_is_a_fault_as_in_a_thread(cluster):
  options = {'timeout': 0.1, 'kwargs': {'seconds': 1.0}}
  rewards, _ = total('sleeps', path=JUDGED, **options)
  others, workers = total('sleeps', cluster(), path=JUDGED, **options)
  truth = score(rewards)
  assert 'must return within its timeout of 0.1 s' in truth[2][0]
  assert score(others) == truth
  assert workers.losses == 1


def test_isolated_functions_and_those_with_a_judge_stay_where_they_are():
  workers = remote.Remote(schema.Rollout(), {}, toys.Cluster().start)
  cfg = {
    'a': schema.RewardFn(fn=f'{PATH}:length', isolate=True),
    'b': schema.RewardFn(fn=f'{PATH}:length', judge='init'),
    'c': schema.RewardFn(fn=f'{PATH}:length'),
  }
  rewards = rewarding.Rewards('e', cfg, judge=lambda _: None, remote=workers)
  kinds = {k: type(x._worker) for k, x in rewards._functions.items()}
  assert kinds['b'] is type(None)
  assert [kinds[k].__module__.split('.')[-1] for k in 'ac'] == [
    'isolated',
    'rewards',
  ]
