"""A run of two processes on this machine, against the run of one."""

import json
import re
import socket
import subprocess
import sys

import pytest

from posttrain import export, main
from posttrain.chat import rendering
from posttrain.metrics import writers
from posttrain.models import hf
from posttrain.util import errors
from tests import fixtures

SMALL = {
  'metrics.progress': False,
  'metrics.export_tokens': 1,
  'compilation_cache': None,
  'stages': '("grpo",)',
  'grpo.init': 'random',
  'grpo.steps': 2,
  'grpo.optim.warmup_steps': 0,
  'grpo.rollout.slots': 8,
  'grpo.rollout.chunk': 4,
  'grpo.eval.prompts': 2,
  'grpo.eval.max_tokens': 8,
  'grpo.batch.micro_batch_tokens': 128,
  'grpo.envs.arithmetic.env.train_tasks': 20,
  'grpo.envs.arithmetic.sampler.max_tokens': 8,
}


def flags(workdir, **overrides):
  """Of a run of one small stage."""
  return [
    '--config=configs/arithmetic.py:tiny',
    f'--workdir={workdir}',
    *(f'--config.{k}={v}' for k, v in {**SMALL, **overrides}.items()),
  ]


def _start(words, count, command='posttrain.main'):
  """Starts a run's processes on free ports of this machine."""
  with socket.socket() as sock:
    sock.bind(('127.0.0.1', 0))
    port = sock.getsockname()[1]
  place = [f'--coordinator=127.0.0.1:{port}', f'--num_processes={count}']
  return [
    subprocess.Popen(
      [sys.executable, '-m', command, *words, *place]
      + [f'--process_id={index}'],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for index in range(count)
  ]


def _ids(workdir):
  return {
    path.name: [
      json.loads(line)['ids'] for line in path.read_text().splitlines()
    ]
    for path in sorted((workdir / 'token_exports').iterdir())
  }


def _rows(workdir):
  rows = writers.read(str(workdir / 'metrics.jsonl'))
  return [
    {
      k: v if isinstance(v, str) else pytest.approx(v, rel=1e-4, abs=1e-6)
      for k, v in row.items()
      # Calls that hang are counted in the whole process, other tests' too. Two
      # devices have a row each, between which a group's tree may be cut.
      if not k.startswith(('time/', 'memory/', 'batch/'))
      and k not in ('optim/grad_norm', 'rollout/hung')
    }
    for row in rows
  ]


@pytest.mark.gate
@pytest.mark.slow
def test_two_processes_do_what_one_does(tmp_path, capsys):
  """The same tokens and rows; files and the last line are written once.

  A KL penalty on other weights than the run's own trains the policy.
  """
  one, two, other = (tmp_path / name for name in ('one', 'two', 'other'))
  params = fixtures.params(seed=1)
  hf.save(params, fixtures.MODEL, other, dtype='float32')
  rendering.write(fixtures.RENDERER, other)
  algorithm = 'grpo.envs.arithmetic.algorithm'
  leash = {f'{algorithm}.kl_beta': 0.5, f'{algorithm}.reference': other}
  processes = _start(flags(two, **leash), 2)
  assert main.main(flags(one, **leash)) == 0
  outputs = [process.communicate(timeout=300) for process in processes]
  assert [x.returncode for x in processes] == [0, 0], outputs
  assert _ids(two) == _ids(one)
  rows, expected = (writers.read(str(x / 'metrics.jsonl')) for x in (two, one))
  assert [r.keys() for r in rows] == [r.keys() for r in expected]
  for row, like in zip(rows, _rows(one), strict=True):
    assert {k: row[k] for k in like} == like
  assert rows[-1]['ref_kl/kl'] > 0 and rows[-1]['optim/grad_norm'] > 0
  printed = json.loads(outputs[0][0])
  assert printed.keys() == json.loads(capsys.readouterr().out).keys()
  assert outputs[1] == ('', '')
  like, written = (
    {
      str(path.relative_to(workdir))
      for path in workdir.rglob('*')
      if path.is_file() and 'checkpoints' not in path.parts
    }
    for workdir in (one, two)
  )
  assert written - like == {'hosts/1.log'} and like <= written


@pytest.mark.slow
def test_a_mistake_ends_all_with_the_same_line(tmp_path):
  """An error of the config is a line in each log, and exit code 2."""
  processes = _start(flags(tmp_path, **{'grpo.rollout.slots': 7}), 2)
  outputs = [process.communicate(timeout=120) for process in processes]
  assert [x.returncode for x in processes] == [errors.USAGE] * 2, outputs
  log = (tmp_path / 'hosts' / '1.log').read_text()
  for text in (outputs[0][1], log):
    assert re.search(r'error: config.grpo.rollout.slots must be a mul', text)


@pytest.mark.slow
def test_two_processes_export_what_one_does(tmp_path):
  """The files are equal; each tensor is gathered from both."""
  assert main.main(flags(tmp_path / 'run', **{'grpo.steps': 1})) == 0
  words = [f'--checkpoint={tmp_path / "run"}', '--dtype=float32']
  one, two = tmp_path / 'one', tmp_path / 'two'
  assert export.main([*words, f'--folder={one}']) == 0
  processes = _start([*words, f'--folder={two}'], 2, 'posttrain.export')
  outputs = [process.communicate(timeout=120) for process in processes]
  assert [x.returncode for x in processes] == [0, 0], outputs
  names = {path.name for path in one.iterdir()}
  assert {path.name for path in two.iterdir()} == names
  for name in names:
    assert (two / name).read_bytes() == (one / name).read_bytes()


@pytest.mark.slow
def test_two_processes_measure_demonstrations_as_one_does(tmp_path):
  """Weights on the devices of both score the rows that are held out."""
  file = tmp_path / 'rows.jsonl'
  row = '{{"prompt": "{0} + 1 =", "completion": "{1}"}}\n'
  file.write_text(''.join(row.format(i, i + 1) for i in range(20)))
  options = {
    'steps': 2,
    'optim.warmup_steps': 1,
    'batch.micro_batch_tokens': 1024,
    'eval.suite': '()',
    'metrics.progress': False,
    'compilation_cache': None,
  }
  words = [f'--config.{k}={v}' for k, v in options.items()]
  one, two = (
    [f'--config=sft:small,{file},tiny', f'--workdir={tmp_path / name}', *words]
    for name in ('one', 'two')
  )
  processes = _start(two, 2)
  assert main.main(one) == 0
  outputs = [process.communicate(timeout=300) for process in processes]
  assert [x.returncode for x in processes] == [0, 0], outputs
  expected, *_, last = _rows(tmp_path / 'one')
  first, *_, end = writers.read(str(tmp_path / 'two' / 'metrics.jsonl'))
  for row, like in ((first, expected), (end, last)):
    assert row['eval/nll/data'] == like['eval/nll/data']
    assert row['eval/token_accuracy/data'] == like['eval/token_accuracy/data']
