"""Weights of a folder: a run's, a HuggingFace directory's, a PEFT adapter's.

1. `check` compares the folder, and the headers of its weights, with a given
   model; it reads no weights.
2. `load` reads the weights. A checkpoint of a stage with LoRA, and a PEFT
   directory, hold an adapter only; it is merged into its base weights.

Every `folder` is one of `weight_folders.find`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from posttrain import schema, sharding, tree
from posttrain.chat import pretrained, rendering
from posttrain.checkpoints import reading, weight_folders
from posttrain.models import hf, hf_config, lora, peft, reward_head, transformer

Params = Any


def check(
  folder: str,
  cfg: schema.Model,
  tokens: rendering.Renderer,
  *,
  reward: bool = False,
) -> None:
  """Checks a folder's weights against a model; reads none of them.

  Args:
    folder: a folder from `weight_folders.find`.
    cfg: the expected model options.
    tokens: the expected renderer.
    reward: whether a reward model is expected instead of a policy.

  Raises:
    ValueError: the weights belong to another model, tokenizer or kind, or a
      file or an array of them is missing or of another shape or dtype.
  """
  checkpoint = weight_folders.read(folder)
  check_kind(checkpoint, reward=reward)
  if checkpoint.kind == 'peft':
    check(checkpoint.start(), cfg, tokens)
    peft.check(folder, cfg)
    return
  remedy = 'use the model it was saved with'
  if checkpoint.kind == 'hf':
    pretrained.check(folder, tokens.tokenizer)
    remedy = f'--config.model={folder} sets all model options'
  else:
    rendering.check_fingerprint(
      tokens.fingerprint,
      checkpoint.host['tokenizer'],
      'config.tokenizer',
      f'the checkpoint {folder}',
    )
  for field in hf_config.differing(checkpoint.model, cfg):
    raise ValueError(
      f'{folder} must hold weights of this model: its {field} is '
      f'{getattr(checkpoint.model, field)!r}, and config.model.{field} is '
      f'{getattr(cfg, field)!r}; {remedy}'
    )
  _check_headers(folder, checkpoint.model, reward)


def _check_headers(folder: str, cfg: schema.Model, reward: bool) -> None:
  """Checks names, shapes and dtypes of a folder's weights, and of its base."""
  if folder == 'random':
    return
  checkpoint = weight_folders.read(folder)
  if checkpoint.kind == 'hf':
    hf.check(folder, cfg)
    return
  like = transformer.shapes(cfg)
  if checkpoint.adapter is not None:
    like = lora.shapes(checkpoint.adapter, like)
  elif reward:
    sums = reading.read_sums(folder)
    has_lm_head = any(path.startswith('params/head/') for path in sums)
    like = reward_head.shapes(cfg, has_lm_head)
  reading.check_params(folder, like)
  if checkpoint.adapter is not None:
    weight_folders.chain(folder)  # refuses one that started from itself
    _check_headers(checkpoint.start(), cfg, reward=False)


def check_kind(
  checkpoint: weight_folders.Checkpoint, *, reward: bool = False
) -> None:
  """Checks whether a checkpoint is of a reward model or a policy, as expected.

  Raises:
    ValueError: it holds the other kind.
  """
  is_reward = checkpoint.stage.get('kind') == 'ranking'
  if is_reward != reward:
    kinds = 'a policy', "a reward model (kind 'ranking')"
    raise ValueError(
      f'{checkpoint.folder} must hold {kinds[reward]}: got {kinds[is_reward]}; '
      'name another stage'
    )


def load(folder: str, like: Params, *, average: bool = False) -> Params:
  """Reads weights into the shapes, dtypes and shardings of `like`.

  Args:
    folder: a folder from `weight_folders.find`.
    like: arrays or ShapeDtypeStructs of the folder's model.
    average: whether to read the moving average, if the run kept one.

  Raises:
    ValueError: the weights are missing, damaged, or of other shapes; or the
      base weights of an adapter have changed; or only one of folder and
      `like` is a reward model.
  """
  checkpoint = weight_folders.read(folder)
  check_kind(checkpoint, reward='reward' in like)
  if checkpoint.kind == 'hf':
    return hf.load(folder, checkpoint.model, like)
  correction = adapter(folder, like, average=average)
  if correction is None:
    stored = jax.tree.map(  # checkpoints hold float32
      lambda x: jax.ShapeDtypeStruct(x.shape, 'float32', sharding=x.sharding),
      like,
    )
    params = reading.restore_params(
      folder, stored, average=average and _has_average(checkpoint)
    )
    params = jax.tree.map(lambda x, y: x.astype(y.dtype), params, like)
    _check_finite(params, folder)
    return params
  weight_folders.chain(folder)  # refuses one that started from itself
  base = load_start(folder, like)
  if checkpoint.kind == 'run':
    check_base(folder, base)
  params, options = correction
  return lora.absorb(base, params, lora.scale(options))


