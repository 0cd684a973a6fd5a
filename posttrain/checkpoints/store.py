"""Checkpoints: `folder/<step>/{state,host}`, through Orbax.

`state` is a pytree of arrays (a `TrainState`). `host` is JSON: the caller's
dict, which makes a step self-describing, and the checksums of both items.

Saving:
  1. checksum every array where it lives;
  2. Orbax copies the arrays off the device, and the call returns;
  3. Orbax writes to a temporary folder and renames it once it is complete;
  4. Orbax deletes the steps that the keep rules drop.

Reading: every function checks the files of its step. One whose files cannot be
read, or differ from those written, is `Damaged`; an error of the storage
service is raised as it is. Storage detects missing and truncated files, but no
flipped bit inside an array; checksums do.

Restoring: the newest step that is sound. A damaged step is renamed to
`<step>.damaged`, with a warning, if an older step is sound, and is an error if
none is. A sound step of other shapes is an error.
"""

import contextlib
import dataclasses
import errno
import json
import logging
import os
import re
import time
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from posttrain import processes, schema, sharding, tree
from posttrain.util import memory, watchdog

# Orbax logs what it saves and reads, through absl.
logging.getLogger('absl').addFilter(
  lambda record: (
    record.levelno >= logging.ERROR or '/orbax/' not in record.pathname
  )
)

State = Any  # a pytree of arrays
Host = dict[str, Any]
# Errors of the storage service that do not mean that a file is damaged.
_TRANSIENT = 'CANCELLED|DEADLINE_EXCEEDED|UNAVAILABLE|RESOURCE_EXHAUSTED'

# Errors of the operating system that concern one file, not the process.
_OF_A_FILE = (
  FileNotFoundError,
  NotADirectoryError,
  IsADirectoryError,
  PermissionError,
)


class Damaged(Exception):
  """A step that cannot be read, or differs from the data written."""


def _attempt(read: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
  """Calls `read`; turns its errors about broken files into `Damaged`.

  Those of the process, or of a service, are raised as they are.
  """
  try:
    return read(*args, **kwargs)
  except Exception as error:  # plain `Exception` is raised as well
    # TensorStore adds its whole specification.
    text = str(error).partition(' See full TensorStore details')[0][:200]
    if isinstance(error, OSError):
      damaged = isinstance(error, _OF_A_FILE) or error.errno == errno.EIO
    else:
      damaged = not (
        isinstance(error, MemoryError)
        or memory.is_oom(error)
        or re.search(_TRANSIENT, text)
      )
    if not damaged:
      raise
    raise Damaged(
      f'{type(error).__name__}: {" ".join(text.split())}'
    ) from error


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

  def read_headers(folder) -> None:
    with _reader() as reader:
      _check_arrays(
        reader, folder, _read_record(folder), {'params': like}, 'params/'
      )

  read_named(find(path), read_headers)


def read_host(path: str) -> Host:
  """Returns the `host` dict of a step; `path` as in `restore_params`."""
  return read_named(find(path), _read_record)['host']


def steps(stage: str) -> list[epath.Path]:
  """Returns the folders of a stage that are named by a step, oldest first."""
  folder = local(stage)
  folders = folder.iterdir() if folder.is_dir() else ()
  numbered = (x for x in folders if re.fullmatch('0|[1-9][0-9]*', x.name))
  return sorted((x for x in numbered if x.is_dir()), key=lambda x: int(x.name))


def newest_host(folder: str) -> Host | None:
  """Returns the newest `host` dict of a stage's folder that can be read.

  None if the folder does not exist or has none. The arrays are not read.
  """
  for step in reversed(steps(folder)):
    try:
      return _read_record(step)['host']
    except Damaged:
      continue
  return None


def is_sound(folder: str) -> bool:
  """Returns whether a step can be read and its checksums agree.

  Reads all arrays, each split over the devices of all processes, which must all
  call it.
  """
  step = local(folder)

  def shapes() -> State:
    _read_record(step)
    with _reader() as reader:
      saved = _saved_tree(reader, step)
    try:
      return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), saved
      )
    except (AttributeError, TypeError):
      raise Damaged('one of its values is no array') from None

  try:
    read(step, sharding.spread(processes.together(shapes)))
  except Damaged:
    return False
  return True


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
  root = local(path)
  if _is_step(root):
    return root
  checkpoints = root / 'checkpoints'
  stages = checkpoints.iterdir() if checkpoints.is_dir() else [root]
  newest = [
    step for stage in stages if (step := newest_step(str(stage))) is not None
  ]
  if not newest:
    raise ValueError(f'{path!r:.200} must be or hold a checkpoint: got none')

  def saved_at(step) -> float:
    try:
      return _read_record(step)['time']
    except Damaged:
      return 0.0

  last = max(newest, key=saved_at)
  number = best_step(last)
  best = last if number is None else last.parent / str(number)
  if not _is_step(best):
    raise ValueError(f'{best} must hold the best step of its stage: got none')
  return best


def newest_step(stage: str) -> epath.Path | None:
  """Returns the newest step of a stage; warns of newer folders without one."""
  for step in reversed(steps(stage)):
    if _is_step(step):
      return step
    warnings.warn(f'{step} is not used: it holds no step', stacklevel=3)
  return None


def local(path: str) -> epath.Path:
  """Returns an absolute path; Orbax takes no other."""
  return epath.Path(os.path.realpath(os.path.expanduser(path)))


def _is_step(folder: epath.Path) -> bool:
  return (folder / 'state').exists() and (folder / 'host').exists()


