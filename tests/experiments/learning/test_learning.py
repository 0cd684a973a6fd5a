"""The bench of learning: which runs it makes, and what its table says."""

import json
import math
import pathlib

import pytest

from experiments.benchmarks.learning import __main__ as learning
from experiments.benchmarks.learning import picture, table, trials

TINY = 'algorithms/grpo:tiny', 'algorithms/custom:tiny'


@pytest.fixture(scope='module')
def expanded():
  changes = [
    ('main.optim.lr', '1e-3'),
    ('main.envs.sums.algorithm.kwargs.price', '0.1'),
  ]
  return trials.expand(TINY, [0, 1], changes)


def test_variants_have_one_change_each_of_a_key_that_the_recipe_has(expanded):
  found = [(x.recipe, x.change, x.seed) for x in expanded]
  lr, price = 'main.optim.lr=1e-3', 'main.envs.sums.algorithm.kwargs.price=0.1'
  assert found == [
    *[(TINY[0], change, seed) for change in ('', lr) for seed in (0, 1)],
    *[(TINY[1], change, seed) for change in ('', lr, price) for seed in (0, 1)],
  ]
  assert {x.run.stages['main'].optim.lr for x in expanded} == {1e-4, 1e-3}
  assert [x.run.seed for x in expanded] == [x.seed for x in expanded]
  names = {x.name for x in expanded}
  assert len(names) == len(expanded) and not any('/' in x for x in names)


def test_trials_share_starts_that_are_equal(expanded, tmp_path):
  starts = trials.start_jobs(expanded, str(tmp_path))
  by_seed = [
    {starts[x.name].name for x in expanded if x.seed == s} for s in (0, 1)
  ]
  assert [len(names) for names in by_seed] == [1, 1]
  assert by_seed[0] != by_seed[1]
  (name,) = by_seed[0]
  saved = json.loads((tmp_path / 'configs' / f'{name}.json').read_text())
  assert saved['stages'] == ['start'] and 'main' not in saved


def test_a_control_is_the_start_for_longer(expanded, tmp_path):
  trial = expanded[0]
  start = trials.start_jobs([trial], str(tmp_path))[trial.name]
  job = trials.control_job(trial, start, 2.5, str(tmp_path))
  saved = json.loads(pathlib.Path(job.config).read_text())
  assert saved['start']['steps'] == 10 and saved['stages'] == ['start']
  assert job.name != start.name


def test_a_branch_is_a_copy_without_the_starts_own_files(expanded, tmp_path):
  trial = expanded[0]
  start = trials.start_jobs([trial], str(tmp_path))[trial.name]
  (job,) = trials.trial_jobs([trial], str(tmp_path))
  old, new = pathlib.Path(start.workdir), pathlib.Path(job.workdir)
  old.mkdir(parents=True)
  for name in ('metrics.jsonl', 'lock', 'finished.json', 'config.json'):
    (old / name).write_text('x')
  trials.branch(start, job)
  assert [path.name for path in new.iterdir()] == ['metrics.jsonl']
  (new / 'metrics.jsonl').write_text('y')
  trials.branch(start, job)  # it is there
  assert (new / 'metrics.jsonl').read_text() == 'y'


@pytest.mark.parametrize(
  ('recipes', 'changes', 'words'),
  [
    (['arithmetic_sft'], [], 'a stage to start from and one to measure'),
    (
      TINY,
      [('main.optim.lrr', '1')],
      '--vary=main.optim.lrr=1 must name a key',
    ),
    (TINY, [('main.optim.lr', '-1')], r'config.main.optim.lr must be'),
    (['nope'], [], 'configs/nope.py'),
  ],
)
def test_wrong_words_are_refused(recipes, changes, words):
  with pytest.raises(ValueError, match=words):
    trials.expand(recipes, [0], changes)


def _row(stage, step, **values):
  return {'stage': stage, 'step': step} | {
    f'eval/{name}': value for name, value in values.items()
  }


