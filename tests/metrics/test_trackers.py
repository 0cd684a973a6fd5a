"""What trackers get: every row once, over all starts of a run."""

import json
import sys

import pytest

from posttrain import schema
from posttrain.metrics import trackers, writers

STAGES = {'sft': 3, 'grpo': 2}
FAKE = f'{__name__}:Fake'
calls = []  # of `Fake`


class Fake:
  """A tracker that records its calls."""

  def start(self, name, config, workdir):
    print('hello')
    calls.append(('start', name, config, workdir))

  def log(self, step, values):
    calls.append((step, values))

  def finish(self):
    calls.append('finish')


class Broken(Fake):
  """A tracker whose log always raises."""

  def log(self, step, values):
    raise ConnectionError('no network')


class Dead(Fake):
  """A tracker that cannot start."""

  def start(self, name, config, workdir):
    raise SystemExit('no account')


@pytest.fixture(autouse=True)
def forget():
  calls.clear()


def play(workdir, rows, names=(FAKE,), position=0):
  """One start of a run that writes these rows, as a logbook does."""
  path = str(workdir / 'metrics.jsonl')
  sent = trackers.Trackers(names, STAGES)
  sent.start({'seed': 0}, str(workdir))
  writer = writers.Writer(path, position)
  for stage, step in rows:
    values = {'x': step + 0.5, 'text': 'a', 'none': None, 'ok': True}
    sent.log(writer.write(stage, step, values))
  sent.finish()
  return writer.position()


def steps():
  return [x[0] for x in calls if isinstance(x[0], int)]


ALL = [('sft', 0), ('sft', 1), ('sft', 2), ('sft', 3), ('grpo', 0), ('grpo', 1)]


def test_steps_grow_over_stages_and_only_numbers_are_logged(tmp_path, capsys):
  play(tmp_path, ALL)
  assert steps() == [0, 1, 2, 3, 4, 5]
  name = calls[0][1]
  assert calls[0] == ('start', name, {'seed': 0}, str(tmp_path))
  assert name.startswith(f'{tmp_path.name}-') and calls[-1] == 'finish'
  assert calls[2] == (1, {'x': 1.5, 'ok': True})
  out, err = capsys.readouterr()
  assert not out and err == 'hello\n'  # stdout belongs to the run


def test_a_resumed_run_goes_on_and_repeats_no_step(tmp_path):
  position = play(tmp_path, ALL[:2])
  play(tmp_path, ALL[2:4], position=position)
  play(tmp_path, ALL[2:], position=position)  # killed before a checkpoint
  assert steps() == [0, 1, 2, 3, 4, 5]
  assert len({x[1] for x in calls if x[0] == 'start'}) == 1
  rows = writers.read(str(tmp_path / 'metrics.jsonl'))
  assert [(x['stage'], x['step']) for x in rows] == ALL


def test_a_tracker_that_raises_is_warned_about_once(tmp_path, caplog):
  play(tmp_path, ALL, (f'{__name__}:Broken', f'{__name__}:Dead', FAKE))
  assert steps() == [0, 1, 2, 3, 4, 5]
  first, second = caplog.messages
  assert 'no account' in first and 'no network' in second


def test_names_are_checked(monkeypatch):
  monkeypatch.setitem(sys.modules, 'tensorboardX', None)
  for name in (f'{__name__}:Missing', 'tensorboard'):
    with pytest.raises(ValueError, match=r'config\.metrics\.trackers must'):
      trackers.check([name])
  for names in (('wandbb',), ('wandb', 'wandb')):
    with pytest.raises(ValueError, match='trackers'):
      schema.Metrics(trackers=names)


def test_tensorboard_has_every_finite_number_once(tmp_path):
  pytest.importorskip('tensorboardX')
  from tensorboardX.proto import event_pb2

  play(tmp_path, ALL, ('tensorboard',))
  found = []
  for path in sorted((tmp_path / 'tensorboard').iterdir()):
    data = path.read_bytes()
    while data:  # records: u64 length, u32 checksum, bytes, u32 checksum
      end = 12 + int.from_bytes(data[:8], 'little')
      event = event_pb2.Event.FromString(data[12:end])
      found += [(event.step, x.tag) for x in event.summary.value]
      data = data[end + 4 :]
  assert sorted(found) == [(i, x) for i in range(6) for x in ('ok', 'x')]


def name_of_two_starts(workdir, tracker):
  """Returns the run's name, of which four rows and two are sent."""
  position = play(workdir, ALL[:4], (tracker,))
  play(workdir, ALL[4:], (tracker,), position)
  return json.loads((workdir / trackers.FILE).read_text())['run']


def test_wandb_offline(tmp_path, monkeypatch):
  pytest.importorskip('wandb')
  monkeypatch.setenv('WANDB_MODE', 'offline')
  monkeypatch.setenv('WANDB_SILENT', 'true')
  name = name_of_two_starts(tmp_path, 'wandb')
  # Two folders of one second: wandb adds -1 to the second one's name.
  folders = list((tmp_path / 'wandb').glob(f'offline-run-*-{name}*'))
  assert len(folders) == 2
  assert all(list(x.glob(f'run-{name}.wandb')) for x in folders)


def test_trackio_offline(tmp_path, monkeypatch):
  trackio = pytest.importorskip('trackio')
  storage = pytest.importorskip('trackio.sqlite_storage')
  monkeypatch.setattr(storage, 'TRACKIO_DIR', tmp_path / 'trackio')
  monkeypatch.setattr(trackio, 'TRACKIO_DIR', tmp_path / 'trackio')
  name = name_of_two_starts(tmp_path, 'trackio')
  logs = storage.SQLiteStorage.get_logs(trackers.PROJECT, name)
  assert [(x['step'], x['x']) for x in logs] == [
    (i, step + 0.5) for i, (_, step) in enumerate(ALL)
  ]
