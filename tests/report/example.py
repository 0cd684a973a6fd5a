"""A run for the tests of the report."""

import json

import numpy as np


def lines(rows):
  return ''.join(json.dumps(row) + '\n' for row in rows)


def save(folder, name, rows):
  (folder / 'rollouts').mkdir(exist_ok=True)
  (folder / 'rollouts' / f'{name}.jsonl').write_text(lines(rows))


def make_run(folder, seed=0):
  """A run with gaps, intervals and hostile names."""
  rng, rows, elapsed = np.random.default_rng(seed), [], 0.0
  for stage in ('sft', 'grpo'):
    for step in range(31):
      elapsed += 1.5
      row = {'stage': stage, 'step': step, 'time/elapsed': elapsed}
      if step:
        row |= {
          'loss/total': 2.0 + rng.random(),
          'batch/tokens': 100,
          'mine/<img src=x onerror=alert(1)>': -1.0,
          'time/update': 0.2 + 3.0 * (step == 1),
          'time/compile': 3.0 * (step == 1),
          'time/tokens_per_second': 20_000 + step,
          'compiles': 1,
        }
      if 10 < step < 20:
        row['loss/total'] = None
      if step % 10 == 0:
        rate = step / 40 + seed / 10
        row |= {'eval/pass_rate/sums': rate, 'eval/pass_rate/<b>x': rate / 2}
        row['eval/pass_rate_low/sums'] = rate - 0.1
        row['eval/pass_rate_high/sums'] = rate + 0.1
      rows.append(row)
  (folder / 'rollouts').mkdir(parents=True)
  (folder / 'metrics.jsonl').write_text(lines(rows))
  message = {'role': 'assistant', 'content': '</script><b>hi'}
  row = {'env': 'sums', 'task': 't', 'completion': [message]}
  save(
    folder,
    'grpo_train_000001',
    [
      row | {'group': i // 4, 'reward': float(i % 4 > i // 8)}
      for i in range(16)
    ],
  )
  return folder
