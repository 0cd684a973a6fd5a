"""Tool calls in text: no text raises, every call is returned."""

import json

import hypothesis
from hypothesis import strategies as st

from posttrain.envs.adapters import calls

NAMES = ('look', 'take')
QUIET = st.text(st.characters(exclude_characters='{}()<>"', codec='utf-8'))
VALUES = st.recursive(
  st.none() | st.booleans() | st.integers() | st.text(),
  lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
  max_leaves=3,
)
CALLS = st.builds(
  calls.Call,
  st.sampled_from((*NAMES, 'unknown')),
  st.dictionaries(st.text(), VALUES),
)
WRITTEN = (
  lambda call: f'{call.name}({json.dumps(call.arguments)})',
  lambda call: json.dumps(
    {'name': call.name, 'arguments': call.arguments},
    indent=1,
    ensure_ascii=False,
  ),
)
settings = hypothesis.settings(deadline=None, derandomize=True, max_examples=50)


@settings
@hypothesis.given(
  st.lists(
    st.tuples(
      QUIET,
      CALLS.filter(lambda call: '<tool_call>' not in str(call)),
      st.sampled_from(WRITTEN),
    ),
    max_size=4,
  )
)
def test_every_written_call_is_returned(parts):
  text = ''.join(f'{words} {write(call)}' for words, call, write in parts)
  assert calls.find(text, NAMES) == [call for _, call, _ in parts]


@settings
@hypothesis.given(
  st.lists(
    st.sampled_from(
      (
        'look',
        'take(',
        '(',
        ')',
        '{',
        '}',
        '"name"',
        '"arguments"',
        ':',
        ',',
        '"look"',
        '{"name": "look", "arguments": {}}',
        '<tool_call>',
        '</tool_call>',
        ' ',
        '\n',
        '1',
        'NaN',
        '\\',
        '"',
        '\udc80',
        'é',
      )
    )
  ).map(''.join)
)
def test_no_text_raises(text):
  for call in calls.find(text, NAMES):
    assert isinstance(call.name, str)
    try:
      calls.run(call, {'look': lambda: 1})
    except ValueError as error:
      assert str(error)


def test_annotations_imported_for_type_checkers_are_described():
  def look(at: 'Nowhere') -> 'Nothing':  # noqa: F821
    """Looks."""

  assert calls.describe({'look': look}).splitlines()[:2] == [
    'Tools:',
    "- look(at: 'Nowhere'): Looks.",
  ]
