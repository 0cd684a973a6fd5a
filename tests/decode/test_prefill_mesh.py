"""Prefill on four and eight devices, compared with one device.

python -m tests.decode.test_prefill_mesh FILE D,F,T ...   # meshes to measure
"""

import dataclasses
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain import schema, sharding
from posttrain.decode import engines, loop, requests
from posttrain.models import transformer
from tests import fixtures
from tests.decode import helpers

MODEL = dataclasses.replace(helpers.MODEL, layers=1)
SLOTS = 16
COLLECTIVES = r'all-(?:gather|reduce|to-all)|collective-permute|reduce-scatter'


def engine(mesh):
  options = engines.Options(
    slots=SLOTS, capacity=128, chunk=4, prefill_rows=16, prefill_tokens=64
  )
  return engines.Engine(MODEL, options, mesh)


def completions(mesh):
  """Completes groups, some larger than a device's slots, and extensions."""
  rng = np.random.default_rng(0)
  sizes = ((5, 3), (100, 2), (1, 1), (70, 2), (30, 9), (64, 4), (90, 1))
  batch = [
    requests.Request(
      100 * i + j,
      ids,
      6 + 5 * j,
      sampling=requests.Sampling(temperature=(1.0, 0.7, 0.0)[j % 3]),
      hold=i == 0,
    )
    for i, (size, group) in enumerate(sizes)
    for ids in [rng.integers(0, 256, size)]
    for j in range(group)
  ]
  decoder = engine(mesh)
  decoder.set_params(_placed(mesh), 0)
  for request in batch:
    decoder.submit(request)
  done = []
  while len(done) < len(batch):
    done += decoder.poll()
  for id in range(3):
    decoder.extend(id, rng.integers(0, 256, 40), 9)
  done = sorted(done, key=lambda x: x.id)
  done += sorted(helpers.poll(decoder, 3), key=lambda x: x.id)
  return {
    'ids': np.concatenate([x.ids for x in done]),
    'logprobs': np.concatenate([x.logprobs for x in done]),
    'lengths': [len(x.ids) for x in done],
  }


def _placed(mesh):
  params, rules = helpers.params(MODEL), transformer.SHARDING_RULES
  return jax.device_put(params, sharding.shardings(params, rules, mesh))


def collectives(mesh):
  """Returns the largest result of a collective in each program, in numbers.

  Of prefill, and of the copy of a group's prompt.
  """
  place = loop.placement(mesh, SLOTS)
  view = loop.view(_placed(mesh), MODEL, place)
  state = loop.fit(None, MODEL, SLOTS, 256, place)
  rows = sharding.batch_ways(mesh)
  row = np.zeros(rows, np.int32)
  tokens = np.zeros((rows, 64), np.int32)
  slots = np.zeros(SLOTS, np.int32)
  programs = (
    loop.prefill.lower(
      view, MODEL, state, (tokens, row, row, row), 128, 1, place
    ),
    loop.share.lower(state, slots, slots, jnp.int32(1), 128, place),
  )
  return [_largest(program.compile().as_text()) for program in programs]


def _largest(text):
  """Returns the largest result of a collective: numbers, 0 = none."""
  lines = [x for x in text.splitlines() if re.search(rf' ({COLLECTIVES})', x)]
  shapes = [
    [int(n) for n in dims.split(',') if n]
    for line in lines
    for dims in re.findall(r'\w+\[([\d,]*)\]', line.split('=', 1)[1])[:1]
  ]
  return max([int(np.prod(shape)) for shape in shapes], default=0)


def outcome(sizes):
  data, fsdp, tensor = sizes
  cfg = schema.Mesh(data=data, fsdp=fsdp, tensor=tensor)
  mesh = sharding.make_mesh(cfg)
  return completions(mesh) | {'collectives': collectives(mesh)}


@pytest.mark.parametrize(
  'devices, meshes',
  [
    (4, ((4, 1, 1), (2, 1, 2))),
    pytest.param(8, ((2, 2, 2), (8, 1, 1)), marks=pytest.mark.slow),
  ],
)
def test_devices_match_one(tmp_path, devices, meshes):
  path = tmp_path / 'arrays.npz'
  names = [','.join(map(str, mesh)) for mesh in meshes]
  module = 'tests.decode.test_prefill_mesh'
  fixtures.run_on_devices(devices, '-m', module, str(path), *names)
  arrays, one = (
    dict(np.load(path)),
    completions(sharding.make_mesh(schema.Mesh())),
  )
  for mesh, name in zip(meshes, names, strict=True):
    for key, value in one.items():
      exact = key != 'logprobs'
      np.testing.assert_allclose(
        arrays[f'{name}/{key}'], value, atol=0 if exact else 1e-5, err_msg=name
      )
    prefill, share = arrays[f'{name}/collectives']
    # Activations of a device's row under `tensor`, never the cache.
    row = 64 * 2 * MODEL.mlp_dim
    assert prefill <= (row if mesh[2] > 1 else 0), name
    assert share == 0, name


if __name__ == '__main__':
  np.savez(
    sys.argv[1],
    **{
      f'{name}/{key}': value
      for name in sys.argv[2:]
      for key, value in outcome(map(int, name.split(','))).items()
    },
  )
