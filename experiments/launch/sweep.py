"""The runs of a launch on this machine: N at a time, resumable, one table.

    python -m experiments.launch.sweep --jobs=2 \\
        --config=configs/arithmetic.py \\
        --sweep=grpo.optim.lr=1e-4,3e-4 --workdir=runs/lr

is `python -m experiments.launch --on=local`, and takes its flags.

1. A run that has finished with the same config is not run again (finished.json
   in its workdir); any other starts, or continues from its newest checkpoint.
2. A run that saves and stops (exit code 75), loses a process (5) or makes no
   progress (4) starts again, `restarts` times at most.
3. SIGTERM and Ctrl-C are passed on to the runs; none starts after that.
4. At the end, a line on stderr per run that failed, and the table on stdout.

Output of a run goes to log.txt in its workdir. With several hosts, all of its
processes are on this machine.
"""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from experiments.launch import __main__ as launch
from experiments.launch import jobs as jobs_lib
from experiments.launch import options, results
from posttrain.util import disk, errors

LOG = 'log.txt'
_FINISHED = 'finished.json'
_POLL_SECONDS = 0.1
# After a process has failed, for the others of its run to end.
_OTHERS_SECONDS = 120.0
Commands = Callable[[jobs_lib.Job], list[list[str]]]


@dataclasses.dataclass
class Run:
  """A job and its processes.

  Fields:
    job: the job.
    slot: which of the runs at a time it is, from 0.
    processes: those of the latest start, by process id.
    restarts: how often it was started again.
    started: when it first started, `time.monotonic`.
    failed_at: when a process of the latest start failed; None = none has.
  """

  job: jobs_lib.Job
  slot: int
  processes: list[subprocess.Popen[bytes]] = dataclasses.field(
    default_factory=list
  )
  restarts: int = 0
  started: float = dataclasses.field(default_factory=time.monotonic)
  failed_at: float | None = None

  def start(self, commands: Sequence[Sequence[str]]) -> None:
    """Starts all processes; their output is appended to the log."""
    os.makedirs(self.job.workdir, exist_ok=True)
    self.failed_at = None
    gpus = self.job.resources.gpus

    def environment(process: int) -> dict[str, str]:
      """Returns the variables of a process, with GPUs of its own if asked."""
      first = (self.slot * self.job.hosts + process) * gpus
      own = ','.join(map(str, range(first, first + gpus)))
      return {**os.environ, **({'CUDA_VISIBLE_DEVICES': own} if gpus else {})}

    with open(os.path.join(self.job.workdir, LOG), 'ab') as log:
      self.processes = [
        subprocess.Popen(
          words,
          stdin=subprocess.DEVNULL,
          stdout=log,
          stderr=log,
          env=environment(i),
          # The terminal's Ctrl-C reaches this process alone, which passes it
          # on.
          process_group=0,
        )
        for i, words in enumerate(commands)
      ]

  def poll(self) -> list[int] | None:
    """Returns the exit codes of all processes; None while one is running."""
    codes = [process.poll() for process in self.processes]
    ended = [code for code in codes if code is not None]
    if len(ended) == len(codes):
      return ended
    if any(ended):
      self.failed_at = self.failed_at or time.monotonic()
      if time.monotonic() - self.failed_at > _OTHERS_SECONDS:
        self.send(signal.SIGKILL)
    return None

  def send(self, number: int) -> None:
    """Sends a signal to all processes that are running."""
    for process in self.processes:
      if process.poll() is None:
        process.send_signal(number)


def places(job: jobs_lib.Job, port: int | str) -> list[jobs_lib.Place | None]:
  """Returns the places of a job's processes on this machine; None: one."""
  if job.hosts == 1:
    return [None]
  address = f'127.0.0.1:{port}'
  return [jobs_lib.Place(address, i) for i in range(job.hosts)]


def local(python: str) -> Commands:
  """Returns the commands of jobs whose processes are on this machine."""

  def commands(job: jobs_lib.Job) -> list[list[str]]:
    with socket.socket() as sock:
      sock.bind(('127.0.0.1', 0))
      where = places(job, sock.getsockname()[1])
    return [jobs_lib.command(job, python, place) for place in where]

  return commands


