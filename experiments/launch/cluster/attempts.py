"""The attempts of a run: its trainers, their ends, and when to start again.

1. All trainers of an attempt start together and go on until all have ended.
2. If one fails or is lost, the others end by themselves, as they notice it, or
   are killed `GRACE_SECONDS` later.
3. A failed attempt is followed by another one, which continues from the newest
   checkpoint, at most `restarts` times, and after a pause that doubles.

A request to stop is passed on to all trainers as SIGTERM: they save and end
with 75. Imports no Ray.
"""

import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from posttrain.util import errors, preemption

LOST = 'lost'  # the actor of a trainer, or its node
# An attempt that ends with one of these would end with it again, or was asked
# to stop. They are in order: the first that any trainer has is the run's.
FINAL = (errors.INTERRUPTED, errors.USAGE, errors.NO_REWARD, errors.PREEMPTED)
POLL_SECONDS = 0.5
GRACE_SECONDS = 60.0
PAUSES = 1.0, 60.0  # seconds before a restart: the first, the longest

End = int | str | None  # exit code, LOST, or None while it runs


class StartError(Exception):
  """An actor or its node was lost while the trainers started."""


def run(
  start: Callable[[], Any],
  restarts: int,
  stop: preemption.Signal,
  say: Callable[[str], None],
) -> int:
  """Runs attempts until one is final; returns the exit code.

  Args:
    start: starts the trainers of an attempt, a `trainers.Group`.
    restarts: how many attempts may follow the first.
    stop: the request to stop.
    say: prints one line per event.
  """
  pause = PAUSES[0]
  for attempt in range(restarts + 1):
    if attempt:
      say(f'pause of {pause:g} s before restart {attempt} of {restarts}')
      end = time.monotonic() + pause
      while time.monotonic() < end and not stop.requested:
        time.sleep(min(POLL_SECONDS, pause))
      pause = min(2 * pause, PAUSES[1])
    if stop.requested:
      say('stopped before the trainers started')
      return errors.PREEMPTED
    ends, lines = _attempt(start, stop, say)
    code = outcome(ends, stop.requested)
    say(f'trainers ended with {_text(ends)}')
    if code == errors.DONE:
      print(lines[0], flush=True)
      return code
    for index, line in enumerate(lines):
      say(f'trainer {index}: {line}')
    if code is not None:
      return code
  say(f'no restart is left of {restarts}; the same command continues')
  return errors.FAILED


def outcome(ends: Sequence[End], stopped: bool) -> int | None:
  """Returns the exit code of a run with these ends; None = start it again.

  Args:
    ends: of all trainers.
    stopped: whether they were asked to stop.
  """
  if all(end == errors.DONE for end in ends):
    return errors.DONE
  code = next((code for code in FINAL if code in ends), None)
  # Some may have been lost meanwhile: what they had saved is there.
  return errors.PREEMPTED if code is None and stopped else code


def _attempt(
  start: Callable[[], Any], stop: preemption.Signal, say: Callable[[str], None]
) -> tuple[list[End], list[str]]:
  """Starts the trainers; returns their ends and their last lines."""
  try:
    trainers = start()
  except StartError as error:
    return [LOST], [f'{error}']
  asked, limit = False, float('inf')
  try:
    while True:
      ends = trainers.ends()
      if None not in ends:
        return ends, trainers.last_lines()
      failed = any(end not in (None, errors.DONE) for end in ends)
      if failed and limit == float('inf'):
        say(f'a trainer has failed: {_text(ends)}; the others are to end')
        limit = time.monotonic() + GRACE_SECONDS
      if time.monotonic() > limit:
        return ends, trainers.last_lines()
      if stop.requested and not asked:
        say('SIGTERM is passed on to the trainers, which save')
        trainers.signal(signal.SIGTERM)
        asked = True
      time.sleep(POLL_SECONDS)
  finally:
    trainers.close()


def _text(ends: Sequence[End]) -> str:
  words = ['running' if end is None else str(end) for end in ends]
  return f'[{", ".join(words)}]'
