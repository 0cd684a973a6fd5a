"""When a process ends with another: the monitor, with a dict as coordinator.

Runs of several processes are in `tests/end_to_end/test_processes_run.py` and
`tests/experiments/test_processes.py`.
"""

import json
import threading
import types

import jax
import pytest
from jax._src import clusters, distributed

from posttrain import peers
from posttrain.util import cluster, exits, preemption


class Ended(Exception):
  """Raised in place of the end of the process."""


class Coordinator:
  """The key-value store of the coordination service."""

  def __init__(self):
    self.values = {}

  def key_value_set(self, key, value, allow_overwrite=False):
    assert allow_overwrite or key not in self.values
    self.values[key] = value

  def key_value_dir_get(self, folder):
    return [(k, v) for k, v in self.values.items() if k.startswith(folder)]


@pytest.fixture
def monitor(monkeypatch):
  """Returns a function: index of this process of three -> its monitor."""
  store = Coordinator()
  state = types.SimpleNamespace(client=store, coordinator_address='x:1')
  monkeypatch.setattr(peers.distributed, 'global_state', state)
  monkeypatch.setattr(peers, '_on_abort', lambda fn: None)
  monkeypatch.setattr(peers.time, 'sleep', lambda seconds: None)

  def end(text, code):
    raise Ended(code, text)

  monkeypatch.setattr(peers.watchdog, 'end', end)
  return lambda index: peers._Monitor(3, index)


def _beats(number, *processes):
  return {
    i: peers._Beat(number, f'host{i}', 100 + i, 'update', 0) for i in processes
  }


def test_a_beat_tells_who_and_in_which_phase(monitor):
  made = monitor(1)
  made._beat()
  made._beat()
  (beat,) = made._read('beats/').values()
  assert beat[0] == 2 and beat[3] == 'start'
  assert list(made._read('beats/')) == [1]


def test_a_silent_process_is_lost(monitor):
  """The line names host, process id and phase; the code says start again."""
  made = monitor(0)
  made._update(_beats(1, 0, 1, 2), {}, 2.0)
  for number in range(2, 14):
    beats = {**_beats(number, 0, 1), **_beats(1, 2)}
    made._update(beats, {}, 2.0)  # 24 s in all
  with pytest.raises(Ended) as ended:
    made._update({**_beats(14, 0, 1), **_beats(1, 2)}, {}, 2.0)
  code, text = ended.value.args
  assert code == exits.PEER_LOST
  assert 'process 2 on host2 (pid 102) is lost, last in phase update' in text
  assert text.endswith('process 0 ends in phase start; start all of them again')


def test_a_coordinator_that_does_not_return_is_lost(monitor, monkeypatch):
  """As one that is stopped: its sockets accept, its calls wait."""
  made, waits = monitor(2), threading.Event()
  monkeypatch.setattr(made, '_beat', waits.wait)
  monkeypatch.setattr(peers, '_BEAT_SECONDS', 1e-3)
  monkeypatch.setattr(peers, 'LOST_SECONDS', 0.01)
  with pytest.raises(Ended, match='process 0 is lost'):
    made.run()
  waits.set()
  made._done = True


def test_one_that_never_beat_is_lost_too(monitor):
  made = monitor(1)
  made._update(_beats(1, 0, 1), {}, peers.LOST_SECONDS)
  with pytest.raises(Ended, match='process 2 is lost: it has ended'):
    made._update(_beats(2, 0, 1), {}, 1.0)


def test_without_a_coordinator_process_0_is_lost(monitor):
  """Nobody's heartbeats arrive then, this process's own included."""
  made = monitor(2)
  made._update(_beats(1, 0, 1, 2), {}, 2.0)
  made._update({}, {}, peers.LOST_SECONDS)
  with pytest.raises(Ended, match=r'process 0 on host0 \(pid 100\) is lost'):
    made._update({}, {}, 2.0)


def test_a_missed_beat_of_process_0_does_not_blame_it(monitor):
  made = monitor(2)
  made._update(_beats(1, 0, 1, 2), {}, 2.0)
  for number in range(2, 14):
    made._update({**_beats(number, 0, 2), **_beats(1, 1)}, {}, 2.0)
  with pytest.raises(Ended, match='process 1 on host1'):
    made._update({**_beats(13, 0), **_beats(14, 2), **_beats(1, 1)}, {}, 2.0)


def test_the_end_of_one_that_failed_is_the_reason(monitor):
  made = monitor(0)
  failed = {2: ['ValueError: bad', exits.FAILED]}
  made._update(_beats(1, 0, 1, 2), failed, 2.0)
  made._update(_beats(2, 0, 1), failed, 9.0)  # it may fail alike
  with pytest.raises(Ended, match='has ended: ValueError: bad') as ended:
    made._update(_beats(3, 0, 1), failed, 2.0)
  assert ended.value.args[0] == exits.FAILED


def test_a_slow_one_that_has_saved_ends_as_the_others_did(monitor):
  """It may write its last files for a minute, and is then started again."""
  made = monitor(0)
  stopped = {2: ['Preempted: SIGTERM', exits.PREEMPTED]}
  for number in range(1, 31):
    made._update(_beats(number, 0, 1), stopped, 2.0)
  with pytest.raises(Ended, match='ends in phase .*; start all') as ended:
    made._update(_beats(99, 0, 1), stopped, 2.0)
  assert ended.value.args[0] == exits.PREEMPTED


