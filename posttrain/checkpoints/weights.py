"""Weights by path: of a run, a HuggingFace directory or a PEFT adapter.

    WORKDIR, WORKDIR/checkpoints/STAGE, .../STEP   checkpoints of a run
    a HuggingFace directory     config.json, safetensors, tokenizer.json
    a PEFT directory            adapter_config.json, which names the former

1. `find` resolves a path to a folder: a step's, or the directory.
2. `read` parses such a folder into a `Checkpoint`: its kind, its model, and
   what it started from. It reads no arrays.
3. `check` compares the folder, and the headers of its weights, with a given
   model; it reads no weights.
4. `load` reads the weights. A checkpoint of a stage with LoRA, and a PEFT
   directory, hold an adapter only; it is merged into its base weights.

Every `folder` is one of `find`.
"""

import dataclasses
import functools
import json
import os
import pathlib
from typing import Any, Literal

import jax
import jax.numpy as jnp

from posttrain import schema, sharding, tree
from posttrain.chat import rendering
from posttrain.checkpoints import store
from posttrain.data import sources
from posttrain.models import hf, hf_config, lora, peft, transformer
from posttrain.ops import quantized
from posttrain.util import disk, errors, hub, watchdog

Params = Any


def is_hf(path: str) -> bool:
  """Returns whether a path is a HuggingFace directory.

  A workdir has a config.json as well, but without a `model_type`.
  """
  try:
    return 'model_type' in disk.read_json_object(_inside(path, 'config.json'))
  except ValueError:
    return False


def is_peft(path: str) -> bool:
  """Returns whether a path is a PEFT directory."""
  return os.path.isfile(_inside(path, peft.CONFIG))


def find(path: str) -> str:
  """Resolves a path to a step's folder, or a HuggingFace or PEFT directory.

  The id of a model in the hub's cache is the directory of its commit.

  Raises:
    ValueError: the path is neither.
  """
  path = hub.folder(str(path)) or str(path)
  if is_hf(path) or is_peft(path):
    return os.path.realpath(os.path.expanduser(path))
  try:
    return str(store.find(path))
  except ValueError as error:
    config = _inside(path, 'config.json')
    if os.path.isfile(config):
      disk.read_json_object(config)  # raises if it cannot be read
    place = os.path.abspath(os.path.expanduser(path))
    got = f'there is no {errors.text(place)}{errors.near_path(path)}'
    if os.path.exists(place):
      got = f'{error}; it has no config.json with a model_type either'
    raise ValueError(
      'a checkpoint path must be a workdir, a folder in it, or a HuggingFace '
      f'or PEFT directory: got {errors.quote(path)}, but {got}{hub.hint(path)}'
    ) from error


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """What a folder of weights says of them.

  Attributes:
    folder: the folder, from `find`.
    kind: of a run, or a HuggingFace or PEFT directory.
    model: the options of the whole model. Their `attention` is 'auto': what
      the weights were trained with may not run on this machine.
    origin: the path of the weights that a stage or an adapter started from, or
      'random'; None for a HuggingFace directory.
    host: the `host` dict of a run's step; {} for a directory.
    stage: the options of the stage that saved the step; {} for a directory.
    adapter: the LoRA options of a run's step that holds an adapter alone.
  """

  folder: str
  kind: Literal['run', 'hf', 'peft']
  model: schema.Model
  origin: str | None
  host: dict[str, Any] = dataclasses.field(default_factory=dict)
  stage: dict[str, Any] = dataclasses.field(default_factory=dict)
  adapter: schema.Lora | None = None

  @property
  def is_adapter(self) -> bool:
    """Whether the folder holds an adapter, and no whole weights."""
    return self.kind == 'peft' or self.adapter is not None

  @property
  def is_reward(self) -> bool:
    """Whether the folder holds a reward model."""
    return self.stage.get('kind') == 'ranking'

  @property
  def tokenizer(self) -> schema.Tokenizer:
    """The tokenizer and template that the weights were trained with."""
    if self.kind == 'run':
      return schema.Tokenizer(**self.host['config']['tokenizer'])
    base = self.start() if self.kind == 'peft' else self.folder
    return schema.Tokenizer(path=base)

  @property
  def selects(self) -> bool:
    """Whether the folder is a step of a stage with `eval.best`.

    Such a stage hands on its averaged weights, if it keeps them: they are those
    that were evaluated. Others hand on the weights that they trained.
    """
    return self.stage.get('eval', {}).get('best') is not None

  def start(self) -> str:
    """Returns the folder of the weights that these started from, or 'random'.

    Raises:
      ValueError: the folder is missing.
    """
    assert self.origin is not None, self.folder
    if self.origin == 'random':
      return self.origin
    try:
      return find(self.origin)
    except ValueError as error:
      raise ValueError(
        f'{self.origin} must hold the weights that {self.folder} started from'
      ) from error

  def renderer(self, variables: str = '{}') -> rendering.Renderer | None:
    """Loads the tokenizer and template that the weights were trained with.

    Args:
      variables: template variables (JSON) for a directory; a run has its own.

    Returns:
      The renderer; None for a directory without a tokenizer.json.

    Raises:
      ValueError: their files are missing, or have changed since.
    """
    cfg = self.tokenizer
    if self.kind != 'run':
      if not os.path.isfile(os.path.join(cfg.path or '', 'tokenizer.json')):
        return None
      return rendering.load(
        dataclasses.replace(cfg, template_variables=variables)
      )
    stored = rendering.load(cfg)
    rendering.check_fingerprint(
      stored.fingerprint,
      self.host['tokenizer'],
      f'the tokenizer {dataclasses.asdict(cfg)}',
      self.folder,
    )
    return stored


