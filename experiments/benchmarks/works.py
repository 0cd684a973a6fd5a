"""Our works of the benchmarks, as functions without arguments.

`shape` is always the sizes of a model, of `plain_jax`.
"""

import dataclasses
import zlib
from collections.abc import Callable, Sequence

import jax
import numpy as np

from posttrain import schema, sharding, types
from posttrain.chat import rendering
from posttrain.data import sources
from posttrain.decode import engines, requests
from posttrain.envs import base, registry
from posttrain.models import transformer
from posttrain.pipeline import tokens as token_pipeline
from posttrain.rollout import episodes
from posttrain.training import objectives, optim
from posttrain.training import step as train_step

# A GRPO step: prompts, samples of each, their tokens, rows of a micro-batch.
PROMPTS, GROUP, PROMPT, NEW, MICRO_ROWS = 8, 8, 32, 32, 16
TRAIN_ROWS = 4  # of a micro-batch of a train step


def model(shape, **options) -> schema.Model:
  """Returns the options of a model."""
  return schema.Model(**dataclasses.asdict(shape), **options)


def random_ids(shape, rows: int, tokens: int) -> np.ndarray:
  """Returns random ids i32[rows, tokens]."""
  rng = np.random.default_rng(0)
  return rng.integers(0, shape.vocab_size, (rows, tokens), np.int32)


def generate(
  shape, prompts: np.ndarray, new: int, **sizes: int
) -> Callable[[], object]:
  """Returns the completion of prompts, all of them at a time.

  Args:
    shape: the model's sizes.
    prompts: i32[N, T].
    new: tokens of each completion.
    **sizes: further sizes of the engine.
  """
  cfg = model(shape)
  engine = engines.Engine(cfg, slots=len(prompts), **sizes)
  engine.set_params(transformer.init(jax.random.key(0), cfg), 0)
  batch = [requests.Request(i, ids, new) for i, ids in enumerate(prompts)]

  def work():
    completions = engine.generate(batch)
    assert all(len(x.ids) == new for x in completions)

  return work


def trainer(cfg: schema.Model, envs: Sequence[str], stage: schema.Stage):
  """Returns our train step, and the state before the first one."""
  optimizer = optim.make(stage.optim, stage.steps)
  mesh, rules = sharding.make_mesh(schema.Mesh()), transformer.SHARDING_RULES
  step = train_step.make_train_step(
    objectives.TokenComponents(cfg, tuple(envs), stage.loss),
    optimizer,
    mesh=mesh,
    rules=rules,
  )
  params = transformer.init(jax.random.key(0), cfg)
  state = train_step.init_state(params, optimizer, average=False)
  # Placed, or the second call would compile again.
  return step, jax.device_put(state, sharding.shardings(state, rules, mesh))


def update(shape, batch: types.Batch) -> Callable[[], object]:
  """Returns the update of a model from a batch."""
  envs = {'bench': schema.EnvEntry()}
  step, state = trainer(
    model(shape), ['bench'], schema.Stage(envs=envs, steps=1000)
  )

  def work():
    nonlocal state
    state, metrics = step(state, batch)
    metrics['loss/total'].block_until_ready()

  return work


def make_batch(ids, rows: int, segments: Sequence[int] | None = None):
  """Returns a batch of rows, all tokens but the first of a segment in `ce`.

  Args:
    ids: i32[N, T], a row each.
    rows: rows of a micro-batch.
    segments: tokens of a segment, by row of a micro-batch; None = a row is one.
  """
  ids = np.asarray(ids).reshape(-1, rows, ids.shape[1])
  segment = np.array(segments or [ids.shape[-1]] * rows, np.int32)[:, None]
  index = np.arange(ids.shape[-1], dtype=np.int32)[None]
  positions = np.broadcast_to(index % segment, ids.shape)
  weights = (positions > 0).astype(np.float32)
  fields = {
    name: np.zeros(ids.shape, dtype)
    for name, dtype in types.TOKEN_FIELDS.items()
  }
  fields |= {'ids': ids, 'mask': positions > 0, 'ce_weights': weights}
  fields['temperatures'] = np.ones_like(weights)
  return types.Batch(
    **fields,
    segment_ids=np.broadcast_to(index // segment + 1, ids.shape),
    positions=positions,
    env_ids=np.zeros_like(ids),
    rl_count=np.float32(0),
    ce_count=np.float32(weights.sum()),
    ref_kl_count=np.float32(0),
    rl_sequences=np.float32(0),
    num_micro_batches=np.int32(len(ids)),
  )


def reward(text: bytes) -> float:
  """Returns a reward that differs from sample to sample."""
  return zlib.crc32(text) / 2**32


class Env(base.Env):
  """Random prompts, and rewards by `reward`."""

  max_turns = 1

  def __init__(self, name: str, letters: int, tied: int):
    """Stores the letters of a prompt, and how many groups are tied."""
    self.name, self._letters, self._tied = name, letters, tied

  def source(self, split, seed):
    del split
    size = PROMPTS, self._letters
    lines = np.random.default_rng(0).integers(97, 123, size).tolist()
    tasks = [
      types.Task(str(i), self.name, user(bytes(line).decode()))
      for i, line in enumerate(lines)
    ]
    return sources.Shuffled(tasks, seed)

  def make(self, task):
    graded = int(task.id) >= self._tied
    return base.OneTurn(
      task, lambda text, _: types.Score(reward(text.encode()) * graded)
    )


def user(text: str) -> types.Messages:
  """Returns a user message as a prompt."""
  return ({'role': 'user', 'content': text},)


def grpo(shape, tied: int) -> Callable[[], object]:
  """Returns a whole GRPO step, from the tasks to the new weights.

  Args:
    shape: the model's sizes.
    tied: number of groups with equal rewards.
  """
  renderer = rendering.load(schema.Tokenizer())
  renderer.stop_ids = ()  # every sample has its 32 tokens
  frame = len(renderer.render(user(''), add_generation_prompt=True))
  entry = schema.EnvEntry(
    env=schema.CustomEnv(
      import_path=f'{__name__}:Env',
      kwargs={'letters': PROMPT - frame, 'tied': tied},
    ),
    algorithm=schema.Grpo(),
    sampler=schema.Policy(max_tokens=NEW),
    group_size=GROUP,
  )
  length = PROMPT + NEW
  stage = schema.Stage(
    envs={'bench': entry},
    batch=schema.Batch(
      prompts_per_step=PROMPTS,
      row_tokens=length,
      micro_batch_tokens=MICRO_ROWS * length,
    ),
    loss=schema.Loss(rl=schema.Clip()),
    optim=schema.Optim(lr=1e-4, schedule='constant'),
  )
  cfg = model(shape)
  engine = engines.Engine(
    cfg,
    slots=PROMPTS * GROUP,
    capacity=length,
    chunk=stage.rollout.chunk,
    prefill_rows=PROMPTS,
    prefill_tokens=PROMPT,
    mesh=sharding.make_mesh(schema.Mesh()),
  )
  data = token_pipeline.TokenData(
    stage, registry.make_all(stage.envs), renderer, seed=0
  )
  player = episodes.Driver(engine, renderer, length)
  pipeline = token_pipeline.TokenPipeline(data, {'policy': player})
  step, state = trainer(cfg, stage.envs, stage)
  version = 0

  def work():
    nonlocal state, version
    engine.set_params(state.params, version)
    batch = next(pipeline).batch
    assert batch.rl_count == (PROMPTS - tied) * GROUP * NEW, batch.rl_count
    state, metrics = step(state, batch)
    jax.device_get(metrics)
    version += 1

  return work
