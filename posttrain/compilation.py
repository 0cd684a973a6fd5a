"""Compilations: a counter of XLA programs, and the cache that keeps them."""

import os

import jax

_COMPILED = '/jax/core/compile/backend_compile_duration'
_CACHE_HIT = '/jax/compilation_cache/cache_hits'
_counters: list['CompileCounter'] = []  # those that are counting now
_listening = False


class CompileCounter:
  """Counts the XLA programs made ready while it is open.

  A program counts when it was compiled and also when the persistent
  compilation cache had it: both mean that jax met a new program, which is
  what a recompilation bug looks like, and so `count` does not depend on what
  the disk holds. `cached` says how many of them were only loaded, `seconds`
  what all of them took. A call that jax answers from memory counts nothing.

    with CompileCounter() as compiles:
      step(state, batch)
    assert compiles.count == 0
  """

  def __init__(self):
    self.count = 0
    self.cached = 0
    self.seconds = 0.0
    self._taken = 0.0

  def __enter__(self) -> 'CompileCounter':
    _listen()
    _counters.append(self)
    return self

  def __exit__(self, *exc) -> None:
    self.close()

  def open(self) -> 'CompileCounter':
    """Starts counting without a `with` block."""
    return self.__enter__()

  def take(self) -> float:
    """Returns the seconds since the last take."""
    seconds, self._taken = self.seconds - self._taken, self.seconds
    return seconds

  def close(self) -> None:
    """Stops counting; the numbers stay."""
    if self in _counters:
      _counters.remove(self)


def _listen() -> None:
  """Registers this module with jax, once per process."""
  global _listening
  if _listening:
    return
  _listening = True

  def on_duration(event: str, seconds: float, **_) -> None:
    if event == _COMPILED:
      for counter in _counters:
        counter.count += 1
        counter.seconds += seconds

  def on_event(event: str, **_) -> None:
    if event == _CACHE_HIT:
      for counter in _counters:
        counter.cached += 1

  jax.monitoring.register_event_duration_secs_listener(on_duration)
  jax.monitoring.register_event_listener(on_event)


def enable_compilation_cache(folder: str | None) -> None:
  """Keeps every compiled program in `folder`; None does nothing."""
  if folder is None:
    return
  folder = os.path.abspath(os.path.expanduser(folder))
  os.makedirs(folder, exist_ok=True)
  jax.config.update('jax_compilation_cache_dir', folder)
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
  jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)
