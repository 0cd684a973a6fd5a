"""Reads every option of the adapters, for `test_runs`."""

import types

import pytest

from posttrain import schema
from posttrain.envs import adapters, registry
from posttrain.envs.adapters import verifiers_v1
from tests.envs.adapters import servers


def read_options():
  """Plays a turn with each adapter that works without its extra."""
  with servers.Server().running() as url:
    _play(schema.OpenEnv(url=url))
  _play(schema.Trl('trl', 'tests.envs.adapters.games:Guess'))
  with_rows = schema.Trl('trl', 'tests.envs.adapters.games:Guess', path='rows')
  assert not len(registry.make('a', with_rows).source('eval', 0))
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(adapters, 'load', lambda *names: None)
    patch.setattr(verifiers_v1, 'load_taskset', lambda kind, options, key: [])
    env = registry.make('a', schema.Verifiers(taskset='builtins:list'))
    assert not len(env.source('train', 0)) and not len(env.source('eval', 0))
    package = types.SimpleNamespace(create_dataset=_tasks)
    patch.setattr(adapters, 'load', lambda *names: package)
    _play(schema.ReasoningGym(train_tasks=5, eval_tasks=3))


class _Tasks(list):
  def score_answer(self, answer, entry):
    return answer == entry['answer']


def _tasks(name, *, seed, size, **options):
  return _Tasks({'question': f'{seed} {i}', 'answer': 'a'} for i in range(size))


def _play(cfg):
  env = registry.make('a', cfg)
  for split in ('train', 'eval'):
    episode = env.make(next(env.source(split, 0)))
    episode.reset()
    episode.step('{}', False)
    episode.grade()
    episode.close()
