"""Tokens computed and needed, on rows that are counted by hand."""

import os
import subprocess
import types

import numpy as np
import pytest

from experiments.benchmarks import counts
from tests.test_docs import ROOT

# Two micro-batches of one row, of which one is live. In it 1 2 3 4 and 1 2 5
# are a tree; 1 2 is another sequence.
TREE = {
  'ids': [1, 2, 3, 4, 5, 1, 2, 0],
  'positions': [0, 1, 2, 3, 2, 0, 1, 0],
  'segment_ids': [1, 1, 1, 1, 2, 3, 3, 0],
  'parents': [0, 0, 1, 2, 1, 5, 5, 0],
}
ROWS = {
  'ids': [1, 2, 3, 4, 1, 2, 5, 1, 2, 0],
  'positions': [0, 1, 2, 3, 0, 1, 2, 0, 1, 0],
  'segment_ids': [1, 1, 1, 1, 2, 2, 2, 3, 3, 0],
}


@pytest.mark.parametrize('row, computed', [(TREE, 8), (ROWS, 10)])
def test_shared_prefixes_are_needed_once_whatever_the_layout(row, computed):
  arrays = {name: np.array([[x], [x]]) for name, x in row.items()}
  batch = types.SimpleNamespace(**arrays, num_micro_batches=np.int32(1))
  sequences = sorted(counts.sequences(batch))
  assert sequences == [[1, 2], [1, 2, 3, 4], [1, 2, 5]]
  assert counts.needed([*sequences, [7], [1, 2, 3]]) == 6  # in any order
  assert counts.positions(batch) == computed


@pytest.mark.slow
def test_every_part_of_the_gpu_script_runs():
  done = subprocess.run(
    ['experiments/benchmarks/gpu.sh'],
    env={**os.environ, 'SIZE': 'tiny'},
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  parts = 'machine', 'kernels', 'decode_1', 'decode_64', 'sft_64', 'grpo'
  assert all(f'| {part} |' in done.stdout for part in parts)
