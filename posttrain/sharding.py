"""Mesh and sharding rules: the device placement of every array.

Mesh axes: `data` splits the batch, `sequence` splits its rows into pieces,
`fsdp` splits the batch and the weights, `expert` splits the batch and the
experts, `tensor` splits heads, MLP width and vocabulary. Rules are an ordered
list of `(regex, axes)` resolved against tree paths; the first match wins.

A program is traced for a mesh within `use(mesh)`. The code that it calls reads
the mesh with `current` and places intermediate arrays with `pin`, `gather` and
`split`; on one device these do nothing.
"""

import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from posttrain import schema, tree

# `Embed` regroups tokens over the axes after `sequence`, within a piece.
AXES = ('data', 'sequence', 'fsdp', 'expert', 'tensor')
BATCH_AXES = AXES[:4]  # split the pieces of rows, see `pieces`, and slots
DATA, SEQUENCE, FSDP, EXPERT, TENSOR = AXES
ROW_AXES = DATA, FSDP, EXPERT  # split the rows of a batch
# [micro_batches, rows, tokens]: the model alone splits tokens.
BATCH = PartitionSpec(None, ROW_AXES)
_TILE = 8  # divides the tokens of a piece
_AUTO = (jax.sharding.AxisType.Auto,) * len(AXES)
# Megatron's split of a block's matrices (Shoeybi et al., arXiv 1909.08053) over
# `tensor`: the first ones by columns, those that write to the residual stream
# by rows; `fsdp` splits the other dimension.
COLUMNS, ROWS = (FSDP, TENSOR), (TENSOR, FSDP)

Rules = tuple[tuple[str, tuple[str | None, ...]], ...]
Axes = str | tuple[str, ...] | None  # mesh axes of one dimension


MeshOptions = schema.Mesh | schema.SamplerMesh


