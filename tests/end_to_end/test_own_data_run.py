"""Recipes for own data: what a user names, and the numbers that come out."""

import json

import jax
import numpy as np
import pytest

from posttrain import evaluate
from posttrain.chat import rendering
from posttrain.checkpoints import policies
from posttrain.metrics import writers
from posttrain.models import transformer
from posttrain.scoring import next_logits
from tests import toys

ROWS = [{'prompt': f'{i}?', 'completion': f'{i}!'} for i in range(40)]


def final(capsys):
  return json.loads(capsys.readouterr().out.splitlines()[-1])


class Tracker:
  """A tracker of this file: (step, loss) of each row."""

  rows = []

  def start(self, name, config, workdir):
    assert config['metrics']['trackers'] == [f'{__name__}:Tracker']

  def log(self, step, values):
    self.rows.append((step, values.get('loss/total')))

  def finish(self):
    self.rows.append('finished')


def test_sft_reports_the_loss_on_held_out_rows(tmp_path, capsys):
  """Against float64 log-softmax of a whole forward pass, row by row."""
  data, held_out = tmp_path / 'a.jsonl', tmp_path / 'b.jsonl'
  data.write_text('\n'.join(map(json.dumps, ROWS[:30])))
  held_out.write_text('\n'.join(map(json.dumps, ROWS[30:32])))
  run = str(tmp_path / 'run')
  assert not toys.command(
    f'sft:tiny,{data},{held_out}',
    run,
    '--config.sft.eval.suite=()',
    f'--config.metrics.trackers=("{__name__}:Tracker",)',
  )
  out, err = capsys.readouterr()
  (line,) = out.splitlines()  # nothing else on stdout
  last = json.loads(line)
  rows = writers.read(f'{run}/metrics.jsonl')
  tracked = [(row['step'], row.get('loss/total')) for row in rows]
  assert [*tracked, 'finished'] == Tracker.rows
  assert err.startswith('run\n  device ')
  assert f'report: {run}/report.html' in err
  assert last['eval/nll/data'] < rows[0]['eval/nll/data']
  policy = policies.load(run)
  total, hits, count = 0.0, 0, 0
  for row in ROWS[30:32]:
    messages = [
      {'role': 'user', 'content': row['prompt']},
      {'role': 'assistant', 'content': row['completion']},
    ]
    (part,) = policy.renderer.demonstrate(messages, 1)
    logits = forward(policy, part)
    for t in np.flatnonzero(part.sampled):
      total += np.log(np.exp(logits[t - 1]).sum()) - logits[t - 1, part.ids[t]]
      hits += logits[t - 1].argmax() == part.ids[t]
      count += 1
  assert last['eval/token_accuracy/data'] == pytest.approx(hits / count)
  assert last['eval/nll/data'] == pytest.approx(total / count, rel=1e-4)
  assert evaluate.main([f'--checkpoint={run}', f'--against={run}']) == 0
  compared = final(capsys)
  assert compared['eval/nll/data'] == pytest.approx(last['eval/nll/data'])
  assert compared['difference/nll/data'] == 0.0


def forward(policy, part: rendering.Rendered) -> np.ndarray:
  """Returns the logits of all positions, f64[T, V]."""
  ids = np.array(part.ids)[None]
  hidden, _ = jax.jit(transformer.trunk, static_argnums=1)(
    policy.params,
    policy.model,
    ids,
    np.arange(ids.size)[None],
    np.ones_like(ids),
  )
  logits = next_logits(policy.params, policy.model, hidden)
  return np.asarray(jax.device_get(logits), np.float64)[0]


@pytest.mark.slow
def test_grpo_on_own_prompts_and_an_own_function(tmp_path, monkeypatch, capsys):
  """Prompts of a table; its columns are arguments."""
  (tmp_path / 'mine.py').write_text(
    'def has(prompts, completions, letter, **columns):\n'
    '  return [float(a in b) for a, b in zip(letter, completions)]\n'
  )
  monkeypatch.syspath_prepend(str(tmp_path))
  data = tmp_path / 'a.csv'
  data.write_text('prompt,letter\n' + ''.join(f'{i}?,e\n' for i in range(30)))
  run = str(tmp_path / 'run')
  assert not toys.command(f'grpo:mine:has,tiny,{data}', run)
  last = final(capsys)
  assert 0 <= last['eval/reward/has/data'] <= 1
  assert 'eval/nll/data' not in last
  rows = [x for x in writers.read(f'{run}/metrics.jsonl') if x['step']]
  assert all('rollout/reward/data' in row for row in rows)
  assert not any(row['rewards/has/faults/data'] for row in rows)
