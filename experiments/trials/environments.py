"""Environments that hang, raise, or return what they should not."""

import functools
import json
import re
import socket
import subprocess
import threading
import time

import numpy as np

from experiments.trials import base, rewards
from posttrain import envs, schema, types
from posttrain.data import sources
from posttrain.metrics import writers
from posttrain.rollout import abandoned, env_calls, limits, pool
from posttrain.util import exits

METHODS = ('make', 'reset', 'step', 'grade', 'close')
LIMIT = 0.5  # seconds


def _spin():
  while True:
    pass


def _swallow():
  while True:
    try:
      time.sleep(60)
    except Exception:
      pass


def _receive():
  left, right = socket.socketpair()
  with left, right:
    left.recv(1)


# Hang -> how; the first ones wait in ways that a thread can be left in.
HANGS = {
  'sleep': lambda: time.sleep(3600),
  'lock': lambda: threading.Lock().acquire() and threading.Event().wait(),
  'socket': _receive,
  'process': lambda: subprocess.run(['sleep', '3600'], check=False),
  'swallow': _swallow,
  'spin': _spin,
  'regex': lambda: re.match(r'(a+)+$', 'a' * 40 + 'b'),
}
# Method -> a wrong result.
WRONG = {
  'reset': (None, 'text', [1], [{'role': 'x', 'content': ''}], {}),
  'step': (None, [], 1.0, types.StepOut(reward='a'), types.StepOut('text')),
  'grade': (None, 1.0, types.Score('a'), types.Score(1.0, metrics=None)),
}


class Faulty(envs.base.Env):
  """Asks to repeat a letter; one task in `every` fails in each method."""

  max_turns = 1

  def __init__(self, name, fault='', every=1, blocking=False):
    """Stores the fault: a key of `HANGS`, 'raises' or '' for none."""
    self.name, self.blocking = name, blocking
    self._fault, self._every = fault, every

  def source(self, split, seed):
    del split
    return sources.Shuffled(
      [
        types.Task(
          f'{i}',
          self.name,
          ({'role': 'user', 'content': f'{i}'},),
          info={'i': i},
        )
        for i in range(20)
      ],
      seed,
    )

  def make(self, task):
    return FaultyEpisode(self, task)

  def fail(self, task, method):
    """Fails if it is this task's turn to fail in this method."""
    number, place = divmod(task.info['i'], self._every)
    if not self._fault or place or METHODS[number % len(METHODS)] != method:
      return
    if self._fault == 'raises':
      raise KeyError(method)
    HANGS[self._fault]()


class FaultyEpisode:
  """One attempt, with numbers of numpy."""

  def __init__(self, env, task):
    env.fail(task, 'make')
    self._env, self._task, self._text = env, task, ''

  def reset(self):
    self._env.fail(self._task, 'reset')
    return list(self._task.prompt)

  def step(self, text, truncated):
    self._env.fail(self._task, 'step')
    self._text = text
    return types.StepOut(reward=np.float32(0.5), done=np.bool_(True))

  def grade(self):
    self._env.fail(self._task, 'grade')
    reward = np.float32(len(self._text))
    return types.Score(reward, np.bool_(reward > 3), metrics={'n': np.int64(2)})

  def close(self):
    self._env.fail(self._task, 'close')


def _run(scratch: base.Scratch, name: str, every: int, **kwargs) -> list[str]:
  """Returns arguments of a run of two steps on `Faulty`."""
  env = schema.CustomEnv(
    import_path=f'{__name__}:Faulty', kwargs={**kwargs, 'every': every}
  )
  return [
    *rewards.recipe(
      scratch.folder / name, scratch, entry={'env': env}, steps=2
    ),
    f'--config.grpo.rollout.env_timeout={LIMIT}',
    '--config.grpo.rollout.max_errors=999',
  ]


@base.trial('environments', 'a hang costs its episode, in a run of its own')
def hangs_in_a_run(scratch: base.Scratch) -> str:
  seen = []
  for blocking in (False, True):
    argv = _run(scratch, f'{blocking}', 4, fault='sleep', blocking=blocking)
    done = base.command('posttrain.main', *argv)
    base.expect(done, exits.DONE)
    folder = scratch.folder / f'{blocking}' / 'run'
    rows = writers.read(str(folder / 'metrics.jsonl'))
    files = sorted(folder.glob('rollouts/grpo_*errors_*.jsonl'))
    lines = [
      json.loads(x)['error'] for f in files for x in f.read_text().splitlines()
    ]
    assert lines and all(
      'must return within rollout.env_timeout=0.5' in x for x in lines
    ), lines
    hung = rows[-1]['rollout/hung']
    assert bool(hung) == blocking, hung
    seen.append(f'{len(lines)} errors, {hung} threads left behind')
  return f'inline: {seen[0]}; in threads: {seen[1]}; exit 0 at once'


