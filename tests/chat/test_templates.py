"""Chat templates: attribution, rewritten history, errors."""

import numpy as np
import pytest

from posttrain.chat import rendering, templates, tokenizers

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
    for field in ('ids', 'roles', 'is_content'):
      np.testing.assert_array_equal(
        getattr(whole, field), getattr(other, field)
      )


def test_a_template_that_rewrites_history_gives_several_samples():
  one, two, three = ({**UA[1], 'content': f'{i}#a{i}'} for i in range(3))
  user = UA[0]
  messages = [user, one, user, user, two, user, three, user]
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


@pytest.mark.parametrize('completion', [' yes\n', '<think></think>yes', '0#a'])
def test_a_completion_must_be_rendered_as_it_was_sampled(completion):
  chat = make(TRIMS)
  start = chat.render(UA[:1], add_generation_prompt=True)
  opened = chat.append(start, [*completion.encode(), 257])
  history = [UA[0], {**UA[1], 'content': completion}]
  if '#' in completion:
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


@pytest.mark.parametrize(
  'source, error',
  [
    ('{{ raise_exception("no tools here") }}', 'no tools here$'),
    (
      '{{ raise_exception("System role not supported") }}',
      'not supported; put .*first user turn.*chat_template=FILE',
    ),
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
    ('{{ cycler.__init__.__globals__ }}', 'must be ones that'),
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
  options = {}, {'variables': {'day': 'Monday'}}, {'stop_ids': (260,)}
  chats = [make(source, **x) for x in options]
  assert text(chats[1].render(UA[:1]).ids) == 'Monday<|user|>user<|end|>'
  assert len({chat.fingerprint for chat in chats}) == 3
