"""Functions that would end a run, hang it or fill its memory."""

import ctypes
import os
import re
import subprocess
import sys
import time

kept = []


def length(completion_ids, completions, rollouts, log_metric, log_extra):
  log_metric('texts', sum(len(c) for c in completions))
  log_extra('third', [1 / 3, 'x'])
  return [None if not ids else -len(ids) / 3 for ids in completion_ids]


async def later(completion_ids):
  return [float(len(ids)) for ids in completion_ids]


def backtracks(rollouts):
  re.match(r'(a+)+$', 'a' * 40 + 'b')
  return [0.0 for _ in rollouts]


def leaves(rollouts):
  os._exit(3)


def crashes(rollouts):
  ctypes.string_at(0)


def leaks(rollouts):
  kept.append(bytearray(20 * 2**20))
  return [float(len(kept)) for _ in rollouts]


def raises(rollouts):
  raise ValueError('a\n' * 10**6)


def keeps_child(file):
  """Leaves a child that runs on."""
  child = subprocess.Popen(['sleep', '60'])
  with open(file, 'w') as f:
    f.write(f'{os.getpid()} {child.pid}')
  return [1.0, 1.0]


def starts_children(rollouts, file):
  keeps_child(file)
  time.sleep(60)


def leaves_children(rollouts, file):
  """Exits while a child that holds the socket runs on."""
  pid = ctypes.CDLL(None).fork()  # unknown to the interpreter
  if not pid:
    time.sleep(60)
  with open(file, 'w') as f:
    f.write(f'{os.getpid()} {pid}')
  os._exit(3)


def process(completion_ids):
  return [float(os.getpid()), float('jax' in sys.modules)]
