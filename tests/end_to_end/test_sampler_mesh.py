"""A sampler with devices of its own gives the bits of shared devices."""

import shutil

import pytest

from posttrain.checkpoints import store
from posttrain.metrics import writers
from tests import fixtures

SIZES = {
  'checkpoint.every': 2,
  'sft.steps': 2,
  'sft.eval.prompts': 4,
  'grpo.steps': 4,
  'grpo.eval.prompts': 4,
}
SPLIT = {'mesh.sampler': '{"data": 1}'}
LEASH = {
  'grpo.envs.arithmetic.algorithm.kl_beta': 0.1,
  'grpo.envs.arithmetic.algorithm.reference': 'ema:0.5',
}
ADAPTER = {
  'grpo.lora.rank': 2,
  'grpo.envs.arithmetic.algorithm.kl_beta': 0.1,
  'grpo.rollout.max_lag': 2,
}
IN_TURNS = {'grpo.rollout.in_turns': True}


def _run(workdir, devices, **options):
  fixtures.run_on_devices(
    devices,
    '-m',
    'posttrain.main',
    '--config=configs/arithmetic.py:tiny',
    f'--workdir={workdir}',
    *(f'--config.{key}={value}' for key, value in options.items()),
  )
  rows = writers.read(str(workdir / 'metrics.jsonl'))
  measured = [
    {k: x for k, x in row.items() if not k.startswith(('time/', 'memory/'))}
    for row in rows
  ]
  return rows, measured, store.read_sums(str(workdir), averaged=True)


@pytest.mark.slow
@pytest.mark.parametrize(
  'options',
  [LEASH, {**LEASH, 'grpo.rollout.max_lag': 1}, ADAPTER],
  ids=['leash', 'leash_lag', 'adapter_lag'],
)
def test_own_devices_change_no_bit_and_a_run_resumes(tmp_path, options):
  options = {**SIZES, **options}
  _, *shared = _run(tmp_path / 'shared', 1, **options, **IN_TURNS)
  rows, *own = _run(tmp_path / 'own', 2, **options, **SPLIT)
  assert own == shared
  steps = [row for row in rows if row['stage'] == 'grpo' and row['step']]
  assert all(x['time/hand_over'] > 0 for x in steps)
  assert steps[-1]['time/programs'] == steps[-2]['time/programs']
  shutil.copytree(tmp_path / 'own', tmp_path / 'resumed')
  shutil.rmtree(tmp_path / 'resumed/checkpoints/grpo/4')
  _, *resumed = _run(tmp_path / 'resumed', 2, **options, **SPLIT)
  assert resumed == own


@pytest.mark.slow
def test_both_sides_of_several_devices_work_at_the_same_time(tmp_path):
  options = {**SIZES, 'mesh.data': 1, 'mesh.fsdp': 2, 'grpo.rollout.max_lag': 2}
  options['mesh.sampler'] = '{"tensor": 2}'
  _, *beside = _run(tmp_path / 'beside', 4, **options)
  _, *in_turns = _run(tmp_path / 'in_turns', 4, **options, **IN_TURNS)
  assert beside == in_turns
