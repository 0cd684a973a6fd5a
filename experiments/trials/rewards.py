"""Reward functions that fail, hang, crash, or edit what they get."""

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import signal
import threading
import time

import numpy as np

from experiments.trials import base
from posttrain import main, schema, types
from posttrain.config import load as config
from posttrain.metrics import writers
from posttrain.rollout.grading import rewards as rewarding
from posttrain.util import exits

MODULE = 'experiments.trials.reward_functions'
COUNT, TIMEOUT, CALLS, FIRST = 4, 0.5, 6, 2
BUDGET = schema.RewardFn().max_faults
# Kind of failure -> rollouts of a call without a reward; 0 = no failure.
KINDS = {
  'raises': COUNT,
  'raises without text': COUNT,
  'raises 50 MB': COUNT,
  'exits': COUNT,
  'hangs': COUNT,
  'hangs (lock)': COUNT,
  'hangs (async)': COUNT,
  'endless result': COUNT,
  'unprintable result': COUNT,
  'NaN': COUNT,
  'one NaN': 1,
  'integer of 400 digits': 1,
  'wrong length': COUNT,
  'None': 0,
  'slow': 0,
}
# Isolated function -> words of its fault; '' = no fault.
ISOLATED = {
  'backtracks': 'timeout',
  'spins': 'timeout',
  'leaves': 'exit code 0',
  'crashes': 'SIGSEGV',
  'overflows_stack': 'must return rewards',
  'fills': 'MemoryError',
  'closes': 'process',
  'writes': 'process',
  'replies': 'socket',
  'forks': '',
  'returns_functions': 'must return finite rewards',
  'leaks': '',
}


def rollouts() -> list[types.Rollout]:
  """Returns rollouts of one task, which they share."""
  question = ({'role': 'user', 'content': 'What is 1 + 2?'},)
  task = types.Task('t', 'e', question, ['3'], info={'list': [1]})
  return [_rollout(task, uid) for uid in range(COUNT)]


def _rollout(task: types.Task, uid: int) -> types.Rollout:
  n = 6 + uid
  sample = types.Sample(
    env='e',
    row='t',
    ids=np.arange(n, dtype=np.int32),
    mask=np.arange(n) >= 3,
    roles=np.zeros(n, np.int8),
    is_content=np.ones(n, bool),
    sampler_logprobs=np.full(n, -1, np.float32),
    temperatures=np.ones(n, np.float32),
    versions=np.zeros(n, np.int32),
    task=task,
  )
  answer = ({'role': 'assistant', 'content': f'{uid}'},)
  score = types.Score(1.0, True)
  return types.Rollout(uid, task, task.prompt + answer, (sample,), score, 'eos')


def entry(name: str, **options) -> schema.RewardFn:
  """Returns the options of a function of `reward_functions`."""
  options = {'timeout': TIMEOUT, **options}
  return schema.RewardFn(fn=f'{MODULE}:{name}', **options)


@contextlib.contextmanager
def captured():
  """Yields the list of this thread's warnings, which are not shown."""
  warnings, thread = [], threading.get_ident()
  logger, handler = logging.getLogger('absl'), logging.Handler()

  def emit(record):
    if record.thread == thread:
      warnings.append(record.getMessage())

  handler.emit = emit
  logger.addHandler(handler)
  try:
    yield warnings
  finally:
    logger.removeHandler(handler)


@base.trial('rewards', 'a function that edits its arguments edits copies')
def edits(scratch: base.Scratch) -> str:
  notes, group = [], rollouts()
  before = repr(group)
  cfg = {k: entry('edits', kwargs={'notes': notes}) for k in ('a', 'b')}
  cfg['c'] = dataclasses.replace(cfg['a'], isolate=True, timeout=60.0)
  total = rewarding.Rewards('e', cfg)
  for _ in range(2):
    scored, _, errors = total(group)
    got = [x.score.reward for x in scored]
    assert got == [3.0] * COUNT and not errors, (got, errors)
  assert repr(group) == before and not notes, 'the transcript was edited'
  return '3 functions x 2 calls saw no edit; tasks, messages, arrays unchanged'


@base.trial('rewards', 'a failing call leaves its rollouts out, and is counted')
def kinds(scratch: base.Scratch) -> str:
  longest = 0
  for kind, excluded in KINDS.items():
    for last in (FIRST, CALLS):
      seen = _calls(kind, last, scratch.folder / f'{kind} {last}')
      stops = last == CALLS and excluded > 0
      bad = range(FIRST, last + 1) if excluded else ()
      count = FIRST + BUDGET if stops else CALLS
      left_out = [excluded * (i in bad) for i in range(1, count + 1)]
      assert seen['left_out'] == left_out[: count - stops], (kind, seen)
      assert seen['stopped'] == stops, (kind, last, seen)
      # A slow call is warned about once.
      warned = 1 if kind == 'slow' else sum(map(bool, left_out))
      assert len(seen['warnings']) == warned, (kind, seen)
      longest = max([longest, *map(len, seen['warnings'])])
  assert longest < 3000, f'a warning of {longest} characters'
  return (
    f'{len(KINDS)} kinds, in one call and in all: left out, warned of in at '
    f'most {longest} characters, stopped by the {BUDGET + 1}th in a row'
  )


