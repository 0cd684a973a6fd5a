"""Reward functions and an environment that fail, named by import path."""

import ctypes
import os
import sys
import threading
import time

import numpy as np

from posttrain import types
from posttrain.data import sources

BATCH = 16  # rollouts of a training step of the trials


def _raise(error):
  raise error


def _spin():
  while True:
    pass


def _swallow():
  while True:
    try:
      time.sleep(60)
    except Exception:
      pass


# Fault -> what a call does instead of returning the sound rewards it gets; an
# environment that waits has no fault.
FAULTS = {
  'raises': lambda sound: _raise(ConnectionError('no grader')),
  'NaN': lambda sound: [float('nan') for _ in sound],
  'one NaN': lambda sound: [float('nan'), *sound[1:]],
  'wrong length': lambda sound: sound[1:],
  'text': lambda sound: ['good' for _ in sound],
  'waits': lambda sound: time.sleep(0.2),
  'hangs': lambda sound: threading.Event().wait(),
  'swallows': lambda sound: _swallow(),
  'spins': lambda sound: _spin(),
  'exits': lambda sound: sys.exit(3),
  'leaves': lambda sound: os._exit(0),
  'crashes': lambda sound: ctypes.string_at(0),
}


def reward(completion_ids, fault, folder):
  """Returns -length / 40; the first call of training fails.

  Args:
    completion_ids: the sampled ids; those of a training step are BATCH.
    fault: a key of FAULTS.
    folder: a folder that notes the first call.
  """
  sound = [-len(ids) / 40 for ids in completion_ids]
  first = os.path.join(folder, fault.replace(' ', '_'))
  if len(sound) != BATCH or os.path.exists(first):
    return sound
  open(first, 'w').close()
  return FAULTS[fault](sound)


def never(completion_ids):
  """Fails in every call."""
  raise ConnectionError(f'no grader for {len(completion_ids)} completions')


METHODS = ('make', 'reset', 'step', 'grade', 'close')


class Env:
  """Asks for letters; one task in two fails, in one method each."""

  max_turns = 1

  def __init__(self, name, fault='', blocking=False):
    """Stores the fault, a key of FAULTS."""
    self.name, self.blocking, self._fault = name, blocking, fault

  def source(self, split, seed):
    del split
    prompt = ({'role': 'user', 'content': 'letters'},)
    tasks = [types.Task(f'{i}', self.name, prompt) for i in range(20)]
    return sources.Shuffled(tasks, seed)

  def make(self, task):
    return Episode(self, task)

  def fail(self, task, method):
    """Fails if it is this task's turn to fail in this method."""
    number, sound = divmod(int(task.id), 2)
    if not sound and METHODS[number % len(METHODS)] == method:
      FAULTS[self._fault]([0.0])


class Episode:
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
