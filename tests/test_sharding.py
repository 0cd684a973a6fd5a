"""Meshes, and the rules that place arrays on them."""

import dataclasses

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from posttrain import schema, sharding
from posttrain.models import transformer
from posttrain.training import optim
from tests import fixtures

RULES = ((r'kernel$', ('fsdp', 'tensor')), (r'bias$', (None,)))


@dataclasses.dataclass(frozen=True)
class Device:
  """What jax reads of a device to order a mesh."""

  id: int
  slice_index: int
  coords: tuple[int, ...] | None = None
  platform: str = 'gpu'
  device_kind: str = 'NVIDIA H100'
  core_on_chip: int = 0


def _gpus(hosts: int) -> list[Device]:
  """Returns eight GPUs per host; jax calls a host a slice."""
  return [Device(i, i // 8) for i in range(8 * hosts)]


@pytest.mark.parametrize('sizes', [(1, 64, 1), (4, 4, 4)])
def test_meshes_of_several_hosts_keep_the_last_axes_within_them(sizes):
  devices = sharding.arrange(sizes, _gpus(8)[::-1])
  assert devices.shape == sizes
  assert [x.id for x in devices.flat] == list(range(64))


def test_slices_divide_the_first_axes():
  # Three hosts: of 2 x 12 the second axis is split over them.
  devices = sharding.arrange((2, 12, 1), _gpus(3))
  for row in devices[..., 0]:
    assert [x.slice_index for x in row] == [0] * 4 + [1] * 4 + [2] * 4
  hosts = [Device(i, i // 2) for i in range(8)]
  with pytest.raises(ValueError, match='divide over the 4 slices.*data=3'):
    sharding.arrange((3, 1, 1, 1, 1), hosts)


def test_axes_may_take_parts_of_a_torus():
  chips = [
    Device(i, 0, (i % 16, i // 16, 0), 'tpu', 'TPU v6 lite') for i in range(256)
  ]
  devices = sharding.arrange((4, 64, 1), chips)
  assert {x.id for x in devices.flat} == set(range(256))
  for data, part in enumerate(devices[..., 0]):  # a ring of 16 and a line of 4
    places = {x.coords[:2] for x in part}
    rows = range(4 * data, 4 * data + 4)
    assert places == {(x, y) for x in range(16) for y in rows}


def _shape(*shape):
  return jax.ShapeDtypeStruct(shape, 'float32')


@pytest.mark.parametrize('mesh', [(-1, 2, 2), (2, -1, 2), (2, 2, 2)])
def test_mesh_sizes_resolves_minus_one(mesh):
  sizes = sharding.mesh_sizes(schema.Mesh(*mesh), 8)
  others = {'sequence': 1, 'expert': 1}
  assert sizes == {'data': 2, 'fsdp': 2, 'tensor': 2, **others}


@pytest.mark.parametrize('mesh', [(3, -1, 1), (2, 2, 1)])
def test_mesh_sizes_must_multiply_to_the_devices(mesh):
  with pytest.raises(ValueError, match='must multiply to the 8 devices: got'):
    sharding.mesh_sizes(schema.Mesh(*mesh), 8)


@pytest.mark.parametrize(
  'sampler, sizes', [(None, (8, 8)), ((2, 1, 2), (4, 4))]
)
def test_a_sampler_takes_devices_from_the_learner(sampler, sizes):
  own = None if sampler is None else schema.SamplerMesh(*sampler)
  meshes = sharding.make_meshes(schema.Mesh(sampler=own), 8)
  assert tuple(x.size for x in meshes) == sizes


@pytest.mark.parametrize(
  'mesh, sampler, error',
  [
    (
      (-1, 1, 1),
      (8, 1, 1),
      'sampler must leave devices to train on: got 8 of 8',
    ),
    ((8, 1, 1), (4, 1, 1), 'to the 4 devices that config.mesh.sampler leaves'),
  ],
)
def test_learner_and_sampler_must_share_out_the_devices(mesh, sampler, error):
  cfg = schema.Mesh(*mesh, sampler=schema.SamplerMesh(*sampler))
  with pytest.raises(ValueError, match=error):
    sharding.make_meshes(cfg, 8)


def test_shared_devices_are_one_mesh():
  mesh, sampler = sharding.make_meshes(schema.Mesh(), jax.devices())
  assert sampler is mesh


MOVED = """
import jax, numpy as np
from posttrain import schema, sharding

rules = (('a', ('fsdp', 'tensor')), ('b', ('tensor', 'fsdp')))
for mesh, sampler in [
  ((1, 4, 1), (4, 1, 1)),
  ((1, 2, 2), (1, 1, 4)),
  ((1, 2, 1), (1, 1, 1)),
  ((2, 1, 1), (1, 2, 2)),
]:
  cfg = schema.Mesh(*mesh, sampler=schema.SamplerMesh(*sampler))
  devices = jax.devices()[: np.prod(mesh) + np.prod(sampler)]
  mesh, sampler = sharding.make_meshes(cfg, devices)
  assert [*mesh.devices.flat, *sampler.devices.flat] == devices
  like = {'a': np.arange(32.0).reshape(4, 8), 'b': np.ones((8, 4)), 'c': None}
  params = sharding.put(like, sharding.shardings(like, rules, mesh))
  moved = sharding.move(params, rules, sampler)
  jax.tree.map(np.testing.assert_array_equal, moved, like)
  places = jax.tree.map(lambda x: x.sharding, moved)
  assert places == sharding.shardings(like, rules, sampler)
"""


@pytest.mark.slow
def test_weights_move_between_meshes():
  fixtures.run_on_devices(8, '-c', MOVED)


def test_check_batch_refuses_what_does_not_divide():
  mesh = sharding.abstract_mesh(schema.Mesh(2, 3, 5), 30)
  assert sharding.batch_ways(mesh) == 6
  sharding.check_batch(mesh, 12, 'k')
  with pytest.raises(
    ValueError, match='^k must be .* = 384 on 30 devices: got 64'
  ):
    sharding.check_batch(mesh, 1, 'k', 64)


def test_sequence_splits_slots_but_not_rows():
  mesh = sharding.abstract_mesh(schema.Mesh(2, 3, sequence=4), 24)
  assert sharding.batch_ways(mesh) == 24
  sharding.check_batch(mesh, 6, 'k', axes=sharding.ROW_AXES)
  with pytest.raises(ValueError, match='data x sequence x fsdp x expert = 24'):
    sharding.check_batch(mesh, 6, 'k')


def _specs(like, rules):
  placed = sharding.shardings(like, rules, sharding.make_mesh(schema.Mesh()))
  return jax.tree.map(lambda place: place.spec, placed)


def test_scalars_are_replicated_and_other_arrays_need_a_rule():
  like = {'a': {'kernel': _shape(4, 6), 'bias': _shape(6)}, 'step': _shape()}
  assert _specs(like, RULES) == {
    'a': {'kernel': P('fsdp', 'tensor'), 'bias': P(None)},
    'step': P(),
  }
  with pytest.raises(ValueError, match="got none for 'a/scale'"):
    _specs({'a': {'scale': _shape(6)}}, RULES)


def test_a_dimension_must_divide_over_its_mesh_axis():
  mesh = sharding.abstract_mesh(schema.Mesh(1, 4), 4)
  with pytest.raises(ValueError, match=r'a/kernel must divide .*fsdp=4'):
    sharding.shardings({'a': {'kernel': _shape(6, 4)}}, RULES, mesh)


def test_every_array_of_model_and_optimizer_has_a_rule():
  cfg = schema.Model(8, qk_norm=True, qkv_bias=True, tied_head=False)
  params = jax.eval_shape(lambda: transformer.init(jax.random.key(0), cfg))
  state = jax.eval_shape(optim.make(schema.Optim(), steps=10).init, params)
  rules = transformer.SHARDING_RULES
  moments = _specs(state, rules)[1].inner_state[0]
  assert moments.mu == _specs(params, rules)
  assert moments.count == P()


EIGHT = sharding.abstract_mesh(schema.Mesh(2, 2, 2), 8)


def test_one_device_has_no_current_mesh():
  x = jnp.ones((4, 6))
  with sharding.use(sharding.make_mesh(schema.Mesh())):
    assert sharding.current() is None
    assert sharding.pin_batch(x) is x
    assert sharding.gather(x, *sharding.COLUMNS) is x
    assert sharding.split(abs, P(), P()) is abs
  with sharding.use(EIGHT):
    assert sharding.current() == EIGHT
    assert sharding.ways(sharding.BATCH_AXES) == 4
  assert sharding.current() is None


def test_axes_that_do_not_divide_are_left_out():
  axes = sharding.BATCH_AXES, None, 'tensor'
  with sharding.use(EIGHT):
    assert sharding.fitting((8, 5, 6), axes) == P(
      ('data', 'sequence', 'fsdp', 'expert'), None, 'tensor'
    )
    assert sharding.fitting((6, 5, 3), axes) == P(None, None, None)


def _constraints(fn, x):
  """The specs of all sharding constraints of a function's program."""

  def specs(jaxpr):
    for equation in jaxpr.eqns:
      if equation.primitive.name == 'sharding_constraint':
        yield equation.params['sharding'].spec
      for inner in jex.jaxprs_in_params(equation.params):
        yield from specs(inner)

  with sharding.use(EIGHT):
    return list(specs(jax.make_jaxpr(fn)(x).jaxpr))


def test_a_gathered_weight_has_a_gradient_in_parts():
  w = jnp.ones((4, 6))
  axes = sharding.COLUMNS
  gathered = jax.grad(lambda w: jnp.sum(sharding.gather(w, *axes) ** 2))
  parts, whole = P(*axes), P(None, 'tensor')
  assert _constraints(gathered, w) == [parts, whole, parts]
  # A weight that is whole already, as the decode view's, stays so.
  assert _constraints(lambda w: sharding.gather(w, *axes), w) == [whole]
