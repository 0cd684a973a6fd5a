"""The sanity run: its questions, its runs, and what its table says."""

import dataclasses
import functools
import json
import math

import pytest

from experiments.benchmarks.sanity import __main__ as sanity
from experiments.benchmarks.sanity import cases, questions, table
from posttrain import schema
from posttrain.envs import registry
from posttrain.losses import rl
from posttrain.metrics import writers


def test_every_loss_of_the_repository_is_tried():
  assert set(cases.LOSSES) == set(rl.TYPES) - {'custom'}
  assert {name: loss.type for name, loss in cases.LOSSES.items()} == {
    name: name for name in cases.LOSSES
  }
  assert cases.LOSSES['ipo'].threshold == 0.3


def test_cases_are_all_combinations():
  parsed = cases.parse('clip,gspo', 'float32,bfloat16', '1,4', '0')
  assert len(parsed) == 8
  assert parsed[:3] == [
    cases.Case('clip', 'float32', 1, 0),
    cases.Case('gspo', 'float32', 1, 0),
    cases.Case('clip', 'bfloat16', 1, 0),
  ]
  assert parsed[0].name == 'clip_float32_updates=1_seed=0'
  assert len({case.name for case in parsed}) == 8


@pytest.mark.parametrize(
  ('words', 'message'),
  [
    (('clop', 'float32', '4', '0'), "--losses must be of dppo,.*: got 'clop'"),
    (('clip', 'float16', '4', '0'), '--dtypes must be of float32,bfloat16'),
    (('clip', 'float32', 'x', '0'), "--updates must be numbers.*: got 'x'"),
    (('clip', 'float32', '4', ''), "--seeds must be numbers.*: got ''"),
  ],
)
def test_wrong_words_are_refused(words, message):
  with pytest.raises(ValueError, match=message):
    cases.parse(*words)


def test_questions_are_chosen_by_their_pass_rate_bounds_included():
  rows = [{'question': str(i)} for i in range(5)]
  rights = (0, 1, 2, 4, 5)
  answers = [
    {'sampled': [True] * right + [False] * (5 - right)} for right in rights
  ]
  chosen = questions.choose(rows, answers, 0.2, 0.8)
  assert chosen == [
    {'question': '1', 'pass_rate': 0.2},
    {'question': '2', 'pass_rate': 0.4},
    {'question': '3', 'pass_rate': 0.8},
  ]


def test_the_questions_of_a_file_are_the_environments_own(tmp_path):
  """The same prompts, graded alike, in training and in evaluation."""
  entry = schema.EnvEntry(env=schema.Arithmetic(ops=('-',), train_tasks=30))
  rows = questions.candidates(entry, 0, 20)
  path = tmp_path / 'questions.jsonl'
  questions.write_jsonl(str(path), rows)
  own = registry.make('own', entry.env).source('train', 0).take(20)
  env = registry.make('questions', questions.env(str(path)))
  for split in ('train', 'eval'):
    tasks = env.source(split, 0).take(100)
    assert [task.prompt for task in tasks] == [task.prompt for task in own]
    for task, other in zip(tasks, own, strict=True):
      for answer in (other.answer, other.answer + 1):
        episode = env.make(task)
        episode.reset()
        episode.step(f'\\boxed{{{answer}}}', False)
        assert episode.grade().reward == float(answer == other.answer)


def test_a_case_trains_on_the_questions_alone(tmp_path):
  run = sanity.load('algorithms/grpo', [('main.optim.lr', '3e-4')])
  case = cases.Case('ipo', 'bfloat16', 4, 7)
  own = cases.options(run, case, 'DIR/start', 'DIR/questions.jsonl')
  (stage,) = own.stages.values()
  assert own.seed == 7 and own.model.dtype == 'bfloat16'
  assert stage.init == 'DIR/start' and stage.updates_per_rollout == 4
  assert stage.loss.rl == schema.Ipo(threshold=0.3)
  assert stage.optim.lr == 3e-4 and stage.optim.schedule == 'linear'
  trained = {name for name, entry in stage.envs.items() if entry.ratio}
  assert trained == {'questions'} and set(stage.envs) > trained
  assert stage.envs['unseen'].env == run.stages['main'].envs['sums'].env


def _rows(rates, first=10.0):
  """Returns an evaluation before step 1 and one per ten steps, 4 s a step."""
  rows = []
  for i, rate in enumerate(rates):
    row = {'stage': 'main', 'step': 10 * i, 'time/cpu': first + 40.0 * i}
    row['eval/sampled_pass_rate/questions'] = rate
    row['eval/sampled_pass_rate/unseen'] = rate / 2
    row['eval/pass_rate/unseen'] = 0.5 + i / 10
    if i:
      row |= {
        'mismatch/abs_mean': i * 1e-3,
        'mismatch/max': i * 1e-2,
        'mismatch/k3': i * 1e-6,
      }
    rows.append(row)
  return rows


