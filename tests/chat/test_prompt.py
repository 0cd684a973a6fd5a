"""Conversations of clients: the ids of `render`, by linear work."""

import json
import pathlib
import random

import pytest

from posttrain.chat import renderer, tokenizers

FOLDER = pathlib.Path(__file__).parent / 'templates'
TOKENS = json.loads((FOLDER / 'tokens.json').read_text())
HONEST = ('', ' ok\n', 'a [1]', '<think>\nhm\n</think>\n\nyes', '<|im_end|>')
HOSTILE = tuple(
  f' \n {content}\n ' for content in ('', '<tool_response>', '</think>', '[')
)


def load(name):
  special = {key: TOKENS[name][key] for key in ('bos_token', 'eos_token')}
  source = (FOLDER / f'{name}.jinja').read_text()
  return renderer.Renderer(tokenizers.Bytes(), source, variables=special)


def talk(contents, count):
  draw = random.Random(0)
  return [
    {'role': ('user', 'assistant')[i % 2], 'content': draw.choice(contents)}
    for i in range(count)
  ]


def renderings(chat, monkeypatch):
  """Returns a list that grows by the messages of each rendering."""
  counts, text = [], chat._template.text

  def counted(messages, prompt=False):
    counts.append(len(messages))
    return text(messages, prompt)

  monkeypatch.setattr(chat._template, 'text', counted)
  return counts


@pytest.mark.parametrize('name', ['qwen3', 'mistral_nemo', 'llama3'])
@pytest.mark.parametrize('count', [1, 8, 59, 121])
def test_prompts_have_the_ids_of_render(name, count):
  chat, messages = load(name), talk(HONEST, count)
  rendered = chat.render(messages, add_generation_prompt=True)
  prompt = chat.prompt(messages)
  assert prompt.ids.tolist() == rendered.ids.tolist()
  assert prompt.text == rendered.text


@pytest.mark.parametrize('name', ['qwen3', 'lfm2_5', 'mistral_nemo'])
@pytest.mark.parametrize('contents', [HONEST[:4], HOSTILE])
def test_a_prompt_costs_the_same_per_message(name, contents, monkeypatch):
  costs = []
  for count in (301, 601):
    chat = load(name)
    counts = renderings(chat, monkeypatch)
    try:
      chat.prompt(talk(contents, count))
    except ValueError as error:
      assert contents is HOSTILE and 'messages must be fewer' in str(error)
    costs.append(sum(counts) / count)
  assert costs[1] <= costs[0] < 24, costs


def test_rendering_ends_when_its_caller_has_left(monkeypatch):
  chat = load('qwen3')
  counts = renderings(chat, monkeypatch)
  with pytest.raises(ValueError, match='the caller has left'):
    chat.prompt(talk(HONEST, 60), lambda: len(counts) > 5)
  assert len(counts) < 9
  source = '{% for i in range(1000) %}{% for j in range(1000) %}{% endfor %}'
  chat = renderer.Renderer(tokenizers.Bytes(), source + '{% endfor %}')
  looks = iter([False] * 3)
  with pytest.raises(ValueError, match='the caller has left'):
    chat.prompt(talk(HONEST, 1), lambda: next(looks, True))
