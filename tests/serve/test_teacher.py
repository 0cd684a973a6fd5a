"""OPD with a reference, and a sampler, in processes that are killed."""

import dataclasses
import threading

import pytest

from experiments.benchmarks import serve
from experiments.launch import beside
from posttrain import main, schema, types
from posttrain.metrics import writers
from posttrain.stage import logbook

ENV = schema.Arithmetic(ops=('+',), max_operand=9, train_tasks=50, eval_tasks=4)
STEPS, KILL_STEP = 5, 2


def launch(workdir, entry, samplers=None, **options):
  stage = schema.Stage(
    envs={'sums': entry},
    batch=schema.Batch(
      prompts_per_step=8, row_tokens=48, micro_batch_tokens=192
    ),
    rollout=schema.Rollout(slots=8, prefill_rows=4),
    eval=schema.Eval(prompts=4, samples=0, max_tokens=8),
    **options,
  )
  run = schema.Run(
    model=schema.PRESETS['tiny'],
    compilation_cache=None,
    metrics=schema.Metrics(progress=False),
    stages={'main': stage},
  )
  main.train(run, str(workdir), samplers=samplers)
  return writers.read(str(workdir / 'metrics.jsonl'))


@pytest.mark.slow
@pytest.mark.parametrize('samples_elsewhere', [False, True])
def test_opd_continues_after_a_server_restart(
  tmp_path, monkeypatch, samples_elsewhere
):
  """The metrics equal those with the models in this process."""
  teacher = tmp_path / serve.NAME
  launch(teacher, schema.EnvEntry(env=ENV), steps=20)
  entry = schema.EnvEntry(
    env=ENV,
    sampler=schema.Policy(temperature=0.8, max_tokens=8),
    algorithm=schema.Opd(reference=str(teacher)),
  )
  # A rate so small that rounding of logprobs changes no sampled token.
  options = {'steps': STEPS, 'optim': schema.Optim(lr=1e-6, warmup_steps=0)}
  local = launch(tmp_path / 'local', entry, **options)
  words = '--slots=2', '--max_model_len=64'
  servers = [serve.Server(tmp_path, *words)]
  port = f'--port={servers[0].url.port}'
  own_port, decoders, samplers = beside.free_port(), [], None
  if samples_elsewhere:
    decoders.append(beside.start_sampler(own_port))
    samplers = types.Samplers((f'http://127.0.0.1:{own_port}',))

  write = logbook.Logbook.write

  def start_again():
    servers.append(serve.Server(tmp_path, *words, port))

  def write_and_kill(self, step, values):
    if step == KILL_STEP and len(servers) == 1:
      servers[0].process.kill()
      servers[0].process.wait()
      threading.Timer(3.0, start_again).start()
    if step == KILL_STEP + 1 and len(decoders) == 1:
      decoders[0].kill()
      decoders[0].wait()
      decoders.append(beside.start_sampler(own_port))
    return write(self, step, values)

  monkeypatch.setattr(logbook.Logbook, 'write', write_and_kill)
  remote_entry = dataclasses.replace(
    entry,
    algorithm=schema.Opd(
      reference=schema.Endpoint(
        name=serve.NAME, base_url=f'{servers[0].url}/v1'
      )
    ),
  )
  try:
    remote = launch(tmp_path / 'remote', remote_entry, samplers, **options)
  finally:
    for server in servers:
      server.stop()
      server.process.stdout.close()
    for process in decoders:
      process.kill()
      process.wait()
  assert len(decoders) == 2 * samples_elsewhere
  assert len(servers) == 2 and len(remote) == len(local) == STEPS + 1
  for a, b in zip(local[1:], remote[1:], strict=True):
    assert a['ref_kl/kl'] > 0.01  # the models differ
    for key in ('ref_kl/kl', 'loss/ref_kl', 'optim/grad_norm'):
      assert b[key] == pytest.approx(a[key], rel=1e-4, abs=1e-5)
