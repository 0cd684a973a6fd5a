"""Our works of the benchmarks, as functions without arguments.

Each returns a function that counts what it did, see `timing.Work` and `counts`.
A GRPO step has phases: `rollout`, `scoring` by a reference, and `update`.
"""

import contextlib
import dataclasses
import json
import pathlib
import time
from collections.abc import Sequence

import jax
import numpy as np

from experiments.benchmarks import counts, sizes, timing
from posttrain import schema, sharding, types
from posttrain.chat import rendering
from posttrain.data import sources
from posttrain.decode import engines, requests
from posttrain.envs import base
from posttrain.models import transformer
from posttrain.pipeline import tokens as token_pipeline
from posttrain.stage import build, preflight
from posttrain.training import objectives, optim
from posttrain.training import step as train_step
from posttrain.util import preemption


def model(shape, **options) -> schema.Model:
  """Returns the options of a model of one of `sizes.SHAPES`."""
  return schema.Model(**dataclasses.asdict(shape), **options)


def generate(
  cfg: schema.Model, prompts: np.ndarray, new: int, **options: int
) -> timing.Work:
  """Returns the completion of prompts, all of them at a time.

  Args:
    cfg: the model's options.
    prompts: i32[N, T].
    new: tokens of each completion.
    **options: further sizes of the engine.
  """
  counts.watch()
  engine = engines.Engine(cfg, engines.Options(len(prompts), **options))
  engine.set_params(transformer.init(jax.random.key(0), cfg), 0)
  batch = [requests.Request(i, ids, new) for i, ids in enumerate(prompts)]

  def work():
    counts.computed.clear()
    completions = engine.generate(batch)
    assert all(len(x.ids) == new for x in completions)
    whole = [
      [*ids, *x.ids[:-1]] for ids, x in zip(prompts, completions, strict=True)
    ]
    return lambda: _counted(cfg, {'rollout': whole}, prompts.shape[1] + new)

  return work


def _counted(
  cfg: schema.Model, read: dict[str, Sequence[Sequence[int]]], length: int
) -> timing.Figures:
  """Returns the tokens of each phase, and the GFLOP of those that it needs.

  Args:
    cfg: the model's options.
    read: phase -> the sequences that pass through the model in it.
    length: tokens of a sequence.
  """
  figures = {'gflop': 0.0}
  for phase, sequences in read.items():
    tokens = counts.needed(sequences)
    figures[f'{phase}_computed'] = counts.computed[phase]
    figures[f'{phase}_needed'] = tokens
    trains = phase == 'update'
    figures['gflop'] += counts.flops(cfg, tokens, length, trains) / 1e9
  return figures


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


def update(cfg: schema.Model, batch: types.Batch) -> timing.Work:
  """Returns the update of a model from a batch."""
  envs = {'bench': schema.EnvEntry()}
  step, state = trainer(cfg, ['bench'], schema.Stage(envs=envs, steps=1000))
  read = {'update': [*counts.sequences(batch)]}
  length = max(map(len, read['update']))
  counts.computed['update'] = counts.positions(batch)
  figures = _counted(cfg, read, length)

  def work():
    nonlocal state
    state, metrics = step(state, batch)
    metrics['loss/total'].block_until_ready()
    return lambda: figures

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


class Env(base.Env):
  """Random prompts, and rewards by `reward`."""

  max_turns = 1

  def __init__(self, name: str, prompts: int, letters: int, tied: int):
    """Stores the prompts' number, their letters, and how many are tied."""
    self.name, self._size, self._tied = name, (prompts, letters), tied

  def source(self, split, seed):
    del split
    lines = np.random.default_rng(0).integers(97, 123, self._size).tolist()
    tasks = [
      types.Task(str(i), self.name, user(bytes(line).decode()))
      for i, line in enumerate(lines)
    ]
    return sources.Shuffled(tasks, seed)

  def make(self, task):
    graded = int(task.id) >= self._tied
    return base.OneTurn(
      task, lambda text, _: types.Score(sizes.reward(text.encode()) * graded)
    )


def user(text: str) -> types.Messages:
  """Returns a user message as a prompt."""
  return ({'role': 'user', 'content': text},)


class Phases:
  """Seconds of the phases of a step: of the CPU, or by the clock beside it."""

  def __init__(self):
    on_cpu = jax.default_backend() == 'cpu'
    self._now = time.process_time if on_cpu else time.perf_counter
    self.seconds: dict[str, float] = {}

  @contextlib.contextmanager
  def __call__(self, name: str):
    """Times a block, without the blocks in it."""
    before, start = sum(self.seconds.values()), self._now()
    yield
    inside = sum(self.seconds.values()) - before
    spent = self._now() - start - inside
    self.seconds[name] = self.seconds.get(name, 0.0) + spent

  def take(self) -> timing.Figures:
    """Returns the seconds, which begin at 0 again."""
    seconds, self.seconds = self.seconds, {}
    return {f'{name}_s': x for name, x in seconds.items()}


