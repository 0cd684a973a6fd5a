"""The components of every stage, built and checked before the run starts.

1. `make` builds them: renderer, model, mesh, data, evaluation tasks, plan.
2. `check` builds and checks those of every stage.
3. `check_resume` compares the options with those of the workdir.
"""

import contextlib
import dataclasses
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import cast

import jax

from posttrain import config, pipeline, processes, schema, sharding
from posttrain.chat import rendering
from posttrain.checkpoints import store, weights
from posttrain.envs import base as env_base
from posttrain.envs import registry
from posttrain.evaluation import evaluator as evaluation
from posttrain.models import transformer
from posttrain.ops import attention
from posttrain.pipeline import base
from posttrain.rollout import endpoints, frozen_models, remote
from posttrain.stage import components, loading, plan
from posttrain.training import objectives
from posttrain.util import disk, errors


def make(
  cfg: schema.Run,
  name: str,
  renderer: rendering.Renderer | None = None,
  mesh: jax.sharding.Mesh | None = None,
  min_capacity: Callable[[rendering.Renderer, base.StageData], int]
  | None = None,
  platform: str | None = None,
  hosts: int | None = None,
) -> components.Components:
  """Builds the components of a stage.

  Args:
    cfg: the run's options.
    name: the stage's name.
    renderer: the run's renderer; None = a new one.
    mesh: the run's mesh; None = a new one.
    min_capacity: returns the tokens that a sequence may have at least.
    platform: 'cpu', 'gpu' or 'tpu'; None = the one in use.
    hosts: number of processes of the run, one per host; None = as it runs.

  Raises:
    ValueError: mesh, weights, batch, slots, vocabulary, environments or data do
      not fit, or the devices lack the model's implementation of attention.
  """
  renderer = renderer or load_renderer(cfg)
  model = model_options(cfg, name, renderer)
  renderer = renderer.with_embedding_rows(model.vocab_size or 0)
  mesh = mesh or sharding.make_mesh(cfg.mesh)
  stage = components.resolve_sizes(cfg.stages[name], sharding.batch_ways(mesh))
  platform = platform or jax.default_backend()
  hosts = hosts or processes.count()
  sharding.check_hosts(mesh, hosts)
  _check_attention(cfg, name, model, platform)
  with _naming(name):
    data = make_data(cfg, name, stage, renderer)
  _check_mesh(name, stage, mesh, data)
  with _naming(name):
    eval_tasks = _eval_tasks(cfg.seed, name, stage, renderer, data)
  capacity = max(
    eval_tasks.max_length,
    data.min_capacity,
    min_capacity(renderer, data) if min_capacity else 0,
  )
  held_out = {**eval_tasks.counts, **data.held_out_counts}
  tasks = {k: (n, held_out.get(k, 0)) for k, n in data.task_counts.items()}
  load = plan.Load(
    micro_batches=data.shape[0],
    references=_reference_parameters(stage, data, model),
    players=len([x for x in data.players if isinstance(x, str)]),
    group_sizes=data.group_sizes,
    hosts=hosts,
    tasks=tasks,
  )
  slot_tokens = plan.slot_tokens(capacity, platform)
  try:
    sizes = plan.make(name, stage, model, mesh, slot_tokens, load)
  except schema.FieldError as error:
    raise ValueError(
      f'config.{name}.lora.{error.field} {error.detail}'
    ) from None
  remote_workers = make_workers(name, stage, data.envs)
  return components.Components(
    cfg,
    name,
    stage,
    renderer,
    model,
    mesh,
    data,
    eval_tasks,
    capacity,
    sizes,
    remote_workers,
    loading.outside(config.to_dict(cfg)),
  )


def _check_mesh(
  name: str, stage: schema.Stage, mesh: jax.sharding.Mesh, data: base.StageData
) -> None:
  """Refuses a batch or slots that the devices of a mesh cannot share."""
  path = f'config.{name}'
  _, rows, row_tokens = data.shape
  sharding.check_batch(
    mesh, rows, f'{path}.batch.micro_batch_tokens', row_tokens
  )
  if stage.batch.reduce_gradients == 'update' and mesh.shape['tensor'] > 1:
    raise ValueError(
      f'{path}.batch.reduce_gradients must be micro_batch with '
      f'config.mesh.tensor={mesh.shape["tensor"]}: got update; choose fsdp for '
      'these devices'
    )
  sharding.check_batch(mesh, stage.rollout.slot_count, f'{path}.rollout.slots')


def _eval_tasks(
  seed: int,
  name: str,
  stage: schema.Stage,
  renderer: rendering.Renderer,
  data: base.StageData,
) -> evaluation.EvalTasks:
  """Returns the held-out tasks of a stage; warns if it has none to answer."""
  generates_text = objectives.TYPES[stage.kind].generates_text
  tasks = evaluation.EvalTasks(
    dict(data.envs) if generates_text else {},
    renderer,
    stage.eval,
    seed,
    stage.rollout.max_errors,
    stage.rollout.env_timeout,
  )
  if generates_text and not tasks.any:
    _warn_without_tasks(name, stage, data)
  return tasks


