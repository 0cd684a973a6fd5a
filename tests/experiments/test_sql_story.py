"""Rates, differences and transcripts as Markdown, of handwritten runs."""

import json
import types

from experiments.examples import sql_story


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
  # 3 questions won, 1 lost, 4 alike: mean 0.25, variance (4 - 8 / 16) / 7,
  # which is 0.5, half 1.96 sqrt(0.5 / 8) = 0.49; of 16 questions mean 0.125,
  # variance (4 - 16 / 64) / 15 = 0.25, half 1.96 * 0.5 / 4 = 0.245.
  assert sql_story.differences(runs)[2:] == [
    '| a | grpo, not sft | sql | +25.0 (-24.0 to +74.0) |',
    '| b | grpo, not sft | sql | +0.0 (+0.0 to +0.0) |',
    '| all 2 | grpo, not sft | sql | +12.5 (-12.0 to +37.0) |',
  ]
  rates = '\n'.join(sql_story.rates(runs))
  assert '| a | nothing | sql | 0.0% ' in rates
  assert '| mean of 2 | grpo | sql | 75.0% |' in rates
  (alone,) = [make_run(tmp_path / 'c', {'sft': [True] * 8})]
  assert not sql_story.differences([alone])


def test_attempts_are_columns_and_turns_are_rows():
  task = types.SimpleNamespace(
    prompt=({'content': 'how many dogs\ntables: dogs\nleft: 8'},), answer=7
  )
  turns = [
    {'role': 'assistant', 'content': 'QUERY SELECT a || b'},
    {'role': 'tool', 'content': 'result: <b> | 2\nx_y\nleft: 7'},
  ]
  short = [{'role': 'assistant', 'content': 'ANSWER 7'}]
  table = sql_story._side_by_side(
    task,
    {
      'before': {'messages': turns, 'correct': False},
      'after': {'messages': short, 'correct': True},
    },
  )
  assert table.splitlines()[2:] == [
    '| before | after |',
    '|---|---|',
    r'| <code>QUERY SELECT a \|\| b</code> | <code>ANSWER 7</code> |',
    r'| result: \<b\> \| 2<br>x\_y | **right** |',
    '| **wrong** |  |',
  ]
