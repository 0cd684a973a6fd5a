"""Checkpoints: `folder/<step>/{state,host}`, through Orbax.

`state` is a pytree of arrays (a `TrainState`). `host` is JSON: the caller's
dict, so that a step describes itself, and the checksums of both items.

Saving:
  1. checksum every array where it lives;
  2. Orbax copies the arrays off the device, and the call returns;
  3. it writes to a temporary folder and renames that once all is there;
  4. it deletes what the keep rules no longer want.

Restoring: the newest step that can be read and whose checksums agree. Storage
notices a file that is gone or cut short, but not a flipped bit inside an
array; the checksums do. A damaged step is renamed to `<step>.damaged`, with a
warning, where an older one is sound; where none is, that is an error. So is a
sound step of other shapes, and whatever says nothing about the file.
"""

import json
import re
import time
import warnings
import zlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from posttrain import schema, tree
from posttrain.util import logs, memory

logs.quiet('orbax')  # it logs every save, through absl

State = Any  # a pytree of arrays
Host = dict[str, Any]
# What storage answers that says nothing about the file.
TRANSIENT = 'CANCELLED|DEADLINE_EXCEEDED|UNAVAILABLE|RESOURCE_EXHAUSTED'


class Damaged(Exception):
  """A step cannot be read, or is not what was written."""


class Checkpointer:
  """Saves and restores the steps of one folder."""

  def __init__(self, folder: str, keep: schema.Checkpoint):
    """Opens (or makes) a folder, and clears half-written steps out of it."""
    self._folder = epath.Path(folder).expanduser().resolve()
    policies = ocp.checkpoint_managers
    kept = [policies.LatestN(keep.keep_last)]
    if keep.keep_every is not None:
      kept.append(policies.EveryNSteps(keep.keep_every))
    self._manager = ocp.CheckpointManager(
      self._folder,
      item_handlers={
        'state': ocp.PyTreeCheckpointHandler(),
        'host': ocp.JsonCheckpointHandler(),
      },
      options=ocp.CheckpointManagerOptions(
        preservation_policy=policies.AnyPreservationPolicy(kept),
        cleanup_tmp_directories=True,
      ),
    )

  def save(self, step: int, state: State, host: Host) -> None:
    """Starts to save; returns once `state` may be overwritten or donated.

    Steps from `step` on that exist already were given up when an older one
    was restored, and are deleted first.

    Args:
      step: the name of its folder.
      state: pytree of arrays.
      host: JSON-able dict; tuples come back as lists, keys as strings.
    """
    for old in self.steps():
      if old >= step:
        self.wait()
        self._manager.delete(old)
    record = {
      'host': json.loads(json.dumps(host)),
      'state_sums': tree.checksums(state),
      'time': time.time(),
    }
    record['crc'] = _crc(record)
    saved = self._manager.save(
      step,
      args=ocp.args.Composite(
        state=ocp.args.PyTreeSave(state), host=ocp.args.JsonSave(record)
      ),
    )
    assert saved, f'Orbax declined to save step {step} to {self._folder}'

  def steps(self) -> list[int]:
    """Returns the steps in the folder, oldest first."""
    return sorted(self._manager.all_steps())

  def latest(self) -> int | None:
    """Returns the newest step, which may yet prove damaged; or None."""
    return max(self.steps(), default=None)

  def restore(
    self, like: State, step: int | None = None
  ) -> tuple[State, Host] | None:
    """Restores the newest sound step.

    Args:
      like: pytree of arrays or ShapeDtypeStructs of the saved shapes and
        dtypes; the result takes its structure and shardings.
      step: this step and no other; None = the newest that is sound.

    Returns:
      (state, host), or None if the folder has no step. Damaged steps newer
      than the result are renamed to `<step>.damaged`.

    Raises:
      ValueError: `step` is missing, all are damaged, or `like` differs.
    """
    self.wait()
    if step is not None:
      return _exactly(self._folder / str(step), _read, like)
    damaged = []
    for number in reversed(self.steps()):
      folder = self._folder / str(number)
      try:
        found = _read(folder, like)
      except Damaged as error:
        warnings.warn(
          f'checkpoint {folder} is damaged, not used: {error}', stacklevel=2
        )
        damaged.append(number)
      else:
        self._set_aside(damaged)
        return found
    if damaged:
      raise ValueError(
        f'{self._folder} must hold a sound checkpoint: got steps {damaged}, '
        'all damaged; rename or delete the folder to start the stage again'
      )
    return None

  def wait(self) -> None:
    """Blocks until all is on disk; raises what went wrong."""
    self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits, then frees Orbax's threads."""
    self._manager.close()

  def _set_aside(self, damaged: list[int]) -> None:
    for number in damaged if jax.process_index() == 0 else ():
      aside = self._folder / f'{number}.damaged'
      aside.rmtree(missing_ok=True)
      (self._folder / str(number)).rename(aside)
    if damaged:
      self._manager.reload()


