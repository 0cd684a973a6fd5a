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


def cut(source, messages, **options):
  template = templates.Jinja(source, {})
  whole = template.text(messages, options.get('prompt', False))
  options = {'prompt': False, **options}
  pieces = templates.pieces(template, messages, whole, **options)
  skip = options.get('skip', 0)
  assert ''.join(piece.text for piece in pieces) == whole[skip:]
  return [piece for piece in pieces if piece.text]


def attributed(*args, **options):
  return [piece[:4] for piece in cut(*args, **options)]


def test_pieces_have_the_index_of_their_message():
  messages = [piece.message for piece in cut(QWEN2, UA, prompt=True)]
  assert messages == [0, 0, 0, 1, 1, 1, -1]
  skip = len(templates.Jinja(QWEN2, {}).text(UA[:1]))
  messages = [piece.message for piece in cut(QWEN2, UA, start=1, skip=skip)]
  assert messages == [1, 1, 1]


def test_pieces_alternate_scaffold_and_content():
  assert attributed(QWEN2, UA, prompt=True) == [
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
    assert whole.text == other.text


def test_a_system_message_rendered_within_a_user_turn_is_attributed():
  source = (
    "{% if messages[0].role == 'system' %}{% set s = messages[0].content %}"
    '{% set rest = messages[1:] %}{% endif %}'
    "{% if not rest %}{{ raise_exception('ask something') }}{% endif %}"
    '[{{ s | trim }}|{{ rest[0].content }}]'
  )
  messages = ({'role': 'system', 'content': ' short '}, UA[0])
  assert attributed(source, messages) == [
    ('[', 'system', False, False),
    ('short', 'system', True, False),
    ('|', 'user', False, False),
    ('user', 'user', True, False),
    (']', 'user', False, False),
  ]
  with pytest.raises(ValueError, match='its error: ask something'):
    cut(source, messages[:1])


def test_a_transformed_content_is_located_by_its_surroundings():
  source = '{% for m in messages %}<{{ m.content | tojson }}>{% endfor %}'
  messages = ({'role': 'user', 'content': 'a"b'}, UA[1])
  assert [piece.text for piece in cut(source, messages)] == [
    '<"',
    'a\\"b',
    '">',
    '<"',
    'im_end',
    '">',
  ]


def test_all_text_after_the_generation_prompt_is_imitated():
  (sample,) = make(FORGETS).demonstrate(UA)
  assert text(sample.ids[~sample.sampled]) == '<|user|>user<|end|><|assistant|>'
  assert text(sample.ids[sample.sampled]) == '<think></think>im_end<|end|>'
  assert text(sample.ids[sample.is_content]) == 'userim_end'


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
    assert text(part.ids[part.is_content]).count('user') == [1, 3, 4][i]
  # Given turns give no sample of their own.
  (last,) = make(FORGETS).demonstrate(messages, given=5)
  np.testing.assert_array_equal(last.ids, samples[2].ids)
  assert last.sampled.sum() == samples[2].sampled.sum()


TRIMS = FORGETS.replace("split('#')[-1]", "split('#')[-1].strip()")


@pytest.mark.parametrize(
  'source, completion, kept',
  [
    (FORGETS, 'yes', True),  # no thought to drop
    (FORGETS, ' yes\n', True),
    (TRIMS, ' yes\n', True),
    (TRIMS, '', True),
    (FORGETS, '0#a', False),
    (FORGETS, '<think></think>yes', True),
    (TRIMS, '0# a', False),
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
    ('{% for', 'must be a Jinja template'),
    ('{{ raise_exception("no tools here") }}', 'no tools here'),
    ('{{ messages.nope.nope }}', 'must be ones that config.tokenizer.ch'),
    ('{{ strftime_now("%Y") }}', "'strftime_now' is undefined"),
    (
      '{% for m in messages %}{{ m.content | upper }}{% endfor %}',
      r'shows that of messages\[0\] \(user\) 0 times',
    ),
    (
      '{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}',
      'once',
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