def grpo(
  cfg: schema.Model, size: sizes.Step, folder: str, tied: int = 0
) -> timing.Work:
  """Returns a whole GRPO step, from the tasks to the new weights.

  Args:
    cfg: the model's options.
    size: the step's sizes.
    folder: a new workdir.
    tied: number of groups with equal rewards.
  """
  renderer = rendering.load(schema.Tokenizer())
  frame = len(renderer.render(user(''), add_generation_prompt=True))
  letters = size.prompt - frame
  kwargs = {'prompts': size.prompts, 'letters': letters, 'tied': tied}
  entry = schema.EnvEntry(
    env=schema.CustomEnv(import_path=f'{__name__}:Env', kwargs=kwargs),
    algorithm=schema.Grpo(kl_beta=size.kl_beta),
    sampler=schema.Policy(max_tokens=size.new),
    group_size=size.group,
  )
  stage = schema.Stage(
    envs={'bench': entry},
    steps=sizes.STEP_COUNT,
    rollout=schema.Rollout(
      slots=size.prompts * size.group,
      prefill_rows=size.prompts,
      prefill_tokens=size.prompt,
    ),
    batch=schema.Batch(
      prompts_per_step=size.prompts,
      row_tokens=size.length,
      micro_batch_tokens=size.micro_rows * size.length,
    ),
    loss=schema.Loss(rl=schema.Clip()),
    optim=schema.Optim(lr=1e-4, schedule='constant'),
    eval=schema.Eval(prompts=1, samples=0, max_tokens=size.new),
  )
  live = (size.prompts - tied) * size.group * size.new
  return run(of_stage(cfg, stage), 'bench', folder, live)


def of_stage(cfg: schema.Model, stage: schema.Stage) -> schema.Run:
  """Returns the options of a run of one stage, `bench`."""
  return schema.Run(
    model=cfg,
    stages={'bench': stage},
    compilation_cache=None,
    metrics=schema.Metrics(progress=False),
  )


def count_step(cfg: schema.Model, item, length: int) -> timing.Figures:
  """Returns the tokens and GFLOP of a step, see `_counted`."""
  counts.computed['update'] = counts.positions(item.batch)
  read = {'update': [*counts.sequences(item.batch)]}
  played = item.played.values()
  if counts.computed['scoring']:
    read['scoring'] = [x.ids.tolist() for env in played for x in env.samples]
  if counts.computed['rollout']:
    groups = [group for env in played for group in env.groups]
    rollouts = [rollout for group in groups for rollout in group]
    read['rollout'] = [x.ids[:-1].tolist() for r in rollouts for x in r.samples]
  return _counted(cfg, read, length)


def run(
  options: schema.Run, name: str, folder: str, live: int | None = None
) -> timing.Work:
  """Returns a step of a stage of a run, as the train loop does it.

  Args:
    options: the run's.
    name: the stage.
    folder: a new workdir.
    live: tokens of a step that train with `rl`, of samples that have no end
      but the longest length; None = they end, and train, as they do.
  """
  counts.watch()
  components = preflight.make(preflight.resolve(options), name)
  if live is not None:
    components.renderer.stop_ids = ()
  job = build.make(components, folder, 0, preemption.Signal())
  state, phases, version = job.learner.state, Phases(), 0
  score = token_pipeline.TokenPipeline._score

  def timed(pipeline, *args):
    with phases('scoring'):
      return score(pipeline, *args)

  token_pipeline.TokenPipeline._score = timed

  def work():
    nonlocal state, version
    counts.computed.clear()
    with phases('rollout'):
      job.hand_over(state, version)
      item = next(job.sampling.pipeline)
    assert live is None or item.batch.rl_count == live, item.batch.rl_count
    with phases('update'):
      state, metrics = job.learner.update(state, item.batch)
      jax.device_get(metrics)
    version += 1
    length = components.capacity
    return lambda: phases.take() | count_step(components.model, item, length)

  return work


def dpo(cfg: schema.Model, folder: str) -> timing.Work:
  """Returns a DPO step on random pairs, from the pairs to the new weights."""
  rng = np.random.default_rng(0)
  frame = 3  # tokens of the template around a prompt; an answer has one
  lengths = {'prompt': sizes.PAIR_TOKENS - frame}
  lengths |= dict.fromkeys(('chosen', 'rejected'), sizes.PAIR_TOKENS - 1)
  path = pathlib.Path(folder, 'pairs.jsonl')
  with path.open('w') as file:
    for _ in range(sizes.PAIRS):
      letters = {k: rng.integers(97, 123, n) for k, n in lengths.items()}
      row = {k: ''.join(map(chr, x)) for k, x in letters.items()}
      file.write(json.dumps(row) + '\n')
  tokens = 4 * sizes.PAIR_TOKENS  # of a pair
  stage = schema.Stage(
    kind='preference',
    steps=sizes.STEP_COUNT,
    pairs=schema.PairFile(path=str(path), eval_fraction=0.0),
    batch=schema.Batch(
      prompts_per_step=sizes.PAIRS,
      row_tokens=tokens,
      micro_batch_tokens=sizes.PAIRS * tokens,
    ),
    optim=schema.Optim(lr=1e-5, schedule='constant'),
  )
  return run(of_stage(cfg, stage), 'bench', folder)
