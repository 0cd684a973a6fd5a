"""Assembly of a stage: what preflight builds is what the run uses."""

import collections
import json

import pytest

from posttrain import main
from posttrain.chat import rendering
from posttrain.data import preferences, row_files
from posttrain.envs import registry
from posttrain.stage import build, plan, preflight
from posttrain.util import preemption

PAIR = {'prompt': 'Capital of Peru?', 'chosen': 'Lima.', 'rejected': 'Quito.'}


@pytest.fixture
def counts(monkeypatch):
  """Calls of what must happen once, by name."""
  counter = collections.Counter()

  def count(module, name):
    function = getattr(module, name)

    def counted(*args, **kwargs):
      counter[f'{module.__name__}.{name}'] += 1
      return function(*args, **kwargs)

    monkeypatch.setattr(module, name, counted)

  for module, name in (
    (rendering, 'load'),
    (preflight.sharding, 'make_mesh'),
    (registry, 'make'),
    (row_files, 'read'),
    (preferences, 'read'),
    (plan, 'make'),
  ):
    count(module, name)
  return counter


def _build(run, name, workdir):
  stages = preflight.check(run)
  main.claim(str(workdir), run)
  build.make(stages[name], str(workdir), 0, preemption.Signal()).close()


def test_pairs_are_read_once_and_components_of_all_stages_built_once(
  tmp_path, counts
):
  path = tmp_path / 'pairs.jsonl'
  rows = [{**PAIR, 'prompt': f'{PAIR["prompt"]} {i}'} for i in range(4)]
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  pairs = {'type': 'file', 'path': str(path), 'eval_fraction': 0.0}
  run = main.load(
    'configs/arithmetic_dpo.py:tiny',
    [
      ('dpo.pairs', json.dumps(pairs)),
      ('dpo.init', 'random'),
      ('dpo.loss.preference', '{"type": "simpo"}'),
    ],
  )
  _build(run, 'dpo', tmp_path / 'run')
  assert counts == {
    'posttrain.chat.rendering.load': 1,
    'posttrain.sharding.make_mesh': 1,
    'posttrain.envs.registry.make': len(run.stages),
    'posttrain.data.preferences.read': 1,
    'posttrain.stage.plan.make': len(run.stages),
  }
