"""Recipe files and config.json of any content: one line each."""

import pytest

from posttrain import config

RECIPES = {
  'syntax': ('x.py', b'def get_config(:\n', 'line 1: SyntaxError'),
  'raises': ('x.py', b'\n1 / 0\n', 'line 2: ZeroDivisionError'),
  'raises inside': (
    'x.py',
    b'def get_config():\n  return {}["lr"]\n',
    "line 2: KeyError: 'lr'",
  ),
  'value error': ('x.py', b'int("x")', 'line 1: ValueError'),
  'import': ('x.py', b'import no_such_thing', 'ModuleNotFoundError'),
  'exit': ('x.py', b'raise SystemExit(3)', 'SystemExit: 3'),
  'hostile str': (
    'x.py',
    b'class E(Exception):\n  def __str__(self): 1 / 0\nraise E\n',
    'line 3: E: <E, whose str raises ZeroDivisionError>',
  ),
  'binary': ('x.py', b'\x00\x01\xff\xfe' * 50, 'must be a recipe that runs'),
  'no get_config': ('x.py', b'x = 1', r'must define get_config\(argument\)'),
  'argument': ('x.py:big', b'def get_config(): return 1', 'TypeError'),
  'no config': ('x.py', b'def get_config(): return 7', 'ConfigDict: got 7'),
  'yaml': ('x.yaml', b'model: tiny\n', r'a recipe FILE\.py, or the config'),
  'no suffix': ('x', b'{}', r'a recipe FILE\.py, or the config'),
  'empty': ('x.json', b'', r'x\.json must be JSON'),
  'cut': ('x.json', b'{"stages": ["a"', r'x\.json must be JSON'),
  'list': ('x.json', b'[1]', r'x\.json must hold a JSON object: got \[1\]'),
  'deep': ('x.json', b'[' * 100_000, 'nested deeper'),
  'bytes': ('x.json', b'\xff\xfe', 'no UTF-8'),
  'twice': ('x.json', b'{"a": 1, "a": 2}', 'is there twice'),
  'no stages': ('x.json', b'{"seed": 1}', 'a list of stages: got None'),
  'stages': ('x.json', b'{"stages": 3}', 'a list of stages: got 3'),
  'nested name': ('x.json', b'{"stages": [[1]]}', 'config.stages'),
  'dotted': ('x.json', b'{"stages": ["a"], "a.b": 1}', 'options of a run'),
  'number': ('x.json', b'{"stages": ["a"], "a": ' + b'9' * 2000, 'digits'),
}


@pytest.mark.parametrize('name', RECIPES)
def test_any_file_is_one_line(name, tmp_path):
  spec, data, words = RECIPES[name]
  (tmp_path / spec.partition(':')[0]).write_bytes(data)
  with pytest.raises(ValueError, match=words) as error:
    config.build(config.load(str(tmp_path / spec)))
  assert '\n' not in str(error.value) and len(str(error.value)) < 1000


def test_a_path_may_have_colons(tmp_path):
  folder = tmp_path / 'a:b'
  folder.mkdir()
  (folder / 'x.py').write_text('def get_config(): return 1')
  with pytest.raises(ValueError, match=r'x\.py: get_config must return'):
    config.load(str(folder / 'x.py'))


@pytest.mark.parametrize(
  ('key', 'words'),
  [
    ('zzqqx', 'the shared options are checkpoint, comp'),
    ('lrr', 'did you mean config.sft.optim.lr. The stage is sft'),
    ('seeed', r'did you mean config\.seed\?'),
    ('x' * 5000, 'more characters'),
  ],
)
def test_hints_are_near_or_all(key, words):
  node = config.load('configs/arithmetic_sft.py')
  with pytest.raises(ValueError, match=words) as error:
    config.override(node, key, '1')
  assert len(str(error.value)) < 1200


def test_values_of_any_length_and_shape_are_one_short_line():
  for value in ('x' * 10_000, {}, {'a': {'b': [1]}}, [[1] * 5000], -(10**400)):
    values = config.to_dict(
      config.build(config.load('configs/arithmetic_sft.py'))
    )
    values['seed'] = value
    with pytest.raises(ValueError, match=r'config\.seed must') as error:
      config.build(config.from_dict(values))
    assert '\n' not in str(error.value) and len(str(error.value)) < 1000


def test_newer_options_take_their_defaults_on_resume():
  values = config.to_dict(
    config.build(config.load('configs/arithmetic_sft.py:tiny'))
  )
  old = {k: v for k, v in values.items() if k != 'watchdog'}
  config.check_resume(old, values)
  old = {k: v for k, v in values.items() if k != 'seed'}
  values['seed'] = 7
  with pytest.raises(ValueError, match=r'config\.seed \(0 -> 7\)'):
    config.check_resume(old, values)


def test_a_run_may_go_on_with_another_mesh():
  values = config.to_dict(
    config.build(config.load('configs/arithmetic_sft.py:tiny'))
  )
  other = {**values, 'mesh': {'data': 1, 'fsdp': 4, 'tensor': 2}}
  config.check_resume(values, other)


def test_a_comma_after_the_name_of_a_recipe_is_a_colon():
  with pytest.raises(
    ValueError, match='; write grpo:DIR,a.jsonl, with a colon'
  ):
    config.load('grpo,DIR,a.jsonl')
