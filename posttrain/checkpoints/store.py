"""Checkpoints: `folder/<step>/{state,host}`, through Orbax.

`state` is a pytree of arrays (a `TrainState`). `host` is JSON: the caller's
dict, which makes a step self-describing, and the checksums of both items.

Saving:
  1. checksum every array where it lives;
  2. Orbax copies the arrays off the device, and the call returns;
  3. Orbax writes to a temporary folder and renames it once it is complete;
  4. Orbax deletes the steps that the keep rules drop.

Restoring: the newest step that can be read and whose checksums agree. Storage
detects missing and truncated files, but no flipped bit inside an array;
checksums do. A damaged step is renamed to `<step>.damaged`, with a warning, if
an older step is sound, and is an error if none is. A sound step of other
shapes, and an error of the storage service, are raised.

Steps are folders named by a number. A file or a link of such a name is renamed
to `<name>.stray`, with a warning, before anything is saved.
"""

import contextlib
import json
import time
import warnings
import zlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from posttrain import schema, tree
from posttrain.checkpoints import damage, step_folders
from posttrain.util import foreign, logs, watchdog

logs.quiet('orbax')  # it logs every save, through absl

State = Any  # a pytree of arrays
Host = dict[str, Any]


class Checkpointer:
  """Saves and restores the steps of one folder."""

  def __init__(
    self, folder: str, keep: schema.Checkpoint, stage: str | None = None
  ):
    """Opens or creates a folder, and deletes half-written steps in it.

    Args:
      folder: the stage's folder.
      keep: which steps are kept.
      stage: see `newest_host`; None = steps of any stage are restored.
    """
    self._folder, self._stage = step_folders.local(folder), stage
    step_folders.move_strays(self._folder)
    policies = ocp.checkpoint_managers
    rules = [policies.LatestN(keep.keep_last)]
    if keep.keep_every is not None:
      rules.append(policies.EveryNSteps(keep.keep_every))
    self._manager = ocp.CheckpointManager(
      self._folder,
      item_handlers={
        'state': ocp.PyTreeCheckpointHandler(),
        'host': ocp.JsonCheckpointHandler(),
      },
      options=ocp.CheckpointManagerOptions(
        preservation_policy=policies.AnyPreservationPolicy(rules),
        cleanup_tmp_directories=True,
        async_options=ocp.options.AsyncOptions(
          post_finalization_callback=self._finish
        ),
      ),
    )
    # Duration of the last save, until it was on disk; 0 before the first.
    self.seconds, self._began = 0.0, 0.0

  def save(self, step: int, state: State, host: Host) -> None:
    """Starts to save; returns once `state` may be overwritten or donated.

    Deletes existing steps from `step` on first: the run abandoned them when it
    restored an older one.

    Args:
      step: the step's number, which names its folder.
      state: pytree of arrays.
      host: JSON-able dict; tuples are restored as lists, keys as strings.
    """
    self._began = time.monotonic()
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
    with self._waiting():  # for the save before
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
    """Returns the newest step, sound or damaged; None without steps."""
    return max(self.steps(), default=None)

  def restore(
    self, like: State, step: int | None = None
  ) -> tuple[State, Host] | None:
    """Restores the newest sound step.

    Args:
      like: pytree of arrays or ShapeDtypeStructs of the saved shapes and
        dtypes; the result takes its structure and shardings.
      step: the one step to restore; None = the newest sound one.

    Returns:
      (state, host), or None if the folder has no step. Damaged steps newer
      than the result are renamed to `<step>.damaged`.

    Raises:
      ValueError: `step` is missing, all are damaged, or `like` differs.
    """
    self.wait()
    if step is not None:
      return _read_named(self._folder / str(step), _read, like)
    damaged = []
    for number in reversed(self.steps()):
      folder = self._folder / str(number)
      try:
        state, host = _read(folder, like)
        _check_place(folder, host, self._stage)
      except damage.Damaged as error:
        warnings.warn(
          f'checkpoint {folder} is damaged and not used: {error}', stacklevel=2
        )
        damaged.append(number)
      else:
        self._rename_damaged(damaged)
        return state, host
    if damaged:
      raise ValueError(
        f'{self._folder} must hold a sound checkpoint: got steps {damaged}, '
        'all damaged or unreadable; rename or delete the folder to start the '
        'stage again'
      )
    return None

  def wait(self) -> None:
    """Blocks until all steps are on disk; raises errors of the writes."""
    with self._waiting():
      self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits, then frees Orbax's threads."""
    with self._waiting():
      self._manager.close()

  def _waiting(self) -> contextlib.AbstractContextManager[None]:
    return watchdog.waiting(lambda: f'the file system of {self._folder}')

  def _finish(self) -> None:
    self.seconds = time.monotonic() - self._began

  def _rename_damaged(self, damaged: list[int]) -> None:
    for number in damaged if jax.process_index() == 0 else ():
      target = self._folder / f'{number}.damaged'
      target.rmtree(missing_ok=True)
      (self._folder / str(number)).rename(target)
    if damaged:
      self._manager.reload()


