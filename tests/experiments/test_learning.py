"""The benches of learning and of sanity: their runs, and their tables."""

import json
import math

import pytest

from experiments.benchmarks import learning, sanity
from posttrain import schema
from posttrain.envs import registry
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
  assert [(x.recipe, x.change, x.seed) for x in trials] == [
    *[(TINY[0], change, seed) for change in ('', lr) for seed in (0, 1)],
    *[(TINY[1], change, seed) for change in ('', lr, price) for seed in (0, 1)],
  ]
  assert {x.run.stages['main'].optim.lr for x in trials} == {1e-4, 1e-3}
  assert len({x.name for x in trials}) == len(trials)


def test_trials_share_starts_and_a_control_is_longer(trials, tmp_path):
  folder = str(tmp_path)
  starts = [{learning.start_job(x, folder).name for x in trials if x.seed == s}
            for s in (0, 1)]  # fmt: skip
  assert [len(names) for names in starts] == [1, 1]
  job = learning.control_job(trials[0], 2.5, folder)
  saved = json.loads((tmp_path / 'configs' / f'{job.name}.json').read_text())
  assert saved['start']['steps'] == 10 and saved['stages'] == ['start']


@pytest.mark.parametrize(
  ('recipes', 'changes', 'words'),
  [
    (['arithmetic_sft'], [], 'configs/arithmetic_sft.py'),
    (TINY, [('main.optim.lrr', '1')], 'main.optim.lrr'),
    (TINY, [('main.optim.lr', '-1')], 'main.optim.lr'),
    (['nope'], [], 'configs/nope.py'),
  ],
)
def test_wrong_words_are_refused(recipes, changes, words):
  with pytest.raises(ValueError, match=words):
    learning.expand(recipes, [0], changes)


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
  ends = learning.before_and_after
  assert ends(rows, 'main', 'start') == (rows[1], rows[3])
  own = _row('main', 0, **{'pass_rate/a': 0.6})
  assert ends([*rows[:2], own, *rows[2:]], 'main', 'start') == (own, rows[3])
  assert ends(rows[:3], 'main', 'start') is None


def test_seconds_to_a_rate_leave_evaluations_out():
  """Steps of 2 s each; the evaluation adds 8 s to step 2, and 9 to step 4."""
  cpu, rates = [3, 5, 15, 17, 28], {2: 0.5, 4: 0.8}
  rows = [
    _row('m', i, **({'sampled_pass_rate/a': rates[i]} if i in rates else {}))
    | {'time/cpu': cpu[i]}
    for i in range(5)
  ]
  found = [learning.seconds_to(rows, 'm', 'a', x) for x in (0.5, 0.8, 0.9)]
  assert found[:2] == [4, 8] and math.isnan(found[2])
  assert learning.seconds(rows, 'm', 'time/cpu') == 28


def test_changes_are_paired_by_seed_and_intervals_are_students():
  """n = 3: 4.303 standard errors; scipy's own table has t = 4.3027."""
  mean, width = learning.interval([0.1, 0.2, 0.3])
  assert mean == pytest.approx(0.2)
  assert width == pytest.approx(4.3027 * 0.1 / 3**0.5, rel=1e-4)
  pairs = [
    (
      _row('s', 1, **{'pass_rate/a': x, 'pass@2/a': 0.1, 'pass@16/a': x}),
      _row('m', 1, **{'pass_rate/a': x + 0.1, 'pass@16/a': 1, 'kl/a': 0.25}),
    )
    for x in (0.2, 0.8)
  ]
  measures = learning.measure(pairs, 'a')
  before, after, change, width = measures['pass_rate']
  assert (before, after) == pytest.approx((0.5, 0.6))
  assert change == pytest.approx(0.1) and width < 1e-9
  assert measures['pass@'][:2] == pytest.approx([0.5, 1])  # of the largest k
  row = {'recipe': 'r', 'change': 'a|b', 'env': 'a', 'seeds': 2}
  kl = {'kl': measures['kl']}  # nothing before
  row |= {'measures': kl, 'wall_s': 10.4, 'cpu_s': math.nan}
  assert learning.table([row])[2] == '| r | a\\|b | a | 2 | 0.250 | 10 |  |'