def read(folder: str) -> Checkpoint:
  """Parses a folder.

  Args:
    folder: a folder from `find`.

  Raises:
    ValueError: its files are damaged, or lack what reading weights needs.
  """
  if is_hf(folder):
    return Checkpoint(folder, 'hf', hf_config.read(folder), None)
  if is_peft(folder):
    base = peft.read(folder).get('base_model_name_or_path') or ''
    base = hub.folder(base) or base
    if not is_hf(base):
      raise ValueError(
        f'{folder}/{peft.CONFIG}: base_model_name_or_path must be a local '
        "HuggingFace directory, or OWNER/NAME of a model in the hub's cache: "
        f'got {errors.quote(base)}{hub.hint(base)}'
      )
    return Checkpoint(folder, 'peft', read(find(base)).model, base)
  host = store.read_host(folder)
  stage = host['config'][host['stage']]
  adapter = schema.Lora(**stage.get('lora', {}))
  model = schema.Model.from_json(host['model'])
  origin = host.get('start', 'random')
  if origin != 'random':
    origin = os.path.join(pathlib.Path(folder).parents[2], origin)
  return Checkpoint(
    folder,
    'run',
    dataclasses.replace(model, attention='auto'),
    origin,
    host,
    stage,
    adapter if adapter.rank else None,
  )


def chain(folder: str) -> list[str]:
  """Returns a folder and all that it started from, in turn; 'random' is one.

  Raises:
    ValueError: a folder on the way is missing.
  """
  chain = [folder]
  while chain[-1] != 'random' and read(chain[-1]).kind != 'hf':
    chain.append(read(chain[-1]).start())
  return chain


def model_text(cfg: schema.Model) -> str:
  """Returns the options of a model's weights as text."""
  options = dataclasses.asdict(cfg)
  for name in schema.FREE:
    del options[name]
  return json.dumps(options, sort_keys=True)


def fingerprint(folder: str) -> str:
  """Returns the content hash of a weights folder, with its model's options.

  For a run it uses stored checksums instead of reading arrays. For an adapter
  it includes the hash of the base weights.

  Args:
    folder: a folder from `find`.
  """
  checkpoint = read(folder)
  parts = [model_text(checkpoint.model)]
  if checkpoint.kind == 'run':
    sums = store.read_sums(folder, checkpoint.selects)
    parts.append(json.dumps(sums, sort_keys=True))
  else:
    path = pathlib.Path(folder)  # PEFT adapters differ by their options too
    files = [*path.glob('*.safetensors'), *path.glob('adapter_config.json')]
    parts += [sources.file_fingerprint(file) for file in sorted(files)]
  if checkpoint.is_adapter:
    parts.append(fingerprint(checkpoint.start()))
  return sources.fingerprint(*(part.encode() for part in parts))


