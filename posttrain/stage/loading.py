"""Models of a stage that come from folders: names, checks, weights.

1. `resolve`: the folder of a name, fixed when a stage begins.
2. `check_reference` and `check_reward_model` compare a folder with the policy.
3. `Loader`: the models of the folders; it is handed to the stage in
   `components.Outside`, with the clients of servers.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax

from posttrain import schema, scoring, sharding
from posttrain.chat import rendering
from posttrain.checkpoints import store, weights
from posttrain.data import sources
from posttrain.models import hf_config, transformer
from posttrain.rollout import endpoints, frozen_models
from posttrain.stage import components

Params = Any


def resolve(name: str, workdir: str) -> str:
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
  kind, _, target = name.partition(':')
  if kind == 'stage':
    path = os.path.join(workdir, 'checkpoints', target)
  elif schema.is_path(name):
    path = name
  else:
    return name
  folder, root = weights.find(path), os.path.realpath(workdir)
  inside = os.path.commonpath([folder, root]) == root
  return os.path.relpath(folder, root) if inside else folder


@dataclasses.dataclass(frozen=True)
class Loader:
  """The models of a stage's folders, see `components.Loader`."""

  seed: int  # of random weights
  workdir: str  # of the run
  folders: Mapping[str, str]  # name -> its folder by `resolve`, or 'random'
  like: Params  # the policy's, as arrays or ShapeDtypeStructs, with shardings
  model: schema.Model  # the policy's
  renderer: rendering.Renderer  # the policy's
  mesh: jax.sharding.Mesh

  def __call__(self, name: str) -> frozen_models.Model:
    """Builds or restores a model; every call does so anew.

    Raises:
      ValueError: no such checkpoint, other tokens, or 'init' is another model.
    """
    folder = self.folders[name]
    if folder == 'random':
      random = jax.jit(
        lambda: transformer.init(jax.random.key(self.seed), self.model),
        out_shardings=jax.tree.map(lambda x: x.sharding, self.like),
      )
      return frozen_models.Model(random(), self.model)
    path = os.path.join(self.workdir, folder)
    try:
      return self._load(path, same=name == 'init')
    except ValueError as error:
      raise ValueError(
        f'weights of {name!r} must be the same as when the stage began, at '
        f'{path}: {error}'
      ) from error

  def init(self) -> Params:
    """Returns the stage's initial parameters."""
    return self('init').params

  def _load(self, path: str, same: bool) -> frozen_models.Model:
    if same:
      weights.check(path, self.model, self.renderer)
    cfg = (
      self.model if same else check_reference(path, self.model, self.renderer)
    )
    like = self.like
    if cfg != self.model:
      like = sharding.placed(
        transformer.shapes(cfg), transformer.SHARDING_RULES, self.mesh
      )
    average = weights.read(path).selects
    return frozen_models.Model(weights.load(path, like, average=average), cfg)

  def reward_model(
    self, name: str, scorer: Callable[[schema.Model], scoring.Scorer]
  ) -> frozen_models.RewardModel:
    """Restores a reward model onto the devices; see `reward_model`."""
    path = os.path.join(self.workdir, self.folders[name])
    return reward_model(name, path, self.model, scorer, self.mesh)

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
  if (cfg.vocab_size or 0) < renderer.tokenizer.vocab_size:
    raise ValueError(
      f'{folder} must have the {renderer.tokenizer.vocab_size} tokens of '
      f'config.tokenizer: got {cfg.vocab_size}; use a reference of the same '
      'tokenizer'
    )
  return dataclasses.replace(
    cfg, dtype=policy.dtype, remat='none', attention=policy.attention
  )


def reward_model(
  name: str,
  folder: str,
  policy: schema.Model,
  scorer: Callable[[schema.Model], scoring.Scorer],
  mesh: Any,
) -> frozen_models.RewardModel:
  """Restores a reward model onto the devices.

  Args:
    name: the reward model's name in the config.
    folder: a checkpoint's folder, of a stage of kind 'ranking'.
    policy: options of the policy; the reward model computes in its dtype.
    scorer: builds the scorer of a reward model.
    mesh: the device mesh that holds the parameters.

  Raises:
    ValueError: the folder has no reward model, or is missing.
  """
  cfg = dataclasses.replace(
    weights.read(folder).model,
    dtype=policy.dtype,
    remat='none',
    attention=policy.attention,
  )
  has_lm_head = any(
    path.startswith('params/head/') for path in store.read_sums(folder)
  )
  like = sharding.placed(
    transformer.reward_shapes(cfg, has_lm_head),
    transformer.SHARDING_RULES,
    mesh,
  )
  # Averaged weights where the run keeps them: evaluation used those.
  params = weights.load(folder, like, average=True)
  return frozen_models.RewardModel(name, params, scorer(cfg))


def check_reward_model(
  folder: str, policy: schema.Model, renderer: rendering.Renderer
) -> None:
  """Checks that a reward model can score a policy's samples; reads no weights.

  Raises:
    ValueError: the folder has no reward model, or its tokens are others.
  """
  checkpoint = weights.read(folder)
  if checkpoint.kind != 'run':
    raise ValueError(
      f'{folder} must hold a reward model, a run of kind ranking: got a '
      'HuggingFace or PEFT directory'
    )
  weights.check(folder, checkpoint.model, renderer, reward=True)
  tokens = checkpoint.model.vocab_size or 0
  if tokens < (policy.vocab_size or 0):
    raise ValueError(
      f'{folder} must have the {policy.vocab_size} tokens of the policy: got '
      f'{tokens}; train it from the same model'
    )


def outside(options: dict[str, Any]) -> components.Outside:
  """Returns what a stage gets from files and servers.

  Args:
    options: the run's options as plain data.
  """
  return components.Outside(
    options,
    resolve,
    Loader,
    lambda cfg, caller, rows: endpoints.Endpoint(cfg, caller, vocab_size=rows),
    endpoints.Engine,
  )
