"""What an update exchanges, by hand."""

import dataclasses
import math

import pytest

from posttrain import schema, sharding
from posttrain.models import lora, transformer
from posttrain.stage import adapter, communication, program_bytes

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
ACTIVATIONS = 4 * 512 * 64  # bytes of 512 tokens
# Numbers of a layer's adapter of rank 4: A of q, k, v, gate and up and B of o
# and down, which fsdp splits, and the others.
SPLIT = 4 * 7 * 64
WHOLE = 4 * (128 + 64 + 64 + 96 + 96 + 128 + 96)


def _of(mesh, tokens=512, reduce='micro_batch', rank=0, **options):
  devices = sharding.abstract_mesh(schema.Mesh(*mesh), math.prod(mesh))
  model = dataclasses.replace(MODEL, **options)
  device = program_bytes.Device(model, devices, 'gpu')
  batch = schema.Batch(
    row_tokens=8, micro_batch_tokens=tokens, reduce_gradients=reduce
  )
  sizes = None
  if rank:
    like = lora.shapes(schema.Lora(rank=rank), transformer.shapes(model))
    rules = transformer.SHARDING_RULES
    sizes = adapter.of(sharding.placed(like, rules, devices))
  return {
    (x.what, x.axis): (x.count, x.device_bytes)
    for x in communication.of(device, batch, sizes)
  }


def test_one_device_exchanges_nothing():
  assert _of((1, 1, 1)) == {}
  assert _of((1, 1, 1), reduce='update') == {}


def test_fsdp_gathers_layers_twice_and_the_head_once():
  layers = 5 * 4 * LAYER
  assert _of((1, 4, 1), tokens=4 * 512) == {
    ('layers, forward', 'fsdp'): (5, layers),
    ('layers, backward', 'fsdp'): (5, layers),
    ('layers, gradient', 'fsdp'): (5, layers),
    ('head', 'fsdp'): (1, 4 * TABLE),
    ('head, gradient', 'fsdp'): (1, 4 * TABLE),
    ('embedded tokens', 'fsdp'): (2, 2 * ACTIVATIONS),
  }


def test_weights_travel_in_the_compute_dtype_and_the_heads_gradient_does_not():
  narrow, wide = (
    _of((1, 4, 1), dtype=dtype) for dtype in ('bfloat16', 'float32')
  )
  for key in narrow:
    ratio = 1 if key[0] == 'head, gradient' else 2
    assert ratio * narrow[key][1] == wide[key][1], key


