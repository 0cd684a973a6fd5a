"""Tools: their form, their description, and the arguments of calls."""

import pytest

from posttrain.chat import tool_calls


def tool(name='look', **parameters):
  function = {'name': name, 'description': 'Looks.\nTwice.'}
  if parameters:
    function['parameters'] = {'type': 'object', **parameters}
  return {'type': 'function', 'function': function}


@pytest.mark.parametrize(
  ('schema', 'good', 'bad'),
  [
    ({'type': 'integer'}, [1, 1.0], [1.5, '1', True]),
    ({'type': 'array', 'items': {'type': 'integer'}}, [[], [1]], [['1'], {}]),
    ({'type': ['integer', 'null']}, [1, None], ['a']),
    ({'anyOf': [{'type': 'string'}, {'type': 'array'}]}, ['a', []], [1]),
    ({'enum': ['good', 'bad']}, ['good'], ['worse']),
    ({}, [1, None], []),
  ],
)
def test_an_argument_has_the_type_of_its_schema(schema, good, bad):
  schemas = tool_calls.parameters([tool(properties={'at': schema})])

  def problem(value):
    return tool_calls.problem(tool_calls.Call('look', {'at': value}), schemas)

  assert not any(map(problem, good))
  assert all(problem(x).startswith('at of look must be ') for x in bad)


def test_parameters_may_be_null():
  described = {'function': {'name': 'now', 'parameters': None}}
  assert tool_calls.plain([described]) == [described]
  assert tool_calls.parameters([described]) == {'now': {}}
  assert tool_calls.describe([described], 'text') == 'Tools:\n- now()'


INTEGERS = {'type': 'array', 'items': {'type': 'integer'}}


@pytest.mark.parametrize(
  ('schema', 'value', 'fitted'),
  [
    ({'type': 'integer'}, 3.0, 3),
    ({'anyOf': [{'type': 'integer'}, {'type': 'null'}]}, 3.0, 3),
    (INTEGERS, [1.0, 2], [1, 2]),
    ({'type': 'integer'}, 3.5, 3.5),
    ({'type': ['integer', 'number']}, 3.0, 3.0),
    ({'type': 'number'}, 3.0, 3.0),
    (None, 3.0, 3.0),
  ],
)
def test_whole_floats_are_the_integers_of_their_schema(schema, value, fitted):
  assert repr(tool_calls.fitted(value, schema)) == repr(fitted)


def test_the_problem_of_a_call_is_a_line():
  look = tool(properties={'at': {'type': 'integer'}}, required=['at'])
  more = tool('take', additionalProperties=True)
  schemas = tool_calls.parameters([look, more])

  def problem(name, arguments, error=''):
    return tool_calls.problem(tool_calls.Call(name, arguments, error), schemas)

  assert problem('look', {'at': 1}) == problem('take', {'b': 2}) == ''
  assert problem('look', {'at': 1}, 'why') == 'why'
  assert "one of ['look', 'take']: got 'give'" in problem('give', {})
  assert "look must have the argument 'at'" in problem('look', {})
  assert "than ['at']: got 'b'" in problem('look', {'at': 1, 'b': 2})
  assert problem('look', {'at': 'x\n' * 99}).count('\n') == 0


def test_the_description_has_a_line_per_tool():
  described = tool_calls.describe(
    [
      tool(
        properties={
          'at': {'type': 'array', 'items': {'type': 'integer'}},
          'how': {'enum': ['good', 1]},
          'any': {},
        },
        required=['at'],
      ),
      tool('take'),
    ],
    'plain',
  )
  assert described.splitlines()[:3] == [
    'Tools:',
    '- look(at: array of integer, how?: "good" | 1, any?): Looks.',
    '- take(): Looks.',
  ]


@pytest.mark.parametrize('format', tool_calls.FORMATS)
def test_the_description_shows_the_form_of_a_call(format):
  *_, how = tool_calls.describe([tool()], format).partition('by writing ')
  text = how.removesuffix('.').removesuffix(' and nothing else')
  for placeholder, value in (
    ('NAME', 'look' if format == 'plain' else '"look"'),
    ('ARGUMENT', 'at'),
    ('VALUE', '1'),
    (', ...', ''),
  ):
    text = text.replace(placeholder, value)
  call = tool_calls.Call('look', {'at': 1})
  assert tool_calls.parse(text, format, ('look',)) == [call]
