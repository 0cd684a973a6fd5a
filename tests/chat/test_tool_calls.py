"""Calls in the text of a turn: no text raises, every call is returned."""

import json
import time

import hypothesis
import pytest
from hypothesis import strategies as st

from posttrain.chat import tool_calls

NAMES, LOOK = ('look', 'take'), tool_calls.Call('look', {'at': 'home'})
QUIET = st.text(st.characters(exclude_characters='{}()<>"', codec='utf-8'))
VALUES = st.recursive(
  st.none() | st.booleans() | st.integers() | st.text(),
  lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
  max_leaves=3,
)
CALLS = st.builds(
  tool_calls.Call,
  st.sampled_from((*NAMES, 'unknown')),
  st.dictionaries(st.text(), VALUES),
).filter(lambda call: 'think>' not in str(call))  # what precedes is a thought
FORMATS = pytest.mark.parametrize('format', tool_calls.FORMATS)
settings = hypothesis.settings(deadline=None, derandomize=True, max_examples=30)


def parse(text, format):
  return tool_calls.parse(text, format, NAMES)


def written(call, key='arguments', **options):
  return json.dumps({'name': call.name, key: call.arguments}, **options)


def wrapped(format, call=LOOK):
  """Returns the text of a call."""
  text = written(call)
  return f'<tool_call>{text}</tool_call>' if format == 'hermes' else text


def error(text, format):
  """Returns the one error of a text with one call."""
  (call,) = parse(text, format)
  assert call.arguments == {} and '\n' not in call.error
  return call.error


@settings
@hypothesis.given(st.lists(st.tuples(QUIET, CALLS), max_size=4))
def test_hermes_calls_are_returned_whatever_is_around_them(parts):
  """Also if a tag is a part of an argument."""
  text = ''.join(
    f'{words}<tool_call>\n{written(call, ensure_ascii=False)}\n</tool_call>'
    for words, call in parts
  )
  assert parse(f'{text} Done.', 'hermes') == [call for _, call in parts]


@settings
@hypothesis.given(
  st.lists(CALLS, min_size=1, max_size=4),
  st.sampled_from(('parameters', 'arguments')),
  st.sampled_from((';', '\n;\n')),
  st.sampled_from(('', ' ', '<|python_tag|>')),
)
def test_llama3_calls_are_returned(calls, key, separator, head):
  text = separator.join(written(call, key) for call in calls)
  assert parse(f'{head}{text}', 'llama3') == calls
  assert parse(f'{head}{text}\n;', 'llama3') == calls


@settings
@hypothesis.given(
  st.lists(
    st.tuples(
      QUIET,
      CALLS.filter(lambda call: 'tool_call>' not in str(call)),
      st.sampled_from(
        (
          lambda call: f'{call.name}({json.dumps(call.arguments)})',
          lambda call: written(call, indent=1, ensure_ascii=False),
        )
      ),
    ),
    max_size=4,
  )
)
def test_plain_calls_are_returned_whatever_is_around_them(parts):
  text = ''.join(f'{words} {write(call)}' for words, call, write in parts)
  assert parse(text, 'plain') == [call for _, call, _ in parts]


@settings
@hypothesis.given(
  st.lists(
    st.sampled_from(
      (
        *'(){}[]:,;"\\ \n\udc80é',
        *('look', 'take(', '"name"', '"arguments"', '"parameters"', '"look"'),
        *('{"name": "look", "arguments": {}}', '{"name": "look"'),
        *('<tool_call>', '</tool_call>', '<|python_tag|>', '</think>'),
        *('1', 'NaN', '1e999', '9' * 5000, '{"a":' * 2000),
      )
    )
  ).map(''.join)
)
def test_no_text_raises(text):
  schemas = {'look': {'properties': {'at': {'type': 'string'}}}}
  for format in tool_calls.FORMATS:
    for call in parse(text, format):
      assert isinstance(call.name, str) and isinstance(call.arguments, dict)
      reason = tool_calls.problem(call, schemas)
      assert '\n' not in reason and (reason or call.name == 'look')


