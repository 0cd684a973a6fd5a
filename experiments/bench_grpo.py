"""`bench grpo`: a whole GRPO step, ours against plain JAX.

8 prompts of 32 tokens, 8 samples of 32 tokens for each, no stop token, one
update with AdamW over micro-batches of 1,024 tokens, from the tasks to the
new weights. In `live` every group has differing rewards, so that all rows
train; in `mixed` 4 of the 8 groups are tied, and ours leaves them out, as
their gradient is 0. The yardstick prefills and trains every row in both.

With `--first`: seconds of building everything and of the first step, imports
apart, in fresh processes: with an empty compilation cache, then with what the
first process left there. `process_cpu_s` has the imports too.
"""

import dataclasses
import subprocess
import sys
import tempfile
import time
import zlib

import numpy as np

from experiments import timing
from posttrain import types
from posttrain.data import sources

PROMPTS, GROUP, PROMPT, NEW, MICRO_ROWS = 8, 8, 32, 32, 16


def main(args) -> None:
  if args.first:
    first_steps(args)
  elif args.impl:
    child(args)
  else:
    alternate(args)


def makers() -> dict:
  return {
    'ours_live': lambda shape: ours(shape, tied=0),
    'ours_mixed': lambda shape: ours(shape, tied=PROMPTS // 2),
    'plain': plain,
  }


def alternate(args) -> None:
  """Steps in turns, after the first ones."""
  from experiments import plain_jax
  from posttrain.util import memory

  memory.keep_freed_memory()  # as `posttrain.main` does; serves all
  shape = plain_jax.SHAPES[args.shape]
  clocks = {'matmul': timing.matmul_clock()}
  for name, make in makers().items():
    clocks[name] = timing.Clock(make(shape))
    clocks[name].run()  # compiles
  timing.alternate(clocks, args.repeats)
  gflops = clocks['matmul'].rates(timing.MATMUL_GFLOP, 'gflop')
  timing.emit(bench='matmul', threads=args.threads, **gflops)
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
      **timing.scaled(
        'grpo', args.shape, rates['steps_per_cpu_s'], gflops['gflop_per_cpu_s']
      ),
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
            'experiments.bench',
            'grpo',
            f'--impl={name}',
            f'--shape={args.shape}',
            f'--cache={cache}:{folder}',
          ]
          if args.threads:
            command.append(f'--threads={args.threads}')
          subprocess.run(command, check=True)


def child(args) -> None:
  """One first step, in this process."""
  import jax

  from experiments import plain_jax, plain_jax_decode  # noqa: F401
  from posttrain import compilation
  from posttrain.util import memory

  jax.devices()
  cache, _, folder = (args.cache or 'off').partition(':')
  memory.keep_freed_memory()
  compilation.enable_compilation_cache(folder or None)
  wall, cpu = time.perf_counter(), time.process_time()
  with compilation.CompileCounter() as compiling:
    step = makers()[args.impl](plain_jax.SHAPES[args.shape])
    built = time.perf_counter()
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
    build_s=timing.rounded(built - wall),
    programs=compiling.count,
    compile_s=timing.rounded(compiling.seconds),
    second_step_cpu_s=timing.rounded(clock.cpu[0]),
  )


def ours(shape, tied: int):
  """Our whole step, as a function of nothing; so many groups are tied."""
  import jax

  from posttrain import schema, sharding
  from posttrain.chat import renderer as chat
  from posttrain.decode import engine as engines
  from posttrain.models import transformer
  from posttrain.pipeline import tokens as token_pipeline
  from posttrain.rollout import driver as drivers
  from posttrain.training import objectives, optim
  from posttrain.training import step as train_step

  renderer = chat.load(schema.Tokenizer())
  renderer.stop_ids = ()  # every sample has its 32 tokens
  stage = make_stage(renderer, tied)
  cfg = schema.Model(**dataclasses.asdict(shape))
  pipeline = token_pipeline.Pipeline(stage, renderer, seed=0)
  mesh = sharding.make_mesh(schema.Mesh())
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
  pipeline.connect({'policy': driver}, None)
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
  state, version = jax.jit(init, out_shardings=places)(), 0

  def work():
    nonlocal state, version
    engine.set_params(state.params, version)
    item = next(pipeline)
    live = (PROMPTS - tied) * GROUP * NEW
    assert item.batch.rl_count == live, (item.batch.rl_count, live)
    state, metrics = update(state, item.batch)
    jax.device_get(metrics)
    version += 1

  return work


def rule(said: bytes) -> float:
  """The reward: differs from sample to sample, and from the group's mean."""
  return zlib.crc32(said) / 2**32


@dataclasses.dataclass(frozen=True)
class Options:
  """Of the benchmark's environment."""

  type: str = 'bench'
  prompts: tuple[str, ...] = ()
  tied: int = 0  # the first so many groups have equal rewards


class Env:
  """Fixed prompts, and a reward by `rule`."""

  max_turns, votes, blocking = 1, False, False

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
    self._task, self._said = task, None

  def reset(self):
    return self._task.prompt

  def step(self, text, truncated):
    del truncated
    self._said = text
    return types.StepOut()

  def grade(self):
    graded = self._task.info['graded']
    return types.Score(reward=rule(self._said.encode()) * graded)

  def close(self):
    pass


def user(text: str) -> types.Messages:
  return ({'role': 'user', 'content': text},)


def make_stage(renderer, tied: int):
  """The stage's options: GRPO on tasks whose prompts have 32 tokens."""
  from posttrain import envs, schema

  room = PROMPT - len(renderer.render(user(''), add_generation_prompt=True))
  letters = np.random.default_rng(0).integers(97, 123, (PROMPTS, room))
  prompts = tuple(bytes(line.tolist()).decode() for line in letters)
  envs.TYPES[Options.type] = Env
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
  """The yardstick's whole step, as a function of nothing."""
  from experiments import plain_jax_decode

  return plain_jax_decode.make_grpo(
    shape,
    group=GROUP,
    new=NEW,
    rows=MICRO_ROWS,
    prompts=np.random.default_rng(0).integers(97, 123, (PROMPTS, PROMPT)),
    reward=lambda task, ids: rule(ids.tobytes()),
  )
