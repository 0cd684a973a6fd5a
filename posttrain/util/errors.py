"""One-line reports of expected errors; bugs keep their traceback."""

import sys


def report(error: ValueError | RuntimeError, *packages: str) -> int:
  """Prints an expected error as one line; returns the command's exit code.

  2 for a wrong command line or config (ValueError), 1 for a failure. An error
  from other code is a bug and is raised again.

  Args:
    error: a caught error with its traceback.
    *packages: prefixes of module names besides `posttrain.`.
  """
  if not is_expected(error, *packages):
    raise error
  print(f'error: {error}', file=sys.stderr)
  return 2 if isinstance(error, ValueError) else 1


def is_expected(error: Exception, *packages: str) -> bool:
  """Returns whether posttrain's own code raised the error.

  Args:
    error: a caught error with its traceback.
    *packages: prefixes of module names besides `posttrain.`.
  """
  trace = error.__traceback__
  assert trace is not None, 'the error must have been raised'
  while trace.tb_next:
    trace = trace.tb_next
  module = trace.tb_frame.f_globals.get('__name__', '')
  return module == '__main__' or module.startswith(('posttrain.', *packages))
