"""A decoder-only transformer, of the families of `families`.

Pure functions of a params tree: `init` draws it, `trunk` turns tokens into
hidden states, `head` returns the matrix that turns those into logits. One
`Block` with two drivers: the full forward scans periods of blocks, see
`layers.periods`, over the leading axis of their parameters; decoding, with a
cache, unrolls all blocks over a `decode_view`.

    embed/table                                   [V, D]
    layers/attention_norm/scale                   [L, D]
    layers/attention/{q,k,v}/kernel               [L, D, N*H or K*H]
    layers/attention/{q,k,v}/bias                 [L, N*H or K*H]  qkv_bias
    layers/attention/o/bias                       [L, D]           output_bias
    layers/attention/{q_norm,k_norm}/scale        [L, H]           qk_norm
                                                  [L, N*H or K*H]  wide_qk_norm
    layers/attention/o/kernel                     [L, N*H, D]
    layers/attention/sinks                        [L, N]   attention_sinks
    layers/delta/qkv/kernel                       [L, D, J*(2K + R*V)]
    layers/delta/{z,b,a}/kernel                   [L, D, J*R*V or J*R]
    layers/delta/taps                             [L, W, J*(2K + R*V)]
    layers/delta/{log_scale,bias}                 [L, J*R]
    layers/delta/norm_scale                       [L, V]
    layers/delta/o/kernel                         [L, J*R*V, D]
    layers/mlp_norm/scale                         [L, D]
    layers/{attention,mlp}_post_norm/scale        [L, D]           post_norms
    layers/mlp/{gate,up}/kernel                   [L, D, F]
    layers/mlp/down/kernel                        [L, F, D]
    layers/experts/router/kernel                  [L, D, E]        experts
    layers/experts/{gate,up}/kernel               [L, E, D, F]     experts
    layers/experts/down/kernel                    [L, E, F, D]     experts
    layers/experts/router/bias                    [L, E]           experts.bias
    layers/experts/{gate,up,down}/bias            [L, E, F or D]   experts.bias
    layers/experts/shared/{gate,up,down}/kernel   as of mlp        shared_dim
    layers/experts/shared_gate/kernel             [L, D, 1]        shared_dim
    layers/mlp/{gate,up,down}/bias                [L, F or D]      mlp_bias
    layers/layer_mlp/gate/kernel                  [L, D, P]  layer_embed_dim
    layers/layer_mlp/down/kernel                  [L, P, D]  layer_embed_dim
    layers/layer_mlp_post_norm/scale              [L, D]     layer_embed_dim
    layers/scalar                                 [L, 1]     layer_scalars
    layer_embed/embed/table                       [V, L*P]   layer_embed_dim
    layer_embed/projection/kernel                 [D, L*P]   layer_embed_dim
    layer_embed/norm/scale                        [P]        layer_embed_dim
    final_norm/scale                              [D]
    head/kernel                                   [D, V]   not tied_head

The L of a part's leaves are the layers that have it, see `layers.kinds`, which
also names the parts beside `attention` and `mlp` of Gemma 4: their leaves are
those, except k and v where a layer has no own ones, and v where it is k. J, K,
R, V and W of delta layers are those of `models.delta`; E and F of experts those
of `models.experts`.

The decode view has the same names, except that `layers` is a tuple of layers,
q, k and v are one `qkv`, gate and up one `gate_up`, qkv, z, b and a of a delta
layer one `inputs`, the head is always
explicit, and matrices have the compute dtype, or are quantized.

A reward model has a scalar head instead (`add_reward`), `reward/kernel` [D].
Its kernel is initialized to 0: every answer starts with the same reward.

Axes: B rows, T tokens, S cache slots, L layers, N query heads, K kv heads,
H head dim, D model, F mlp, V vocab.
"""

import bisect
import dataclasses
import functools
import math
import operator
import re
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from posttrain import schema, sharding, tree
from posttrain.models import experts, layers, lora, rope
from posttrain.ops import attention, quantized

Params = Any
# Per layer; the token at position p of row b is at [b, :, p]. () = a delta
# layer. With recorded `routes` also those, i16[B, 1, S, L k].
Cache = tuple[layers.LayerCache | tuple[jax.Array] | tuple[()], ...]


