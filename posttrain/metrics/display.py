"""Signs of life on stderr: a bar on a terminal, lines elsewhere.

    shown = display.Display('sft', step=0, steps=400, log_seconds=60.0)
    shown.update(1, {'loss': 0.4}, {})
    shown.end()

On a terminal and in a notebook tqdm shows a bar per stage. Elsewhere a line
follows the begin and the first step of a stage, and one the steps after that,
every `log_seconds` at most.
"""

import contextlib
import sys
import time
from collections.abc import Mapping

import tqdm


class Display:
  """Progress display of a stage."""

  def __init__(
    self, stage: str, step: int, steps: int, log_seconds: float, on: bool = True
  ):
    """Shows that the stage begins.

    Args:
      stage: its name.
      step: the step that it continues from.
      steps: the number of its steps.
      log_seconds: seconds between two lines where there is no bar.
      on: whether to show anything.
    """
    self._stage, self._steps, self._on = stage, steps, on
    self._log_seconds, self._next_line = log_seconds, 0.0
    self._start: tuple[int, float] | None = None  # first step that is measured
    self._bar: tqdm.tqdm | None = None
    if on and (sys.stderr.isatty() or 'ipykernel' in sys.modules):
      self._bar = tqdm.tqdm(
        desc=stage, total=steps, initial=step, unit='step', dynamic_ncols=True
      )
    else:
      self.say(f'{steps - step} steps to go')

  def update(
    self, step: int, numbers: Mapping[str, float], times: Mapping[str, float]
  ) -> None:
    """Shows a finished step.

    Args:
      step: its number.
      numbers: by name, in order.
      times: the seconds of its parts; `time/compile` is shown.
    """
    now, compiled = time.monotonic(), times.get('time/compile', 0.0)
    texts = [
      f'{name} {x:,.0f}' if abs(x) >= 1e4 else f'{name} {float(x):.4g}'
      for name, x in numbers.items()
    ]
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
        left = tqdm.tqdm.format_interval(seconds * (self._steps - step))
        parts.append(f'about {left} left of the stage')
      self.say(', '.join(parts))
    if step and self._start is None:
      self._start = step, now

  def end(self) -> None:
    """Closes the stage's bar; does nothing the second time."""
    if self._bar is not None:
      self._bar.close()
    self._bar = None

  def say(self, text: str) -> None:
    """Prints a line about the stage, above its bar."""
    if self._bar is not None:
      self._bar.write(f'stage {self._stage}: {text}', file=sys.stderr)
    elif self._on:
      with contextlib.suppress(OSError, ValueError):  # stderr is closed
        print(f'stage {self._stage}: {text}', file=sys.stderr, flush=True)