def _inside(path: str, name: str) -> str:
  return os.path.join(os.path.expanduser(path), name)


def check(
  folder: str,
  cfg: schema.Model,
  tokens: rendering.Renderer,
  *,
  reward: bool = False,
) -> None:
  """Checks a folder's weights against a model; reads none of them.

  Args:
    folder: a folder from `find`.
    cfg: the expected model options.
    tokens: the expected renderer.
    reward: whether a reward model is expected instead of a policy.

  Raises:
    ValueError: the weights belong to another model, tokenizer or kind, or a
      file or an array of them is missing or of another shape or dtype.
  """
  checkpoint = read(folder)
  check_kind(checkpoint, reward)
  if checkpoint.kind == 'run':
    rendering.check_fingerprint(
      tokens.fingerprint,
      checkpoint.host['tokenizer'],
      'config.tokenizer',
      f'the checkpoint {folder}',
    )
  else:
    source = checkpoint.tokenizer.path or ''
    rendering.check_tokenizer(source, tokens.tokenizer)
  what = f'{folder} must hold weights of this model'
  hf_config.check_same(checkpoint.model, cfg, what)
  # The headers of the weights, and of those under an adapter.
  like = transformer.shapes(checkpoint.model)
  while checkpoint.is_adapter:
    if checkpoint.kind == 'peft':
      peft.headers(checkpoint.folder, checkpoint.model, checkpoint.origin)
    else:
      store.check_params(
        checkpoint.folder, lora.shapes(checkpoint.adapter, like)
      )
    start = checkpoint.start()
    if start == 'random':
      return
    checkpoint = read(start)
  if checkpoint.kind == 'hf':
    shapes_of = hf.shapes(checkpoint.model, folder=checkpoint.folder)
    hf.find(checkpoint.folder, shapes_of)
    return
  store.check_params(checkpoint.folder, shapes(folder, cfg) if reward else like)


def shapes(folder: str, cfg: schema.Model) -> Params:
  """Returns the parameters of a folder's model, as `jax.ShapeDtypeStruct`s.

  Those of a reward model include its head, and the language model's if it was
  kept.

  Args:
    folder: a folder from `find`.
    cfg: its model.
  """
  if not read(folder).is_reward:
    return transformer.shapes(cfg)
  sums = store.read_sums(folder)
  has_lm_head = any(path.startswith('params/head/') for path in sums)
  return transformer.reward_shapes(cfg, has_lm_head)


def check_kind(checkpoint: Checkpoint, reward: bool) -> None:
  """Checks whether a checkpoint is of a reward model or a policy, as expected.

  Raises:
    ValueError: it holds the other kind.
  """
  if checkpoint.is_reward != reward:
    kinds = 'a policy', "a reward model (kind 'ranking')"
    raise ValueError(
      f'{checkpoint.folder} must hold {kinds[reward]}: got {kinds[not reward]}'
    )


@watchdog.phase('load', first=True)
def load(folder: str, like: Params, *, average: bool = False) -> Params:
  """Reads weights into the shapes, dtypes and shardings of `like`.

  Args:
    folder: a folder from `find`.
    like: arrays or ShapeDtypeStructs of the folder's model.
    average: whether to read the moving average, if the run kept one.

  Raises:
    ValueError: the weights are missing, damaged, or of other shapes; or the
      base weights of an adapter have changed; or only one of folder and
      `like` is a reward model.
  """
  checkpoint = read(folder)
  check_kind(checkpoint, 'reward' in like)
  if checkpoint.kind == 'hf':
    return hf.load(folder, checkpoint.model, like)
  correction = adapter(folder, like, average=average)
  if correction is None:
    # Checkpoints hold float32.
    stored = float_like(like, 'float32')
    return _cast(_restored(checkpoint, stored, average), like)
  params, options = correction
  base = load_start(folder, base_like(options, like))
  if checkpoint.kind == 'run':
    check_base(folder, base)
  return _cast(lora.absorb(base, params, lora.scale(options)), like)