def test_before_is_the_evaluation_of_the_same_weights():
  rows = [
    _row('start', 0, **{'pass_rate/a': 0.1}),
    _row('start', 4, **{'pass_rate/a': 0.5}),
    _row('main', 1),
    _row('main', 8, **{'pass_rate/a': 0.7}),
  ]
  assert table.before_and_after(rows, 'main', 'start') == (rows[1], rows[3])
  own = _row('main', 0, **{'pass_rate/a': 0.6})
  with_own = [*rows[:2], own, *rows[2:]]
  assert table.before_and_after(with_own, 'main', 'start') == (own, rows[3])
  assert table.before_and_after(rows[:3], 'main', 'start') is None


def test_any_of_k_is_that_of_the_largest_k():
  row = _row('m', 1, **{'pass@2/a': 0.2, 'pass@16/a': 0.9, 'pass@16/ab': 0.1})
  assert table.value(row, 'pass@', 'a') == 0.9
  assert math.isnan(table.value(row, 'pass@', 'b'))


def test_seconds_to_a_rate_leave_evaluations_out():
  """Steps of 2 s each; the evaluation adds 8 s to step 2, and 9 to step 4."""
  cpu = [3, 5, 15, 17, 28]  # after steps 0 to 4
  rates = {2: 0.5, 4: 0.8}
  rows = [
    _row('m', i, **({'sampled_pass_rate/a': rates[i]} if i in rates else {}))
    | {'time/cpu': cpu[i]}
    for i in range(5)
  ]
  assert table.seconds_to(rows, 'm', 'a', 0.5) == 2 * 2
  assert table.seconds_to(rows, 'm', 'a', 0.8) == 4 * 2
  assert math.isnan(table.seconds_to(rows, 'm', 'a', 0.9))
  assert math.isnan(table.seconds_to(rows, 'n', 'a', 0.5))


def test_intervals_are_students():
  """n = 3: 4.303 standard errors; scipy's own table has t = 4.3027."""
  mean, width = table.interval([0.1, 0.2, 0.3])
  assert mean == pytest.approx(0.2)
  assert width == pytest.approx(4.3027 * 0.1 / 3**0.5, rel=1e-4)
  assert math.isnan(table.interval([0.1])[1])


def test_changes_are_paired_by_seed():
  """Both seeds rise by 0.1, though they start far apart."""
  pairs = [
    (
      _row('s', 1, **{'pass_rate/a': x}),
      _row('m', 1, **{'pass_rate/a': x + 0.1}),
    )
    for x in (0.2, 0.8)
  ]
  before, after, change, width = table.measure(pairs, 'a')['pass_rate']
  assert (before, after) == pytest.approx((0.5, 0.6))
  assert change == pytest.approx(0.1) and width < 1e-9


def test_pairs_and_held_out_losses_are_measured_too():
  rows = [
    {table.PAIRS: accuracy, 'eval/pairs/rewards_low/accuracies': 0.1}
    | {'eval/nll/data': 3 - accuracy}
    for accuracy in (0.5, 0.75)
  ]
  assert table.envs(rows[0]) == ['data', 'pairs']
  measures = table.measure([tuple(rows)], 'pairs')
  assert list(measures) == ['accuracy']
  assert measures['accuracy'][:3] == [0.5, 0.75, 0.25]
  assert table.measure([tuple(rows)], 'data')['nll'][:3] == [2.5, 2.25, -0.25]


def test_what_has_no_value_before_has_no_change():
  pairs = [(_row('s', 1), _row('m', 1, **{'kl/a': 0.25}))]
  row = {
    **{'recipe': 'r', 'change': 'a|b', 'env': 'a', 'seeds': 1},
    **{
      'measures': table.measure(pairs, 'a'),
      'wall_s': 10.4,
      'cpu_s': math.nan,
    },
  }
  assert table.lines([row])[2] == ('| r | a\\|b | a | 1 | 0.250 | 10 |  |')


