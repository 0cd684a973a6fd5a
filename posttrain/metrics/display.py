"""Signs of life on stderr: a bar on a terminal, lines elsewhere.

    with display.show({'sft': 400, 'grpo': 300}, log_seconds=60.0):
      progress = display.current()
      progress.begin('sft', 0, pace.Pace(400))
      progress.update(1, {'loss': 0.4}, {})
      progress.end()

A thread reads the phase of the run once a second from `util.watchdog`: that of
the main thread, or compilation.

- On a terminal and in a notebook a bar shows it beside the step. Other
  output to stderr, such as warnings, goes above the bar, line by line.
- Elsewhere there is a line two seconds after a stage has begun, one after its
  first step, and one every `log_seconds`, during a long phase as well, such as
  reading data before the first stage.
"""

import contextlib
import logging
import math
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

import tqdm

from posttrain.metrics import pace as paces
from posttrain.util import watchdog

# Phases whose name is not their text.
_TEXTS = {
  'setup': 'loading models',
  'eval': 'evaluating',
  'save': 'saving',
  'export': 'exporting tokens',
}
_FIRST = 2.0  # seconds until the first line of a stage
_BEFORE = 10.0  # until one before the first stage: mistakes are one line alone
_TICK = 1.0  # seconds between two looks
_LONG = 5.0  # seconds of a phase from which on a line names it
_MEASURED = 3  # steps before the estimate of a stage
_WIDTH = len('compiling')  # width of most phases, so that the bar does not jump


class Display:
  """Progress display of a run."""

  def __init__(
    self, stages: Mapping[str, int], log_seconds: float, on: bool = True
  ):
    """Shows nothing yet.

    Args:
      stages: name -> number of steps, in order.
      log_seconds: seconds between two lines where there is no bar.
      on: whether to show anything.
    """
    self.interactive = on and is_interactive()
    self._stages, self._on = stages, on
    self._log_seconds = math.inf if self.interactive else log_seconds
    self._next_line = time.monotonic() + min(_BEFORE, log_seconds)
    self._lock = threading.RLock()
    self._stage: str | None = None
    self._first = self._step = 0
    self._texts: list[str] = []  # numbers of the latest step
    self._pace = paces.Pace(0)
    self._bar: Any = None
    self._compiling: float | None = None  # since when
    self._compiled = 0.0  # seconds of compiling that no line has shown

  def begin(self, stage: str, step: int, pace: paces.Pace) -> None:
    """Shows a stage.

    Args:
      stage: its name.
      step: the step that it continues from.
      pace: of its steps.
    """
    with self._lock:
      self._stage, self._step, self._pace, self._texts = stage, step, pace, []
      self._first, self._compiled = step, 0.0
      if not self.interactive:
        self._next_line = min(self._next_line, time.monotonic() + _FIRST)
      else:
        self._bar = tqdm.tqdm(
          desc=stage,
          total=pace.steps,
          initial=step,
          unit='step',
          dynamic_ncols=True,
          file=_below(sys.stderr),
        )

  def update(
    self, step: int, numbers: Mapping[str, float], times: Mapping[str, float]
  ) -> None:
    """Shows a finished step.

    Args:
      step: its number.
      numbers: by name, in order.
      times: the seconds of its parts, see `Pace.add`.
    """
    with self._lock:
      before, self._step, now = self._step, step, time.monotonic()
      compiled = times.get('time/compile', 0.0)
      self._compiled += compiled
      # The tokens of a step that compiles were not slow.
      hidden = ('tokens/s',) if compiled else ()
      self._texts = [
        _number(*item) for item in numbers.items() if item[0] not in hidden
      ]
      self._pace.add(step, now, times)
      if self._bar is not None:
        self._bar.set_postfix_str(', '.join(self._texts), refresh=False)
        self._bar.update(step - self._bar.n)
      elif self._on and before == self._first < step:
        self._next_line = now
        self.beat(finished=True)
      if self._pace.measured == _MEASURED and step < self._pace.steps:
        self._estimate()

  def beat(self, finished: bool = False) -> None:
    """Shows the phase of the run.

    Args:
      finished: whether a step has just ended: the seconds of compiling take
        the place of the phase.
    """
    now = time.monotonic()
    with self._lock:
      text, seconds = self._activity(now)
      if self._bar is not None:
        text = '' if text == watchdog.NO_PHASE else text
        text = f'{self._stage} {text:<{_WIDTH}}'
        # A notebook keeps all that is written; a terminal's clock goes on.
        if sys.stderr.isatty() or text != self._bar.desc:
          self._bar.set_description_str(text)
      elif self._on and now >= self._next_line:
        self._next_line = now + self._log_seconds
        phase = ''
        if finished:
          total, self._compiled = self._compiled, 0.0
          phase = f'compiled for {total:.0f} s' if total >= 1 else ''
        elif not self._texts or seconds >= _LONG:
          phase = f'{text} for {seconds:.0f} s' if seconds >= 1 else text
        self._print(self._line(phase))

  def end(self) -> None:
    """Closes the stage's bar; does nothing the second time."""
    with self._lock:
      if self._bar is not None:
        self._bar.set_description_str(self._stage)
        self._bar.close()
      self._bar, self._stage, self._texts = None, None, []

  def _activity(self, now: float) -> tuple[str, float]:
    """Returns the phase of the run, and its seconds so far."""
    text, start = watchdog.activity()
    if not watchdog.compiles():
      self._compiling = None
      return _TEXTS.get(text, text), now - start
    if self._compiling is None or self._compiling < start:
      self._compiling = now
    return 'compiling', now - self._compiling

  def _line(self, phase: str) -> str:
    """Returns stage, step, phase, numbers, and the time that is left."""
    if self._stage is None:
      return phase
    steps, at = self._pace.steps, ''
    if self._texts:
      at = f'step {self._step} of {steps}'
    parts = [at, phase, *self._texts, self._left()]
    return f'stage {self._stage}: {", ".join(filter(None, parts))}'

  def _left(self) -> str:
    """Returns the time left of the run; '' while it is unknown.

    Of a later stage nothing is known before its first step, so that the time is
    a lower bound; if patience may end this stage, an upper bound of its own.
    """
    left = self._pace.left(self._step)
    if left is None:
      return ''
    names = list(self._stages)
    index = names.index(self._stage) if self._stage in names else len(names)
    later = names[index + 1 :]
    bound = 'at most' if self._pace.may_end else 'about'
    if not later:
      return f'{bound} {_duration(left)} left of the run'
    follows = ' and '.join(f'{x} ({self._stages[x]} steps)' for x in later)
    verb = 'follows' if len(later) == 1 else 'follow'
    known = f'at least {_duration(left)} left of the run'
    if self._pace.may_end:
      known = f'at most {_duration(left)} left of the stage'
    return f'{known}: stage {follows} {verb}'

  def _estimate(self) -> None:
    """Prints, once, the estimated time of the stage."""
    total, seconds = self._pace.left(self._first), self._pace.step_seconds
    if total is not None and seconds is not None:
      rest = 'the rest of ' if self._first else ''
      bound = 'at most' if self._pace.may_end else 'about'
      self._print(
        f'{bound} {_duration(total)} for {rest}stage {self._stage} '
        f'({_short(seconds)} s a step), evaluations included'
      )

  def _print(self, text: str) -> None:
    if self._on:
      print(text, file=sys.stderr, flush=True)


