"""A whole run: its files, its last line, stop and resume, aborts."""

import gc
import gzip
import json
import os
import signal

import jax
import numpy as np
import pytest

from experiments.trials import kill_resume
from posttrain import config, main, train
from posttrain.checkpoints import store
from posttrain.metrics import writers
from posttrain.stage import build, job, preflight
from posttrain.training import step as train_step
from posttrain.util import preemption

pytestmark = pytest.mark.gate

TINY = ['--config=configs/arithmetic_sft.py:tiny']


def _args(workdir, *more):
  cold = '--config.compilation_cache=None'
  return [*TINY, f'--workdir={workdir}', cold, *more]


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  """The workdir of an undisturbed run."""
  workdir = tmp_path_factory.mktemp('finished')
  assert main.main(_args(workdir)) == 0
  return workdir


def _rows(workdir):
  rows = writers.read(str(workdir / 'metrics.jsonl'))
  return [
    {k: v for k, v in row.items() if not k.startswith(('time/', 'memory/'))}
    for row in rows
  ]


def test_the_files_that_tools_rely_on(finished, capsys):
  rows = _rows(finished)
  assert [row['step'] for row in rows] == list(range(21))
  assert {row['stage'] for row in rows} == {'sft'}
  for name in ('loss/total', 'optim/lr', 'batch/tokens'):
    assert all(name in row for row in rows[1:]), name
  assert [row['compiles'] for row in rows[1:]] == [1] * 20
  for step in (0, 10, 20):
    assert 'eval/pass_rate/arithmetic' in rows[step]
    path = finished / 'rollouts' / f'sft_eval_{step:06d}.jsonl'
    assert len(path.read_text().splitlines()) == 20
  timed = writers.read(str(finished / 'metrics.jsonl'))[5]
  assert 0 < timed['time/update'] and timed['time/compile'] == 0
  assert json.loads((finished / 'config.json').read_text())['stages'] == ['sft']
  steps = {path.name for path in (finished / 'checkpoints' / 'sft').iterdir()}
  assert steps == {'10', '20'}
  assert '<b class="finished">' in (finished / 'report.html').read_text()


def test_rerunning_a_finished_run_changes_no_row_and_prints_the_last(
  finished, capsys
):
  before = (finished / 'metrics.jsonl').read_bytes()
  assert main.main(_args(finished)) == 0
  assert (finished / 'metrics.jsonl').read_bytes() == before
  last = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert last['stage'] == 'sft' and last['step'] == 20
  key = 'eval/pass_rate/arithmetic'
  assert last[key] == _rows(finished)[-1][key]


class TermAfter(train_step.TrainStep):
  """Sends this process a SIGTERM within the given call."""

  calls = 3

  def __call__(self, state, batch):
    TermAfter.calls -= 1
    if TermAfter.calls == 0:
      os.kill(os.getpid(), signal.SIGTERM)
    return super().__call__(state, batch)


def test_sigterm_saves_and_the_resumed_run_is_bitwise_the_same(
  finished, tmp_path, monkeypatch, capsys
):
  with monkeypatch.context() as patch:
    patch.setattr(train_step, 'TrainStep', TermAfter)
    assert main.main(_args(tmp_path)) == 75
  assert 'run the same command to continue' in capsys.readouterr().err
  assert store.find(str(tmp_path)).name == '3'
  assert main.main(_args(tmp_path)) == 0
  truth = kill_resume.outcome(finished)
  assert len(truth['arrays']) > 20 and len(truth['rows']) == 21
  assert not kill_resume.differences(truth, kill_resume.outcome(tmp_path))


def test_sigterm_in_the_first_evaluation_says_that_nothing_is_saved(
  tmp_path, monkeypatch, capsys
):
  def start(stage, state):
    os.kill(os.getpid(), signal.SIGTERM)

  monkeypatch.setattr(job.Job, 'start', start)
  assert main.main(_args(tmp_path)) == 75
  line = capsys.readouterr().err.splitlines()[-1]
  assert line.startswith('stopped at stage sft, step 0, with no step saved')
  assert not list((tmp_path / 'checkpoints').glob('sft/[0-9]*'))


