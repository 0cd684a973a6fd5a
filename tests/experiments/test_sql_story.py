"""Rates, differences and transcripts as Markdown, of handwritten runs."""

import json

from experiments.examples import sql_story


def make_run(folder, stages):
  """Writes a run; `stages`: name -> whether each question was right."""
  (folder / 'rollouts').mkdir(parents=True)
  first = next(iter(stages))
  ends = [(first, 0, [False] * 8), *((n, 9, r) for n, r in stages.items())]
  rows = [{'stage': name, 'step': step} for name, step, _ in ends]
  (folder / 'metrics.jsonl').write_text('\n'.join(map(json.dumps, rows)) + '\n')
  for name, step, right in ends:
    lines = [
      json.dumps({'env': 'sql', 'id': str(i), 'correct': x}) + '\n'
      for i, x in enumerate(right)
    ]
    path = folder / 'rollouts' / f'{name}_eval_{step:06}.jsonl'
    path.write_text(''.join(lines))
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
