"""Episodes per second: slots held between turns against turns in lock-step.

    python -m experiments.bench_episodes [--checkpoint=RUN] [--episodes=256]
        [--slots=256] [--repeats=3] [--slow_ms=20]

The same episodes of configs/sql.py, stage `grpo`, are played in turns by

    lock-step     all live episodes generate a turn, each from its whole
                  history, prefilled anew; when the last of them has ended its
                  turn, all environments step, one after the other
    held          our driver: who has ended a turn is answered at once, goes on
                  in its slot, and only what it was told is prefilled
    held overlap  the same with `rollout.overlap`

with one engine; `slow` ways have an environment that sleeps for `slow_ms` in
every step (0 = leave them out), and `slow threads` says that it is `blocking`.
RUN is a workdir of the recipe, or a stage's checkpoints in one. Without it
weights are random, and 3 turns have to do: nobody ever answers.

Prints a table of medians over the repeats; `to lock-step` is how many times as
fast a way is as lock-step with the same environment. `env` is the share of the
wall time in calls of environments (none in threads), `engine` in calls of the
engine, the device's work included; the rest is the driver's: transcripts,
tokenizing, waits for threads. With overlap the device works during all three.
Matrix products of another shape round differently, so a token may come out as
another: `other` counts the episodes that are not token for token as `held` has
them.
"""

import argparse
import dataclasses
import pathlib
import statistics
import sys
import time
from collections.abc import Callable

import jax
import numpy as np

import configs
from posttrain import main
from posttrain.checkpoints import policies
from posttrain.decode import requests
from posttrain.models import transformer
from posttrain.rollout import driver
from posttrain.stage import components
from posttrain.stage import models as stage_models
from posttrain.util import memory

GROUP = 8  # episodes of a task, as in the recipe


class LockStep:
  """The other design: a turn of all episodes at a time, from scratch."""

  def __init__(self, engine):
    self._engine = engine
    self._asked: list[requests.Request] = []
    self._histories: dict[int, requests.Request] = {}  # up to the last turn

  def submit(self, request: requests.Request) -> None:
    self._asked.append(dataclasses.replace(request, hold=False))

  def extend(self, id: int, ids: np.ndarray, max_tokens: int) -> None:
    history = self._histories[id]
    self._asked.append(
      dataclasses.replace(
        history, ids=np.concatenate([history.ids, ids]), max_tokens=max_tokens
      )
    )

  def poll(self) -> list[requests.Completion]:
    asked, self._asked = self._asked, []
    done = self._engine.generate(asked)
    for request, turn in zip(asked, done, strict=True):
      self._histories[request.id] = dataclasses.replace(
        request, ids=np.concatenate([request.ids, turn.ids])
      )
    return done

  def release(self, id: int) -> None:
    del self._histories[id]


class Watched:
  """An engine, and the seconds that were spent in it."""

  def __init__(self, engine):
    self.seconds, self._engine = 0.0, engine

  def __getattr__(self, name: str) -> Callable:
    call = getattr(self._engine, name)  # or it has none, and the driver asks

    def watched(*args):
      start = time.perf_counter()
      out = call(*args)
      self.seconds += time.perf_counter() - start
      return out

    return watched


@dataclasses.dataclass(frozen=True)
class Slow:
  """An environment whose steps wait."""

  env: object
  seconds: float
  blocking: bool

  @property
  def name(self) -> str:
    return self.env.name

  @property
  def max_turns(self) -> int:
    return self.env.max_turns

  def make(self, task):
    episode = self.env.make(task)
    step = episode.step

    def slow(text, truncated):
      time.sleep(self.seconds)
      return step(text, truncated)

    episode.step = slow
    return episode


