"""Objects by import path."""

import pytest

from posttrain.util import imports


def test_load_returns_the_object_of_a_path():
  import json

  assert imports.load('json:loads', 'config.x') is json.loads
  assert imports.load('json:JSONDecoder.decode', 'k') is json.JSONDecoder.decode
  assert imports.function('json:loads', 'config.x') is json.loads


@pytest.mark.parametrize(
  ('path', 'words'),
  [
    ('json.loads', "'package.module:name'"),
    ('', "'package.module:name'"),
    ('no_such_module_here:f', 'PYTHONPATH'),
    ('json:nothing', "json has no 'nothing'"),
  ],
)
def test_a_path_without_an_object_is_an_error_with_the_key(path, words):
  with pytest.raises(ValueError, match=words) as error:
    imports.load(path, 'config.x.fn')
  assert 'config.x.fn' in str(error.value)


def test_a_function_must_be_callable():
  with pytest.raises(ValueError, match='config.x must name a function'):
    imports.function('json:__name__', 'config.x')


@pytest.mark.parametrize(
  ('text', 'words'),
  [
    ('def f(:', 'SyntaxError'),
    ('1 / 0', 'ZeroDivisionError: division by zero'),
    ('raise SystemExit(5)', 'SystemExit: 5'),
    ('raise ValueError("a\\nb" * 900)', 'more characters'),
  ],
)
def test_a_module_that_fails_is_one_line(tmp_path, monkeypatch, text, words):
  name = f'fails_{abs(hash(text))}'
  (tmp_path / f'{name}.py').write_text(text)
  monkeypatch.syspath_prepend(str(tmp_path))
  with pytest.raises(ValueError, match=words) as error:
    imports.load(f'{name}:f', 'config.x.fn')
  assert 'config.x.fn must be importable' in str(error.value)
  assert '\n' not in str(error.value) and len(str(error.value)) < 1000


def test_definitions_are_found_without_importing(tmp_path, monkeypatch):
  folder = tmp_path / 'bombs'
  (folder / 'inner').mkdir(parents=True)
  (folder / '__init__.py').write_text('1 / 0\nimport os\ndef f(): pass\n')
  (folder / 'inner' / 'm.py').write_text(
    'from os import system\ng = system\nclass C:\n  def h(self): pass\n'
  )
  monkeypatch.syspath_prepend(str(tmp_path))

  def defines(path):
    return imports.definition(folder, path) is not None

  assert defines('bombs:f') and defines('bombs.inner.m:C')
  for path in (
    *('bombs:os', 'bombs:g', 'bombs.inner.m:system', 'bombs.inner.m:g'),
    *('bombs.inner.m:C.h', 'bombs.inner:C', 'bombs.none:f', 'other:f'),
    *('bombs..inner.m:C', 'bombs/inner/m:C', 'bombs', 'bombs:', ':f'),
  ):
    assert not defines(path), path
