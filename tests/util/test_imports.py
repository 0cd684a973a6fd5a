"""Objects by import path."""

import os
import pathlib
import subprocess
import sys

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
    ('json.loads', "'package.module:name': .*; write json:loads, with a colon"),
    ('os.path.join', 'write os.path:join, with a colon'),
    ('no_such_module_here.f', "got 'no_such_module_here.f'$"),
    ('rewards.py:short', "'; write rewards:short, the module's name without"),
    ('./rewards.py', "write rewards:NAME, the module's name without .py$"),
    ('a/rewards.py:short', "write a.rewards:short, the module's name without"),
    ('../a/rewards.py:f', r'write rewards:f, .* and put ../a into PYTHONPATH'),
    ('rewards:', "write rewards:NAME, with a function's name after the colon"),
    (':short', "write MODULE:short, with the module's name before the colon"),
    ('', "'package.module:name'"),
    ('no_such_module_here:f', 'or be no_such_module_here.py in the current'),
    ('json.no_such:f', 'or be json/no_such.py in the current folder or in one'),
    ('json:nothing', "json has no 'nothing'; it defines [a-z_]+, "),
    ('json:laods', "json has no 'laods'; did you mean loads"),
    ('json:JSONDecoder.decoed', 'did you mean decode'),
    ('json:__name__.nothing', 'it defines no function'),
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


def test_a_missing_dependency_is_not_taken_for_the_module(
  tmp_path, monkeypatch
):
  (tmp_path / 'needs_more.py').write_text('import no_such_package\n')
  monkeypatch.syspath_prepend(str(tmp_path))
  with pytest.raises(
    ValueError, match="'no_such_package'; the import fails wi"
  ):
    imports.load('needs_more:f', 'config.x.fn')


def test_the_console_script_imports_from_the_current_folder(tmp_path):
  """As `python -m` does; a script has its own folder there instead."""
  (tmp_path / 'bin').mkdir()
  script = tmp_path / 'bin' / 'script.py'
  script.write_text(
    'import sys\n'
    'from posttrain.util import imports\n'
    'imports.add_current_folder()\n'
    'imports.add_current_folder()\n'
    "print(sys.path.count(sys.argv[1]), imports.load('mine:x', 'key'))\n"
  )
  (tmp_path / 'mine.py').write_text('x = 7\n')
  root = pathlib.Path(__file__).parents[2]
  done = subprocess.run(
    [sys.executable, str(script), str(tmp_path)],
    cwd=tmp_path,
    env={**os.environ, 'PYTHONPATH': str(root)},
    capture_output=True,
    text=True,
    check=True,
  )
  assert done.stdout.split() == ['1', '7']


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
