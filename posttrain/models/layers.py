"""The layers of a transformer: norms, projections, attention, MLP, block.

Axes: B rows, T tokens, S cache slots, L layers, N query heads, K kv heads,
H head dim, D model, F mlp, V vocab.
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from posttrain import schema, sharding
from posttrain.models import delta, experts, lora, rope
from posttrain.ops import attention, quantized

Params = Any
# (keys, values), [B, K, S, H] each, which may be `Quantized`.
LayerCache = tuple[Any, Any]
Recurrent = tuple[jax.Array, jax.Array]  # (buffer, state) of `models.delta`
Tokens = tuple[jax.Array, jax.Array]  # (positions i32, valid bool), [B, T] each
Kind = tuple[str, str]  # a layer's mixer and its feed-forward, see `kinds`
# Mesh axes of a cache: its sequences, and its kv heads where they divide.
CACHE_AXES = (sharding.BATCH_AXES, sharding.TENSOR)


@dataclasses.dataclass(frozen=True)
class Prefixes:
  """The part of a cache that R rows read: the first tokens of R sequences.

  On a mesh that splits the cache's sequences, row i is on the device that holds
  its sequence.
  """

  # i32[R], the sequence of each row, counted from the first one on its device.
  index: jax.Array
  length: int  # tokens
  # With prompts that are stored once: i32[R], the row's one, counted likewise;
  # and its tokens there, which come before those of the sequence.
  prompt_index: jax.Array | None = None
  base: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Cached:
  """The tokens before those of rows, which attend to them."""

  slots: Any  # a `LayerCache`, or a tuple of all layers
  # The rows' sequences in the cache, and a length that holds the new tokens and
  # those before them; None = the whole cache, whose sequences are the rows.
  prefixes: Prefixes | None = None
  # With one token per row, what the rows have in common before it.
  shared: attention.Shared | None = None
  prompts: Any = ()  # as `slots`, of prompts that are stored once; () = none
  # A delta layer's `Recurrent`, or a tuple of all layers.
  recurrent: Any = ()

  @property
  def base(self) -> jax.Array | int:
    """Position of the first key of each row's sequence, i32[B, 1]."""
    rows = self.shared or self.prefixes
    return 0 if rows is None or rows.base is None else rows.base[:, None]

  def layer(self, i: int) -> 'Cached':
    """Returns the part of a layer, from that of all layers."""
    shared = self.shared
    if shared is not None:
      shared = dataclasses.replace(shared, cache=shared.cache[i])
    prompts = self.prompts and self.prompts[i]
    recurrent = self.recurrent and self.recurrent[i]
    return Cached(self.slots[i], self.prefixes, shared, prompts, recurrent)

  def read(self) -> LayerCache:
    """Returns the keys and values that rows attend to, in a layer."""
    if (rows := self.prefixes) is None:
      return self.slots
    trees = filter(None, [self.slots, self.prompts])
    return jax.tree.map(lambda x, *y: read_prefixes(x, rows, *y), *trees)


