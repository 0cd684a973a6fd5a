"""A LoRA learns what its base cannot do, and the base stays as it was."""

import json

import jax
import numpy as np
import pytest

from posttrain import evaluate, main, schema, tree
from posttrain.checkpoints import store, weights
from posttrain.metrics import writers
from posttrain.stage import build

LORA = schema.Lora(rank=8, alpha=16.0)


def stage(op, init, steps, lr, lora):
  """SFT on worked sums, or on worked differences."""
  env = schema.Arithmetic(ops=(op,), train_tasks=4000)
  return schema.Stage(
    init=init,
    lora=lora,
    steps=steps,
    envs={'arithmetic': schema.EnvEntry(env=env)},
    batch=schema.Batch(
      prompts_per_step=32, row_tokens=64, micro_batch_tokens=1024
    ),
    optim=schema.Optim(lr=lr, warmup_steps=10, weight_decay=0.0),
    eval=schema.Eval(prompts=200, samples=0, max_tokens=40),
    rollout=schema.Rollout(slots=128, prefill_rows=32),
  )


def options(seed, steps=250, lr=5e-3, lora=LORA):
  """All weights learn '-', then a LoRA of them learns '+'."""
  none = schema.Lora()
  return schema.Run(
    seed=seed,
    model=schema.PRESETS['small'],
    compilation_cache=None,
    metrics=schema.Metrics(progress=False),
    stages={
      'base': stage('-', 'random', 250, 3e-3, none),
      'lora': stage('+', 'stage:base', steps, lr, lora),
    },
  )


def pass_rates(workdir):
  """Greedy pass rates by stage, at its start and its end."""
  found = {}
  for row in writers.read(f'{workdir}/metrics.jsonl'):
    if 'eval/pass_rate/arithmetic' in row:
      rates = found.setdefault(row['stage'], [])
      rates.append(row['eval/pass_rate/arithmetic'])
  return found


@pytest.mark.slow
@pytest.mark.parametrize('seed', [0])
def test_a_lora_learns_what_its_base_cannot_do(
  tmp_path, monkeypatch, capsys, seed
):
  """Measured, seeds 0, 1, 2: at most 0.01, then 0.995, 0.97, 0.915."""
  made, build_make = [], build.make

  def make(*args):
    job = build_make(*args)
    base = job.learner.base
    made.append((job, jax.device_get(base and base.params)))
    return job

  monkeypatch.setattr(build, 'make', make)
  main.train(options(seed), str(tmp_path))
  first, last = pass_rates(tmp_path)['lora']
  assert first <= 0.2 and last >= 0.8

  _, (job, before) = made
  trained = weights.load(
    weights.find(str(tmp_path / 'checkpoints/base')), job.learner.base.params
  )
  for after in (job.learner.base.params, trained):
    jax.tree.map(np.testing.assert_array_equal, before, after)

  step = tmp_path / f'checkpoints/lora/{options(seed).stages["lora"].steps}'
  adapter, _ = weights.adapter(str(step))
  saved = store._read_record(store.find(str(step)))['state_sums']
  assert {x for x in saved if x.startswith('params/')} == {
    f'params/{path}' for path in tree.flat(adapter)
  }
  mirrors = [x for x in saved if 'layers' in x or 'embed' in x or 'norm' in x]
  assert len(mirrors) == 3 * len(tree.flat(adapter))  # itself, two moments
  assert all(path.endswith(('kernel/a', 'kernel/b')) for path in mirrors)

  capsys.readouterr()
  assert evaluate.main([f'--checkpoint={tmp_path}']) == 0  # loads them merged
  values = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert values['eval/pass_rate/arithmetic'] == last
