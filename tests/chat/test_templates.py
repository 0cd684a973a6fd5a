"""Chat templates: attribution, rewritten history, errors."""

import numpy as np
import pytest

from posttrain import types
from posttrain.chat import rendering, templates, tokenizers

QWEN2 = """{%- if messages[0]['role'] != 'system' %}
<|im_start|>system
Be brief.<|im_end|>
{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' }}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
# Renders a thought in the last turn only, as reasoning templates do.
FORGETS = """{% for m in messages %}<|{{ m.role }}|>
{%- if m.role == 'assistant' and loop.last %}<think></think>{% endif %}
{{- m.content.split('#')[-1] if m.role == 'assistant' and not loop.last
    else m.content }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
UA = (
  {'role': 'user', 'content': 'user'},
  {'role': 'assistant', 'content': 'im_end'},
)


def make(template, **options):
  return rendering.Renderer(tokenizers.Bytes(), template, **options)


def text(ids):
  names = {256 + i: name for i, name in enumerate(tokenizers.SPECIALS)}
  return ''.join(names.get(i) or chr(i) for i in ids)


def test_pieces_alternate_scaffold_and_content():
  template = templates.Jinja(QWEN2, {})
  whole = template.text(UA, True)
  pieces = templates.pieces(template, UA, whole, prompt=True)
  assert [piece.message for piece in pieces] == [0, 0, 0, 1, 1, 1, -1]
  assert [piece[:4] for piece in pieces] == [
    (
      '<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n',
      'user',
      False,
      False,
    ),
    ('user', 'user', True, False),
    ('<|im_end|>\n', 'user', False, False),
    ('<|im_start|>assistant\n', 'assistant', False, False),
    ('im_end', 'assistant', True, False),
    ('<|im_end|>\n', 'assistant', False, False),
    ('<|im_start|>assistant\n', 'assistant', False, False),
  ]


@pytest.mark.parametrize('bos', ['', '<|tool|>'])
def test_the_built_in_template_gives_the_ids_of_its_jinja(bos):
  variables = {'eos_token': '<|end|>', 'bos_token': bos}
  theirs = make(templates.BUILT_IN_JINJA, variables=variables)
  tokenizer = tokenizers.Bytes()
  tokenizer.bos = bos
  ours = rendering.Renderer(tokenizer)
  for prompt in (False, True):
    whole, other = (
      x.render(UA, add_generation_prompt=prompt) for x in (ours, theirs)
    )
    np.testing.assert_array_equal(whole.ids, other.ids)
    np.testing.assert_array_equal(whole.is_content, other.is_content)


def test_a_template_that_rewrites_history_gives_several_samples():
  answers = [{'role': 'assistant', 'content': f'{i}#a{i}'} for i in range(3)]
  messages = [
    UA[0],
    answers[0],
    UA[0],
    UA[0],
    answers[1],
    UA[0],
    answers[2],
    UA[0],
  ]
  samples = make(FORGETS).demonstrate(messages)
  user = '<|user|>user<|end|>'
  assert [text(part.ids) for part in samples] == [
    f'{user}<|assistant|><think></think>0#a0<|end|>',
    f'{user}<|assistant|>a0<|end|>{user}{user}'
    '<|assistant|><think></think>1#a1<|end|>',
    f'{user}<|assistant|>a0<|end|>{user}{user}<|assistant|>a1<|end|>{user}'
    '<|assistant|><think></think>2#a2<|end|>',
  ]
  for i, part in enumerate(samples):
    answer = f'<think></think>{i}#a{i}<|end|>'
    assert text(part.ids[part.sampled]) == answer
  # Given turns give no sample of their own.
  (last,) = make(FORGETS).demonstrate(messages, given=5)
  np.testing.assert_array_equal(last.ids, samples[2].ids)


TRIMS = FORGETS.replace("split('#')[-1]", "split('#')[-1].strip()")


@pytest.mark.parametrize(
  'source, completion, kept',
  [
    (FORGETS, 'yes', True),  # no thought to drop
    (TRIMS, ' yes\n', True),
    (FORGETS, '0#a', False),
    (FORGETS, '<think></think>yes', True),
  ],
)
def test_a_completion_must_be_rendered_as_it_was_sampled(
  source, completion, kept
):
  chat = make(source)
  start = chat.render(UA[:1], add_generation_prompt=True)
  opened = chat.append(start, [*completion.encode(), 257])
  history = [UA[0], {'role': 'assistant', 'content': completion}]
  if not kept:
    with pytest.raises(rendering.Rewritten, match='must keep earlier turns'):
      chat.extend(opened, history, [UA[0]])
    return
  after = chat.extend(opened, history, [UA[0]], add_generation_prompt=True)
  np.testing.assert_array_equal(after.ids[: len(opened)], opened.ids)
  assert text(after.ids[len(opened) :]) == '<|user|>user<|end|><|assistant|>'


def test_a_turn_may_end_with_any_stop_token():
  chat = make(FORGETS.replace('<think></think>', ''), stop_ids=(261,))
  assert chat.stop_ids == (257, 261)
  start = chat.render(UA[:1], add_generation_prompt=True)
  opened = chat.append(start, [*b'im_end', 261])
  after = chat.extend(opened, UA, UA[:1])
  assert text(after.ids[len(opened) :]) == '<|user|>user<|end|>'
  cut_off = chat.extend(chat.append(start, [*b'im_end']), UA, UA[:1])
  assert text(cut_off.ids[len(opened) - 1 :]) == '<|end|><|user|>user<|end|>'
  assert cut_off.roles[len(opened) - 1] == types.ROLES.index('assistant')


@pytest.mark.parametrize(
  'source, error',
  [
    ('{{ raise_exception("no tools here") }}', 'no tools here'),
    (
      '{% for m in messages %}{{ m.content | upper }}{% endfor %}',
      r'shows that of messages\[0\] \(user\) 0 times',
    ),
    (
      '{% for m in messages | reverse %}{{ m.content }}{% endfor %}',
      'must show contents in their order',
    ),
    (
      '{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}',
      'close an assistant turn',
    ),
    (
      '{% for m in messages %}{{ m.role }}{{ m.content }}<|end|>{% endfor %}'
      '{% if add_generation_prompt %}other{% endif %}',
      'open an assistant turn with its generation prompt',
    ),
    (
      '{% for m in messages %}{{ m.content }}{% endfor %}'
      '{{ cycler.__init__.__globals__ }}',
      'must be ones that',
    ),
  ],
)
def test_unusable_templates_are_refused(source, error):
  with pytest.raises(ValueError, match=error):
    chat = make(source)
    chat.render(UA)
    chat.demonstrate(UA)


def test_variables_are_rendered_and_change_the_fingerprint():
  source = (
    '{{ day }}{% for m in messages %}<|{{ m.role }}|>'
    '{% generation %}{{ m.content }}{% endgeneration %}<|end|>{% endfor %}'
  )
  chat = make(source, variables={'day': 'Monday'})
  assert text(chat.render(UA[:1]).ids) == 'Monday<|user|>user<|end|>'
  others = [{}, {'variables': {'day': 'Friday'}}, {'stop_ids': (260,)}]
  prints = {make(source, **options).fingerprint for options in others}
  assert len(prints) == 3 and chat.fingerprint not in prints