def _matrix(
  regex: str, split: tuple[str, str], *lead: str | None
) -> sharding.Rules:
  """Returns the rules of matrices, and of their factors."""
  return (
    (f'{regex}/kernel$', (*lead, *split)),
    (f'{regex}/kernel/a$', (*lead, split[0])),
    (f'{regex}/kernel/b$', (*lead, None, split[1])),
  )


# (regex over 'a/b/c' paths, mesh axis or None per dimension); the first match
# wins. The table is the transpose of a head.
_INPUTS = '(attention/[qkv]|delta/(qkv|[zba])|(mlp|shared)/(gate|up))'
_OUTPUTS = '(/o|(mlp|shared)/down)'
SHARDING_RULES = (
  (r'experts/(router|shared_gate)/kernel(/a)?$', (None, sharding.FSDP)),
  *_matrix('experts/(gate|up)', sharding.COLUMNS, None, sharding.EXPERT),
  *_matrix('experts/down', sharding.ROWS, None, sharding.EXPERT),
  (r'experts/(gate|up)/bias$', (None, sharding.EXPERT, sharding.TENSOR)),
  (r'experts/down/bias$', (None, sharding.EXPERT)),
  (r'embed/table$', sharding.ROWS),
  *_matrix('(head|projection)', sharding.COLUMNS),
  *_matrix(_INPUTS, sharding.COLUMNS, None),
  *_matrix(_OUTPUTS, sharding.ROWS, None),
  (r'delta/taps$', (None, None, sharding.TENSOR)),
  (
    rf'({_INPUTS}/(bias|kernel/column_scale)|sinks|delta/(log_scale|bias))$',
    (None, sharding.TENSOR),
  ),
  (
    rf'(scalar|router/bias|{_OUTPUTS}/(bias|kernel/column_scale)|norm/scale'
    r'|norm_scale|reward/kernel|(router|shared_gate)/kernel/b)$',
    (),
  ),
)

# The same, of a decode view: matrices are split over `tensor` alone.
VIEW_RULES = (
  (r'experts/(gate|up)/kernel$', experts.axes('up', whole=True)),
  (r'experts/down/kernel$', experts.axes('down', whole=True)),
  (r'experts/(gate|up)/kernel/b$', (sharding.EXPERT, None, sharding.TENSOR)),
  (
    r'experts/((gate|up)/bias|down/kernel/a)$',
    (sharding.EXPERT, sharding.TENSOR),
  ),
  (r'experts/(down/bias|(gate|up|down)/kernel/[ab])$', (sharding.EXPERT,)),
  (
    r'((head|projection|qkv|inputs|gate_up)/kernel(/b)?|delta/taps)$',
    (None, sharding.TENSOR),
  ),
  (
    r'(embed/table|/(o|down)/kernel(/a)?|(qkv|gate_up|delta)/bias|log_scale)$',
    (sharding.TENSOR,),
  ),
  (r'', ()),
)

# The arrays that a block saves for its backward pass. 'none' recomputes no
# matrix product: it saves their results, under the name 'kept', and recomputes
# only elementwise work (norms, RoPE, SwiGLU), which costs less than storing
# it. 'attention' saves a block's input and the results of attention, so that
# the backward pass does not repeat attention. 'block' saves only a block's
# input and recomputes all of it.
REMAT = {'none': ('kept',), 'attention': ('attention',), 'block': ()}


def _remat(block: Any, cfg: schema.Model, prevent_cse: bool = False) -> Any:
  names = 'input', *REMAT[cfg.remat]
  policy = jax.checkpoint_policies.save_only_these_names(*names)
  return nn.remat(block, prevent_cse=prevent_cse, policy=policy)


