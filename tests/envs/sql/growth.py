"""How the time of a function grows with its text."""

import time


def ratio(fn, text: str, times: int = 4) -> float:
  """Returns how many times as long `fn` takes for a text `times` as long.

  In CPU time, the least of three; `times` = linear, `times`^2 = quadratic.
  Calls of less than a millisecond count as one millisecond.
  """
  short, long = (
    max(min(_seconds(fn, x) for _ in range(3)), 1e-3)
    for x in (text, text * times)
  )
  return long / short


def _seconds(fn, text: str) -> float:
  start = time.process_time()
  fn(text)
  return time.process_time() - start
