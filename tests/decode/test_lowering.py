"""Lowering of the decode chunk, prefill and admission for GPUs and TPUs."""

import re

import jax
import jax.numpy as jnp
import pytest

from posttrain import schema
from posttrain.decode import loop, schedule
from posttrain.models import transformer
from posttrain.ops import attention
from tests.kernels import lowering

SLOTS, ROWS, CAPACITY, CHUNK, PREFIX = 16, 4, 512, 128, 256


def model(dtype):
  return schema.Model(
    vocab_size=1024,
    layers=2,
    embed_dim=256,
    heads=4,
    kv_heads=2,
    head_dim=128,
    mlp_dim=512,
    qk_norm=True,
    dtype=dtype,
  )


def shapes(model, prompts=(0, 0)):
  """Returns (view, state, slots) as shapes."""
  view = jax.eval_shape(
    lambda: loop.view(transformer.init(jax.random.key(0), model), model, None)
  )
  state = jax.eval_shape(
    lambda: loop.fit(None, model, SLOTS, CAPACITY, None, prompts)
  )

  def column(dtype, *more):
    return jax.ShapeDtypeStruct((SLOTS, *more), dtype)

  slots = loop.Slots(
    keys=column(jnp.uint32, 2),
    limit=column(jnp.int32),
    stop_ids=column(jnp.int32, schedule.STOP_IDS),
    temperature=column(jnp.float32),
    top_k=column(jnp.int32),
    top_p=column(jnp.float32),
    min_p=column(jnp.float32),
  )
  return view, state, slots


def kernel_calls(text, target):
  """Counts kernel calls; equal calls share a function."""
  functions = re.split(r'\n  func\.func ', text)
  calls = {
    re.match(r'\w+ @([\w.]+)', function)[1]: (
      function.count(lowering.CUSTOM_CALLS[target]),
      re.findall(r'(?<!custom_)call @([\w.]+)\(', function),
    )
    for function in functions[1:]
  }

  def total(name):
    own, others = calls[name]
    return own + sum(total(other) for other in others)

  return total('main')


@pytest.mark.parametrize('target', ['h200', 'v5e', 'v6e'])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_decode_chunk_lowers_with_a_kernel_per_layer(target, dtype):
  cfg = model(dtype)
  view, state, slots = shapes(cfg)

  def chunk(view, state, slots, count):
    return loop.decode(view, cfg, state, slots, (count, count), None)

  count = jax.ShapeDtypeStruct((), jnp.int32)
  text = lowering.lower(chunk, view, state, slots, count, target=target)
  assert kernel_calls(text, target) == cfg.layers
  assert 'stablehlo.while' in text
  assert 'callback' not in text


@pytest.mark.parametrize('target', ['h200', 'v5e', 'v6e'])
def test_shared_prompts_lower_with_two_kernels_per_layer(target):
  cfg = model('bfloat16')
  view, state, slots = shapes(cfg, (8, 256))

  def chunk(view, state, slots, count, *groups):
    shared = attention.Shared(None, *groups, longest=256)
    return loop.decode(view, cfg, state, slots, (count, count), None, shared)

  count = jax.ShapeDtypeStruct((), jnp.int32)
  members = jax.ShapeDtypeStruct((4, 8), jnp.int32)
  length = jax.ShapeDtypeStruct((4,), jnp.int32)
  args = view, state, slots, count, members, length, slots.limit
  text = lowering.lower(chunk, *args, target=target)
  assert kernel_calls(text, target) == 2 * cfg.layers


@pytest.mark.parametrize('target', ['h200', 'v5e', 'v6e'])
def test_prefill_and_admission_lower_with_a_kernel_per_layer(target):
  cfg = model('bfloat16')
  view, state, slots = shapes(cfg)

  def fill(view, state, slots, tokens, row, target_slots):
    state, logits = loop.prefill(
      view, cfg, state, (tokens, row, row, row), PREFIX, ROWS, None
    )
    state = loop.share(state, target_slots, target_slots, row[0], PREFIX, None)
    return loop.first(state, slots, logits, target_slots, target_slots, None)

  text = lowering.lower(
    fill,
    view,
    state,
    slots,
    jax.ShapeDtypeStruct((ROWS, CHUNK), jnp.int32),
    jax.ShapeDtypeStruct((ROWS,), jnp.int32),
    jax.ShapeDtypeStruct((SLOTS,), jnp.int32),
    target=target,
  )
  assert kernel_calls(text, target) == cfg.layers


def test_cpu_program_has_no_kernel():
  cfg = model('float32')
  view, state, slots = shapes(cfg)
  text = lowering.lower(
    lambda *args: loop.decode(args[0], cfg, *args[1:], None),
    view,
    state,
    slots,
    (jax.ShapeDtypeStruct((), jnp.int32),) * 2,
    target='cpu',
  )
  assert not any(call in text for call in lowering.CUSTOM_CALLS.values())
