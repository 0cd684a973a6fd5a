"""`bench grpo`: a whole GRPO step, ours against plain JAX.

8 prompts of 32 tokens, 8 samples of 32 tokens for each, no stop token, one
update with AdamW over micro-batches of 1,024 tokens, from the tasks to the
new weights. In `ours_live` the rewards of every group differ, so that all rows
train; in `ours_mixed` 4 of the 8 groups are tied, and pruned, because their
gradient is 0. The yardstick prefills and trains every row.

With `--first`: seconds of building everything and of the first step, without
imports, in fresh processes: with an empty compilation cache, then with the
cache of the first process. `process_cpu_s` includes the imports.
"""

import dataclasses
import subprocess
import sys
import tempfile
import time
import zlib

import numpy as np

from experiments.benchmarks import timing
from posttrain import types
from posttrain.data import sources
from posttrain.envs import base, registry

PROMPTS, GROUP, PROMPT, NEW, MICRO_ROWS = 8, 8, 32, 32, 16


def main(args) -> None:
  """Measures steps, first steps in processes, or one of those here."""
  if args.first:
    first_steps(args)
  elif args.impl:
    child(args)
  else:
    alternate(args)


def makers() -> dict:
  """Returns implementation -> (shape -> step as a function)."""
  return {
    'ours_live': lambda shape: ours(shape, tied=0),
    'ours_mixed': lambda shape: ours(shape, tied=PROMPTS // 2),
    'plain': plain,
  }


def alternate(args) -> None:
  """Measures steps of all implementations in turns, after the first."""
  from experiments.benchmarks import plain_jax
  from posttrain.util import memory

  memory.keep_freed_memory()  # as `posttrain.main` does, for all
  shape = plain_jax.SHAPES[args.shape]
  clocks = {'matmul': timing.matmul_clock()}
  for name, make in makers().items():
    clocks[name] = timing.Clock(make(shape))
    clocks[name].run()  # compiles
  timing.alternate(clocks, args.repeats)
  gflops = clocks['matmul'].rates(timing.MATMUL_GFLOP, 'gflop')
  timing.emit_matmul(gflops, args.threads)
  for name in makers():
    rates = clocks[name].rates(1, 'steps')
    timing.emit(
      bench='grpo',
      impl=name,
      shape=args.shape,
      threads=args.threads,
      **rates,
      seconds=timing.rounded(1 / rates['steps_per_s']),
      cpu_seconds=timing.rounded(1 / rates['steps_per_cpu_s']),
    )


def first_steps(args) -> None:
  """Runs `child` twice per implementation, the second time with a cache."""
  for name in ('ours_live', 'plain'):
    for _ in range(args.repeats):
      with tempfile.TemporaryDirectory() as folder:
        for cache in ('cold', 'warm'):
          command = [
            sys.executable,
            '-m',
            'experiments.benchmarks',
            'grpo',
            f'--impl={name}',
            f'--shape={args.shape}',
            f'--cache={cache}:{folder}',
          ]
          if args.threads:
            command.append(f'--threads={args.threads}')
          subprocess.run(command, check=True)


def child(args) -> None:
  """Measures one first step, in this process."""
  import jax

  from experiments.benchmarks import plain_jax, plain_jax_decode  # noqa: F401
  from posttrain import compilation
  from posttrain.util import memory

  jax.devices()
  cache, _, folder = (args.cache or 'off').partition(':')
  memory.keep_freed_memory()
  compilation.enable_compilation_cache(folder or None)
  wall, cpu = time.perf_counter(), time.process_time()
  with compilation.CompileCounter() as compilations:
    step = makers()[args.impl](plain_jax.SHAPES[args.shape])
    ready = time.perf_counter()
    step()
  end, end_cpu = time.perf_counter(), time.process_time()
  clock = timing.Clock(step)
  clock.run()
  timing.emit(
    bench='grpo_first',
    impl=args.impl,
    shape=args.shape,
    cache=cache,
    threads=args.threads,
    first_step_s=timing.rounded(end - wall),
    first_step_cpu_s=timing.rounded(end_cpu - cpu),
    process_cpu_s=timing.rounded(end_cpu),
    build_s=timing.rounded(ready - wall),
    programs=compilations.count,
    compile_s=timing.rounded(compilations.seconds),
    second_step_cpu_s=timing.rounded(clock.cpu[0]),
  )
  timing.emit_matmul(threads=args.threads)


def ours(shape, tied: int):
  """Returns our whole step as a function without arguments.

  Args:
    shape: the model's sizes, of `plain_jax`.
    tied: number of groups with equal rewards.
  """
  import jax

  from posttrain import schema, sharding
  from posttrain.chat import rendering

  renderer = rendering.load(schema.Tokenizer())
  renderer.stop_ids = ()  # every sample has its 32 tokens
  stage = make_stage(renderer, tied)
  cfg = schema.Model(**dataclasses.asdict(shape))
  mesh = sharding.make_mesh(schema.Mesh())
  engine, pipeline = make_pipeline(cfg, stage, renderer, mesh)
  update, state = make_update(cfg, stage, mesh)
  version = 0

  def work():
    nonlocal state, version
    engine.set_params(state.params, version)
    item = next(pipeline)
    members = (PROMPTS - tied) * GROUP * NEW
    assert item.batch.rl_count == members, (item.batch.rl_count, members)
    state, metrics = update(state, item.batch)
    jax.device_get(metrics)
    version += 1

  return work


def make_pipeline(cfg, stage, renderer, mesh):
  """Returns our engine, without weights, and the pipeline that samples."""
  from posttrain.decode import engine as engines
  from posttrain.pipeline import tokens as token_pipeline
  from posttrain.rollout import driver as drivers

  engine = engines.Engine(
    cfg,
    slots=stage.rollout.slots,
    capacity=PROMPT + NEW,
    chunk=stage.rollout.chunk,
    prefill_rows=stage.rollout.prefill_rows,
    prefill_tokens=stage.rollout.prefill_tokens,
    mesh=mesh,
  )
  driver = drivers.Driver(engine, renderer, PROMPT + NEW)
  data = token_pipeline.TokenData(
    stage, registry.make_all(stage.envs), renderer, seed=0
  )
  return engine, token_pipeline.TokenPipeline(data, {'policy': driver})


def make_update(cfg, stage, mesh):
  """Returns our train step and the state before the first step."""
  import jax

  from posttrain import sharding
  from posttrain.models import transformer
  from posttrain.training import objectives, optim
  from posttrain.training import step as train_step

  optimizer = optim.make(stage.optim, stage.steps)
  update = train_step.make_train_step(
    objectives.TokenComponents(cfg, tuple(stage.envs), stage.loss),
    optimizer,
    mesh=mesh,
    rules=transformer.SHARDING_RULES,
  )

  def init():
    params = transformer.init(jax.random.key(0), cfg)
    return train_step.init_state(params, optimizer, average=False)

  places = sharding.shardings(
    jax.eval_shape(init), transformer.SHARDING_RULES, mesh
  )
  return update, jax.jit(init, out_shardings=places)()


def reward(text: bytes) -> float:
  """Returns a reward that differs from sample to sample."""
  return zlib.crc32(text) / 2**32


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of the benchmark's environment."""

  type: str = 'bench'
  prompts: tuple[str, ...] = ()
  tied: int = 0  # this many groups, the first ones, have equal rewards


class Env(base.Env):
  """Fixed prompts, and rewards by `reward`."""

  max_turns = 1

  def __init__(self, name, cfg):
    self.name, self._cfg = name, cfg

  def source(self, split, seed):
    del split
    return sources.Shuffled(
      [
        types.Task(
          str(i), self.name, user(text), info={'graded': i >= self._cfg.tied}
        )
        for i, text in enumerate(self._cfg.prompts)
      ],
      seed,
    )

  def make(self, task):
    return Episode(task)


class Episode:
  """One answer."""

  def __init__(self, task):
    self._task, self._answer = task, None

  def reset(self):
    return self._task.prompt

  def step(self, text, truncated):
    del truncated
    self._answer = text
    return types.StepOut()

  def grade(self):
    graded = self._task.info['graded']
    return types.Score(reward=reward(self._answer.encode()) * graded)

  def close(self):
    pass


def user(text: str) -> types.Messages:
  """Returns a user message as a prompt."""
  return ({'role': 'user', 'content': text},)


def make_stage(renderer, tied: int):
  """Returns the stage's options: GRPO on tasks with prompts of 32 tokens."""
  from posttrain import schema
  from posttrain.envs import registry

  frame = len(renderer.render(user(''), add_generation_prompt=True))
  rng = np.random.default_rng(0)
  letters = rng.integers(97, 123, (PROMPTS, PROMPT - frame))
  prompts = tuple(bytes(line.tolist()).decode() for line in letters)
  registry.TYPES[Options.type] = Env
  return schema.Stage(
    envs={
      'bench': schema.EnvEntry(
        env=Options(prompts=prompts, tied=tied),
        algorithm=schema.Grpo(),
        sampler=schema.Policy(max_tokens=NEW),
        group_size=GROUP,
      )
    },
    batch=schema.Batch(
      prompts_per_step=PROMPTS,
      row_tokens=PROMPT + NEW,
      micro_batch_tokens=MICRO_ROWS * (PROMPT + NEW),
    ),
    rollout=schema.Rollout(
      slots=PROMPTS * GROUP, prefill_rows=PROMPTS, prefill_tokens=PROMPT
    ),
    loss=schema.Loss(rl=schema.Clip()),
    optim=schema.Optim(lr=1e-4, schedule='constant'),
  )


def plain(shape):
  """Returns the yardstick's whole step as a function without arguments."""
  from experiments.benchmarks import plain_jax_decode

  return plain_jax_decode.make_grpo(
    shape,
    group=GROUP,
    new=NEW,
    rows=MICRO_ROWS,
    prompts=np.random.default_rng(0).integers(97, 123, (PROMPTS, PROMPT)),
    reward=lambda task, ids: reward(ids.tobytes()),
  )
