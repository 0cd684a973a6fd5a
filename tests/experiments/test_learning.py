"""The benches of learning and of sanity: their runs, and their tables."""

import json
import pathlib

import pytest

from experiments.benchmarks import learning, sanity
from posttrain.losses import rl

TINY = 'algorithms/grpo:tiny', 'algorithms/custom:tiny'
PRICE = 'main.envs.sums.algorithm.kwargs.price'


@pytest.fixture(scope='module')
def trials():
  return learning.expand(
    TINY, [0, 1], [('main.optim.lr', '1e-3'), (PRICE, '0.1')]
  )


def test_trials_share_starts_and_a_control_is_longer(trials, tmp_path):
  folder = str(tmp_path)
  starts = {(x.seed, learning.start_job(x, folder).name) for x in trials}
  assert len(starts) == 2
  job = learning.control_job(trials[0], 2.5, folder)
  saved = json.loads((tmp_path / 'configs' / f'{job.name}.json').read_text())
  assert saved['start']['steps'] == 10 and saved['stages'] == ['start']


def _row(stage, step, **values):
  return {'stage': stage, 'step': step} | {
    f'eval/{name}': value for name, value in values.items()
  }


def test_changes_are_paired_by_seed_and_intervals_are_students():
  """n = 3: 4.303 standard errors; scipy's own table has t = 4.3027."""
  mean, width = learning.interval([0.1, 0.2, 0.3])
  assert mean == pytest.approx(0.2)
  assert width == pytest.approx(4.3027 * 0.1 / 3**0.5, rel=1e-4)
  pairs = [
    (
      _row('s', 1, **{'pass_rate/a': x, 'pass@2/a': 0.1, 'pass@16/a': x}),
      _row('m', 1, **{'pass_rate/a': x + 0.1, 'pass@16/a': 1}),
    )
    for x in (0.2, 0.8)
  ]
  measures = learning.measure(pairs, 'a')
  assert measures['pass_rate'] == pytest.approx((0.5, 0.6, 0.1, 0))
  assert measures['pass@'][:2] == pytest.approx([0.5, 1])  # of the largest k


@pytest.mark.slow
def test_a_bench_of_two_recipes_and_one_change(tmp_path, capsys):
  words = [f'--recipes={",".join(TINY)}', '--seeds=0,1', '--jobs=2']
  words += [f'--workdir={tmp_path}', '--vary=main.optim.average=0.9']
  assert learning.main(words) == 0
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == 2 + 4 + 1  # four variants, and one control
  assert len(list((tmp_path / 'runs').iterdir())) == 2 + 8 + 2


def test_arms_continue_from_shared_starts_under_other_seeds(tmp_path):
  """Later stages are paths into the start; what selects is not reported."""
  (trial,) = learning.expand(['algorithms/retention:tiny'], [3])
  start = learning.start_job(trial, str(tmp_path))
  values = {'optim.lr': '3e-4', 'eval.skip': '8'}
  job = learning.continued(trial, start, 7, values, str(tmp_path))
  saved = json.loads(pathlib.Path(job.config).read_text())
  assert saved['seed'] == 7 and saved['stages'] == ['main']
  assert saved['main']['init'] == f'{start.workdir}/checkpoints/start'
  assert saved['main']['optim']['lr'] == 3e-4
  assert saved['main']['eval']['skip'] == 8
  assert 'stage:' not in json.dumps(saved)


def test_a_test_needs_tasks_that_chose_nothing():
  """`sums` has 250 evaluation tasks, of which 8 are evaluated."""
  trials = learning.expand(TINY[:1], [0])
  assert learning.num_choosing(trials, 242) == 8
  with pytest.raises(ValueError, match='must have 251 evaluation tasks'):
    learning.num_choosing(trials, 243)


