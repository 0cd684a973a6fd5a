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
"""

import contextlib
import dataclasses
import json
import time
import warnings

import orbax.checkpoint as ocp

from posttrain import processes, schema, tree
from posttrain.checkpoints import reading
from posttrain.util import watchdog


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
    self._folder = reading.local(folder)
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

  def save(self, step: int, state: reading.State, host: reading.Host) -> None:
    """Starts to save; returns once `state` may be overwritten or donated.

    Deletes existing steps from `step` on first: the run abandoned them when it
    restored an older one.

    Args:
      step: the step's number, which names its folder.
      state: pytree of arrays.
      host: JSON-able dict; tuples are restored as lists, keys as strings. The
        step that its `best` names, see `reading.find`, is kept, and so are the
        best steps of the other latest steps.
    """
    self._began = time.monotonic()
    for old in processes.on(0, self.steps):  # all must delete the same
      if old >= step:
        self.wait()
        self._manager.delete(old)
    if best := host.get('best'):
      self.wait()  # the latest steps are read
      self._best.steps = {best['step'], *processes.on(0, self._named)}
    record = {
      'host': json.loads(json.dumps(host)),
      'state_sums': tree.checksums(state),
      'time': time.time(),
    }
    record['crc'] = reading.crc(record)
    with self._waiting():  # for the save before
      saved = self._manager.save(
        step,
        args=ocp.args.Composite(
          state=ocp.args.PyTreeSave(state), host=ocp.args.JsonSave(record)
        ),
      )
    assert saved, f'Orbax declined to save step {step} to {self._folder}'

  def _named(self) -> list[int | None]:
    """Returns the best steps of the latest steps that a save keeps."""
    latest = self.steps()[::-1][: self._keep_last - 1]
    return [reading.best_step(self._folder / str(x)) for x in latest]

  def steps(self) -> list[int]:
    """Returns the steps in the folder, oldest first."""
    return sorted(self._manager.all_steps())

  def latest(self) -> int | None:
    """Returns the newest step, sound or damaged; None without steps."""
    return max(self.steps(), default=None)

  def restore(
    self, like: reading.State, step: int | None = None
  ) -> tuple[reading.State, reading.Host] | None:
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
      return reading.read_named(self._folder / str(step), reading.read, like)
    damaged = []
    for number in reversed(processes.on(0, self.steps)):
      folder = self._folder / str(number)
      try:
        state, host = reading.read(folder, like)
      except reading.Damaged as error:
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
    def rename() -> None:
      for number in damaged:
        target = self._folder / f'{number}.damaged'
        target.rmtree(missing_ok=True)
        (self._folder / str(number)).rename(target)

    processes.on(0, rename)
    if damaged:
      self._manager.reload()