class Way:
  """A way to play the episodes, and what was measured of it."""

  def __init__(self, engine, renderer, stage, plays, **options):
    """Args: plays: the episodes; options: of the rollout, in other ways."""
    self._watched, self._plays = Watched(engine), plays
    self._driver = driver.Driver(
      self._watched,
      renderer,
      stage.batch.row_tokens,
      dataclasses.replace(stage.rollout, **options),
    )
    self.said: dict[int, list[int]] = {}  # sampled tokens, by episode
    self.seconds: list[tuple[float, float, float]] = []  # wall, env, engine

  def run(self) -> None:
    self._watched.seconds = self._driver.env_seconds = 0.0
    start = time.perf_counter()
    rollouts = self._driver.run(self._plays)
    self.seconds.append(
      (
        time.perf_counter() - start,
        self._driver.env_seconds,
        self._watched.seconds,
      )
    )
    said = {r.uid: _sampled(r) for r in rollouts}
    assert self.said in ({}, said), 'a rerun must sample the same tokens'
    self.said = said

  @property
  def wall(self) -> float:
    return statistics.median(wall for wall, *_ in self.seconds)

  def row(self, lock_step: 'Way', held: 'Way') -> list[str]:
    """Returns its row of the table."""
    env, engine = (
      statistics.median(times[i] / times[0] for times in self.seconds)
      for i in (1, 2)
    )
    # Of the same repeat: whatever else the machine did, it did to both.
    ratio = statistics.median(
      theirs[0] / ours[0]
      for theirs, ours in zip(lock_step.seconds, self.seconds, strict=True)
    )
    other = sum(held.said[uid] != ids for uid, ids in self.said.items())
    tokens = sum(map(len, self.said.values()))
    return [
      f'{len(self.said) / self.wall:.1f}',
      f'{tokens / self.wall:.0f}',
      f'{ratio:.2f}',
      f'{env:.1%}',
      f'{engine:.1%}',
      f'{1 - env - engine:.1%}',
      str(other),
    ]


def _sampled(rollout) -> list[int]:
  assert rollout.error is None, rollout.error
  return [i for part in rollout.samples for i in part.ids[part.mask].tolist()]


def ways(args) -> dict[str, Way]:
  """Makes all ways to play the same episodes."""
  overrides = [('grpo.rollout.slots', str(args.slots))]
  if not args.checkpoint:
    overrides.append(('grpo.envs.sql.env.budget', '3'))
  recipe = pathlib.Path(configs.__file__).with_name('sql.py')
  run = main.load(str(recipe), overrides)
  stage, built = run.stages['grpo'], components.make(run, 'grpo')
  engine = stage_models.engine(run, stage, built)
  engine.set_params(_params(args.checkpoint, built.model), 0)
  entry = built.pipeline.envs['sql']
  plays, task = [], None
  for uid in range(args.episodes):
    task = task if uid % GROUP else next(entry.source)
    plays.append(entry.sampler.spec(task, uid))

  def way(engine, plays=plays, **options) -> Way:
    return Way(engine, built.renderer, stage, plays, **options)

  found = {
    'lock-step': way(LockStep(engine)),
    'held': way(engine),
    'held overlap': way(engine, overlap=True),
  }
  if args.slow_ms:
    slow, threads = (
      [dataclasses.replace(play, env=env) for play in plays]
      for blocking in (False, True)
      for env in [Slow(entry.env, args.slow_ms / 1000, blocking)]
    )
    found |= {
      'slow lock-step': way(LockStep(engine), slow),
      'slow held': way(engine, slow),
      'slow threads': way(engine, threads),
    }
  return found


def _params(path: str, model):
  """Weights of a checkpoint, or random ones.

  Raises:
    ValueError: the checkpoint is of another model.
  """
  if not path:
    return transformer.init(jax.random.key(0), model)
  policy = policies.load(path)
  if policy.model != model:
    raise ValueError(
      f'--checkpoint must be of configs/sql.py: got {policy.model!r}, '
      f'expected {model!r}; train it with that recipe'
    )
  return policy.params


def report(found: dict[str, Way], heading: str) -> None:
  head = (
    '',
    'episodes/s',
    'tokens/s',
    'to lock-step',
    'env',
    'engine',
    'rest',
    'other',
  )
  print(heading)
  print('| ' + ' | '.join(head) + ' |')
  print('|---' * len(head) + '|')
  for name, way in found.items():
    lock_step = found['slow lock-step' if 'slow' in name else 'lock-step']
    row = [name, *way.row(lock_step, found['held'])]
    print('| ' + ' | '.join(row) + ' |')


def run(argv: list[str]) -> None:
  parser = argparse.ArgumentParser(prog='python -m experiments.bench_episodes')
  parser.add_argument('--checkpoint', default='', metavar='RUN')
  for name, default in (
    ('episodes', 256),
    ('slots', 256),
    ('repeats', 3),
    ('slow_ms', 20),
  ):
    parser.add_argument(f'--{name}', type=int, default=default)
  args = parser.parse_args(argv)
  memory.keep_freed_memory()  # as `posttrain.main` does
  found = ways(args)
  for way in found.values():
    way.run()  # compiles
    way.seconds.clear()
  for _ in range(args.repeats):
    for way in found.values():
      way.run()
  weights = args.checkpoint or 'random weights'
  report(found, f'{args.episodes} episodes, {args.slots} slots, {weights}')


if __name__ == '__main__':
  run(sys.argv[1:])