def _warn_without_tasks(
  name: str, stage: schema.Stage, data: base.StageData
) -> None:
  """Warns of an evaluation that has neither tasks nor pairs."""
  # The fraction is above 0 as well where another option names held-out pairs.
  pairs = stage.kind != 'tokens' and stage.pairs.eval_fraction > 0
  if stage.eval.every is not None and not pairs:
    logging.getLogger('absl').warning(
      'config.%s.eval.every=%d needs tasks to evaluate: the evaluation split '
      'of each environment is empty (%s), and so is eval.suite; '
      'set eval.every=None to evaluate nothing',
      name,
      stage.eval.every,
      ', '.join(f'config.{name}.envs.{env}' for env in data.envs),
    )


def load_renderer(cfg: schema.Run) -> rendering.Renderer:
  """Returns the run's renderer: tokenizer and chat template."""
  return rendering.load(cfg.tokenizer)


def model_options(
  cfg: schema.Run, name: str, renderer: rendering.Renderer
) -> schema.Model:
  """Returns the options of a stage's model, with the vocabulary resolved."""
  model = cfg.stages[name].model or cfg.model
  size = model.vocab_size or renderer.tokenizer.vocab_size
  try:
    return dataclasses.replace(model, vocab_size=size)
  except schema.FieldError as error:  # too large with this vocabulary
    key = f'{name}.model' if cfg.stages[name].model else 'model'
    raise ValueError(f'config.{key}.{error.field} {error.detail}') from None


def _check_attention(
  cfg: schema.Run, name: str, model: schema.Model, platform: str
) -> None:
  """Refuses an implementation of attention that the devices do not have."""
  try:
    attention.check(model, platform)
  except schema.FieldError as error:
    key = f'{name}.model' if cfg.stages[name].model else 'model'
    raise ValueError(f'config.{key}.{error.field} {error.detail}') from None


def check(
  cfg: schema.Run, devices: tuple[str | None, int, int] | None = None
) -> dict[str, components.Components]:
  """Builds and checks the components of every stage; compiles nothing.

  Args:
    cfg: the run's options.
    devices: platform (None = the one in use) and number of devices that need
      not be here, and of their hosts, for plans alone; None = those of this
      run.

  Raises:
    ValueError: anything that can be seen to be wrong without compiling.
  """
  platform, count, hosts = devices or (None, None, None)
  renderer = load_renderer(cfg)
  mesh = _mesh(cfg.mesh, count)
  stages = {}
  for name in cfg.stages:
    stages[name] = make(
      cfg, name, renderer, mesh, platform=platform, hosts=hosts
    )
    with _naming(name):
      stages[name].data.check()
    _check_paths(stages[name])
  return stages


def _mesh(cfg: schema.Mesh, count: int | None) -> jax.sharding.Mesh:
  if count is None:
    return sharding.make_mesh(cfg)
  # Plans use the shape of the mesh alone.
  return cast(jax.sharding.Mesh, sharding.abstract_mesh(cfg, count))


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
  """Completes keys of a stage in errors: they begin with its name."""
  try:
    yield
  except ValueError as error:
    text = str(error).replace('config.STAGE.', f'config.{name}.')
    if text.startswith('envs.'):
      text = f'config.{name}.{text}'
    if text == str(error):
      raise
    raise ValueError(text) from error


def make_data(
  cfg: schema.Run, name: str, stage: schema.Stage, renderer: rendering.Renderer
) -> base.StageData:
  """Builds a stage's data.

  Args:
    cfg: the run's options.
    name: the stage's name.
    stage: its options, with the sizes on the mesh.
    renderer: the run's renderer.

  Raises:
    ValueError: the data cannot be used; names their key.
  """
  index = list(cfg.stages).index(name)
  try:
    return pipeline.DATA[stage.kind](
      stage, registry.make_all(stage.envs), renderer, cfg.seed, index
    )
  except base.DataError as error:
    raise ValueError(
      f'config.{name}.{error.key} cannot be used: {error}'
    ) from error


def _reference_parameters(
  stage: schema.Stage, data: base.StageData, policy: schema.Model
) -> int:
  """Returns the parameters of the models that are held beside the policy."""
  names = {*data.held_models, *(('init',) if stage.eval.kl else ())}
  if stage.lora.rank:
    names -= {'init'}  # the frozen weights are held anyway
  total = 0
  for name in names:
    if isinstance(name, schema.Endpoint) or frozen_models.tracks_policy(name):
      continue
    model = policy
    if schema.is_path(name):
      with contextlib.suppress(ValueError):  # `preflight` reports it
        model = weights.read(weights.find(name)).model
    total += transformer.num_params(model)
  return total


