"""Learning of a tiny hybrid and a tiny mixture of experts, with LoRA.

    python -m experiments.benchmarks.families --workdir=DIR --seeds=0,1,2

The arithmetic of `configs/arithmetic.py` in three stages: SFT of all weights,
cut short, stands for the pretraining; SFT with LoRA goes on from it; then GRPO
with LoRA. `hybrid` has Qwen3.5's layers, three of DeltaNet and one of gated
attention; `experts` has Qwen3-MoE's, whose sampled routes are replayed. Prints
a row per stage and run: pass rates on unseen questions, and means over the
steps of GRPO. A run that is there already is read, or continued.
"""

import argparse
import dataclasses
import json
import os

from configs import arithmetic
from posttrain import main as program
from posttrain import schema

MODELS = {
  'hybrid': schema.Model(
    layers=4,
    delta_layers=(0, 1, 2),
    attention_gate=True,
    qk_norm=True,
    norm_offset=True,
    partial_rotary=0.25,
  ),
  'experts': schema.Model(
    qk_norm=True,
    experts=schema.Experts(count=8, per_token=2, mlp_dim=192),
    routes='replay',
  ),
}
LORA = schema.Lora(rank=16)
RATES = 'eval/sampled_pass_rate/arithmetic', 'eval/pass_rate/arithmetic'
MEANS = 'mismatch/abs_mean', 'router/flipped'


def make(model: schema.Model, seed: int) -> schema.Run:
  """Returns the options of a run."""
  measured = dataclasses.replace(arithmetic.EVAL, prompts=250, samples=4)
  sft = dataclasses.replace(arithmetic.SFT, eval=measured)
  grpo = arithmetic.GRPO
  stages = {
    'start': dataclasses.replace(sft, steps=200),
    'sft': dataclasses.replace(
      sft,
      init='stage:start',
      steps=100,
      lora=LORA,
      optim=dataclasses.replace(sft.optim, lr=4e-3),
    ),
    'grpo': dataclasses.replace(
      grpo,
      steps=60,
      lora=LORA,
      batch=dataclasses.replace(grpo.batch, prompts_per_step=32),
      rollout=dataclasses.replace(grpo.rollout, slots=192),
      optim=dataclasses.replace(grpo.optim, lr=2e-3),
      eval=measured,
    ),
  }
  return schema.Run(
    seed=seed,
    model=model,
    stages=stages,
    checkpoint=schema.Checkpoint(every=100),
    metrics=schema.Metrics(progress=False),
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--workdir', required=True)
  parser.add_argument('--models', default='hybrid,experts')
  parser.add_argument('--seeds', default='0,1,2')
  flags = parser.parse_args()
  print('| model | seed | stage | sampled | greedy |', ' | '.join(MEANS), '|')
  for name in flags.models.split(','):
    for seed in map(int, flags.seeds.split(',')):
      folder = os.path.join(flags.workdir, f'{name}-{seed}')
      program.train(make(MODELS[name], seed), folder)
      with open(os.path.join(folder, 'metrics.jsonl')) as file:
        records = [json.loads(line) for line in file]
      for stage in ('start', 'sft', 'grpo'):
        rows = [x for x in records if x.get('stage') == stage]
        last = [x for x in rows if RATES[0] in x][-1]
        cells = [f'{last[key]:.3f}' for key in RATES]
        for key in MEANS:
          values = [x[key] for x in rows if key in x]
          cells.append(f'{sum(values) / len(values):.2g}' if values else '')
        print('|', name, '|', seed, '|', stage, '|', ' | '.join(cells), '|')


if __name__ == '__main__':
  main()