def load_start(folder: str, like: Params) -> Params:
  """Reads the weights that a folder's stage or adapter started from.

  They are averaged where that stage began with averages.

  Args:
    folder: a folder from `weight_folders.find`.
    like: shapes, dtypes and shardings of the result.
  """
  start = weight_folders.read(folder).start()
  return load(start, like, average=weight_folders.read(start).selects)


def adapter(
  folder: str, like: Params | None = None, *, average: bool = False
) -> tuple[lora.Adapter, schema.Lora] | None:
  """Reads a folder's LoRA adapter and its options.

  Args:
    folder: a folder from `weight_folders.find`.
    like: the whole weights, whose devices the adapter is placed on; None = the
      first device.
    average: whether to read the moving average, if the run kept one.

  Returns:
    (float32 adapter, options); None if the folder holds whole weights.
  """
  checkpoint = weight_folders.read(folder)
  if not checkpoint.is_adapter:
    return None
  if checkpoint.kind == 'peft':
    params, options = peft.load(folder, checkpoint.model)
    shapes = _adapter_like(options, checkpoint.model, like)
    params = jax.tree.map(
      lambda x, y: sharding.put(x, y.sharding) if y.sharding else x,
      params,
      shapes,
    )
    return params, options
  options = checkpoint.adapter
  assert options is not None
  params = reading.restore_params(
    folder,
    _adapter_like(options, checkpoint.model, like),
    average=average and _has_average(checkpoint),
  )
  _check_finite(params, folder)
  return params, options


def _check_finite(params: Params, folder: str) -> None:
  """Raises ValueError for an array with NaN or infinity; names it."""
  for path in tree.not_finite(params)[:1]:
    raise ValueError(
      f'{folder} must hold finite weights: got NaN or infinity in {path}; name '
      'another step'
    )


def _has_average(checkpoint: weight_folders.Checkpoint) -> bool:
  return checkpoint.stage['optim'].get('average') is not None


def _adapter_like(options: schema.Lora, cfg: schema.Model, like: Params | None):
  """Returns an adapter's shapes, on the mesh of the base weights."""
  shapes = lora.shapes(options, transformer.shapes(cfg))
  spec = jax.tree.leaves(like)[0].sharding if like is not None else None
  if not isinstance(spec, jax.sharding.NamedSharding):
    return shapes
  return sharding.placed(shapes, transformer.SHARDING_RULES, spec.mesh)


def base_sums(base: Params) -> dict[str, Any]:
  """Returns the dtypes and checksums of frozen weights, for `check_base`."""
  dtypes = {path: x.dtype.name for path, x in tree.flat(base).items()}
  return {'dtypes': dtypes, 'sums': tree.checksums(base)}


def check_base(folder: str, base: Params) -> None:
  """Checks that base weights are those that an adapter was trained on.

  Args:
    folder: a step's folder of a run with LoRA.
    base: the weights at the stage's start path. Leaves of a narrower dtype
      than the trained ones are not checked.

  Raises:
    ValueError: the weights have changed; names the first that differs.
  """
  checkpoint = weight_folders.read(folder)
  stored = checkpoint.host.get('base')
  for path, leaf in tree.flat(base).items() if stored else ():
    dtype = jnp.dtype(stored['dtypes'][path])
    if leaf.dtype.itemsize < dtype.itemsize:
      continue
    (total,) = tree.checksums([leaf.astype(dtype)]).values()
    if total != stored['sums'][path]:
      raise ValueError(
        f'{checkpoint.start()} must hold the base weights of '
        f'{folder}: {path} has changed since the adapter was trained; put the '
        'old files back'
      )