def _check_paths(parts: components.Components) -> None:
  """Refuses weights from outside of the run that are of another model."""
  data, name = parts.data, parts.name
  named = [
    (parts.stage.init, 'init', 'weights of this model', weights.check),
    *(
      (*x, 'a model with these tokens', loading.check_reference)
      for x in data.references.items()
    ),
    *(
      (*x, 'a reward model', loading.check_reward_model)
      for x in data.reward_models.items()
    ),
  ]
  for model, key, what, check in named:
    try:
      if isinstance(model, schema.Endpoint):
        _check_endpoint(model, parts.renderer, f'config.{name}.{key}')
      elif schema.is_path(model):
        check(weights.find(model), parts.model, parts.renderer)
    except ValueError as error:
      raise ValueError(
        f'config.{name}.{key} must name {what}: got {str(model)!r}; {error}'
      ) from error


def _check_endpoint(
  model: schema.Endpoint, renderer: rendering.Renderer, key: str
) -> None:
  """Checks a server's model and tokens, in one try; it may start later."""
  once = dataclasses.replace(model, tries=1, timeout=min(model.timeout, 10.0))
  with contextlib.closing(endpoints.Endpoint(once, key)) as endpoint:
    try:
      endpoint.check(renderer)
    except endpoints.EndpointError as error:
      if error.status is not None:
        raise ValueError(str(error)) from error
      logging.getLogger('absl').warning(
        '%s: the server does not answer yet; it is tried again when the stage '
        'begins: %s',
        key,
        error,
      )


def make_workers(
  name: str, stage: schema.Stage, envs: Mapping[str, env_base.Env]
) -> remote.Remote | None:
  """Builds the workers of a stage, None if it has none; starts nothing.

  Args:
    name: the stage's name.
    stage: its options.
    envs: its environments.

  Raises:
    ValueError: Ray is not installed, nothing would use the workers, or an
      environment needs what this process alone has.
  """
  if stage.rollout.workers == 'threads':
    return None
  key = f'config.{name}.rollout.workers'
  remote.check(key)
  options = {k: stage.envs[k].env for k, env in envs.items() if env.blocking}
  for env in options:
    judge = stage.envs[env].judge
    if judge is not None:
      raise ValueError(
        f"config.{name}.envs.{env}.judge must be None where {key}='ray': got "
        f'{str(judge)!r}, a model of this process that its workers cannot '
        "call; set workers='threads'"
      )
  functions = [
    reward
    for entry in stage.envs.values()
    for reward in entry.rewards.values()
    if reward.fn is not None and reward.judge is None
  ]
  if not options and not functions:
    raise ValueError(
      f"{key} must be 'threads' where no environment is blocking and no "
      f"reward function is called without a judge: got 'ray'; nothing would "
      'use the workers'
    )
  return remote.Remote(stage.rollout, options, remote.start)


def check_resume(run: schema.Run, workdir: str) -> None:
  """Refuses options that differ from those a workdir was trained with.

  They are compared with the newest checkpoint of every stage in the workdir,
  also of stages that `run` does not have, and with config.json.

  Raises:
    ValueError: names the options that differ, or a config.json that is not one
      of a run, where no checkpoint holds the options.
  """
  new, stored = config.to_dict(run), False
  for name in dict.fromkeys((*run.stages, *_stages(workdir))):
    host = store.newest_host(os.path.join(workdir, 'checkpoints', name)) or {}
    if isinstance(host.get('config'), dict):  # absent in the oldest ones
      config.check_resume(host['config'], new)
      stored = True
  path = os.path.join(workdir, 'config.json')
  used = os.path.exists(os.path.join(workdir, 'metrics.jsonl'))
  if not os.path.exists(path):
    return
  try:
    old = disk.read_json_object(path)
    config.from_dict(old, path)
  except ValueError as error:
    if not stored:
      raise ValueError(
        f'--workdir must be a new folder, or one of a run: {error}; move that '
        'file away, or name another folder'
      ) from error
    warnings.warn(
      f'{errors.text(error)}; it is written anew, as the checkpoints hold the '
      'same options',
      stacklevel=2,
    )
  else:
    if used:
      config.check_resume(old, new)


def write_config(run: schema.Run, workdir: str) -> None:
  """Writes config.json, whole or not at all."""
  path = os.path.join(workdir, 'config.json')
  with disk.replacing(path) as f:
    json.dump(config.to_dict(run), f, indent=2)
    f.flush()
    os.fsync(f.fileno())


def _stages(workdir: str) -> list[str]:
  """Returns the names of the folders of stages in a workdir."""
  folder = os.path.join(workdir, 'checkpoints')
  names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
  return [x for x in names if os.path.isdir(os.path.join(folder, x))]