@base.trial('environments', 'failures of evaluation are warned of and written')
def broken_evaluation(scratch: base.Scratch) -> str:
  argv = _run(scratch, 'r', 1, fault='raises')
  done = base.command(
    'posttrain.main', *argv, '--config.grpo.rollout.max_errors=1'
  )
  base.expect_line(done, exits.FAILED, 'at most rollout.max_errors=1')
  files = list(
    (scratch.folder / 'r').glob('run/rollouts/grpo_eval_errors_*.jsonl')
  )
  lines = files[0].read_text().splitlines()
  assert all('environments.py:' in x for x in lines), lines
  return f'{len(lines)} errors in {files[0].name}, each with file and line'


@base.trial('environments', 'each kind of hang ends at the limit, in place')
def hangs_in_place(scratch: base.Scratch) -> str:
  program = (
    'from experiments.trials import environments\nenvironments.time_hangs()\n'
  )
  (scratch.folder / 'time_hangs.py').write_text(program)
  path = f'{base.ROOT}:{scratch.folder}'
  done = base.command('time_hangs', env={'PYTHONPATH': path}, timeout=60)
  base.expect(done, exits.DONE)
  seconds = json.loads(done.out)
  assert seconds.keys() == HANGS.keys() and max(seconds.values()) < 3, seconds
  return ', '.join(f'{k} {v:.2f} s' for k, v in seconds.items())


def time_hangs() -> None:
  """Prints the seconds of each hang under a limit; in the main thread."""
  seconds = {}
  for name, hang in HANGS.items():
    start = time.monotonic()
    with limits.Inline(LIMIT) as inline:
      assert inline(hang) == limits.Late(LIMIT), name
    seconds[name] = time.monotonic() - start
  print(json.dumps(seconds))


@base.trial('environments', 'hanging threads are bounded, and delay no exit')
def many_hang(scratch: base.Scratch) -> str:
  program = (
    'from experiments.trials import environments\nenvironments.hang_many()\n'
  )
  (scratch.folder / 'hang_many.py').write_text(program)
  path = f'{base.ROOT}:{scratch.folder}'
  done = base.command('hang_many', env={'PYTHONPATH': path}, timeout=60)
  base.expect(done, exits.DONE)
  assert 'calls of environments must return: got 96 calls' in done.out, done.out
  end = float(done.out.split()[-1])
  left = time.time() - end
  assert left < 5, f'{left:.1f} s after the end of the program'
  return f'refused above 64 threads; the process ended {left:.1f} s later'


def hang_many() -> None:
  """Leaves threads behind until that is refused; prints the refusal."""
  with pool.Pool(32, 1, 0.05) as calls:
    for uid in range(96):
      calls.add(uid, HANGS['sleep'])
    calls.tick()
    late = calls.due(idle=True)
  assert len(late) == 96, late
  try:
    abandoned.check('calls of environments must return')
  except abandoned.TooManyThreads as error:
    print(error)
  print(time.time())


@base.trial('environments', 'a wrong result is one line that names the method')
def wrong_results(scratch: base.Scratch) -> str:
  count = 0
  env = Faulty('e')
  task = env.source('train', 0).take(1)[0]
  for method, results in WRONG.items():
    for result in results:
      env.make = functools.partial(_returns, env, method, result)
      calls = env_calls.Calls(env, task)
      outcomes = [
        calls.caught(calls.open),
        calls.caught(calls.step, 'text', False),
        calls.caught(calls.end, True),
      ]
      errors = [str(x) for x in outcomes if isinstance(x, Exception)]
      assert len(errors) == 1 and len(errors[0]) < 600, (method, result, errors)
      assert errors[0].startswith('e/0: ') and method in errors[0], errors
      count += 1
  for result in (None, [], 'text', {}, iter(())):
    env.source = lambda split, seed, result=result: result
    try:
      env_calls.Source(env, 'train', 0, 1.0)
    except env_calls.EnvError as error:
      assert "environment e: source('train') must return" in str(error)
      count += 1
  assert count == sum(map(len, WRONG.values())) + 5, count
  return f'{count} results of make, reset, step, grade and source'


def _returns(env, method, result, task) -> '_Returns':
  return _Returns(method, result, FaultyEpisode(env, task))


class _Returns:
  """An episode of which one method returns something else."""

  def __init__(self, method, result, episode):
    self._method, self._result, self._episode = method, result, episode

  def __getattr__(self, name):
    if name == self._method:
      return lambda *args: self._result
    return getattr(self._episode, name)
