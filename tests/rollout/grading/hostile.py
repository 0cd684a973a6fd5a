"""Functions that would end a run, hang it or fill its memory."""

import ctypes
import os
import re
import subprocess
import sys
import threading
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


def fills(rollouts):
  return [float(len(bytearray(2**40))) for _ in rollouts]


def leaks(rollouts):
  kept.append(bytearray(20 * 2**20))
  return [float(len(kept)) for _ in rollouts]


def prints(rollouts):
  print('noise ' * 1000, flush=True)
  os.write(1, b'\x00\xff' * 1000)
  return [1.0 for _ in rollouts]


def returns_functions(rollouts):
  return [lambda: 1.0 for _ in rollouts]


def writes_to_all(rollouts):
  for descriptor in range(3, 64):
    try:
      os.write(descriptor, b'\0\0\0\x02{}')
    except OSError:
      pass
  return [1.0 for _ in rollouts]


def forks(rollouts, file):
  """Forks once; the child returns as well, and sooner."""
  kept.append(len(kept) + 1.0)
  if len(kept) == 1:
    pid = os.fork()
    if not pid:
      return [-1.0 for _ in rollouts]
    with open(file, 'w') as f:
      f.write(str(pid))
    time.sleep(0.2)
  return [kept[-1] for _ in rollouts]


def replies_early(rollouts):
  reply = b'{"rewards": [9.0, 9.0], "logged": {}, "grown": 0}'
  for descriptor in range(3, 64):
    try:
      os.write(descriptor, len(reply).to_bytes(4) + reply)
    except OSError:
      pass
  return [1.0 for _ in rollouts]


def replies_late(rollouts):
  """Replies once more after each call, from a thread."""

  def reply():
    time.sleep(0.2)
    replies_early(rollouts)

  threading.Thread(target=reply).start()
  return [1.0 for _ in rollouts]


def raises(rollouts):
  raise ValueError('a\n' * 10**6)


def starts_children(rollouts, file):
  child = subprocess.Popen(['sleep', '60'])
  own = subprocess.Popen(['sleep', '60'], start_new_session=True)
  # One whose parent has ended, in a session of its own.
  orphan = subprocess.run(
    ['sh', '-c', 'setsid sleep 60 >/dev/null & echo $!'], stdout=-1
  )
  with open(file, 'w') as f:
    f.write(f'{os.getpid()} {child.pid} {own.pid} {int(orphan.stdout)}')
  time.sleep(60)


def leaves_children(rollouts, file):
  """Exits while children, also one that has the socket, run on."""
  own = subprocess.Popen(['sleep', '60'], start_new_session=True)
  pid = ctypes.CDLL(None).fork()  # unknown to the interpreter
  if not pid:
    time.sleep(60)
  with open(file, 'w') as f:
    f.write(f'{own.pid} {pid}')
  os._exit(3)


def modules(rollouts):
  return [float('jax' in sys.modules)] * 2


def secrets(completion_ids):
  return [
    float('SECRET_KEY' in os.environ),
    float(len(os.listdir('/proc/self/fd'))),
  ]


def process(completion_ids):
  return [float(os.getpid()), 0.0]


def edits(prompts, completions, answer, rollouts):
  from tests.rollout.grading import judged

  ids = [rollout.samples[0].ids.tolist() for rollout in rollouts]
  return judged.edits(
    prompts, completions, ids, answer, rollouts, {'nested': []}
  )
