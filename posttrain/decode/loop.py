"""The jitted parts of the engine: prefill, first tokens, and the decode loop.

1. `prefill`: the next tokens of R rows pass through the model, into the slots
   of these rows; queries read the slots' prefixes.
2. `share`: a prompt is copied from its slot to others with the same prompt.
3. `first`: slots whose prompt is complete draw their next token, from the
   logits after it.
4. `decode`: a `while_loop`; each iteration feeds every active slot its last
   token and draws the next, until enough have stopped or `steps` are done.
   Where attention reads all keys of its cache, the loop runs on the part of the
   cache that the longest active slot needs, then on the next larger part.
   With prompts that are stored once, a group's is read once for all its slots.

The random number of the token at position p depends on the request's key and p
alone, not on slots, chunks or other requests.

Slots and rows are split over the mesh axes of the batch, in equal ranges, and
an array names them by their index in the range: a row's slot is on its device,
and no program moves a part of the cache to another device.

Axes: B slots, R rows, C tokens of a prefill chunk, S cache slots, V vocab,
E stop ids.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from posttrain import schema, scoring, sharding
from posttrain.decode import sampling
from posttrain.models import layers, transformer
from posttrain.ops import attention

_SHORTEST = 64  # tokens; reading fewer saves less than it costs to compile


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
  """The state of decoding; donated from call to call."""

  cache: transformer.Cache  # of B slots, after the prompts that are stored once
  prompts: transformer.Cache | tuple[()]  # those prompts; () = none
  recurrent: Any  # of B slots, see `transformer.empty_recurrent`
  length: jax.Array  # i32[B], tokens in the cache
  token: jax.Array  # i32[B], drawn last, at position `length`; not in the cache
  active: jax.Array  # bool[B], not stopped
  ids: jax.Array  # i32[B, S], drawn tokens by position
  logprobs: jax.Array  # f32[B, S], of the drawn tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
  """Options of the requests in the slots. Traced: nothing recompiles."""

  keys: jax.Array  # u32[B, 2], a PRNG key per request
  limit: jax.Array  # i32[B], the last token's position is below this
  stop_ids: jax.Array  # i32[B, E], padded with -1
  temperature: jax.Array  # f32[B]
  top_k: jax.Array  # i32[B]
  top_p: jax.Array  # f32[B]
  min_p: jax.Array  # f32[B]


def cached_shape(state: State) -> tuple[int, ...]:
  """Returns the shape [B, K, S, H] of a layer's keys."""
  return jax.tree.leaves(state.cache)[0].shape


def placement(mesh: Mesh | None, slots: int) -> NamedSharding | None:
  """Returns the sharding of the slots; None without a mesh.

  A mesh of one device has a sharding too: an uncommitted state next to weights
  on that mesh would compile every program twice, once before and once after the
  state gets its sharding.

  Raises:
    ValueError: the slots do not divide over the axes other than tensor.
  """
  if mesh is None:
    return None
  sharding.check_batch(mesh, slots, 'config rollout.slots')
  return NamedSharding(mesh, PartitionSpec(sharding.BATCH_AXES))


def _pin(state: State, layout: NamedSharding | None) -> State:
  if layout is None:
    return state
  mesh = layout.mesh
  places, axes = jax.tree.map(lambda _: layout, state), layers.CACHE_AXES
  with sharding.use(mesh):
    cache, prompts, recurrent = jax.tree.map(
      lambda x: NamedSharding(mesh, sharding.fitting(x.shape, axes)),
      (state.cache, state.prompts, state.recurrent),
    )
  places = dataclasses.replace(
    places, cache=cache, prompts=prompts, recurrent=recurrent
  )
  return jax.lax.with_sharding_constraint(state, places)


def _mesh(layout: NamedSharding | None) -> Mesh | AbstractMesh | None:
  return layout and layout.mesh