def _calls(kind: str, last: int, folder: pathlib.Path) -> dict:
  """Calls a failing function beside the environment's grade."""
  folder.mkdir()
  kwargs = {'kind': kind, 'calls': [str(folder), FIRST, last]}
  cfg = {'env': schema.RewardFn(), 'x': entry('fails', kwargs=kwargs)}
  total, left_out, stopped = rewarding.Rewards('e', cfg), [], False
  with captured() as warnings:
    try:
      for _ in range(CALLS):
        scored, metrics, errors = total(rollouts())
        left_out.append(sum(x.score.reward is None for x in scored))
        assert metrics['rewards/x/faults'] == len(errors)
    except rewarding.TooManyFaults as error:
      assert len(str(error)) < 2000, len(str(error))
      stopped = True
  return {'left_out': left_out, 'stopped': stopped, 'warnings': warnings}


@base.trial('rewards', 'isolate: crashes, endless regexes, leaks cost one call')
def isolated(scratch: base.Scratch) -> str:
  sound = [-len(x.samples[0].ids[3:]) / 40 for x in rollouts()]
  for name, words in ISOLATED.items():
    # The start of the process does not count.
    timeout = 1.0 if words == 'timeout' else 30.0
    options = {'isolate': True, 'timeout': timeout, 'memory': 100}
    total = rewarding.Rewards('e', {'x': entry(name, **options)})
    for _ in range(2 if words else 8):
      with captured():
        scored, _, errors = total(rollouts())
      got = [x.score.reward for x in scored]
      expected = [None] * COUNT if words else sound
      assert got == expected, (name, got, errors)
      assert words in ''.join(errors), (name, errors)
    total._functions['x']._worker.stop()
  return f'{len(ISOLATED)} functions twice: the next call had a new process'


@base.trial('rewards', 'isolate: the same bits, one process, no jax, no key')
def isolated_process(scratch: base.Scratch) -> str:
  os.environ['TRIAL_API_KEY'] = 'secret'
  results = []
  for isolate in (False, True):
    cfg = {'x': entry('length', isolate=isolate, timeout=60.0)}
    results.append(
      [x.score.reward for x in rewarding.Rewards('e', cfg)(rollouts())[0]]
    )
  assert results[0] == results[1], results
  total = rewarding.Rewards(
    'e', {'x': entry('process', isolate=True, timeout=60.0)}
  )
  seconds, seen = [], []
  for _ in range(20):
    start = time.monotonic()
    scored, _, _ = total(rollouts()[:3])
    seconds.append(time.monotonic() - start)
    seen.append([x.score.reward for x in scored])
  pid = seen[0][0]
  assert all(x == [pid, 0.0, 0.0] for x in seen), seen[:3]
  return (
    f'equal; 20 calls in process {pid:.0f}: the first {seconds[0]:.2f} s, the '
    f'others {1000 * float(np.median(seconds[1:])):.1f} ms; no jax, no key'
  )


@base.trial('rewards', 'isolate: children end with the process, sessions too')
def isolated_children(scratch: base.Scratch) -> str:
  ends = {True: 'exit code 3', False: 'timeout'}
  for exits_first, words in ends.items():
    file = scratch.folder / words
    kwargs = {'file': str(file), 'exits': exits_first}
    timeout = 30.0 if exits_first else 1.0
    options = {'isolate': True, 'timeout': timeout, 'kwargs': kwargs}
    total = rewarding.Rewards('e', {'x': entry('starts_sessions', **options)})
    start = time.monotonic()
    with captured():
      _, _, errors = total(rollouts())
    assert words in ''.join(errors), errors
    assert time.monotonic() - start < 20, 'the end of the process was missed'
    pids = [int(pid) for pid in file.read_text().split()]
    assert len(pids) == 2 and not any(map(_runs, pids)), pids
  return 'after an exit and after the timeout none of 2 sessions was left'