def best_step(folder) -> int | None:
  """Returns the best step by a step's `host`; None if no evaluation chose."""
  try:
    best = _read_record(folder)['host'].get('best')
  except Damaged:
    return None
  return None if best is None else best['step']


def read_named(folder, read, *args) -> Any:
  """Reads one given step, without falling back to an older one."""
  try:
    return read(folder, *args)
  except Damaged as error:
    raise ValueError(
      f'{folder} must be a sound checkpoint: it is missing or damaged ({error})'
    ) from error


def read(folder, like: State, prefix='') -> tuple[State, Host]:
  """Reads and checks a step's arrays with the prefix; may raise `Damaged`."""
  first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  like = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=getattr(x, 'sharding', None) or first
    ),
    like,
  )

  def read_arrays() -> tuple[State, dict[str, Any]]:
    record = _read_record(folder)
    with _reader() as reader:
      _check_arrays(reader, folder, record, like, prefix)
      state = _attempt(
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
      raise Damaged(f'the checksum of {path!r} is wrong')
  return state, record['host']


def _reader() -> ocp.Checkpointer:
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
  return ocp.Checkpointer(
    ocp.PyTreeCheckpointHandler(), multiprocessing_options=options
  )


def _check_arrays(reader, folder, record, like: State, prefix) -> None:
  """Compares the names, shapes and dtypes of a step's arrays with `like`.

  With a prefix, those of the policy alone: not of a critic beside it.

  Raises:
    Damaged: the arrays differ from those that were saved.
    ValueError: the arrays differ from `like`; names the first one.
  """
  saved, like = tree.flat(_saved_tree(reader, folder)), tree.flat(like)
  if saved.keys() != record['state_sums'].keys():
    raise Damaged('its arrays differ from those written')
  for path in dict.fromkeys([*like, *saved]):
    want, got = (
      f'{np.dtype(side[path].dtype)}{list(side[path].shape)}'
      if path in side
      else 'nothing'
      for side in (like, saved)
    )
    is_critic = prefix and path.startswith('params/critic/')
    if path.startswith(prefix) and want != got and not is_critic:
      raise ValueError(
        f"the checkpoint {folder} must hold this run's arrays: got {got} "
        f'at {path!r}, expected {want}'
      )


def _saved_tree(reader, folder) -> Any:
  """Returns the names, shapes and dtypes of a step's arrays."""
  saved = _attempt(reader.metadata, folder / 'state')
  try:
    return saved.item_metadata.tree
  except AttributeError:  # Orbax gives None for some damage
    raise Damaged('the names of its arrays cannot be read') from None


def _read_record(folder) -> dict[str, Any]:
  """Reads and checks the `host` item; starts no backend of jax."""
  text = _attempt((epath.Path(folder) / 'host' / 'metadata').read_text)
  record = _attempt(json.loads, text)
  if not isinstance(record, dict) or record.pop('crc', None) != crc(record):
    raise Damaged('the checksum of its host item is wrong')
  return record


def crc(record: dict[str, Any]) -> int:
  return zlib.crc32(json.dumps(record, sort_keys=True).encode())


@dataclasses.dataclass
class _Named:
  """Orbax's preservation policy that keeps steps which change."""

  steps: set[int | None] = dataclasses.field(default_factory=set)

  def should_preserve(self, checkpoints, *, context) -> list[bool]:
    del context
    return [x.step in self.steps for x in checkpoints]


class Checkpointer:
  """Saves and restores the steps of one folder."""

  def __init__(self, folder: str, keep: schema.Checkpoint):
    """Opens or creates a folder, and deletes half-written steps in it.

    Args:
      folder: the stage's folder.
      keep: which steps are kept.
    """
    self._folder = local(folder)
    policies = ocp.checkpoint_managers
    self._best, self._keep_last = _Named(), keep.keep_last
    rules = [policies.LatestN(keep.keep_last), self._best]
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
      host: JSON-able dict; tuples are restored as lists, keys as strings. The
        step that its `best` names, see `find`, is kept, and so are the
        best steps of the other latest steps.
    """
    self._began = time.monotonic()
    for old in processes.on(0, self.steps):  # all must delete the same
      if old >= step:
        self.wait()
        self._manager.delete(old)
    if best := host.get('best'):
      self.wait()  # the latest steps are read

      def others() -> list[int | None]:  # of the latest steps that it keeps
        latest = self.steps()[::-1][: self._keep_last - 1]
        return [best_step(self._folder / str(x)) for x in latest]

      self._best.steps = {best['step'], *processes.on(0, others)}
    record = {
      'host': json.loads(json.dumps(host)),
      'state_sums': tree.checksums(state),
      'time': time.time(),
    }
    record['crc'] = crc(record)
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
      return read_named(self._folder / str(step), read, like)
    damaged = []

    def rename() -> None:
      for number in damaged:
        target = self._folder / f'{number}.damaged'
        target.rmtree(missing_ok=True)
        (self._folder / str(number)).rename(target)

    for number in reversed(processes.on(0, self.steps)):
      folder = self._folder / str(number)
      try:
        state, host = read(folder, like)
      except Damaged as error:
        warnings.warn(
          f'checkpoint {folder} is damaged and not used: {error}', stacklevel=2
        )
        damaged.append(number)
      else:
        processes.on(0, rename)
        if damaged:
          self._manager.reload()
        return state, host
    if damaged:
      raise ValueError(
        f'{self._folder} must hold a sound checkpoint: got steps {damaged}, '
        'all damaged; rename or delete the folder to start the stage again'
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
