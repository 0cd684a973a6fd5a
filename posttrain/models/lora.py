"""LoRA: frozen weights with a low-rank correction, as functions on trees.

    W' = W + s A B,   A: [in, R], B: [R, out],   s = alpha / R
    rsLoRA:                                      s = alpha / sqrt(R)
    DoRA:  each column of W' times m / |column|, m: [out], which trains

1. `init` draws an adapter: a tree with leaves `a` and `b`, and `column_scale`
   (m) with DoRA, for each target kernel of the model. Only the adapter trains.
2. `Base.attach` joins model and adapter: an adapted kernel becomes an
   `Adapted`, and `layers.Linear` computes x W + s (x A) B. W has no gradient.
   The head's is merged wherever it is used.
3. `merge` turns it into a plain kernel; decoding does so layer by layer, or
   keeps the factors.

W may be quantized by `quantize`, see `ops.quantized`. Then a layer's kernels
are dequantized where the layer is computed, forward and backward, and W' is
that of the dequantized W.

B is initialized to 0, and m to the norms of W's columns, so an untrained
adapter changes nothing. Norms have no gradient (section 4.3 of DoRA).

Axes: L layers, R rank.

References: Hu et al., LoRA, arXiv 2106.09685; Kalajdzievski, A rank
stabilization scaling factor (rsLoRA), arXiv 2312.03732; Liu et al., DoRA:
weight-decomposed low-rank adaptation, arXiv 2402.09353.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util

from posttrain import schema, sharding, tree
from posttrain.ops import quantized

Params = Any
Adapter = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted:
  """A kernel with its low-rank correction; both have the same leading axes."""

  kernel: Any  # float[..., in, out], or `Quantized`
  a: jax.Array  # [..., in, R]
  b: jax.Array  # [..., R, out]
  scale: float = dataclasses.field(metadata={'static': True})
  column_scale: jax.Array | None = None  # f32[..., out], of DoRA
  # Whether decoding keeps the factors, too.
  factors: bool = dataclasses.field(default=False, metadata={'static': True})

  def merge(self) -> jax.Array:
    """Computes W' in float32: f32[..., in, out]."""
    gain = self.gain()
    return self._sum() if gain is None else self._sum() * gain[..., None, :]

  def gain(self) -> jax.Array | None:
    """Returns m / |column| of each column, f32[..., out]; None = 1."""
    if self.column_scale is None:
      return None
    return self.column_scale / jax.lax.stop_gradient(norms(self._sum()))

  def _sum(self) -> jax.Array:
    product = jnp.matmul(self.a, self.b, precision='highest')
    return self.kernel.astype(jnp.float32) + self.scale * product

  def fold(self) -> 'Adapted':
    """Returns the same without `column_scale`, which W and B contain."""
    gain = self.gain()
    if gain is None:
      return self
    gain, kernel = gain[..., None, :], self.kernel
    if isinstance(kernel, quantized.Quantized):
      own = kernel.scale.astype(jnp.float32) * gain
      kernel = dataclasses.replace(kernel, scale=own)
    else:
      kernel *= gain
    return dataclasses.replace(
      self, kernel=kernel, b=self.b * gain, column_scale=None
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Base:
  """The frozen parameters of a model, and the scale s of its adapter."""

  params: Params
  scale: float = dataclasses.field(metadata={'static': True})
  factors: bool = dataclasses.field(default=False, metadata={'static': True})

  def attach(self, adapter: Adapter) -> Params:
    """Returns the model's parameters with the adapter; copies no array.

    A critic beside the adapter stays.
    """
    static = {'scale': self.scale, 'factors': self.factors}
    return {**adapter, **_attach(self.params, adapter, static)}


def whole(params: Params | Adapter, base: Base | None) -> Params:
  """Returns the whole model from the trained parameters; copies no array."""
  return params if base is None else base.attach(params)


def scale(cfg: schema.Lora) -> float:
  """Returns s of the module's formula."""
  return cfg.alpha / (math.sqrt(cfg.rank) if cfg.rslora else cfg.rank)


def keeps_factors(cfg: schema.Lora) -> bool:
  """Returns whether decoding has the factors beside the base."""
  how = cfg.decode
  return cfg.base != 'float' if how == 'auto' else how == 'factors'


def init(key: jax.Array, cfg: schema.Lora, like: Params) -> Adapter:
  """Draws an adapter: A uniform in +-1/sqrt(in) as in PEFT, B zero.

  Args:
    key: PRNG key.
    cfg: options, rank > 0.
    like: the model's parameters, as arrays or ShapeDtypeStructs.

  Returns:
    Float32 leaves `<path of kernel>/a` and `/b`, and `/column_scale` with DoRA.

  Raises:
    ValueError: the targets match nothing, or a leaf that is no kernel of a
      layer or an untied head, or with DoRA one of experts.
  """
  assert cfg.rank > 0, 'rank 0 means no adapter'
  flat = matrices(like)
  targets = [path for path in flat if re.search(cfg.targets, path)]
  allowed = re.compile('(layers/.*|head)/kernel')
  for path in targets or ['nothing']:
    if not allowed.fullmatch(path):
      kernels = [*filter(allowed.fullmatch, flat)]
      raise schema.FieldError(
        'targets',
        'match kernels of layers and the head, and only these',
        cfg.targets,
        f'it matches {path}, expected some of {kernels}',
      )
  adapter = {}
  keys = jax.random.split(key, len(targets))
  for path, key in zip(targets, keys, strict=True):
    *lead, rows, columns = flat[path].shape
    bound, node = 1 / math.sqrt(rows), adapter
    for name in path.split('/'):
      node = node.setdefault(name, {})
    node['a'] = jax.random.uniform(
      key, (*lead, rows, cfg.rank), jnp.float32, -bound, bound
    )
    node['b'] = jnp.zeros((*lead, cfg.rank, columns), jnp.float32)
    if cfg.dora:
      if 'experts/' in path:
        hint = 'leave experts out of targets'
        raise schema.FieldError('dora', f'be False for {path}', True, hint)
      node['column_scale'] = norms(flat[path].astype(jnp.float32))
  return adapter


def shapes(cfg: schema.Lora, like: Params) -> Adapter:
  """Returns the adapter as `jax.ShapeDtypeStruct`s; allocates nothing."""
  return jax.eval_shape(lambda x: init(jax.random.key(0), cfg, x), like)


def norms(kernel: jax.Array) -> jax.Array:
  """Returns the norms of columns, f32[..., out], of f32[..., in, out]."""
  return jnp.sqrt(jnp.sum(kernel * kernel, axis=-2))


def quantize(params: Params, kind: str) -> Params:
  """Returns a model's weights with quantized kernels of layers.

  Routers stay, and so do all weights of kind 'float'.

  Raises:
    ValueError: a kernel does not divide into the blocks of int4.
  """

  def convert(path, x):
    # As `schema.Lora.targets` by default.
    if kind == 'float' or not re.search(schema.Lora.targets, path):
      return x
    if kind == 'int4' and x.shape[-2] % quantized.BLOCK:
      must = f'be int8 where {path} has no multiple of {quantized.BLOCK} rows'
      raise schema.FieldError('base', must, kind, f'it has {x.shape[-2]}')
    return quantized.quantize(x, kind)

  return tree.map_with_path(convert, params)


def is_matrix(x: Any) -> bool:
  """Returns whether x is a kernel of several arrays, for maps of trees."""
  return isinstance(x, Adapted | quantized.Quantized)


def matrices(params: Params) -> dict[str, Any]:
  """Returns {path: leaf}, where a kernel of several arrays is one leaf."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_matrix)
  return {tree.path_str(path): leaf for path, leaf in leaves}


def cast_matrices(params: Params, dtype: str) -> Params:
  """Casts matrices to the compute dtype: frozen ones are used in no other."""
  return tree.map_with_path(
    lambda path, x: (
      x.astype(dtype) if path.endswith(('kernel', 'table')) else x
    ),
    params,
  )


def absorb(params: Params, adapter: Adapter, scale: float) -> Params:
  """Returns the merged parameters, in their dtypes; donates `params`.

  Merges one kernel at a time, so that memory never holds a second copy of all.
  Quantized kernels without a correction stay.
  """
  flat, low = matrices(params), tree.flat(adapter)
  for path in {name.rpartition('/')[0] for name in low}:
    a, b = low[f'{path}/a'], low[f'{path}/b']
    kernel = flat[path].astype(flat[path].dtype)  # dequantizes
    flat[path] = _absorb(kernel, a, b, low.get(f'{path}/column_scale'), scale)
  structure = jax.tree.structure(params, is_leaf=is_matrix)
  return jax.tree.unflatten(structure, flat.values())


@functools.partial(jax.jit, static_argnames='scale', donate_argnums=0)
def _absorb(kernel, a, b, column_scale, scale):
  return Adapted(kernel, a, b, scale, column_scale).merge().astype(kernel.dtype)


def merge(params: Params) -> Params:
  """Returns parameters with all `Adapted` kernels merged, in float32.

  Quantized ones are dequantized.
  """

  def one(x):
    x = x.merge() if isinstance(x, Adapted) else x
    return x.astype(jnp.float32) if isinstance(x, quantized.Quantized) else x

  return jax.tree.map(one, params, is_leaf=is_matrix)


def decode_form(params: Params) -> Callable[[Params], Params]:
  """Returns what makes a layer as it decodes: merged, or with factors."""
  each = jax.tree.leaves(params, is_leaf=is_matrix)
  if not any(isinstance(x, Adapted) and x.factors for x in each):
    return merge
  return functools.partial(
    jax.tree.map,
    lambda x: x.fold() if isinstance(x, Adapted) else x,
    is_leaf=is_matrix,
  )


def fuse(join: Callable[..., jax.Array], kernels: Sequence[Any]) -> Any:
  """Joins kernels of the same inputs into one; factors A are beside each other.

  Args:
    join: joins the columns of arrays.
    kernels: matrices of one kind, some of which may have factors.
  """
  adapted = [x for x in kernels if isinstance(x, Adapted)]
  if not adapted:
    return jax.tree.map(join, *kernels)
  a = jnp.concatenate([x.a for x in adapted], axis=-1)
  own, b, used = [], [], 0
  for x in kernels:  # of B, the rows of the other kernels' factors are 0
    if isinstance(x, Adapted):
      low, x = x.b, x.kernel
    else:
      low = jnp.zeros((0, x.shape[-1]))
    own.append(x)
    b.append(jnp.pad(low, ((used, len(a.T) - used - len(low)), (0, 0))))
    used += len(low)
  kernel = jax.tree.map(join, *own)
  return dataclasses.replace(adapted[0], kernel=kernel, a=a, b=join(*b))


def matmul(
  x: jax.Array, kernel: Any, split: tuple[str, str | None]
) -> jax.Array:
  """Computes x W, or x W + s (x A) B, times DoRA's gain, in x's dtype.

  Args:
    x: float[T, in].
    kernel: [in, out], which may be `Quantized`, or an `Adapted` one.
    split: mesh axes of in and out.
  """

  def times(x, weight, *axes):
    weight = quantized.rounded(weight, x.dtype)  # integers travel
    weight = jax.tree.map(lambda w: sharding.gather(w, *axes), weight)
    return x @ weight.astype(x.dtype)

  if not isinstance(kernel, Adapted):
    return times(x, kernel, *split)
  low = times(x, kernel.a, split[0], None)
  correction = times(kernel.scale * low, kernel.b, None, split[1])
  y, gain = times(x, kernel.kernel, *split) + correction, kernel.gain()
  return y if gain is None else y * gain.astype(y.dtype)[None]


def _attach(params: Params, adapter: Adapter, static: Any) -> Params:
  if not isinstance(params, dict):
    return Adapted(params, **adapter, **static)
  return {
    name: _attach(child, adapter[name], static) if name in adapter else child
    for name, child in params.items()
  }


def nest(leaves: Mapping[str, Any], scale: float, factors: bool = False) -> Any:
  """Returns the tree of arrays by path, with the kernels of an adapter."""

  def adapt(node: Any) -> Any:
    if not isinstance(node, dict):
      return node
    node = {name: adapt(child) for name, child in node.items()}
    if {'kernel', 'a', 'b'} <= node.keys():
      return Adapted(**node, scale=scale, factors=factors)
    if node.keys() == {'values', 'scale'}:
      return quantized.Quantized(**node)
    return node

  return adapt(traverse_util.unflatten_dict(leaves, sep='/'))
