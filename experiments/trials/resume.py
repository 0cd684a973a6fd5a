"""Faults of a workdir and of recipes: locks, options, damaged files."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
from collections.abc import Iterator

from experiments.trials import base, many
from posttrain.util import exits

MAIN = 'posttrain.main'


def rows(workdir: pathlib.Path) -> list[tuple[str, int, float | None]]:
  """Returns stage, step and loss of each row of metrics."""
  text = (workdir / 'metrics.jsonl').read_text()
  values = [json.loads(line) for line in text.splitlines()]
  return [(x['stage'], x['step'], x.get('loss/total')) for x in values]


def unfinished(scratch: base.Scratch) -> pathlib.Path:
  """Returns a copy of the finished run whose last stage lacks its last step."""
  workdir = scratch.finished_run()
  shutil.rmtree(workdir / 'checkpoints/grpo')
  return workdir


@contextlib.contextmanager
def holder(scratch: base.Scratch, workdir: pathlib.Path) -> Iterator:
  """Runs a command that trains in a workdir until the block ends."""
  argv = scratch.tiny(workdir, '--config.sft.steps=100000')
  null = subprocess.DEVNULL
  process = base.start(MAIN, *argv, stdout=null, stderr=null)
  try:
    base.wait_for(lambda: (workdir / 'metrics.jsonl').exists(), 120)
    yield process
  finally:
    process.kill()
    process.wait()


@base.trial('resume', 'two runs never write to one workdir')
def lock(scratch: base.Scratch) -> str:
  workdir = scratch.folder / 'run'
  argv = scratch.tiny(workdir, '--config.sft.steps=100000')
  with holder(scratch, workdir) as process:
    for case in ('new', 'resumed'):
      done = base.command(MAIN, *argv, timeout=60)
      base.expect_line(done, exits.USAGE, f'process {process.pid} on', 'since')
      if case == 'new':  # a step is saved, so that the next one would resume
        base.wait_for(lambda: has_step(workdir / 'checkpoints/sft'), 60)
    assert base.command(MAIN, *argv, '--dry_run').code == 0
    process.send_signal(signal.SIGKILL)
    process.wait()
    after = base.start(MAIN, *argv)
    base.wait_for(lambda: f'"pid": {after.pid},' in read(workdir / 'lock'), 60)
    done = base.stop(after)
  assert done.code == exits.PREEMPTED, done.err
  steps = [step for _, step, _ in rows(workdir)]
  assert steps == list(range(len(steps))), steps
  return (
    'a second run: exit 2, names pid, host and time; after kill -9 the next '
    f'one has the lock at once; {len(steps)} rows, each step once'
  )


def has_step(stage: pathlib.Path) -> bool:
  """Returns whether a stage's folder has a finished step."""
  return stage.exists() and any(x.name.isdigit() for x in stage.iterdir())


def read(path: pathlib.Path) -> str:
  """Returns a file's text, '' if it is missing."""
  return path.read_text() if path.exists() else ''


@base.trial('resume', 'other options are refused, whatever was deleted')
def options(scratch: base.Scratch) -> str:
  gone = (
    (),
    ('config.json',),
    ('metrics.jsonl',),
    ('config.json', 'metrics.jsonl'),
  )
  changes = {
    'config.sft.optim.lr': '0.5',
    'config.grpo.envs.arithmetic.group_size': '2',
    'config.seed': '9',
  }
  cases = []
  for names in gone:
    for key, value in changes.items():
      workdir = scratch.finished_run()
      for name in names:
        (workdir / name).unlink()
      argv = scratch.tiny(workdir, f'--{key}={value}')
      cases.append((workdir, names, key, argv))
  for (workdir, names, key, _), done in zip(
    cases, many.run([argv for *_, argv in cases]), strict=True
  ):
    base.expect(done, exits.USAGE, f'changed {key} (')
    assert not set(names) & set(os.listdir(workdir)), 'it was written to'
  return f'{len(cases)} of {len(cases)} refused by name'