def test_the_first_evaluation_that_is_solved_counts():
  found = table.summarize(_rows([0.5, 0.98, 0.99, 0.97]))
  assert (found['start'], found['best'], found['last']) == (0.5, 0.99, 0.97)
  assert (found['solved_step'], found['solved_cpu']) == (20, 90.0)
  assert found['cpu'] == 130.0
  assert found['sampled'] == [0.25, 0.485]
  assert found['greedy'] == pytest.approx([0.5, 0.8])
  assert found['mismatch'] == pytest.approx([2e-3, 3e-2, 2e-6])
  assert table.summarize(_rows([0.5, 0.98]))['solved_step'] is None


def test_at_equal_seconds_the_last_evaluation_within_them_counts():
  curve = [[0, 0.5, 10.0], [10, 0.7, 50.0], [20, 0.6, 90.0]]
  assert [table.at(curve, cpu) for cpu in (10.0, 89.9, 90.0, math.inf)] == [
    *(0.5, 0.7, 0.6, 0.6)
  ]


def test_the_table_has_a_row_per_run(tmp_path, capsys):
  found = {
    cases.Case('clip', 'float32', 4, 0): _rows([0.5, 0.7, 0.995]),
    cases.Case('gspo', 'float32', 4, 0): _rows([0.5, 0.8]),
  }
  results = {
    case: {**table.summarize(rows), 'lr': 1e-4} for case, rows in found.items()
  }
  sanity.write(results, str(tmp_path))
  text = (tmp_path / 'sanity.md').read_text()
  assert capsys.readouterr().out == text
  head, rule, *body = text.splitlines()
  assert head.count('|') == rule.count('|') == body[0].count('|')
  assert body == [
    '| clip | float32 | 4 | 0.0001 | 0 | 20 | 0.500 | 0.995 | 0.995 | 20 | 90 '
    '| 90 | 0.700 | 0.250 -> 0.497 | 0.500 -> 0.700 '
    '| 1.5e-03 | 2.0e-02 | 1.5e-06 |',
    '| gspo | float32 | 4 | 0.0001 | 0 | 10 | 0.500 | 0.800 | 0.800 | never '
    '| never | 50 | 0.800 | 0.250 -> 0.400 | 0.500 -> 0.600 '
    '| 1.0e-03 | 1.0e-02 | 1.0e-06 |',
  ]
  rows = writers.read(str(tmp_path / 'sanity.jsonl'))
  assert rows[1]['loss'] == 'gspo' and rows[1]['curve'][-1] == [10, 0.8, 50.0]


TINY = (
  *('--recipe=algorithms/grpo:tiny', '--losses=gspo', '--dtypes=bfloat16'),
  *('--candidates=8', '--samples=2', '--low=0', '--high=1'),
  *('--config.main.steps=2', '--config.main.eval.every=1'),
)


@pytest.mark.slow
def test_the_command(tmp_path, capfd):
  """Of a start without a right answer, nothing is learned; all parts run."""
  words = [*TINY, f'--workdir={tmp_path}']
  assert sanity.main([*words, '--questions=9']) == 2
  assert '--questions must be at most 8' in capfd.readouterr().err
  assert sanity.main([*words, '--questions=6']) == 0
  first = capfd.readouterr()
  assert first.out.splitlines()[-1].startswith('| gspo | bfloat16 | 4 | ')
  chosen = (tmp_path / 'questions.jsonl').read_text().splitlines()
  assert len(chosen) == 6 and json.loads(chosen[0])['pass_rate'] == 0
  (row,) = writers.read(str(tmp_path / 'sanity.jsonl'))
  assert [point[0] for point in row['curve']] == [0, 1, 2]
  assert sanity.main([*words, '--questions=6']) == 0
  again = capfd.readouterr()
  assert again.out == first.out and again.err.count('finished before') == 2


def test_questions_of_another_choice_are_not_used_again(tmp_path):
  choice = questions.Choice(64, 100, 32, 0.2, 0.8)
  (tmp_path / 'questions.jsonl').write_text('{}\n')
  (tmp_path / 'choice.json').write_text(json.dumps(vars(choice)))
  make = functools.partial(questions.make, None, 0, '', '', folder=tmp_path)
  assert make(choice=choice) == str(tmp_path / 'questions.jsonl')
  other = dataclasses.replace(choice, low=0.4)
  with pytest.raises(ValueError, match='--workdir must be new for another'):
    make(choice=other)
