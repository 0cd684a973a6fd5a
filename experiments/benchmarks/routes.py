"""Mismatch of sampler and trainer with experts: routes recorded and replayed.

    python -m experiments.benchmarks.routes --workdir=runs/routes --steps=20

GRPO from random weights, of a model of Qwen3-MoE's kind with 32 experts, which
is rewarded for digits: in float32 and bfloat16, with `model.routes` record and
replay. Prints a row per run, means over its steps.
"""

import argparse
import json
import pathlib
from typing import Any

from posttrain import main as program
from posttrain import schema

NAMES = 'router/flipped', 'mismatch/abs_mean', 'mismatch/max', 'mismatch/k3'
EXPERTS = schema.Experts(count=32, per_token=4, mlp_dim=64)


def digits(completions: list[Any], **_: Any) -> list[float]:
  """Returns the shares of digits in the completions."""
  texts = [x if isinstance(x, str) else x[-1]['content'] for x in completions]
  return [sum(map(str.isdigit, x)) / max(len(x), 1) for x in texts]


def make(dtype: str, routes: str, steps: int) -> schema.Run:
  """Returns the options of a run."""
  model = schema.Model(
    layers=6, qk_norm=True, experts=EXPERTS, dtype=dtype, routes=routes
  )
  fn = schema.RewardFn(fn='experiments.benchmarks.routes:digits')
  entry = schema.EnvEntry(
    env=schema.Arithmetic(),
    algorithm=schema.Grpo(),
    sampler=schema.Policy(max_tokens=24),
    group_size=8,
    rewards={'digits': fn},
  )
  stage = schema.Stage(
    envs={'arithmetic': entry},
    steps=steps,
    batch=schema.Batch(
      prompts_per_step=8, row_tokens=64, micro_batch_tokens=2048
    ),
    rollout=schema.Rollout(slots=64),
    optim=schema.Optim(lr=1e-3, schedule='constant'),
    eval=schema.Eval(every=None),
  )
  return schema.Run(
    model=model, stages={'grpo': stage}, metrics=schema.Metrics(progress=False)
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--workdir', required=True)
  parser.add_argument('--steps', type=int, default=20)
  flags = parser.parse_args()
  print('| dtype | model.routes |', ' | '.join(NAMES), '|')
  for dtype in ('float32', 'bfloat16'):
    for routes in ('record', 'replay'):
      folder = pathlib.Path(flags.workdir) / f'{dtype}-{routes}'
      program.train(make(dtype, routes, flags.steps), str(folder))
      lines = (folder / 'metrics.jsonl').read_text().splitlines()
      rows = [x for x in map(json.loads, lines) if NAMES[1] in x]
      means = [sum(row[name] for row in rows) / len(rows) for name in NAMES]
      print('|', dtype, '|', routes, '|', *(f'{x:.2g} |' for x in means))


if __name__ == '__main__':
  main()
