"""Rates, differences and transcripts as Markdown, of handwritten runs."""

import json
import types

import pytest

from experiments.examples import sql_story


@pytest.mark.parametrize(
  'right, count, text',
  [
    # middle (0.5 + 0.19208) / 1.38416, half 0.26340
    (5, 10, '50.0% (23.7% to 76.3%)'),
    (0, 10, '0.0% (0.0% to 27.8%)'),  # high z^2 / (n + z^2)
    (10, 10, '100.0% (72.2% to 100.0%)'),
  ],
)
def test_interval_is_wilsons(right, count, text):
  assert sql_story.interval(right, count) == text


def test_difference_is_paired():
  # 3 questions won, 1 lost, 4 alike: mean 0.25, variance (4 - 8 / 16) / 7,
  # which is 0.5, half 1.96 sqrt(0.5 / 8) = 0.49.
  pairs = [(False, True)] * 3 + [(True, False)] + [(True, True)] * 4
  assert sql_story.difference(pairs) == '+25.0 (-24.0 to +74.0) points'
  reverse = [(after, before) for before, after in pairs]
  assert sql_story.difference(reverse) == '-25.0 (-74.0 to +24.0) points'
  equal = [(True, True)] * 2
  assert sql_story.difference(equal) == '+0.0 points'


def make_run(folder, stages):
  """Writes a run; `stages`: name -> whether each question was right."""
  (folder / 'rollouts').mkdir(parents=True)
  first = next(iter(stages))
  rows = [{'stage': first, 'step': 0}]
  rows += [{'stage': name, 'step': 9} for name in stages]
  (folder / 'metrics.jsonl').write_text('\n'.join(map(json.dumps, rows)) + '\n')
  for name, step, right in (
    (first, 0, [False] * 8),
    *((n, 9, r) for n, r in stages.items()),
  ):
    path = folder / 'rollouts' / f'{name}_eval_{step:06}.jsonl'
    path.write_text(
      ''.join(
        json.dumps({'env': 'sql', 'id': str(i), 'correct': x}) + '\n'
        for i, x in enumerate(right)
      )
    )
  return folder


def test_differences_are_between_the_last_two_stages(tmp_path):
  sft = [False] * 3 + [True] * 5
  grpo = [True] * 3 + [False] + [True] * 4
  runs = [
    make_run(tmp_path / 'a', {'sft': sft, 'grpo': grpo}),
    make_run(tmp_path / 'b', {'sft': sft, 'grpo': sft}),
  ]
  one = '| a | grpo, not sft | sql | +25.0 (-24.0 to +74.0) points |'
  assert sql_story.differences(runs[:1]).splitlines()[2:] == [one]
  # 16 questions: mean 0.125, variance (4 - 16 / 64) / 15 = 0.25,
  # half 1.96 * 0.5 / 4 = 0.245.
  assert sql_story.differences(runs).splitlines()[2:] == [
    one,
    '| b | grpo, not sft | sql | +0.0 points |',
    '| all 2 | grpo, not sft | sql | +12.5 (-12.0 to +37.0) points |',
  ]
  assert '| a | nothing | sql | 0.0% ' in sql_story.rates(runs)
  assert '| mean of 2 | grpo | sql | 75.0% |' in sql_story.rates(runs)


def test_one_stage_has_no_differences(tmp_path):
  assert not sql_story.differences([make_run(tmp_path, {'sft': [True] * 8})])


def test_attempts_are_columns_and_turns_are_rows():
  task = types.SimpleNamespace(
    prompt=({'content': 'how many dogs\ntables: dogs\nleft: 8'},), answer=7
  )
  turns = [
    {'role': 'assistant', 'content': 'QUERY\nSELECT a || b FROM `dogs`'},
    {'role': 'tool', 'content': 'result: <b> | 2\nx_y\nleft: 7'},
    {'role': 'assistant', 'content': ''},
  ]
  short = [{'role': 'assistant', 'content': 'ANSWER 7'}]
  table = sql_story._side_by_side(
    task,
    {
      'before': {'messages': turns, 'correct': False},
      'after': {'messages': short, 'correct': True},
    },
  )
  assert table.splitlines() == [
    '**how many dogs; tables: dogs; left: 8** (expected: `7`)',
    '',
    '| before | after |',
    '|---|---|',
    r'| `QUERY`<br>`` SELECT a \|\| b FROM `dogs` `` | `ANSWER 7` |',
    r'| result: \<b\> \| 2<br>x\_y | **right** |',
    '| (empty) |  |',
    '| **wrong** |  |',
  ]