def test_tensor_divides_weights_and_adds_up_the_activations():
  found = _of((1, 2, 4), tokens=2 * 512)
  assert found['layers, forward', 'fsdp'] == (5, 5 * 4 * LAYER // 4)
  assert found['head, gradient', 'fsdp'] == (1, 4 * TABLE // 4)
  # Attention and MLP, and attention again.
  assert found['activations, forward', 'tensor'] == (15, 15 * ACTIVATIONS)
  assert found['activations, backward', 'tensor'] == (25, 25 * ACTIVATIONS)
  kept = _of((1, 2, 4), tokens=2 * 512, remat='none')
  assert kept['activations, forward', 'tensor'] == (10, 10 * ACTIVATIONS)


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


def test_only_an_adapter_has_gradients():
  weights = 4 * 5 * (LAYER + SPLIT)
  assert _of((1, 4, 1), tokens=4 * 512, rank=4) == {
    ('layers, forward', 'fsdp'): (5, weights),
    ('layers, backward', 'fsdp'): (5, weights),
    ('head', 'fsdp'): (1, 4 * TABLE),
    ('embedded tokens', 'fsdp'): (1, ACTIVATIONS),
    ('adapter, gradient', 'fsdp'): (5, 4 * 5 * SPLIT),
    ('adapter, other gradients', 'fsdp'): (5, 4 * 5 * WHOLE),
  }
  both = _of((2, 4, 1), rank=4)
  assert both['adapter, other gradients', 'data and fsdp'] == (5, 4 * 5 * WHOLE)
  assert both['adapter, gradient', 'data'] == (5, 5 * SPLIT)
  alone = _of((2, 1, 1), rank=4)
  assert alone == {('adapter, gradient', 'data'): (5, 4 * 5 * (SPLIT + WHOLE))}
  assert _of((1, 1, 1), rank=4) == {}


def test_gradients_of_an_adapter_travel_in_the_compute_dtype():
  narrow = _of((2, 1, 1), rank=4, dtype='bfloat16')
  assert narrow['adapter, gradient', 'data'][1] == 2 * 5 * (SPLIT + WHOLE)
  once = _of((2, 1, 1), rank=4, dtype='bfloat16', reduce='update')
  (size,) = (size for _, size in once.values())
  assert size == 4 * 5 * (SPLIT + WHOLE)


def test_tensor_splits_an_adapter_and_adds_up_its_products():
  found = _of((1, 1, 2), rank=4)
  # o and down, twice, and the gradients of q, k, v, gate and up.
  assert found['products with A', 'tensor'] == (5, 4 * 512 * 5 * 4 * 9)
  found = _of((1, 2, 2), tokens=2 * 512, rank=4)
  assert found['products with A', 'tensor'] == (5, 4 * 512 * 5 * 4 * 9)
  assert found['layers, forward', 'fsdp'][1] == 4 * 5 * (LAYER // 2 + SPLIT)


def test_frozen_weights_are_gathered_once_per_update_in_the_compute_dtype():
  found = _of((2, 4, 1), rank=4, reduce='update', dtype='bfloat16')
  assert found == {
    ('weights, per update', 'fsdp'): (1, 2 * (5 * (LAYER + SPLIT) + 2 * TABLE)),
    ('adapter, gradient, per update', 'fsdp'): (1, 4 * 5 * SPLIT),
    ('adapter, other gradients, per update', 'data and fsdp'): (
      1,
      4 * 5 * WHOLE,
    ),
    ('adapter, gradient, per update', 'data'): (1, 5 * SPLIT),
  }


def test_lines_end_with_the_sum():
  transfers = [
    communication.Transfer('a', 'all-gather', 'fsdp', 3, 2**30),
    communication.Transfer('bc', 'all-reduce', 'data', 1, 2**29),
  ]
  assert communication.lines(transfers) == [
    '  a      3 x all-gather  fsdp  1.0 GiB',
    '  bc     1 x all-reduce  data  512 MiB',
    '  total                        1.5 GiB',
  ]


@pytest.mark.slow
@pytest.mark.parametrize(
  ('mesh', 'rank', 'reduce'),
  [
    ('1,4,1', 0, 'micro_batch'),
    ('1,2,2', 0, 'micro_batch'),
    ('2,2,1', 0, 'micro_batch'),
    ('1,4,1', 16, 'micro_batch'),
    ('1,2,2', 16, 'micro_batch'),
    ('2,2,1', 16, 'micro_batch'),
    ('2,2,1', 16, 'update'),
  ],
)
def test_the_list_is_what_compiled_programs_move(mesh, rank, reduce):
  """XLA:CPU moves float32: so does this model."""
  from tests import fixtures

  sizes = {'rows': 8, 'row_tokens': 64}
  options = {**dataclasses.asdict(MODEL), 'rope_scaling': None, 'layers': 8}
  del options['rope_scaling']
  code = f"""
import jax
from experiments import hlo, programs
from posttrain import schema, sharding
stage = schema.Stage(
  envs={{'tokens': schema.EnvEntry()}},
  lora=schema.Lora(rank={rank}),
  batch=schema.Batch(reduce_gradients={reduce!r}),
)
lowered = programs.lower(
  'train_step',
  schema.Model(**{options!r}),
  sharding.make_mesh(schema.Mesh({mesh})),
  programs.Sizes(**{sizes!r}),
  stage=stage,
)
module = hlo.parse(lowered.compile().as_text())
print(sum(module.bytes().values()))
"""
  sizes_of_mesh = tuple(int(x) for x in mesh.split(','))
  text = fixtures.run_on_devices(math.prod(sizes_of_mesh), '-c', code)
  moved = int(text.splitlines()[-1])
  listed = _of(sizes_of_mesh, reduce=reduce, rank=rank, layers=8)
  ratio = sum(x for _, x in listed.values()) / moved
  print(mesh, rank, reduce, 'listed / moved:', ratio)
  assert ratio == pytest.approx(1, rel=0.02)
