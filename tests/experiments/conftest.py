"""Runs that only pretend to train."""

import json
import sys

import pytest

from tests.experiments.launch import fake_runs


@pytest.fixture
def fake(tmp_path, monkeypatch):
  """Returns a function: codes by seed -> path of the interpreter."""
  path = tmp_path / 'python'
  path.write_text(fake_runs.PROGRAM.format(python=sys.executable))
  path.chmod(0o755)
  monkeypatch.setenv('PLAN', str(tmp_path / 'plan.json'))
  monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)

  def write(codes):
    (tmp_path / 'plan.json').write_text(json.dumps(codes))
    return str(path)

  return write
