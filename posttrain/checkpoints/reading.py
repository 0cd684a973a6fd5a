"""Reading of saved steps: their arrays, their `host` item, their soundness.

`store` describes the layout of a step. Every function checks its files: a step
whose files cannot be read, or differ from those written, is `Damaged`, and
an error of the storage service is raised as it is.
"""

import json
import logging
import os
import stat
import warnings
import zlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from posttrain import processes, sharding, tree
from posttrain.checkpoints import damage, step_folders
from posttrain.util import foreign

# Orbax logs what it saves and reads, through absl.
logging.getLogger('absl').addFilter(
  lambda record: (
    record.levelno >= logging.ERROR or '/orbax/' not in record.pathname
  )
)

State = Any  # a pytree of arrays
Host = dict[str, Any]
_MAX_BYTES = 64 * 2**20  # of a file that describes a step


def restore_params(path: str, like: State, *, average: bool = False) -> State:
  """Restores the `params` of a run, for `init: PATH`.

  Args:
    path: a workdir, one of its `checkpoints/<stage>` folders, or a step's
      folder, see `find`.
    like: the params to restore, as arrays or ShapeDtypeStructs.
    average: whether to restore their moving average instead, which evaluation
      uses.

  Raises:
    ValueError: the step is missing or damaged, or its params differ from
      `like`; names the first that differs.
  """
  item = 'average' if average else 'params'
  state, _ = read_named(find(path), read, {item: like}, f'{item}/')
  return state[item]


def check_params(path: str, like: State) -> None:
  """Checks the `params` of a run as `restore_params` does; reads no array.

  Args:
    path: as in `restore_params`.
    like: the expected params, as arrays or ShapeDtypeStructs.

  Raises:
    ValueError: the step is missing or damaged, or its params differ from
      `like`; names the first that differs.
  """
  read_named(find(path), _read_metadata, {'params': like}, 'params/')


def read_host(path: str) -> Host:
  """Returns the `host` dict of a step; `path` as in `restore_params`."""
  return read_named(find(path), _read_record)['host']


def newest_host(folder: str, stage: str | None = None) -> Host | None:
  """Returns the newest `host` dict of a stage that can be read.

  None if the folder does not exist or has none. The arrays are not read.

  Args:
    folder: the stage's folder.
    stage: the stage that must have saved the steps, each with the number that
      names its folder; others are damaged, with a warning. None = not checked.
  """
  for step in reversed(step_folders.steps(step_folders.local(folder))):
    try:
      host = _read_record(step)['host']
    except damage.Damaged:
      continue
    try:
      check_place(step, host, stage)
    except damage.Damaged as error:
      warnings.warn(f'{step} is not used: {error}', stacklevel=2)
    else:
      return host
  return None


def has_steps(folder: str) -> bool:
  """Returns whether a stage's folder has steps, sound or damaged."""
  return bool(step_folders.steps(step_folders.local(folder)))


def is_sound(folder: str, stage: str | None = None) -> bool:
  """Returns whether a step can be read and its checksums agree.

  Reads all arrays, each split over the devices of all processes, which must all
  call it.

  Args:
    folder: the step's folder.
    stage: see `newest_host`.
  """
  step = step_folders.local(folder)

  def shapes() -> State:
    check_place(step, _read_record(step)['host'], stage)
    with _reader(ocp.PyTreeCheckpointHandler()) as reader:
      return jax.tree.map(_saved_shape, _saved_tree(reader, step))

  try:
    read(step, sharding.spread(processes.together(shapes)))
  except damage.Damaged:
    return False
  return True


def _saved_shape(leaf: Any) -> jax.ShapeDtypeStruct:
  try:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
  except (AttributeError, TypeError):
    raise damage.Damaged('one of its values is no array') from None


def read_sums(path: str, averaged: bool = False) -> dict[str, int]:
  """Returns the checksums of a step's parameters, by path in the state.

  Args:
    path: as in `restore_params`.
    averaged: whether those of the moving average are included, if there is one.
  """
  sums = read_named(find(path), _read_record)['state_sums']
  parts = ('params/', 'average/') if averaged else ('params/',)
  return {k: total for k, total in sums.items() if k.startswith(parts)}


def find(path: str) -> epath.Path:
  """Resolves a workdir, stage folder or step folder to a step folder.

  A workdir stands for its stage that was saved last, and a stage for its newest
  step, or for its best one where it selects (`host['best']` of the newest).

  Raises:
    ValueError: there is no step, or the best one is missing.
  """
  root = step_folders.local(path)
  if step_folders.is_step(root):
    return root
  checkpoints = root / 'checkpoints'
  stages = checkpoints.iterdir() if checkpoints.is_dir() else [root]
  steps = [
    step for stage in stages if (step := step_folders.newest(stage)) is not None
  ]
  if not steps:
    raise ValueError(
      'a checkpoint path must be a workdir, a checkpoints/<stage> folder or '
      f'a step folder: got {path!r}, which has no saved step'
    )
  newest = steps[0] if len(steps) == 1 else max(steps, key=_saved_at)
  number = best_step(newest)
  best = newest if number is None else newest.parent / str(number)
  if not step_folders.is_step(best):
    raise ValueError(
      f'{best} must hold the best step of its stage: it is missing; put it '
      'back, or name another step'
    )
  return best


