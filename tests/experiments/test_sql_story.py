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
  # Tango's intervals of 3 questions won and 1 lost, of 8 and of 16; and of 8
  # equal ones, z^2 / (8 + z^2) = 0.324.
  assert sql_story.differences(runs)[2:] == [
    '| a | grpo, not sft | sql | +25.0 (-25.6 to +63.8) |',
    '| b | grpo, not sft | sql | +0.0 (-32.4 to +32.4) |',
    '| all 2 | grpo, not sft | sql | +12.5 (-15.0 to +39.0) |',
  ]
  rates = '\n'.join(sql_story.rates(runs))
  assert '| a | nothing | sql | 0.0% ' in rates
  assert '| mean of 2 | grpo | sql | 75.0% |' in rates
