"""The components of every stage, built and checked before the run starts.

1. `resolve` decides what the options leave open, once: renderer, mesh, models,
   sizes.
2. `make` builds a stage's: data, evaluation tasks, learner's shapes, plan.
3. `check` builds those of every stage, and compares the folders of weights that
   they name with the policy; nothing is compiled, and no array is read.
4. `check_resume` compares the options with those of the workdir.

A stage gets what comes from files and servers as `models.Outside`:
`resolve_folder` turns a name into a folder, fixed when the stage begins, and
`Loader` reads it.
"""

import contextlib
import dataclasses
import functools
import importlib
import logging
import operator
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from posttrain import (
  config,
  pipeline,
  processes,
  schema,
  scoring,
  sharding,
  types,
)
from posttrain.chat import rendering
from posttrain.checkpoints import store, weights
from posttrain.config import checks
from posttrain.data import row_files, sources
from posttrain.envs import base, registry
from posttrain.evaluation import evaluator
from posttrain.models import hf_config, transformer
from posttrain.ops import attention
from posttrain.pipeline import batches
from posttrain.rollout import endpoints, engine_client, frozen_models, remote
from posttrain.stage import learner, models, plan
from posttrain.util import disk, errors

# Per device: tokens of a micro-batch, and the most slots.
MICRO_BATCH_TOKENS, MAX_SLOTS = 2048, 256
SAMPLED_TOKENS = 2048  # of an evaluation where computing is slow
# (renderer, data) -> the tokens that a sequence may have at least.
MinCapacity = Callable[[rendering.Renderer, batches.StageData], int]
Params = Any


def resolve(
  cfg: schema.Run,
  devices: tuple[str | None, int, int] | None = None,
  samplers: types.Samplers | None = None,
) -> models.Resolved:
  """Decides what a run's options leave to its tokenizer and devices.

  A stage's model becomes the run's where it has none, with the vocabulary. Its
  sizes become those of the mesh, see `resolve_sizes`.

  Args:
    cfg: the run's options.
    devices: platform (None = the one in use) and number of devices that need
      not be here, and of their hosts, for plans alone; None = those of this
      run.
    samplers: the processes that decode with the policy; None = this one does.

  Raises:
    ValueError: tokenizer, mesh or samplers do not fit, or the platform lacks a
      model's implementation of attention.
  """
  renderer = rendering.load(cfg.tokenizer)
  platform, place, hosts = devices or (None, jax.devices(), processes.count())
  platform = platform or jax.default_backend()
  if cfg.mesh.sampler is not None and (hosts > 1 or samplers is not None):
    several = '--samplers' if samplers else f'several processes, here {hosts}'
    raise ValueError(
      f'config.mesh.sampler must be None with {several}: got '
      f'{dataclasses.asdict(cfg.mesh.sampler)}'
    )
  if samplers is not None and hosts > 1:
    raise ValueError(
      '--samplers must be left out in a run of several processes: got '
      f'{hosts} processes'
    )
  mesh, own = sharding.make_meshes(cfg.mesh, place)
  sharding.check_hosts(mesh, hosts)
  stages = {}
  for name, stage in cfg.stages.items():
    prefix = f'{name}.model' if stage.model else 'model'
    with _naming(name, prefix):
      model = stage.model or cfg.model
      size = model.vocab_size or renderer.tokenizer.vocab_size
      model = dataclasses.replace(model, vocab_size=size)
      is_slow = model.is_large and platform == 'cpu'
      auto = {'dtype': ('bfloat16', 'float32'), 'remat': ('block', 'none')}
      for key, (usual, slow) in auto.items():
        if getattr(model, key) == 'auto':
          value = slow if is_slow else usual
          model = dataclasses.replace(model, **{key: value})
    rows = sharding.batch_ways(mesh, sharding.ROW_AXES)
    stage = dataclasses.replace(stage, model=model)
    in_pieces = max(x.shape[sharding.SEQUENCE] for x in (mesh, own)) > 1
    if in_pieces and stage.batch.trees is None:
      batch = dataclasses.replace(stage.batch, trees=False)
      stage = dataclasses.replace(stage, batch=batch)
    stage = resolve_sizes(stage, rows, sharding.batch_ways(own), is_slow)
    if stage.batch.trees and (model.delta_layers or in_pieces):
      key = 'mesh.sequence above 1' if in_pieces else 'model.delta_layers'
      raise ValueError(
        f'config.{name}.batch.trees must be False with {key}: got True'
      )
    with _naming(name, prefix):
      attention.check(model, platform, bool(stage.batch.trees))
    if samplers is not None and stage.rollout.keep_cache:
      raise ValueError(
        f'config.{name}.rollout.keep_cache must be False with --samplers: got '
        'True'
      )
    stages[name] = stage
  return models.Resolved(
    dataclasses.replace(cfg, stages=stages),
    config.to_dict(cfg),
    renderer,
    mesh,
    own,
    platform,
    hosts,
    samplers,
  )