@base.trial('rewards', 'isolate: the process ends with a run that is killed')
def isolated_orphan(scratch: base.Scratch) -> str:
  program = (
    'import time\n'
    'from posttrain.rollout.grading import calls, isolated\n'
    f"worker = isolated.Worker('{MODULE}:process', 2**30)\n"
    "arguments = {'completion_ids': []}\n"
    'print(*worker.call(arguments, {}, calls.Clock(60), 3, 1.0), flush=True)\n'
    'time.sleep(600)\n'
  )
  script = scratch.folder / 'holds_worker.py'
  script.write_text(program)
  run = base.start(
    'holds_worker', env={'PYTHONPATH': f'{base.ROOT}:{scratch.folder}'}
  )
  pid = int(float(run.stdout.readline().split()[0]))
  assert _runs(pid)
  start = time.monotonic()
  base.stop(run, signal.SIGKILL)
  base.wait_for(lambda: not _runs(pid), 10)
  return f'gone {time.monotonic() - start:.2f} s after kill -9 of the run'


def _runs(pid: int) -> bool:
  try:
    stat = pathlib.Path(f'/proc/{pid}/stat').read_text()
  except (FileNotFoundError, ProcessLookupError):
    return False
  return stat.rpartition(')')[2].split()[0] != 'Z'


def recipe(folder: pathlib.Path, scratch: base.Scratch, **changes) -> list[str]:
  """Writes a recipe of GRPO alone, from random weights; returns arguments.

  Args:
    folder: of the recipe and of the workdir, created.
    scratch: the trial's.
    **changes: of the stage; those of `entry` are of its environment.
  """
  folder.mkdir()
  run = main.load(base.TINY)
  stage = run.stages['grpo']
  env = dataclasses.replace(
    stage.envs['arithmetic'], **changes.pop('entry', {})
  )
  defaults = {
    'init': 'random',
    'steps': 3,
    'optim': schema.Optim(lr=1e-3, warmup_steps=0),
    'eval': schema.Eval(prompts=2, samples=0, max_tokens=8),
  }
  stage = dataclasses.replace(
    stage, **{**defaults, **changes, 'envs': {'arithmetic': env}}
  )
  run = dataclasses.replace(
    run, stages={'grpo': stage}, compilation_cache=str(scratch.cache)
  )
  path = folder / 'recipe.json'
  path.write_text(json.dumps(config.to_dict(run)))
  return [f'--config={path}', f'--workdir={folder / "run"}', '--trust_config']


@base.trial('rewards', 'a stage whose every reward failed ends with code 3')
def no_reward(scratch: base.Scratch) -> str:
  calls = scratch.folder / 'calls'
  calls.mkdir()
  kwargs = {'kind': 'raises without text', 'calls': [str(calls), 1, 99]}
  rewards = {'env': schema.RewardFn(), 'x': entry('fails', kwargs=kwargs)}
  argv = recipe(scratch.folder / 'r', scratch, entry={'rewards': rewards})
  words = 'must get rewards: got none for its 48 rollouts in 3 steps', 'raises'
  base.expect_line(
    base.command('posttrain.main', *argv), exits.NO_REWARD, *words
  )
  workdir = scratch.folder / 'r' / 'run'
  rows = writers.read(str(workdir / 'metrics.jsonl'))
  assert [row['step'] for row in rows] == [0, 1, 2, 3]
  assert (workdir / 'checkpoints' / 'grpo' / '3').is_dir()
  again = base.command('posttrain.main', *argv)
  base.expect_line(again, exits.NO_REWARD, *words)
  return (
    'exit 3 with step 3 saved; the same again when it is resumed; '
    f'{_long_stage(scratch, {"env": rewards["env"], "x": entry("raises")})}'
  )


def _long_stage(scratch: base.Scratch, rewards: dict) -> str:
  """Trains a stage that faults stop before its end, and resumes it."""
  argv = recipe(
    scratch.folder / 'long', scratch, entry={'rewards': rewards}, steps=20
  )
  workdir, steps = scratch.folder / 'long' / 'run', []
  for _ in range(2):
    done = base.command('posttrain.main', *argv)
    base.expect_line(
      done,
      exits.NO_REWARD,
      'has had a reward so far',
      'max_faults=3',
      'no grader',
    )
    steps.append(max(map(int, os.listdir(workdir / 'checkpoints' / 'grpo'))))
  # The fault after `max_faults` stops the run before its step ends.
  assert steps == [BUDGET, 2 * BUDGET], steps
  rows = writers.read(str(workdir / 'metrics.jsonl'))
  assert [row['step'] for row in rows] == list(range(2 * BUDGET + 1))
  return f'20 steps: 3 as well, after steps {steps}, which are saved'


@base.trial('rewards', 'tied groups end with code 0 and a hint')
def tied(scratch: base.Scratch) -> str:
  # With a KL penalty, groups of one are allowed.
  entry = {'group_size': 1, 'algorithm': schema.Grpo(kl_beta=0.01)}
  argv = recipe(scratch.folder / 'r', scratch, entry=entry, steps=2)
  done = base.command('posttrain.main', *argv)
  base.expect(done, exits.DONE, 'no step of stage grpo had an advantage')
  return 'group_size 1: exit 0, hint at the end'