class RMSNorm(nn.Module):
  """x / rms(x) * scale, in float32 (Zhang and Sennrich, arXiv 1910.07467).

  With `norm_offset` the parameter is the scale minus 1.
  """

  cfg: schema.Model
  scaled: bool = True

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    # Rows and tokens as one dimension: on a CPU, XLA's sum over the tokens of a
    # single row takes 70 times as long.
    y = x.reshape(-1, *x.shape[2:]).astype(jnp.float32)
    mean = jnp.mean(jnp.square(y), axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(mean + self.cfg.norm_eps)
    if self.scaled:
      offset = self.cfg.norm_offset
      initializer = nn.initializers.zeros if offset else nn.initializers.ones
      scale = self.param('scale', initializer, x.shape[-1:])
      scale = 1.0 + scale if offset else scale
      y = y * jnp.expand_dims(scale, range(y.ndim - 1))
    return y.reshape(x.shape).astype(x.dtype)


def _kernel(module: nn.Module, init: Any, shape: tuple[int, ...]) -> Any:
  """Returns a module's kernel, which may be of several arrays."""
  if module.has_variable('params', 'kernel'):
    return module.get_variable('params', 'kernel')
  return module.param('kernel', init, shape)


class Linear(nn.Module):
  """x @ kernel (+ bias) in x's dtype; normal init, scale / sqrt(fan in).

  The kernel may be quantized, and have a low-rank correction, see `lora`;
  `split` has its mesh axes, `sharding.COLUMNS` or `sharding.ROWS`.
  """

  features: int
  split: tuple[str, str | None]
  use_bias: bool = False
  scale: float = 1.0

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    fan_in = x.shape[-1]
    normal = nn.initializers.normal(self.scale / math.sqrt(fan_in))
    kernel = _kernel(self, normal, (fan_in, self.features))
    # Two dimensions: the gradient then needs no transposed copy of x.
    y = lora.matmul(x.reshape(-1, fan_in), kernel, self.split)
    if self.use_bias:
      bias = self.param('bias', nn.initializers.zeros, (self.features,))
      y = y + bias.astype(x.dtype)[None]
    return y.reshape(*x.shape[:-1], self.features)


def project(
  x: jax.Array,
  widths: dict[str, int],
  fused: str,
  count: int,
  use_bias: bool = False,
  keep: bool = True,
) -> dict[str, jax.Array]:
  """Returns the products of x and several matrices of a module, by name.

  Args:
    x: float[..., in].
    widths: their columns.
    fused: name of the one matrix that has all in a decode view; '' = they are
      apart.
    count: heads, or columns, that `tensor` splits, see `parts`.
    use_bias: whether they have biases.
    keep: whether a gradient needs the products, see `transformer.REMAT`.
  """

  def one(name, width):
    y = Linear(width, sharding.COLUMNS, use_bias, name=name)(x)
    return checkpoint_name(y, 'kept') if keep else y

  if not fused:
    return {name: one(name, width) for name, width in widths.items()}
  sizes = widths.values()
  joined = unfuse(parts(count), one(fused, sum(sizes)), *sizes)
  return dict(zip(widths, joined, strict=True))


class Attention(nn.Module):
  """Grouped-query self-attention with rotary positions.

  Its name says how, see `kinds`. In a query layer, `cache` has what the last
  layers with keys and values returned, by name: with a cache the new one, else
  them.
  """

  cfg: schema.Model
  fused: bool = False

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    table: rope.Rope,
    places: tuple[jax.Array, jax.Array] | None,
    ends: tuple[jax.Array, ...],
    cache: Any,
  ) -> tuple[jax.Array, Any]:
    cfg, is_global = self.cfg, self.name.startswith('global_')
    kv_heads, size = cfg.kv_sizes(is_global)
    widths = {'q': (1 + cfg.attention_gate) * cfg.heads * size}
    is_query, gate = 'query_' in self.name, None
    if not is_query:
      shares = is_global and cfg.keys_as_values
      widths |= dict.fromkeys('k' if shares else 'kv', kv_heads * size)

    def norm(name, y):
      return RMSNorm(cfg, name=f'{name}_norm')(y)

    fused = 'qkv' * self.fused
    heads = project(x, widths, fused, kv_heads, cfg.qkv_bias, cfg.qk_norm)
    for name in 'qk' if cfg.wide_qk_norm else '':
      heads[name] = norm(name, heads[name])
    for name, y in heads.items():
      count = cfg.heads if name == 'q' else kv_heads
      heads[name] = y.reshape(*x.shape[:-1], count, -1)
    if cfg.attention_gate:  # each head's query, then its gate
      heads['q'], gate = jnp.split(heads['q'], 2, axis=-1)
    if not is_query:
      v = heads.pop('v', heads['k'])
      v = RMSNorm(cfg, scaled=False)(v) if cfg.v_norm else v
    for name, y in heads.items():
      y = norm(name, y) if cfg.qk_norm and not cfg.wide_qk_norm else y
      heads[name] = rope.rotate(y, table)
    q = heads['q']
    if table[2] is not None:
      q = (q * table[2]).astype(x.dtype)
    scale = cfg.attention_multiplier
    options = {
      'scale': scale or 1.0 / math.sqrt(cfg.query_scale or size),
      'softcap': cfg.attention_softcap,
      'impl': cfg.attention,
    }
    if cfg.attention_sinks:
      zeros = nn.initializers.zeros
      options['sinks'] = self.param('sinks', zeros, (cfg.heads,))
    if is_query:
      cache = cache[self.name.replace('query_', '')]
    else:
      new = heads['k'], v
      cache = new if cache is None else append(cache, places, *new)
    if not isinstance(cache, Cached):
      out = attention.attention(q, *cache, *ends, **options)
    else:
      read = cache.read()
      if q.shape[1] > 1:
        out = attention.cached(q, *read, *ends, **options)
      else:  # decoding: one query per row
        ends = tuple(x[:, 0] for x in ends)
        options['shared'] = cache.shared
        out = attention.decode(q[:, 0], *read, *ends, **options)
    out = out.reshape(*x.shape[:-1], cfg.heads * size)
    if gate is not None:
      out *= nn.sigmoid(gate).reshape(out.shape)
    scale = residual_scale(cfg)
    out = Linear(
      cfg.embed_dim, sharding.ROWS, cfg.output_bias, scale, name='o'
    )(out)
    if is_query or not (cfg.shared_kv_layers or places):
      cache = None
    return sharding.pin_batch(out), cache


