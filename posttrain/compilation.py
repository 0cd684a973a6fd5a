"""A counter of compiled XLA programs, and jax's persistent cache of them."""

import logging
import os
import tempfile
import threading

import jax

from posttrain.util import errors

_COMPILED = '/jax/core/compile/backend_compile_duration'
_counters: list['CompileCounter'] = []  # the open ones
_listening = False


class CompileCounter:
  """A counter of the XLA programs compiled or loaded while it is open.

  A program loaded from the persistent compilation cache counts as well: a
  recompilation bug shows in `count` whatever the cache holds. `seconds` is the
  time of all. A program that jax has in memory does not count. A `with` block
  counts those of its own thread, `open` those of all threads.

    with CompileCounter() as compiles:
      step(state, batch)
    assert compiles.count == 0
  """

  def __init__(self):
    self.count = 0
    self.seconds = 0.0
    self._taken = 0.0
    self._thread: int | None = None  # None = all

  def __enter__(self) -> 'CompileCounter':
    global _listening
    self._thread = threading.get_ident()
    if not _listening:  # registers the listeners with jax, once per process
      _listening = True

      def on_duration(event: str, seconds: float, **_) -> None:
        for counter in list(_counters) if event == _COMPILED else ():
          if counter._thread in (None, threading.get_ident()):
            counter.count += 1
            counter.seconds += seconds

      jax.monitoring.register_event_duration_secs_listener(on_duration)
    _counters.append(self)
    return self

  def __exit__(self, *exc) -> None:
    self.close()

  def open(self) -> 'CompileCounter':
    """Starts counting without a `with` block."""
    self.__enter__()
    self._thread = None
    return self

  def take(self) -> float:
    """Returns the compile seconds since the last call."""
    seconds, self._taken = self.seconds - self._taken, self.seconds
    return seconds

  def close(self) -> None:
    """Stops counting; keeps the numbers."""
    if self in _counters:
      _counters.remove(self)


def enable_compilation_cache(folder: str | None) -> None:
  """Stores every compiled program in `folder`; does nothing if None.

  A folder that cannot be written is a warning: programs are compiled again.
  """
  if folder is None:
    return
  folder = os.path.abspath(os.path.expanduser(folder))
  try:
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
      pass
  except OSError as error:
    logging.getLogger('absl').warning(
      'compilation_cache must be a folder that can be written: got %s: %s; '
      'every start compiles anew',
      errors.quote(folder),
      errors.text(error.strerror),
    )
    return
  jax.config.update('jax_compilation_cache_dir', folder)
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
  jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)