class Period(nn.Module):
  """The blocks of a period, by their index in it."""

  cfg: schema.Model
  kinds: tuple[layers.Kind, ...]

  @nn.compact
  def __call__(self, x, flags, routes, embeddings, *args):
    # Else XLA would keep what several blocks recompute.
    block = _remat(layers.Block, self.cfg, prevent_cse=True)
    new, stats = {}, []
    for i, kind in enumerate(self.kinds):
      own, chosen = tuple(flag[i] for flag in flags), None
      if routes is not None and kind[1] == 'experts':
        chosen = routes[len(stats)]
      x = checkpoint_name(x, 'input')
      layer = block(self.cfg, kind, name=str(i))
      embedding = None if embeddings is None else embeddings[i]
      x, (cached, each) = layer(x, own, chosen, embedding, *args)
      new |= cached
      stats += [each] if each else []
    stats = jax.tree.map(lambda *x: jnp.stack(x), *stats) if stats else None
    return x, (new, stats)


def _stacked(kinds: tuple[layers.Kind, ...]) -> Any:
  """Returns `Period` with parameters as `layers.stack` joins them."""

  def split(variables):
    return {
      name: {str(i): layers.layer(tree, kinds, i) for i in range(len(kinds))}
      for name, tree in variables.items()
    }

  def join(variables):
    return {
      name: layers.stack([tree[str(i)] for i in range(len(kinds))], kinds)
      for name, tree in variables.items()
    }

  return nn.map_variables(Period, 'params', split, join, init=True)


class Transformer(nn.Module):
  """The trunk: tokens to normalized hidden states."""

  cfg: schema.Model

  @nn.compact
  def __call__(
    self,
    tokens: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    ends: jax.Array | None = None,
    routes: jax.Array | None = None,
  ) -> tuple[jax.Array, experts.Stats | None]:
    cfg = self.cfg
    intervals = attention.intervals(segment_ids, positions, ends)
    tokens, positions, segment_ids, k_start, k_end = map(
      sharding.pieces, (tokens, positions, segment_ids, *intervals)
    )
    x = layers.Embed(cfg, name='embed')(tokens)
    trees = ends is not None
    ranges = rope.layer_ranges(cfg, positions, k_start, k_end, trees)
    each = rope.variants(cfg)
    _, *others = sorted({*each})
    flags = tuple(jnp.array([x == own for x in each]) for own in others)
    if routes is not None:
      routes = sharding.pieces(routes.astype(jnp.int32), fill=-1)
      routes = jnp.moveaxis(routes, 2, 0)
    embeddings = None
    if cfg.layer_embed_dim:
      embeddings = layers.LayerEmbed(cfg, name='layer_embed')(tokens, x)
    each = {'flags': flags, 'experts': routes, 'embeddings': embeddings}
    each, keys = _by_scan(each, cfg), None
    k_ends = (k_end,) if ends is None else (k_end, ends)
    args = ranges, k_ends, (positions, segment_ids != 0), None
    for name, (period, count) in layers.periods(cfg).items():
      body, kind = _remat(layers.Block, cfg), period[0]
      if len(period) > 1:
        # Else each block's parameters would be saved: a copy of all weights.
        body, kind = _remat(_stacked(period), cfg), period
      blocks = nn.scan(
        body,
        variable_axes={'params': 0},
        split_rngs={'params': True},
        in_axes=(0, 0, 0, *[nn.broadcast] * (len(args) + 1)),
        length=count,
      )(cfg, kind, name=name)
      x, (keys, stats) = blocks(x, *each[name].values(), *args, keys)
      if len(period) > 1:
        stats = jax.tree.map(_unfold, stats)
      # Those of the last layer of each kind.
      keys = jax.tree.map(operator.itemgetter(-1), keys)
    x = sharding.pin_batch(layers.RMSNorm(cfg, name='final_norm')(x))
    if self.is_initializing() and not cfg.tied_head:
      # `head` reads the kernel.
      layers.Linear(cfg.vocab_size, sharding.COLUMNS, name='head')(x)
    return x, stats


