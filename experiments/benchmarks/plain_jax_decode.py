"""The yardstick of decoding and GRPO: plain JAX, without posttrain.

`generate`: prompts of one length go through a prefill of all rows, then a
`while_loop` draws a token per row: weights and cache per layer, the cache
[B, K, S, H] just as long as needed and updated in place by a scatter (a bit
faster than a dynamic slice), the query group folded into rows, an inverse CDF
at temperature 1. All in one program.

`grpo`: every sample's prompt is prefilled, a function on the host computes
rewards, and one PPO-clip update with AdamW trains on all rows, whatever their
advantage.

Axes: B rows, T tokens, S cache slots, N query heads, K kv heads, G = N / K,
H head dim, D model, V vocab, L layers.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.benchmarks import plain_jax

PROMPT = 32  # tokens


@functools.partial(jax.jit, static_argnames=('shape', 'new'))
def generate(params, shape: plain_jax.Shape, prompts, key, new: int):
  """Samples `new` tokens after each prompt.

  Args:
    params: parameters from `plain_jax.init`.
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
  empty = [(jnp.zeros(size), jnp.zeros(size)) for _ in layers]
  numbers = jax.random.uniform(key, (new, rows))

  def feed(ids, start, cache):
    return _forward(params, layers, shape, ids, start, cache)

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


def _forward(params, layers, shape, ids, start, cache):
  """Returns logits f32[B, V] after the last token, and the new cache."""
  positions = start + jnp.arange(ids.shape[1])
  angles = positions[:, None, None] * 10_000.0 ** (
    -jnp.arange(0, shape.head_dim, 2) / shape.head_dim
  )
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  rows = jnp.arange(len(ids))[:, None]
  x, new = params['embed'][ids], []
  for p, (keys, values) in zip(layers, cache, strict=True):
    y = plain_jax.rms_norm(x, p['norm1'])
    q, k, v = (
      (y @ p[name]).reshape(*x.shape[:2], -1, shape.head_dim) for name in 'qkv'
    )
    q, k = (plain_jax.rotate(z, cos, sin) for z in (q, k))
    keys, values = (
      old.at[rows, :, positions[None]].set(z)
      for old, z in ((keys, k), (values, v))
    )
    new.append((keys, values))
    x = x + _attend(q, keys, values, positions) @ p['o']
    y = plain_jax.rms_norm(x, p['norm2'])
    x = x + (jax.nn.silu(y @ p['gate']) * (y @ p['up'])) @ p['down']
  x = plain_jax.rms_norm(x[:, -1], params['norm'])
  return x @ params['embed'].T, new


def _attend(q, k, v, positions):
  """Returns attention of q [B, T, N, H] over a cache [B, K, S, H]."""
  b, t, n, h = q.shape
  kv, s = k.shape[1:3]
  q = q.reshape(b, t, kv, n // kv, h).transpose(0, 2, 3, 1, 4)
  q = q.reshape(b, kv, n // kv * t, h)
  scores = (q @ k.mT / math.sqrt(h)).reshape(b, kv, n // kv, t, s)
  scores = jnp.where(jnp.arange(s) <= positions[:, None], scores, -1e30)
  weights = jax.nn.softmax(scores).reshape(b, kv, n // kv * t, s)
  out = (weights @ v).reshape(b, kv, n // kv, t, h)
  return out.transpose(0, 3, 1, 2, 4).reshape(b, t, n * h)


def _draw(logits, numbers):
  """Returns ids and logprobs, sampled by the inverse CDF."""
  logprobs = jax.nn.log_softmax(logits)
  mass = jnp.cumsum(jnp.exp(logprobs), axis=-1)
  below = mass <= numbers[:, None] * mass[:, -1:]
  token = jnp.minimum(jnp.sum(below, axis=-1), logits.shape[1] - 1)
  return token, jnp.take_along_axis(logprobs, token[:, None], axis=1)[:, 0]


def clip_loss(params, shape, ids, old, advantages, prompt: int):
  """Returns the sum over completions of -min(rho A, clip(rho, 0.8, 1.28) A)."""
  logits = plain_jax.forward(params, shape, ids)[:, prompt - 1 : -1]
  logprobs = jax.nn.log_softmax(logits)
  new = jnp.take_along_axis(logprobs, ids[:, prompt:, None], axis=-1)[..., 0]
  ratio, a = jnp.exp(new - old), advantages[:, None]
  return -jnp.minimum(ratio * a, jnp.clip(ratio, 0.8, 1.28) * a).sum()


def make_update(shape: plain_jax.Shape, rows: int, prompt: int):
  """Returns (optimizer, jitted update); micro-batches have `rows` sequences."""
  optimizer = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(1e-4, b1=0.9, b2=0.95, weight_decay=0.1),
  )

  def update(state, prompts, ids, old, advantages):
    params, opt_state = state

    def add_micro_batch(grads, micro):
      more = jax.grad(clip_loss)(params, shape, *micro, prompt)
      return jax.tree.map(jnp.add, grads, more), None

    whole = jnp.concatenate([prompts, ids], axis=1)
    micros = jax.tree.map(
      lambda x: x.reshape(-1, rows, *x.shape[1:]), (whole, old, advantages)
    )
    zeros = jax.tree.map(jnp.zeros_like, params)
    grads, _ = jax.lax.scan(add_micro_batch, zeros, micros)
    grads = jax.tree.map(lambda g: g / ids.size, grads)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  return optimizer, jax.jit(update, donate_argnums=0)


def make_grpo(
  shape: plain_jax.Shape, *, prompts, group: int, new: int, rows: int, reward
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
  optimizer, update = make_update(shape, rows, prompts.shape[1])
  params = plain_jax.init(jax.random.key(0), shape)
  state, key = (params, optimizer.init(params)), jax.random.key(1)
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
    state = update(state, repeated, ids, logprobs, advantages.reshape(-1))
    jax.block_until_ready(state)

  return step
