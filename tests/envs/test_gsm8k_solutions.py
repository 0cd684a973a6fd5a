"""GSM8K's model solutions as preferences."""

import json
import os

import pytest

from posttrain import schema
from posttrain.envs import gsm8k, gsm8k_solutions


def _write(path, **more):
  row = {
    'question': 'How many?',
    'ground_truth': 'A: 4',
    'a': {'is_correct': True, 'solution': '2 + 2 = <<2+2=4>>4\nA: 4'},
    'b': {'is_correct': False, 'solution': '2 + 2 = 5\nA: 5'},
    'c': {'is_correct': False, 'solution': '2 + 2 = 5\nA: 5'},
    'd': {'is_correct': False, 'solution': 'A: -1,000'},
    **more,
  }
  path.write_text(json.dumps(row) + '\n')
  return path


def test_each_correct_solution_is_preferred_to_each_wrong_one(tmp_path):
  first, second = gsm8k_solutions.read(_write(tmp_path / 's.jsonl'))
  asks = f'How many?\n\n{schema.Gsm8k.instruction}'
  assert first.prompt == second.prompt == ({'role': 'user', 'content': asks},)
  right = '2 + 2 = 4\nThe answer is \\boxed{4}.'
  assert first.chosen == ({'role': 'assistant', 'content': right},)
  assert first.rejected[0]['content'] == '2 + 2 = 5\nThe answer is \\boxed{5}.'
  assert second.rejected[0]['content'] == 'The answer is \\boxed{-1,000}.'


@pytest.mark.parametrize(
  ('more', 'message'),
  [
    ({'question': ''}, r's\.jsonl:1: question must be a string with text'),
    ({'a': {'is_correct': 1, 'solution': 'A: 4'}}, 'is_correct must be true'),
    ({'a': {'is_correct': True, 'solution': None}}, 'solution must be a str'),
  ],
)
def test_a_malformed_row_is_named(tmp_path, more, message):
  with pytest.raises(ValueError, match=message):
    gsm8k_solutions.read(_write(tmp_path / 's.jsonl', **more))


def test_the_real_file():
  root = os.environ.get('POSTTRAIN_DATA')
  if not root:
    pytest.skip('POSTTRAIN_DATA is not set')
  made = gsm8k_solutions.read(f'{root}/gsm8k/example_model_solutions.jsonl')
  # 2,429, of which three have the same words twice.
  assert len(made) == 2426 and len({str(x.prompt) for x in made}) == 731
  for pair in made:
    answers = [
      gsm8k.grade(turns[0]['content'], '0', lenient=False).formatted
      for turns in (pair.chosen, pair.rejected)
    ]
    assert answers[0] or 'boxed' not in pair.chosen[0]['content']
