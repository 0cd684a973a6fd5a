"""Trials of runs: signals, hangs, the machine, workdirs, rows, users' code."""

import collections
import contextlib
import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess

from experiments.trials import base, faulty, kill_resume
from posttrain import schema
from posttrain.envs import registry
from posttrain.rollout import remote

MODULE = 'experiments.trials.faulty'
# Phase -> the entry into it that has the fault.
ENTRIES = {'rollout': 1, 'update': 3, 'save': 2, 'eval': 2}


def doomed(scratch: base.Scratch, fault: str, phase: str, workdir, *argv: str):
  """Runs `tiny` with a fault in a phase; returns the finished command."""
  options = {'fault': fault, 'phase': phase, 'entry': ENTRIES[phase]}
  words = json.dumps(options), *scratch.tiny(workdir, *argv)
  return base.command('experiments.trials.doomed', *words)


def check_same(scratch: base.Scratch, workdir: pathlib.Path) -> None:
  """Runs to the end; checks all bits against an undisturbed run."""
  base.expect(base.command(base.MAIN, *scratch.tiny(workdir)), base.DONE)
  truth = kill_resume.outcome(scratch.finished_run())
  wrong = kill_resume.differences(truth, kill_resume.outcome(workdir))
  assert not wrong, f'differing bits: {wrong}'


# Faults of a process.


@base.trial('signals', 'SIGTERM in a phase saves: 75; SIGKILL; the same bits')
def in_phases(scratch: base.Scratch) -> str:
  for phase in ENTRIES:
    workdir = scratch.folder / phase
    done = doomed(scratch, 'SIGTERM', phase, workdir)
    base.expect(done, base.PREEMPTED)
    doomed(scratch, 'SIGKILL', phase, workdir)
    check_same(scratch, workdir)
  return f'{", ".join(ENTRIES)}: exit 75, killed, then the same bits'


@base.trial('signals', 'Ctrl-C is one line and exit 130; the run continues')
def interrupted(scratch: base.Scratch) -> str:
  workdir = scratch.folder / 'run'
  base.expect(doomed(scratch, 'SIGINT', 'update', workdir), base.INTERRUPTED)
  check_same(scratch, workdir)
  return 'exit 130; then the same bits'


@base.trial('watchdog', 'a hang in any phase ends the run; it continues')
def hangs(scratch: base.Scratch) -> str:
  seconds = []
  for phase in ENTRIES:
    workdir = scratch.folder / phase
    limits = ('first_seconds=20', 'seconds=20', 'exit_seconds=25')
    argv = [f'--config.watchdog.{x}' for x in limits]
    done = doomed(scratch, 'hang', phase, workdir, *argv)
    assert done.code in (base.STALLED, -signal.SIGKILL), done.err[-900:]
    assert phase in done.err, f'the phase is not named: {done.err[-900:]}'
    seconds.append(f'{phase} {done.seconds:.0f} s')
    check_same(scratch, workdir)
  return f'ended after {", ".join(seconds)}, each named; then the same bits'


# Faults of the machine.


@base.trial('machine', 'a full disk is one line; what was saved is kept')
def disk_full(scratch: base.Scratch) -> str:
  workdir = scratch.folder / 'run'
  done = doomed(scratch, 'ENOSPC', 'save', workdir)
  base.expect_line(done, base.FAILED, 'No space left on device')
  sound = len(list(workdir.glob('checkpoints/sft/*/state')))
  assert sound, 'no checkpoint is left'
  check_same(scratch, workdir)
  return f'exit 1, one line, {sound} checkpoints kept; then the same bits'


# Faults of a workdir.