_current: Display | None = None


def current() -> Display:
  """Returns the run's display; outside of `show` one that shows nothing."""
  return _current or Display({}, math.inf, on=False)


@contextlib.contextmanager
def show(
  stages: Mapping[str, int], log_seconds: float, on: bool = True
) -> Iterator[Display]:
  """Shows a run while the block runs; see `Display`."""
  global _current
  display = Display(stages, log_seconds, on)
  if not on:
    yield display
    return
  stopped = threading.Event()

  def look() -> None:
    while not stopped.wait(min(_TICK, log_seconds)):
      with contextlib.suppress(OSError, ValueError):  # stderr is closed
        display.beat()

  thread = threading.Thread(target=look, name='display', daemon=True)
  above = _above_bars() if display.interactive else contextlib.nullcontext()
  _current = display
  with above:
    thread.start()
    try:
      yield display
    finally:
      stopped.set()
      thread.join()
      display.end()
      _current = None


def is_interactive() -> bool:
  """Returns whether a bar can be shown: on a terminal, or in a notebook."""
  return sys.stderr.isatty() or 'ipykernel' in sys.modules


class _Above:
  """A text stream whose whole lines are written above the bars."""

  def __init__(self, stream: TextIO):
    self.stream, self._rest = stream, ''
    self._lock = threading.RLock()

  def __getattr__(self, name: str) -> Any:
    return getattr(self.stream, name)

  def write(self, text: str) -> int:
    with self._lock:
      *lines, self._rest = (self._rest + text).split('\n')
      if lines:
        tqdm.tqdm.write('\n'.join(lines), file=self.stream)
    return len(text)

  def writelines(self, lines: Any) -> None:
    for line in lines:
      self.write(line)

  def flush(self) -> None:
    self.stream.flush()

  def close_line(self) -> None:
    """Writes an unfinished line."""
    if self._rest:
      self.write('\n')


def _below(stream: Any) -> TextIO:
  """Returns the stream that bars are written to."""
  return stream.stream if isinstance(stream, _Above) else stream


@contextlib.contextmanager
def _above_bars() -> Iterator[None]:
  """Redirects stderr to above the bars."""
  below = sys.stderr
  above = _Above(below)
  with contextlib.redirect_stderr(above):
    handlers = [
      *logging.getLogger().handlers,
      *logging.getLogger('absl').handlers,
      logging.lastResort,
    ]
    moved = [x for x in handlers if getattr(x, 'stream', None) is below]
    for handler in moved:
      handler.setStream(above)
    try:
      yield
    finally:
      above.close_line()
      for handler in moved:
        handler.setStream(below)


def _number(name: str, value: float) -> str:
  text = _short(float(value))
  return f'{text} {name}' if name == 'tokens/s' else f'{name} {text}'


def _short(value: float) -> str:
  return f'{value:,.0f}' if abs(value) >= 1e4 else f'{value:.4g}'


def _duration(seconds: float) -> str:
  if seconds < 90:
    return f'{seconds:.0f} s'
  unit, size = ('min', 60) if seconds < 5400 else ('h', 3600)
  return f'{seconds / size:.1f} {unit}'