@pytest.mark.parametrize(
  ('text', 'words'),
  [
    ('<tool_call>{"name": "look",}</tool_call>', 'at character'),
    ('<tool_call>{"arguments": {}}</tool_call>', "got {'arguments': {}}"),
    ('<tool_call>{"name": "look"}', "must end with '</tool_call>'"),
    ('{"name": "look"}</tool_call>', "must begin with '<tool_call>'"),
    ('{"name": "look", "parameters": [1]}', 'an object: got [1]'),
  ],
)
def test_a_malformed_call_says_why(text, words):
  hermes = 'tool_call>' in text
  assert words in error(text, 'hermes' if hermes else 'llama3')


def test_nested_arguments_are_limited():
  call = tool_calls.Call('look', {'at': json.loads('[' * 65 + ']' * 65)})
  assert '64 levels deep' in error(written(call), 'llama3')


def test_calls_beside_a_malformed_one_are_returned():
  good, bad = (f'<tool_call>{x}</tool_call>' for x in ('{"name": "take"}', '1'))
  first, call, last = parse(good + bad + good, 'hermes')
  assert first == last == tool_calls.Call('take', {}) and call.error
  first, call = parse('{"name": "look"} I look.', 'llama3')
  assert first == tool_calls.Call('look', {}) and call.error


@pytest.mark.parametrize('text', ['It is 4.', '{"yes": true}'])
def test_an_answer_is_no_llama3_call(text):
  assert parse(text, 'llama3') == []
  assert parse(f'So: {text}', 'llama3') == []


@FORMATS
def test_a_call_that_is_cut_off_is_malformed(format):
  text = wrapped(format)
  assert parse(text, format) == [LOOK]
  assert error(f'look({text[:-3]}' if format == 'plain' else text[:-14], format)


@FORMATS
def test_thoughts_hold_no_calls(format):
  text = wrapped(format)
  assert parse(f'<think>{text}</think>\n\n{text}', format) == [LOOK]
  assert parse(f'So {text}</think>It is 4.', format) == []
  assert parse(f'<think>{text}', format) == []
  assert parse(f'<think>a</think> <think>{text}</think> 4', format) == []
  assert parse(f'<think>a</think> 4 <think>{text}', format) == []
  quoted = json.dumps({'at': f'</think>{text}'})
  assert parse(f'<think>perhaps {quoted} or', format) == []


@FORMATS
def test_the_end_of_a_thought_in_arguments_hides_no_call(format):
  call = tool_calls.Call('look', {'at': '</think>'})
  words = 'So ' * (format != 'llama3')
  assert parse(words + wrapped(format, call), format) == [call]


@pytest.mark.parametrize(
  ('text', 'shown'),
  [
    ('a {', 'a {'),
    ('a </think>b', f'{" " * 10}b'),
    ('<think>a</think>b<think>c', f'{" " * 16}b{" " * 8}'),
    ('{"a": "<think>"} b', '{"a": "<think>"} b'),
    ('{"a": "<think>b', '{"a": "        '),
    ('b </think> c </think>', f'{" " * 10} c </think>'),
  ],
)
def test_thoughts_are_blank(text, shown):
  assert tool_calls.outside_thoughts(text) == shown


@FORMATS
def test_calls_of_a_turn_are_limited(format):
  text = (';' * (format == 'llama3')).join([wrapped(format)] * 100)
  *calls, last = parse(text, format)
  assert len(calls) == tool_calls.MAX_CALLS and 'at most 32' in last.error
  assert not any(call.error for call in calls)


@FORMATS
def test_hostile_texts_take_little_time(format):
  start = time.process_time()
  for part in ('{"a":', '<tool_call>{"a": "'):
    parse(part * 5000, format)
  assert time.process_time() - start < 5
