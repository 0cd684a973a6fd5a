"""What configs that the user did not write may name."""

import dataclasses
import json

import pytest

from configs import machinery
from posttrain import config, main, schema
from posttrain.config import trust
from posttrain.util import imports

FOREIGN = 'subprocess:getoutput'
ADDRESS = 'gs://evil/x'


def run_of(**reward):
  rewards = {'x': schema.RewardFn(**reward)} if reward else {}
  stage = schema.Stage(
    kind='tokens',
    envs={
      'a': schema.EnvEntry(
        algorithm=schema.Grpo(),
        sampler=schema.Policy(max_tokens=4),
        group_size=2,
        rewards=rewards,
      )
    },
  )
  return schema.Run(stages={'s': stage})


@pytest.mark.parametrize(
  'path',
  [
    FOREIGN,
    'posttrain.util.imports:importlib.import_module',
    'posttrain.rewards.texts:np.save',
    'posttrainx.rewards.numeric:parse',
    'posttrain.rewards.numeric:_finite',
    'experiments.trials:main',
  ],
)
def test_functions_from_elsewhere_need_trust(path):
  with pytest.raises(ValueError, match='--trust_config') as error:
    trust.check(run_of(fn=path), 'config.json')
  assert f'config.s.envs.a.rewards.x.fn {path!r}' in str(error.value)


@pytest.mark.parametrize(
  'path',
  [
    'posttrain.rewards.texts:ratio',
    'posttrain.envs.sql.functions:reward_correctness',
    'configs.algorithms.custom:centered',
  ],
)
def test_functions_made_for_configs_need_none(path):
  assert trust.named(run_of(fn=path)) == {}


def test_functions_that_this_process_handed_over_need_none():
  def short(completions):
    return [0.0 for _ in completions]

  assert trust.named(run_of(fn=imports.path(short))) == {}


def test_nothing_is_imported_before_the_refusal(tmp_path, monkeypatch):
  (tmp_path / 'bomb.py').write_text(
    "import pathlib\npathlib.Path('exploded').touch()\ndef f(): pass\n"
  )
  path = tmp_path / 'config.json'
  path.write_text(json.dumps(config.to_dict(run_of(fn='bomb:f'))))
  monkeypatch.syspath_prepend(str(tmp_path))
  monkeypatch.chdir(tmp_path)
  with pytest.raises(ValueError, match="rewards.x.fn 'bomb:f'"):
    main.load(str(path))
  assert not (tmp_path / 'exploded').exists()
  main.load(str(path), [], True)
  assert (tmp_path / 'exploded').exists()


def test_overrides_and_trust_config_are_the_users_own_word(capsys):
  run = run_of(fn=FOREIGN)
  trust.check(run, 'config.json', [('s.envs.a.rewards.x.fn', FOREIGN)])
  node = json.dumps({'x': {'fn': FOREIGN}})
  trust.check(run, 'config.json', [('s.envs.a.rewards', node)])
  assert not capsys.readouterr().err
  with pytest.raises(ValueError, match='--trust_config'):
    trust.check(run, 'config.json', [('s.envs.a.rewards.x.weight', '2.0')])
  trust.check(run, 'config.json', trust=True)
  assert FOREIGN in capsys.readouterr().err


def test_servers_variables_and_compiled_programs_need_trust():
  endpoint = schema.Endpoint(
    name='m', base_url='http://h.example/v1', api_key_env='AWS_SECRET'
  )
  stage = schema.Stage(
    envs={
      'a': schema.EnvEntry(
        algorithm=schema.Opd(reference=endpoint), sampler=schema.Policy()
      ),
      'b': schema.EnvEntry(env=schema.OpenEnv(url='ws://h.example:1/ws')),
    }
  )
  run = schema.Run(stages={'s': stage}, compilation_cache='/shared/compiled')
  assert trust.named(run) == {
    'config.compilation_cache': '/shared/compiled',
    'config.s.envs.a.algorithm.reference.base_url': 'http://h.example/v1',
    'config.s.envs.a.algorithm.reference.api_key_env': 'AWS_SECRET',
    'config.s.envs.b.env.url': 'ws://h.example:1/ws',
  }


def test_addresses_in_place_of_paths_need_trust(capsys):
  run = run_of()
  stage = dataclasses.replace(run.stages['s'], init=ADDRESS)
  entry = dataclasses.replace(
    stage.envs['a'], algorithm=schema.Opd(reference='s3://evil/y')
  )
  stage = dataclasses.replace(stage, envs={'a': entry})
  run = dataclasses.replace(
    run, tokenizer=schema.Tokenizer(path='x-y+z://evil'), stages={'s': stage}
  )
  assert trust.named(run) == {
    'config.tokenizer.path': 'x-y+z://evil',
    'config.s.init': ADDRESS,
    'config.s.envs.a.algorithm.reference': 's3://evil/y',
  }
  with pytest.raises(ValueError, match=f'config.s.init {ADDRESS!r}'):
    trust.check(run, 'config.json')
  trust.check(run, 'config.json', trust=True)
  assert ADDRESS in capsys.readouterr().err


def test_a_recipe_may_name_anything(tmp_path):
  (tmp_path / 'recipe.py').write_text(
    'from configs import machinery\n'
    'from posttrain import schema\n'
    'from tests.config import test_trust\n'
    'def get_config():\n'
    "  return machinery.config_dict(test_trust.run_of(fn='json:loads'))\n"
  )
  run = main.load(str(tmp_path / 'recipe.py'))
  assert run.stages['s'].envs['a'].rewards['x'].fn == 'json:loads'
  assert machinery.config_dict(run)
