"""The programs of a run, lowered for devices that need not be here.

Nothing is allocated: the arguments are shapes with shardings, and the devices
may be those of a topology. `lower` builds

    train_step    one update of a token stage from one micro-batch, AdamW
    score         logprobs of packed rows
    prefill       one chunk of prompt tokens: the call that reads the most
    decode        the loop that draws a token per slot
    view          the weights for decoding, from the trained ones
    state         an empty cache and its slots
    hand_over     a version of the weights, split on the learner's devices as on
                  those of a sampler's own, before it is copied to these
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from posttrain import schema, scoring, sharding, types
from posttrain.decode import loop, schedule
from posttrain.models import lora, transformer
from posttrain.training import arrays, objectives, optim
from posttrain.training import step as train_step

STOP_IDS = 4
STEPS = 1000  # of the stage; the length of the schedule is no part of a shape
STAGE = schema.Stage(envs={'tokens': schema.EnvEntry()})
_LINKS = 'parents', 'ends', 'copies'
_SCALARS = ('rl_count', 'ce_count', 'ref_kl_count', 'rl_sequences')


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Sizes of a batch and of the decode engine, over all devices."""

  rows: int = 8  # of a micro-batch
  row_tokens: int = 4096
  slots: int = schema.Rollout.slots
  capacity: int = 4096  # tokens of a slot
  prefill_rows: int = schema.Rollout.prefill_rows
  prefill_tokens: int = schema.Rollout.prefill_tokens
  sampler: tuple[int, int, int] = (1, 1, 1)  # its own mesh, for hand_over


def lower(
  name: str,
  model: schema.Model,
  mesh: Mesh,
  sizes: Sizes,
  platform: str | None = None,
  stage: schema.Stage = STAGE,
) -> jax.stages.Lowered:
  """Lowers a program.

  Args:
    name: one of PROGRAMS.
    model: model options, with the vocabulary resolved.
    mesh: devices that hold its arguments.
    sizes: sizes of its arguments.
    platform: platform that the program is lowered for, 'cpu', 'cuda' or 'tpu';
      None = that of jax's default backend.
    stage: options of the train step: LoRA, optimizer, loss, and how often
      gradients are reduced.
  """
  fn, args = PROGRAMS[name](_Builder(model, mesh, sizes, platform, stage))
  platforms = None if platform is None else (platform,)
  with sharding.use(mesh):
    return fn.trace(*args).lower(lowering_platforms=platforms)


