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
  check_kind(folder, reward=reward)
  if weight_folders.is_peft(folder):
    check(weight_folders.start(folder), cfg, tokens)
    peft.check(folder, cfg)
    return
  if weight_folders.is_hf(folder):
    pretrained.check(folder, tokens.tokenizer)
  else:
    rendering.check_fingerprint(
      tokens.fingerprint,
      weight_folders.read_host(folder)['tokenizer'],
      'config.tokenizer',
      f'the checkpoint {folder}',
    )
  actual = weight_folders.model(folder)
  remedy = 'use the model it was saved with'
  if weight_folders.is_hf(folder):
    remedy = f'--config.model={folder} sets all model options'
  for field in hf_config.differing(actual, cfg):
    raise ValueError(
      f'{folder} must hold weights of this model: its {field} is '
      f'{getattr(actual, field)!r}, and config.model.{field} is '
      f'{getattr(cfg, field)!r}; {remedy}'
    )
  _check_headers(folder, actual, reward)


def _check_headers(folder: str, cfg: schema.Model, reward: bool) -> None:
  """Checks names, shapes and dtypes of a folder's weights, and of its base."""
  if folder == 'random':
    return
  if weight_folders.is_hf(folder):
    hf.check(folder, cfg)
    return
  options = weight_folders.adapter_options(folder)
  like = transformer.shapes(cfg)
  if options is not None:
    like = lora.shapes(options, like)
  elif reward:
    sums = reading.read_sums(folder)
    has_lm_head = any(path.startswith('params/head/') for path in sums)
    like = reward_head.shapes(cfg, has_lm_head)
  reading.check_params(folder, like)
  if options is not None:
    weight_folders.chain(folder)  # refuses one that started from itself
    _check_headers(weight_folders.start(folder), cfg, reward=False)


def check_kind(folder: str, *, reward: bool = False) -> None:
  """Checks whether a folder holds a reward model or a policy, as expected.

  Raises:
    ValueError: it holds the other kind.
  """
  is_reward = (
    weight_folders.is_run(folder)
    and weight_folders.stage_options(folder).get('kind') == 'ranking'
  )
  if is_reward != reward:
    kinds = 'a policy', "a reward model (kind 'ranking')"
    raise ValueError(
      f'{folder} must hold {kinds[reward]}: got {kinds[is_reward]}; name '
      'another stage'
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
  check_kind(folder, reward='reward' in like)
  if weight_folders.is_hf(folder):
    return hf.load(folder, weight_folders.model(folder), like)
  correction = adapter(folder, like, average=average)
  if correction is None:
    stored = jax.tree.map(  # checkpoints hold float32
      lambda x: jax.ShapeDtypeStruct(x.shape, 'float32', sharding=x.sharding),
      like,
    )
    params = reading.restore_params(
      folder, stored, average=average and weight_folders.has_average(folder)
    )
    params = jax.tree.map(lambda x, y: x.astype(y.dtype), params, like)
    _check_finite(params, folder)
    return params
  weight_folders.chain(folder)  # refuses one that started from itself
  base = load_start(folder, like)
  if weight_folders.is_run(folder):
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
  start = weight_folders.start(folder)
  return load(start, like, average=weight_folders.selects(start))


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
  if weight_folders.is_hf(folder):
    return None
  if weight_folders.is_peft(folder):
    params, options = peft.load(folder, weight_folders.model(folder))
    shapes = _adapter_like(options, folder, like)
    params = jax.tree.map(
      lambda x, y: sharding.put(x, y.sharding) if y.sharding else x,
      params,
      shapes,
    )
    return params, options
  options = weight_folders.adapter_options(folder)
  if options is None:
    return None
  params = reading.restore_params(
    folder,
    _adapter_like(options, folder, like),
    average=average and weight_folders.has_average(folder),
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


def _adapter_like(options: schema.Lora, folder: str, like: Params | None):
  """Returns an adapter's shapes, on the mesh of the base weights."""
  shapes = lora.shapes(
    options, transformer.shapes(weight_folders.model(folder))
  )
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
  stored = weight_folders.read_host(folder).get('base')
  for path, leaf in tree.flat(base).items() if stored else ():
    dtype = jnp.dtype(stored['dtypes'][path])
    if leaf.dtype.itemsize < dtype.itemsize:
      continue
    (total,) = tree.checksums([leaf.astype(dtype)]).values()
    if total != stored['sums'][path]:
      raise ValueError(
        f'{weight_folders.start(folder)} must hold the base weights of '
        f'{folder}: {path} has changed since the adapter was trained; put the '
        'old files back'
      )
