"""Messages -> ids: attribution, and earlier ids that never change."""

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


@pytest.mark.parametrize(
  'key, value', [('content', None), ('tool_calls', [{}])]
)
def test_malformed_messages_are_refused(key, value):
  (message,) = turns('ua')
  with pytest.raises(ValueError, match=key):
    make().render([message, message | {key: value}])
