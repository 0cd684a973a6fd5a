"""Whose error it is: one that the user can mend, or a bug."""

import sys


def report(error: ValueError | RuntimeError, *more: str) -> int:
  """Prints an error of ours as one line; returns the exit code of a program.

  2 where the command is wrong (ValueError), 1 where what it asked for failed.
  A bug is raised on.

  Args:
    error: that has been caught.
    *more: as of `is_ours`.
  """
  if not is_ours(error, *more):
    raise error
  print(f'error: {error}', file=sys.stderr)
  return 2 if isinstance(error, ValueError) else 1


def is_ours(error: Exception, *more: str) -> bool:
  """Whether our own code raised it, to say something to the user.

  Args:
    error: with its traceback.
    *more: prefixes of modules that are ours besides `posttrain`.
  """
  trace = error.__traceback__
  while trace.tb_next:
    trace = trace.tb_next
  raised_in = trace.tb_frame.f_globals.get('__name__', '')
  return raised_in == '__main__' or raised_in.startswith(('posttrain.', *more))
