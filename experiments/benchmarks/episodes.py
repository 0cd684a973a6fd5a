"""Episodes per second: slots held between turns against turns in lock-step.

    python -m experiments.benchmarks.episodes [--checkpoint=RUN]
        [--episodes=256] [--slots=256] [--repeats=3] [--slow_ms=20]

The same episodes of configs/sql.py, stage `grpo`, are run alternately by

    lock-step     all unfinished episodes generate a turn, each from its whole
                  history, prefilled anew; when the last of them has ended its
                  turn, all environments step, one after the other
    held          our driver: an episode that has ended its turn gets the
                  observation at once and continues in its slot; only the
                  observation is prefilled
    held overlap  the same with `rollout.overlap`

with one engine. The environment of `slow` variants sleeps for `slow_ms` in
every step (0 = no such variants); in `slow threads` it is `blocking`. RUN is a
workdir of the recipe, or a stage's checkpoints in one. Without it weights are
random, and episodes have 3 turns, because none of them ever answers.

Prints a table of medians over the repeats; `to lock-step` is a variant's speed
relative to lock-step with the same environment. `env` is the share of the wall
time in calls of environments (none in threads), `engine` in calls of the
engine, the device's work included; `rest` is in the driver: transcripts,
tokenizing, waits for threads. With overlap the device works during all three.
Matrix products of another shape round differently, so a sampled token may
differ: `other` counts the episodes whose tokens are not those of `held`.
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
from experiments.benchmarks import timing
from posttrain import main
from posttrain.checkpoints import policies
from posttrain.decode import requests
from posttrain.envs import base
from posttrain.models import transformer
from posttrain.rollout import driver
from posttrain.stage import components as components_lib
from posttrain.stage import models as stage_models
from posttrain.util import memory

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
    self._queue.append(
      dataclasses.replace(
        history, ids=np.concatenate([history.ids, ids]), max_tokens=max_tokens
      )
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


class TimedEngine:
  """An engine, and the seconds spent in its calls."""

  def __init__(self, engine):
    self.seconds, self._engine = 0.0, engine

  def __getattr__(self, name: str) -> Callable:
    call = getattr(self._engine, name)  # optional methods stay absent

    def timed(*args):
      start = time.perf_counter()
      out = call(*args)
      self.seconds += time.perf_counter() - start
      return out

    return timed


@dataclasses.dataclass(frozen=True)
class SlowEnv(base.Env):
  """An environment whose steps take a while."""

  env: object
  seconds: float
  blocking: bool

  @property
  def name(self) -> str:
    return self.env.name

  @property
  def max_turns(self) -> int:
    return self.env.max_turns

  def source(self, split, seed):
    return self.env.source(split, seed)

  def make(self, task):
    episode = self.env.make(task)
    step = episode.step

    def slow(text, truncated):
      time.sleep(self.seconds)
      return step(text, truncated)

    episode.step = slow
    return episode


class Variant:
  """A design that runs the episodes, and its measurements."""

  def __init__(self, engine, renderer, stage, specs, **options):
    """Makes the driver.

    Args:
      engine: an engine with weights.
      renderer: the policy's renderer.
      stage: the stage's options.
      specs: the episodes.
      options: rollout options that differ from the stage's.
    """
    self._engine, self._specs = TimedEngine(engine), specs
    self._driver = driver.Driver(
      self._engine,
      renderer,
      stage.batch.row_tokens,
      dataclasses.replace(stage.rollout, **options),
    )
    self.ids: dict[int, list[int]] = {}  # sampled tokens, by episode
    self.seconds: list[tuple[float, float, float]] = []  # wall, env, engine

  def run(self) -> None:
    """Runs all episodes, and measures the time."""
    self._engine.seconds = self._driver.env_seconds = 0.0
    start = time.perf_counter()
    rollouts = self._driver.run(self._specs)
    self.seconds.append(
      (
        time.perf_counter() - start,
        self._driver.env_seconds,
        self._engine.seconds,
      )
    )
    ids = {rollout.uid: _sampled(rollout) for rollout in rollouts}
    assert self.ids in ({}, ids), 'a rerun must sample the same tokens'
    self.ids = ids

  @property
  def wall(self) -> float:
    """The median wall time of a repeat, in seconds."""
    return statistics.median(wall for wall, *_ in self.seconds)

  def row(self, lock_step: 'Variant', held: 'Variant') -> list[str]:
    """Returns the variant's row of the table, without its name."""
    env, engine = (
      statistics.median(times[i] / times[0] for times in self.seconds)
      for i in (1, 2)
    )
    # Within a repeat, other load on the machine slows both alike.
    ratio = statistics.median(
      theirs[0] / ours[0]
      for theirs, ours in zip(lock_step.seconds, self.seconds, strict=True)
    )
    other = sum(held.ids[uid] != ids for uid, ids in self.ids.items())
    tokens = sum(map(len, self.ids.values()))
    return [
      f'{len(self.ids) / self.wall:.1f}',
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


def variants(args) -> dict[str, Variant]:
  """Returns all variants, by name, on the same episodes."""
  overrides = [('grpo.rollout.slots', str(args.slots))]
  if not args.checkpoint:
    overrides.append(('grpo.envs.sql.env.budget', '3'))
  recipe = pathlib.Path(configs.__file__).with_name('sql.py')
  run = main.load(str(recipe), overrides)
  components = components_lib.make(run, 'grpo')
  engine = stage_models.engine(components)
  engine.set_params(_params(args.checkpoint, components.model), 0)
  environment = components.data.environments['sql']
  specs, task = [], None
  for uid in range(args.episodes):
    task = task if uid % GROUP else next(environment.source)
    specs.append(environment.sampler.spec(task, uid))

  def variant(engine, specs=specs, **options) -> Variant:
    return Variant(
      engine, components.renderer, components.stage, specs, **options
    )

  by_name = {
    'lock-step': variant(LockStepEngine(engine)),
    'held': variant(engine),
    'held overlap': variant(engine, overlap=True),
  }
  if args.slow_ms:
    slow, threads = (
      [dataclasses.replace(spec, env=env) for spec in specs]
      for blocking in (False, True)
      for env in [SlowEnv(environment.env, args.slow_ms / 1000, blocking)]
    )
    by_name |= {
      'slow lock-step': variant(LockStepEngine(engine), slow),
      'slow held': variant(engine, slow),
      'slow threads': variant(engine, threads),
    }
  return by_name


def _params(path: str, model):
  """Returns the weights of a checkpoint, or random ones for ''.

  Raises:
    ValueError: the checkpoint has another model.
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


def report(by_name: dict[str, Variant], heading: str) -> None:
  """Prints the table."""
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
  for name, variant in by_name.items():
    lock_step = by_name['slow lock-step' if 'slow' in name else 'lock-step']
    row = [name, *variant.row(lock_step, by_name['held'])]
    print('| ' + ' | '.join(row) + ' |')


def run(argv: list[str]) -> None:
  """Runs the command."""
  parser = argparse.ArgumentParser(
    prog='python -m experiments.benchmarks.episodes'
  )
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
  by_name = variants(args)
  for variant in by_name.values():
    variant.run()  # compiles
    variant.seconds.clear()
  for _ in range(args.repeats):
    for variant in by_name.values():
      variant.run()
  weights = args.checkpoint or 'random weights'
  report(by_name, f'{args.episodes} episodes, {args.slots} slots, {weights}')
  timing.emit_matmul()


if __name__ == '__main__':
  run(sys.argv[1:])
