"""Attention over per-query key intervals.

Query t of a row attends to the keys `k_start[t] <= s < k_end[t]`. Causality,
packing, padding (an empty interval), sliding windows and ragged lengths are all
such intervals. In rows of prefix trees a key also has the end of its subtree,
`k_until[s] >= k_end[t]`: other branches do not see it.

1. Under a mesh (`sharding.use`) each device computes its rows and heads: rows
   are split over the batch axes, heads over `tensor`; nothing is communicated
   but the keys and values of rows in `sharding.pieces`: a device gathers those
   of the row, of which the intervals of its queries speak.
2. `impl` names an implementation, see `posttrain.ops.dispatch`. XLA is
   `chunked`.

Axes: B rows, T queries, S keys, N query heads, K kv heads (each read by N/K
query heads), H head dim.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from kernels import attention as kernels
from kernels import masks, tiles
from posttrain import schema, sharding
from posttrain.ops import chunked, cudnn, dispatch, quantized


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shared:
  """First tokens that rows have in common, by group, to be read once.

  Axes: P groups of up to G rows.
  """

  # The keys and values [P, K, S, H], of a layer or a tree of these; None =
  # those of a state.
  cache: Any
  members: jax.Array  # i32[P, G], rows on the device; B = none
  length: jax.Array  # i32[P], tokens in common
  # i32[B], position of the first key of a row's own cache: the length of its
  # group, 0 in none.
  base: jax.Array
  # Tokens that are read of each group, at least those of the longest.
  longest: int = dataclasses.field(metadata={'static': True})


def intervals(
  segment_ids: jax.Array, positions: jax.Array, ends: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
  """Returns causal intervals of packed rows: each segment up to the token.

  Args:
    segment_ids: i32[B, T], packed example id; 0 = pad.
    positions: i32[B, T], index of a token within its segment; in a prefix tree,
      its depth.
    ends: i32[B, T], the ends of subtrees, `k_until` of `attention`; each tree
      is then an interval up to the token. None = no trees.

  Returns:
    (k_start, k_end), i32[B, T] each; both 0 on pads.
  """
  index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None]
  valid = segment_ids != 0
  if ends is None:
    start = index - positions
  else:
    roots = jnp.where(positions == 0, index, 0)
    start = jax.lax.cummax(roots, axis=1)
  return jnp.where(valid, start, 0), jnp.where(valid, index + 1, 0)


def ancestors(positions: jax.Array, window: int) -> jax.Array:
  """Returns the first token of each token's window in prefix trees, i32[B, T].

  It is the last token, up to t, of depth max(0, positions[t] - window + 1): in
  depth-first order no other branch has that depth in between.

  Args:
    positions: i32[B, T], depths.
    window: tokens of a window.
  """
  t = positions.shape[1]
  places = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), positions.shape)
  depths = jnp.maximum(positions - window + 1, 0)
  # All tokens, then all queries, sorted by (depth, place): the last token
  # before a query is the one that it asks for.
  entries = jnp.arange(2 * t, dtype=jnp.int32)
  _, places, entries = jax.lax.sort(
    (
      jnp.concatenate((positions, depths), axis=1),
      jnp.concatenate((places, places), axis=1),
      jnp.broadcast_to(entries, (len(positions), 2 * t)),
    ),
    num_keys=3,
  )
  tokens = jnp.where(entries < t, jnp.arange(2 * t), 0)
  firsts = jnp.take_along_axis(places, jax.lax.cummax(tokens, axis=1), axis=1)
  return jax.lax.sort((entries, firsts), num_keys=1)[1][:, t:]


def check(
  cfg: schema.Model, platform: str | None = None, trees: bool = False
) -> None:
  """Checks that devices support a model's `attention`.

  Args:
    cfg: model options.
    platform: 'cpu', 'gpu' or 'tpu'; None = the one in use.
    trees: whether rows are prefix trees.

  Raises:
    FieldError: they do not.
  """
  if cfg.attention == 'auto':  # chooses a supported one
    return
  dtype, softcap = jnp.dtype(cfg.dtype), cfg.attention_softcap
  for size in {cfg.head_dim, cfg.global_head_dim} - {None}:
    dispatch.choose(
      cfg.attention,
      lambda name, h=size: _unsupported(name, h, (dtype,) * 3, softcap, trees),
      here=platform,
    )


def is_xla(cfg: schema.Model, *, decodes: bool) -> bool:
  """Returns whether a model's attention is XLA's, under the `current` mesh.

  Args:
    cfg: model options.
    decodes: in the decode loop, where XLA reads all keys, not the intervals
      alone; otherwise in training.
  """
  options, chosen = (cfg.attention, cfg.attention_softcap), []
  trees = None if decodes else False

  def choose(q, k, v, start, end):
    chosen.append(_choose(*options, q, k, v, decodes, trees))
    return q, None

  # Within the mesh's devices, as the ops choose.
  kv_heads, size = cfg.kv_sizes(is_global=True)
  q = jax.ShapeDtypeStruct((1, cfg.heads, size), cfg.dtype)
  k = jax.ShapeDtypeStruct((1, kv_heads, 1, size), cfg.dtype)
  end = jax.ShapeDtypeStruct((1,), jnp.int32)
  fn = functools.partial(_on_devices, choose, heads_axes=(1, 1))
  jax.eval_shape(fn, q, k, k, end, end)
  return chosen[-1] == 'xla'


def attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *ends: jax.Array,
  scale: float,
  softcap: float | None = None,
  impl: str = 'auto',
  sinks: jax.Array | None = None,
) -> jax.Array:
  """Attends each query to the keys of its interval.

  out[t] = sum_s softmax_s(scale q[t] . k[s]) v[s],
           k_start[t] <= s < k_end[t] <= k_until[s]

  With a softcap, scores are bounded before the softmax.

  Query head n reads kv head n // (N/K). A query with an empty interval gives
  exactly 0, and zero gradients.

  Args:
    q: float[B, T, N, H].
    k: float[B, S, K, H]; of rows in pieces, S is T.
    v: float[B, S, K, H].
    *ends: k_start, i32[B, T], the first key that a query attends to; k_end,
      i32[B, T], one past the last key that it attends to; and, where keys have
      bounds, k_until, i32[B, S], the largest end of an interval that sees the
      key: in a prefix tree, the end of its subtree.
    scale: factor on the scores.
    softcap: bound c of the scores, which become c tanh(score / c); None: none.
    impl: one of `schema.ATTENTION`.
    sinks: f32[N], a further score of each head's queries, without a value:
      out sigmoid(lse - sink), lse that of the other scores. None = none.

  Returns:
    float[B, T, N, H] in q's dtype; scores and softmax are float32.

  Raises:
    FieldError: the named implementation does not support the arguments.
  """
  # kv heads that do not divide over the mesh, as query heads do, are repeated
  # until they do: a device then has the kv heads of its query heads.
  ways, kv = sharding.ways(sharding.TENSOR), k.shape[2]
  times = math.lcm(ways, kv) // kv
  if times > 1 and q.shape[2] % ways == 0:
    k, v = (jnp.repeat(x, times, axis=2) for x in (k, v))
  in_pieces = sharding.ways(sharding.SEQUENCE) > 1

  def local(q, k, v, *ends):
    if in_pieces:
      k, v = sharding.whole_rows(k), sharding.whole_rows(v)
    if _choose(impl, softcap, q, k, v, trees=len(ends) > 2) == 'cudnn':
      return cudnn.attention(q, k, v, *ends, scale=scale), None
    k, v = (x.swapaxes(1, 2) for x in (k, v))
    return _cached(scale, softcap, impl, q, k, v, *ends)

  return _on_devices(local, q, k, v, *ends, heads_axes=(2, 2), sinks=sinks)


def cached(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *ends: jax.Array,
  scale: float,
  softcap: float | None = None,
  impl: str = 'auto',
  sinks: jax.Array | None = None,
) -> jax.Array:
  """Computes `attention` over keys in a cache, heads before time.

  Args:
    q: float[B, T, N, H].
    k: float[B, K, S, H], or `Quantized`.
    v: as k.
    *ends: k_start, i32[B, T], the first key that a query attends to; k_end,
      i32[B, T], one past the last key that it attends to.
    scale: factor on the scores.
    softcap: bound c of the scores, which become c tanh(score / c); None: none.
    impl: one of `schema.ATTENTION`; 'cudnn' is 'auto'.
    sinks: as in `attention`.

  Returns:
    float[B, T, N, H] in q's dtype.
  """
  fn = functools.partial(_cached, scale, softcap, impl)
  return _on_devices(fn, q, k, v, *ends, heads_axes=(2, 1), sinks=sinks)


def decode(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *ends: jax.Array,
  scale: float,
  softcap: float | None = None,
  impl: str = 'auto',
  shared: Shared | None = None,
  sinks: jax.Array | None = None,
) -> jax.Array:
  """Computes `cached` with one query per row.

  With `shared`, the queries of a group attend to its tokens together, and each
  to the rest of its row; for the two parts of the keys,

      out = sum_i exp(lse_i - lse) out_i,     lse = log sum_i exp lse_i

  Args:
    q: float[B, N, H].
    k: float[B, K, S, H], or `Quantized`.
    v: as k.
    *ends: k_start, i32[B], the first key of a row's interval; k_end, i32[B],
      one past the last key of the interval.
    scale: factor on the scores.
    softcap: bound c of the scores, which become c tanh(score / c); None: none.
    impl: one of `schema.ATTENTION`; 'cudnn' is 'auto'.
    shared: what rows have in common; None = nothing.
    sinks: as in `attention`.

  Returns:
    float[B, N, H] in q's dtype.
  """

  def own(*args):
    dense = _dense(*args)
    chosen = _choose(impl, softcap, *dense[:3], in_loop=True)
    if chosen == 'xla':
      return chunked.decode(*dense, scale=scale, softcap=softcap)
    return _kernel(kernels.decode, chosen, (scale, softcap), *args)

  def both(q, k, v, start, end, shared):
    members = shared.members
    length = jnp.broadcast_to(shared.length[:, None], members.shape)
    ends = (jnp.maximum(x - shared.base, 0) for x in (start, end))
    first = own(q, k, v, *ends)
    pick = functools.partial(jnp.take, indices=members, axis=0, mode='fill')
    q, start = pick(q, fill_value=0), pick(start, fill_value=0)
    common = _with_lse(scale, softcap, impl, q, *shared.cache, start, length)
    none = jnp.zeros_like(first[0]), jnp.full_like(first[1], tiles.MASKED)
    common = jax.tree.map(
      lambda x, y: x.at[members].set(y, mode='drop'), none, common
    )
    lse = jnp.logaddexp(first[1], common[1])
    out = sum(jnp.exp(x - lse)[..., None] * y for y, x in (first, common))
    return jnp.astype(out, q.dtype), lse

  fn, args = own if shared is None else both, (q, k, v, *ends)
  return _on_devices(fn, *args, heads_axes=(1, 1), shared=shared, sinks=sinks)


def _on_devices(
  fn: Callable, q, k, v, *ends, heads_axes, shared=None, sinks=None
):
  """Runs attention on each device of the `current` mesh, on its rows and heads.

  Rows, or heads, that do not divide over their mesh axes are whole on each.

  Args:
    fn: attention on one device, (out, lse).
    heads_axes: the axis of heads in q, and in k and v.
  """
  (rows,) = sharding.fitting(q.shape[:1], (sharding.BATCH_AXES,))
  # Those of k divide q's: whole kv heads are split with their query heads.
  counts = (k.shape[heads_axes[1]],)
  (heads,) = sharding.fitting(counts, (sharding.TENSOR,))

  def spec(axis):
    return PartitionSpec(rows, *(None,) * (axis - 1), heads)

  q_spec, k_spec = map(spec, heads_axes)
  in_specs = q_spec, k_spec, k_spec, *(PartitionSpec(rows),) * len(ends)
  args = q, k, v, *ends
  if shared is not None:
    args += (shared,)
    by_rows = jax.tree.map(lambda _: PartitionSpec(rows), shared)
    in_specs += (dataclasses.replace(by_rows, cache=k_spec),)
  out_specs = q_spec, q_spec  # of lse, which lacks the last axis, as well
  out, lse = sharding.split(fn, in_specs, out_specs)(*args)
  if sinks is None:
    return out
  sinks = jnp.expand_dims(sinks.astype(jnp.float32), range(lse.ndim - 1))
  return (out * jax.nn.sigmoid(lse - sinks)[..., None]).astype(out.dtype)


def _dense(q, k, v, *ends):
  """Returns the arguments with dequantized keys and values."""
  if isinstance(k, quantized.Quantized):
    k, v = k.astype(q.dtype), v.astype(q.dtype)
  return q, k, v, *ends


def _cached(scale, softcap, impl, q, k, v, *ends):
  if not q.size:
    return q, q[..., 0]
  q, k, v = _dense(q, k, v)
  impl, args = _choose(impl, softcap, q, k, v), (k, v, *ends)
  if impl != 'xla':
    out, lse = _kernel(kernels.cached, impl, (scale, softcap), q, *args)
    return out, lse.mT
  on_cpu = dispatch.platform() == 'cpu'
  blocks = chunked.CPU_BLOCKS if on_cpu else chunked.BLOCKS
  options = chunked.Options(scale, softcap, blocks)
  return chunked.attention(options, q, *args)


def _with_lse(scale, softcap, impl, q, k, v, k_start, k_end):
  """Computes (`_cached`, lse f32[B, T, N]) in a loop, for few queries.

  The query heads of a kv head are further queries, which read its keys once.
  """
  q, k, v = _dense(q, k, v)
  impl = _choose(impl, softcap, q, k, v, in_loop=True)
  b, t, n, h = q.shape
  times = n // k.shape[1]
  q = q.reshape(b, t, -1, times, h).swapaxes(2, 3)
  args = q.reshape(b, t * times, -1, h), k, v
  args += tuple(jnp.repeat(x, times, axis=1) for x in (k_start, k_end))
  if impl != 'xla':
    out, lse = _kernel(kernels.cached, impl, (scale, softcap), *args)
  else:
    out, lse = chunked.few_queries(*args, scale=scale, softcap=softcap)
  out = out.reshape(b, t, times, -1, h).swapaxes(2, 3)
  lse = lse.reshape(b, -1, t, times).swapaxes(1, 2)
  return out.reshape(b, t, n, h), lse.reshape(b, t, n)


def _choose(impl, softcap, q, k, v, in_loop=False, trees=None):
  """Chooses an implementation.

  Args:
    in_loop: whether the op is called at every step of a loop that carries k
      and v.
    trees: whether keys have bounds; None = cuDNN's is 'auto'.
  """
  impl = 'auto' if trees is None and impl == 'cudnn' else impl
  h = q.shape[-1]
  dtypes = q.dtype, k.dtype, v.dtype

  def avoid(backend):
    # The TPU kernel needs H along lanes; XLA chooses another layout in a loop.
    narrow = backend == 'mosaic_tpu' and h % 128
    # Padded heads in the cache itself would cost their memory in every slot;
    # where a named implementation asks for it, each step pads a copy.
    if in_loop and (narrow or h != _padded(backend, h)):
      return f'head_dim {h}: the cache would be copied at every step'
    return None

  return dispatch.choose(
    impl, lambda name: _unsupported(name, h, dtypes, softcap, trees), avoid
  )


def _unsupported(backend, head_dim, dtypes, softcap, trees):
  """Returns why a backend does not support such heads, or None."""
  if len({*dtypes}) > 1:
    return f'dtypes must agree: got {", ".join(map(str, dtypes))}'
  if backend == 'cudnn':
    if trees:
      return 'batch.trees must be False'
    return cudnn.unsupported(head_dim, dtypes[0], softcap)
  padded = _padded(backend, head_dim)
  h = head_dim if padded > kernels.MAX_HEAD_DIM else padded
  return kernels.unsupported(backend, h, dtypes[0])


def _padded(backend, head_dim):
  """Returns the head dim that kernels compute with: zeros change no score."""
  if backend == 'triton':
    return max(16, 1 << (head_dim - 1).bit_length())
  return max(16, -(-head_dim // 8) * 8)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _kernel(fn, impl, scores, q, k, v, *ends):
  """Returns (out, lse) of a kernel; under jit: layers share one tracing."""
  interpret = impl == 'interpret'
  backend = 'triton' if interpret else impl
  h = q.shape[-1]
  options = {}
  if isinstance(k, quantized.Quantized):
    options['scales'] = tuple(x.scale[..., 0] for x in (k, v))
    k, v = k.values, v.values
  here = dispatch.KERNELS[dispatch.platform()] if impl == 'auto' else backend
  q, k, v = (masks.pad(x, x.ndim - 1, _padded(here, h)) for x in (q, k, v))
  out, lse = fn(
    q,
    k,
    v,
    *ends,
    scale=scores[0],
    softcap=scores[1],
    backend=backend,
    interpret=interpret,
    return_lse=True,
    **options,
  )
  return out[..., :h], lse
