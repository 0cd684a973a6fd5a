"""The recipe for pairs in English, with the suite measured before and after."""

import json
import math

import pytest

from posttrain.chat import rendering
from posttrain.metrics import writers
from posttrain.models import hf
from tests import fixtures, toys

# Answers that loop, and answers that do not.
PAIRS = [
  {
    'prompt': f'Tell me about number {i}.',
    'chosen': f'{i} is a number.',
    'rejected': 'no no no no no no no',
  }
  for i in range(40)
]


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A HuggingFace directory of random weights on bytes, and a file of pairs."""
  path = tmp_path_factory.mktemp('published') / 'model'
  params = fixtures.params(seed=3)
  hf.save(params, fixtures.MODEL, path, dtype='float32')
  rendering.write(fixtures.RENDERER, path)
  lines = [json.dumps(pair) + '\n' for pair in PAIRS]
  (path / 'pairs.jsonl').write_text(''.join(lines))
  return path


@pytest.fixture(scope='module')
def workdir(folder, tmp_path_factory):
  workdir = tmp_path_factory.mktemp('run')
  flags = ('steps=20', 'optim.lr=3e-3', 'eval.every=10')
  flags = [f'--config.dpo.{x}' for x in flags]
  config = f'dpo:{folder},{folder}/pairs.jsonl,tiny'
  assert toys.command(config, workdir, *flags) == 0
  return workdir


def rows(workdir):
  return writers.read(str(workdir / 'metrics.jsonl'))


def test_pairs_of_a_file_are_learned_and_the_suite_is_measured(workdir):
  evaluated = [row for row in rows(workdir) if 'eval/suite/length' in row]
  assert [row['step'] for row in evaluated] == [0, 10, 20]
  start, *_, end = evaluated
  assert start['eval/pairs/loss/preference'] == pytest.approx(
    math.log(2), rel=1e-3
  )
  assert end['eval/pairs/loss/preference'] < start['eval/pairs/loss/preference']
  assert end['eval/pairs/rewards/accuracies'] == 1
  assert 0 < end['eval/pairs/rewards_low/accuracies'] < 1
  assert all(row['eval/suite/length'] <= 16 for row in evaluated)
  report = (workdir / 'report.html').read_text()
  assert 'Write a Python function that reverses a list.' in report


@pytest.mark.slow
def test_the_recipe_runs_without_a_directory_and_with_lora(folder, tmp_path):
  for argument in ('tiny', f'{folder},{folder}/pairs.jsonl,tiny,lora'):
    workdir = tmp_path / argument[-4:]
    assert toys.command(f'dpo:{argument}', workdir) == 0
    last = rows(workdir)[-1]
    assert last['step'] == 4 and 'eval/suite/repetition' in last
