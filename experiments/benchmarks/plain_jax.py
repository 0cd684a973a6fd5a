"""The yardstick of the benchmarks: plain JAX, without imports from posttrain.

`make_step`: a Llama-shaped decoder, mean cross-entropy over all tokens but the
first of a row, clip and AdamW, gradients accumulated over micro-batches by a
scan. Rows are whole sequences: no packing, padding, temperature, entropy or
weights. Autodiff throughout.

`generate`: prompts of one length go through a prefill of all rows, then a
`while_loop` draws a token per row: weights and cache per layer, the cache
[B, K, S, H] just as long as needed and updated in place by a scatter (a bit
faster than a dynamic slice), the query group folded into rows, an inverse CDF
at temperature 1. All in one program.

`make_grpo`: every sample's prompt is prefilled, a function on the host computes
rewards, and one PPO-clip update with AdamW trains on all rows, whatever their
advantage.

Axes: B rows, T tokens, S cache slots, N query heads, K kv heads, G = N / K,
H head dim, D model, F mlp, V vocab, L layers.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.benchmarks import sizes


def init(key: jax.Array, shape: sizes.Shape) -> dict:
  """Returns parameters with a leading layer axis and a tied head."""
  d, f = shape.embed_dim, shape.mlp_dim
  q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
  sizes = {
    'q': (d, q),
    'k': (d, kv),
    'v': (d, kv),
    'o': (q, d),
    'gate': (d, f),
    'up': (d, f),
    'down': (f, d),
  }
  keys = dict(zip([*sizes, 'embed'], jax.random.split(key, 8), strict=True))
  layers = {
    name: jax.random.normal(keys[name], (shape.layers, *size))
    / math.sqrt(size[0])
    for name, size in sizes.items()
  }
  layers |= {name: jnp.ones((shape.layers, d)) for name in ('norm1', 'norm2')}
  table = jax.random.normal(keys['embed'], (shape.vocab_size, d))
  return {'embed': table / math.sqrt(d), 'layers': layers, 'norm': jnp.ones(d)}


def rms_norm(x, scale):
  """Returns x / rms(x) * scale."""
  mean = jnp.mean(x * x, axis=-1, keepdims=True)
  return x * jax.lax.rsqrt(mean + 1e-6) * scale


def rope(positions, shape: sizes.Shape):
  """Returns a function that applies RoPE to x [B, T, N, H]."""
  angles = positions[:, None, None] * 10_000.0 ** (
    -jnp.arange(0, shape.head_dim, 2) / shape.head_dim
  )
  cos, sin = jnp.cos(angles), jnp.sin(angles)  # [T, 1, H / 2]

  def rotate(x):
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

  return rotate


def attend(q, k, v, positions):
  """Returns attention of q [B, T, N, H] to k, v [B, K, S, H].

  A query sees the slots up to its own; the query group is folded into rows.
  """
  b, t, n, h = q.shape
  kv, s = k.shape[1:3]
  q = q.reshape(b, t, kv, n // kv, h).transpose(0, 2, 3, 1, 4)
  q = q.reshape(b, kv, n // kv * t, h)
  scores = (q @ k.mT / math.sqrt(h)).reshape(b, kv, n // kv, t, s)
  scores = jnp.where(jnp.arange(s) <= positions[:, None], scores, -1e30)
  weights = jax.nn.softmax(scores).reshape(b, kv, n // kv * t, s)
  out = (weights @ v).reshape(b, kv, n // kv, t, h)
  return out.transpose(0, 3, 1, 2, 4).reshape(b, t, n * h)


def block(x, p, shape: sizes.Shape, positions, rotate, store):
  """Returns the output of a layer.

  Args:
    x: f32[B, T, D].
    p: the layer's parameters.
    shape: the model's sizes.
    positions: i32[T].
    rotate: `rope` of the positions.
    store: new keys or values [B, T, K, H], 0 or 1 -> all of them [B, K, S, H].
  """
  y = rms_norm(x, p['norm1'])
  q, k, v = (
    (y @ p[name]).reshape(*x.shape[:2], -1, shape.head_dim) for name in 'qkv'
  )
  k, v = store(rotate(k), 0), store(v, 1)
  x = x + attend(rotate(q), k, v, positions) @ p['o']
  y = rms_norm(x, p['norm2'])
  return x + (jax.nn.silu(y @ p['gate']) * (y @ p['up'])) @ p['down']


def forward(params, shape: sizes.Shape, ids):
  """Returns logits f32[B, T, V]."""
  positions = jnp.arange(ids.shape[1])
  rotate = rope(positions, shape)

  def layer(x, p):
    def store(new, _):
      return new.transpose(0, 2, 1, 3)

    return block(x, p, shape, positions, rotate, store), None

  x, _ = jax.lax.scan(layer, params['embed'][ids], params['layers'])
  return rms_norm(x, params['norm']) @ params['embed'].T


def loss(params, shape: sizes.Shape, ids):
  """Returns the sum of -log p(next token), in nats."""
  logprobs = jax.nn.log_softmax(forward(params, shape, ids)[:, :-1])
  return -jnp.take_along_axis(logprobs, ids[:, 1:, None], axis=-1).sum()


def make_update(shape: sizes.Shape, rows: int, lr: float, loss):
  """Returns (init_state, update); micro-batches have `rows` sequences.

  Args:
    shape: the model's sizes.
    rows: sequences of a micro-batch.
    lr: the learning rate.
    loss: (params, shape, *arrays of a micro-batch) -> sum over tokens.
  """
  optimizer = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(lr, b1=0.9, b2=0.95, weight_decay=0.1),
  )

  def init_state(key):
    params = init(key, shape)
    return params, optimizer.init(params)

  def update(state, arrays, count):
    params, opt_state = state

    def add_micro_batch(carry, micro):
      new = jax.value_and_grad(loss)(params, shape, *micro)
      return jax.tree.map(jnp.add, carry, new), None

    zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    micros = jax.tree.map(lambda x: x.reshape(-1, rows, *x.shape[1:]), arrays)
    (value, grads), _ = jax.lax.scan(add_micro_batch, zeros, micros)
    grads = jax.tree.map(lambda g: g / count, grads)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value / count

  return init_state, update


def make_step(shape: sizes.Shape, rows: int):
  """Returns (init_state, jitted step (state, ids) -> state, loss)."""
  init_state, update = make_update(shape, rows, 3e-4, loss)

  def step(state, ids):
    return update(state, (ids,), ids.shape[0] * (ids.shape[1] - 1))

  return init_state, jax.jit(step, donate_argnums=0)


@functools.partial(jax.jit, static_argnames=('shape', 'new'))
def generate(params, shape: sizes.Shape, prompts, key, new: int):
  """Samples `new` tokens after each prompt.

  Args:
    params: parameters from `init`.
    shape: the model's sizes.
    prompts: i32[B, P].
    key: PRNG key.
    new: tokens of a completion.

  Returns:
    (ids i32[B, new], logprobs f32[B, new] in nats).
  """
  rows, length = prompts.shape
  layers = [
    jax.tree.map(lambda x, i=i: x[i], params['layers'])
    for i in range(shape.layers)
  ]
  size = (rows, shape.kv_heads, length + new, shape.head_dim)
  empty = [[jnp.zeros(size), jnp.zeros(size)] for _ in layers]
  numbers = jax.random.uniform(key, (new, rows))

  def feed(ids, start, cache):
    return extend(params, layers, shape, ids, start, cache)

  def step(carry):
    i, token, cache, ids, logprobs = carry
    logits, cache = feed(token[:, None], length + i - 1, cache)
    return draw(i, logits, cache, ids, logprobs)

  def draw(i, logits, cache, ids, logprobs):
    token, logprob = _draw(logits, numbers[i])
    ids = jax.lax.dynamic_update_slice(ids, token[:, None], (0, i))
    logprobs = jax.lax.dynamic_update_slice(logprobs, logprob[:, None], (0, i))
    return i + 1, token, cache, ids, logprobs

  logits, cache = feed(prompts, 0, empty)
  out = jnp.zeros((rows, new), jnp.int32), jnp.zeros((rows, new))
  carry = draw(0, logits, cache, *out)
  *_, ids, logprobs = jax.lax.while_loop(lambda c: c[0] < new, step, carry)
  return ids, logprobs


def extend(params, layers, shape, ids, start, cache):
  """Returns logits f32[B, V] after the last token, and the new cache."""
  positions = start + jnp.arange(ids.shape[1])
  rows, rotate = jnp.arange(len(ids))[:, None], rope(positions, shape)
  x, cache = params['embed'][ids], [list(layer) for layer in cache]
  for p, layer in zip(layers, cache, strict=True):

    def store(new, part, layer=layer):
      layer[part] = layer[part].at[rows, :, positions[None]].set(new)
      return layer[part]

    x = block(x, p, shape, positions, rotate, store)
  x = rms_norm(x[:, -1], params['norm'])
  return x @ params['embed'].T, cache


def _draw(logits, numbers):
  """Returns ids and logprobs, sampled by the inverse CDF."""
  logprobs = jax.nn.log_softmax(logits)
  mass = jnp.cumsum(jnp.exp(logprobs), axis=-1)
  below = mass <= numbers[:, None] * mass[:, -1:]
  token = jnp.minimum(jnp.sum(below, axis=-1), logits.shape[1] - 1)
  return token, jnp.take_along_axis(logprobs, token[:, None], axis=1)[:, 0]


def clip_loss(params, shape, ids, old, advantages):
  """Returns the sum over completions of -min(rho A, clip(rho, 0.8, 1.28) A)."""
  prompt = ids.shape[1] - old.shape[1]
  logits = forward(params, shape, ids)[:, prompt - 1 : -1]
  logprobs = jax.nn.log_softmax(logits)
  new = jnp.take_along_axis(logprobs, ids[:, prompt:, None], axis=-1)[..., 0]
  ratio, a = jnp.exp(new - old), advantages[:, None]
  return -jnp.minimum(ratio * a, jnp.clip(ratio, 0.8, 1.28) * a).sum()


def make_grpo(
  shape: sizes.Shape, *, prompts, group: int, new: int, rows: int, reward
):
  """Returns a function without arguments that does one GRPO step.

  Args:
    shape: the model's sizes.
    prompts: i32[P, T], the same at every step.
    group: samples per prompt.
    new: tokens of a sample.
    rows: sequences per micro-batch.
    reward: (task, ids i32[new]) -> float, on the host.
  """
  init_state, update = make_update(shape, rows, 1e-4, clip_loss)
  state, key = init_state(jax.random.key(0)), jax.random.key(1)

  @functools.partial(jax.jit, donate_argnums=0)
  def train(state, prompts, ids, old, advantages):
    whole = jnp.concatenate([prompts, ids], axis=1)
    return update(state, (whole, old, advantages), ids.size)[0]

  repeated = np.repeat(prompts, group, axis=0)

  def step():
    nonlocal state, key
    key, step_key = jax.random.split(key)
    ids, logprobs = generate(state[0], shape, repeated, step_key, new)
    rewards = np.array(
      [reward(row // group, x) for row, x in enumerate(np.asarray(ids))],
      np.float32,
    ).reshape(-1, group)
    advantages = rewards - rewards.mean(1, keepdims=True)
    state = train(state, repeated, ids, logprobs, advantages.reshape(-1))
    jax.block_until_ready(state)

  return step