def mesh_sizes(cfg: MeshOptions, devices: int) -> dict[str, int]:
  """Returns the number of devices per axis, with the -1 resolved.

  Raises:
    ValueError: the axis sizes do not multiply to the number of devices.
  """
  sizes = {axis: getattr(cfg, axis) for axis in AXES}
  known = math.prod(size for size in sizes.values() if size != -1)
  sizes = {k: devices // known if v == -1 else v for k, v in sizes.items()}
  if math.prod(sizes.values()) != devices:
    splits = isinstance(cfg, schema.Mesh) and cfg.sampler is not None
    raise ValueError(
      f'config.mesh must multiply to the {devices} devices'
      f'{" that config.mesh.sampler leaves" * splits}: got '
      f'{", ".join(f"{axis}={getattr(cfg, axis)}" for axis in AXES)}, so '
      f'{known} or a multiple; lower one, set one to -1 (the rest), or plan '
      'for other devices with --dry_run --devices=gpu:N'
    )
  return sizes


@functools.cache
def one_device() -> Mesh:
  """Returns the mesh of the first device alone."""
  return make_mesh(schema.Mesh(), jax.devices()[:1])


def make_mesh(
  cfg: MeshOptions, devices: Sequence[jax.Device] | None = None
) -> Mesh:
  """Builds the mesh of the devices, all of them by default.

  Raises:
    ValueError: the axis sizes do not multiply to the number of devices.
  """
  devices = jax.devices() if devices is None else devices
  sizes = tuple(mesh_sizes(cfg, len(devices)).values())
  return Mesh(arrange(sizes, devices), AXES, axis_types=_AUTO)


def make_meshes(
  cfg: schema.Mesh, devices: Sequence[jax.Device] | int
) -> tuple[Any, Any]:
  """Builds the meshes of the learner and of the sampler, or one for both.

  Args:
    cfg: devices per axis.
    devices: the learner's, then the sampler's; or their number, for plans,
      whose meshes are abstract.

  Raises:
    ValueError: the axis sizes do not multiply to the number of devices.
  """
  own, make = cfg.sampler, make_mesh
  if isinstance(devices, int):
    devices, make = range(devices), lambda x, y: abstract_mesh(x, len(y))
  if own is None:
    mesh = make(cfg, devices)
    return mesh, mesh
  left = len(devices) - math.prod(getattr(own, axis) for axis in AXES)
  if left < 1:
    raise ValueError(
      'config.mesh.sampler must leave devices to train on: got '
      f'{len(devices) - left} of {len(devices)} devices; plan for other '
      'devices with --dry_run --devices=gpu:N'
    )
  return make(cfg, devices[:left]), make(own, devices[left:])


def arrange(sizes: Sequence[int], devices: Sequence[Any]) -> np.ndarray:
  """Returns the devices in the order of a mesh: neighbours are close.

  Slices of TPUs, and hosts of GPUs, which jax calls slices as well, are divided
  among the first axes; the last axes lie within a slice as far as they can.
  `jax.make_mesh` refuses several slices, and a TPU v6e if an axis takes a part
  of a dimension of the torus.

  Args:
    sizes: devices per axis.
    devices: as many as their product.

  Raises:
    ValueError: the sizes do not divide over the slices.
  """
  slices = len({getattr(x, 'slice_index', None) for x in devices})
  if slices == 1:
    return mesh_utils.create_device_mesh(
      sizes, devices, allow_split_physical_axes=True
    )
  outer, left = [], slices
  for size in sizes:
    outer.append(math.gcd(size, left))
    left //= outer[-1]
  if left > 1:
    raise ValueError(
      f'config.mesh must divide over the {slices} slices of the devices: got '
      f'{", ".join(f"{k}={v}" for k, v in zip(AXES, sizes, strict=True))}'
    )
  inner = [size // ways for size, ways in zip(sizes, outer, strict=True)]
  return mesh_utils.create_hybrid_device_mesh(
    inner, outer, devices, allow_split_physical_axes=True
  )


def abstract_mesh(cfg: MeshOptions, devices: int) -> AbstractMesh:
  """Returns the mesh of devices that are not here, for plans.

  Raises:
    ValueError: the axis sizes do not multiply to the number of devices.
  """
  sizes = tuple(mesh_sizes(cfg, devices).values())
  return AbstractMesh(sizes, AXES, axis_types=_AUTO)


def batch_ways(
  mesh: Mesh | AbstractMesh, axes: Sequence[str] = BATCH_AXES
) -> int:
  """Returns the number of parts of a batch's tokens, or of other axes."""
  return math.prod(mesh.shape[axis] for axis in axes)


def check_batch(
  mesh: Mesh | AbstractMesh,
  count: int,
  key: str,
  tokens: int | None = None,
  axes: Sequence[str] = BATCH_AXES,
) -> None:
  """Checks that rows, or decode slots, divide over the batch's mesh axes.

  Args:
    mesh: the mesh.
    count: number of rows or slots.
    key: the config key that sets `count`, for the error.
    tokens: of a row, where the key counts tokens; None = it counts rows.
    axes: the mesh axes that divide `count`; `ROW_AXES` for rows.

  Raises:
    ValueError: `count` is not a multiple of `batch_ways`.
  """
  ways = batch_ways(mesh, axes)
  if count % ways:
    each = tokens or 1
    rows = '' if tokens is None else f' x rows of {tokens} tokens'
    raise ValueError(
      f'{key} must be a multiple of {" x ".join(axes)}{rows} = '
      f'{ways * each} on {mesh.size} devices: got {count * each}'
    )


def put(tree: Any, places: Any) -> Any:
  """Places host arrays, which are equal in all processes.

  `jax.device_put` would send them to all processes and compare them.

  Args:
    tree: arrays.
    places: their shardings: a tree of them, or one for all.
  """
  if isinstance(places, jax.sharding.Sharding):
    places = jax.tree.map(lambda _: places, tree)

  def put_one(x, place: jax.sharding.Sharding):
    if place.is_fully_addressable or isinstance(x, jax.Array):
      return jax.device_put(x, place)
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, place, lambda i: x[i])

  return jax.tree.map(put_one, tree, places)


def move(params: Any, rules: Rules, mesh: Mesh) -> Any:
  """Returns a copy of arrays on the devices of another mesh of this process.

  Between meshes of one size the arrays are split anew on their own devices, and
  the parts are copied; else those whose parts differ travel through the host.

  Args:
    params: arrays on one mesh.
    rules: the sharding rules of the copy.
    mesh: the other mesh.
  """

  def copy(x: jax.Array, place: NamedSharding) -> jax.Array:
    own = x.sharding
    assert isinstance(own, NamedSharding), own
    if own.mesh.size == mesh.size:
      devices = np.reshape(own.mesh.devices, mesh.devices.shape)
      near = Mesh(devices, AXES, axis_types=_AUTO)
      x = jax.device_put(x, NamedSharding(near, place.spec))
    return jax.device_put(x, place)

  return jax.tree.map(copy, params, shardings(params, rules, mesh))


def local_mesh(mesh: Mesh) -> Mesh:
  """Returns the mesh of this process's devices, which decode for it.

  Weights are split over `expert` and `tensor` as on the run's mesh, and slots
  over all others. In a run of one process it is the mesh itself.
  """
  if jax.process_count() == 1:
    return mesh
  return _host_mesh(jax.process_index(), mesh)


def _host_mesh(process: int, mesh: Mesh) -> Mesh:
  own = [x for x in jax.devices() if x.process_index == process]
  sizes = -1, 1, 1, mesh.shape[EXPERT], mesh.shape[TENSOR]
  return Mesh(np.reshape(own, sizes), AXES, _AUTO)


def check_hosts(mesh: Mesh | AbstractMesh, hosts: int) -> None:
  """Checks that each host of a run can decode by itself.

  Args:
    mesh: the devices of the run.
    hosts: its processes, one per host.

  Raises:
    ValueError: the devices cannot be shared out, or an array that is split over
      `expert` or `tensor` would lie on several hosts.
  """
  devices = math.prod(mesh.shape.values())
  split = mesh.shape[EXPERT] * mesh.shape[TENSOR]
  if devices % hosts or devices // hosts % split:
    raise ValueError(
      'config.mesh.expert x tensor must divide the devices of a process: got '
      f'{split}, and {devices} devices in {hosts} processes'
    )


def is_local(params: Any) -> bool:
  """Returns whether all of some arrays is on the devices of this process."""
  return all(x.is_fully_addressable for x in jax.tree.leaves(params))


def localize(params: Any, rules: Rules, mesh: Mesh) -> Any:
  """Returns a copy of a run's arrays on the devices of this process.

  Every process must call it.

  Args:
    params: arrays on all devices of the run.
    rules: the sharding rules of the copy.
    mesh: the mesh of this process, from `local_mesh`.
  """
  hosts = [
    _host_mesh(process, mesh).devices for process in range(jax.process_count())
  ]
  types = (jax.sharding.AxisType.Auto,) * (1 + len(AXES))
  wide = Mesh(np.stack(hosts), ('process', *AXES), types)
  local = shardings(params, rules, mesh)
  copies = jax.device_put(
    params, jax.tree.map(lambda x: NamedSharding(wide, x.spec), local)
  )
  return jax.tree.map(
    lambda x, place: jax.make_array_from_single_device_arrays(
      x.shape, place, [shard.data for shard in x.addressable_shards]
    ),
    copies,
    local,
  )


def shardings(like: Any, rules: Rules, mesh: Mesh | AbstractMesh) -> Any:
  """Resolves `rules` for a tree of arrays or shapes.

  Optimizer state resolves like the parameters it mirrors, because its paths
  end in theirs. Scalars need no rule: they are replicated.

  Raises:
    ValueError: no rule matches an array, or a dimension does not divide over
      its mesh axis.
  """

  def place(path: str, leaf) -> NamedSharding:
    # The arrays of a quantized kernel, or of one with factors, as the kernel.
    path = re.sub('/kernel(/kernel)?(/values|/scale)?$', '/kernel', path)
    axes = tree.match(rules, path) if leaf.ndim else ()
    axes = [  # a scale that a dimension has in common is whole
      None if size == 1 else axis
      for size, axis in zip(leaf.shape, axes, strict=False)
    ]
    for size, axis in zip(leaf.shape, axes, strict=False):
      if axis is not None and size % mesh.shape[axis]:
        raise ValueError(
          f'{path} must divide over config.mesh.{axis}={mesh.shape[axis]}: '
          f'got a dimension of {size} in shape {leaf.shape}; set a divisor'
        )
    return NamedSharding(mesh, PartitionSpec(*axes))

  return tree.map_with_path(place, like)


def placed(like: Any, rules: Rules, mesh: Mesh | AbstractMesh) -> Any:
  """Returns a tree's shapes, dtypes and `shardings`, as ShapeDtypeStructs."""
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    like,
    shardings(like, rules, mesh),
  )