def make(
  run: models.Resolved, name: str, min_capacity: MinCapacity | None = None
) -> models.Components:
  """Builds the components of a stage.

  Args:
    run: the run's options, from `resolve`.
    name: the stage's name.
    min_capacity: further tokens that a slot must hold.

  Raises:
    ValueError: weights, batch, slots, vocabulary, environments or data do not
      fit.
  """
  # 1. The options of the stage.
  cfg, stage, mesh = run.cfg, run.cfg.stages[name], run.mesh
  model, index = stage.model, list(cfg.stages).index(name)
  assert model is not None and model.vocab_size is not None
  renderer = run.renderer.with_embedding_rows(model.vocab_size)
  # 2. The data, and what trains on it; the devices share its batches.
  data = make_data(cfg.seed, index, name, stage, renderer)
  for key, text, reach in checks.texts(stage, f'config.{name}'):
    module = text.partition(':')[0]
    if reach == 'function' and not module.startswith('posttrain.'):
      file = getattr(importlib.import_module(module), '__file__', '')
      place = f'{module}.py, of {key}={text}'
      if os.path.isfile(file):
        data.hashes = {**data.hashes, place: row_files.fingerprint(file)}
  with _naming(name, f'{name}.lora'):
    spec = learner.make_spec(
      name, stage, model, mesh, data.env_names, (cfg.seed, index)
    )
  micro_batches, rows, row_tokens = data.shape
  key = f'config.{name}.batch'
  sharding.check_batch(
    mesh, rows, f'{key}.micro_batch_tokens', row_tokens, sharding.ROW_AXES
  )
  slots = stage.rollout.slot_count
  sharding.check_batch(run.sampler_mesh, slots, f'config.{name}.rollout.slots')
  for axis in ('sequence', 'expert', 'tensor'):
    if stage.batch.reduce_gradients == 'update' and mesh.shape[axis] > 1:
      raise ValueError(
        f'{key}.reduce_gradients must be micro_batch with config.mesh.{axis}='
        f'{mesh.shape[axis]}: got update; choose fsdp for these devices'
      )
  # 3. The tasks of its evaluation.
  envs = dict(data.envs) if spec.objective.generates_text else {}
  with _naming(name):
    eval_tasks = evaluator.EvalTasks(envs, renderer, stage, cfg.seed)
  # 4. The plan, with the models that are held beside the policy.
  capacity = max(eval_tasks.max_length, data.min_capacity)
  if min_capacity is not None:
    capacity = max(capacity, min_capacity(renderer, data))
  held_out = {**eval_tasks.counts, **data.held_out_counts}
  held = {*data.held_models, *(('init',) if stage.eval.kl else ())}
  if stage.lora.rank:
    held -= {'init'}  # the frozen weights are held anyway
  parameters = 0
  for reference in held:
    if isinstance(reference, schema.Endpoint) or frozen_models.tracks_policy(
      reference
    ):
      continue
    options = model
    if schema.is_path(reference):
      with contextlib.suppress(ValueError):  # `check` reports it
        options = weights.read(weights.find(reference)).model
    parameters += transformer.num_params(options)
  load = plan.Load(
    group_sizes=data.group_sizes,
    micro_batches=micro_batches,
    references=parameters,
    players=len([x for x in data.players if isinstance(x, str)]),
    hosts=run.hosts,
    sampler=None if cfg.mesh.sampler is None else run.sampler_mesh,
    has_samplers=run.samplers is not None,
    uses_policy=data.uses_policy,
    tasks={k: (n, held_out.get(k, 0)) for k, n in data.task_counts.items()},
  )
  scaling, longest = model.rope_scaling, max(capacity, row_tokens)
  by_length = model.rope_length is None and scaling.kind in (
    'dynamic',
    'longrope',
  )
  if by_length and longest > scaling.original_length:
    raise ValueError(
      f'config.model.rope_length must be given with rope_scaling.kind='
      f'{scaling.kind} and sequences above original_length='
      f'{scaling.original_length}: got None, and up to {longest} tokens'
    )
  slot_tokens = plan.slot_tokens(capacity, run.platform)
  rollout, samples = stage.rollout, stage.kind == 'tokens' and bool(envs)
  shares = rollout.shared_prompts and samples and load.group_size > 1
  if shares and min_capacity is None:
    after = _tokens_after_prompts(name, stage, envs)
    # Short prompts fit in a slot: few are stored in the other place.
    own = plan.slot_tokens(after + rollout.prefill_tokens, run.platform)
    load = dataclasses.replace(load, prompt_tokens=max(slot_tokens - own, 0))
  try:
    planned = plan.make(spec, model, slot_tokens, load)
  except ValueError as error:  # the learner's mesh has passed
    text = str(error).replace('config.mesh.', 'config.mesh.sampler.')
    raise ValueError(text) from None
  return models.Components(
    cfg=cfg,
    name=name,
    stage=stage,
    renderer=renderer,
    model=model,
    mesh=mesh,
    sampler_mesh=run.sampler_mesh,
    data=data,
    eval_tasks=eval_tasks,
    capacity=capacity,
    spec=spec,
    plan=planned,
    slots=slots // run.hosts,
    workers=make_workers(name, stage, data.envs),
    outside=models.Outside(
      run.options,
      resolve_folder,
      Loader,
      lambda cfg, caller, rows: endpoints.Endpoint(
        cfg, caller, vocab_size=rows
      ),
      endpoints.Engine,
      run.samplers,
      engine_client.EngineClient,
    ),
  )


