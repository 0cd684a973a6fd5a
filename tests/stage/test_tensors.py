"""The table of arrays on a mesh."""

import jax
import jax.numpy as jnp

from posttrain import schema, sharding
from posttrain.stage import tensors

RULES = ((r'kernel$', (None, 'fsdp', 'tensor')), (r'', ()))


def _like():
  mesh = sharding.abstract_mesh(schema.Mesh(1, 4, 2), 8)
  tree = {
    'a': {'kernel': jax.ShapeDtypeStruct((3, 1024, 512), jnp.float32)},
    'scale': jax.ShapeDtypeStruct((7,), jnp.bfloat16),
    'step': jax.ShapeDtypeStruct((), jnp.int32),
  }
  return sharding.placed(tree, RULES, mesh)


def test_bytes_are_those_of_one_device():
  kernel, scale, step = tensors.of(_like())
  assert (kernel.path, kernel.device_bytes) == ('a/kernel', 3 * 256 * 256 * 4)
  assert (scale.path, scale.device_bytes) == ('scale', 14)
  assert step.device_bytes == 4
  assert tensors.device_bytes(_like()) == 3 * 256 * 256 * 4 + 14 + 4
  assert tensors.device_bytes(None) == 0


def test_lines_have_dtype_shape_spec_and_size():
  assert tensors.lines(tensors.of(_like())) == [
    '  a/kernel  f32[3, 1024, 512]  (-, fsdp, tensor)  768 KiB',
    '  scale     bf16[7]            ()                    14 B',
    '  step      i32[]              ()                     4 B',
  ]
