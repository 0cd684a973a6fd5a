"""One-line reports of expected errors; bugs keep their traceback.

Two kinds are expected: a ValueError or RuntimeError that posttrain's own code
raises, and a failure of the machine (disk, memory, device, limits of the
process), whichever library it comes through.
"""

import errno
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator

from posttrain.util import exits, foreign

_LONGEST = 4000  # characters of a message
# errno -> the remedy.
_REMEDIES = {
  errno.ENOSPC: 'free some space, or lower config.checkpoint.keep_last',
  errno.EDQUOT: 'raise the quota, or lower config.checkpoint.keep_last',
  errno.EFBIG: 'raise the limit on the size of files (ulimit -f)',
  errno.EMFILE: 'raise the limit on open files (ulimit -n)',
  errno.ENFILE: "raise the machine's limit on open files",
  errno.EROFS: 'name a folder that can be written',
  errno.EACCES: 'change the permissions, or name another path',
  errno.EPERM: 'change the permissions, or name another path',
  errno.ENOENT: 'put it back, or name one that is there',
  errno.ENOTDIR: 'name a folder',
  errno.EISDIR: 'name a file',
  errno.ENAMETOOLONG: 'use a shorter path',
  errno.EIO: 'check the disk',
  errno.ESTALE: 'check the network file system',
  errno.ENOMEM: (
    'raise the limit on memory (ulimit -v), or use a machine with more memory'
  ),
  errno.EAGAIN: 'raise the limit on processes (ulimit -u)',
}
# Packages whose errors wrap those of the operating system.
_WRAPPERS = ('jax', 'jaxlib', 'orbax', 'tensorstore', 'threading')
# Text -> number, of errors whose text libraries put into other errors.
_WRAPPED = {
  os.strerror(number): number
  for number in (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EMFILE,
    errno.EROFS,
    errno.EIO,
    errno.ESTALE,
    errno.ENOMEM,
  )
}
_MEMORY = (
  'lower config.STAGE.batch.micro_batch_tokens or config.STAGE.rollout.slots,'
  ' or raise ulimit -v'
)
# A pattern of messages of jax, XLA and the interpreter -> (problem, remedy).
_MESSAGES = (
  (
    r'Unable to initialize backend|Unknown backend|no devices found',
    'the device must be usable',
    'install jax for it (jax[cuda12], jax[tpu]), or change JAX_PLATFORMS',
  ),
  (
    r'completed \d+/\d+ futures but timed out',
    'a checkpoint must be written in time, and a clock that jumps counts',
    'start the same command again; it continues from the step before',
  ),
  (
    r"can't start new thread|Resource temporarily unavailable",
    'the process must be allowed to start threads',
    'raise its limits (ulimit -u, ulimit -v)',
  ),
  (
    r'std::bad_alloc|Cannot allocate memory|Unable to allocate',
    'the machine must have enough memory',
    _MEMORY,
  ),
)


def report(error: Exception, *packages: str) -> int:
  """Prints an expected error as one line; returns the command's exit code.

  2 for a wrong command line or config (ValueError), 1 for a failure, or the
  error's `exit_code`. Any other error is a bug and is raised again.

  Args:
    error: a caught error with its traceback.
    *packages: prefixes of module names besides `posttrain.`.
  """
  expected = isinstance(error, ValueError | RuntimeError)
  if expected and is_expected(error, *packages):
    print(f'error: {foreign.text(error, _LONGEST)}', file=sys.stderr)
    code = exits.USAGE if isinstance(error, ValueError) else exits.FAILED
    return getattr(error, 'exit_code', code)
  failure = machine_failure(error)
  if failure is None:
    raise error
  print(f'error: {failure}', file=sys.stderr)
  # Objects of libraries warn when they are deleted half-initialized.
  warnings.simplefilter('ignore', RuntimeWarning)
  sys.unraisablehook = lambda *_: None
  logging.getLogger('asyncio').disabled = True
  return exits.FAILED


def is_expected(error: BaseException, *packages: str) -> bool:
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


def machine_failure(error: BaseException) -> str | None:
  """Returns a failure of the machine and its remedy; None for other errors.

  Libraries wrap these failures (Orbax raises a ValueError whose text has that
  of the operating system), so the causes are searched, and the texts of what
  those libraries raise.
  """
  chain = list(_chain(error))
  for cause in chain:
    if isinstance(cause, MemoryError):
      return _line('the machine must have enough memory', cause, _MEMORY)
    if isinstance(cause, OSError) and cause.errno in _REMEDIES:
      return _line('', cause, _REMEDIES[cause.errno])
  for cause in filter(_wraps_failures, chain):
    text = foreign.text(cause, 2000)
    for pattern, problem, remedy in _MESSAGES:
      if re.search(pattern, text):
        return _line(problem, cause, remedy)
    for words, number in _WRAPPED.items():
      if words in text:
        return _line(words, cause, _REMEDIES[number])
  return None


def _chain(error: BaseException) -> Iterator[BaseException]:
  """Yields an error and its causes, once each."""
  seen: set[int] = set()
  todo: list[BaseException | None] = [error]
  while todo:
    cause = todo.pop(0)
    if cause is None or id(cause) in seen:
      continue
    seen.add(id(cause))
    yield cause
    todo.append(cause.__cause__)
    if isinstance(cause, BaseExceptionGroup):
      todo += cause.exceptions


def _wraps_failures(error: BaseException) -> bool:
  """Returns whether a library raised it whose errors wrap those of the OS."""
  trace = error.__traceback__
  while trace is not None and trace.tb_next:
    trace = trace.tb_next
  module = trace.tb_frame.f_globals.get('__name__', '') if trace else ''
  sources = (str(module), type(error).__module__)
  return any(source.split('.')[0] in _WRAPPERS for source in sources)


def _line(problem: str, error: BaseException, remedy: str) -> str:
  text = foreign.text(error) or foreign.kind(error)
  if isinstance(error, OSError):
    text = error.strerror or text
    if error.filename is not None:
      text = f'{text}: {foreign.quote(error.filename)}'
  if place := foreign.place(error):
    text = f'{text} ({place})'
  return f'{problem}: {text}; {remedy}' if problem else f'{text}; {remedy}'
