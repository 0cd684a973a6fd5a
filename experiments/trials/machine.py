"""Faults of the machine: disks, limits, streams, folders, clocks, caches."""

import contextlib
import os
import pathlib
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator

from experiments.trials import base, kill_resume, signals
from posttrain.checkpoints import reading
from posttrain.util import exits

MAIN = 'posttrain.main'


@contextlib.contextmanager
def small_disk(folder: pathlib.Path, size: str) -> Iterator[bool]:
  """Mounts a file system of some size; yields whether that is allowed."""
  folder.mkdir()
  mount = ['mount', '-t', 'tmpfs', '-o', f'size={size}', 'tmpfs', str(folder)]
  mounted = not subprocess.run(mount, capture_output=True).returncode
  try:
    yield mounted
  finally:
    if mounted:
      subprocess.run(['umount', '-l', folder], check=True)


@base.trial('machine', 'a full disk is one line; what was saved is kept')
def disk_full(scratch: base.Scratch) -> str:
  folder = scratch.folder / 'disk'
  with small_disk(folder, '3m') as mounted:
    argv = scratch.tiny(folder / 'run', '--config.checkpoint.keep_last=100')
    if mounted:
      done = base.command(MAIN, *argv, '--config.sft.steps=400')
    else:
      done = signals.doomed(scratch, 'ENOSPC', 'save', folder / 'run')
    base.expect_line(done, exits.FAILED, 'No space left on device', 'free some')
    sound = len(list(folder.glob('run/checkpoints/sft/*/state')))
    assert sound, 'no checkpoint is left'
  kind = 'a real one' if mounted else 'injected'
  return f'{kind}: exit 1, one line, {sound} checkpoints kept'


@base.trial('machine', 'limits on files and their sizes are one line')
def file_limits(scratch: base.Scratch) -> str:
  def limited(what: int, value: int, name: str):
    cache = f'--config.compilation_cache={scratch.folder / "cache"}'
    return base.command(
      MAIN,
      *scratch.tiny(scratch.folder / name, cache),
      preexec_fn=lambda: resource.setrlimit(what, (value, value)),
    )

  done = limited(resource.RLIMIT_FSIZE, 20_000, 'size')
  base.expect_line(done, exits.FAILED, 'File too large', 'ulimit -f')
  done = limited(resource.RLIMIT_NOFILE, 10, 'number')
  base.expect_line(done, exits.FAILED, 'open files', 'ulimit -n')
  return 'ulimit -f, -n: exit 1, one line with the remedy'


@base.trial('machine', 'too little memory is one line, or works')
def memory_limit(scratch: base.Scratch) -> str:
  seen = []
  for gib in (1, 2, 4):
    size = gib * 2**30
    done = base.command(
      MAIN,
      *scratch.tiny(scratch.folder / f'run{gib}'),
      preexec_fn=lambda size=size: resource.setrlimit(
        resource.RLIMIT_AS, (size, size)
      ),
    )
    if done.code:
      base.expect_line(done, exits.FAILED, 'ulimit -v')
    seen.append(f'{gib} GiB: exit {done.code}')
  return base.words(seen)


@base.trial('machine', 'closed standard streams are no failure')
def closed_streams(scratch: base.Scratch) -> str:
  for closed in ((2,), (0, 1, 2)):
    workdir = scratch.folder / f'run{len(closed)}'

    def close(numbers=closed):
      for number in numbers:
        os.close(number)

    none = {'stdout': None, 'stderr': None}
    done = base.command(MAIN, *scratch.tiny(workdir), preexec_fn=close, **none)
    assert done.code == 0, f'exit {done.code}'
    truth = kill_resume.outcome(scratch.finished_run())
    assert not kill_resume.differences(truth, kill_resume.outcome(workdir))
  return 'stderr, and all three: exit 0, the same bits'


@base.trial('machine', 'a reader that ends first is no failure')
def broken_pipe(scratch: base.Scratch) -> str:
  codes = []
  workdir = scratch.folder / 'run'
  for argv in (
    ['--help'],
    [f'--config={base.TINY}', '--dry_run'],
    scratch.tiny(workdir),
  ):
    reader, writer = os.pipe()
    os.close(reader)
    done = base.command(MAIN, *argv, stdout=writer, stderr=writer)
    os.close(writer)
    codes.append(done.code)
  assert codes == [0, 0, 0], codes
  assert (workdir / 'report.html').exists()
  return '--help, --dry_run and a run: exit 0'


