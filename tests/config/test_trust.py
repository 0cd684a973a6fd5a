"""What configs that the user did not write may name."""

import ast
import dataclasses
import json
import pathlib

import pytest

from configs import machinery
from posttrain import main, schema
from posttrain import config
from posttrain.config import trust

FOREIGN = 'subprocess:getoutput'
GADGETS = (
  'subprocess:getoutput',
  'posttrain.util.imports:importlib.import_module',  # not defined there
  'posttrain.checkpoints.store:json.loads',
  'posttrain.rewards.similarity:np.save',
  'posttrain.rewards.numeric:Fraction',
  'posttrain.main:main',  # defined, and not made for configs
  'posttrain.util.imports:load',
  'posttrain.envs.export:export',
  'posttrain.envs.__main__:main',
  'posttrain.config.load:load',
  'posttrain.algorithms.custom:Custom',
  'posttrain.rewards...os:system',
  'posttrain.rewards.../../x:f',
  'posttrain.rewards:numeric.parse',
  'posttrainx.rewards.numeric:parse',
  'posttrain.algorithms:make',
  'posttrain.losses.rl_custom:custom',
  'posttrain.rewards.numeric:_finite',
  'configs.arithmetic:get_config',
  'configs.machinery:config_dict',
  'configs.arguments:parse_own',
  'configs.common:pretrained',
  'configs.algorithms:trial',
  'configs.machinery:os.system',
  'configs.common:schema',
  'configs.no_such:f',
  'experiments.trials:main',
)


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
  """A user who has trained nothing yet."""
  monkeypatch.setenv('XDG_STATE_HOME', str(tmp_path / 'state'))


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


def check(run, *args, **kwargs):
  trust.check(run, config.to_dict(run), 'config.json', *args, **kwargs)


@pytest.mark.parametrize('path', GADGETS)
def test_functions_from_elsewhere_need_trust(path):
  assert not trust.is_own(path)
  with pytest.raises(ValueError, match='--trust_config must be given') as error:
    check(run_of(fn=path))
  assert 'config.s.envs.a.rewards.x.fn' in str(error.value)
  assert repr(path) in str(error.value)


@pytest.mark.parametrize(
  'path',
  [
    'posttrain.rewards.similarity:ratio',
    'posttrain.envs.sql.functions:reward_correctness',
    'configs.algorithms.custom:centered',
  ],
)
def test_functions_made_for_configs_need_none(path, capsys):
  assert trust.is_own(path)
  check(run_of(fn=path))
  assert not capsys.readouterr().err


def test_a_package_of_the_same_name_elsewhere_is_not_ours(
  tmp_path, monkeypatch
):
  other = tmp_path / 'configs'
  other.mkdir()
  (other / '__init__.py').write_text('')
  (other / 'mine.py').write_text('def f(): pass')
  (tmp_path / 'posttrain_x.py').write_text('def f(): pass')
  monkeypatch.syspath_prepend(str(tmp_path))
  assert not trust.is_own('configs.mine:f')
  assert not trust.is_own('posttrain_x:f')


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
  check(run, [('s.envs.a.rewards.x.fn', FOREIGN)])
  node = json.dumps({'x': {'fn': FOREIGN}})
  check(run, [('s.envs.a.rewards', node)])
  assert not capsys.readouterr().err
  with pytest.raises(ValueError, match='--trust_config'):
    check(run, [('s.envs.a.rewards.x.weight', '2.0')])
  check(run, trust=True)
  assert FOREIGN in capsys.readouterr().err


def test_a_trained_config_is_trusted_to_the_letter():
  run = run_of(fn=FOREIGN, kwargs={'cmd': 'true'})
  trust.remember(run, config.to_dict(run))
  check(run)
  with pytest.raises(ValueError, match='--trust_config'):
    check(run_of(fn=FOREIGN, kwargs={'cmd': 'false'}))


def test_a_run_that_names_nothing_leaves_no_trace(tmp_path):
  run = run_of()
  trust.remember(run, config.to_dict(run))
  assert not (tmp_path / 'state').exists()


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


ADDRESS = 'gs://evil/x'


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
    check(run)
  check(run, trust=True)
  assert ADDRESS in capsys.readouterr().err
  assert not trust.named(run_of(fn='posttrain.rewards.similarity:ratio'))
  text = {'hint': 'see http://h.example/ for more', 'note': 'a://'}
  assert list(trust._walk(text, 'x')) == [('x.note', 'a://')]


def test_a_config_that_cannot_be_noted_is_a_warning(
  tmp_path, monkeypatch, caplog
):
  (tmp_path / 'file').write_text('')
  monkeypatch.setenv('XDG_STATE_HOME', str(tmp_path / 'file'))
  run = run_of(fn=FOREIGN)
  trust.remember(run, config.to_dict(run))
  assert 'XDG_STATE_HOME' in caplog.text
  assert '--trust_config' in caplog.text
  with pytest.raises(ValueError, match='recorded in .*recipe FILE.py'):
    check(run)


def test_every_import_path_of_the_schema_is_marked():
  """Each field that is checked as an import path is one that needs trust."""
  checked, marked = set(), set()
  for file in pathlib.Path('posttrain/schema').glob('*.py'):
    for node in ast.walk(ast.parse(file.read_text())):
      if not isinstance(node, ast.ClassDef):
        continue
      for part in ast.walk(node):
        if isinstance(part, ast.Call) and (
          getattr(part.func, 'attr', '') == 'require_import_path'
        ):
          checked.add((node.name, part.args[1].value))
        if isinstance(part, ast.AnnAssign) and (
          getattr(part.annotation, 'attr', '').startswith('Function')
        ):
          marked.add((node.name, part.target.id))
  assert checked and checked <= marked
  assert ('Opsd', 'demonstration') in marked


def test_modules_made_for_configs_hold_no_gadgets():
  """They reach no files, processes, servers, and import nothing by name."""
  forbidden = {
    *('os', 'io', 'sys', 'subprocess', 'socket', 'shutil', 'pathlib', 'pickle'),
    *('importlib', 'runpy', 'ctypes', 'sqlite3', 'tempfile', 'httpx', 'urllib'),
    *('multiprocessing', 'signal', 'threading', 'asyncio'),
  }
  files = []
  for module in trust.OWN:
    path = pathlib.Path(module.replace('.', '/'))
    files += path.rglob('*.py') if path.is_dir() else [path.with_suffix('.py')]
  assert len(files) >= 5
  for file in files:
    for node in ast.walk(ast.parse(file.read_text())):
      names = []
      if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
      elif isinstance(node, ast.ImportFrom):
        names = [node.module or '']
        here = [alias.name for alias in node.names]
        assert not {'imports', 'files'} & set(here), file
      for name in names:
        assert name.split('.')[0] not in forbidden, (file, name)
      if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        calls = ('open', 'exec', 'eval', 'compile', '__import__')
        assert node.func.id not in calls, (file, node.lineno)


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