class _Builder:
  """The arguments of the programs, as ShapeDtypeStructs with shardings."""

  def __init__(
    self,
    model: schema.Model,
    mesh: Mesh,
    sizes: Sizes,
    platform: str | None,
    stage: schema.Stage,
  ):
    self.model, self.mesh, self.sizes = model, mesh, sizes
    self.stage = stage
    self._results = functools.partial(
      _results, model=model, mesh=mesh, sizes=sizes, platform=platform
    )
    self._whole = NamedSharding(mesh, PartitionSpec())
    self.slots = loop.placement(mesh, sizes.slots)

  def train_step(self) -> tuple[Any, tuple]:
    stage, base = self.stage, None
    optimizer = optim.make(stage.optim, STEPS)
    state, whole = train_step.state_shapes(
      stage, self.model, optimizer, self.mesh
    )
    if stage.lora.rank:
      base = lora.Base(whole, lora.scale(stage.lora))
    step = train_step.make_train_step(
      objectives.TYPES['tokens'](self.model, tuple(stage.envs), stage.loss),
      optimizer,
      mesh=self.mesh,
      rules=transformer.SHARDING_RULES,
      base=base,
      reduce=stage.batch.reduce_gradients,
    )
    return step._update, (state, self._batch(), base, optimizer.numbers)

  def score(self) -> tuple[Any, tuple]:
    sizes = self.sizes
    shape = (sizes.rows, sizes.row_tokens)
    place = NamedSharding(self.mesh, PartitionSpec(*sharding.BATCH[1:]))
    rows = tuple(
      jax.ShapeDtypeStruct(shape, dtype, sharding=place)
      for dtype in (np.int32, np.int32, np.int32, np.float32)
    )
    rows += None, None  # no trees
    args = (self._params(), rows, self.model, self._whole, 'logprobs')
    return scoring._read, args

  def view(self) -> tuple[Any, tuple]:
    return loop.view, (self._params(), self.model, self.slots)

  def state(self) -> tuple[Any, tuple]:
    sizes = self.sizes
    args = (None, self.model, sizes.slots, sizes.capacity, self.slots)
    return loop._widen, args

  def hand_over(self) -> tuple[Any, tuple]:
    cast = functools.partial(lora.cast_matrices, dtype=self.model.dtype)
    like = jax.eval_shape(cast, transformer.shapes(self.model))
    own, rules = (
      schema.SamplerMesh(*self.sizes.sampler),
      transformer.SHARDING_RULES,
    )
    near = sharding.make_mesh(own, list(self.mesh.devices.flat))
    places = sharding.shardings(like, rules, near)
    args = (sharding.placed(like, rules, self.mesh),)
    return jax.jit(lambda x: x, out_shardings=places), args

  def decode(self) -> tuple[Any, tuple]:
    count = jax.ShapeDtypeStruct((), np.int32)
    state, slots = self._results('state'), self._slots()
    view = self._results('view')
    args = (view, self.model, state, slots, (count, count), self.slots)
    return loop.decode, args

  def prefill(self) -> tuple[Any, tuple]:
    sizes, ways = self.sizes, sharding.batch_ways(self.mesh)
    count = min(sizes.prefill_rows, sizes.slots)
    shapes = schedule.Shapes(
      sizes.slots, count, sizes.prefill_tokens, ways=ways
    )
    # Rows per device and tokens of a slot of the call that reads the most.
    count, length = max(
      shapes.calls(sizes.capacity), key=lambda call: (math.prod(call), call)
    )
    row = jax.ShapeDtypeStruct((count * shapes.ways,), np.int32)
    tokens = jax.ShapeDtypeStruct((*row.shape, sizes.prefill_tokens), np.int32)
    args = (self._results('view'), self.model, self._results('state'))
    most, chunk = shapes.row_counts[-1], (tokens, row, row, row)
    return loop.prefill, (*args, chunk, length, most, self.slots)

  def _params(self) -> Any:
    return sharding.placed(
      transformer.shapes(self.model), transformer.SHARDING_RULES, self.mesh
    )

  def _batch(self) -> types.Batch:
    sizes, rows = self.sizes, NamedSharding(self.mesh, sharding.BATCH)
    counts = dict.fromkeys(_SCALARS, np.float32)
    counts['num_micro_batches'] = np.int32
    shape = (1, sizes.rows, sizes.row_tokens)
    return arrays.Batch(
      **{
        field.name: jax.ShapeDtypeStruct(
          shape, types.TOKEN_FIELDS.get(field.name, np.int32), sharding=rows
        )
        for field in dataclasses.fields(types.Batch)
        if field.name not in counts
        and (
          field.default is not None
          or (self.stage.batch.trees and field.name in _LINKS)
        )
      },
      **{
        name: jax.ShapeDtypeStruct((), dtype, sharding=self._whole)
        for name, dtype in counts.items()
      },
    )

  def _slots(self) -> loop.Slots:
    count = self.sizes.slots
    number = jax.ShapeDtypeStruct((count,), np.float32)
    integer = jax.ShapeDtypeStruct((count,), np.int32)
    return loop.Slots(
      keys=jax.ShapeDtypeStruct((count, 2), np.uint32),
      limit=integer,
      stop_ids=jax.ShapeDtypeStruct((count, STOP_IDS), np.int32),
      temperature=number,
      top_k=integer,
      top_p=number,
      min_p=number,
    )


@functools.lru_cache(maxsize=64)
def _results(name: str, **options: Any) -> Any:
  """Returns the results of a program; their shardings are the compiler's."""
  lowered = lower(name, **options)
  return jax.tree.map(
    lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
    lowered.out_info,
    lowered.compile().output_shardings,
  )


PROGRAMS: dict[str, Callable[[_Builder], tuple[Any, Sequence[Any]]]] = {
  name: getattr(_Builder, name)
  for name in (
    'train_step',
    'score',
    'prefill',
    'decode',
    'view',
    'state',
    'hand_over',
  )
}
