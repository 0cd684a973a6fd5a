"""Budgets of the programs that are compiled for several devices.

Nothing runs: XLA's CPU backend compiles for eight forced devices.
"""

import json
import os
import subprocess
import sys

import pytest

from experiments.planner import census
from posttrain import schema
from tests import fixtures

# No two of its sizes are equal, whole or split.
MODEL = schema.Model(
  vocab_size=4096,
  layers=2,
  embed_dim=768,
  heads=4,
  kv_heads=4,
  head_dim=64,
  mlp_dim=1280,
  qk_norm=True,
  tied_head=False,
  dtype='bfloat16',
  remat='block',
)
BLOCK_BYTES = 2**18  # of logits: the vocabulary is a loop of several chunks


def run(*argv: str):
  """Runs a module with XLA's optimizations; returns its last line."""
  done = subprocess.run(
    [sys.executable, '-m', *argv],
    env={**os.environ, 'JAX_DISABLE_MOST_OPTIMIZATIONS': '0'},
    cwd=fixtures.ROOT,
    capture_output=True,
    text=True,
    timeout=600,
  )
  assert done.returncode == 0, done.stderr[-2000:]
  return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
  'mesh', [(1, 2, 4), pytest.param((1, 8, 1), marks=pytest.mark.slow)]
)
def test_train_steps_of_two_layers_are_within_budget(mesh):
  row = run('tests.experiments.test_census', *map(str, mesh))
  assert row['violations'] == []


def main() -> None:
  """Prints the budget of a mesh: run in a process of its own."""
  census.prepare(8)
  from experiments.planner import programs
  from posttrain.losses import logprobs

  logprobs.BLOCK_BYTES = BLOCK_BYTES
  sizes, mesh = programs.Sizes(rows=8, row_tokens=640), map(int, sys.argv[1:])
  row, _ = census.measure('train_step', MODEL, tuple(mesh), sizes)
  print(json.dumps(row))


if __name__ == '__main__':
  main()
