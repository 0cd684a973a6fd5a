"""Episodes per second of an environment that waits: threads and Ray workers.

    python -m experiments.benchmarks.workers --episodes=128 --repeats=3
        [--workers=2,4] [--wait_ms=20]

The same episodes of `launch/cluster/waiting.py`, of three turns each, with
random weights and one engine, are played alternately by the threads of this
process and by Ray workers. Every step of the environment waits for `wait_ms`.

Prints a row per way, see `episodes.play`; the tokens are equal.
"""

import argparse

import jax

from experiments.benchmarks.episodes import play
from posttrain import main as program
from posttrain.models import transformer
from posttrain.rollout import episodes
from posttrain.stage import models as stage_models
from posttrain.stage import preflight

RECIPE = 'experiments/launch/cluster/waiting.py'


def main(argv=None) -> None:
  """Prints the rows of all ways."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--episodes', type=int, default=128)
  parser.add_argument('--slots', type=int, default=64)
  parser.add_argument('--repeats', type=int, default=3)
  parser.add_argument('--workers', default='2,4')
  parser.add_argument('--wait_ms', type=float, default=20.0)
  args = parser.parse_args(argv)
  stages = {}
  for count in (0, *map(int, args.workers.split(','))):
    overrides = {
      'grpo.envs.sort.env.kwargs.seconds': args.wait_ms / 1e3,
      'grpo.rollout.slots': args.slots,
      'grpo.rollout.workers': 'ray' if count else 'threads',
      'grpo.rollout.num_workers': count or 4,
    }
    run = program.load(RECIPE, [(k, str(x)) for k, x in overrides.items()])
    name = f'ray {count}' if count else 'threads'
    stages[name] = preflight.make(run, 'grpo')
  first = stages['threads']
  engine = stage_models.engine(first)
  engine.set_params(transformer.init(jax.random.key(0), first.model), 0)
  environment = first.data.environments['sort']
  tasks = environment.env.source('train', 0).take(args.episodes)
  specs = [
    episodes.EpisodeSpec(uid, environment.env, task, 1.0, 12)
    for uid, task in enumerate(tasks)
  ]
  drivers = {k: stage_models.driver(x, engine) for k, x in stages.items()}
  play(drivers, specs, args.repeats)


if __name__ == '__main__':
  main()
