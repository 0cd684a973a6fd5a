"""Exit codes, expected errors as one line, and values shortened for messages.

Expected are failures of the machine (OSError, MemoryError), and a ValueError or
RuntimeError that posttrain's own code raises; anything else is a bug and keeps
its traceback. Every message quotes a value of a user through `quote` or `text`:
one line of 200 characters.
"""

import contextlib
import difflib
import dis
import glob
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable

# Exit codes of all commands.
DONE = 0
FAILED = 1  # the run or the world failed; the message says how
USAGE = 2  # the command line, the config or a file it names is wrong
# No rollout of a stage had a reward, because reward functions or episodes
# failed.
NO_REWARD = 3
STALLED = 4  # a run that made no progress was ended
PEER_LOST = 5  # another process of the run has ended or does not answer
PREEMPTED = 75  # saved and stopped; start it again (EX_TEMPFAIL)
INTERRUPTED = 130  # Ctrl-C

# Prefixes of the names of our modules; that of a recipe file begins so.
RECIPE = 'recipe_'
OWN = 'posttrain.', 'configs.', RECIPE
LIMIT = 200  # characters of a quoted value
_LONGEST = 4000  # characters of a message
_INSTALLED = (
  '<frozen ',
  *(sysconfig.get_path(x) for x in ('stdlib', 'purelib', 'platlib')),
)


def report(error: Exception, *packages: str) -> int:
  """Prints an expected error as one line; returns the command's exit code.

  2 for a wrong command line or config (ValueError), 1 for a failure, or the
  error's `exit_code`. Any other error is raised again.

  Args:
    error: a caught error with its traceback.
    *packages: prefixes of module names besides `OWN`.
  """
  message = text(error, _LONGEST) or type(error).__name__
  is_machine = isinstance(error, OSError | MemoryError)
  is_own = isinstance(error, ValueError | RuntimeError)
  if 'xla_bridge' in str(traceback.extract_tb(error.__traceback__, -1)):
    message = (
      f'JAX_PLATFORMS must name devices that jax finds: {message}; '
      'JAX_PLATFORMS=cpu needs none, and without it jax chooses'
    )
  elif not (is_machine or (is_own and is_expected(error, *packages))):
    raise error
  print(f'error: {message}', file=sys.stderr)
  code = USAGE if isinstance(error, ValueError) else FAILED
  return getattr(error, 'exit_code', code)


def is_expected(error: BaseException, *packages: str) -> bool:
  """Returns whether posttrain's own code raised the error.

  Args:
    error: a caught error with its traceback.
    *packages: prefixes of module names besides `OWN`.
  """
  trace = error.__traceback__
  assert trace is not None, 'the error must have been raised'
  while trace.tb_next:
    trace = trace.tb_next
  module = trace.tb_frame.f_globals.get('__name__', '')
  # Libraries in C have no frames, and jax removes its own.
  instruction = trace.tb_frame.f_code.co_code[trace.tb_lasti]
  return dis.opname[instruction] == 'RAISE_VARARGS' and (
    module == '__main__' or module.startswith((*OWN, *packages))
  )


def text(value: object, limit: int = LIMIT) -> str:
  """Returns `str(value)` as one line of at most `limit` characters."""
  return _short(str, value, limit)


def quote(value: object, limit: int = LIMIT) -> str:
  """Returns `repr(value)` as one line of at most `limit` characters."""
  return _short(repr, value, limit)


def describe(error: BaseException, limit: int = LIMIT) -> str:
  """Returns 'Type: message' of an exception, shortened."""
  name, message = type(error).__name__, text(error, limit)
  return f'{name}: {message}' if message else name


def place(error: BaseException) -> str:
  """Returns 'file.py:12', where an exception was raised; '' if unknown.

  The last place outside of Python's library and of installed packages, if there
  is one: that is where a user looks.
  """
  frames = traceback.extract_tb(error.__traceback__, limit=-30)
  own = [x for x in frames if not x.filename.startswith(_INSTALLED)]
  for frame in (own or frames)[-1:]:
    return f'{os.path.basename(frame.filename)}:{frame.lineno}'
  return ''


def nearest(name: str, known: Iterable[str], cutoff: float = 0.65) -> str:
  """Returns '; did you mean NAME?' of the nearest known name, '' if none is."""
  others = [x for x in known if x != name]
  near = difflib.get_close_matches(name, others, 1, cutoff)
  return f'; did you mean {near[0]}?' if near else ''


def near_path(path: str) -> str:
  """Returns '; did you mean PATH?' of a path that exists, '' if none is near.

  It differs from this one, which does not exist, in one name.
  """
  path = os.path.expanduser(path)
  folder, name = os.path.split(path)
  while not os.path.isdir(folder or '.'):
    folder, name = os.path.split(folder)
  start = os.path.join(folder, '')
  end = path[len(start + name) :]
  known = glob.glob(f'*{end}', root_dir=start or '.')
  near = difflib.get_close_matches(name + end, known, 1, 0.8)
  return f'; did you mean {start}{near[0]}?' if near else ''


def pointer(path: str | os.PathLike[str]) -> str:
  """Returns what to do where a file is a pointer of Git LFS; '' elsewhere."""
  with contextlib.suppress(OSError), open(path, 'rb') as file:
    if file.read(24) == b'version https://git-lfs.':
      return f'; {path} is a pointer of Git LFS: run git lfs pull'
  return ''


def _short(convert, value: object, limit: int) -> str:
  try:
    whole = convert(value)
  except Exception as error:  # of a user's class
    kind = type(value).__name__
    return f'<{kind}, whose {convert.__name__} raises {type(error).__name__}>'
  line = ' '.join(whole[: limit + 1].split())
  if len(whole) <= limit:
    return line
  return f'{line[:limit]}... ({len(whole) - limit} more characters)'
