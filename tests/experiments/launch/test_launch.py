"""The launcher's command line, and its dry runs without any cluster."""

import pathlib
import re
import sys

import pytest

from experiments.launch import __main__ as launch
from posttrain.util import errors

BASE = (
  '--config=configs/arithmetic.py:tiny',
  '--sweep=grpo.optim.lr=1e-4,3e-4',
)
PLACES = {
  'local': ['--workdir=runs/lr'],
  'xmanager': ['--workdir=runs/lr'],
  'slurm': ['--workdir=runs/lr', '--gpus=8', '--hosts=2'],
  'gke': ['--workdir=/data/lr', '--image=x:1', '--claim=c', '--tpu=v6e-16'],
  'tpu_vm': ['--workdir=/data/lr', '--tpu=v5litepod-16'],
}


@pytest.mark.parametrize('place', PLACES)
def test_a_dry_run_prints_every_run_and_writes_nothing(
  place, capsys, monkeypatch, tmp_path
):
  for name in ('xmanager', 'ray'):
    monkeypatch.setitem(sys.modules, name, None)
  monkeypatch.setenv('PATH', str(tmp_path))
  words = [f'--on={place}', *BASE, *PLACES[place], '--dry_run']
  # A relative workdir must not appear here either.
  before = set(pathlib.Path().iterdir())
  assert launch.main(words) == errors.DONE
  text = capsys.readouterr().out
  for rate in ('1e-4', '3e-4'):
    assert re.search(rf'--config\.grpo\.optim\.lr={rate}\b', text)
    assert re.search(rf'--workdir=\S*/lr={rate}\b', text)
  assert set(pathlib.Path().iterdir()) == before


def test_modules_of_the_current_folder_are_found(monkeypatch, tmp_path, capsys):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, 'path', [x for x in sys.path if x])
  (tmp_path / 'beside.py').write_text('def short(completions):\n  return [0.0]')
  (tmp_path / 'a.jsonl').write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
  words = '--on=local --workdir=w --config=grpo:small,a.jsonl,beside:short'
  assert launch.main([*words.split(), '--dry_run']) == errors.DONE
  assert 'beside:short' in capsys.readouterr().out


@pytest.mark.parametrize('place', ['gke', 'tpu_vm'])
def test_a_missing_program_is_named(place, capsys, monkeypatch, tmp_path):
  monkeypatch.setenv('PATH', str(tmp_path))
  words = [f'--on={place}', *BASE, *PLACES[place]]
  assert launch.main(words) == errors.USAGE
  assert f'--on={place} must have the program' in capsys.readouterr().err


@pytest.mark.parametrize(
  ('words', 'error'),
  [
    (['--sweep=grpo.optim.lrr=1'], r'config\.grpo\.optim\.lr\?'),
    (['--tpu=v9-1'], '--tpu'),
    (['--tpu=v5litepod-16', '--hosts=2'], '--hosts must be .* expected 4'),
    (['--on=tpu_vm'], '--tpu=TYPE'),
    (['--on=gke', '--image=x', '--claim=c'], '--workdir .*--mount'),
  ],
)
def test_mistakes_are_one_line_before_anything_starts(
  words, error, capsys, tmp_path
):
  workdir = tmp_path / 'w'
  base = ['--on=local', BASE[0], f'--workdir={workdir}']
  assert launch.main([*base, *words]) == errors.USAGE
  text = capsys.readouterr()
  assert not text.out and text.err.count('\n') == 1
  assert re.search(error, text.err), text.err
  assert not workdir.exists()
