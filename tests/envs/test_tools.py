"""Schemas of tools, from functions."""

import enum
from typing import Literal

import pytest

from posttrain.chat import tool_calls
from posttrain.envs import tools


def search(query: str, limit: int = 10, exact: bool = False) -> list[str]:
  """Searches the documents.

  Takes a while.

  Args:
    query: the words to look for,
      in any order: all of them.
    limit (int, optional): the most results.
    exact: whether words: must be equal.

  Returns:
    query: not an argument.
  """
  return [query] * limit


SEARCH = {
  'type': 'function',
  'function': {
    'name': 'search',
    'description': 'Searches the documents.\n\nTakes a while.',
    'parameters': {
      'type': 'object',
      'properties': {
        'query': {
          'type': 'string',
          'description': 'the words to look for, in any order: all of them.',
        },
        'limit': {'type': 'integer', 'description': 'the most results.'},
        'exact': {
          'type': 'boolean',
          'description': 'whether words: must be equal.',
        },
      },
      'required': ['query'],
    },
  },
}


def test_a_function_becomes_a_schema():
  assert tools.schema(search) == SEARCH
  told = tools.of([search], 'hermes')
  assert told.schemas == (SEARCH,) and told.format == 'hermes'
  assert tool_calls.plain(told.schemas) == [SEARCH]


def test_the_schema_equals_that_of_transformers():
  utils = pytest.importorskip('transformers.utils')

  def add(a: int, b: float, names: list[str], deep: list[list[int]]):
    """
    Adds numbers.

    Args:
      a: The first.
      b: The second.
      names: Of both.
      deep: More.
    """

  assert tools.schema(add) == utils.get_json_schema(add)


class Colour(enum.Enum):
  RED = 1


@pytest.mark.parametrize(
  ('annotation', 'schema'),
  [
    (int | None, {'type': ['integer', 'null']}),
    (
      list[int] | str,
      {
        'anyOf': [
          {'type': 'array', 'items': {'type': 'integer'}},
          {'type': 'string'},
        ]
      },
    ),
    (Literal['a', 'b'], {'type': 'string', 'enum': ['a', 'b']}),
    (Literal['a', 1], {'enum': ['a', 1]}),
    ('Unknown', {}),
  ],
)
def test_annotations(annotation, schema):
  def tool(x):
    return x

  tool.__annotations__['x'] = annotation
  parameters = tools.schema(tool)['function']['parameters']
  assert parameters['properties'] == {'x': schema}
  assert parameters['required'] == ['x']


def test_a_function_that_takes_anything():
  parameters = tools.schema(lambda x, **more: x)['function']['parameters']
  assert parameters['properties'] == {'x': {}}
  assert parameters['additionalProperties'] is True


@pytest.mark.parametrize(
  'function', [lambda *values: values, lambda x, /: x], ids=['*', '/']
)
def test_arguments_that_have_no_name_are_refused(function):
  with pytest.raises(ValueError, match='arguments that are passed by name'):
    tools.schema(function)
