"""Tools are described by a model's own template, or by a description.

The templates are those of `test_real_templates`.
"""

import itertools

import numpy as np
import pytest

from posttrain import types
from posttrain.chat import rendering, tokenizers, tool_calls
from tests.chat import test_real_templates as real

folders = real.folders
NAMES = real.NAMES
PARAMETERS = {
  'type': 'object',
  'properties': {
    'a': {'type': 'integer', 'description': 'One <of> them.'},
    'b': {'type': 'integer'},
  },
  'required': ['a', 'b'],
}
ADD, LOOK = (
  {
    'type': 'function',
    'function': {'name': name, 'description': words, 'parameters': parameters},
  }
  for name, words, parameters in (
    ('add', 'Adds two numbers, é.', PARAMETERS),
    ('look', 'Looks.', {}),
  )
)
TOOLS = types.Tools((ADD, LOOK))
# Calls as the templates render them; the other templates tell of no tools.
HERMES = ['qwen2_5', 'qwen2_5_training']
HERMES += ['qwen3', 'qwen3_instruct_2507', 'qwen3_training']
FORMATS = {'llama3_1': 'llama3', 'llama3_2': 'llama3'}
FORMATS |= dict.fromkeys(HERMES, 'hermes')
OTHER_FORMATS = ('granite3_3', 'lfm2_5', 'mistral_nemo')
# Templates that do not render messages of role 'tool'.
RESULTS_OF_USER = (
  *('gemma2', 'gemma3', 'mistral_7b_instruct_v0_1', 'mistral_7b_instruct_v0_2'),
  *('mistral_nemo', 'mixtral_8x7b_instruct', 'phi3', 'phi3_5', 'phi4'),
)
CALL = {
  'hermes': '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n'
  '</tool_call>',
  'llama3': '{"name": "add", "parameters": {"a": 1, "b": 2}}',
  'plain': 'add({"a": 1, "b": 2})',
}
RESULTS = ('3', 'error: "é"\nhere')
THINKING = ('qwen3', 'qwen3_training')  # render a thought in each answer
S, U = real.S, real.U


def load(folders, name, format='auto'):
  """Returns the renderer of a template that describes the tools."""
  if format == 'auto' and name in OTHER_FORMATS:
    format = 'plain'
  chat = real.load(folders, name)
  return chat.with_tools(types.Tools(TOOLS.schemas, format))


def results(style):
  """Returns the messages of two calls' results."""
  if style.role == 'user':
    return ({'role': 'user', 'content': '\n'.join(RESULTS)},)
  return tuple(
    {'role': 'tool', 'name': 'add', 'content': content} for content in RESULTS
  )


@NAMES
def test_the_format_is_that_of_the_template(folders, name):
  chat = real.load(folders, name)
  if name in OTHER_FORMATS:
    with pytest.raises(ValueError, match='format of tool calls must be named'):
      chat.with_tools(TOOLS)
  style = load(folders, name).style
  role = 'user' if name in RESULTS_OF_USER else 'tool'
  format = FORMATS.get(name, 'plain')
  assert style == tool_calls.Style(format, role, format != 'plain')
  assert chat.style is None


@pytest.mark.parametrize('name', [*FORMATS, *OTHER_FORMATS])
def test_texts_and_ids_equal_those_of_transformers(folders, name):
  transformers = pytest.importorskip('transformers')
  theirs = transformers.AutoTokenizer.from_pretrained(folders[name])
  format = FORMATS.get(name, 'hermes')  # a named format, the template's words
  ours = load(folders, name, format)
  called = {'role': 'assistant', 'content': CALL[format]}
  conversations = [(U,), (S, U)]
  if name in FORMATS:
    conversations.append((S, U, called, *results(ours.style)))
  for messages, prompt in itertools.product(conversations, (False, True)):
    if name == 'mistral_nemo' and S in messages and not prompt:
      continue
    tokens = ours.render(messages, add_generation_prompt=prompt)
    options = {'add_generation_prompt': prompt, **real.DATED.get(name, {})}
    options['tools'] = list(TOOLS.schemas)
    assert tokens.text == theirs.apply_chat_template(
      list(messages), tokenize=False, **options
    )
    assert tokens.ids.tolist() == theirs.apply_chat_template(
      list(messages), return_dict=False, **options
    )


@NAMES
def test_the_policy_is_told_before_its_first_turn(folders, name):
  """And contents stay contents: the description is scaffold."""
  chat, prompt = load(folders, name), (U,) if name in real.NO_SYSTEM else (S, U)
  rendered = chat.render(prompt, add_generation_prompt=True)
  assert 'Adds two numbers, é.' in rendered.text
  contents = real.text(chat, rendered.ids[rendered.is_content])
  assert contents == ''.join(m['content'] for m in prompt)


@NAMES
def test_sampled_ids_stay_when_results_follow(folders, name):
  """The ids of the calling turn are a prefix of those of the next prompt."""
  chat = load(folders, name)
  opened = chat.render((U,), add_generation_prompt=True)
  thought = '<think>\nhm\n</think>\n\n' if name in THINKING else ''
  text = thought + CALL[chat.style.format]
  if name == 'mistral_7b_instruct_v0_2':  # it renders answers so
    text = f' {text}'
  eos = chat.tokenizer.eos_id
  completed = chat.append(opened, [*chat.tokenizer.encode(text), eos])
  history = (U, {'role': 'assistant', 'content': text})
  if name == real.FORCED:  # it renders no thought that it has prompted for
    with pytest.raises(rendering.Rewritten):
      chat.extend(completed, history, results(chat.style))
    return
  after = chat.extend(
    completed, history, results(chat.style), add_generation_prompt=True
  )
  np.testing.assert_array_equal(after.ids[: len(completed)], completed.ids)
  assert after.sampled.sum() == len(text.encode()) + 1
  bare = {'role': 'assistant', 'content': text.strip()}
  whole = chat.render(
    (U, bare, *results(chat.style)), add_generation_prompt=True
  )
  np.testing.assert_array_equal(whole.ids, after.ids)


@pytest.mark.parametrize('format', tool_calls.FORMATS)
def test_the_built_in_template_begins_with_the_description(format):
  chat = rendering.Renderer(tokenizers.Bytes())
  described = chat.with_tools(types.Tools((ADD,), format))
  assert chat.with_tools(None) is chat
  rendered, bare = (x.render((S, U)) for x in (described, chat))
  head, _ = rendered.text.split(bare.text)
  assert head.startswith(
    '<|system|>Tools:\n- add(a: integer, b: integer): Adds'
  )
  assert rendered.is_content.sum() == bare.is_content.sum()


@pytest.mark.parametrize(
  ('tools', 'words'),
  [
    (types.Tools((ADD,), 'xml'), "must be one of .*: got 'xml'"),
    (types.Tools((ADD, ADD)), r'tools\[1\] must be .* a name of its own'),
    (types.Tools(({'function': len},)), 'tools must be JSON values'),
  ],
)
def test_malformed_tools_are_refused(tools, words):
  with pytest.raises(ValueError, match=words):
    rendering.Renderer(tokenizers.Bytes()).with_tools(tools)