def _cut(path: pathlib.Path) -> None:
  os.truncate(path, path.stat().st_size // 2)


def _cut_largest(step: pathlib.Path) -> None:
  """Cuts the largest file of a step's arrays in half."""
  files = [x for x in (step / 'state').rglob('*') if x.is_file()]
  _cut(max(files, key=lambda x: x.stat().st_size))


# What happens to the last step of the first stage.
DAMAGE = {
  'host cut': lambda step: _cut(step / 'host/metadata'),
  'host deep': lambda step: (step / 'host/metadata').write_text('[' * 10**5),
  'arrays cut': _cut_largest,
  'all gone': lambda step: [shutil.rmtree(step), step.mkdir()],
  'a file beside it': lambda step: (step.parent / '99').write_text('x'),
}


@base.trial('resume', 'a run with a damaged step trains on, bit for bit')
def damage(scratch: base.Scratch) -> str:
  truth = base.rows(scratch.finished_run())
  losses = [row.get('loss/total') for row in truth]
  for name, harm in DAMAGE.items():
    workdir = scratch.finished_run()
    shutil.rmtree(workdir / 'checkpoints/grpo')
    harm(workdir / 'checkpoints/sft/4')
    done = base.command(base.MAIN, *scratch.tiny(workdir))
    base.expect(done, base.DONE)
    got = [row.get('loss/total') for row in base.rows(workdir)]
    assert got == losses, f'{name}: other losses'
  return f'{", ".join(DAMAGE)}: {len(losses)} rows equal'


# Faults of data.

DEEP = '[' * 100_000 + ']' * 100_000
LONG = 'x' * 4_000_000
ROW = '{"prompt": "a", "completion": "b"}'
ROWS = {
  'deep': DEEP,
  'long': f'"{LONG}"',
  'open': '{"prompt": "a"',
  'bytes': '\udcff',
  'a list': '[1]',
  'a number': '{"prompt": 7, "completion": "b"}',
  'a long completion': f'{{"prompt": "a", "completion": ["{LONG}"]}}',
  'messages': f'{{"messages": "{LONG}"}}',
  'role': f'{{"messages": [{{"role": "{LONG}", "content": ""}}]}}',
}


@base.trial('rows', 'a hostile row is one line that names file and row')
def rows(scratch: base.Scratch) -> str:
  longest = 0
  for row in ROWS.values():
    path = scratch.folder / 'rows.jsonl'
    path.write_text(f'{ROW}\n{row}', errors='surrogateescape')
    env = json.dumps({'type': 'rows', 'path': str(path)})
    done = base.command(
      base.MAIN,
      *scratch.tiny(scratch.folder / 'run', '--dry_run'),
      f'--config.sft.envs.arithmetic.env={env}',
    )
    base.expect_line(done, base.USAGE, f'{path}:2')
    longest = max(longest, len(done.error))
  return f'{len(ROWS)} kinds: exit 2, lines of at most {longest} characters'


# Faults of users' code.


def rewarded(rewards: dict) -> str:
  """Returns the flag that adds rewards to the environment's grade."""
  entries = json.dumps({'env': {}, **rewards})
  return f'--config.grpo.envs.arithmetic.rewards={entries}'


@base.trial('rewards', 'a failing call leaves its rollouts out, and is counted')
def rewards(scratch: base.Scratch) -> str:
  workdir, calls = scratch.folder / 'run', scratch.folder / 'calls'
  calls.mkdir()
  faults = [fault for fault in faulty.FAULTS if fault != 'waits']
  names = {f'x{i}': fault for i, fault in enumerate(faults)}
  entries = {
    name: {
      'fn': f'{MODULE}:reward',
      'kwargs': {'fault': fault, 'folder': str(calls)},
      'timeout': 5.0,
    }
    for name, fault in names.items()
  }
  done = base.command(
    base.MAIN,
    *scratch.tiny(
      workdir, rewarded(entries), '--config.grpo.rollout.max_error_share=1'
    ),
  )
  base.expect(done, base.DONE)
  rows = [row for row in base.rows(workdir) if row['stage'] == 'grpo']
  for name, fault in names.items():
    key = f'rewards/{name}/faults/arithmetic'
    counts = [row[key] for row in rows if row['step']]
    assert counts[0] and not counts[1], (fault, counts)
  left = [row['rollout/ungraded/arithmetic'] for row in rows if row['step']]
  return f'{", ".join(names.values())}: left out by step: {left}; exit 0'


@base.trial('rewards', 'a stage whose every reward failed ends with code 3')
def no_reward(scratch: base.Scratch) -> str:
  entry = {'fn': 'experiments.trials.faulty:never'}
  argv = scratch.tiny(scratch.folder / 'run', rewarded({'x': entry}))
  done = base.command(base.MAIN, *argv)
  base.expect_line(done, base.NO_REWARD)
  return f'exit 3: {done.error}'


def custom(fault: str) -> str:
  """Returns the flag of an environment that has a fault, or only waits."""
  env = {
    'type': 'custom',
    'import_path': f'{MODULE}:Env',
    'kwargs': {'fault': fault, 'blocking': True},
  }
  return f'--config.grpo.envs.arithmetic.env={json.dumps(env)}'


@base.trial('environments', 'a fault costs its episode, and is counted')
def environments(scratch: base.Scratch) -> str:
  seen = []
  for fault in ('raises', 'hangs', 'swallows'):
    workdir = scratch.folder / fault
    done = base.command(
      base.MAIN,
      *scratch.tiny(workdir, custom(fault)),
      '--config.grpo.rollout.env_timeout=2',
      '--config.grpo.eval.prompts=2',
      '--config.grpo.eval.samples=0',
      '--config.grpo.rollout.max_error_share=1',
    )
    base.expect(done, base.DONE)
    lines = [
      line
      for path in workdir.glob('rollouts/grpo_*errors_*.jsonl')
      for line in path.read_text().splitlines()
    ]
    assert lines, 'no error is written'
    seen.append(f'{fault}: {len(lines)} errors')
  return f'{"; ".join(seen)}; exit 0'


# Module, further arguments, and a part of the command line of a process that
# is killed: a worker in the middle of a call, or one of two trainers.
RAY = {
  'a worker': (
    base.MAIN,
    ['--config.grpo.rollout.workers=ray', custom('waits')],
    b'ray::_Actor.call',
  ),
  'a trainer': ('experiments.launch.cluster', ['--hosts=2'], b'--process_id='),
}


def descendants(pid: int) -> dict[int, bytes]:
  """Returns the command lines of all processes below one, by id."""
  children, titles = collections.defaultdict(list), {}
  for path in pathlib.Path('/proc').glob('[0-9]*'):
    with contextlib.suppress(OSError):
      # 'pid (name) state parent ...'; the name may have any character.
      stat = (path / 'stat').read_bytes().rpartition(b')')[2].split()
      children[int(stat[1])].append(int(path.name))
      titles[int(path.name)] = (path / 'cmdline').read_bytes()
  pids = list(children[pid])
  for parent in pids:  # grows
    pids += children[parent]
  return {child: titles[child] for child in pids}


@base.trial('ray', 'a killed worker or trainer costs no bit')
def ray(scratch: base.Scratch) -> str:
  if not remote.is_installed():
    raise base.NotTried('Ray is not installed')
  for name, (module, words, title) in RAY.items():
    whole, workdir = (scratch.folder / f'{name} {x}' for x in ('whole', 'cut'))
    base.expect(base.command(module, *scratch.tiny(whole, *words)), base.DONE)
    log = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.DEVNULL}
    process = base.start(module, *scratch.tiny(workdir, *words), **log)
    found = []
    while not found and process.poll() is None:
      base.wait_for(lambda path=workdir: len(base.rows(path)) > 5, 300)  # GRPO
      below = descendants(process.pid)
      found = [x for x, line in below.items() if title in line]
    assert found, f'{name}: no such process'
    os.kill(found[0], signal.SIGKILL)
    base.expect(base.finish(process), base.DONE)
    outcomes = [kill_resume.outcome(x) for x in (whole, workdir)]
    for row in [row for x in outcomes for row in x['rows']]:
      row.pop('rollout/worker_restarts', None)
    wrong = kill_resume.differences(*outcomes)
    assert not wrong, f'{name}: differing bits: {wrong}'
  return f'{", ".join(RAY)}: killed, then the same bits'


