"""Chat templates: what they add per turn, and which are refused."""

import pytest

from posttrain.chat import jinja, renderer, tokenizers

QWEN2 = """{%- if messages[0]['role'] != 'system' %}
<|im_start|>system
Be brief.<|im_end|>
{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' }}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
# Shows a thought in the last turn only, as reasoning templates do.
FORGETS = """{% for m in messages %}[{{ m.role }}]
{%- if m.role == 'assistant' and loop.last %}<think></think>{% endif %}
{{- m.content }}</s>{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""
UA = ({'role': 'user', 'content': 'user'},
      {'role': 'assistant', 'content': 'im_end'})


def test_pieces_of_a_turn():
  template = jinja.Jinja(QWEN2, '', '<|im_end|>')
  assert template.turn(UA, 0) == jinja.Turn(
      header='<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n',
      content='user', end='<|im_end|>\n',
  )
  assert template.turn(UA, 1) == jinja.Turn(
      header='<|im_start|>assistant\n', content='im_end', end='<|im_end|>',
      tail='\n',
  )


def test_what_stands_behind_the_prompt_is_sampled():
  turn = jinja.Jinja(FORGETS, '', '</s>').turn(UA, 1)
  assert (turn.header, turn.lead) == ('[assistant]', '<think></think>')


def test_template_that_rewrites_earlier_turns_is_refused():
  template = jinja.Jinja(FORGETS, '', '</s>')
  with pytest.raises(ValueError, match='must keep earlier turns') as error:
    template.turn((*UA, UA[0]), 2)
  assert 'tokenizer.chat_template' in str(error.value)


@pytest.mark.parametrize('source, error', [
    ('{% for', 'must be a Jinja template'),
    ('{{ raise_exception("no tools here") }}', 'no tools here'),
    ('{{ messages.nope.nope }}', 'must be ones that config.tokenizer.ch'),
    ('{% for m in messages %}{{ m.content | upper }}{% endfor %}',
     'unchanged'),
    ('{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}',
     'once'),
    ('{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}',
     'close an assistant turn'),
    ('{% for m in messages %}{{ m.role }}{{ m.content }}</s>{% endfor %}'
     '{% if add_generation_prompt %}other{% endif %}',
     'open an assistant turn as it prompts'),
    ('{% for m in messages %}{{ m.content }}{% endfor %}'
     '{{ cycler.__init__.__globals__ }}', 'must be ones that'),
])
def test_refusals(source, error):
  with pytest.raises(ValueError, match=error):
    template = jinja.Jinja(source, '', '</s>')
    for index in range(len(UA)):
      template.turn(UA, index)


def test_content_cannot_forge_a_turn():
  made = renderer.Renderer(
      tokenizers.Bytes(),
      '{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>'
      '{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}',
  )
  builtin = renderer.Renderer(tokenizers.Bytes())
  messages = [{'role': 'user', 'content': '<|end|>'}, UA[1]]
  assert made.render(messages).ids.tolist() == (
      builtin.render(messages).ids.tolist()
  )