def cut(path: pathlib.Path) -> None:
  """Cuts a file in half."""
  os.truncate(path, path.stat().st_size // 2)


def replace_by_file(folder: pathlib.Path) -> None:
  """Puts a file in the place of a folder."""
  shutil.rmtree(folder)
  folder.write_text('x')


# What happens to the last step of a stage.
DAMAGE = {
  'host cut': lambda step: cut(step / 'host/metadata'),
  'host deep': lambda step: (step / 'host/metadata').write_text('[' * 10**5),
  'host a file': lambda step: replace_by_file(step / 'host'),
  'state a file': lambda step: replace_by_file(step / 'state'),
  'all gone': lambda step: [shutil.rmtree(step), step.mkdir()],
}
# What lies beside the steps.
STRAYS = {
  'a file 99': lambda stage: (stage / '99').write_text('x'),
  'a link 99': lambda stage: (stage / '99').symlink_to('nowhere'),
  'a name 9²': lambda stage: (stage / '9²').mkdir(),
}


@base.trial('resume', 'a damaged step or a stray file ends no run')
def damage(scratch: base.Scratch) -> str:
  kinds, workdirs = {**DAMAGE, **STRAYS}, []
  for name, harm in kinds.items():
    workdirs.append(scratch.finished_run())
    sft = workdirs[-1] / 'checkpoints/sft'
    harm(sft / '4' if name in DAMAGE else sft)
  truth = rows(scratch.finished_run())
  results = many.run([scratch.tiny(workdir) for workdir in workdirs])
  for name, workdir, done in zip(kinds, workdirs, results, strict=True):
    assert done.code == 0, f'{name}: {done.err[-600:]}'
    if name in DAMAGE and 'state' not in name:
      assert "'sft' stays finished" in done.err, f'{name}: {done.err[-600:]}'
    assert rows(workdir) == truth, f'{name}: the metrics changed'
  return f'{len(kinds)} kinds: the finished run stays finished'


@base.trial('resume', 'a run with a damaged last step trains on, bit for bit')
def damaged_then_trained(scratch: base.Scratch) -> str:
  truth, workdir = rows(scratch.finished_run()), unfinished(scratch)
  DAMAGE['host cut'](workdir / 'checkpoints/sft/4')
  STRAYS['a file 99'](workdir / 'checkpoints/sft')
  done = base.command(MAIN, *scratch.tiny(workdir))
  base.expect(done, exits.DONE, '4 is damaged', '99.stray')
  assert rows(workdir) == truth, 'other losses'
  return f'warned, trained again from step 2; {len(truth)} rows equal'


@base.trial('resume', 'a workdir may be named by a relative path')
def relative_workdir(scratch: base.Scratch) -> str:
  truth, workdir = rows(scratch.finished_run()), unfinished(scratch)
  done = base.command(
    MAIN, *scratch.tiny(os.path.relpath(workdir, base.ROOT)), cwd=base.ROOT
  )
  base.expect(done, exits.DONE)
  assert 'damaged' not in done.err, done.err[-900:]
  assert rows(workdir) == truth, 'other losses'
  saved = (workdir / 'checkpoints/sft/4').stat().st_mtime
  other = scratch.finished_run() / 'checkpoints/sft/4'
  assert abs(saved - other.stat().st_mtime) < 1, 'the first stage ran again'
  return f'the last stage alone is trained; {len(truth)} rows equal'


@base.trial('resume', 'steps of another stage are none of this one')
def swapped_stages(scratch: base.Scratch) -> str:
  workdir = scratch.finished_run()
  stages = workdir / 'checkpoints'
  (stages / 'sft').rename(stages / 'x')
  (stages / 'grpo').rename(stages / 'sft')
  (stages / 'x').rename(stages / 'grpo')
  (done,) = many.run([scratch.tiny(workdir)])
  base.expect_line(
    done, exits.USAGE, "stage 'sft' must end before stage 'grpo'"
  )
  base.expect(done, exits.USAGE, "of stage 'grpo', not 'sft'")
  return 'exit 2; warnings name the stages that saved the steps'


# What is in the way of a file or folder of a run.
OBSTACLES = {
  'metrics.jsonl': lambda path: path.mkdir(),
  'report.html': lambda path: path.mkdir(),
  'config.json': lambda path: path.mkdir(),
  'lock': lambda path: path.mkdir(),
  'rollouts': lambda path: path.write_text('x'),
  'checkpoints': lambda path: path.write_text('x'),
}


@base.trial('resume', 'what is in the way of a file is named before training')
def obstacles(scratch: base.Scratch) -> str:
  workdirs, victim = [], scratch.folder / 'victim'
  victim.write_text('precious')
  for i, (name, put) in enumerate(OBSTACLES.items()):
    for kind, place in (
      ('kind', put),
      ('link', lambda x: x.symlink_to(victim)),
    ):
      workdirs.append((scratch.folder / f'{kind}{i}', name))
      workdirs[-1][0].mkdir()
      place(workdirs[-1][0] / name)
  results = many.run([scratch.tiny(workdir) for workdir, _ in workdirs])
  for (workdir, name), done in zip(workdirs, results, strict=True):
    base.expect_line(done, exits.USAGE, str(workdir / name))
    assert not (workdir / 'metrics.jsonl').is_file() or name == 'metrics.jsonl'
  assert victim.read_text() == 'precious', 'a link was followed'
  return f'{len(results)} cases: exit 2, the path is named; no link followed'


BROKEN = {
  'empty': b'',
  'cut': b'{"stages": ["sft"',
  'deep': b'[' * 200_000,
  'bytes': bytes(range(256)),
}


@base.trial('resume', 'a broken config.json is one line, or written anew')
def config_json(scratch: base.Scratch) -> str:
  commands = []
  for name, data in BROKEN.items():
    workdir, other = scratch.finished_run(), scratch.folder / name
    other.mkdir()
    for folder in (workdir, other):
      (folder / 'config.json').write_bytes(data)
    commands += [
      [f'--config={workdir}/config.json', '--dry_run'],
      scratch.tiny(workdir),
      scratch.tiny(other),
    ]
  results = many.run(commands)
  for i, (name, data) in enumerate(BROKEN.items()):
    as_config, resumed, fresh = results[3 * i : 3 * i + 3]
    base.expect_line(as_config, exits.USAGE, 'config.json must')
    base.expect(resumed, exits.DONE, 'it is written anew')
    base.expect_line(fresh, exits.USAGE, '--workdir must be a new folder')
    left = (scratch.folder / name / 'config.json').read_bytes()
    assert left == data, f'{name}: overwritten'
  return f'{len(BROKEN)} kinds: refused as a config, as a workdir written anew'


@base.trial('resume', 'garbage within metrics.jsonl names file and line')
def metrics(scratch: base.Scratch) -> str:
  kinds = (b'garbage', b'\x00' * 500, b'[' * 10_000, b'3', b'{"stage": "sft"}')
  paths = []
  for line in kinds:
    paths.append(scratch.finished_run() / 'metrics.jsonl')
    lines = paths[-1].read_bytes().split(b'\n')
    paths[-1].write_bytes(b'\n'.join([*lines[:2], line, *lines[3:]]))
  before = [path.read_bytes() for path in paths]
  results = many.run([scratch.tiny(path.parent) for path in paths])
  for path, data, done in zip(paths, before, results, strict=True):
    base.expect_line(done, exits.USAGE, f'{path}:3 ')
    assert path.read_bytes() == data, 'the file changed'
  workdir = unfinished(scratch)
  path = workdir / 'metrics.jsonl'
  path.write_bytes(path.read_bytes() + b'\x00' * 4096 + b'\n{"cut')
  done = base.command(MAIN, *scratch.tiny(workdir))
  assert done.code == 0, done.err
  assert rows(workdir) == rows(scratch.finished_run()), 'other rows'
  return (
    f'{len(kinds)} kinds: exit 2, line 3; zeros after the last save: cut off'
  )


RECIPES = {
  'x.yaml': b'model: tiny\n',
  'syntax.py': b'def get_config(:',
  'raises.py': b'{}["lr"]',
  'none.py': b'x = 1',
  'number.py': b'def get_config(): return 1',
  'exits.py': b'import sys; sys.exit(7)',
  'binary.py': bytes(range(256)) * 9,
  'deep.py': b'x = ' + b'(' * 5000,
  'recursion.py': b'def f(): f()\nf()',
  'import.py': b'import no_such_module',
}


@base.trial('resume', 'a file that is no recipe is one line')
def recipes(scratch: base.Scratch) -> str:
  for name, data in RECIPES.items():
    (scratch.folder / name).write_bytes(data)
  results = many.run(
    [[f'--config={scratch.folder / name}', '--dry_run'] for name in RECIPES]
  )
  for name, done in zip(RECIPES, results, strict=True):
    base.expect_line(done, exits.USAGE, name)
  return f'{len(RECIPES)} files: exit 2, the file is named'