class Sweep:
  """Runs jobs, some at a time."""

  def __init__(
    self,
    jobs: Sequence[jobs_lib.Job],
    at_a_time: int = 1,
    restarts: int = 20,
    commands: Commands | None = None,
  ):
    """Starts nothing yet.

    Args:
      jobs: the jobs; finished jobs are left out.
      at_a_time: number of runs at a time.
      restarts: how often each run is started again.
      commands: the processes of a job; None = those of `local`.
    """
    self.waiting: list[jobs_lib.Job] = []
    for job in jobs:
      if is_finished(job):
        _say(f'{job.name}: finished before')
      else:
        self.waiting.append(job)
    self.failures: dict[str, str] = {}  # by the name of the run
    self.stopped: list[str] = []  # runs that a signal has ended
    self.signals: list[int] = []  # that were received
    self._running: list[Run] = []
    self._at_a_time, self._restarts = at_a_time, restarts
    self._commands = commands or local(sys.executable)

  def stop(self, number: int, *_: object) -> None:
    """Passes a signal on to the runs, and starts no more; a handler."""
    self.signals.append(number)
    for run in self._running:
      run.send(number)

  def run(self) -> None:
    """Runs all jobs; returns when none is left, or after a signal."""
    while self._running or (self.waiting and not self.signals):
      while (
        self.waiting
        and not self.signals
        and len(self._running) < self._at_a_time
      ):
        job = self.waiting.pop(0)
        slots = {run.slot for run in self._running}
        run = Run(job, min(set(range(self._at_a_time)) - slots))
        self._running.append(run)
        self._start(run)
        _say(f'{job.name}: started, see {os.path.join(job.workdir, LOG)}')
      for run in list(self._running):
        codes = run.poll()
        if codes is None:
          continue
        again = jobs_lib.starts_again(codes) and not self.signals
        if again and run.restarts < self._restarts:
          run.restarts += 1
          _say(f'{run.job.name}: {_ended(codes)}, starts again')
          self._start(run)
        else:
          self._running.remove(run)
          self._end(run, codes)
      time.sleep(_POLL_SECONDS)

  def _start(self, run: Run) -> None:
    run.start(self._commands(run.job))
    for number in self.signals:  # one that came while it was starting
      run.send(number)

  def _end(self, run: Run, codes: Sequence[int]) -> None:
    name, seconds = run.job.name, time.monotonic() - run.started
    if not any(codes):
      path = os.path.join(run.job.workdir, _FINISHED)
      with disk.replacing(path) as file:
        json.dump(options.resolved(run.job), file)
      _say(f'{name}: done in {seconds:.0f} s')
    elif self.signals:
      self.stopped.append(name)
      _say(f'{name}: {_ended(codes)} after {seconds:.0f} s')
    else:
      log = os.path.join(run.job.workdir, LOG)
      self.failures[name] = f'{_ended(codes)}: {jobs_lib.last_line(log)}'
      _say(f'{name}: failed after {seconds:.0f} s')


def run(
  jobs: Sequence[jobs_lib.Job], folder: str, *args: Any, **options: Any
) -> int:
  """Runs all jobs; prints their table and writes it to the folder.

  Args:
    jobs: the jobs.
    folder: where the results are written.
    *args: those of `Sweep`.
    **options: those of `Sweep`.

  Returns:
    The exit code: 0, 1 if a run has failed, 75 or 130 if runs are left after
    SIGTERM or Ctrl-C.
  """
  code = play(jobs, *args, **options)
  print('\n'.join(results.write(jobs, folder)), flush=True)
  return code


def play(jobs: Sequence[jobs_lib.Job], *args: Any, **options: Any) -> int:
  """Runs a `Sweep`; names the failed runs; returns the exit code of `run`."""
  sweep = Sweep(jobs, *args, **options)
  with handled(sweep.stop):
    sweep.run()
  for name, failure in sweep.failures.items():
    _say(f'error: {name} must end with exit code 0: got {failure}')
  left = len(sweep.stopped) + len(sweep.waiting)
  if left:
    _say(f'stopped; the same command continues {left} of {len(jobs)} runs')
    is_interrupt = signal.SIGINT in sweep.signals
    return errors.INTERRUPTED if is_interrupt else errors.PREEMPTED
  return errors.FAILED if sweep.failures else errors.DONE


def is_finished(job: jobs_lib.Job) -> bool:
  """Returns whether a job has ended with 0 and the same config before."""
  path = os.path.join(job.workdir, _FINISHED)
  if not os.path.exists(os.path.join(job.workdir, 'metrics.jsonl')):
    return False
  try:
    return disk.read_json_object(path) == options.resolved(job)
  except (OSError, ValueError):  # absent, or no JSON: the run tells
    return False


@contextlib.contextmanager
def handled(stop: Callable[..., None]) -> Iterator[None]:
  """Calls a handler at SIGTERM and SIGINT while the block runs."""
  numbers = signal.SIGTERM, signal.SIGINT
  before = [signal.signal(number, stop) for number in numbers]
  try:
    yield
  finally:
    for number, handler in zip(numbers, before, strict=True):
      signal.signal(number, handler)


def _ended(codes: Sequence[int]) -> str:
  """Returns how a run ended, in words."""
  ends = [
    f'killed by signal {-code}' if code < 0 else f'exit code {code}'
    for code in codes
    if code
  ]
  return ' and '.join(dict.fromkeys(ends)) or 'exit code 0'


def _say(line: str) -> None:
  print(line, file=sys.stderr, flush=True)


def main() -> int:
  """Runs the command; returns the exit code."""
  return launch.main([*sys.argv[1:], '--on=local'])


if __name__ == '__main__':
  sys.exit(main())
