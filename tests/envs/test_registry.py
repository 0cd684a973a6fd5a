"""Custom environments: a user's class by import path."""

import json

import pytest

from posttrain import main, schema
from posttrain.envs import registry
from tests.envs import echoes

PATH = 'tests.envs.echoes'


def make(name='Echo', **kwargs):
  cfg = schema.CustomEnv(import_path=f'{PATH}:{name}', kwargs=kwargs)
  return registry.make('mine', cfg)


def test_class_is_built_with_its_name_and_kwargs():
  env = make(repeats=2)
  assert isinstance(env, echoes.Echo) and env.name == 'mine'
  task = next(env.source('train', 0))
  assert task.env == 'mine'
  assert task.demonstration[0]['content'] == f'{task.answer} {task.answer}'
  episode = env.make(task)
  assert episode.reset() == task.prompt and episode.step('', False).done


@pytest.mark.parametrize('name', ['Echo', 'Plain'])
def test_missing_optional_attributes_get_their_defaults(name):
  env = make(name)
  assert env.votes == (name == 'Plain')
  assert not env.blocking and env.judge is None


@pytest.mark.parametrize(
  'path, message',
  [
    (f'{PATH}:Sourceless', r'got TypeError: .*abstract .*source'),
    (f'{PATH}:Renamed', "with name='mine', .*minemine"),
    ('no.such.module:Echo', "got 'no.such.module:Echo'"),
    (f'{PATH}:Raises', r'built with .* got KeyError: .*\(echoes.py:\d+\)$'),
  ],
)
def test_class_that_is_no_environment_is_refused(path, message):
  message = rf'^envs\.mine\.env\.import_path must .*{message}'
  with pytest.raises(ValueError, match=message) as error:
    registry.make('mine', schema.CustomEnv(import_path=path))
  assert '\n' not in str(error.value)


def test_a_run_trains_on_a_custom_environment(tmp_path, capsys):
  entry = {'env': {'type': 'custom', 'import_path': f'{PATH}:Echo'}}
  arguments = [
    '--config=configs/arithmetic_sft.py:tiny',
    f'--workdir={tmp_path / "run"}',
    f'--config.sft.envs={json.dumps({"mine": entry})}',
    '--config.sft.steps=1',
    '--config.sft.optim.warmup_steps=0',
    '--config.sft.eval.samples=0',
    '--config.compilation_cache=None',
  ]
  assert main.main(arguments) == 0, capsys.readouterr().err
  lines = (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()
  keys = set().union(*map(json.loads, lines))
  assert any(key.endswith('/mine') for key in keys), keys
