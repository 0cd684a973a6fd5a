r"""GSM8K: rows become tasks, answers are graded by their number."""

import json
import os

import pytest

from posttrain import schema
from posttrain.envs import arithmetic, gsm8k, registry

DATA = os.environ.get('POSTTRAIN_DATA')
needs_data = pytest.mark.skipif(
  DATA is None, reason='POSTTRAIN_DATA (folder of real files) is unset'
)
ROWS = [
  {
    'question': 'How many clips?',
    'answer': 'In May 48/2 = <<48/2=24>>24.\nSo 48+24=<<72>>72.\n#### 72',
  },
  {'question': ' How cold? ', 'answer': 'Cold.\n####  -1,234.50 \n', 'no': 3},
]


def write(path, *rows):
  path.write_text(
    '\n'.join(row if isinstance(row, str) else json.dumps(row) for row in rows),
    encoding='utf-8',
  )
  return str(path)


@pytest.fixture
def path(tmp_path):
  return write(tmp_path / 'train.jsonl', *ROWS)


def make(path, **options):
  return registry.make('words', schema.Gsm8k(path=path, **options))


def test_tasks_of_rows(path):
  env = make(path, instruction='Box it.')
  first, second = env.source('train', 0).take(9)
  assert first.prompt == (
    {'role': 'user', 'content': 'How many clips?\n\nBox it.'},
  )
  assert first.demonstration == (
    {
      'role': 'assistant',
      'content': (
        'In May 48/2 = 24.\nSo 48+24=72.\nThe answer is \\boxed{72}.'
      ),
    },
  )
  assert (first.env, first.id, first.answer, first.info) == (
    'words',
    f'{path}:1',
    '72',
    {},
  )
  assert second.demonstration[0]['content'] == (
    'Cold.\nThe answer is \\boxed{-1234.50}.'
  )
  assert (second.answer, second.info) == ('-1234.50', {'no': 3})


@pytest.mark.parametrize(
  'text, strict, lenient, formatted',
  [
    (r'\boxed{\$72.00}', 1, 1, True),
    (r'72, so \boxed{x}', 0, 0, False),
    ('It is 72', 0, 1, False),
    ('so\n#### 72', 1, 1, False),
    ('\ud800\0', 0, 0, False),
  ],
)
def test_grade(text, strict, lenient, formatted):
  for option, reward in ((False, strict), (True, lenient)):
    score = gsm8k.grade(text, '72', lenient=option)
    assert score.reward == reward and score.correct is bool(reward)
    assert score.formatted is formatted


def test_evaluation_rows(path, monkeypatch):
  assert not len(make(path).source('eval', 0))
  monkeypatch.setenv('SOMEWHERE', path)
  assert len(make(path, eval_path='$SOMEWHERE').source('eval', 0)) == 2


@pytest.mark.parametrize(
  'row, words',
  [
    ('{"question": ', 'one JSON object'),
    ({'question': 'a'}, 'answer must be a string'),
    ({'question': 'a', 'answer': 'is 5'}, 'end in a line `#### N`'),
  ],
)
def test_errors_name_file_and_line(tmp_path, row, words):
  path = write(tmp_path / 'rows.jsonl', ROWS[0], '', row, ROWS[1])
  with pytest.raises(ValueError, match=f'^{path}:3: .*{words}'):
    make(path).source('train', 0)


SOLUTIONS = {
  'question': 'How many?',
  'ground_truth': 'A: 4',
  'a': {'is_correct': True, 'solution': '2 + 2 = <<2+2=4>>4\nA: 4'},
  'b': {'is_correct': False, 'solution': '2 + 2 = 5\nA: 5'},
  'c': {'is_correct': False, 'solution': 'A: -1,000'},
}


def test_each_correct_solution_is_preferred_to_each_wrong_one(tmp_path):
  path = write(tmp_path / 's.jsonl', SOLUTIONS)
  first, second = gsm8k.read_solutions(path)
  asks = f'How many?\n\n{schema.Gsm8k.instruction}'
  assert first.prompt == second.prompt == ({'role': 'user', 'content': asks},)
  right = '2 + 2 = 4\nThe answer is \\boxed{4}.'
  assert first.chosen == ({'role': 'assistant', 'content': right},)
  assert first.rejected[0]['content'] == '2 + 2 = 5\nThe answer is \\boxed{5}.'
  assert second.rejected[0]['content'] == 'The answer is \\boxed{-1,000}.'
  wrong = {**SOLUTIONS, 'a': {'is_correct': 1, 'solution': 'A: 4'}}
  with pytest.raises(ValueError, match=':1: is_correct must be true'):
    gsm8k.read_solutions(write(tmp_path / 'wrong.jsonl', wrong))


@needs_data
def test_real_files():
  """Each demonstration is a correct answer to its own task."""
  folder = f'{DATA}/gsm8k'
  env = make(f'{folder}/train.jsonl', lenient=False)
  tasks = env.source('train', 0).take(10_000)
  assert len({task.id for task in tasks}) == 7473
  for task in tasks:
    text = task.demonstration[0]['content']
    score = gsm8k.grade(text, task.answer, lenient=False)
    assert score.correct and score.formatted
    assert '<<' not in text and '####' not in text and ',' not in task.answer
  pairs = gsm8k.read_solutions(f'{folder}/example_model_solutions.jsonl')
  # 2,429, of which three have the same words twice.
  assert len(pairs) == 2426 and len({str(x.prompt) for x in pairs}) == 731


@pytest.mark.parametrize(
  ('text', 'reward'),
  [
    ('<think>\\boxed{4}', 0),
    ('<think>\\boxed{4}</think> It is four.', 0),
    ('so \\boxed{4}</think>', 0),
    ('<think>5</think> \\boxed{4}', 1),
  ],
)
def test_an_answer_within_a_thought_is_none(text, reward):
  grades = gsm8k.grade(text, '4', lenient=True), arithmetic.grade(text, 4)
  assert [score.reward for score in grades] == [reward] * 2
  assert [score.formatted for score in grades] == [bool(reward)] * 2
