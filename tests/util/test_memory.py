"""Host memory settings; the out-of-memory error is that of a run."""

import platform
import subprocess
import sys
import types

import jax
import pytest

from posttrain import evaluate, generate, main, make_pairs
from posttrain.checkpoints import weights
from posttrain.serve import __main__ as serve
from posttrain.stage import job
from posttrain.util import errors, memory, watchdog


def test_freed_memory_is_kept_on_glibc():
  code = 'from posttrain.util import memory as i; print(i.keep_freed_memory())'
  done = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, check=True
  )
  glibc = platform.libc_ver()[0] == 'glibc'
  assert done.stdout.strip() == str(glibc)


@pytest.mark.parametrize(
  'error',
  [RuntimeError('INTERNAL: something else'), ValueError('RESOURCE_EXHAUSTED')],
)
def test_other_errors_pass_unchanged(error):
  with pytest.raises(type(error), match=str(error)):
    with memory.explain_oom('a stage', lambda phase: ['lower x']):
      raise error
  assert not memory.is_oom(error)


OOM = jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory\nmore')


@pytest.mark.parametrize(
  ('command', 'remedies'),
  [
    (main, ('config.STAGE.rollout.slots', 'config.STAGE.eval.max_tokens')),
    (evaluate, ('config.STAGE.rollout.slots', 'config.STAGE.eval.max_tokens')),
    (make_pairs, ('--max_tokens', 'config.STAGE.rollout.slots')),
    (generate, ('--max_tokens',)),
    (serve, ('--slots', '--max_model_len')),
  ],
)
def test_every_command_explains_it_in_one_line(command, remedies, capsys):
  def fail(flags):
    raise OOM

  parser = command.PARSER
  words = [f'--{k}=1' for k, x in parser._flags.items() if x.if_absent is None]
  more = {
    main: ['--dry_run'],
    make_pairs: ['--gsm8k=x'],
    generate: ['--prompt=x'],
    serve: ['--checkpoint=x'],
  }
  assert parser.run(fail, words + more.get(command, [])) == errors.FAILED
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith('error: this command must fit into the memory')
  assert all(x in line for x in remedies)


@pytest.mark.parametrize(
  ('phase', 'call'),
  [
    ('load', lambda full: weights.load('x', None)),
    ('decode', lambda full: generate.answers(full, [], 1, full, 0)),
    ('eval', evaluate.measure),
    ('rollout', make_pairs._sample),
  ],
)
def test_commands_name_their_phase(phase, call, monkeypatch):
  class Full:
    def __getattr__(self, name):
      raise jax.errors.JaxRuntimeError(*OOM.args)

  monkeypatch.setattr(weights, 'read', lambda path: Full().bytes)
  with pytest.raises(memory.OutOfDeviceMemory, match=f'this, phase {phase} mu'):
    with memory.explain_oom('this', lambda phase: ()):
      call(Full())


@pytest.mark.parametrize(
  ('phase', 'slots', 'remedies'),
  [
    (
      'rollout',
      8,
      ('lower config.s.rollout.slots', 'config.s.batch.row_tokens'),
    ),
    ('eval', 8, ('lower config.s.rollout.slots', 'config.s.eval.max_tokens')),
    ('eval', None, ('lower config.s.batch.micro_batch_tokens', 'mesh.fsdp')),
    ('update', 8, ("set config.model.remat='block'", 'raise config.mesh.fsdp')),
    (None, 8, ('lower config.s.batch.micro_batch_tokens', 'mesh.fsdp')),
  ],
)
def test_a_run_names_the_phase_and_its_keys(phase, slots, remedies):
  sizes = types.SimpleNamespace(stage='s', slots=slots)
  with pytest.raises(memory.OutOfDeviceMemory) as caught:
    with (
      job.explain_oom(sizes),
      watchdog.phase(phase) if phase else job.explain_oom(sizes),
    ):
      raise jax.errors.JaxRuntimeError(*OOM.args)
  text = str(caught.value)
  assert '\n' not in text and all(x in text for x in remedies)
  assert text.startswith(
    f'stage s, phase {phase} must' if phase else 'stage s must'
  )
