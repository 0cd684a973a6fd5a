"""The parent of an isolated reward function's process; see `isolated`.

    run  <-- SIGTERM -->  supervisor  -->  worker  -->  its children

It ends with the run or with the worker, and kills what the worker has started
before it ends itself, also sessions of their own and orphans: as a subreaper,
it inherits those. Two cases it does not cover: a function that kills it (its
worker and their process group end, children with a session of their own do
not), and children of another user, which it may not kill. Linux only.
"""

import contextlib
import ctypes
import os
import pathlib
import signal
import time

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)
SECONDS = 5.0  # the most time to kill all children
_SIGNALS = {signal.SIGTERM, signal.SIGCHLD}


def start(parent: int, descriptor: int) -> None:
  """Starts the worker, and returns in its process; the caller supervises it.

  Args:
    parent: the id of the run's process.
    descriptor: the worker's socket, which the supervisor closes.
  """
  mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
  _prctl(_PR_SET_CHILD_SUBREAPER, 1)
  end_with(parent, signal.SIGTERM)
  supervisor = os.getpid()
  worker = os.fork()
  if not worker:
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    end_with(supervisor, signal.SIGKILL)
    return
  try:
    os.close(descriptor)
    code = _wait(worker)
    _kill_children()
    if code < 0:  # ends as the worker did
      signal.pthread_sigmask(signal.SIG_SETMASK, mask)
      os.kill(supervisor, -code)
    os._exit(abs(code))
  finally:
    os._exit(1)


def end_with(parent: int, number: int) -> None:
  """Sends a signal to this process when its parent has ended."""
  _prctl(_PR_SET_PDEATHSIG, number)
  if os.getppid() != parent:  # it has ended already
    os._exit(1)


def _prctl(option: int, value: int) -> None:
  ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _wait(worker: int) -> int:
  """Returns the worker's exit code; -SIGTERM if this process is to end."""
  while signal.sigwait(_SIGNALS) == signal.SIGCHLD:
    with contextlib.suppress(ChildProcessError):
      while (ended := os.waitpid(-1, os.WNOHANG))[0]:  # orphans as well
        if ended[0] == worker:
          return os.waitstatus_to_exitcode(ended[1])
  return -signal.SIGTERM


def _kill_children() -> None:
  """Kills all descendants, and the processes that they start meanwhile."""
  end = time.monotonic() + SECONDS
  while time.monotonic() < end:
    for pid in _descendants():
      with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
    try:
      while os.waitpid(-1, os.WNOHANG)[0]:
        pass
    except ChildProcessError:  # none is left
      return
    time.sleep(0.001)


def _descendants() -> list[int]:
  """Returns the ids of the processes below this one."""
  children: dict[int, list[int]] = {}
  for path in pathlib.Path('/proc').glob('[0-9]*'):
    with contextlib.suppress(OSError):
      # 'pid (name) state parent ...'; the name may have any character.
      stat = (path / 'stat').read_bytes().rpartition(b')')[2].split()
      children.setdefault(int(stat[1]), []).append(int(path.name))
  pids = list(children.get(os.getpid(), []))
  for pid in pids:  # grows
    pids += children.get(pid, [])
  return pids