@functools.partial(jax.jit, static_argnums=(1, 2))
def view(params: Any, cfg: schema.Model, layout: NamedSharding | None) -> Any:
  """Returns `transformer.decode_view`, split over `tensor` alone."""
  with sharding.use(_mesh(layout)):
    tree = transformer.decode_view(params, cfg)
  if layout is None:
    return tree
  rules = transformer.VIEW_RULES
  places = sharding.shardings(tree, rules, layout.mesh)
  return jax.lax.with_sharding_constraint(tree, places)


def local_view(params: Any, cfg: schema.Model, mesh: Mesh) -> Any:
  """Returns `view` of parameters that are on the devices of all processes.

  All processes must call it. What travels is in the compute dtype.

  Args:
    params: the parameters.
    cfg: model options.
    mesh: the devices of this process.
  """
  wide = jax.tree.leaves(params)[0].sharding.mesh
  tree = _spread_view(params, cfg, wide)
  return sharding.localize(tree, transformer.VIEW_RULES, mesh)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _spread_view(params, cfg, mesh):
  with sharding.use(mesh):
    return transformer.decode_view(params, cfg)


def fit(
  state: State | None,
  cfg: schema.Model,
  slots: int,
  capacity: int,
  layout: NamedSharding | None,
  prompts: tuple[int, int] = (0, 0),
  dtype: str = 'auto',
) -> State:
  """Returns the state, widened to `capacity` tokens if it is smaller.

  Args:
    state: the state of all slots; None = there is none.
    cfg: model options.
    slots: their number.
    capacity: tokens of a sequence.
    layout: the state's sharding.
    prompts: the number of prompts that are stored once, and their tokens, which
      the slots do not hold.
    dtype: of the cache, see `transformer.empty_cache`.
  """
  if state is not None and state.ids.shape[1] >= capacity:
    return state
  return _widen(state, cfg, slots, capacity, layout, prompts, dtype)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5, 6))
def _widen(state, cfg, slots, capacity, layout, prompts=(0, 0), dtype='auto'):
  wide = State(
    cache=transformer.empty_cache(cfg, slots, capacity - prompts[1], dtype),
    prompts=transformer.empty_cache(cfg, *prompts, dtype=dtype)
    if prompts[0]
    else (),
    recurrent=transformer.empty_recurrent(cfg, slots),
    length=jnp.zeros(slots, jnp.int32),
    token=jnp.zeros(slots, jnp.int32),
    active=jnp.zeros(slots, bool),
    ids=jnp.zeros((slots, capacity), jnp.int32),
    logprobs=jnp.zeros((slots, capacity), jnp.float32),
  )
  if state is not None:
    wide = jax.tree.map(
      lambda x, old: jax.lax.dynamic_update_slice(x, old, (0,) * old.ndim),
      wide,
      state,
    )
  return _pin(wide, layout)


@functools.partial(jax.jit, static_argnums=(1, 4, 5, 6), donate_argnums=2)
def prefill(
  view: Any,
  cfg: schema.Model,
  state: State,
  chunk: tuple[jax.Array, ...],
  length: int,
  most: int,
  layout: NamedSharding | None,
) -> tuple[State, jax.Array]:
  """Feeds each row its next chunk.

  Args:
    view: `transformer.decode_view` of the parameters.
    cfg: model options.
    state: the state of all slots.
    chunk: from `schedule.Shapes.chunk`: the tokens i32[R, C], right-padded; and
      i32[R] each: the first one's position, the number of real ones (0 = no
      row), and the row's slot; with prompts that are stored once, also the
      row's one, and its tokens there.
    length: tokens of a slot that are read, at least start + count of all rows.
    most: the most rows per device of any call.
    layout: the state's sharding.

  Returns:
    (state, logits f32[M, V] after each row's last token): on each device its
    rows, and zeros up to `most`, so that `first` has one shape.
  """
  tokens, start, count, slot, *prompt = chunk
  index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
  valid = (index < count[:, None]).astype(jnp.int32)
  prefixes = layers.Prefixes(slot, length, *prompt)
  with sharding.use(_mesh(layout)):
    hidden, cache = transformer.trunk(
      view,
      cfg,
      tokens,
      start[:, None] + index,
      valid,
      cache=layers.Cached(
        state.cache, prefixes, prompts=state.prompts, recurrent=state.recurrent
      ),
    )
    assert cache is not None
    last = jnp.maximum(count - 1, 0)[:, None, None]
    hidden = jnp.take_along_axis(hidden, last, axis=1)[:, 0]
    logits = scoring.next_logits(view, cfg, hidden)
    place = sharding.fitting(logits.shape, layers.CACHE_AXES)
    logits = sharding.split(
      lambda x: jnp.pad(x, ((0, most - len(x)), (0, 0))), (place,), place
    )(logits)
  state = dataclasses.replace(
    state, cache=cache.slots, prompts=cache.prompts, recurrent=cache.recurrent
  )
  return _pin(state, layout), logits


