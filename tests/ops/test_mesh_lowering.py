"""Whole programs for meshes of absent devices: kernels in every layer."""

import re

import jax
import jax.numpy as jnp
import pytest

from posttrain import schema, sharding
from posttrain.decode import loop
from posttrain.models import transformer
from posttrain.training import objectives, optim
from posttrain.training import step as train_step
from tests import fixtures
from tests.decode import test_lowering as decoding
from tests.kernels import lowering

SIZES = (1, 1, 2, 1, 4)
ROWS, TOKENS = 4, 256


def mesh(target):
  (kind, cores, platform), _ = lowering.TARGETS[target]
  return jax.sharding.AbstractMesh(
    SIZES,
    sharding.AXES,
    axis_types=(jax.sharding.AxisType.Auto,) * 5,
    abstract_device=jax.sharding.AbstractDevice(
      device_kind=kind, num_cores=cores, platform=platform
    ),
  )


def model(remat, kv_heads=2):
  return schema.Model(
    vocab_size=fixtures.MODEL.vocab_size,
    layers=2,
    embed_dim=64,
    heads=8,
    kv_heads=kv_heads,
    head_dim=128,
    mlp_dim=128,
    dtype='bfloat16',
    remat=remat,
  )


def kernels(fn, args, target):
  """Returns the first operand's type of every kernel of a program."""
  _, platform = lowering.TARGETS[target]
  text = fn.trace(*args).lower(lowering_platforms=(platform,)).as_text()
  name = re.escape(lowering.CUSTOM_CALLS[target])
  calls = re.findall(rf'custom_call @{name}\(.*', text)
  return [re.findall(r'tensor<[^>]*bf16>', call)[0] for call in calls]


@pytest.mark.parametrize(
  'target, remat, kv_heads, count',
  [
    ('h200', 'attention', 2, 3),  # forward, dq, dkv
    pytest.param('h200', 'block', 4, 4, marks=pytest.mark.slow),  # twice
    ('v5e', 'none', 8, 3),
  ],
)
def test_a_train_step_runs_kernels_on_every_device(
  target, remat, kv_heads, count
):
  cfg, devices = model(remat, kv_heads), mesh(target)
  objective = objectives.TokenComponents(cfg, ('arithmetic',))
  optimizer = optim.make(fixtures.OPTIM, steps=2)
  step = train_step.make_train_step(
    objective, optimizer, mesh=devices, rules=transformer.SHARDING_RULES
  )
  state = jax.eval_shape(
    lambda: train_step.init_state(
      transformer.init(jax.random.key(0), cfg), optimizer, average=False
    )
  )
  (batch,) = fixtures.batches(
    1, row_tokens=TOKENS, micro_batch_tokens=ROWS * TOKENS
  )
  batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
  types = kernels(step._update, (state, batch, None, optimizer.numbers), target)
  # Half of the rows, and a quarter of the query heads.
  assert types == [f'tensor<{ROWS // 2}x2x{TOKENS}x128xbf16>'] * count


def test_a_decode_chunk_runs_kernels_on_every_device():
  cfg, devices = model('none', 4), mesh('h200')
  place = jax.sharding.NamedSharding(
    devices, jax.sharding.PartitionSpec(sharding.BATCH_AXES)
  )
  with sharding.use(devices):
    view, state, slots = decoding.shapes(cfg)

  def chunk(view, state, slots, count):
    return loop.decode(view, cfg, state, slots, (count, count), place)

  count = jax.ShapeDtypeStruct((), jnp.int32)
  types = kernels(jax.jit(chunk), (view, state, slots, count), 'h200')
  assert types == [f'tensor<{decoding.SLOTS // 2}x1x2x128xbf16>']
