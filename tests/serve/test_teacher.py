"""A teacher behind a real server process, which dies in the middle of a run."""

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest

from posttrain import main, schema
from posttrain.metrics import writers
from posttrain.stage import job

ENV = schema.Arithmetic(ops=('+',), max_operand=9, train_tasks=50, eval_tasks=4)
STEPS, DIES_AT = 5, 2


def stage(entry, **options):
  return schema.Stage(
    envs={'sums': entry},
    batch=schema.Batch(
      prompts_per_step=8, row_tokens=48, micro_batch_tokens=192
    ),
    rollout=schema.Rollout(slots=8, prefill_rows=4),
    eval=schema.Eval(prompts=4, samples=0, max_tokens=8),
    **options,
  )


def launch(workdir, entry, **options):
  run = schema.Run(
    model=schema.PRESETS['tiny'],
    compilation_cache=None,
    metrics=schema.Metrics(progress=False, tensorboard=False),
    stages={'main': stage(entry, **options)},
  )
  main.launch(run, str(workdir), dry_run=False)
  return writers.read(str(workdir / 'metrics.jsonl'))


class Teacher:
  """The process; it can be killed, and comes back at the same port."""

  def __init__(self, checkpoint):
    with socket.socket() as free:
      free.bind(('127.0.0.1', 0))
      self.port = free.getsockname()[1]
    self._command = [
      sys.executable,
      '-m',
      'posttrain.serve',
      f'--checkpoint={checkpoint}',
      f'--port={self.port}',
      '--name=teacher',
      '--slots=2',
      '--max_model_len=64',
    ]
    self.starts = 0

  def start(self):
    self.starts += 1
    self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)

  def wait(self):
    until = time.monotonic() + 120
    while time.monotonic() < until:
      try:
        httpx.get(f'http://127.0.0.1:{self.port}/health')
        return
      except httpx.TransportError:
        time.sleep(0.2)
    raise AssertionError('the server must start')

  def kill(self):
    os.kill(self.process.pid, signal.SIGKILL)
    self.process.wait()


@pytest.mark.slow
def test_opd_survives_the_death_of_its_teacher(tmp_path, monkeypatch):
  """And learns what it would have learned from one in this process."""
  teacher = tmp_path / 'teacher'
  launch(teacher, schema.EnvEntry(env=ENV), steps=20)
  entry = schema.EnvEntry(
    env=ENV,
    sampler=schema.Policy(temperature=0.8, max_tokens=8),
    algorithm=schema.Opd(reference=str(teacher)),
  )
  # So slow that rounding in a logprob changes no token that is drawn.
  options = {'steps': STEPS, 'optim': schema.Optim(lr=1e-6, warmup_steps=0)}
  here = launch(tmp_path / 'here', entry, **options)
  server = Teacher(teacher)
  server.start()
  server.wait()
  log = job.Job.log

  def dies(self, step, values):
    if step == DIES_AT and server.starts == 1:
      server.kill()
      threading.Timer(3.0, server.start).start()
    return log(self, step, values)

  monkeypatch.setattr(job.Job, 'log', dies)
  far = dataclasses.replace(
    entry,
    algorithm=schema.Opd(
      reference=schema.Endpoint(
        name='teacher', base_url=f'http://127.0.0.1:{server.port}/v1'
      )
    ),
  )
  try:
    there = launch(tmp_path / 'there', far, **options)
  finally:
    server.kill()
  assert server.starts == 2 and len(there) == len(here) == STEPS + 1
  for a, b in zip(here[1:], there[1:], strict=True):
    assert a['ref_kl/kl'] > 0.01  # it is another model
    for key in ('ref_kl/kl', 'loss/ref_kl', 'optim/grad_norm'):
      assert b[key] == pytest.approx(a[key], rel=1e-4, abs=1e-5)
