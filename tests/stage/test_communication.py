"""What an update exchanges, by hand."""

import dataclasses
import math

import pytest

from posttrain import schema, sharding
from posttrain.stage import communication, program_bytes

MODEL = schema.Model(
  vocab_size=1000,
  layers=5,
  embed_dim=64,
  heads=8,
  kv_heads=4,
  head_dim=16,
  mlp_dim=96,
  tied_head=False,
  remat='block',
)
LAYER = 64 * (2 * (8 + 4) * 16 + 3 * 96)  # numbers of a layer's matrices
TABLE = 1000 * 64
STREAM = 4 * 512 * 64  # bytes of 512 tokens


def _of(mesh, tokens=512, reduce='micro_batch', **options):
  devices = sharding.abstract_mesh(schema.Mesh(*mesh), math.prod(mesh))
  model = dataclasses.replace(MODEL, **options)
  device = program_bytes.Device(model, devices, 'gpu')
  batch = schema.Batch(
    row_tokens=8, micro_batch_tokens=tokens, reduce_gradients=reduce
  )
  return {
    (x.what, x.axis): (x.count, x.device_bytes)
    for x in communication.of(device, batch)
  }


def test_one_device_exchanges_nothing():
  assert _of((1, 1, 1)) == {}
  assert _of((1, 1, 1), reduce='update') == {}


def test_fsdp_gathers_layers_twice_and_the_head_twice():
  layers = 5 * 4 * LAYER
  assert _of((1, 4, 1), tokens=4 * 512) == {
    ('layers, forward', 'fsdp'): (5, layers),
    ('layers, backward', 'fsdp'): (5, layers),
    ('layers, gradient', 'fsdp'): (5, layers),
    ('head, both passes', 'fsdp'): (2, 2 * 4 * TABLE),
    ('head, gradient', 'fsdp'): (1, 4 * TABLE),
    ('embedded tokens', 'fsdp'): (2, 2 * STREAM),
  }


def test_weights_travel_in_the_compute_dtype_and_the_heads_gradient_does_not():
  narrow, wide = (
    _of((1, 4, 1), dtype=dtype) for dtype in ('bfloat16', 'float32')
  )
  for key in narrow:
    ratio = 1 if key[0] == 'head, gradient' else 2
    assert ratio * narrow[key][1] == wide[key][1], key


def test_tensor_divides_weights_and_adds_up_the_stream():
  found = _of((1, 2, 4), tokens=2 * 512)
  assert found['layers, forward', 'fsdp'] == (5, 5 * 4 * LAYER // 4)
  assert found['head, gradient', 'fsdp'] == (1, 4 * TABLE // 4)
  # Attention and MLP, and attention again.
  assert found['stream, forward', 'tensor'] == (15, 15 * STREAM)
  assert found['stream, backward', 'tensor'] == (25, 25 * STREAM)
  kept = _of((1, 2, 4), tokens=2 * 512, remat='none')
  assert kept['stream, forward', 'tensor'] == (10, 10 * STREAM)


def test_data_reduces_the_part_that_fsdp_leaves():
  part = (5 * LAYER + 2 * TABLE) * 4
  assert _of((2, 1, 1)) == {('gradients', 'data'): (7, part)}
  assert _of((2, 4, 1))['gradients', 'data'] == (7, part // 4)
  tied = _of((2, 4, 1), tied_head=True)['gradients', 'data']
  assert tied[1] == (5 * LAYER + TABLE) * 4 // 4


def test_one_communication_per_update_does_not_depend_on_tokens():
  whole = 4 * (5 * LAYER + 2 * TABLE)
  for tokens in (512, 4096):
    assert _of((2, 4, 1), tokens=tokens, reduce='update') == {
      ('weights, per update', 'fsdp'): (1, whole),
      ('gradients, per update', 'fsdp'): (1, whole),
      ('gradients, per update', 'data'): (1, whole // 4),
    }


def test_lines_end_with_the_sum():
  transfers = [
    communication.Transfer('a', 'all-gather', 'fsdp', 3, 2**30),
    communication.Transfer('bc', 'all-reduce', 'data', 1, 2**29),
  ]
  assert communication.lines(transfers) == [
    '  a         3 x all-gather  fsdp  1.000 GiB',
    '  bc        1 x all-reduce  data  0.500 GiB',
    '  together                        1.500 GiB',
  ]


@pytest.mark.slow
@pytest.mark.parametrize('mesh', ['1,4,1', '1,2,2', '2,2,1'])
def test_the_list_is_what_compiled_programs_move(mesh):
  """XLA:CPU moves float32: so does this model."""
  from tests import fixtures

  sizes = {'rows': 8, 'row_tokens': 64}
  options = {**dataclasses.asdict(MODEL), 'rope_scaling': None, 'layers': 8}
  del options['rope_scaling']
  code = f"""
from experiments import census, programs
from posttrain import schema
mesh = ({mesh})
row, _ = census.measure(
  'train_step', schema.Model(**{options!r}), mesh, programs.Sizes(**{sizes!r})
)
print(row['collective_gib'])
"""
  sizes_of_mesh = tuple(int(x) for x in mesh.split(','))
  text = fixtures.run_on_devices(math.prod(sizes_of_mesh), '-c', code)
  moved = float(text.splitlines()[-1])
  listed = sum(x for _, x in _of(sizes_of_mesh, tokens=512, layers=8).values())
  assert moved == pytest.approx(listed / 2**30, rel=0.15)
