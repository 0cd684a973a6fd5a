"""Whose error it is: one that the user can mend, or a bug."""


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