@functools.partial(jax.jit, static_argnames='cfg')
def init(key: jax.Array, cfg: schema.Model) -> Params:
  """Draws parameters: a plain nested dict of float32 arrays.

  Kernels are normal with variance 1 / fan in, those that write to the
  residual stream with 1 / (2 L fan in); scales are 1, biases 0.

  Args:
    key: PRNG key.
    cfg: model options, with `vocab_size` resolved.
  """
  assert cfg.vocab_size is not None, 'vocab_size must be resolved'
  # Shapes do not depend on it, and another platform's may not be here.
  cfg = dataclasses.replace(cfg, attention='xla')
  tokens = jnp.zeros((1, 1), jnp.int32)
  params = Transformer(cfg).init(key, tokens, tokens, tokens)['params']
  parts = {}
  for name, (period, _) in layers.periods(cfg).items():
    own = params.pop(name)
    if len(period) > 1:
      own = jax.tree.map(_unfold, own)
    for part, leaves in own.items():
      parts.setdefault(part, []).append(leaves)
  join = functools.partial(jax.tree.map, lambda *x: jnp.concatenate(x))
  return {**params, 'layers': {name: join(*x) for name, x in parts.items()}}


def _unfold(x: jax.Array) -> jax.Array:
  return x.reshape(-1, *x.shape[2:])


def _by_scan(tree: Params, cfg: schema.Model) -> Params:
  """Splits arrays of layers, by their parts, as `layers.periods` do."""
  scans, kinds, start = {}, layers.kinds(cfg), 0
  for name, (period, count) in layers.periods(cfg).items():
    end, scans[name] = start + count * len(period), {}
    for part, leaves in tree.items():
      owners = layers.owners(kinds, part)
      first, last = (bisect.bisect_left(owners, i) for i in (start, end))
      shape = (count, -1) if len(period) > 1 else (last - first,)
      if first < last:
        scans[name][part] = jax.tree.map(
          lambda x, own=slice(first, last), shape=shape: x[own].reshape(
            *shape, *x.shape[1:]
          ),
          leaves,
        )
    start = end
  return scans


def trunk(
  params: Params,
  cfg: schema.Model,
  tokens: jax.Array,
  positions: jax.Array,
  segment_ids: jax.Array,
  ends: jax.Array | None = None,
  cache: layers.Cached | None = None,
  routes: jax.Array | None = None,
) -> tuple[jax.Array, Any]:
  """Computes the hidden states that predict each token's successor.

  With a cache, `params` are a `decode_view`, a row holds one sequence, its new
  tokens are at `positions` after those in the cache, and each attends to the
  cache up to itself.

  Args:
    params: from `init`, or from `decode_view` with a cache.
    cfg: model options.
    tokens: i32[B, T].
    positions: i32[B, T], RoPE index, restarting at 0 in every segment or tree.
    segment_ids: i32[B, T], packed example id; 0 = pad.
    ends: i32[B, T], of rows of prefix trees in depth-first order: one past the
      last token of t's subtree, which alone attends to t; None = no trees.
    cache: the rows' earlier tokens, with a tuple of all layers; None = no
      cache.
    routes: int[B, T, L, k], recorded experts of the L layers with experts, -1
      where there are none, see `schema.Model.routes`; None = none at all.

  Returns:
    (hidden [B, T, D] in the compute dtype, cache with the new tokens). Without
    a cache, rows are in `sharding.pieces`, and in the cache's place are the
    statistics of the layers with experts, stacked; None = there are none. Pads
    attend to no key and no token attends to them; their hidden states are
    finite and without meaning.
  """
  if cache is None:
    params = {**params, **_by_scan(params['layers'], cfg)}
    return Transformer(cfg).apply(
      {'params': params}, tokens, positions, segment_ids, ends, routes
    )

  def apply(module, params, *args):
    return module.apply({'params': params}, *args)

  valid, base = segment_ids != 0, cache.base
  k_end = jnp.where(valid, positions + 1, 0)
  none = jnp.iinfo(jnp.int32).max
  places = (
    jnp.where(valid & (positions >= base), positions - base, none),
    jnp.where(valid & (positions < base), positions, none),
  )
  start = jnp.zeros_like(k_end)
  ranges = rope.layer_ranges(cfg, positions, start, k_end)
  new, by_mixer, chosen, each = [], {}, [], rope.variants(cfg)
  distinct = sorted({*each})
  x = apply(layers.Embed(cfg, fused=True), params['embed'], tokens)
  embeddings, kinds = [None] * cfg.layers, layers.kinds(cfg)
  if cfg.layer_embed_dim:
    module = layers.LayerEmbed(cfg, fused=True)
    embeddings = apply(module, params['layer_embed'], tokens, x)
  for i, kind in enumerate(kinds):
    own = (ranges[distinct.index(each[i])],), (k_end,), (positions, valid)
    block, layer = layers.Block(cfg, kind, fused=True), params['layers'][i]
    before = by_mixer if 'query_' in kind[0] else cache.layer(i)
    args = (), None, embeddings[i], *own, places, before
    x, (cached, stats) = apply(block, layer, x, *args)
    by_mixer |= cached
    new.append(cached[kind[0]] or layers.Cached(()))
    chosen += [stats['index']] if stats else []
  if cfg.routes != 'own':
    joined = jnp.concatenate(chosen, axis=-1)[:, :, None]
    new.append(layers.append(cache.layer(cfg.layers), places, joined))
  x = apply(layers.RMSNorm(cfg), params['final_norm'], x)
  slots = tuple(x.slots for x in new)
  prompts = cache.prompts and tuple(x.prompts for x in new)
  recurrent = tuple(x.recurrent for x in new)
  return x, dataclasses.replace(
    cache, slots=slots, prompts=prompts, recurrent=recurrent
  )


