"""It learns what can be known, and no more; the main job does its job."""

import json
import math

import pytest

from posttrain import main, schema
from posttrain.metrics import writers
from tests import toys

COIN = 0.75  # how often the answer is 'a'


def test_the_loss_falls_to_the_entropy_of_the_data(tmp_path):
  """A biased coin: the best loss is its entropy, spread over two tokens.

  The answer is one letter, `a` three times of four, and the end of the turn,
  which is certain: H = -(3/4 ln 3/4 + 1/4 ln 1/4) = 0.5623 nats, 0.2812 a
  token. Below it would be a leak of the label; above it, not learned.
  """
  rows = [{'prompt': 'Toss.', 'completion': c} for c in 'aaab']
  path = tmp_path / 'coin.jsonl'
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  coin = schema.EnvEntry(env=schema.Rows(path=str(path)))
  stage = schema.Stage(
    steps=80,
    envs={'coin': coin},
    batch=schema.Batch(
      prompts_per_step=8, row_tokens=64, micro_batch_tokens=128
    ),
    optim=schema.Optim(lr=1e-2, weight_decay=0.0),
    eval=schema.Eval(prompts=1, samples=0, max_tokens=4),
    rollout=schema.Rollout(slots=8, prefill_rows=4),
  )
  workdir = str(tmp_path / 'run')
  main.train(toys.run({'sft': stage}), workdir)
  rows = writers.read(workdir + '/metrics.jsonl')
  losses = [row.get('ce/nll') for row in rows]
  entropy = -(COIN * math.log(COIN) + (1 - COIN) * math.log(1 - COIN)) / 2
  # Every batch is two whole epochs of the four rows: no sampling noise.
  assert losses[-1] == pytest.approx(entropy, rel=0.01)
  assert min(losses[1:]) > entropy - 1e-4


@pytest.mark.slow
@pytest.mark.parametrize('seed', [0, 1, 2])
def test_the_main_job(tmp_path, capsys, seed):
  """SFT gets some answers right, GRPO nearly all."""
  assert toys.command('arithmetic', tmp_path, f'--config.seed={seed}') == 0
  first, *_, last = (
    {key.split('/')[1]: x for key, x in row.items() if key[:5] == 'eval/'}
    for row in writers.read(str(tmp_path / 'metrics.jsonl'))
    if row['stage'] == 'grpo' and 'eval/pass_rate/arithmetic' in row
  )
  assert first['sampled_pass_rate'] <= 0.7
  assert last['sampled_pass_rate'] >= max(
    0.8, first['sampled_pass_rate'] + 0.15
  )
  assert last['pass_rate'] >= max(0.94, first['pass_rate'])
  assert last['pass@8'] >= first['pass@8'] - 0.02


@pytest.mark.slow
@pytest.mark.parametrize('seed', [0, 1, 2])
def test_sft_alone_has_a_pass_rate_of_0_9(tmp_path, capsys, seed):
  assert toys.command('arithmetic_sft', tmp_path, f'--config.seed={seed}') == 0
  final = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert final['eval/format_rate/arithmetic'] >= 0.99
  assert final['eval/pass_rate/arithmetic'] >= 0.9
