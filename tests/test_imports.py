"""Import paths name an object, or say what is wrong with them."""

import os.path
import pathlib
import sys

import pytest

from posttrain import imports


@pytest.mark.parametrize('path, want', [
    ('os.path:join', os.path.join),
    ('os.path.join', os.path.join),
    ('pathlib:Path.home', pathlib.Path.home),
    ('posttrain.imports:load', imports.load),
    ('posttrain.imports', imports),
])
def test_loads(path, want):
  assert imports.load(path) == want


@pytest.mark.parametrize('path', ['', 'json', ':x', 'a.b:', 'a b:c', 'a..b:c'])
def test_a_malformed_path(path):
  with pytest.raises(ValueError, match='must read .package.module:attr.'):
    imports.load(path)


@pytest.mark.parametrize('path, message', [
    ('posttrain.imports:loda', "no 'loda' in 'posttrain.imports'.*'load'?"),
    ('posttrain.import:load', "no module 'posttrain.import'.*'imports'?"),
    ('posttrian.imports:load', "no module 'posttrian'.*'posttrain'?"),
    ('posttrain.imports.load:x', "no module 'posttrain.imports.load'"),
    ('posttrain.qqqqqqqq', "no 'qqqqqqqq' in 'posttrain'$"),
])
def test_a_name_that_is_not_there(path, message):
  with pytest.raises(ValueError, match=message):
    imports.load(path)


def test_what_the_module_raises_passes_through(tmp_path, monkeypatch):
  (tmp_path / 'broken_reward.py').write_text('import no_such_package')
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(ModuleNotFoundError, match='no_such_package'):
    imports.load('broken_reward:fn')
  assert 'broken_reward' not in sys.modules
