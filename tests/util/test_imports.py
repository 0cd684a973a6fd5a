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
