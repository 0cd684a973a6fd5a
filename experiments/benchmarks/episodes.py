"""Episodes per second: slots held between turns against turns in lock-step.

    python -m experiments.benchmarks.episodes [--checkpoint=RUN]
        [--episodes=256] [--slots=256] [--repeats=3]

The same episodes of configs/sql.py, stage `grpo`, are run alternately by

    lock-step     all unfinished episodes generate a turn, each from its whole
                  history, prefilled anew; when the last of them has ended its
                  turn, all environments step, one after the other
    held          our driver: an episode that has ended its turn gets the
                  observation at once and continues in its slot; only the
                  observation is prefilled
    held overlap  the same with `rollout.overlap`

with one engine. RUN is a workdir of the recipe. Without it weights are random,
and episodes have 3 turns, because none of them ever answers.

Prints a row per design: medians over the repeats.
"""

import dataclasses

import jax
import numpy as np

from experiments.benchmarks import timing
from posttrain import main as program
from posttrain.checkpoints import policies
from posttrain.decode import requests
from posttrain.models import transformer
from posttrain.rollout import episodes
from posttrain.stage import models, preflight

GROUP = 8  # episodes of a task, as in the recipe


class LockStepEngine:
  """The other design: a turn of all episodes at a time, from scratch."""

  def __init__(self, engine):
    self._engine = engine
    self._queue: list[requests.Request] = []
    self._histories: dict[int, requests.Request] = {}  # up to the last turn

  def submit(self, request: requests.Request) -> None:
    self._queue.append(dataclasses.replace(request, hold=False))

  def extend(self, id: int, ids: np.ndarray, max_tokens: int) -> None:
    history = self._histories[id]
    whole = np.concatenate([history.ids, ids])
    self._queue.append(
      dataclasses.replace(history, ids=whole, max_tokens=max_tokens)
    )

  def poll(self) -> list[requests.Completion]:
    queue, self._queue = self._queue, []
    turns = self._engine.generate(queue)
    for request, turn in zip(queue, turns, strict=True):
      self._histories[request.id] = dataclasses.replace(
        request, ids=np.concatenate([request.ids, turn.ids])
      )
    return turns

  def release(self, id: int) -> None:
    del self._histories[id]


def main() -> None:
  """Prints the rows of all designs."""
  args = timing.parser(
    __doc__, checkpoint='', episodes=256, slots=256, repeats=3
  ).parse_args()
  overrides = [('grpo.rollout.slots', str(args.slots))]
  if not args.checkpoint:
    overrides.append(('grpo.envs.sql.env.budget', '3'))
  components = preflight.make(
    preflight.resolve(program.load('configs/sql.py', overrides)), 'grpo'
  )
  params = transformer.init(jax.random.key(0), components.model)
  if args.checkpoint:
    params = policies.load(args.checkpoint).params
  engine = models.make_engine(components)
  engine.set_params(params, 0)
  environment = components.data.environments['sql']
  specs, task = [], None
  for uid in range(args.episodes):
    task = task if uid % GROUP else next(environment.source)
    specs.append(environment.sampler.spec(task, uid))
  stage = components.stage
  overlap = dataclasses.replace(stage.rollout, overlap=True)

  def player(own, rollout):
    tokens = stage.batch.row_tokens
    return episodes.Driver(own, components.renderer, tokens, rollout)

  players = {
    'lock-step': player(LockStepEngine(engine), stage.rollout),
    'held': player(engine, stage.rollout),
    'held overlap': player(engine, overlap),
  }
  args.bench, args.shape, args.threads = 'episodes', 'recipe', None
  works = {
    name: lambda one=one: lambda: one.run(specs)
    for name, one in players.items()
  }
  timing.compare(args, works, len(specs), 'episodes')


if __name__ == '__main__':
  main()