def _tokens_after_prompts(
  name: str, stage: schema.Stage, envs: Mapping[str, base.Env]
) -> int:
  """Returns the most tokens after a prompt, for `rollout.shared_prompts`.

  Raises:
    ValueError: there is no bound.
  """
  tokens = [stage.eval.max_tokens]  # those of the suite
  for key, env in envs.items():
    sampler = stage.envs[key].sampler
    for path, cfg in ((f'envs.{key}.sampler', sampler), ('eval', stage.eval)):
      if isinstance(cfg, schema.Dataset):
        continue
      bound = cfg.max_tokens if env.max_turns == 1 else cfg.max_episode_tokens
      if bound is None:
        raise ValueError(
          f'config.{name}.{path}.max_episode_tokens must be set with '
          'rollout.shared_prompts and several turns: got None'
        )
      tokens.append(bound)
  return max(tokens)


def shares_prompts(stage: schema.Stage) -> bool:
  """Returns whether trees pay for a stage, see `schema.Batch`."""
  if stage.model is not None and not stage.model.serves_trees:
    return False
  if stage.kind != 'tokens':
    return not isinstance(stage.loss.preference, schema.Kto)
  row = stage.batch.row_tokens
  return any(
    entry.ratio > 0
    and entry.group_size > 1
    and not isinstance(entry.sampler, schema.Dataset)
    and 8 * (row - entry.sampler.max_tokens) >= row
    for entry in stage.envs.values()
  )


