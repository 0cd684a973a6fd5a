"""Recipes for own data: what a user names, and the numbers that come out."""

import json

import jax
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv, parquet

from posttrain import evaluate, main
from posttrain.chat import rendering
from posttrain.checkpoints import policies
from posttrain.metrics import writers
from posttrain.models import transformer
from posttrain.scoring import next_logits

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
  assert not main.main(
    [
      f'--config=sft:tiny,{data},{held_out}',
      f'--workdir={run}',
      '--config.compilation_cache=None',
      '--config.metrics.progress=False',
      '--config.sft.eval.suite=()',
      f'--config.metrics.trackers=("{__name__}:Tracker",)',
    ]
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
  hidden, _ = transformer.trunk(
    policy.params,
    policy.model,
    ids,
    np.arange(ids.size)[None],
    np.ones_like(ids),
  )
  logits = next_logits(policy.params, policy.model, hidden)
  return np.asarray(jax.device_get(logits), np.float64)[0]


def write(path, rows):
  """Writes rows as the ending of the path says."""
  if path.suffix == '.parquet':
    parquet.write_table(pa.Table.from_pylist(rows), path)
  else:
    csv.write_csv(pa.Table.from_pylist(rows), path)


@pytest.mark.slow
@pytest.mark.parametrize(
  'name, as_text', [('a.csv', True), ('a.parquet', False)]
)
def test_grpo_on_own_prompts_and_an_own_function(
  tmp_path, monkeypatch, capsys, name, as_text
):
  """Strings where prompts are strings, else messages; columns are arguments."""
  # Its own name in each case: workers keep the modules that they have.
  module = f'mine_{name[2:]}'
  (tmp_path / f'{module}.py').write_text(
    'def has(prompts, completions, letter, **columns):\n'
    f'  kind = {"str" if as_text else "list"}\n'
    '  assert all(isinstance(x, kind) for x in (*prompts, *completions))\n'
    '  texts = [x if kind is str else x[0]["content"] for x in completions]\n'
    '  return [float(a in b) for a, b in zip(letter, texts)]\n'
  )
  monkeypatch.syspath_prepend(str(tmp_path))
  prompts = [f'{i}?' for i in range(30)]
  if not as_text:
    prompts = [[{'role': 'user', 'content': x}] for x in prompts]
  write(tmp_path / name, [{'prompt': x, 'letter': 'e'} for x in prompts])
  run = str(tmp_path / 'run')
  assert not main.main(
    [
      f'--config=grpo:{module}:has,tiny,{tmp_path / name}',
      f'--workdir={run}',
      '--config.compilation_cache=None',
      '--config.metrics.progress=False',
    ]
  )
  last = final(capsys)
  assert 0 <= last['eval/reward/has/data'] <= 1
  assert 'eval/nll/data' not in last
  rows = [x for x in writers.read(f'{run}/metrics.jsonl') if x['step']]
  assert all('rollout/reward/data' in row for row in rows)
  assert not any(row['rewards/has/faults/data'] for row in rows)
