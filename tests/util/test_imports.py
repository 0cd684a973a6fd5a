"""Objects by import path."""

import os
import pathlib
import subprocess
import sys

import pytest

from posttrain.util import imports


@pytest.mark.parametrize(
  'path', ['json.loads', 'no_such_module_here:f', 'os:sep', 'json:decoed']
)
def test_a_path_without_an_object_is_an_error_with_the_key(path):
  with pytest.raises(ValueError, match=r'config\.x\.fn') as error:
    imports.function(path, 'config.x.fn')
  assert repr(path) in str(error.value)


@pytest.mark.parametrize(
  'text', ['raise SystemExit(5)', 'raise ValueError("a\\nb" * 900)']
)
def test_a_module_that_fails_is_one_line(text, tmp_path, monkeypatch):
  name = f'fails_{abs(hash(text))}'
  (tmp_path / f'{name}.py').write_text(text)
  monkeypatch.syspath_prepend(str(tmp_path))
  with pytest.raises(ValueError, match=r'config\.x\.fn') as error:
    imports.load(f'{name}:f', 'config.x.fn')
  assert '\n' not in str(error.value) and len(str(error.value)) < 1000


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
