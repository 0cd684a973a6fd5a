"""Workers as Ray actors: real processes, killed in the middle of calls."""

import os
import signal
import threading

import pytest

from posttrain import schema
from posttrain.rollout import remote
from tests.rollout import fakes
from tests.rollout import remote_toys as toys

pytestmark = [
  pytest.mark.slow,
  pytest.mark.filterwarnings('ignore'),  # of Ray
]
ray = pytest.importorskip('ray')


@pytest.fixture(scope='module')
def connected():
  """Connects to Ray on this machine, as a run does; ends it afterwards."""
  before = signal.getsignal(signal.SIGTERM)
  remote.connect(cpus=2)
  assert signal.getsignal(signal.SIGTERM) is before
  yield
  remote._actor_class.cache_clear()
  ray.shutdown()


def test_episodes_of_ray_workers_equal_those_in_threads(connected):
  truth, _ = toys.play()
  rollouts, stage = toys.play(remote)
  fakes.assert_same(rollouts, truth)
  assert stage.losses == 0


@pytest.fixture
def calls(connected):
  """The calls of an episode of two turns, in a worker."""
  cfg = schema.Rollout(env_timeout=20.0, num_workers=1)
  stage = remote.Remote(cfg, toys.options(seconds=1.0), remote.Handle)
  return stage.episode(fakes.spec(1).task), stage


def test_a_worker_killed_in_the_middle_of_a_step_changes_nothing(calls):
  episode, stage = calls
  assert episode.caught('open')[0]['content'] == 'name'
  handle = episode._worker.handle
  pid = handle.call(20.0, 'start')  # again: it returns the process's id
  assert pid != os.getpid()
  timer = threading.Timer(0.5, os.kill, (pid, signal.SIGKILL))
  timer.start()
  messages, reward, done = episode.caught('step', 'red', False)
  timer.join()
  assert (messages[0]['content'], reward, done) == ('1?', 0.5, False)
  assert stage.losses == 1 and episode._worker.handle is not handle
  assert episode.caught('step', 'red', False)[2]
  assert episode.caught('end', True).reward == 1.0


def test_a_worker_that_hangs_is_killed_and_replaced(connected):
  options = {'at': ('t1',), 'num_workers': 1, 'timeout': 5.0}
  truth, _ = toys.play()
  hung, stage = toys.play(remote, fault='hangs', **options)
  assert 'step must return within rollout.env_timeout=5 s' in hung[1].error
  assert stage.losses == 1
  fakes.assert_same(hung[:1] + hung[2:], truth[:1] + truth[2:])


def test_a_host_that_cannot_start_is_lost(connected):
  stage = remote.Remote(schema.Rollout(), {}, remote.Handle)
  worker = stage.reward('no_such_module:fn')
  with pytest.raises(remote.Lost, match='no_such_module'):
    worker._start().start()