def spread(like: Any) -> Any:
  """Returns a tree's shapes, split over all devices as far as they divide.

  Each along its first dimension that divides; whole on each device without one.
  """
  mesh = make_mesh(schema.Mesh())

  def place(x):
    axes = [i for i, size in enumerate(x.shape) if size % mesh.size == 0]
    spec = [*(None,) * axes[0], mesh.axis_names] if axes else []
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

  return jax.tree.map(place, like)


@contextlib.contextmanager
def use(mesh: Mesh | AbstractMesh | None) -> Iterator[None]:
  """Traces programs for a mesh, see `current`; None = for one device."""
  if mesh is None:
    yield
    return
  mesh = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
  with jax.sharding.use_abstract_mesh(mesh):
    yield


def current() -> AbstractMesh | None:
  """Returns the mesh that a program is traced for; None on one device.

  None also within `jax.shard_map`, whose code runs on one device.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return None
  auto = jax.sharding.AxisType.Auto
  return mesh if all(kind == auto for kind in mesh.axis_types) else None


def ways(axes: Axes) -> int:
  """Returns the number of parts over mesh axes of the `current` mesh."""
  mesh = current()
  if mesh is None or axes is None:
    return 1
  axes = (axes,) if isinstance(axes, str) else axes
  return math.prod(mesh.shape[axis] for axis in axes)


def fitting(shape: Sequence[int], axes: Sequence[Axes]) -> PartitionSpec:
  """Returns the spec of the `axes` that divide their dimensions.

  Args:
    shape: the array's shape.
    axes: mesh axes of its first dimensions.
  """
  return PartitionSpec(
    *(
      axis if size % ways(axis) == 0 else None
      for size, axis in zip(shape, axes, strict=False)
    )
  )


def pin(x: jax.Array, *axes: Axes) -> jax.Array:
  """Fixes the placement of an intermediate array, and of its gradient.

  Args:
    x: the array.
    *axes: mesh axes of its first dimensions; the others are whole. An axis
      that does not divide its dimension is left out.
  """
  mesh = current()
  if mesh is None:
    return x
  place = NamedSharding(mesh, fitting(x.shape, axes))
  return jax.lax.with_sharding_constraint(x, place)


def pin_batch(x: jax.Array) -> jax.Array:
  """Pins the first dimension to the batch axes, the others whole."""
  return pin(x, BATCH_AXES)


def pieces(x: jax.Array, fill: int = 0) -> jax.Array:
  """Returns the rows [B, T, ...] of a batch in pieces, [B * P, T / P, ...].

  P is the size of `sequence`; a piece lies on one device, where nothing but
  the tokens themselves says which part of its row it is.

  Args:
    x: an array of tokens, whole on the devices of `sequence`.
    fill: value of the pads that are added where P does not divide T.
  """
  if ways(SEQUENCE) == 1:
    return x
  extra = -x.shape[1] % (_TILE * ways(SEQUENCE))
  widths = (0, 0), (0, extra), *((0, 0),) * (x.ndim - 2)
  x = jax.numpy.pad(x, widths, constant_values=fill)
  places = PartitionSpec(ROW_AXES, SEQUENCE), PartitionSpec(BATCH_AXES)
  return split(lambda x: x, *places)(x)


def rows(x: jax.Array, tokens: int) -> jax.Array:
  """Returns the rows [B, T] whose `pieces` are given, each of T tokens."""
  if ways(SEQUENCE) == 1:
    return x
  places = PartitionSpec(BATCH_AXES), PartitionSpec(ROW_AXES)
  return split(whole_rows, *places)(x)[:, :tokens]


def whole_rows(x: jax.Array) -> jax.Array:
  """Gathers the pieces [B, T, ...] of a device's rows, within `split`."""
  return jax.lax.all_gather(x, SEQUENCE, axis=1, tiled=True)


