"""The benches of learning and of sanity: their runs, and their tables."""

import json

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


def test_variants_have_one_change_each_of_a_key_that_the_recipe_has(trials):
  lr, price = 'main.optim.lr=1e-3', f'{PRICE}=0.1'
  changes = [(TINY[0], ['', lr]), (TINY[1], ['', lr, price])]
  assert [(x.recipe, x.change, x.seed) for x in trials] == [
    (recipe, change, seed)
    for recipe, own in changes
    for change in own
    for seed in (0, 1)
  ]
  with pytest.raises(ValueError, match=r'main\.optim\.lrr'):
    learning.expand(TINY, [0], [('main.optim.lrr', '1')])


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


def test_before_is_the_evaluation_of_the_same_weights():
  rows = [
    _row('start', 4, **{'pass_rate/a': 0.5}),
    _row('main', 1),
    _row('main', 8, **{'pass_rate/a': 0.7}),
  ]
  ends = learning.before_and_after
  assert ends(rows, 'main', 'start') == (rows[0], rows[2])
  own = _row('main', 0, **{'pass_rate/a': 0.6})
  assert ends([rows[0], own, *rows[1:]], 'main', 'start') == (own, rows[2])


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
  assert lines == (tmp_path / 'learning.md').read_text().splitlines()
  assert len(list((tmp_path / 'runs').iterdir())) == 2 + 8 + 2


def test_every_loss_of_the_repository_is_tried():
  assert set(sanity.LOSSES) == set(rl.TYPES) - {'custom'}


def test_questions_are_chosen_by_their_pass_rate_bounds_included():
  answers = [{'sampled': [i < right for i in range(5)]} for right in range(6)]
  chosen = sanity.choose([{}] * 6, answers, 0.2, 0.8)
  assert [row['pass_rate'] for row in chosen] == [0.2, 0.4, 0.6, 0.8]


def test_the_sanity_table_has_a_row_per_run():
  rows = [
    {
      **{'step': 10 * i, 'time/cpu': 10 + 40.0 * i},
      **{'eval/sampled_pass_rate/questions': rate},
      **{'eval/sampled_pass_rate/unseen': rate / 2},
      **{'eval/pass_rate/unseen': 0.5 + i / 10},
      **{'mismatch/abs_mean': 1e-3, 'mismatch/max': 1e-2, 'mismatch/k3': 0},
    }
    for i, rate in enumerate([0.5, 0.7, 0.995])
  ]
  results = {
    sanity.Case(loss, 'float32', 4, 0): {**sanity.summarize(own), 'lr': 1e-4}
    for loss, own in (('clip', rows), ('gspo', rows[:2]))
  }
  assert sanity.table(results)[2:3] == [
    '| clip | float32 | 4 | 0.0001 | 0 | 20 | 0.500 | 0.995 | 0.995 | 20 | 90 '
    '| 90 | 0.250 -> 0.497 | 0.500 -> 0.700 '
    '| 1.0e-03 | 1.0e-02 | 0.0e+00 |'
  ]


@pytest.mark.slow
def test_the_sanity_command(tmp_path, capfd):
  """Of a start without a right answer, nothing is learned; all parts run."""
  words = ['--recipe=algorithms/grpo:tiny', '--losses=gspo', '--low=0']
  words += ['--dtypes=bfloat16', '--candidates=8', '--samples=2', '--high=1']
  words += ['--config.main.steps=2', '--config.main.eval.every=1']
  words += [f'--workdir={tmp_path}']
  assert sanity.main([*words, '--questions=9']) == 2
  assert '--questions must be at most 8' in capfd.readouterr().err
  for _ in range(2):
    assert sanity.main([*words, '--questions=6']) == 0
    *_, last = capfd.readouterr().out.splitlines()
    assert last.startswith('| gspo | bfloat16 | 4 | ')