@base.trial('machine', 'a workdir that is removed or cannot be written: a line')
def folders(scratch: base.Scratch) -> str:
  workdir = scratch.folder / 'removed'
  process = base.start(
    MAIN, *scratch.tiny(workdir, '--config.sft.steps=100000')
  )
  rows = workdir / 'metrics.jsonl'
  base.wait_for(lambda: rows.exists() and rows.stat().st_size > 2000)
  shutil.rmtree(workdir, ignore_errors=True)
  done = base.finish(process, 90)
  base.expect_line(done, exits.FAILED, 'metrics.jsonl', 'put it back')
  file = scratch.folder / 'file'
  file.write_text('')
  for place in (file, file / 'below', '/proc/1/nothing'):
    done = base.command(MAIN, *scratch.tiny(place))
    base.expect_line(done, exits.USAGE, '--workdir must be')
  return 'removed: exit 1; a file, below a file, in /proc: exit 2'


@base.trial('machine', 'without a home or cache folder the run goes on')
def no_home(scratch: base.Scratch) -> str:
  argv = [
    x for x in scratch.tiny(scratch.folder / 'run') if 'compilation_c' not in x
  ]
  done = base.command(MAIN, *argv, env={'HOME': '/proc/1/nothing'})
  base.expect(done, exits.DONE, 'compilation_cache')
  return 'exit 0, one warning'


@base.trial('machine', 'a backend that is not there is one line')
def no_backend(scratch: base.Scratch) -> str:
  done = base.command(
    MAIN, *scratch.tiny(scratch.folder / 'run'), env={'JAX_PLATFORMS': 'cuda'}
  )
  base.expect_line(done, exits.FAILED, 'JAX_PLATFORMS', 'jax[cuda12]')
  return done.last


@base.trial('machine', 'garbage in the compilation cache changes nothing')
def cache_garbage(scratch: base.Scratch) -> str:
  scratch.finished_run()
  cache = pathlib.Path(shutil.copytree(scratch.cache, scratch.folder / 'cache'))
  files = [path for path in sorted(cache.rglob('*')) if path.is_file()]
  for i, path in enumerate(files):
    data = bytearray(path.read_bytes())
    cut = data[: len(data) // 2]
    for at in range(0, len(data), 997):
      data[at] ^= 0xFF
    path.write_bytes([b'', b'garbage', bytes(cut), bytes(data)][i % 4])
  workdir = scratch.folder / 'run'
  argv = scratch.tiny(workdir, f'--config.compilation_cache={cache}')
  done = base.command(MAIN, *argv)
  base.expect(done, exits.DONE)
  truth = kill_resume.outcome(scratch.finished_run())
  assert not kill_resume.differences(truth, kill_resume.outcome(workdir))
  return f'{len(files)} files empty, cut or changed: exit 0, the same bits'


JUMPS = """
import sys, time
from posttrain import main
real, calls = time.time, iter(range(10**9))
# Back and forth by four minutes, and back by years. (Orbax gives a save ten
# minutes of this clock: a longer jump forward ends the run in one line.)
back = float(sys.argv.pop())
time.time = lambda: real() - back - next(calls) // 9 % 2 * 240
sys.exit(main.main(sys.argv[1:]))
"""


@base.trial('machine', 'a clock that jumps changes nothing')
def clock(scratch: base.Scratch) -> str:
  truth = kill_resume.outcome(scratch.finished_run())
  for back in (0, 300_000_000):  # seconds
    workdir = scratch.folder / f'back_{back}'
    done = subprocess.run(
      [sys.executable, '-c', JUMPS, *scratch.tiny(workdir), str(back)],
      cwd=base.ROOT,
      capture_output=True,
      text=True,
    )
    assert done.returncode == 0, done.stderr[-500:]
    wrong = kill_resume.differences(truth, kill_resume.outcome(workdir))
    assert not wrong, wrong
  host = reading.read_host(str(workdir))
  assert host['stage'] == 'grpo', f'the last stage is {host["stage"]}'
  return 'jumps of four minutes, from ten years ago as well: the same bits'