def test_a_dry_run_plans_for_devices_that_are_not_here(tmp_path, capsys):
  workdir = tmp_path / 'none'
  mesh = '--config.mesh={"data": 2, "fsdp": 2, "tensor": -1}'
  argv = _args(workdir, '--dry_run', '--devices=gpu:8', mesh)
  assert main.main(argv) == 0
  text = capsys.readouterr().out
  assert 'data 2, sequence 1, fsdp 2, expert 1, tensor 2' in text
  assert 'memory per device' in text
  assert '(-, fsdp, tensor)' in text and 'reduce-scatter' in text
  assert not workdir.exists()


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ('--config.sft.init=/no/such', "got '/no/such'"),
    ('--config.tokenizer.path=/no.json', 'tokenizer.path must'),
    ('--config.model.vocab_size=100', 'must be that of the model'),
    ('--config.model.attention=pallas', 'config.model.attention must'),
    ('--profile=5:3', '--profile must be FROM:TO'),
    ('--config.sft.batch.row_tokens=32', 'must fit into batch.row_tokens'),
    # About samplers.
    ('--samplers=', '--samplers must be different addresses'),
    ('--samplers=http://a,http://a', "got 'http://a,http://a'"),
    ('--vllm_folder=/', '--vllm_folder must be given with --samplers'),
    ('--samplers=http://a --vllm_folder=/no', "must be a folder: got '/no'"),
    ('--samplers=http://a --samplers_key_env=NO_SUCH', "got 'NO_SUCH'"),
    (
      '--samplers=http://a --config.sft.rollout.in_flight=True '
      '--config.sft.rollout.keep_cache=True',
      'config.sft.rollout.keep_cache must be False',
    ),
    # About devices that are not here.
    ('--devices=8', '--devices must be given with --dry_run'),
    ('--dry_run --devices=xpu:8', "got 'xpu:8'"),
    ('--dry_run --devices=8 --config.mesh.fsdp=3', 'config.mesh must'),
    ('--dry_run --devices=12', 'micro_batch_tokens must be a multiple of'),
  ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
  tmp_path, capsys, arguments, message
):
  """Nothing is compiled or written before."""
  argv = _args(tmp_path / 'run', *arguments.split())
  assert main.main(argv) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith('error: ') and message in line
  assert not (tmp_path / 'run').exists()


def test_bad_gradients_in_a_row_abort_with_the_batch(tmp_path, capsys):
  """A step of absurd size makes the weights overflow, truly."""
  argv = _args(
    tmp_path,
    '--config.sft.optim.max_skipped=2',
    '--config.sft.optim.lr=1e30',
    '--config.sft.optim.warmup_steps=0',
  )
  assert main.main(argv) == 1
  error = capsys.readouterr().err.splitlines()[-1]
  assert '2 in a row were not' in error and 'config.sft.optim.lr' in error
  rows = writers.read(str(tmp_path / 'metrics.jsonl'))
  assert [row.get('optim/skipped_in_row') for row in rows] == [None, 0, 1, 2]
  assert rows[-1]['optim/grad_norm'] is None
  assert 'optim/grad_norm' in rows[-1]['nonfinite']
  saved = np.load(tmp_path / 'bad_batch_sft_3.npz')
  assert saved['ids'].shape == (2, 4, 64) and saved['ce_count'] > 0


def test_out_of_memory_names_phase_and_keys(tmp_path, monkeypatch, capsys):
  """The error is what jax raises where the device has no room."""

  def fail(*_):
    raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: 9 GiB wanted')

  monkeypatch.setattr(train_step.TrainStep, '__call__', fail)
  assert main.main(_args(tmp_path)) == 1
  error = capsys.readouterr().err
  for part in ('sft, phase update', 'config.model.remat', '9 GiB'):
    assert part in error


def test_nothing_of_a_stage_that_is_over_stays_on_the_devices(tmp_path):
  options = [('sft.steps', '2'), ('sft.optim.warmup_steps', '1')]
  run = main.load('configs/arithmetic_sft.py:tiny', options)
  main.claim(str(tmp_path), config.to_dict(run), {})
  stage = preflight.make(preflight.resolve(run), 'sft')
  gc.collect()
  gc.freeze()  # the second collection looks at new objects alone
  before = {id(x) for x in jax.live_arrays()}
  stop = preemption.Signal()
  job = build.make(stage, str(tmp_path), 0, stop)
  train.train(job, stop)
  job.close()
  del job
  gc.collect()
  gc.unfreeze()
  left = [x.shape for x in jax.live_arrays() if id(x) not in before]
  assert not left and not stop.requested


def test_a_stage_starts_from_another_and_is_traced(finished, tmp_path, caplog):
  """`init: PATH` takes the params of a run; `stage:NAME` those of a stage."""
  short = ('--config.sft.steps=3', '--config.sft.optim.warmup_steps=0')
  init = f'--config.sft.init={finished}'
  assert main.main(_args(tmp_path, init, *short, '--profile=2:4')) == 0
  first = tmp_path / 'rollouts' / 'sft_eval_000000.jsonl'
  last = finished / 'rollouts' / 'sft_eval_000020.jsonl'
  assert first.read_text() == last.read_text()
  assert 'so steps 2 to 3 are traced' in caplog.text
  (path,) = (tmp_path / 'profiles' / 'sft').rglob('*.trace.json.gz')
  events = json.loads(gzip.decompress(path.read_bytes()))['traceEvents']
  steps = [
    event['args']['step_num'] for event in events if event.get('name') == 'sft'
  ]
  assert steps == ['2', '3']
  assert any(event.get('name') == 'PjitFunction(update)' for event in events)


def test_the_loop_fits_on_one_screen():
  import inspect

  assert len(inspect.getsource(train.train).splitlines()) <= 60