@functools.partial(jax.jit, static_argnums=(4, 5), donate_argnums=0)
def share(
  state: State,
  target: jax.Array,
  source: jax.Array,
  length: jax.Array,
  tokens: int,
  layout: NamedSharding | None,
) -> State:
  """Copies the first tokens of slots, and recurrent states, to others.

  Args:
    state: the state of all slots.
    target: i32[B], on each device the slots to fill, and then a number above
      them for none.
    source: i32[B], the slot that each is copied from.
    length: i32[], the most tokens of a source.
    tokens: tokens to copy at a time on a device, which bounds the memory.
    layout: the state's sharding.
  """

  def copy(target, source, length, cache, recurrent):
    """Copies on the slots of one device, in blocks of 128 tokens."""
    slots, capacity = len(target), jax.tree.leaves(cache)[0].shape[2]
    block = min(capacity, 128)
    blocks = (length + block - 1) // block
    rows = max(min(tokens // block, slots), 1)
    target, source = (
      jnp.pad(x, (0, -slots % rows), constant_values=slots)
      for x in (target, source)
    )

    def put(i, cache):
      # The last block ends with the slot; it may overlap the one before.
      start = jnp.minimum(i % blocks * block, capacity - block)
      to, origin = (
        jax.lax.dynamic_slice(x, (i // blocks * rows,), (rows,))
        for x in (target, source)
      )
      return jax.tree.map(
        lambda x: layers.put(
          x, layers.take(x, origin, block, start), to, start
        ),
        cache,
      )

    tiles = (jnp.sum(target < slots) + rows - 1) // rows
    recurrent = jax.tree.map(
      lambda x: x.at[target].set(x[source], mode='drop'), recurrent
    )
    return jax.lax.fori_loop(0, tiles * blocks, put, cache), recurrent

  with sharding.use(_mesh(layout)):
    both = jax.tree.map(
      lambda x: sharding.fitting(x.shape, layers.CACHE_AXES),
      (state.cache, state.recurrent),
    )
    slots = sharding.fitting(cached_shape(state), layers.CACHE_AXES)[0]
    batch = PartitionSpec(slots)
    specs = batch, batch, PartitionSpec(), *both
    copy = sharding.split(copy, specs, both)
    both = copy(target, source, length, state.cache, state.recurrent)
  state = dataclasses.replace(state, cache=both[0], recurrent=both[1])
  return _pin(state, layout)


@functools.partial(jax.jit, static_argnums=5, donate_argnums=0)
def first(
  state: State,
  slots: Slots,
  logits: jax.Array,
  row: jax.Array,
  length: jax.Array,
  layout: NamedSharding | None,
) -> State:
  """Draws the token that follows the prompts of slots, which decode then.

  Args:
    state: the state of all slots.
    slots: options of the requests.
    logits: f32[M, V], from `prefill`.
    row: i32[B], the slot's row; -1 = its prompt is not complete, or drawn from.
    length: i32[B], the tokens of the prompt.
    layout: the state's sharding.
  """
  new = row >= 0
  length = jnp.where(new, length, state.length)
  with sharding.use(_mesh(layout)):
    place = sharding.fitting(logits.shape, layers.CACHE_AXES)
    specs = place, PartitionSpec(place[0])
    pick = sharding.split(lambda logits, row: logits[row], specs, place)
    state = dataclasses.replace(state, length=length)
    state = _draw(state, slots, pick(logits, row), new)
  return _pin(state, layout)


@functools.partial(jax.jit, static_argnums=(1, 5, 7), donate_argnums=2)
def decode(
  view: Any,
  cfg: schema.Model,
  state: State,
  slots: Slots,
  until: tuple[jax.Array, jax.Array],
  layout: NamedSharding | None,
  shared: attention.Shared | None = None,
  exact: bool = False,
) -> State:
  """Draws tokens for every active slot.

  Args:
    view: `transformer.decode_view` of the parameters.
    cfg: model options.
    state: the state of all slots.
    slots: options of the requests.
    until: i32[] each: the most tokens of a slot; and ends once no more slots
      than these are active.
    layout: the state's sharding.
    shared: the slots of the prompts that are stored once, of the first ones of
      each device, without a cache; None = no slot that decodes has one.
    exact: reads slots to their end, whatever the others hold.
  """
  capacity, prompts = cached_shape(state)[2], state.prompts
  base = 0 if shared is None else shared.base

  def step(carry):
    i, state = carry
    hidden, cache = transformer.trunk(
      view,
      cfg,
      state.token[:, None],
      state.length[:, None],
      state.active[:, None].astype(jnp.int32),
      cache=layers.Cached(
        state.cache, shared=shared, recurrent=state.recurrent
      ),
    )
    assert cache is not None
    logits = scoring.next_logits(view, cfg, hidden[:, 0])
    state = dataclasses.replace(
      state,
      cache=cache.slots,
      recurrent=cache.recurrent,
      length=state.length + state.active,
    )
    return i + 1, _draw(state, slots, logits, state.active)

  carry = jnp.zeros((), jnp.int32), dataclasses.replace(state, prompts=())
  with sharding.use(_mesh(layout)):
    if shared is not None:
      members, longest = shared.members, shared.longest

      def cut(x):
        place = sharding.fitting(x.shape, layers.CACHE_AXES)
        specs = place, PartitionSpec(place[0])
        fn = sharding.split(lambda x, y: x[: len(y), :, :longest], specs, place)
        return fn(x, members)

      cache = jax.tree.map(cut, prompts)
      shared = dataclasses.replace(shared, cache=cache)
    # Kernels skip what a slot does not hold.
    reads_all = attention.is_xla(cfg, decodes=True) and not exact
    for tokens in lengths(capacity) if reads_all else [capacity]:
      carry = _decode_up_to(base, tokens, until, step, carry)
  return _pin(dataclasses.replace(carry[1], prompts=prompts), layout)


def lengths(capacity: int) -> list[int]:
  """Returns the numbers of tokens of a slot that are read: 64, 128, ..."""
  sizes, size = [], _SHORTEST
  while 4 * size <= 3 * capacity:
    sizes.append(size)
    size *= 2
  return [*sizes, capacity]


def _decode_up_to(base, tokens, until, step, carry):
  """Decodes while all active slots hold fewer than `tokens` from `base` on.

  The cache of so many tokens is a copy, which is read at every step instead of
  the whole cache, and written back at the end.
  """
  capacity, (steps, min_active) = cached_shape(carry[1])[2], until
  whole = tokens == capacity
  # To copy a part, and back, reads and writes it twice.
  is_cheaper = steps * (capacity - tokens) > 4 * tokens

  def continues(carry):
    i, state = carry
    more = (i < steps) & (jnp.sum(state.active) > min_active)
    if whole:
      return more
    return (
      more
      & is_cheaper
      & jnp.all(~state.active | (state.length < base + tokens))
    )

  def on_copy(carry):
    i, state = carry
    cache = jax.tree.map(
      lambda x: jax.lax.slice_in_dim(x, 0, tokens, axis=2), state.cache
    )
    part = dataclasses.replace(state, cache=cache)
    i, part = jax.lax.while_loop(continues, step, (i, part))
    cache = jax.tree.map(
      lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, 0, 2),
      state.cache,
      part.cache,
    )
    return i, dataclasses.replace(part, cache=cache)

  if whole:
    return jax.lax.while_loop(continues, step, carry)
  # A loop of at most one turn: unlike a condition, it copies no cache.
  return jax.lax.while_loop(continues, on_copy, carry)


@jax.jit
def routes(
  state: State, slot: jax.Array, prompt: jax.Array, base: jax.Array
) -> jax.Array:
  """Returns the experts of a sequence's tokens, i16[S, L k], by position.

  Args:
    state: the state of all slots, of a model with recorded `routes`.
    slot: i32[], its slot.
    prompt: i32[], its prompt of those that are stored once.
    base: i32[], the tokens there, which come before those of the slot.
  """
  own = jax.tree.leaves(state.cache)[-1][slot, 0]
  if not state.prompts:
    return own
  first = jax.tree.leaves(state.prompts)[-1][prompt, 0]
  both = jnp.concatenate([first, jnp.zeros_like(own)])
  return jax.lax.dynamic_update_slice_in_dim(both, own, base, 0)


@functools.partial(jax.jit, static_argnums=2, donate_argnums=0)
def stop(state: State, slot: jax.Array, layout: NamedSharding | None) -> State:
  """Deactivates a slot, i32[]."""
  active = state.active.at[slot].set(False)
  return _pin(dataclasses.replace(state, active=active), layout)


@jax.jit
def request_keys(seed: jax.Array, high: jax.Array, low: jax.Array) -> jax.Array:
  """Returns a key u32[B, 2] per request id, given as two u32[B] words."""
  key = jax.random.key(seed)
  fold = jax.vmap(
    lambda high, low: jax.random.fold_in(jax.random.fold_in(key, high), low)
  )
  return jax.random.key_data(fold(high, low))


def uniforms(keys: jax.Array, positions: jax.Array) -> jax.Array:
  """Returns the random number in [0, 1), f32[B], of each position's token."""

  def uniform(key, position):
    key = jax.random.fold_in(jax.random.wrap_key_data(key), position)
    return jax.random.uniform(key)

  return jax.vmap(uniform)(keys, positions)


def _draw(state: State, slots: Slots, logits, active) -> State:
  """Draws the token at position `length` of the active slots, bool[B]."""
  batch = PartitionSpec(sharding.BATCH_AXES)
  spec = sharding.fitting(logits.shape, layers.CACHE_AXES)
  split = sharding.current() is not None and spec[1] is not None

  def draw(state, slots, logits, active):
    """Draws for the slots of one device, on the fields of `State`."""
    length = state['length']
    tokens, logprobs = sampling.draw(
      logits,
      uniforms(slots.keys, length),
      slots.temperature,
      slots.top_k,
      slots.top_p,
      slots.min_p,
      spec[1] if split else None,
    )
    stopped = jnp.any(slots.stop_ids == tokens[:, None], axis=1)
    stopped |= length + 1 >= slots.limit
    rows = jnp.arange(len(tokens))
    places = jnp.where(active, length, state['ids'].shape[1])
    return {
      'length': length,
      'token': jnp.where(active, tokens, state['token']),
      'active': jnp.where(active, ~stopped, state['active']),
      'ids': state['ids'].at[rows, places].set(tokens, mode='drop'),
      'logprobs': state['logprobs'].at[rows, places].set(logprobs, mode='drop'),
    }

  draw = sharding.split(draw, (batch, batch, spec, batch), batch)
  fields = vars(state).copy()
  names = 'cache', 'prompts', 'recurrent'
  caches = {name: fields.pop(name) for name in names}
  return State(**caches, **draw(fields, slots, logits, active))