def _restored(checkpoint: Checkpoint, like: Params, average: bool) -> Params:
  """Reads the params of a run's step, or their average; checks them."""
  average = average and checkpoint.stage['optim'].get('average') is not None
  params = store.restore_params(checkpoint.folder, like, average=average)
  for path in tree.not_finite(params)[:1]:
    raise ValueError(
      f'{checkpoint.folder} must hold finite weights: got NaN or infinity in '
      f'{path}'
    )
  return params


def load_start(folder: str, like: Params) -> Params:
  """Reads the weights that a folder's stage or adapter started from.

  They are averaged where that stage began with averages, and rounded as that
  stage had them where they are an adapter merged into others.

  Args:
    folder: a folder from `find`.
    like: shapes, dtypes and shardings of the result.
  """
  start = read(folder).start()
  checkpoint, base = read(start), read(folder).host.get('base')
  trained = like
  if checkpoint.is_adapter and base:
    trained = tree.map_with_path(
      lambda path, x: jax.ShapeDtypeStruct(
        x.shape, base['dtypes'].get(path, x.dtype), sharding=x.sharding
      ),
      like,
    )
  return _cast(load(start, trained, average=checkpoint.selects), like)


def _cast(params: Params, like: Params) -> Params:
  params = jax.tree.map(quantized.cast, params, like, is_leaf=lora.is_matrix)
  return jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), params, like)


def float_like(like: Params, dtype: str | None = None) -> Params:
  """Returns ShapeDtypeStructs of weights that are not quantized."""
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape, dtype or x.dtype, sharding=x.sharding
    ),
    like,
    is_leaf=lora.is_matrix,
  )


def base_like(options: schema.Lora, like: Params) -> Params:
  """Returns ShapeDtypeStructs of weights as an adapter's stage held them.

  Args:
    options: the adapter's.
    like: the weights with the stage's shardings, as ShapeDtypeStructs.
  """
  like = float_like(like)
  if options.base == 'float':
    return like
  quantize = functools.partial(lora.quantize, kind=options.base)
  return _on_mesh(jax.eval_shape(quantize, like), like)


def _on_mesh(shapes: Any, like: Params | None) -> Any:
  """Places shapes on the mesh of the whole weights, if they have one."""
  spec = jax.tree.leaves(like)[0].sharding if like is not None else None
  if isinstance(spec, jax.sharding.NamedSharding):
    return sharding.placed(shapes, transformer.SHARDING_RULES, spec.mesh)
  return shapes


def adapter(
  folder: str, like: Params | None = None, *, average: bool = False
) -> tuple[lora.Adapter, schema.Lora] | None:
  """Reads a folder's LoRA adapter and its options.

  Args:
    folder: a folder from `find`.
    like: the whole weights, whose devices the adapter is placed on; None = the
      first device.
    average: whether to read the moving average, if the run kept one.

  Returns:
    (float32 adapter, options); None if the folder holds whole weights.
  """
  checkpoint = read(folder)
  if not checkpoint.is_adapter:
    return None
  if checkpoint.kind == 'peft':
    params, options = peft.load(folder, checkpoint.model, checkpoint.origin)
  else:
    params, options = None, checkpoint.adapter
  # The adapter's shapes, on the mesh of the base weights.
  shapes = lora.shapes(options, transformer.shapes(checkpoint.model))
  shapes = _on_mesh(shapes, like)
  if params is None:
    return _restored(checkpoint, shapes, average), options
  params = jax.tree.map(
    lambda x, y: sharding.put(x, y.sharding) if y.sharding else x,
    params,
    shapes,
  )
  return params, options


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
  checkpoint = read(folder)
  stored = checkpoint.host.get('base')
  for path, leaf in tree.flat(base).items() if stored else ():
    dtype = jnp.dtype(stored['dtypes'][path])
    # A quotient may be rounded otherwise by another device; scales are not.
    if leaf.dtype.itemsize < dtype.itemsize or path.endswith('/values'):
      continue
    (total,) = tree.checksums([leaf.astype(dtype)]).values()
    if total != stored['sums'][path]:
      raise ValueError(
        f'{checkpoint.start()} must hold the base weights of {folder}: {path} '
        'has changed since the adapter was trained'
      )