def empty_cache(
  cfg: schema.Model, rows: int, capacity: int, dtype: str = 'auto'
) -> Cache:
  """Returns a zero cache for `rows` sequences of up to `capacity` tokens.

  Args:
    cfg: model options.
    rows: number of sequences.
    capacity: their tokens.
    dtype: 'auto' = the compute dtype; 'int8', see `ops.quantized`.
  """

  def zeros(mixer):
    heads, size = cfg.kv_sizes(mixer.startswith('global_'))
    shape = rows, heads, capacity, size
    if dtype == 'auto':
      return jnp.zeros(shape, cfg.dtype)
    return quantized.quantize(jnp.zeros(shape), dtype, -1)

  cache = tuple(
    (zeros(mixer), zeros(mixer)) if mixer else ()
    for mixer in layers.cached_mixers(cfg)
  )
  if cfg.routes == 'own':
    return cache
  choices = cfg.expert_layers * cfg.experts.per_token
  return *cache, (jnp.zeros((rows, 1, capacity, choices), jnp.int16),)


def empty_recurrent(
  cfg: schema.Model, rows: int
) -> tuple[layers.Recurrent | tuple[()], ...]:
  """Returns zero buffers and states of `rows` sequences; () = attention."""
  sizes = cfg.delta
  channels = 2 * sizes.key_heads * sizes.key_dim
  channels += sizes.value_heads * sizes.value_dim
  state = rows, sizes.value_heads, sizes.key_dim, sizes.value_dim
  buffer = rows, channels, sizes.conv_width - 1
  return tuple(
    (jnp.zeros(buffer, cfg.dtype), jnp.zeros(state)) if mixer == 'delta' else ()
    # What `empty_cache` has after the layers has no state.
    for mixer, _ in (*layers.kinds(cfg), *[('', '')] * (cfg.routes != 'own'))
  )


