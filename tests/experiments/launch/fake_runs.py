"""A stand-in for the interpreter of runs, which only pretends to train."""

import os

from posttrain.metrics import writers

# Stands in for the interpreter: notes the start in the workdir, then ends with
# the next of the codes that the run's file names, or waits for a signal.
PROGRAM = """#!{python} -SE
import json, os, signal, sys, time
words = dict(word[2:].split('=', 1) for word in sys.argv if '=' in word)
workdir, process = words['workdir'], words.get('process_id', '0')
note = dict(words, gpus=os.environ.get('CUDA_VISIBLE_DEVICES'))
note['start'] = time.monotonic()
path = os.path.join(workdir, 'starts.jsonl')
plan = os.environ['PLAN']
with open(plan) as file:
  codes = json.load(file)[words.get('config.seed', '0')]
own = os.path.join(workdir, 'start_' + process)
count = os.path.getsize(own) if os.path.exists(own) else 0
with open(own, 'a') as file:
  file.write('x')
code = codes[min(count, len(codes) - 1)]
if isinstance(code, list):
  code = code[int(process)]
def end(code):
  note.update(code=code, end=time.monotonic())
  with open(path, 'a') as file:
    file.write(json.dumps(note) + chr(10))
  if code == 0:
    row = dict(stage='grpo', step=3)
    row['eval/pass_rate/sums'] = int(words.get('config.seed', 0)) / 10
    row['loss/total'] = 1.0
    with open(os.path.join(workdir, 'metrics.jsonl'), 'w') as file:
      file.write(json.dumps(row) + chr(10))
  print('the last line of', words.get('config.seed'), flush=True)
  if code < 0:
    os.kill(os.getpid(), -code)
  os._exit(code)
if code == 'wait':
  signal.signal(signal.SIGTERM, lambda *_: end(75))
  signal.signal(signal.SIGINT, lambda *_: end(130))
  open(os.path.join(workdir, 'ready'), 'w').close()
  while True:
    time.sleep(0.05)
time.sleep(0.15)
end(code)
"""


def read(workdir):
  """Returns a row per process that has started in a workdir."""
  return writers.read(os.path.join(workdir, 'starts.jsonl'))