# What a model writes.

QUERIES = """
ATTACH '{out}' AS x
VACUUM INTO '{out}'
PRAGMA query_only = OFF
PRAGMA temp_store_directory = '{out}'
SELECT * FROM pragma_database_list
SELECT name FROM sqlite_master
SELECT 1; DROP TABLE {t}
DELETE FROM {t}
CREATE TABLE loot AS SELECT 1
WITH x AS (SELECT 1) DELETE FROM {t} RETURNING *
SELECT load_extension('x')
SELECT readfile('/etc/passwd')
SELECT writefile('{out}', 'x')
SELECT edit('x', 'touch {out}')
SELECT zeroblob(999999999)
SELECT hex(randomblob(999999999))
SELECT printf('%999999999d', 1)
SELECT replace('aaaa', 'a', zeroblob(99999999))
SELECT strftime(printf('%999999999d', 1))
SELECT date('now', '+999999999999 days')
SELECT 'aaaaaaaaaaaaaaaaaaaaaaaaaaaa' LIKE '%a%a%a%a%a%a%a%a%a%a%a%a%ab' FROM {8}
SELECT group_concat(x.name || '{long}') FROM {8}
SELECT count(*) FROM {8}
SELECT DISTINCT p0.name || p7.name FROM {8} ORDER BY p3.name
SELECT max(strftime('{long}', p0.name)) FROM {8}
WITH RECURSIVE x(a) AS (SELECT 1 UNION ALL SELECT a + 1 FROM x) SELECT max(a) FROM x
SELECT {deep}
"""  # noqa: E501


@base.trial('sql', 'nasty SQL gets an error or rows; nothing escapes')
def sql(scratch: base.Scratch) -> str:
  env = registry.make('sql', schema.Sql(budget=100))
  (task,) = env.source('train', 0).take(1)
  table = task.prompt[-1]['content'].partition('tables: ')[2].split(',')[0]
  words = {
    '{out}': str(scratch.folder / 'out'),
    '{t}': table.strip(),
    '{long}': '%J%f' * 300,
    '{8}': ', '.join(f'{table.strip()} p{i}' for i in range(8)),
    '{deep}': '(' * 900 + '1' + ')' * 900,
  }
  queries, slowest = QUERIES.strip().splitlines(), 0.0
  episode = env.make(task)
  episode.reset()
  for query in queries:
    for word, text in words.items():
      query = query.replace(word, text)
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    out = episode.step(f'QUERY {query}', False)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_utime - begin
    slowest = max(slowest, used)
    assert not out.done and len(f'{out.messages}') < 100_000, query
  (out,) = episode.step(f'QUERY SELECT count(*) FROM {table}', False).messages
  episode.close()
  assert any(c.isdigit() for c in out['content']), out
  assert not list(scratch.folder.iterdir()), 'a file was written'
  assert slowest < 5, f'a query took {slowest:.1f} s of processor time'
  return f'{len(queries)} queries, the slowest {slowest:.2f} s; no file'
