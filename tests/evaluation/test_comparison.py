"""Measurements as a table and as JSON, of one policy and of two."""

import json

import pytest

from posttrain.evaluation import answers, comparison, measures
from posttrain.metrics import estimates


def answer(id, correct, sampled=(), env='sums'):
  values, _ = measures.grouped([correct, *sampled], [1, len(sampled)])
  known = zip(('pass_rate', 'sampled_pass_rate'), values, strict=True)
  known = {name: value for name, value in known if value is not None}
  return answers.Answer(env, str(id), '', '', measures=known)


def suite(*texts):
  return [
    answers.SuiteAnswer(f'prompt {i}', text, 'eos', len(text))
    for i, text in enumerate(texts)
  ]


def measured(correct, values=None, sampled=None, texts=()):
  pairs = zip(correct, sampled or [()] * len(correct), strict=True)
  played = [answer(i, *both) for i, both in enumerate(pairs)]
  return comparison.Measurement(values or {}, played, suite(*texts))


VALUES = {
  'eval/length/sums': 12.0,
  'eval/pass_rate/sums': 0.5,
  'eval/pass_rate_low/sums': 0.25,
  'eval/pass_rate_high/sums': 0.75,
  'eval/length/chat': 3.0,
}


def test_a_table_has_the_interval_next_to_its_value():
  lines = comparison.table(comparison.Measurement(VALUES, [], []))
  assert [line.split() for line in lines] == [
    ['metric', 'environment', 'value', '95', '%', 'interval'],
    ['length', 'sums', '12.0000'],
    ['pass_rate', 'sums', '0.5000', '[0.2500,', '0.7500]'],
    ['length', 'chat', '3.0000'],
  ]


def test_two_policies_are_compared_task_by_task():
  first = measured(
    [True, True, False, True, None],
    VALUES,
    [(True, True), (True, False), (), (None, True), (True,)],
  )
  second = measured(
    [False, True, False, None, True],
    {'eval/pass_rate/sums': 0.25},
    [(True, False), (True, False), (True,), (False, False), (False,)],
  )
  expected = dict(
    zip(
      (
        f'difference/{name}{side}/sums'
        for name in ('pass_rate', 'sampled_pass_rate')
        for side in ('', '_low', '_high')
      ),
      (
        *estimates.paired([1, 1, 0], [0, 1, 0]),
        *estimates.paired([1, 1 / 2, 1, 1], [1 / 2, 1 / 2, 0, 0]),
      ),
      strict=True,
    )
  )
  assert comparison.differences(first, second) == pytest.approx(expected)
  line = comparison.table(first, second)[2]
  assert line.split()[5:] == ['0.2500', '0.3333', '[-0.4153,', '0.7923]']


def test_without_two_tasks_graded_for_both_there_is_no_difference():
  ungraded, one = measured([None, None]), measured([True])
  assert comparison.differences(ungraded, ungraded) == {}
  assert comparison.differences(one, one) == {}


def test_every_environment_has_its_own_difference():
  first, second = (
    [answer(i // 2, x == 'ab'[i % 2], env='ab'[i % 2]) for i in range(4)]
    for x in 'ab'
  )
  first, second = (comparison.Measurement({}, x, []) for x in (first, second))
  values = comparison.differences(first, second)
  assert values['difference/pass_rate/a'] == 1
  assert values['difference/pass_rate/b'] == -1


def test_json_is_flat_and_has_the_suite():
  first = measured([True, True], VALUES, texts=['yes'])
  fields = {'prompt': 'prompt 0', 'stop_reason': 'eos', 'grades': {}}
  second = measured([False, False], {'eval/pass_rate/sums': 0.0}, texts=['no'])
  result = json.loads(json.dumps(comparison.to_json(first, second)))
  assert result == VALUES | {
    'suite': [fields | {'text': 'yes', 'tokens': 3}],
    'against/suite': [fields | {'text': 'no', 'tokens': 2}],
    'against/pass_rate/sums': 0.0,
    'difference/suite/length': 1.0,
    'difference/suite/truncated': 0.0,
    'difference/pass_rate/sums': 1.0,
    # Two tasks and no failure: (2 - z^2) / (2 + z^2).
    'difference/pass_rate_low/sums': pytest.approx(-0.315240, abs=1e-6),
    'difference/pass_rate_high/sums': 1.0,
  }


def test_answers_to_the_suite_are_side_by_side():
  first = measured([], texts=['one two three ' * 4 + '\nend', 'x'])
  second = measured([], texts=['short\x1b[2J', 'y'])
  assert comparison.suite(measured([])) == []
  lines = comparison.suite(first, second)
  assert 'short\ufffd[2J' in lines[3].split(' | ')[1]
  assert max(map(len, lines)) <= comparison.WIDTH
  alone = comparison.suite(measured([], texts=['\n' * 40 + 'end']))
  assert alone[-1] == '... 29 more lines' and len(alone) == 16
