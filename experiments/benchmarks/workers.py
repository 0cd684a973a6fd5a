"""Episodes per second of an environment that waits: threads and Ray workers.

    python -m experiments.benchmarks.workers --episodes=128 --repeats=3
        [--workers=2,4] [--wait_ms=20]

The same episodes of `launch/cluster/waiting.py`, of three turns each, with
random weights and one engine, are played alternately by the threads of this
process and by Ray workers. Every step of the environment waits for `wait_ms`.

Prints one JSON line per way: seconds until the first episodes of the workers
ended (Ray and the workers start), the median of episodes per second, and its
ratio to threads within a repeat. The tokens must be equal.
"""

import argparse
import dataclasses
import statistics
import time

import jax

from experiments.benchmarks import timing
from posttrain import main as posttrain_main
from posttrain.models import transformer
from posttrain.rollout import driver
from posttrain.stage import components as components_lib
from posttrain.stage import models as stage_models

RECIPE = 'experiments/launch/cluster/waiting.py'


def parse(argv):
  """Reads the command line."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--episodes', type=int, default=128)
  parser.add_argument('--slots', type=int, default=64)
  parser.add_argument('--repeats', type=int, default=3)
  parser.add_argument('--workers', default='2,4')
  parser.add_argument('--wait_ms', type=float, default=20.0)
  return parser.parse_args(argv)


def components(args, rollout: dict) -> components_lib.Components:
  """Returns the stage's components with some rollout options."""
  run = posttrain_main.load(RECIPE)
  stage = run.stages['grpo']
  entry = stage.envs['sort']
  kwargs = {**entry.env.kwargs, 'seconds': args.wait_ms / 1e3}
  entry = dataclasses.replace(
    entry, env=dataclasses.replace(entry.env, kwargs=kwargs)
  )
  options = {'num_workers': 4, 'slots': args.slots, **rollout}
  stage = dataclasses.replace(
    stage,
    envs={'sort': entry},
    rollout=dataclasses.replace(stage.rollout, **options),
  )
  return components_lib.make(
    dataclasses.replace(run, stages={'grpo': stage}), 'grpo'
  )


def main(argv=None) -> None:
  """Prints the rows of all ways."""
  args = parse(argv)
  ways = {'threads': {}} | {
    f'ray {n}': {'workers': 'ray', 'num_workers': int(n)}
    for n in args.workers.split(',')
  }
  stages = {name: components(args, rollout) for name, rollout in ways.items()}
  first = stages['threads']
  engine = stage_models.engine(first)
  engine.set_params(transformer.init(jax.random.key(0), first.model), 0)
  env = first.data.envs['sort']
  specs = [
    driver.EpisodeSpec(uid, env, task, 1.0, 12)
    for uid, task in enumerate(env.source('train', 0).take(args.episodes))
  ]
  drivers = {k: stage_models.driver(x, engine) for k, x in stages.items()}
  tokens, starts, walls = {}, {}, {name: [] for name in ways}
  for repeat in range(args.repeats + 1):
    for name, one in drivers.items():
      begin = time.perf_counter()
      rollouts = one.run(specs)
      seconds = time.perf_counter() - begin
      tokens[name] = [x.samples[0].ids.tolist() for x in rollouts]
      assert tokens[name] == tokens['threads'], f'{name} must play the same'
      if repeat:
        walls[name].append(seconds)
      else:
        starts[name] = seconds
  for name, seconds in walls.items():
    rates = [args.episodes / x for x in seconds]
    ratios = [a / b for a, b in zip(walls['threads'], seconds, strict=True)]
    timing.emit(
      way=name,
      first_s=timing.rounded(starts[name]),
      episodes_per_s=timing.rounded(statistics.median(rates)),
      to_threads=timing.rounded(statistics.median(ratios)),
      least=timing.rounded(min(ratios)),
      most=timing.rounded(max(ratios)),
    )
  timing.emit_matmul()


if __name__ == '__main__':
  main()
