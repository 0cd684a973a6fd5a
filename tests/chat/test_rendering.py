"""Messages -> ids: attribution, and earlier ids that never change."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain import schema, types
from posttrain.chat import rendering, tokenizers

CHATML = """{{ bos_token }}{% for m in messages -%}
<|{{ m.role }}|>
{{ m.content | trim }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
TEMPLATES = pytest.mark.parametrize(
  'template', [None, CHATML], ids=['built-in', 'jinja']
)
TEXTS = st.text(alphabet='ab <|end|>é\n', max_size=6)
MESSAGES = st.lists(
  st.fixed_dictionaries(
    {'role': st.sampled_from(types.ROLES), 'content': TEXTS}
  ),
  max_size=5,
)


def make(template=None):
  return rendering.Renderer(tokenizers.Bytes(), template)


def turns(*texts):
  roles = {'s': 'system', 'u': 'user', 'a': 'assistant', 't': 'tool'}
  return [{'role': roles[text[0]], 'content': text[1:]} for text in texts]


def assert_same(a, b):
  for field in ('ids', 'roles', 'is_content', 'sampled'):
    np.testing.assert_array_equal(getattr(a, field), getattr(b, field))
  assert a.open == b.open


def test_raw_is_the_text_alone():
  chat = rendering.load(schema.Tokenizer(chat_template='raw'))
  (sample,) = chat.demonstrate(turns('u2+2=', 'a4'))
  assert sample.ids.tolist() == [*b'2+2=4', 257]
  assert sample.ids[sample.sampled].tolist() == [*b'4', 257]
  prompt = chat.render(turns('u2+2='), add_generation_prompt=True)
  assert prompt.ids.tolist() == [*b'2+2=']


def test_fingerprints_of_tokenizers_and_templates_differ():
  prints = {
    rendering.Renderer(tokenizer, template).fingerprint
    for tokenizer in (tokenizers.Bytes(), tokenizers.Bytes('<|tool|>'))
    for template in (None, CHATML, CHATML + ' ')
  }
  assert len(prints) == 6 and make(CHATML).fingerprint in prints


def test_demonstrate_marks_the_answer_with_literal_ids():
  (sample,) = make().demonstrate(turns('uhi', 'ayo'))
  assert sample.ids.tolist() == [259, 104, 105, 257, 260, 121, 111, 257]
  assert sample.roles.tolist() == [1, 1, 1, 1, 2, 2, 2, 2]
  assert sample.is_content.tolist() == [0, 1, 1, 0, 0, 1, 1, 0]
  assert sample.sampled.tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
  assert (sample.ids.dtype, sample.roles.dtype) == (np.int32, np.int8)


@TEMPLATES
def test_every_assistant_turn_is_demonstrated_except_given_ones(template):
  messages = turns('sx', 'ua', 'ab', 'tc', 'ad')
  for first, answers in ((0, b'bd'), (3, b'd')):
    (sample,) = make(template).demonstrate([*messages, *turns('ue')], first)
    assert bytes(i for i in sample.ids[sample.sampled] if i < 256) == answers
    assert (sample.ids[sample.sampled] == 257).sum() == len(answers)
    # `render` gives the same ids, not sampled.
    given_only = make(template).render(messages)
    assert not given_only.sampled.any()
    np.testing.assert_array_equal(sample.roles, given_only.roles)
  assert make(template).demonstrate(messages, 5) == []


@TEMPLATES
@given(MESSAGES, st.integers(0, 5), st.booleans())
@settings(max_examples=40, deadline=None)
def test_extend_equals_render_of_the_whole(template, messages, cut, prompt):
  chat, cut = make(template), min(cut, len(messages))
  old, new = messages[:cut], messages[cut:]
  for continues in (False, True) if new else (False,):
    options = {
      'add_generation_prompt': prompt,
      'continue_final_message': continues,
    }
    whole = chat.render(messages, **options)
    part = chat.render(old)
    assert_same(chat.extend(part, old, new, **options), whole)
    np.testing.assert_array_equal(whole.ids[: len(part)], part.ids)
    if new[:1] and new[0]['role'] == 'assistant' and (new[1:] or not continues):
      part = chat.render(
        old, add_generation_prompt=True, continue_final_message=False
      )
      assert_same(chat.extend(part, old, new, **options), whole)


@TEMPLATES
@pytest.mark.parametrize('stopped', [True, False])
def test_sampled_ids_are_unchanged_and_the_turn_is_closed(template, stopped):
  chat, before, after = make(template), turns('uhi'), turns('tok')
  # Ids that a policy may sample, but that no text encodes to.
  ids = [121, 255, *[257] * stopped]
  prompt = chat.render(before, add_generation_prompt=True)
  opened = chat.append(prompt, ids)
  history = [*before, *turns('ay?')]
  full = chat.extend(opened, history, after, add_generation_prompt=True)
  assert full.ids[full.sampled].tolist() == ids
  # One eos per turn, sampled or not; apart from byte 255, as from text.
  expected = chat.render([*history, *after], add_generation_prompt=True)
  np.testing.assert_array_equal(
    full.ids[full.ids != 255], expected.ids[expected.ids != ord('?')]
  )


def _calling(arguments, **fields):
  function = {'name': 'add', 'arguments': arguments}
  call = {'id': 'c1', 'type': 'function', 'function': function}
  return {'role': 'assistant', 'content': '', 'tool_calls': [call], **fields}


@pytest.mark.parametrize(
  ('message', 'normal'),
  [
    (_calling('{"a": 1}'), _calling({'a': 1})),
    (_calling(''), _calling({})),
    (_calling({'a': 1}, content=None), _calling({'a': 1})),
    (
      {'role': 'assistant', 'tool_calls': [{'name': 'f', 'arguments': '{}'}]},
      {
        'role': 'assistant',
        'content': '',
        'tool_calls': [{'name': 'f', 'arguments': {}}],
      },
    ),
    (
      {'role': 'developer', 'content': 'a', 'tool_calls': []},
      {'role': 'system', 'content': 'a'},
    ),
    (
      {'role': 'tool', 'tool_call_id': 'c1', 'content': 'a', 'name': None},
      {'role': 'tool', 'tool_call_id': 'c1', 'content': 'a'},
    ),
    (
      {
        'role': 'user',
        'content': [
          {'type': 'text', 'text': 'a'},
          {'type': 'text', 'text': 'b'},
        ],
      },
      {'role': 'user', 'content': 'ab'},
    ),
  ],
)
def test_messages_have_one_form(message, normal):
  assert rendering.normalize([message]) == (normal,)
  assert rendering.normalize([normal]) == (normal,)


@pytest.mark.parametrize(
  ('message', 'words'),
  [
    (_calling('{"a"'), 'm[0].tool_calls[0] must be'),
    (_calling('[1]'), 'm[0].tool_calls[0] must be'),
    (_calling({}, tool_calls=['add']), 'm[0].tool_calls[0] must be'),
    (_calling({}, tool_calls=3), 'm[0].tool_calls[0] must be'),
    ({'role': 'assistant'}, 'm[0].content'),
    ({'role': 'user', 'content': [{'type': 'image_url'}]}, 'm[0].content'),
    ({'role': 'user', 'content': [{'type': 'image', 'text': 'a'}]}, 'm[0].c'),
    ({'role': 'user', 'content': ['a']}, 'm[0].content'),
    ({'role': 'user', 'content': 'a', 'weight': 1}, 'm[0].weight'),
    ({'role': 'assistant', 'content': 'a', 'weight': 0.5}, 'm[0].weight'),
  ],
)
def test_messages_of_no_form_are_refused(message, words):
  with pytest.raises(ValueError, match=re.escape(words)):
    rendering.normalize([message], 'm')


@pytest.mark.parametrize('read', ['m.{}', "m['{}']", "m.get('{}')"])
@pytest.mark.parametrize(
  ('field', 'value'),
  [
    ('tool_calls', _calling({'a': 1})['tool_calls']),
    ('reasoning_content', 'so'),
    ('train', False),
    ('loss', False),
    ('tools', '[]'),
    ('image', 'x.png'),
    ('thought', 'so'),
  ],
)
def test_fields_that_a_template_drops_are_refused(field, value, read):
  question, answer = turns('ua', 'ab')
  turn = [question, {**answer, field: value}]
  for template in (None, CHATML, f'{{# {field} #}} {field} {CHATML}'):
    with pytest.raises(
      ValueError, match=rf'messages\[1\].{field} must be read .*FILE'
    ):
      make(template).demonstrate(turn)
  shown = f"({read.format(field)} or '') | string ~ m.content"
  (sample,) = make(CHATML.replace('m.content', shown)).demonstrate(turn)
  assert sample.sampled.any()


def test_turns_of_weight_0_are_context():
  (sample,) = make().demonstrate(
    [
      {'role': 'user', 'content': 'a'},
      {'role': 'assistant', 'content': 'bad', 'weight': 0},
      {'role': 'user', 'content': 'b'},
      {'role': 'assistant', 'content': 'good', 'weight': 1},
    ]
  )
  assert bytes(sample.ids[sample.sampled][:-1].tolist()) == b'good'
  text = bytes(i for i in sample.ids.tolist() if i < 256)
  assert b'bad' in text


@pytest.mark.parametrize(
  'key, value', [('content', None), ('tool_calls', [{}])]
)
def test_malformed_messages_are_refused(key, value):
  (message,) = turns('ua')
  with pytest.raises(ValueError, match=key):
    make().render([message, message | {key: value}])