class Kernels(nn.Module):
  """The kernels of experts, [E, in, out], normal as that of `Linear`.

  With `use_bias` also biases [E, out].
  """

  shape: tuple[int, int, int]
  use_bias: bool
  scale: float = 1.0

  @nn.compact
  def __call__(self) -> Params:
    normal = nn.initializers.normal(self.scale / math.sqrt(self.shape[1]))
    params = {'kernel': _kernel(self, normal, self.shape)}
    if self.use_bias:
      shape = self.shape[0], self.shape[2]
      params['bias'] = self.param('bias', nn.initializers.zeros, shape)
    return params


class Experts(nn.Module):
  """A mixture of experts, see `models.experts`, and its statistics.

  Those of a decode view are the choices. `routes` are i32[B, T, k], recorded
  ones, -1 where there are none.
  """

  cfg: schema.Model
  fused: bool = False

  @nn.compact
  def __call__(
    self, x: jax.Array, valid: jax.Array, routes: jax.Array | None = None
  ) -> tuple[jax.Array, experts.Stats]:
    cfg, sizes = self.cfg, self.cfg.experts
    count, width = sizes.count, sizes.mlp_dim
    router = Linear(count, (sharding.FSDP, None), sizes.bias, name='router')
    # Rounding chooses experts, where two are alike.
    with jax.default_matmul_precision('highest'):
      logits = router(x.astype(jnp.float32))
    index, stats = jax.lax.top_k(logits, sizes.per_token)[1], {}
    if routes is not None:
      stats = experts.flips(index, routes)
      if cfg.routes == 'replay':
        index = jnp.where(routes >= 0, routes, index)
    weights = experts.weigh(logits, index, sizes.normalize)
    index = jnp.where(valid[..., None], index, count)
    inner, scale = (count, cfg.embed_dim, width), residual_scale(cfg)
    outer = count, width, cfg.embed_dim
    params = {
      'gate': Kernels(inner, sizes.bias, name='gate')(),
      'up': Kernels(inner, sizes.bias, name='up')(),
      'down': Kernels(outer, sizes.bias, scale, name='down')(),
    }
    y = experts.mix(
      params, x, index, weights, self.fused, sizes.clamp, cfg.ragged
    )
    y = sharding.pin_batch(y)
    if sizes.shared_dim:
      gate = Linear(1, (sharding.FSDP, None), name='shared_gate')(x)
      shared = MLP(cfg, self.fused, sizes.shared_dim, name='shared')(x)
      y += nn.sigmoid(gate) * shared
    if self.fused:
      return y, {'index': index}
    return y, stats | experts.statistics(logits, index)