def resolve_sizes(
  stage: schema.Stage, devices: int, sampler_devices: int, is_slow: bool = False
) -> schema.Stage:
  """Returns a stage's options with every size set.

  `batch.micro_batch_tokens`: as many rows per device of data x fsdp x expert
  as 2,048 tokens hold, at least one; rows that fit their samples
  (`batch.fit`), and those with trees, are joined to one per device.
  `rollout.slots`: as many as a step has samples, at most 256 per device of all
  axes but tensor; where evaluations alone decode, at most 16 on pairs of a
  file, and 8 where computing is slow.
  `eval.prompts`: as many as `eval.max_sampled_tokens` allow.

  Args:
    stage: the options.
    devices: number of devices that share the rows of a micro-batch.
    sampler_devices: number of those that share slots.
    is_slow: whether a step takes long: a large model on a CPU.
  """
  batch, rollout, evaluation = stage.batch, stage.rollout, stage.eval
  fit, tokens = batch.fit, batch.micro_batch_tokens
  trees = shares_prompts(stage) if batch.trees is None else batch.trees
  if fit is None:
    is_large = stage.model is not None and stage.model.is_large
    fit = (is_slow and tokens is None) or (trees and not is_large)
  if tokens is None:
    rows = devices * max(1, MICRO_BATCH_TOKENS // batch.packed_tokens)
    tokens = rows * batch.packed_tokens
  batch = dataclasses.replace(
    batch, fit=fit, trees=trees, micro_batch_tokens=tokens
  )
  if fit or trees:
    joined = max(batch.rows // devices, 1)
    tokens = devices * joined * batch.row_tokens
    batch = dataclasses.replace(
      batch, joined_rows=joined, micro_batch_tokens=tokens
    )
  if rollout.slots is None:
    sizes = (x.group_size for x in stage.envs.values() if x.ratio)
    group_size = max(sizes, default=1)
    each = -(-batch.prompts_per_step * group_size // sampler_devices)
    of_file = isinstance(stage.pairs, schema.PairFile)
    most = 16 if of_file else MAX_SLOTS
    if of_file or {x.sampler.type for x in stage.envs.values()} == {'dataset'}:
      most = 8 if is_slow else most
    slots = sampler_devices * min(each, most)
    rollout = dataclasses.replace(rollout, slots=slots)
  sampled, prompts = evaluation.max_sampled_tokens, evaluation.prompts
  if sampled is None and is_slow:
    sampled = SAMPLED_TOKENS
  if sampled is not None and evaluation.best is None:
    # With `best`, its tasks follow those that are reported, in all stages.
    each = evaluation.max_tokens * (1 + evaluation.samples)
    prompts = min(prompts, max(sampled // each, 1))
  evaluation = dataclasses.replace(
    evaluation, max_sampled_tokens=sampled, prompts=prompts
  )
  return dataclasses.replace(
    stage, batch=batch, rollout=rollout, eval=evaluation
  )


@contextlib.contextmanager
def _naming(name: str, key: str = '') -> Iterator[None]:
  """Completes keys in errors.

  Args:
    name: the stage's name, with which its keys begin.
    key: of the options whose fields are checked; '' = the stage's.
  """
  try:
    yield
  except schema.FieldError as error:
    path = f'config.{key or name}.{error.field}'
    raise ValueError(f'{path} {error.detail}') from None
  except ValueError as error:
    text = str(error).replace('config.STAGE.', f'config.{name}.')
    if text.startswith('envs.'):
      text = f'config.{name}.{text}'
    if text == str(error):
      raise
    raise ValueError(text) from error


def make_data(
  seed: int,
  index: int,
  name: str,
  stage: schema.Stage,
  renderer: rendering.Renderer,
) -> batches.StageData:
  """Builds a stage's data.

  Args:
    seed: the run's.
    index: index of the stage within the run.
    name: the stage's name.
    stage: its options, with the sizes on the mesh.
    renderer: the run's renderer.

  Raises:
    ValueError: the data cannot be used; names their key.
  """
  with _naming(name):
    return pipeline.DATA[stage.kind](
      stage, registry.make_all(stage.envs), renderer, seed, index
    )


def make_workers(
  name: str, stage: schema.Stage, envs: Mapping[str, base.Env]
) -> remote.Remote | None:
  """Builds the workers of a stage, None if it has none; starts nothing.

  Args:
    name: the stage's name.
    stage: its options.
    envs: its environments.

  Raises:
    ValueError: Ray is not installed, or an environment needs a judge, which
      this process alone has.
  """
  if stage.rollout.workers == 'threads':
    return None
  key = f'config.{name}.rollout.workers'
  remote.check(key)
  options = {k: stage.envs[k].env for k, env in envs.items() if env.blocking}
  for env in options:
    if stage.envs[env].judge is not None:
      raise ValueError(
        f"config.{name}.envs.{env}.judge must be None where {key}='ray': got "
        f'{str(stage.envs[env].judge)!r}, which its workers cannot call'
      )
  return remote.Remote(stage.rollout, options, remote.Handle)


def check(run: models.Resolved) -> dict[str, models.Components]:
  """Builds and checks the components of every stage; compiles nothing.

  Args:
    run: the run's options, from `resolve`.

  Raises:
    ValueError: anything that can be seen to be wrong without compiling.
  """
  stages = {}
  for name in run.cfg.stages:
    own = stages[name] = make(run, name)
    with _naming(name):
      own.data.check()
    named: list[Any] = [(own.stage.init, 'init', weights.check)]
    named += [(*x, check_reference) for x in own.data.references.items()]
    named += [(*x, check_reward_model) for x in own.data.reward_models.items()]
    for model, key, compare in named:
      if isinstance(model, schema.Endpoint) or not schema.is_path(model):
        continue
      try:
        compare(weights.find(model), own.model, own.renderer)
      except ValueError as error:
        raise ValueError(
          f'config.{name}.{key} must name a model that fits: got {model!r}; '
          f'{error}'
        ) from error
  return stages


def check_reference(
  folder: str, policy: schema.Model, renderer: rendering.Renderer
) -> schema.Model:
  """Checks that a reference has the policy's tokens; reads no weights.

  Args:
    folder: a checkpoint's folder.
    policy: the policy's options.
    renderer: the policy's renderer.

  Returns:
    The reference's model options: the policy's if the shapes are equal, else
    its own with the policy's dtype.

  Raises:
    ValueError: its tokens are others, or it has only some of them.
  """
  cfg = weights.read(folder).model
  weights.check(folder, cfg, renderer)
  if not hf_config.differing(cfg, policy):
    return policy
  _check_tokens(folder, cfg, renderer.tokenizer.vocab_size)
  return _computing_as(cfg, policy)


def _computing_as(cfg: schema.Model, policy: schema.Model) -> schema.Model:
  """Returns a frozen model's options, with dtype and attention of a policy."""
  return dataclasses.replace(
    cfg, dtype=policy.dtype, remat='none', attention=policy.attention
  )


def check_reward_model(
  folder: str, policy: schema.Model, renderer: rendering.Renderer
) -> None:
  """Checks that a reward model can score a policy's samples; reads no weights.

  Raises:
    ValueError: the folder has no reward model, or its tokens are others.
  """
  model = weights.read(folder).model
  weights.check(folder, model, renderer, reward=True)
  _check_tokens(folder, model, policy.vocab_size or 0)


def _check_tokens(folder: str, model: schema.Model, least: int) -> None:
  """Refuses a model with fewer tokens than those that it must score."""
  if (model.vocab_size or 0) < least:
    raise ValueError(
      f'{folder} must have {least} tokens: got {model.vocab_size}'
    )


def resolve_folder(name: str, workdir: str) -> str:
  """Returns the step folder that 'stage:NAME' or a path stands for now.

  Checkpoints store it, so that a resumed stage loads the same weights even if
  there are newer ones.

  Args:
    name: a reference, or an `init`.
    workdir: the run's folder.

  Returns:
    The name itself if it is 'init', 'random' or tracks the policy; else the
    folder, relative to the workdir if it is inside.

  Raises:
    ValueError: the folder has no weights.
  """
  if (stage := schema.stage_of(name)) is not None:
    path = os.path.join(workdir, 'checkpoints', stage)
  elif schema.is_path(name):
    path = name
  else:
    return name
  folder, root = weights.find(path), os.path.realpath(workdir)
  inside = os.path.commonpath([folder, root]) == root
  return os.path.relpath(folder, root) if inside else folder


@dataclasses.dataclass(frozen=True)
class Loader:
  """The models of a stage's folders."""

  seed: int  # of random weights
  workdir: str  # of the run
  folders: Mapping[str, str]  # name -> its `resolve_folder`, or 'random'
  like: Params  # the policy's, as arrays or ShapeDtypeStructs, with shardings
  model: schema.Model  # the policy's
  renderer: rendering.Renderer  # the policy's
  mesh: jax.sharding.Mesh

  def __call__(self, name: str) -> frozen_models.Model:
    """Builds or restores a model; every call does so anew.

    Raises:
      ValueError: no such checkpoint, other tokens, or 'init' is another model.
    """
    folder, cfg, like = self.folders[name], self.model, self.like
    if name != 'init':  # only a base is quantized
      like = weights.float_like(like)
    if folder == 'random':
      random = jax.jit(
        lambda: transformer.init(jax.random.key(self.seed), cfg),
        out_shardings=jax.tree.map(lambda x: x.sharding, like),
      )
      return frozen_models.Model(random(), cfg)
    path = os.path.join(self.workdir, folder)
    try:
      if name == 'init':
        weights.check(path, cfg, self.renderer)
      else:
        cfg = check_reference(path, cfg, self.renderer)
      if cfg != self.model:
        like = sharding.placed(
          transformer.shapes(cfg), transformer.SHARDING_RULES, self.mesh
        )
      average = weights.read(path).selects
      params = weights.load(path, like, average=average)
    except ValueError as error:
      raise ValueError(
        f'weights of {name!r} must be the same as when the stage began, at '
        f'{path}: {error}'
      ) from error
    return frozen_models.Model(params, cfg)

  def init(self) -> Params:
    """Returns the stage's initial parameters."""
    return self('init').params

  def reward_model(
    self, name: str, scorer: Callable[[schema.Model], scoring.Scorer]
  ) -> frozen_models.RewardModel:
    """Restores a reward model onto the devices.

    Args:
      name: the reward model's name in the config.
      scorer: builds the scorer of a reward model.

    Raises:
      ValueError: the folder has no reward model, or is missing.
    """
    folder = os.path.join(self.workdir, self.folders[name])
    cfg = _computing_as(weights.read(folder).model, self.model)
    like = sharding.placed(
      weights.shapes(folder, cfg), transformer.SHARDING_RULES, self.mesh
    )
    # Averaged weights where the run keeps them: evaluation used those.
    params = weights.load(folder, like, average=True)
    return frozen_models.RewardModel(name, params, scorer(cfg))

  def fingerprint(self, name: str) -> str:
    """Returns a hash of a model's weights."""
    folder = self.folders[name]
    if folder == 'random':
      model = weights.model_text(self.model)
      return sources.fingerprint(f'random {self.seed} {model}'.encode())
    return weights.fingerprint(os.path.join(self.workdir, folder))

  def base_sums(self, base: Params) -> dict[str, Any]:
    """Returns checksums of frozen weights, for `check_base`."""
    return weights.base_sums(base)

  def check_base(self, folder: str, base: Params) -> None:
    """Refuses base weights that have changed since a step was saved."""
    weights.check_base(folder, base)


def check_resume(
  new: dict[str, Any], workdir: str, stages: Mapping[str, models.Components]
) -> None:
  """Refuses options and data other than those a workdir was trained with.

  Options are compared with the newest checkpoint of every stage in the workdir,
  also of stages that `new` does not have; without any with config.json.

  Args:
    new: the run's options, plain data.
    workdir: its folder.
    stages: the stages whose data are compared. They may have moved.

  Raises:
    ValueError: names the options or data that differ, or a config.json that is
      not one of a run.
  """
  stored = False
  folder = os.path.join(workdir, 'checkpoints')
  for name in new['stages']:
    if new[name]['init'] == os.path.abspath(workdir):
      raise ValueError(
        f'--workdir must be another folder than the model, config.{name}.init: '
        f'got {workdir} for both; --workdir={workdir.rstrip("/")}_2 trains it '
        'further; the command that began the run continues it'
      )
  for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
    host = store.newest_host(os.path.join(folder, name))
    if host is not None:
      hashes = host.get('data')
      config.check_resume(host['config'], new, hashes is not None)
      stored = True
      if hashes and name in stages and host['step'] < new[name]['steps']:
        for key, own in stages[name].data.fingerprints().items():
          if own != (hashes.get(key) or own):
            if ',' in key:  # code, which may have been corrected
              logging.getLogger('absl').warning(
                '%s',
                f'{key}, has changed since step {host["step"]} of {workdir}, '
                'which goes on with it as it is now; to begin again, use '
                'another --workdir',
              )
              continue
            node = functools.reduce(operator.getitem, key.split('.'), new[name])
            raise ValueError(
              f'config.{name}.{key} must have the data that {workdir} was '
              f'trained on: {errors.quote(node)} has changed; put the old data '
              'back, or use another --workdir'
            )
  path = os.path.join(workdir, 'config.json')
  if stored or not os.path.exists(path):
    return
  try:
    old = disk.read_json_object(path)
    config.from_dict(old, path)
  except ValueError as error:
    raise ValueError(
      f'--workdir must be a new folder, or one of a run: {error}'
    ) from error
  if os.path.exists(os.path.join(workdir, 'metrics.jsonl')):
    config.check_resume(old, new)