def gather(x: jax.Array, *axes: Axes) -> jax.Array:
  """Gathers a weight over `fsdp`, and reduce-scatters its gradient.

  The gradient is summed over the devices in the weight's dtype, as other FSDP
  implementations do; one device rounds its sum to that dtype only once.

  Args:
    x: a weight in the compute dtype, the dtype that travels.
    *axes: mesh axes that split its dimensions.
  """
  if current() is None or not any(a == FSDP for a in axes):
    return x
  return _gather(axes, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(axes, x):
  return pin(x, *(None if axis == FSDP else axis for axis in axes))


_gather.defvjp(
  # Unless x is pinned, a barrier before the cast may be gathered, not x. To pin
  # the whole weights of the decode view is to gather them for every token.
  lambda axes, x: (_gather(axes, pin(x, *axes)), None),
  lambda axes, _, g: (pin(g, *axes),),
)


def split(fn: Callable, in_specs: Any, out_specs: Any) -> Callable:
  """Returns `fn` run on each device of the `current` mesh, on its parts.

  Within `fn` collectives name the mesh axes. On one device it is `fn`.

  Args:
    fn: a function of arrays.
    in_specs: a PartitionSpec per argument.
    out_specs: those of the results.
  """
  mesh = current()
  if mesh is None:
    return fn
  return jax.shard_map(
    fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
  )


def reduce_to(x: jax.Array, place: NamedSharding) -> jax.Array:
  """Adds up the devices' arrays, and returns the device's part of the sum.

  Args:
    x: a whole array per device, of its rows of the batch, within `split`; the
      mesh has `data` and `fsdp` alone.
    place: placement of the sum.
  """
  if FSDP not in place.spec:
    return jax.lax.psum(x, (DATA, FSDP))
  dimension = place.spec.index(FSDP)
  x = jax.lax.psum_scatter(x, FSDP, scatter_dimension=dimension, tiled=True)
  return jax.lax.psum(x, DATA)
