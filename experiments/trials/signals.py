"""Signals, hangs and time limits, aimed at a phase of a run by its name."""

import json
import os
import signal

from experiments.trials import base, kill_resume
from posttrain.util import exits

DOOMED = 'experiments.trials.doomed'
# Phase -> the entry into it that has the fault. Compilation is part of other
# phases; the first programs are small ones.
PHASES = {'compile': 12, 'rollout': 1, 'update': 3, 'save': 2, 'eval': 2}


def doomed(scratch: base.Scratch, fault: str, phase: str, workdir, *argv: str):
  """Runs `tiny` with a fault in a phase; returns the finished command."""
  options = {'fault': fault, 'phase': phase, 'entry': PHASES[phase]}
  return base.command(
    DOOMED, json.dumps(options), *scratch.tiny(workdir, *argv)
  )


def check_same(scratch: base.Scratch, workdir) -> None:
  """Runs to the end; checks all bits against an undisturbed run."""
  done = base.command('posttrain.main', *scratch.tiny(workdir))
  base.expect(done, exits.DONE)
  truth = kill_resume.outcome(scratch.finished_run())
  wrong = kill_resume.differences(truth, kill_resume.outcome(workdir))
  assert not wrong, f'differing bits: {wrong}'


def _stopped_twice(scratch: base.Scratch, phase: str) -> str:
  workdir = scratch.folder / phase
  done = doomed(scratch, 'SIGTERM', phase, workdir)
  base.expect(done, exits.PREEMPTED, 'saved and stopped at')
  where = done.last.partition(' at ')[2].partition(';')[0]
  done = doomed(scratch, 'SIGKILL', phase, workdir)
  if done.code == exits.DONE:  # the phase was not reached that often again
    workdir = scratch.folder / f'{phase}_anew'
    done = doomed(scratch, 'SIGKILL', phase, workdir)
  assert done.code == -signal.SIGKILL, done.err[-900:]
  check_same(scratch, workdir)
  return f'SIGTERM: exit 75 at {where}; SIGKILL; then the same bits'


def _make(phase: str):
  def stopped(scratch: base.Scratch) -> str:
    return _stopped_twice(scratch, phase)

  stopped.__name__ = f'in_{phase}'
  base.trial(
    'signals',
    f'SIGTERM, then SIGKILL in {phase}: saved and 75, resumed, the same bits',
  )(stopped)


for _phase in PHASES:
  _make(_phase)


@base.trial('signals', 'Ctrl-C is one line and exit 130; the run continues')
def interrupted(scratch: base.Scratch) -> str:
  workdir = scratch.folder / 'run'
  done = doomed(scratch, 'SIGINT', 'update', workdir)
  base.expect(done, exits.INTERRUPTED, 'the same command continues')
  check_same(scratch, workdir)
  return 'exit 130; then the same bits'


@base.trial('watchdog', 'a hang in any phase is named, with stacks; exit 4')
def hangs(scratch: base.Scratch) -> str:
  seen = []
  for phase in ('rollout', 'update', 'save', 'eval'):
    workdir = scratch.folder / phase
    dog = ('--config.watchdog.seconds=3', '--config.watchdog.exit_seconds=4')
    done = doomed(scratch, 'hang', phase, workdir, *dog)
    base.expect(done, exits.STALLED, f'in phase {phase}, which waits for')
    (path,) = workdir.glob('stalls/*.txt')
    assert 'doomed.py' in path.read_text(), 'the stacks do not show the hang'
    seen.append(phase)
  return f'{base.words(seen)}: exit 4, the phase is named, its stack is written'


@base.trial('watchdog', '--time_limit saves and ends in time', alone=True)
def time_limit(scratch: base.Scratch) -> str:
  workdir, limit = scratch.folder / 'run', 25
  scratch.finished_run()  # compiles
  done = base.command(
    'posttrain.main',
    *scratch.tiny(workdir, '--config.sft.steps=100000'),
    '--config.checkpoint.every=100000',
    f'--time_limit={limit}s',
  )
  base.expect(done, exits.PREEMPTED, 'saved and stopped at stage sft')
  assert done.seconds < limit, f'{done.seconds:.1f} s'
  steps = os.listdir(workdir / 'checkpoints' / 'sft')
  return f'limit {limit} s: ended after {done.seconds:.1f} s, saved {steps}'
