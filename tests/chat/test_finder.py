"""Places of contents: those of single renderings, in a few renderings."""

import functools
import json
import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.chat import finder, layout, spans, templates

FOLDER = pathlib.Path(__file__).parent / 'templates'
NAMES = ('chatml', 'llama3_1', 'mistral_nemo', 'lfm2_5', 'qwen3')
OTHERS = {
  'json': '{% for m in messages %}<{{ m.content | tojson }}>{% endfor %}',
  'right': '{% for m in messages %}<{{ m.content.rstrip() }}>\n{% endfor %}',
  'bare': '{% for m in messages %}{{ m.content | trim }} {% endfor %}',
  'hides': '{% for m in messages %}{% if m.content %}[{{ m.role }}] '
  '{{ m.content }}</s>{% endif %}{% endfor %}',
}
CONTENTS = st.lists(
  st.sampled_from(
    (
      *('', ' ', '\n', 'hi', 'a', ' so ', '<|im_end|>', '</s>', '</think>'),
      '<think>\nhm\n</think>\n\nyes',
      '<tool_response>\n7\n</tool_response>',
      '\uf8ffcontent1\uf8ff',
    )
  ),
  max_size=2,
).map(''.join)
TALKS = st.lists(CONTENTS, min_size=1, max_size=9).map(
  lambda contents: [
    {'role': ('user', 'assistant')[i % 2], 'content': content}
    for i, content in enumerate(contents)
  ]
)


class Counting:
  """A template that counts its renderings and the messages in them."""

  def __init__(self, template):
    self._template, self.renderings, self.messages = template, 0, 0

  def text(self, messages, prompt=False):
    self.renderings += 1
    self.messages += len(messages)
    return self._template.text(messages, prompt)


@functools.cache
def load(name):
  if name in OTHERS:
    return templates.Jinja(OTHERS[name], {})
  tokens = json.loads((FOLDER / 'tokens.json').read_text())[name]
  special = {key: tokens[key] for key in ('bos_token', 'eos_token')}
  source = (FOLDER / f'{name}.jinja').read_text()
  return templates.Jinja(source, special)


def talk(count, content='text {}'):
  return [
    {'role': ('user', 'assistant')[i % 2], 'content': content.format(i, i)}
    for i in range(count)
  ]


@pytest.mark.parametrize('name', [*NAMES, *OTHERS])
@given(TALKS, st.booleans())
@settings(max_examples=25, deadline=None)
def test_places_are_those_of_single_renderings(name, messages, prompt):
  template = load(name)
  text = template.text(messages, prompt)
  try:
    expected = [
      spans.one(template, messages, i, text, prompt=prompt)
      for i in range(len(messages))
    ]
  except ValueError:  # hides a content
    return
  work = spans.Work(messages, text)
  found = finder.find(
    template, messages, text, prompt=prompt, start=0, work=work
  )
  assert [(begin, end) for begin, end, _ in found] == expected


@pytest.mark.parametrize('name', NAMES)
def test_turns_end_where_the_conversation_up_to_them_does(name):
  template, messages = load(name), talk(40)
  text = template.text(messages, True)
  exact = layout.pieces(template, messages, text, prompt=True)
  limits = spans.TRAINING._replace(exact=(0, 0))  # by signature
  counting = Counting(template)
  options = {'prompt': True, 'limits': limits}
  assert layout.pieces(counting, messages, text, **options) == exact
  assert counting.renderings < 32


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('content', ['', '{}', '<think>\n{}\n</think>\n\n{}'])
def test_renderings_are_linear_in_the_number_of_messages(name, content):
  limits = spans.TRAINING._replace(exact=(500, 2))
  if name == 'mistral_nemo' and '<think>' in content:
    content = '{}'
  costs = []
  for count in (60, 121, 241):
    counting = Counting(load(name))
    messages = talk(count, content or '')
    text = counting.text(messages)
    layout.pieces(counting, messages, text, prompt=False, limits=limits)
    costs.append(counting.messages / count)
  assert max(costs) < 30, costs
  assert costs[-1] <= costs[0], costs


def test_a_template_that_needs_a_rendering_per_message_is_bounded():
  # Neither a mark in place of a content nor one within it leaves the rest.
  source = (
    '{% for m in messages %}<{{ m.content }}:{{ m.content | length }}>'
    '{% endfor %}'
  )
  template = templates.Jinja(source, {})
  messages = talk(20)
  text = template.text(messages)
  pieces = layout.pieces(template, messages, text, prompt=False)
  assert ''.join(piece.text for piece in pieces) == text
  contents = [piece.text for piece in pieces if piece.is_content]
  assert contents[:2] == ['text 0:6', 'text 1:6']
  work = spans.Work(messages, text, units=10**9)
  with pytest.raises(ValueError, match='messages must be fewer for config.to'):
    finder.find(template, messages, text, prompt=False, start=0, work=work)


@pytest.mark.parametrize('name', NAMES)
def test_texts_with_the_mark_are_rendered(name):
  contents = ('\uf8ffcontent\uf8ff', '\uf8ffcontent0\uf8ff', 'a\uf8ff')
  messages = [
    {'role': ('user', 'assistant')[i % 2], 'content': content}
    for i, content in enumerate(contents)
  ]
  template = load(name)
  text = template.text(messages)
  pieces = layout.pieces(template, messages, text, prompt=False)
  assert tuple(p.text for p in pieces if p.is_content) == contents
