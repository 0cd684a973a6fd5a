"""The ladder at its tiny size, GRPO on a reward model included."""

import json
import shutil

import pytest

from experiments.benchmarks import ladder
from experiments.trials import kill_resume
from posttrain.util import preemption
from tests import toys

STAGES = ['sft', 'dpo', 'grpo', 'rm', 'rm_grpo']


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  """A finished ladder."""
  folder = tmp_path_factory.mktemp('ladder') / 'run'
  ladder.main([f'--workdir={folder}', '--tiny'])
  return folder


@pytest.mark.slow
def test_every_stage_has_a_row_and_a_second_start_trains_nothing(
  workdir, capsys
):
  before = (workdir / 'metrics.jsonl').read_bytes()
  ladder.main([f'--workdir={workdir}', '--tiny'])
  assert (workdir / 'metrics.jsonl').read_bytes() == before
  *lines, last = capsys.readouterr().out.splitlines()
  results = json.loads(last)
  assert list(results) == ['seed', 'base', *STAGES]
  assert 0 <= results['rm']['pairs'] <= 1
  table = [line.split(' | ') for line in lines if line.startswith('| ')][1:]
  for row, (name, title) in zip(table, ladder.ROWS.items(), strict=True):
    assert row[0] == f'| {title}'
    assert float(row[2]) == round(results[name]['pass_rate'], 3)


@pytest.mark.slow
def test_resuming_grpo_on_a_reward_model_is_bitwise(workdir, tmp_path):
  cut = tmp_path / 'run'
  shutil.copytree(workdir, cut)
  shutil.rmtree(cut / 'checkpoints' / 'rm_grpo')
  with pytest.MonkeyPatch.context() as patch:
    toys.stop_at(patch, 4)
    with pytest.raises(preemption.Preempted, match='stage rm_grpo, step 4'):
      ladder.main([f'--workdir={cut}', '--tiny'])
  ladder.main([f'--workdir={cut}', '--tiny'])
  truth = kill_resume.outcome(workdir)
  assert not kill_resume.differences(truth, kill_resume.outcome(cut))