def test_seconds_are_those_of_a_stage():
  rows = [
    {'stage': stage, 'step': 1, 'time/cpu': seconds}
    for stage, seconds in (('a', 3.0), ('a', 5.0), ('b', 6.0), ('b', 9.0))
  ]
  assert table.seconds(rows, 'a', 'time/cpu') == 5.0
  assert table.seconds(rows, 'b', 'time/cpu') == 4.0
  assert math.isnan(table.seconds(rows, 'b', 'time/elapsed'))


def test_only_steps_grow_with_their_number():
  """Steps of 2 s each, which the rows with more in them contain as well."""
  costs = [  # (stage, step, CPU seconds, compilation, evaluation)
    ('a', 5, 100, 0, 0),  # another stage
    ('s', 0, 50, 9, 1),  # set-up and the first evaluation: fixed
    ('s', 1, 2 + 17, 16, 0),  # compilation: fixed
    ('s', 2, 2, 0, 0),
    ('s', 3, 2 + 8, 0, 1),  # an evaluation in between: one of more
    ('s', 4, 2, 0, 0),
    ('s', 5, 2 + 15, 0, 1),  # the last one: fixed
    ('m', 0, 30, 0, 1),
  ]
  rows, total = [], 0.0
  for stage, step, seconds, compiling, evaluates in costs:
    total += seconds
    values = {'pass_rate/a': 0.5} if evaluates else {}
    row = _row(stage, step, **values)
    rows.append(row | {'time/cpu': total, 'time/compile': float(compiling)})
  fixed, growing = table.fixed_and_growing(rows, 's')
  assert (fixed, growing) == (50 + 17 + 15, 5 * 2 + 8)
  # A stage without a plain step: all but its start grows.
  assert table.fixed_and_growing(rows[:3], 's') == (50, 19)


def test_the_picture_says_what_its_bands_are(tmp_path, monkeypatch):
  from matplotlib import axes

  titles = []
  monkeypatch.setattr(
    axes.Axes, 'legend', lambda self, **options: titles.append(options['title'])
  )
  seeds = [[{'step': i, 'eval/pass_rate/a': i / 9} for i in (1, 2, 3)]] * 2
  picture.draw({'a': {'recipe': seeds}}, str(tmp_path / 'x.png'))
  assert titles == ['mean over seeds; bands: min to max']


def test_curves_have_the_steps_of_all_seeds():
  seeds = [
    [{'step': i, 'rollout/pass_rate/a': float(i)} for i in range(1, last)]
    for last in (5, 4)
  ]
  steps, values = picture.series(seeds, 'rollout/pass_rate/a')
  assert steps.tolist() == [1, 2, 3] and values.shape == (2, 3)
  assert picture.series([seeds[0], []], 'rollout/pass_rate/a') is None


@pytest.mark.slow
def test_a_bench_of_two_recipes_and_one_change(tmp_path, capsys):
  words = [
    f'--recipes={",".join(TINY)}',
    *('--seeds=0,1', '--jobs=2', f'--workdir={tmp_path}'),
    '--vary=main.optim.average=0.9',
  ]
  assert learning.main(words) == 0
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == 2 + 4 + 1  # four variants, and one control
  assert lines == (tmp_path / 'learning.md').read_text().splitlines()
  rows = [
    json.loads(line)
    for line in (tmp_path / 'learning.jsonl').read_text().splitlines()
  ]
  assert [row['seeds'] for row in rows] == [2] * 5
  assert all(row['cpu_s'] > 0 and row['wall_s'] > 0 for row in rows)
  assert (tmp_path / 'learning.png').stat().st_size > 1000
  assert len(list((tmp_path / 'runs').iterdir())) == 2 + 8 + 2
  assert learning.main(words) == 0  # nothing is left
  assert capsys.readouterr().out.splitlines() == lines