def restore_params(path: str, like: State, *, average=False) -> State:
  """Restores the `params` of a run, for `init: PATH`.

  Args:
    path: a workdir, one of its `checkpoints/<stage>` folders, or one step's.
      Of a workdir the stage saved last is taken, of a stage the newest step.
    like: the params to restore, as arrays or ShapeDtypeStructs.
    average: restore their moving average instead, which evaluation measures.

  Raises:
    ValueError: nothing is there, it is damaged, or its params differ from
      `like`; the first that differs is named.
  """
  item = 'average' if average else 'params'
  state, _ = _exactly(find(path), _read, {item: like}, f'{item}/')
  return state[item]


def read_host(path: str) -> Host:
  """Returns the `host` dict of a step; `path` as in `restore_params`."""
  return _exactly(find(path), _read_record)['host']


def read_sums(path: str) -> dict[str, int]:
  """Returns the checksums of a step's parameters, by path in the state."""
  sums = _exactly(find(path), _read_record)['state_sums']
  return {k: total for k, total in sums.items() if k.startswith('params/')}


def find(path: str) -> epath.Path:
  """Resolves a workdir, stage folder or step folder to a step folder."""
  root = epath.Path(path).expanduser().resolve()
  if (root / 'state').exists() and (root / 'host').exists():
    return root
  inside = root / 'checkpoints'
  stages = inside.iterdir() if inside.exists() else [root]
  steps = [
    max(numbered, key=lambda step: int(step.name))
    for stage in stages
    if (numbered := [x for x in stage.glob('*') if x.name.isdigit()])
  ]
  if not steps:
    raise ValueError(
      'a checkpoint path must be a workdir, a checkpoints/<stage> folder or '
      f'a step folder: got {path!r}, where no saved step was found'
    )
  return steps[0] if len(steps) == 1 else max(steps, key=_saved_at)


def _saved_at(folder) -> float:
  try:
    return _read_record(folder)['time']
  except Damaged:
    return 0.0


def _exactly(folder, read, *args) -> Any:
  """Reads a step that was asked for by name: no falling back."""
  if not folder.exists():
    raise ValueError(f'a checkpoint must exist: got {folder}')
  try:
    return read(folder, *args)
  except Damaged as error:
    raise ValueError(
      f'a checkpoint must be sound: got {folder}, which is damaged '
      f'({error}); delete it or name another step'
    ) from error


def _read(folder, like: State, prefix='') -> tuple[State, Host]:
  """Reads what of a step has the prefix; proves it, or raises `Damaged`."""
  like = jax.tree.map(_abstract, like)
  record = _read_record(folder)
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
    saved = _try(reader.metadata, folder / 'state')
    saved = _try(lambda: tree.flat(saved.item_metadata.tree))
    if saved.keys() != record['state_sums'].keys():
      raise Damaged('its arrays are not those that were written')
    _check_same(folder, saved, tree.flat(like), prefix)
    state = _try(
      reader.restore,
      folder / 'state',
      args=ocp.args.PyTreeRestore(
        item=like,
        partial_restore=bool(prefix),
        restore_args=ocp.checkpoint_utils.construct_restore_args(like),
      ),
    )
  for path, total in _try(tree.checksums, state).items():
    if total != record['state_sums'][path]:
      raise Damaged(f'the checksum of {path!r} is wrong')
  return state, record['host']


def _read_record(folder) -> dict[str, Any]:
  """Reads and proves the `host` item."""
  with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
    record = _try(reader.restore, folder / 'host')
  if not isinstance(record, dict) or record.pop('crc', None) != _crc(record):
    raise Damaged('the checksum of its host item is wrong')
  return record


def _try(read, *args, **kwargs) -> Any:
  """Calls `read`; turns what it raises about a broken file into `Damaged`."""
  try:
    return read(*args, **kwargs)
  except Exception as error:  # plain `Exception` is among what is raised
    text = (str(error).strip().splitlines() or [''])[0][:200]
    passes = isinstance(error, (MemoryError, OSError))
    passes = passes or re.search(TRANSIENT, text) or memory.is_oom(error)
    if passes and not isinstance(error, FileNotFoundError):
      raise
    raise Damaged(f'{type(error).__name__}: {text}') from error


def _check_same(folder, saved: dict, like: dict, prefix: str) -> None:
  """Refuses a `like` that is not what was saved, naming the first path."""
  for path in dict.fromkeys([*like, *saved]):
    if not path.startswith(prefix):
      continue
    want, got = (
      f'{np.dtype(side[path].dtype)}{list(side[path].shape)}'
      if path in side
      else 'nothing'
      for side in (like, saved)
    )
    if want != got:
      raise ValueError(
        f"the checkpoint {folder} must hold this run's arrays: got {got} "
        f'at {path!r}, expected {want}; use the model it was saved with'
      )


def _abstract(leaf) -> jax.ShapeDtypeStruct:
  sharding = getattr(leaf, 'sharding', None)
  if sharding is None:
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _crc(record: dict[str, Any]) -> int:
  return zlib.crc32(json.dumps(record, sort_keys=True).encode())