@pytest.mark.parametrize(
  ('error', 'code'),
  [
    (preemption.Preempted('SIGTERM'), exits.PREEMPTED),
    (KeyboardInterrupt(), exits.INTERRUPTED),
    (ValueError('x'), exits.FAILED),
  ],
)
def test_the_others_learn_how_it_ended(error, code, monitor):
  told = []
  made = monitor(1)
  made._finish = lambda reason, code: told.append(code)
  made.fail(error)
  assert told == [code]


def test_progress_of_others_counts_while_this_one_waits(monitor, monkeypatch):
  """It does not pass on: two that wait for a third would keep each other up."""
  counted = []
  monkeypatch.setattr(
    peers.watchdog, 'others_progress', lambda: counted.append(1)
  )
  made = monitor(0)

  def beat(number, progress):
    beats = {1: peers._Beat(number, 'h', 7, 'rollout', progress)}
    made._update(beats, {}, 2.0)

  beat(1, 5)
  beat(2, 6)
  with made.waiting():
    inside = peers.watchdog.count()
    beat(3, 6)
    assert not counted
    beat(4, 7)
    assert counted == [1] and peers.watchdog.count() == inside
  beat(5, 8)
  assert counted == [1]


def test_one_that_fails_alike_is_not_ended(monitor):
  made = monitor(0)
  made._done = True  # as `fail` sets, while the monitor waits
  failed = {2: ['ValueError: bad', exits.FAILED]}
  made._update(_beats(1, 0, 1, 2), failed, 2.0)
  made._update(_beats(2, 0, 1), failed, 20.0)
  assert made._idle[2] > peers._GRACE_SECONDS  # it has had its time


def test_one_that_is_done_is_not_lost(monitor):
  made = monitor(0)
  for number in range(60):
    made._update(_beats(number, 0, 1), {2: ['', exits.DONE]}, 2.0)
  assert made._idle[2] == 0 and 60 * 2.0 > peers.LOST_SECONDS


def test_an_aborting_process_sends_no_beats(monitor, monkeypatch):
  """For the others it is lost, unless it learns who else is."""
  made = monitor(1)
  monkeypatch.setattr(peers, '_coordinator_answers', lambda: True)
  made._aborted()
  made._beat()
  assert made._read('beats/') == {}


def test_an_abort_without_a_coordinator_blames_process_0(monitor, monkeypatch):
  made = monitor(1)
  monkeypatch.setattr(peers, '_coordinator_answers', lambda: False)
  with pytest.raises(Ended, match='process 0 is lost'):
    made._aborted()


@pytest.mark.parametrize(
  ('process', 'answers', 'text'),
  [
    (0, True, 'another process has not'),
    (2, True, 'another process has not'),
    (2, False, 'process 0 does not answer there'),
  ],
)
def test_a_start_alone_says_who_is_missing(
  process, answers, text, monitor, monkeypatch
):
  del monitor  # its patches
  peers.distributed.global_state.process_id = process
  monkeypatch.setattr(peers, '_coordinator_answers', lambda: answers)
  with pytest.raises(Ended) as ended:
    peers._end_alone()
  assert f'at x:1 within {peers.START_SECONDS} s: {text}' in str(ended.value)


def test_a_process_has_all_devices_of_its_host(monkeypatch):
  """Under SLURM jax alone would give it the one of its local number."""
  names = 'JOB_ID', 'LOCALID', 'NTASKS', 'PROCID', 'STEP_NODELIST'
  for value, name in enumerate(names):
    monkeypatch.setenv(f'SLURM_{name}', str(value))
  made = distributed.State()
  monkeypatch.setattr(peers.distributed, 'global_state', made)
  given = {}
  monkeypatch.setattr(
    peers.jax.distributed,
    'initialize',
    lambda *args, **options: given.update(options),
  )
  peers._initialize(cluster.Place('h:1', 2, 0))
  assert given['local_device_ids'] == []
  detect = clusters.ClusterEnv.auto_detect_unset_distributed_params
  ours = detect('h:1', 2, 0, given['local_device_ids'], None, None)
  theirs = detect('h:1', 2, 0, None, None, None)
  assert (ours[-1], theirs[-1]) == ([], [1])
  monkeypatch.setenv('JAX_LOCAL_DEVICE_IDS', '2,3')
  peers._initialize(cluster.Place('h:1', 2, 0))
  assert given['local_device_ids'] == [2, 3]


def test_beats_are_json(monitor):
  made = monitor(0)
  made._set('ended', None)
  made._set('ended', 'ValueError: "x"\n')
  assert made._read('ended/') == {0: 'ValueError: "x"\n'}
  assert json.loads(made._client.values['ended/0']) == 'ValueError: "x"\n'


@pytest.mark.parametrize(
  ('error', 'waits'),
  [
    (ValueError('UNKNOWN: Gloo AllGather failed: Connection reset'), True),
    (jax.errors.JaxRuntimeError('INTERNAL: x'), True),
    (ValueError('config.seed must be >= 0: got -1'), False),
    (KeyError('a'), False),
  ],
)
def test_errors_of_communication_wait_for_the_monitor(error, waits, monitor):
  """It knows within that time who is lost; other errors are told at once."""
  slept, told = [], []
  peers.time.sleep = slept.append  # the fixture restores it
  made = monitor(1)
  made._finish = lambda *args: told.append(args)
  made.fail(error)
  assert len(told) == 1
  assert [x > peers.LOST_SECONDS for x in slept] == [True] * waits
