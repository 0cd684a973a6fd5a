"""Signs of life on stderr: a bar on a terminal, lines elsewhere.

    with display.show(log_seconds=60.0):
      shown = display.current()
      shown.begin('sft', step=0, steps=400)
      shown.update(1, {'loss': 0.4}, {})
      shown.end()

On a terminal and in a notebook tqdm shows a bar per stage. Elsewhere a line
follows the begin and the first step of a stage, and one the steps after that,
every `log_seconds` at most.
"""

import contextlib
import math
import sys
import time
from collections.abc import Iterator, Mapping

import tqdm


class Display:
  """Progress display of a run."""

  def __init__(self, log_seconds: float, on: bool = True):
    """Shows nothing yet.

    Args:
      log_seconds: seconds between two lines where there is no bar.
      on: whether to show anything.
    """
    self._on, self._log_seconds = on, log_seconds
    self._bar: tqdm.tqdm | None = None

  def begin(self, stage: str, step: int, steps: int) -> None:
    """Shows a stage of `steps` steps, which continues from `step`."""
    self._stage, self._steps, self._next_line = stage, steps, 0.0
    self._start: tuple[int, float] | None = None  # first step that is measured
    if not self._on:
      return
    if sys.stderr.isatty() or 'ipykernel' in sys.modules:
      self._bar = tqdm.tqdm(
        desc=stage, total=steps, initial=step, unit='step', dynamic_ncols=True
      )
    else:
      self._print(f'stage {stage}: {steps - step} steps to go')

  def update(
    self, step: int, numbers: Mapping[str, float], times: Mapping[str, float]
  ) -> None:
    """Shows a finished step.

    Args:
      step: its number.
      numbers: by name, in order.
      times: the seconds of its parts; those of a step that compiles,
        `time/compile`, stand in the place of its tokens per second.
    """
    now, compiled = time.monotonic(), times.get('time/compile', 0.0)
    shown = {k: _short(v) for k, v in numbers.items()}
    speed = shown.pop('tokens/s', None)
    texts = [f'{name} {text}' for name, text in shown.items()]
    if speed is not None and not compiled:
      texts.append(f'{speed} tokens/s')
    if self._bar is not None:
      self._bar.set_postfix_str(', '.join(texts), refresh=False)
      self._bar.update(step - self._bar.n)
    elif self._on and now >= self._next_line:
      self._next_line = now + self._log_seconds if step else 0.0
      parts = [f'step {step} of {self._steps}']
      parts += [f'compiled for {compiled:.0f} s'] if compiled >= 1 else []
      parts += texts
      if self._start is not None and step > self._start[0]:
        seconds = (now - self._start[1]) / (step - self._start[0])
        left = _duration(seconds * (self._steps - step))
        parts.append(f'about {left} left of the stage')
      self._print(f'stage {self._stage}: {", ".join(parts)}')
    if step and self._start is None:
      self._start = step, now

  def end(self) -> None:
    """Closes the stage's bar; does nothing the second time."""
    if self._bar is not None:
      self._bar.close()
    self._bar = None

  def _print(self, text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # stderr is closed
      print(text, file=sys.stderr, flush=True)


_current: Display | None = None


def current() -> Display:
  """Returns the run's display; outside of `show` one that shows nothing."""
  return _current or Display(math.inf, on=False)


@contextlib.contextmanager
def show(log_seconds: float, on: bool = True) -> Iterator[Display]:
  """Shows a run while the block runs; see `Display`."""
  global _current
  _current = Display(log_seconds, on)
  try:
    yield _current
  finally:
    _current.end()
    _current = None


def _short(value: float) -> str:
  return f'{value:,.0f}' if abs(value) >= 1e4 else f'{float(value):.4g}'


def _duration(seconds: float) -> str:
  if seconds < 90:
    return f'{seconds:.0f} s'
  unit, size = ('min', 60) if seconds < 5400 else ('h', 3600)
  return f'{seconds / size:.1f} {unit}'
