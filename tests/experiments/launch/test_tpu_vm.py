"""The startup script and the queued resource of a TPU slice."""

import json
import subprocess
import sys

import pytest

from experiments.launch import jobs, on_tpu_vm
from tests.experiments.launch import scripts

PYTHON = """
printf "%s\\0" "$@" > "$HOME/args"
echo start >> "$HOME/starts"
code=$(sed -n "$(wc -l < "$HOME/starts")p" "$HOME/codes")
exit "${code:-0}"
"""


@pytest.fixture
def programs(tmp_path, monkeypatch):
  scripts.program(tmp_path, 'python3', PYTHON)
  monkeypatch.setattr(on_tpu_vm, 'LOG', str(tmp_path / 'log'))
  (tmp_path / 'codes').write_text('')
  return tmp_path


def run(text, folder):
  env = scripts.environment(folder)
  return subprocess.run(
    ['bash', '-s'], input=text, env=env, text=True, timeout=30
  ).returncode


def make(**fields):
  return scripts.make('tpu_vm', tpu='v5litepod-16', **fields)


@pytest.mark.parametrize(
  ('codes', 'restarts', 'starts', 'code'),
  [
    ([75, 5, 0], 20, 3, 0),
    ([75] * 9, 3, 4, 75),
    ([137, 4, 0], 20, 3, 0),
    ([5, 5, 5, 0], 0, 4, 0),  # another host is away
  ],
)
def test_it_starts_again_after_some_exit_codes_and_not_for_ever(
  programs, codes, restarts, starts, code, monkeypatch
):
  (programs / 'codes').write_text(''.join(f'{x}\n' for x in codes))
  monkeypatch.setattr(on_tpu_vm, '_PAUSE_SECONDS', 0)
  text = on_tpu_vm.script(
    jobs.Job('x', 'c', (), (), 'w'), make(restarts=restarts)
  )
  assert run(text, programs) == code
  assert (programs / 'starts').read_text() == 'start\n' * starts


def test_the_queued_resource_has_the_slice_and_the_script(
  programs, monkeypatch
):
  code = (
    'import json, sys; path = sys.argv[-2].split("=", 2)[2]; '
    'json.dump([sys.argv[1:], open(path).read()], open("gcloud.json", "w"))'
  )
  scripts.program(programs, 'gcloud', f'{sys.executable} -c \'{code}\' "$@"')
  monkeypatch.setenv('PATH', scripts.environment(programs)['PATH'])
  monkeypatch.chdir(programs)
  job = jobs.Job('LR', 'c.py', (), (), '/data/w', 4)
  options = make(extra=['--zone=z'])
  assert on_tpu_vm.submit([job], options, dry_run=False) == 0
  words, text = json.loads((programs / 'gcloud.json').read_text())
  assert words[:4] == ['compute', 'tpus', 'queued-resources', 'create']
  name = words[4]
  assert name.startswith('lr-') and f'--node-id={name}' in words
  assert '--accelerator-type=v5litepod-16' in words
  assert words[-1] == '--zone=z'
  assert text == on_tpu_vm.script(job, options)
