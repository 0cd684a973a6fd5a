"""The mesh of a model on a target.

1. Candidates are all (data, fsdp, tensor) with the target's number of devices;
   `tensor` stays within a host. Sizes that a weight, the rows or the slots do
   not divide by are left out, and on TPUs an `fsdp` that leaves a device less
   than 128 columns of D. The fewer columns, the more of the gradients XLA for
   TPUs reduces whole instead of scattering them, and the more temporaries it
   needs: compiled, 1.16 times the plan with 256 columns, 1.5 to 1.8 with 128,
   1.9 with 64, and 2.0 with 16, where nothing is scattered.
2. A candidate fits if the train step does, and if a run that samples does as
   well. That holds the train state, the decode view and the cache of its host's
   slots, and the temporaries of the largest program; the cache is freed during
   an update (`rollout.sleep`). Each host decodes on its own devices,
   `sharding.local_mesh`.
3. If none fits, a micro-batch has half as many rows, down to an eighth; then
   half as many slots are tried in the same way, down to FEWEST; and last the
   train step alone.
4. Of those whose train step, without overlap and by the formula, takes at most
   SLACK times as long per token as the fastest, the one with the smallest
   `tensor`, then the smallest `fsdp`: exchanges among few devices, and those
   that can overlap, suffer least from what the formula leaves out.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from experiments import programs
from experiments.scale import fleets, plans
from posttrain import schema
from posttrain.stage import program_bytes

FEWEST = 4  # slots per device
SLACK = 1.05
LANES = 128  # numbers of a TPU's vector
_ROWS = (1, 2, 4, 8)  # parts of the rows that are tried
# Seconds of a token.
Seconds = Callable[[fleets.MESH, programs.Sizes], float]


@dataclasses.dataclass(frozen=True)
class Choice:
  """A mesh, and the sizes of the programs of a run on it."""

  mesh: fleets.MESH
  local: fleets.MESH | None  # that a host decodes on; None = it does not fit
  sizes: programs.Sizes  # rows over all devices; slots of a host
  held: float  # bytes of a device, of a run that trains and samples
  limit: int  # bytes of a device


def choose(
  model: schema.Model,
  target: fleets.Target,
  sizes: programs.Sizes,
  limits: Mapping[str, float],
  seconds: Seconds,
  given: fleets.MESH | None = None,
  samples: bool = True,
) -> Choice:
  """Returns the mesh of a model, see the module.

  Args:
    model: model options, with the vocabulary resolved.
    target: the devices.
    sizes: rows over all devices, and slots of a host.
    limits: numbers of the chip, `ceilings.values`.
    seconds: predicts the seconds of a token of a train step.
    given: the only candidate; None = all.
    samples: whether the run decodes as well.

  Raises:
    ValueError: the train step fits on no mesh, or the given one is another
      number of devices.
  """
  if given and math.prod(given) != target.devices:
    raise ValueError(
      f'--mesh must multiply to {target}: got {",".join(map(str, given))}'
    )
  per_host = min(int(limits['devices_per_host']), target.devices)
  limit = int(limits['memory_bytes'] * limits['memory_share'])
  meshes = [given] if given else list(fleets.candidates(target, per_host))
  slots = sizes.slots if samples else 0
  while slots >= FEWEST * per_host:
    for fewer in _fewer_rows(sizes):
      fewer = dataclasses.replace(
        fewer, slots=slots, prefill_rows=min(sizes.prefill_rows, slots)
      )
      options = [
        Choice(mesh, fleets.local_mesh(mesh, per_host), fewer, held, limit)
        for mesh in meshes
        if (held := _held(model, mesh, fewer, target, limits)) <= limit
      ]
      if options:
        return _best(options, seconds)
    slots //= 2
  totals = {}
  for fewer in _fewer_rows(sizes):
    totals |= {
      (mesh, fewer): _train(model, mesh, fewer, target, limits)
      for mesh in meshes
    }
    options = [
      Choice(mesh, None, fewer, total, limit)
      for (mesh, _), total in totals.items()
      if total <= limit
    ]
    if options:
      return _best(options, seconds)
  (mesh, _), least = min(totals.items(), key=lambda x: x[1])
  raise ValueError(_refusal(target, mesh, least, limit))


def _fewer_rows(sizes: programs.Sizes) -> list[programs.Sizes]:
  """Returns the sizes with all rows, and with parts of them."""
  return [
    dataclasses.replace(sizes, rows=sizes.rows // part)
    for part in _ROWS
    if sizes.rows % part == 0
  ]


def _best(options: Sequence[Choice], seconds: Seconds) -> Choice:
  """Returns the mesh of the smallest axes among the fastest."""
  times = [seconds(x.mesh, x.sizes) for x in options]
  near = [
    x
    for x, time in zip(options, times, strict=True)
    if time <= SLACK * min(times)
  ]
  return min(near, key=lambda x: (x.mesh[2], x.mesh[1]))


def _train(
  model: schema.Model,
  mesh: fleets.MESH,
  sizes: programs.Sizes,
  target: fleets.Target,
  limits: Mapping[str, float],
) -> float:
  """Returns the bytes of a train step; inf if it does not divide."""
  if sizes.rows % (mesh[0] * mesh[1]) or not plans.divides(model, mesh):
    return math.inf
  if target.tpu and model.embed_dim < LANES * mesh[1] > LANES:
    return math.inf
  plan = plans.plan('train_step', model, mesh, sizes, target.platform)
  return plan.arguments + limits['plan_factor'] * plan.temporaries


def _held(
  model: schema.Model,
  mesh: fleets.MESH,
  sizes: programs.Sizes,
  target: fleets.Target,
  limits: Mapping[str, float],
) -> float:
  """Returns the bytes of a device of a run that trains and samples."""
  train = _train(model, mesh, sizes, target, limits)
  if math.isinf(train):
    return math.inf
  per_host = min(int(limits['devices_per_host']), target.devices)
  local = fleets.local_mesh(mesh, per_host)
  state = plans.plan('train_step', model, mesh, sizes, target.platform)
  decode, prefill = (
    plans.plan(name, model, local, sizes, target.platform)
    for name in ('decode', 'prefill')
  )
  device = program_bytes.Device(model, fleets.abstract(local), target.platform)
  cache = program_bytes.cache_bytes(device, sizes.slots, sizes.capacity)
  update = train - state.arguments - cache
  work = max(update, decode.temporaries, prefill.temporaries)
  return state.arguments + decode.arguments + work


def _refusal(
  target: fleets.Target, mesh: fleets.MESH, least: float, limit: int
) -> str:
  if math.isinf(least):
    return (
      f'the model must divide over {target}: got no mesh (data, fsdp, tensor) '
      'of so many devices that rows and weights divide over; use another number'
    )
  return (
    f'the train step must fit {target}: got {least / 2**30:.1f} GiB per device '
    f'on the best mesh {",".join(map(str, mesh))}, expected at most '
    f'{limit / 2**30:.1f}; use more devices, or shorter rows'
  )