def decode_view(
  params: Params, cfg: schema.Model, only: Sequence[int] | None = None
) -> Params:
  """Builds the parameters for decoding, once per weight update.

  Slicing stacked weights inside a decode loop would copy them at every step;
  a fused product is one kernel instead of two or three. Its columns are those
  of the first device of `tensor` (of q, k and v, or of gate and up), then those
  of the second, and so on.

  Args:
    params: from `init`; adapted kernels are merged, or keep their factors, then
      as one of q, k and v, or gate and up.
    cfg: model options.
    only: the indices of the layers; None = all.

  Returns:
    A tree that shares no buffer with `params`, which may be donated later.
  """
  kinds = layers.kinds(cfg)
  decode_form = lora.decode_form(params)

  def fuse(parts, leaves):
    join = functools.partial(layers.fuse, parts)
    return {x: lora.fuse(join, [leaf[x] for leaf in leaves]) for x in leaves[0]}

  def fuse_mlp(mlp, width):
    inputs = [mlp.pop(name) for name in ('gate', 'up') if name in mlp]
    mlp['gate_up'] = fuse(layers.parts(width), inputs)

  def layer(i):
    p = decode_form(layers.layer(params['layers'], kinds, i))  # new dicts
    mixer, ff = kinds[i]
    inner = p[mixer]
    if mixer == 'delta':
      inputs = [inner.pop(name) for name in ('qkv', 'z', 'b', 'a')]
      inner['inputs'] = fuse(layers.parts(cfg.delta.key_heads), inputs)
    else:
      heads = layers.parts(cfg.kv_sizes(mixer.startswith('global_'))[0])
      inputs = [inner.pop(name) for name in 'qkv' if name in inner]
      inner['qkv'] = fuse(heads, inputs)
    if inner := p.get('layer_mlp'):
      fuse_mlp(inner, cfg.layer_embed_dim)
    if ff != 'experts':
      fuse_mlp(p[ff], layers.mlp_width(cfg, ff))
    if inner := p.get('experts', {}).get('shared'):
      fuse_mlp(inner, cfg.experts.shared_dim)
    return p

  view = {
    **params,
    'layers': tuple(map(layer, range(cfg.layers) if only is None else only)),
    'head': {'kernel': head(params, cfg)[0]},
  }

  def cast(path, x):
    # A rounded router would choose other experts than in training.
    whole = x.ndim < 2 or re.search('/router/|/values$|/scale$', path)
    return jnp.array(x, None if whole else cfg.dtype, copy=True)

  return tree.map_with_path(cast, view)


def head(params: Params, cfg: schema.Model) -> tuple[jax.Array, float | None]:
  """Returns the output matrix, float[D, V], and the logits' softcap or None."""
  if 'head' in params:  # always in a decode view
    return lora.merge(params['head'])['kernel'], cfg.logit_softcap
  assert cfg.tied_head, 'a model has a head, or its embedding table is one'
  return params['embed']['table'].T, cfg.logit_softcap


def shapes(cfg: schema.Model) -> Params:
  """Returns the parameters as `jax.ShapeDtypeStruct`s; allocates nothing."""
  return jax.eval_shape(lambda: init(jax.random.key(0), cfg))


def num_params(cfg: schema.Model) -> int:
  """Returns the number of parameters; allocates nothing."""
  return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes(cfg)))


def add_reward(params: Params, keep_lm_head: bool = False) -> Params:
  """Returns a transformer's parameters with a new reward head.

  Args:
    params: from `init`.
    keep_lm_head: whether to keep an untied language-model head.
  """
  (width,) = params['final_norm']['scale'].shape
  trunk = {k: x for k, x in params.items() if keep_lm_head or k != 'head'}
  return {**trunk, 'reward': {'kernel': jnp.zeros(width, jnp.float32)}}


def add_critic(params: Params, model: Params, kind: str) -> Params:
  """Returns trained parameters with those of a critic, under `critic`.

  A critic is a reward model, whose trunk is the policy's where it has none.

  Args:
    params: those of the policy that train.
    model: the policy's, all of them.
    kind: 'none', 'head' or 'model'.
  """
  if kind == 'none':
    return params
  critic = add_reward(jax.tree.map(jnp.copy, model))
  if kind == 'head':
    critic = {'reward': critic['reward']}
  return {**params, 'critic': critic}


def split_critic(params: Params) -> tuple[Params, Params]:
  """Returns trained parameters as (the policy's, the critic's or None)."""
  policy = dict(params)
  return policy, policy.pop('critic', None)


def reward_shapes(cfg: schema.Model, keep_lm_head: bool = False) -> Params:
  """Returns the parameters as `jax.ShapeDtypeStruct`s; allocates nothing."""
  return jax.eval_shape(lambda p: add_reward(p, keep_lm_head), shapes(cfg))


def rewards(params: Params, hidden: jax.Array) -> jax.Array:
  """Computes the reward of each prefix of a sequence.

  Args:
    params: from `add_reward`.
    hidden: float[B, T, D] from `trunk`.

  Returns:
    f32[B, T], the reward if the sequence ended at token t; an answer's reward
    is that of its last token.
  """
  kernel = params['reward']['kernel'][None, None]
  return jnp.sum(hidden.astype(jnp.float32) * kernel, axis=-1)