class Delta(nn.Module):
  """Gated DeltaNet, see `models.delta`.

  Columns of `qkv` are those of the first key head, then those of the second,
  and so on: its query, its key, and the values of its value heads.
  """

  cfg: schema.Model
  fused: bool = False

  @nn.compact
  def __call__(
    self, x: jax.Array, tokens: Tokens, cache: Cached | None
  ) -> tuple[jax.Array, Cached | None]:
    cfg, sizes = self.cfg, self.cfg.delta
    keys, heads = sizes.key_heads, sizes.value_heads
    group = heads // keys * sizes.value_dim
    channels, inner = keys * 2 * sizes.key_dim + keys * group, keys * group
    widths = {'qkv': channels, 'z': inner, 'b': heads, 'a': heads}
    qkv, z, b, a = project(x, widths, 'inputs' * self.fused, keys).values()
    normal = nn.initializers.normal(1.0 / math.sqrt(sizes.conv_width))
    taps = self.param('taps', normal, (sizes.conv_width, channels))
    log_scale = self.param('log_scale', _decay_scales, (heads,))
    bias = self.param('bias', _decay_biases, (heads,))
    scale = self.param('norm_scale', nn.initializers.ones, (sizes.value_dim,))
    buffer, state, index = None, None, None
    if cache is not None:
      buffer, state = cache.recurrent
      if cache.prefixes is not None:
        index = cache.prefixes.index
        buffer, state = read_rows(buffer, index), read_rows(state, index)
    qkv, buffer = delta.convolve(qkv, taps, *tokens, buffer)
    qkv = qkv.reshape(*x.shape[:-1], keys, -1)
    q, k, v = jnp.split(qkv, (sizes.key_dim, 2 * sizes.key_dim), axis=-1)
    v, z = (y.reshape(*x.shape[:-1], heads, sizes.value_dim) for y in (v, z))
    q, k = delta.normalize(q, k)
    g, beta = delta.gates(a, b, log_scale, bias, *tokens)
    if state is not None and x.shape[1] == 1:
      args = (y[:, 0] for y in (q, k, v, g, beta))
      out, state = delta.recurrent(*args, state)
    else:
      out, state = delta.chunked(q, k, v, g, beta, state)
    out = delta.gated_norm(out.reshape(z.shape), z, scale, cfg.norm_eps)
    out = out.reshape(*x.shape[:-1], inner)
    out = Linear(
      cfg.embed_dim, sharding.ROWS, scale=residual_scale(cfg), name='o'
    )(out)
    if cache is not None:
      new = buffer, state
      if index is not None:
        used = jnp.any(tokens[1], axis=1)
        new = tuple(
          write_rows(*pair, index, used)
          for pair in zip(cache.recurrent, new, strict=True)
        )
      cache = dataclasses.replace(cache, recurrent=new)
    return sharding.pin_batch(out), cache


