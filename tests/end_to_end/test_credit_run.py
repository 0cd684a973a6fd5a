"""Critics, curricula, replay: several devices or processes do what one does."""

import pathlib

import pytest

from experiments.trials import kill_resume
from posttrain import main
from posttrain.metrics import writers
from tests import fixtures
from tests.end_to_end import test_processes_run as processes

pytestmark = pytest.mark.slow

ENTRY = 'main.envs.sums'
CASES = {
  'model': {'main.loss.value.gae_lambda': 0.9},
  'head_in_flight': {
    'main.critic.kind': 'head',
    'main.rollout.max_lag': 2,
    'main.rollout.in_flight': True,
  },
  'again': {
    'main.critic.kind': 'none',
    f'{ENTRY}.algorithm': '{"type": "grpo"}',
    f'{ENTRY}.curriculum': '{"type": "pass_rate", "rare": 0.2}',
    f'{ENTRY}.replay': '{"type": "groups", "share": 0.5}',
    'main.rollout.max_lag': 2,
  },
}


def _flags(workdir, **options):
  """Of the small questions some of which a tiny model soon answers."""
  options = {
    **kill_resume.setting('ppo'),
    'compilation_cache': None,
    'metrics.export_tokens': 1,
    'main.steps': 5,
    'main.optim.lr': 1e-3,
    'main.critic.warmup_steps': 1,
    **options,
  }
  return [
    '--config=configs/algorithms/ppo.py:tiny',
    f'--workdir={workdir}',
    *(f'--config.{k}={x}' for k, x in options.items()),
  ]


@pytest.fixture(scope='module')
def start(tmp_path_factory):
  workdir = tmp_path_factory.mktemp('start')
  assert main.main(_flags(workdir, stages="('start',)")) == 0
  return workdir


@pytest.mark.parametrize('name', CASES)
def test_devices_and_processes_do_what_one_does(name, start, tmp_path):
  """They draw the same tasks, sample the same tokens and learn the same."""
  options = {
    **CASES[name],
    'stages': "('main',)",
    'main.init': start / 'checkpoints/start',
  }
  one, four, two = (tmp_path / x for x in ('one', 'four', 'two'))
  assert main.main(_flags(one, **options)) == 0
  fixtures.run_on_devices(4, '-m', 'posttrain.main', *_flags(four, **options))
  if name != 'head_in_flight':  # which one process alone may do
    pair = processes._start(_flags(two, **options), 2)
    outputs = [process.communicate(timeout=600) for process in pair]
    assert [x.returncode for x in pair] == [0, 0], outputs
  expected = processes._rows(one)
  kinds = {'again': ('replay/groups/sums', 'curriculum/draws/band/sums')}
  for key in kinds.get(name, ('value/loss', 'value/mean')):
    assert any(row.get(key, 0) != 0 for row in expected), key
  for workdir in filter(pathlib.Path.exists, (four, two)):
    assert processes._ids(workdir) == processes._ids(one)
    rows = writers.read(str(workdir / 'metrics.jsonl'))
    for row, like in zip(rows, expected, strict=True):
      # The mismatch is rounding.
      like = {k: x for k, x in like.items() if not k.startswith('mismatch/')}
      assert {k: row[k] for k in like} == like
