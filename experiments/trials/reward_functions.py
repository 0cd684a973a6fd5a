"""Reward functions that fail, named by import path in `rewards`."""

import asyncio
import ctypes
import json
import os
import re
import subprocess
import sys
import threading
import time

kept = []


def length(completion_ids):
  """Returns -length / 40: a sound reward."""
  return [-len(ids) / 40 for ids in completion_ids]


def fails(completion_ids, kind, calls):
  """Fails in calls number `first` to `last` of `calls`, else as `length`.

  Args:
    completion_ids: the sampled ids.
    kind: how it fails.
    calls: (folder that counts the calls, first, last).
  """
  folder, first, last = calls
  number = 1 + len(os.listdir(folder))
  open(os.path.join(folder, str(number)), 'w').close()
  sound = length(completion_ids)
  return _fail(kind, sound) if first <= number <= last else sound


class Unprintable(Exception):
  """An exception without any text."""

  def __str__(self):
    raise OSError('no text')

  __repr__ = __str__


class Endless:
  """A result that never ends."""

  def __init__(self, count):
    self._count = count

  def __len__(self):
    return self._count

  def __iter__(self):
    while True:
      time.sleep(0.01)


def _fail(kind, sound):
  match kind:
    case 'raises':
      raise ConnectionError('no route to the grader')
    case 'raises without text':
      raise Unprintable
    case 'raises 50 MB':
      raise ValueError('a' * 50_000_000)
    case 'exits':
      sys.exit(3)
    case 'hangs':
      time.sleep(3600)
    case 'hangs (lock)':
      threading.Event().wait()
    case 'hangs (async)':
      return asyncio.sleep(3600)
    case 'endless result':
      return Endless(len(sound))
    case 'unprintable result':
      return [Unprintable() for _ in sound]
    case 'NaN':
      return [float('nan') for _ in sound]
    case 'one NaN':
      return [float('nan'), *sound[1:]]
    case 'integer of 400 digits':
      return [10**400, *sound[1:]]
    case 'None':
      return [None for _ in sound]
    case 'wrong length':
      return sound[1:]
    case 'slow':
      time.sleep(0.3)
      return sound


def edits(prompts, completions, completion_ids, answer, rollouts, notes):
  """Edits all that it gets; returns 1, or 0 where it sees an edit."""
  sound = [
    float(
      not notes
      and 'edited' not in f'{prompts[i]}{completions[i]}{answer[i]}'
      and 'edited' not in rollout.task.info
      and completion_ids[i][:1] != [-7]
      and all(sample.ids[0] != -7 for sample in rollout.samples)
    )
    for i, rollout in enumerate(rollouts)
  ]
  for i, rollout in enumerate(rollouts):
    for message in (*prompts[i], *completions[i], *rollout.messages):
      message['content'] = 'edited'
    rollout.task.info['edited'] = True
    completion_ids[i].insert(0, -7)
    for sample in rollout.samples:
      sample.ids[:] = -7
      sample.sampler_logprobs[:] = 0
  notes.append('edited')
  for values in (prompts, completions, answer, rollouts):
    values.clear()
  return sound


def raises(completion_ids):
  raise ConnectionError('no grader')


def backtracks(completion_ids):
  re.match(r'(a+)+$', 'a' * 40 + 'b')
  return length(completion_ids)


def spins(completion_ids):
  return [sum(1 for _ in iter(int, 1)) for _ in completion_ids]


def leaves(completion_ids):
  os._exit(0)


def crashes(completion_ids):
  ctypes.string_at(0)


def fills(completion_ids):
  return [float(len(bytearray(2**40))) for _ in completion_ids]


def overflows_stack(completion_ids):
  sys.setrecursionlimit(10**9)

  def down():
    return down()

  return down()


def leaks(completion_ids):
  kept.append(bytearray(20 * 2**20))
  return length(completion_ids)


def closes(completion_ids):
  os.closerange(3, 100)
  return length(completion_ids)


def writes(completion_ids):
  print('noise ' * 1000)
  for descriptor in range(1, 20):
    try:
      os.write(descriptor, b'\0\0\0\x09{"a": 1}\n')
    except OSError:
      pass
  return length(completion_ids)


def forks(completion_ids):
  """Forks; the child returns other rewards, and sooner."""
  if not os.fork():
    return [9.0 for _ in completion_ids]
  time.sleep(0.05)
  return length(completion_ids)


def replies(completion_ids):
  """Writes a reply of its own before it returns."""
  rewards = [9.0 for _ in completion_ids]
  reply = {'rewards': rewards, 'logged': {}, 'grown': 0}
  text = json.dumps(reply).encode()
  for descriptor in range(3, 20):
    try:
      os.write(descriptor, len(text).to_bytes(4) + text)
    except OSError:
      pass
  return length(completion_ids)


def starts_sessions(completion_ids, file, exits):
  """Starts children that outlive it; one keeps the socket."""
  own = subprocess.Popen(['sleep', '600'], start_new_session=True)
  pid = ctypes.CDLL(None).fork()  # unknown to the interpreter
  if not pid:
    os.setsid()
    time.sleep(600)
  with open(file, 'w') as f:
    f.write(f'{own.pid} {pid}')
  if exits:
    os._exit(3)
  time.sleep(600)


def returns_functions(completion_ids):
  return [length for _ in completion_ids]


def process(completion_ids):
  jax, key = 'jax' in sys.modules, 'TRIAL_API_KEY' in os.environ
  return [float(os.getpid()), float(jax), float(key)]