def _decay_scales(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Draws log A, A uniform in [1, 16], as Mamba 2 and the paper's code do."""
  return jnp.log(jax.random.uniform(key, shape, minval=1.0, maxval=16.0))


def _decay_biases(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Draws b with log-uniform softplus(b) in [0.001, 0.1], as these do."""
  low, high = math.log(1e-3), math.log(0.1)
  steps = jnp.exp(jax.random.uniform(key, shape, minval=low, maxval=high))
  return steps + jnp.log(-jnp.expm1(-steps))


class MLP(nn.Module):
  """Gated MLP: (silu(x gate) * x up) down (Shazeer, arXiv 2002.05202).

  Where `up` is given, [B, T, F], it stands for x up.
  """

  cfg: schema.Model
  fused: bool
  hidden: int

  @nn.compact
  def __call__(self, x: jax.Array, up: jax.Array | None = None) -> jax.Array:
    cfg, hidden = self.cfg, self.hidden
    names = ('gate', 'up') if up is None else ('gate',)
    widths, fused = dict.fromkeys(names, hidden), 'gate_up' * self.fused
    inputs = {'up': up} | project(x, widths, fused, hidden, cfg.mlp_bias)
    activate = nn.silu if cfg.activation == 'silu' else nn.gelu
    scale = residual_scale(cfg)
    down = Linear(
      cfg.embed_dim, sharding.ROWS, cfg.mlp_bias, scale, name='down'
    )
    return sharding.pin_batch(down(activate(inputs['gate']) * inputs['up']))


def kinds(cfg: schema.Model) -> tuple[Kind, ...]:
  """Returns the kind of each layer.

  With `global_head_dim` attention is `global_` in layers that are not local.
  Layers without keys and values of their own share no part with the others:
  their attention and their MLP are `query_`.
  """

  def kind(i):
    prefix, mixer = 'query_' * (i >= cfg.own_kv_layers), 'delta'
    if i not in cfg.delta_layers:
      is_global = cfg.global_head_dim and i not in cfg.local_layers
      mixer = 'global_' * bool(is_global) + prefix + 'attention'
    if cfg.experts.count and i not in cfg.dense_layers:
      return mixer, 'experts'
    return mixer, prefix + 'mlp'

  return tuple(map(kind, range(cfg.layers)))


def cached_mixers(cfg: schema.Model) -> tuple[str, ...]:
  """Returns the mixers of layers with keys and values, '' for the others."""
  return tuple(
    '' if mixer == 'delta' or 'query_' in mixer else mixer
    for mixer, _ in kinds(cfg)
  )


def periods(cfg: schema.Model) -> dict[str, tuple[tuple[Kind, ...], int]]:
  """Returns the scans of layers: the period of each, and its repetitions.

  A period is the shortest pattern of kinds that repeats. Layers that read the
  keys and values of others are scanned after those.
  """
  every, own, scans = kinds(cfg), cfg.own_kv_layers, {}
  for name, part in ('layers', every[:own]), ('sharing', every[own:]):
    for size in range(1, len(part) + 1):
      if part == part[:size] * (len(part) // size):
        scans[name] = part[:size], len(part) // size
        break
  return scans


def owners(kinds: Sequence[Kind], name: str) -> list[int]:
  """Returns the indices of the layers that have a part, or all of a norm."""
  every = range(len(kinds))
  return [i for i in every if name in kinds[i]] or [*every]


def layer(tree: Params, kinds: Sequence[Kind], i: int) -> Params:
  """Returns the parameters of layer i.

  Args:
    tree: the leaves of each part, stacked over the layers that have it.
    kinds: those of the layers.
    i: the layer's index.
  """
  own = {name: owners(kinds, name) for name in sorted(tree)}
  return {
    name: jax.tree.map(operator.itemgetter(indices.index(i)), tree[name])
    for name, indices in own.items()
    if i in indices
  }


def stack(each: Sequence[Params], kinds: Sequence[Kind]) -> Params:
  """Returns the tree whose `layer`s are those given."""
  return {
    name: jax.tree.map(
      lambda *x: jnp.stack(x), *(each[i][name] for i in owners(kinds, name))
    )
    for name in set().union(*each)
  }


class Block(nn.Module):
  """One layer: pre-norm mixer and feed-forward on a residual stream.

  With `fused` the parameters are those of a decode view. `layer_ranges` are
  from the function of that name, all or the layer's own; each of `flags`,
  bool[], picks one of those after the first. `ends` are the k_end, and k_until
  if keys have bounds, of `attention.attention`; delta layers read `tokens`.
  With a `cache`, keys and values are written to its `places`, those of
  `append`, and queries attend to it; see `Attention` for its other meaning.
  `routes` are those of `Experts`, `embedding` is the layer's own, [B, T, P].
  Returns the hidden states, the new cache by the mixer's name, and the
  statistics of experts.
  """

  cfg: schema.Model
  kind: Kind
  fused: bool = False

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    flags: tuple[jax.Array, ...],
    routes: jax.Array | None,
    embedding: jax.Array | None,
    layer_ranges: tuple[rope.LayerRange, ...],
    ends: tuple[jax.Array, ...],
    tokens: Tokens,
    places: tuple[jax.Array, jax.Array] | None = None,
    cache: Any = None,
  ) -> tuple[jax.Array, tuple[Any, experts.Stats | None]]:
    cfg, (mixer, ff) = self.cfg, self.kind
    own, *others = layer_ranges
    for flag, other in zip(flags, others, strict=True):
      own = jax.tree.map(functools.partial(jnp.where, flag), other, own)
    table, k_start = own

    def enter(name, y):
      return RMSNorm(cfg, name=f'{name}_norm')(y) if cfg.pre_norms else y

    def leave(name, y):
      if cfg.post_norms:
        y = checkpoint_name(y, 'kept')
        y = RMSNorm(cfg, name=f'{name}_post_norm')(y)
      factor = cfg.residual_multiplier
      return y if factor == 1 else y * jnp.asarray(factor, y.dtype)

    y = enter('attention', x)
    if mixer == 'delta':
      y, new = Delta(cfg, self.fused, name=mixer)(y, tokens, cache)
    else:
      args = table, places, (k_start, *ends), cache
      y, new = Attention(cfg, self.fused, name=mixer)(y, *args)
    x = checkpoint_name(x + leave('attention', y), 'kept')
    y, stats = enter('mlp', x), None
    if ff == 'experts':
      y, stats = Experts(cfg, self.fused, name=ff)(y, tokens[1], routes)
    else:
      y = MLP(cfg, self.fused, mlp_width(cfg, ff), name=ff)(y)
    x += leave('mlp', y)
    if embedding is not None:
      width, name = cfg.layer_embed_dim, 'layer_mlp'
      y = MLP(cfg, self.fused, width, name=name)(x, embedding)
      x += leave(name, y)
    if cfg.layer_scalars:
      scalar = self.param('scalar', nn.initializers.ones, (1,))
      x *= jax.lax.stop_gradient(scalar[0]).astype(x.dtype)
    return x, ({mixer: new}, stats)


def mlp_width(cfg: schema.Model, name: str) -> int:
  """Returns the hidden width of an MLP, by its name in the tree."""
  return cfg.mlp_dim * (1 + (name == 'query_mlp' and cfg.double_mlp))


class Embed(nn.Module):
  """Embedding table lookup.

  Under `fsdp` a device looks up its columns for the tokens of all devices of
  the axis, and then gives each its tokens: far less than the table. With
  `fused`, in a decode view, it has all columns.
  """

  cfg: schema.Model
  fused: bool = False
  size: int | None = None  # of an embedding; None = embed_dim
  count: int = 1  # embeddings of a token

  @nn.compact
  def __call__(self, tokens: jax.Array) -> jax.Array:
    cfg, size = self.cfg, self.size or self.cfg.embed_dim
    normal = nn.initializers.normal(1.0 / math.sqrt(size))
    shape = (cfg.vocab_size, self.count * size)
    table = self.param('table', normal, shape)
    pieces = sharding.DATA, sharding.SEQUENCE
    if not self.fused:
      tokens = sharding.pin(tokens, pieces)
    x = jnp.take(table, tokens, axis=0).astype(cfg.dtype)
    if not self.fused:
      x = sharding.pin(x, pieces, None, sharding.FSDP)
    x = sharding.pin_batch(x)
    if cfg.scale_embeddings:  # the factor is rounded to the compute dtype
      x *= jnp.asarray(math.sqrt(size), cfg.dtype)
    if cfg.embedding_multiplier != 1:
      x *= jnp.asarray(cfg.embedding_multiplier, cfg.dtype)
    return x


class LayerEmbed(nn.Module):
  """The layers' own embeddings: looked up, and projected from the tokens'.

  (rms_norm(x W / sqrt(D)) + table[token]) / sqrt(2)
  """

  cfg: schema.Model
  fused: bool = False

  @nn.compact
  def __call__(self, tokens: jax.Array, x: jax.Array) -> jax.Array:
    """Returns them, [L, B, T, P], from embedded tokens x."""
    cfg, sizes = self.cfg, (self.cfg.layers, self.cfg.layer_embed_dim)
    y = Linear(math.prod(sizes), sharding.COLUMNS, name='projection')(x)
    y = (y * cfg.embed_dim**-0.5).reshape(*x.shape[:2], *sizes)
    y = RMSNorm(cfg, name='norm')(y)
    table = Embed(cfg, self.fused, sizes[1], sizes[0], name='embed')(tokens)
    y = (y + table.reshape(y.shape)) * 2**-0.5
    return jnp.moveaxis(sharding.pin_batch(y), 2, 0)


def parts(count: int) -> int:
  """Returns the number of devices of `tensor` that split `count`; 1 = none."""
  ways = sharding.ways(sharding.TENSOR)
  return ways if count % ways == 0 else 1


def fuse(parts: int, *arrays: jax.Array) -> jax.Array:
  """Joins last dimensions: the first part of each array, then the second, ...

  So an array that is split over as many devices as it has parts is joined
  without communication, and `unfuse` splits it again.
  """
  rows = [x.reshape(*x.shape[:-1], parts, -1) for x in arrays]
  joined = jnp.concatenate(rows, axis=-1)
  return joined.reshape(*joined.shape[:-2], -1)


def unfuse(parts: int, x: jax.Array, *sizes: int) -> list[jax.Array]:
  """Splits what `fuse` has joined into arrays of the given last dimensions."""
  x = x.reshape(*x.shape[:-1], parts, -1)
  ends = list(itertools.accumulate(size // parts for size in sizes))
  pieces = jnp.split(x, ends[:-1], axis=-1)
  return [piece.reshape(*piece.shape[:-2], -1) for piece in pieces]


def residual_scale(cfg: schema.Model) -> float:
  """Returns 1 / sqrt(2 L): 2 L branches then sum to the variance of one."""
  return 1.0 / math.sqrt(2 * cfg.layers)


def append(
  cache: Cached, places: tuple[jax.Array, jax.Array], *new: jax.Array
) -> Cached:
  """Writes new keys and values [B, T, K, H] to the caches of a layer.

  Args:
    cache: of a layer.
    places: i32[B, T] each, the tokens' slots in their own sequences, and in the
      prompts that are stored once; a slot above a cache is none.
    *new: the keys, and the values.

  Returns:
    The cache with them.
  """
  (own, common), rows, prompts = places, cache.prefixes, cache.prompts
  index = None if rows is None else rows.index
  if isinstance(cache.slots[0], quantized.Quantized):
    new = tuple(quantized.quantize(x, 'int8', -1) for x in new)
  slots = jax.tree.map(
    lambda old, x: write(old, x, own, index), cache.slots, new
  )
  if rows is not None and prompts:
    prompts = jax.tree.map(
      lambda old, x: write(old, x, common, rows.prompt_index), prompts, new
    )
  return dataclasses.replace(cache, slots=slots, prompts=prompts)


def write(
  cache: jax.Array,
  new: jax.Array,
  slots: jax.Array,
  index: jax.Array | None = None,
) -> jax.Array:
  """Writes new keys or values [B, T, K, H] to slots of a cache [B, K, S, H].

  Entries with a slot of S or more are dropped. With `index`, i32[R], the rows
  of `new` and `slots` are those of these sequences.
  """

  def local(cache, new, slots, *index):
    rows = index[0] if index else jnp.arange(len(new))
    heads = jnp.arange(new.shape[2])[None, None]
    # A window of several heads would have TPUs choose another layout for the
    # cache than the decode kernel's, and copy it at every step.
    at = cache.at[rows[:, None, None], heads, slots[:, :, None]]
    return at.set(new.astype(cache.dtype), mode='drop')

  place = sharding.fitting(cache.shape, CACHE_AXES)
  rows, heads = place
  specs = place, PartitionSpec(rows, None, heads), PartitionSpec(rows)
  args = cache, new, slots
  if index is not None:
    args, specs = (*args, index), (*specs, PartitionSpec(rows))
  return sharding.split(local, specs, place)(*args)


def read_rows(x: jax.Array, index: jax.Array) -> jax.Array:
  """Returns the entries [R, N, ...] of sequences i32[R], from x [B, N, ...]."""
  place = sharding.fitting(x.shape, CACHE_AXES)
  specs = place, PartitionSpec(place[0])
  return sharding.split(lambda x, i: x[i], specs, place)(x, index)


def write_rows(
  x: jax.Array, new: jax.Array, index: jax.Array, used: jax.Array
) -> jax.Array:
  """Writes rows [R, N, ...] to sequences i32[R], where `used` (bool[R])."""
  place = sharding.fitting(x.shape, CACHE_AXES)
  rows = PartitionSpec(place[0])

  def local(x, new, index, used):
    index = jnp.where(used, index, len(x))
    return x.at[index].set(new.astype(x.dtype), mode='drop')

  specs = place, place, rows, rows
  return sharding.split(local, specs, place)(x, new, index, used)


def read_prefixes(
  cache: jax.Array, prefixes: Prefixes, prompts: jax.Array | None = None
) -> jax.Array:
  """Returns the prefixes [R, K, length, H] of sequences of a cache.

  Args:
    cache: float[B, K, S, H].
    prefixes: those of the rows.
    prompts: float[P, K, S, H], which have the tokens before those of the
      sequences; None = there are none.
  """
  place, length = sharding.fitting(cache.shape, CACHE_AXES), prefixes.length

  def read(cache, index, *common):
    own = take(cache, index, min(length, cache.shape[2]))
    if not common:
      return own
    prompts, prompt_index, base = common
    first = take(prompts, prompt_index, min(length, prompts.shape[2]))
    both = jnp.concatenate([first, jnp.zeros_like(own)], axis=2)
    put = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=1)
    return jax.vmap(put)(both, own, base)[:, :, :length]

  rows = PartitionSpec(place[0])
  args, specs = (cache, prefixes.index), (place, rows)
  if prompts is not None:
    args += prompts, prefixes.prompt_index, prefixes.base
    specs += place, rows, rows
  return sharding.split(read, specs, place)(*args)


def take(
  cache: jax.Array, index: jax.Array, length: int, start: jax.Array | int = 0
) -> jax.Array:
  """Returns tokens [R, K, length, H] of sequences i32[R] of a cache."""
  # Slicing the cache first would copy these tokens of all sequences.
  size = (1, cache.shape[1], length, cache.shape[3])
  return jax.vmap(
    lambda i: jax.lax.dynamic_slice(cache, (i, 0, start, 0), size)[0]
  )(index)


def put(
  cache: jax.Array, new: jax.Array, index: jax.Array, start: jax.Array
) -> jax.Array:
  """Writes tokens [R, K, T, H] to sequences i32[R] of a cache, from `start`.

  Sequences of B or more are dropped.
  """
  numbers = jax.lax.ScatterDimensionNumbers(
    update_window_dims=(1, 2, 3),
    inserted_window_dims=(0,),
    scatter_dims_to_operand_dims=(0, 2),
  )
  places = jnp.stack([index, jnp.full_like(index, start)], axis=-1)
  mode = jax.lax.GatherScatterMode.FILL_OR_DROP
  return jax.lax.scatter(cache, places, new, numbers, mode=mode)