def restore_params(path: str, like: State, *, average: bool = False) -> State:
  """Restores the `params` of a run, for `init: PATH`.

  Args:
    path: a workdir (its stage saved last), one of its `checkpoints/<stage>`
      folders (the newest step), or a step's folder.
    like: the params to restore, as arrays or ShapeDtypeStructs.
    average: whether to restore their moving average instead, which evaluation
      uses.

  Raises:
    ValueError: the step is missing or damaged, or its params differ from
      `like`; names the first that differs.
  """
  item = 'average' if average else 'params'
  state, _ = _read_named(find(path), _read, {item: like}, f'{item}/')
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
  _read_named(find(path), _read_metadata, {'params': like}, 'params/')


def read_host(path: str) -> Host:
  """Returns the `host` dict of a step; `path` as in `restore_params`."""
  return _read_named(find(path), _read_record)['host']


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
      _check_place(step, host, stage)
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

  Reads all arrays to the host, which is as much memory as a save takes.

  Args:
    folder: the step's folder.
    stage: see `newest_host`.
  """
  step = step_folders.local(folder)
  try:
    record = _read_record(step)
    _check_place(step, record['host'], stage)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
      on_host = ocp.RestoreArgs(restore_type=np.ndarray)
      like = jax.tree.map(lambda _: on_host, _saved_tree(reader, step))
      args = ocp.args.PyTreeRestore(restore_args=like)
      state = damage.attempt(reader.restore, step / 'state', args=args)
  except damage.Damaged:
    return False
  leaves = jax.tree.leaves(state)
  return (
    all(isinstance(leaf, np.ndarray) for leaf in leaves)
    and tree.checksums(state) == record['state_sums']
  )


def read_sums(path: str) -> dict[str, int]:
  """Returns the checksums of a step's parameters, by path in the state."""
  sums = _read_named(find(path), _read_record)['state_sums']
  return {k: total for k, total in sums.items() if k.startswith('params/')}


def find(path: str) -> epath.Path:
  """Resolves a workdir, stage folder or step folder to a step folder."""
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
  return steps[0] if len(steps) == 1 else max(steps, key=_saved_at)


def _saved_at(folder) -> float:
  try:
    return _read_record(folder)['time']
  except damage.Damaged:
    return 0.0


def _read_named(folder, read, *args) -> Any:
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


def _read(folder, like: State, prefix='') -> tuple[State, Host]:
  """Reads and checks a step's arrays with the prefix; may raise `Damaged`."""
  like = jax.tree.map(_abstract, like)
  record = _read_record(folder)
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
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
  for path, total in tree.checksums(state).items():
    if total != record['state_sums'][path]:
      raise damage.Damaged(f'the checksum of {path!r} is wrong')
  return state, record['host']


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
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
    _check_metadata(reader, folder, record, like, prefix)


def _read_record(folder) -> dict[str, Any]:
  """Reads and checks the `host` item."""
  with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
    record = damage.attempt(reader.restore, folder / 'host')
  if not isinstance(record, dict) or record.pop('crc', None) != _crc(record):
    raise damage.Damaged('the checksum of its host item is wrong')
  if not all(isinstance(record.get(k), dict) for k in ('host', 'state_sums')):
    raise damage.Damaged('its host item lacks the host or the checksums')
  return record


def _check_place(folder, host: Host, stage: str | None) -> None:
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


def _crc(record: dict[str, Any]) -> int:
  return zlib.crc32(json.dumps(record, sort_keys=True).encode())
