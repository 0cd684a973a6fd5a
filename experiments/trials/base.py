"""What trials share: the registry, commands in processes, a finished run.

    @base.trial('resume', 'a run whose newest step is damaged continues')
    def damaged_step(scratch: base.Scratch) -> str:
      workdir = scratch.finished_run()
      ...                                      # inject the fault
      done = base.command('posttrain.main', *scratch.tiny(workdir))
      base.expect_line(done, base.USAGE, 'that folder')
      return 'exit 2, the folder is named'

A trial returns a line about what happened, raises AssertionError where that
falls short of its promise, and `NotTried` where a package is missing. Trials
use commands, the files of a workdir and the server's HTTP alone.
"""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping

ROOT = pathlib.Path(__file__).resolve().parents[2]
MAIN, TINY = 'posttrain.main', 'configs/arithmetic.py:tiny'
# Exit codes of the commands.
DONE, FAILED, USAGE, NO_REWARD, STALLED, PEER_LOST = range(6)
PREEMPTED, INTERRUPTED = 75, 130


class NotTried(Exception):
  """What a trial needs is not installed."""


@dataclasses.dataclass(frozen=True)
class Trial:
  """One promise and the function that tries to break it."""

  area: str
  promise: str
  run: Callable[['Scratch'], str]

  @property
  def name(self) -> str:
    return f'{self.area}.{self.run.__name__}'


TRIALS: list[Trial] = []


def trial(area: str, promise: str) -> Callable:
  """Registers a function of a `Scratch` as a trial."""

  def register(run: Callable[['Scratch'], str]) -> Callable:
    TRIALS.append(Trial(area, promise, run))
    return run

  return register


@dataclasses.dataclass(frozen=True)
class Done:
  """A finished command."""

  code: int  # -N: ended by signal N
  out: str
  err: str
  seconds: float

  @property
  def error(self) -> str:
    """The error line of stderr; '' if it has none."""
    lines = self.err.splitlines()
    return next((x for x in lines[::-1] if x.startswith('error: ')), '')


def start(
  module: str,
  *argv: str | os.PathLike[str],
  env: Mapping[str, str] | None = None,
  **options,
) -> subprocess.Popen:
  """Starts `python -m module argv` in the repository; pipes are text.

  Args:
    module: a module of posttrain or experiments.
    *argv: its arguments.
    env: added to this process's variables.
    **options: of `subprocess.Popen`.
  """
  pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE}
  paths = [str(ROOT), os.environ.get('PYTHONPATH', '')]
  path = os.pathsep.join(filter(None, paths))
  return subprocess.Popen(
    [sys.executable, '-m', module, *map(os.fspath, argv)],
    **{'cwd': ROOT, 'text': True, 'errors': 'replace', **pipes, **options},
    env={**os.environ, 'PYTHONPATH': path, **(env or {})},
  )


def finish(process: subprocess.Popen, timeout: float = 300) -> Done:
  """Waits for a command; kills it after `timeout` seconds (code -9)."""
  begin = time.monotonic()
  try:
    out, err = process.communicate(timeout=timeout)
  except subprocess.TimeoutExpired:
    process.kill()
    out, err = process.communicate()
  seconds = time.monotonic() - begin
  return Done(process.returncode, out or '', err or '', seconds)


def command(module: str, *argv, timeout: float = 300, **options) -> Done:
  """Runs `python -m module argv` to its end; see `start`."""
  return finish(start(module, *argv, **options), timeout)


def expect(done: Done, code: int, *words: str) -> None:
  """Checks exit code and words of stderr."""
  assert done.code == code, f'exit {done.code}, not {code}: {done.err[-900:]}'
  for word in words:
    assert word in done.err, f'{word!r} is not in: {done.err[-900:]}'


def expect_line(done: Done, code: int, *words: str) -> None:
  """Checks that a command ended with an error line that has these words."""
  expect(done, code)
  assert done.error, f'no error line: {done.err[-900:]}'
  assert len(done.error) < 2000, f'a line of {len(done.error)} characters'
  for word in words:
    assert word in done.error, f'{word!r} is not in: {done.error}'


class Scratch:
  """A trial's folder, and what all trials share."""

  def __init__(self, folder: pathlib.Path, shared: 'Shared'):
    self.folder, self._shared = folder, shared
    folder.mkdir(parents=True)

  def tiny(self, workdir: str | os.PathLike[str], *argv: str) -> list[str]:
    """Returns arguments of `posttrain.main`: two small stages, 4 + 2 steps."""
    return [
      f'--config={TINY}',
      f'--workdir={os.fspath(workdir)}',
      f'--config.compilation_cache={self._shared.cache}',
      '--config.checkpoint.every=2',
      '--config.metrics.progress=False',
      '--config.sft.steps=4',
      '--config.sft.optim.warmup_steps=1',
      '--config.grpo.optim.warmup_steps=0',
      '--config.grpo.steps=2',
      *argv,
    ]

  def finished_run(self) -> pathlib.Path:
    """Returns a new copy of the workdir of a finished `tiny` run."""
    copy = self.folder / f'finished{len(list(self.folder.glob("finished*")))}'
    return pathlib.Path(shutil.copytree(self._shared.run(self), copy))


class Shared:
  """What is made once for all trials: a compilation cache, a finished run."""

  def __init__(self, folder: pathlib.Path):
    self.cache = folder / 'compiled'
    self._run, self._lock = folder / 'run', threading.Lock()

  def run(self, scratch: Scratch) -> pathlib.Path:
    """Returns the workdir of the finished run, which no trial may change."""
    with self._lock:
      if not self._run.exists():
        workdir = self._run.with_name('run_unfinished')
        done = command(MAIN, *scratch.tiny(workdir))
        assert done.code == 0, done.err
        workdir.rename(self._run)
    return self._run


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
  """Waits until a condition holds; AssertionError after so many seconds."""
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end, f'nothing happened within {seconds} s'
    time.sleep(0.05)


def rows(workdir: pathlib.Path) -> list[dict]:
  """Returns the whole rows of a run's metrics.jsonl; [] if it is missing."""
  path = workdir / 'metrics.jsonl'
  lines = path.read_text().split('\n')[:-1] if path.exists() else []
  return [json.loads(line) for line in lines]