def test_arms_from_other_starts_are_refused(tmp_path, capsys):
  words = [f'--recipes={TINY[0]}', '--starts=0', '--seeds=5', '--test=12']
  words += ['--vary=start.optim.lr=1e-4', f'--workdir={tmp_path}']
  assert learning.main(words) == 2
  assert '--starts=0 must be shared by all arms' in capsys.readouterr().err
  assert not (tmp_path / 'runs').exists()


def test_an_arm_takes_the_value_with_the_best_last_rate():
  (trial,) = learning.expand(TINY[:1], [0])
  tried = {
    text: [_row('main', 1, **{'sampled_pass_rate/sums': x})]
    for text, x in (('1e-4', 0.3), ('2e-4', 0.5), ('4e-4', 0.4))
  }
  arm = learning.Arm([trial], {})
  assert arm.tune(tried, 'optim.lr', 9) == tried['2e-4']
  assert arm.values == {'optim.lr': '2e-4'}
  assert 'seed 9: 1e-4: 0.300' in arm.choice
  # `medium` trains and is not evaluated: the mean of `sql` and `sql_hard`.
  (trial,) = learning.expand(['sql:medium'], [0])
  rates = {'sampled_pass_rate/sql': 0.5, 'sampled_pass_rate/sql_hard': 0.1}
  arm = learning.Arm([trial], {})
  arm.tune({'1e-4': [_row('grpo', 1, **rates)]}, 'optim.lr', 9)
  assert '1e-4: 0.300' in arm.choice


def test_an_environment_that_the_first_arm_lacks_has_a_row():
  (trial,) = learning.expand(['algorithms/retention:tiny'], [0])
  sums = {('sums', 'pass_rate'): {'a': 0.0, 'b': 1.0}}
  both = {**sums, ('differences', 'pass_rate'): {'c': 1.0}}
  first, other = (
    learning.Arm([trial], {}, before=[[x]], after=[[x]]) for x in (sums, both)
  )
  assert [x['difference'] for x in first.results(first)] == [None]
  rows = {x['env']: x['difference'] is None for x in other.results(first)}
  assert rows == {'sums': False, 'differences': True}
  assert len(learning.paired_table(other.results(first))) == 2 + 2


@pytest.mark.slow
def test_arms_are_compared_in_pairs(tmp_path, capsys):
  """Two starts, one value tuned, and equal CPU seconds."""
  words = [f'--recipes={",".join(TINY)}', '--starts=0,1', '--seeds=5']
  words += ['--tune=optim.lr=1e-4,1e-3', '--equal_cpu=true', '--test=12']
  for _ in range(2):
    assert learning.main([*words, f'--workdir={tmp_path}']) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 2 * 2  # both measures of both arms
  assert '| 2 x 1 x 12 |' in lines[-1]
  assert len(list((tmp_path / 'runs').iterdir())) == 2 + 4 + 4


def test_every_loss_of_the_repository_is_tried():
  assert set(sanity.LOSSES) == set(rl.TYPES) - {'custom'}


def test_questions_are_chosen_by_their_pass_rate_bounds_included():
  answers = [{'sampled': [i < right for i in range(5)]} for right in range(6)]
  chosen = sanity.choose([{}] * 6, answers, 0.2, 0.8)
  assert [row['pass_rate'] for row in chosen] == [0.2, 0.4, 0.6, 0.8]


@pytest.mark.slow
def test_the_sanity_command(tmp_path, capfd):
  """Of a start without a right answer, nothing is learned; all parts run."""
  words = ['--recipe=algorithms/grpo:tiny', '--losses=gspo', '--low=0']
  words += ['--dtypes=bfloat16', '--candidates=8', '--samples=2', '--high=1']
  words += ['--config.main.steps=2', '--config.main.eval.every=1']
  words += [f'--workdir={tmp_path}']
  for _ in range(2):
    assert sanity.main([*words, '--questions=6']) == 0
    *_, last = capfd.readouterr().out.splitlines()
    assert last.startswith('| gspo | bfloat16 | 4 | ')