def test_curves_have_the_steps_of_all_seeds():
  seeds = [
    [{'step': i, 'rollout/pass_rate/a': float(i)} for i in range(1, last)]
    for last in (5, 4)
  ]
  steps, values = learning.series(seeds, 'rollout/pass_rate/a')
  assert steps.tolist() == [1, 2, 3] and values.shape == (2, 3)
  assert learning.series([seeds[0], []], 'rollout/pass_rate/a') is None


@pytest.mark.slow
def test_a_bench_of_two_recipes_and_one_change(tmp_path, capsys):
  words = [f'--recipes={",".join(TINY)}', '--seeds=0,1', '--jobs=2']
  words += [f'--workdir={tmp_path}', '--vary=main.optim.average=0.9']
  assert learning.main(words) == 0
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == 2 + 4 + 1  # four variants, and one control
  assert lines == (tmp_path / 'learning.md').read_text().splitlines()
  assert (tmp_path / 'learning.png').stat().st_size > 1000
  assert len(list((tmp_path / 'runs').iterdir())) == 2 + 8 + 2
  assert learning.main(words) == 0  # nothing is left
  assert capsys.readouterr().out.splitlines() == lines


def test_every_loss_of_the_repository_is_tried():
  assert set(sanity.LOSSES) == set(rl.TYPES) - {'custom'}


def test_questions_are_chosen_by_their_pass_rate_bounds_included():
  rows = [{'question': str(i)} for i in range(5)]
  answers = [
    {'sampled': [True] * right + [False] * (5 - right)}
    for right in (0, 1, 2, 4, 5)
  ]
  chosen = sanity.choose(rows, answers, 0.2, 0.8)
  assert [row['pass_rate'] for row in chosen] == [0.2, 0.4, 0.8]


def test_the_questions_of_a_file_are_graded_as_the_environments_own(tmp_path):
  path = tmp_path / 'questions.jsonl'
  sanity.write(path, [{'question': '1 + 2?', 'answer': '#### 3', 'id': '0'}])
  env = registry.make('questions', sanity.env(str(path)))
  for split in ('train', 'eval'):
    (task,) = env.source(split, 0).take(1)
    assert task.prompt[-1]['content'] == '1 + 2?'
    for answer in (3, 4):
      episode = env.make(task)
      episode.reset()
      episode.step(f'\\boxed{{{answer}}}', False)
      assert episode.grade().reward == float(answer == 3)


def test_the_sanity_table_has_a_row_per_run():
  def rows(rates):
    return [
      {
        **{'step': 10 * i, 'time/cpu': 10 + 40.0 * i},
        **{'eval/sampled_pass_rate/questions': rate},
        **{'eval/sampled_pass_rate/unseen': rate / 2},
        **{'eval/pass_rate/unseen': 0.5 + i / 10},
        **{'mismatch/abs_mean': 1e-3, 'mismatch/max': 1e-2, 'mismatch/k3': 0},
      }
      for i, rate in enumerate(rates)
    ]

  results = {
    sanity.Case(loss, 'float32', 4, 0): {**sanity.summarize(own), 'lr': 1e-4}
    for loss, own in (
      ('clip', rows([0.5, 0.7, 0.995])),
      ('gspo', rows([0.5, 0.8])),
    )
  }
  assert sanity.table(results)[2:] == [
    '| clip | float32 | 4 | 0.0001 | 0 | 20 | 0.500 | 0.995 | 0.995 | 20 | 90 '
    '| 90 | 0.700 | 0.250 -> 0.497 | 0.500 -> 0.700 '
    '| 1.0e-03 | 1.0e-02 | 0.0e+00 |',
    '| gspo | float32 | 4 | 0.0001 | 0 | 10 | 0.500 | 0.800 | 0.800 | never '
    '| never | 50 | 0.800 | 0.250 -> 0.400 | 0.500 -> 0.600 '
    '| 1.0e-03 | 1.0e-02 | 0.0e+00 |',
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
  assert sanity.main([*words, '--questions=6']) == 0
  first = capfd.readouterr().out
  assert first.splitlines()[-1].startswith('| gspo | bfloat16 | 4 | ')
  assert sanity.main([*words, '--questions=6']) == 0
  assert capfd.readouterr().out == first
  assert isinstance(sanity.env('x'), schema.Gsm8k)