def best_step(folder) -> int | None:
  """Returns the best step by a step's `host`; None if no evaluation chose.

  Raises:
    ValueError: the host names no step: it may be of a foreign checkpoint.
  """
  try:
    best = _read_record(folder)['host'].get('best')
  except damage.Damaged:
    return None
  if best is None:
    return None
  step = best.get('step', -1) if isinstance(best, dict) else -1
  if step is None or (type(step) is int and step >= 0):
    return step
  raise ValueError(
    f'the host item of {folder} must name its best step, a number: got '
    f'{foreign.quote(best)}'
  )


def _saved_at(folder) -> float:
  try:
    return _read_record(folder)['time']
  except damage.Damaged:
    return 0.0


def read_named(folder, read, *args) -> Any:
  """Reads one given step, without falling back to an older one."""
  if not folder.exists():
    raise ValueError(f'a checkpoint must exist: got {folder}')
  try:
    return read(folder, *args)
  except damage.Damaged as error:
    raise ValueError(
      f'a checkpoint must be sound: got {folder}, which is damaged '
      f'({error}); delete it or name another step'
    ) from error


def read(folder, like: State, prefix='') -> tuple[State, Host]:
  """Reads and checks a step's arrays with the prefix; may raise `Damaged`."""
  like = jax.tree.map(_abstract, like)

  def read_arrays() -> tuple[State, dict[str, Any]]:
    record = _read_record(folder)
    with _reader(ocp.PyTreeCheckpointHandler()) as reader:
      _check_metadata(reader, folder, record, like, prefix)
      state = damage.attempt(
        reader.restore,
        folder / 'state',
        args=ocp.args.PyTreeRestore(
          item=like,
          partial_restore=bool(prefix),
          restore_args=ocp.checkpoint_utils.construct_restore_args(like),
        ),
      )
    return state, record

  # A step that one process cannot read is damaged for all of them.
  state, record = processes.together(read_arrays)
  for path, total in tree.checksums(state).items():
    if total != record['state_sums'][path]:
      raise damage.Damaged(f'the checksum of {path!r} is wrong')
  return state, record['host']


def _reader(handler) -> ocp.Checkpointer:
  """Returns a reader that does not wait for the processes of the run.

  One of them may read alone, and a step that is damaged for one would have the
  others wait for ever; `processes.together` has them agree.
  """
  own = processes.index()
  options = ocp.options.MultiprocessingOptions(
    primary_host=own,
    active_processes={own},
    barrier_sync_key_prefix=f'read_{own}',
  )
  return ocp.Checkpointer(handler, multiprocessing_options=options)


def _check_metadata(reader, folder, record, like: State, prefix) -> None:
  """Checks names, shapes and dtypes of a step's arrays; reads none."""
  saved = tree.flat(_saved_tree(reader, folder))
  if saved.keys() != record['state_sums'].keys():
    raise damage.Damaged('its arrays differ from those written')
  _check_same(folder, saved, tree.flat(like), prefix)


def _saved_tree(reader, folder) -> Any:
  """Returns the names, shapes and dtypes of a step's arrays."""
  saved = damage.attempt(reader.metadata, folder / 'state')
  try:
    return saved.item_metadata.tree
  except AttributeError:  # Orbax gives None for some damage
    raise damage.Damaged('the names of its arrays cannot be read') from None


def _read_metadata(folder, like: State, prefix: str) -> None:
  record = _read_record(folder)
  with _reader(ocp.PyTreeCheckpointHandler()) as reader:
    _check_metadata(reader, folder, record, like, prefix)


def _read_record(folder) -> dict[str, Any]:
  """Reads and checks the `host` item; looks at the step's files first."""
  _check_files(folder)
  with _reader(ocp.JsonCheckpointHandler()) as reader:
    record = damage.attempt(reader.restore, folder / 'host')
  if not isinstance(record, dict) or record.pop('crc', None) != crc(record):
    raise damage.Damaged('the checksum of its host item is wrong')
  if not all(isinstance(record.get(k), dict) for k in ('host', 'state_sums')):
    raise damage.Damaged('its host item lacks the host or the checksums')
  if not isinstance(record.get('time'), int | float):
    raise damage.Damaged('its host item lacks the time')
  return record


def _check_files(folder) -> None:
  """Raises `Damaged` for files that Orbax would wait for, or read whole."""
  for root, _, names in os.walk(folder):
    for name in names:
      path = os.path.join(root, name)
      try:
        status = os.stat(path)
      except FileNotFoundError:  # also a link; a running job deletes old steps
        raise damage.Damaged(f'{path} is gone') from None
      if not stat.S_ISREG(status.st_mode):
        raise damage.Damaged(f'{path} is no regular file')
      # Arrays are in folders `d`; all other files are read as a whole.
      if os.path.basename(root) != 'd' and status.st_size > _MAX_BYTES:
        raise damage.Damaged(
          f'{path} has {status.st_size} bytes, more than {_MAX_BYTES}'
        )


def check_place(folder, host: Host, stage: str | None) -> None:
  """Raises `Damaged` for a step of another stage, or of another number."""
  if stage is None:
    return
  for key, place in (('stage', stage), ('step', int(folder.name))):
    if host.get(key, place) != place:  # absent in the oldest ones
      raise damage.Damaged(
        f'its host item is of {key} {foreign.quote(host[key])}, not {place!r}'
      )


def _check_same(folder, saved: dict, like: dict, prefix: str) -> None:
  """Checks `like` against the saved arrays; names the first that differs."""
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


def crc(record: dict[str, Any]) -> int:
  return zlib.crc32(json.dumps(record, sort_keys=True).encode())
