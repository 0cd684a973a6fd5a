"""Messages -> ids: what is sampled, and that the past never changes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain import schema, types
from posttrain.chat import renderer, templates, tokenizers

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
  return renderer.Renderer(tokenizers.Bytes(), template)


def say(*turns):
  roles = {'s': 'system', 'u': 'user', 'a': 'assistant', 't': 'tool'}
  return [{'role': roles[turn[0]], 'content': turn[1:]} for turn in turns]


def assert_same(a, b):
  for field in ('ids', 'roles', 'is_content', 'sampled'):
    np.testing.assert_array_equal(getattr(a, field), getattr(b, field))
  assert a.open == b.open


def test_the_fingerprint_tells_tokenizers_and_templates_apart():
  prints = [
    renderer.Renderer(tokenizer, template).fingerprint
    for tokenizer in (tokenizers.Bytes(), tokenizers.Bytes('<|tool|>'))
    for template in (None, CHATML, CHATML + ' ', templates.BUILT_IN)
  ]
  assert len(set(prints)) == 8
  assert all(len(p) == 64 and int(p, 16) for p in prints)
  assert make(CHATML).fingerprint == prints[1]


def test_literal_ids():
  (made,) = make().demonstrate(say('uhi', 'ayo'))
  assert made.ids.tolist() == [259, 104, 105, 257, 260, 121, 111, 257]
  assert made.roles.tolist() == [1, 1, 1, 1, 2, 2, 2, 2]
  assert made.is_content.tolist() == [0, 1, 1, 0, 0, 1, 1, 0]
  assert made.sampled.tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
  assert (made.ids.dtype, made.roles.dtype) == (np.int32, np.int8)


@TEMPLATES
def test_every_assistant_turn_is_demonstrated_but_given_ones(template):
  messages = say('sx', 'ua', 'ab', 'tc', 'ad')
  for first, said in ((0, b'bd'), (3, b'd')):
    (made,) = make(template).demonstrate([*messages, *say('ue')], first)
    assert bytes(i for i in made.ids[made.sampled] if i < 256) == said
    assert (made.ids[made.sampled] == 257).sum() == len(said)
    # The same ids as those of what is only shown.
    shown = make(template).render(messages)
    np.testing.assert_array_equal(made.ids, shown.ids)
    np.testing.assert_array_equal(made.roles, shown.roles)
    assert not shown.sampled.any()
  assert make(template).demonstrate(messages, 5) == []


def test_generation_prompt_is_the_assistants_header():
  made = make().render(say('uhi'), add_generation_prompt=True)
  assert made.ids.tolist() == [259, 104, 105, 257, 260]
  assert made.open and not made.sampled.any()
  whole = make().render(say('uhi', 'ayo'))
  np.testing.assert_array_equal(whole.ids[:5], made.ids)


def test_content_cannot_forge_a_turn():
  made = make().render(say('u<|end|><|assistant|>'))
  assert (made.ids >= 256).sum() == 2


def test_no_messages_render_to_nothing():
  assert len(make().render([])) == 0
  assert make().render([], add_generation_prompt=True).ids.tolist() == [260]


@TEMPLATES
@given(MESSAGES, st.integers(0, 5), st.booleans())
@settings(max_examples=40, deadline=None)
def test_extend_is_render_of_the_whole(template, messages, cut, prompt):
  made, cut = make(template), min(cut, len(messages))
  old, new = messages[:cut], messages[cut:]
  whole = made.render(messages, add_generation_prompt=prompt)
  part = made.render(old)
  assert_same(made.extend(part, old, new, add_generation_prompt=prompt), whole)
  np.testing.assert_array_equal(whole.ids[: len(part)], part.ids)
  if new and new[0]['role'] == 'assistant':
    part = made.render(old, add_generation_prompt=True)
    assert_same(
      made.extend(part, old, new, add_generation_prompt=prompt), whole
    )


@TEMPLATES
@pytest.mark.parametrize('stopped', [True, False])
def test_sampled_ids_are_kept_and_the_turn_is_closed(template, stopped):
  made, before, after = make(template), say('uhi'), say('tok')
  # As a policy may sample it: not how any text would be encoded.
  ids = [121, 255, *[257] * stopped]
  prompt = made.render(before, add_generation_prompt=True)
  opened = made.append(prompt, ids)
  history = [*before, *say('ay?')]
  full = made.extend(opened, history, after, add_generation_prompt=True)
  assert full.ids[len(prompt) : len(opened)].tolist() == ids
  assert full.sampled.sum() == len(ids)
  assert full.ids[full.sampled].tolist() == ids
  assert (
    full.is_content[len(prompt) : len(opened)].tolist()
    == ([True, True, False][: len(ids)])
  )
  # One eos per turn, sampled or not; then the same ids as from text.
  expected = made.render([*history, *after], add_generation_prompt=True)
  np.testing.assert_array_equal(
    full.ids[full.ids != 255], expected.ids[expected.ids != ord('?')]
  )


@pytest.mark.parametrize(
  'message, error',
  [
    ({'role': 'robot', 'content': ''}, r'messages\[1\].role must be one of'),
    ({'role': 'user', 'content': None}, r'messages\[1\].content must be a s'),
    ('hi', r'messages\[1\] must be an object'),
    ({'role': 'user'}, r'messages\[1\].content must be a string'),
    ({'role': 'assistant', 'content': '', 'tool_calls': [{}]}, 'tool_calls'),
  ],
)
def test_malformed_messages_are_refused(message, error):
  with pytest.raises(ValueError, match=error):
    make().render([*say('ua'), message])


def test_missing_template_file_is_refused():
  with pytest.raises(ValueError, match='config.tokenizer.chat_template must '):
    renderer.load(schema.Tokenizer(chat_template='/nowhere.jinja'))


def test_template_file(tmp_path):
  path = tmp_path / 'chat.jinja'
  path.write_text(CHATML)
  made = renderer.load(schema.Tokenizer(chat_template=str(path)))
  text = bytes(i for i in made.render(say('uhi')).ids if i < 256)
  assert text == b'\nhi\n' and made.stop_ids == (257,)
