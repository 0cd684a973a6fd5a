"""Real models' templates: texts and ids equal to those of transformers.

The files are in `templates/`, their sources in PROVENANCE.md; the ids are those
of a byte-level tokenizer with each model's special tokens.
"""

import datetime
import itertools
import json
import pathlib
import re

import numpy as np
import pytest

from posttrain import schema, types
from posttrain.chat import rendering, tokenizers
from posttrain.rollout import frozen_models

FOLDER = pathlib.Path(__file__).parent / 'templates'
TOKENS = json.loads((FOLDER / 'tokens.json').read_text())
# The templates that read the date.
TODAY = {'today': datetime.date.today().isoformat()}
DATED = {'granite3_3': TODAY, 'llama3_2': TODAY}
# Samples of a demonstration user, assistant, user, assistant, if not 1.
SAMPLES = {
  'qwen3': 2,  # renders thoughts, even empty ones, in the last turn only
  'phi3': 2,
  'phi3_5': 2,  # ends every conversation with an eos_token
}
FORCED = 'deepseek_r1_distill'  # prompts for a thought, and renders none
NO_SYSTEM = ('gemma2', 'mistral_7b_instruct_v0_1', 'mixtral_8x7b_instruct')
NAMES = pytest.mark.parametrize('name', sorted(TOKENS))
S, U, A, U2, A2 = (
  {'role': role, 'content': content}
  for role, content in (
    ('system', 'Be brief.'),
    ('user', 'What is\n 47 + 85?'),
    ('assistant', 'It is *132*, é.'),
    ('user', 'And 1 < 2?'),
    ('assistant', '{"yes": true}'),
  )
)


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
  """A directory per model, in the published format."""
  root = tmp_path_factory.mktemp('models')
  paths = {}
  for name, metadata in TOKENS.items():
    import tokenizers as library

    template = (FOLDER / f'{name}.jinja').read_text()
    special = [
      metadata['bos_token'],
      metadata['eos_token'],
      *metadata['stop_tokens'],
      '<pad>',
      *re.findall(r'<[|｜][^<>{}\s]+[|｜]>', template),
    ]
    file = library.Tokenizer.from_str(tokenizers.Bytes().content.decode())
    file.add_special_tokens(list(dict.fromkeys(filter(None, special))))
    folder = paths[name] = root / name
    folder.mkdir()
    file.save(str(folder / 'tokenizer.json'))
    stops = [file.token_to_id(x) for x in metadata['stop_tokens']]
    for path, value in {
      'tokenizer_config.json': {
        'tokenizer_class': 'PreTrainedTokenizerFast',
        'pad_token': '<pad>',
        'eos_token': {
          '__type': 'AddedToken',
          'content': metadata['eos_token'],
          'lstrip': False,
          'normalized': False,
          'rstrip': False,
          'single_word': False,
          'special': True,
        },
        'bos_token': metadata['bos_token'],
        'chat_template': template,
      },
      'generation_config.json': {
        'eos_token_id': stops if len(stops) > 1 else stops[0]
      },
    }.items():
      (folder / path).write_text(json.dumps(value))
  return paths


def load(folders, name):
  variables = json.dumps(DATED.get(name, {}))
  return rendering.load(
    schema.Tokenizer(path=str(folders[name]), template_variables=variables)
  )


def text(chat, ids):
  return chat.tokenizer._plain.decode(ids.tolist(), skip_special_tokens=False)


CONVERSATIONS = (
  (U,),
  (S, U),
  (U, A),
  (U, A, U2),
  (S, U, A, U2, A2),
  (U, U2),
  (A, U),
)


@NAMES
def test_texts_and_ids_equal_those_of_transformers(folders, name):
  transformers = pytest.importorskip('transformers')
  theirs = transformers.AutoTokenizer.from_pretrained(folders[name])
  ours, rendered = load(folders, name), 0

  def render(messages, prompt):
    return ours.render(
      messages, add_generation_prompt=prompt, continue_final_message=False
    )

  for messages, prompt in itertools.product(CONVERSATIONS, (False, True)):
    options = {'add_generation_prompt': prompt, **DATED.get(name, {})}
    try:
      shown = theirs.apply_chat_template(
        list(messages), tokenize=False, **options
      )
    except Exception as error:  # raised by the template
      assert 'emplate' in type(error).__name__, error
      with pytest.raises(ValueError, match='must be ones that config'):
        render(messages, prompt)
      continue
    if S['content'] not in shown and S in messages:
      assert (
        name == 'mistral_nemo'
      )  # renders it only before an unanswered question
      with pytest.raises(ValueError, match=r'shows that of messages\[0\]'):
        render(messages, prompt)
      continue
    tokens = render(messages, prompt)
    assert tokens.text == shown
    assert tokens.ids.tolist() == theirs.apply_chat_template(
      list(messages), return_dict=False, **options
    )
    for i, role in enumerate(types.ROLES):
      contents = [m['content'] for m in messages if m['role'] == role]
      mask = tokens.is_content & (tokens.roles == i)
      assert text(ours, tokens.ids[mask]) == ''.join(contents)
    rendered += 1
  assert rendered >= 6, 'the template must render most conversations'


@NAMES
def test_a_continued_turn_has_the_text_of_transformers(folders, name):
  transformers = pytest.importorskip('transformers')
  theirs = transformers.AutoTokenizer.from_pretrained(folders[name])
  chat, begun = load(folders, name), {'role': 'assistant', 'content': 'So, 4'}
  shown = theirs.apply_chat_template(
    [U, begun],
    tokenize=False,
    continue_final_message=True,
    **DATED.get(name, {}),
  )
  prompt = chat.render([U, begun], add_generation_prompt=True)
  assert prompt.text == shown and shown.endswith('So, 4')
  assert (prompt.given, prompt.open) == ('So, 4', True)
  # The rest of the turn is trained, and the next one closes it.
  whole = {'role': 'assistant', 'content': 'So, 4 + 1'}
  rest = {'role': 'assistant', 'content': ' + 1'}
  (sample,) = chat.demonstrate([U, begun, rest], 2)
  trained = text(chat, sample.ids[sample.sampled])
  assert (
    trained.startswith(' + 1') and trained[4:].strip() == chat.tokenizer.eos
  )
  assert chat.tokenizer.decode(sample.ids.tolist()) == chat.tokenizer.decode(
    chat.render([U, whole]).ids.tolist()
  )
  sampled = chat.append(prompt, [*b' + 1', chat.tokenizer.eos_id])
  try:
    longer = chat.extend(sampled, [U, whole], [U2], add_generation_prompt=True)
  except rendering.Rewritten:
    return
  assert (
    longer.text == chat.render([U, whole, U2], add_generation_prompt=True).text
  )
  assert np.array_equal(longer.ids[: len(sampled)], sampled.ids)


@pytest.mark.parametrize(
  'content', ['<think>\nHm', '<think>\nHm, ', '<think>\n']
)
@pytest.mark.parametrize('name', ['qwen3', 'qwen3_training', 'lfm2_5', FORCED])
def test_an_open_thought_is_continued_as_the_whole_turn_begins(
  folders, name, content
):
  chat = load(folders, name)
  begun, rest = (
    {'role': 'assistant', 'content': x}
    for x in (content, '132.\n</think>\n\nIt is 132.')
  )
  prompt = chat.render([S, U, begun], add_generation_prompt=True)
  before = chat.render([S, U], add_generation_prompt=True)
  assert prompt.text == before.text.removesuffix('<think>\n') + content
  if name == FORCED:  # its whole turns have no thought
    return
  (sample,) = chat.demonstrate([S, U, begun, rest], 3)
  assert sample.text.startswith(prompt.text)
  trained = text(chat, sample.ids[sample.sampled])
  assert trained.startswith('132.\n</think>\n\nIt is 132.')


@NAMES
def test_eos_and_stop_tokens_are_those_of_the_model(folders, name):
  chat, tokens = load(folders, name), TOKENS[name]
  closing = {
    'gemma2': '<end_of_turn>',
    'gemma3': '<end_of_turn>',
    'phi3': '<|end|>',
    'phi3_5': '<|end|>',
  }
  assert chat.tokenizer.eos == closing.get(name, tokens['eos_token'])
  texts = [chat.tokenizer.text(i) for i in chat.stop_ids]
  assert set(texts) == set(tokens['stop_tokens'])
  assert chat.tokenizer.text(chat.tokenizer.pad_id) == '<pad>'


@NAMES
def test_demonstrate_marks_each_answer_once(folders, name):
  """As the policy would sample it, with its eos."""
  chat = load(folders, name)
  conversation = (U, A, U2, A2)
  if name == FORCED:
    with pytest.raises(ValueError, match='open an assistant turn with its'):
      chat.demonstrate(conversation)
    return
  samples = chat.demonstrate(conversation)
  assert len(samples) == SAMPLES.get(name, 1)
  sampled = ''.join(text(chat, part.ids[part.sampled]) for part in samples)
  eos, lead = chat.tokenizer.eos, '<think>\n\n</think>\n\n'
  lead = lead if name in ('qwen3', 'qwen3_training') else ''
  gap = ' ' if name.startswith(('mistral_7b', 'mixtral')) else ''
  turns = sampled.replace(lead, '') if lead else sampled
  assert turns == f'{gap}{A["content"]}{eos}{gap}{A2["content"]}{eos}' or (
    turns == f'{A["content"]}{eos}{A2["content"]}{eos}'
  )
  assert sampled.count(lead) == 2 if lead else True
  # The last sample is the whole conversation.
  whole = chat.render(conversation)
  last = samples[-1]
  np.testing.assert_array_equal(last.ids, whole.ids)


@NAMES
def test_a_template_that_drops_thoughts_starts_a_new_sample(folders, name):
  """Turn by turn; other templates keep the sampled ids."""
  chat = load(folders, name)
  opened = chat.render((U,), add_generation_prompt=True)
  answer = '<think>\n132\n</think>\n\nIt is 132.'
  eos = chat.tokenizer.eos_id
  if name == 'mistral_7b_instruct_v0_2':
    answer = ' ' + answer  # as its template renders answers
  completed = chat.append(opened, [*chat.tokenizer.encode(answer), eos])
  history = (U, {'role': 'assistant', 'content': answer})
  forgets = name in ('qwen3', FORCED, 'lfm2_5')
  if forgets:
    with pytest.raises(rendering.Rewritten):
      chat.extend(completed, history, (U2,), add_generation_prompt=True)
    new = chat.render((*history, U2), add_generation_prompt=True)
    assert '132\n</think>' not in new.text and 'It is 132.' in new.text
    return
  after = chat.extend(completed, history, (U2,), add_generation_prompt=True)
  np.testing.assert_array_equal(after.ids[: len(completed)], completed.ids)
  bare = {'role': 'assistant', 'content': answer.strip()}
  shown = chat.render((U, bare, U2), add_generation_prompt=True)
  np.testing.assert_array_equal(after.ids, shown.ids)


@NAMES
def test_a_system_message_is_rendered_or_refused(folders, name):
  chat = load(folders, name)
  if name in NO_SYSTEM:
    with pytest.raises(ValueError, match='must be ones that config.tokenizer'):
      chat.render((S, U), add_generation_prompt=True)
    return
  shown = chat.render((S, U), add_generation_prompt=True)
  mask = shown.is_content & (shown.roles == types.ROLES.index('system'))
  assert text(chat, shown.ids[mask]) == S['content']


@NAMES
@pytest.mark.parametrize('message', [S, U], ids=['system', 'user'])
def test_a_hint_changes_the_text_of_one_message_alone(folders, name, message):
  """No second system block, and turns go on alternating."""
  chat = load(folders, name)
  prompt = (U,) if name in NO_SYSTEM else (S, U)
  hint = {'role': message['role'], 'content': 'It is <b>132</b>.'}
  before, after = (
    text(chat, x.ids)
    for x in (
      chat.render(prompt, add_generation_prompt=True),
      frozen_models.render_hinted(chat, prompt, (hint,)),
    )
  )
  # Templates without system messages have it in that of the user.
  own = U['content'] if name in NO_SYSTEM else message['content']
  assert before.count(own) == 1
  assert after == before.replace(own, f'{hint["content"]}\n\n{own}')


def test_a_content_that_changes_other_turns_is_located(folders):
  """Qwen3 reads a user message of this form as a tool's answer."""
  chat = load(folders, 'qwen3')
  asks = {'role': 'user', 'content': '<tool_response>\n7\n</tool_response>'}
  thinks = {'role': 'assistant', 'content': '<think>\nhm\n</think>\n\nyes'}
  shown = chat.render((U, thinks, asks), add_generation_prompt=True)
  contents = text(chat, shown.ids[shown.is_content])
  assert contents == f'{U["content"]}{thinks["content"]}{asks["content"]}'


def test_template_variables_are_rendered(folders):
  chat = rendering.load(
    schema.Tokenizer(
      path=str(folders['qwen3']),
      template_variables='{"enable_thinking": false}',
    )
  )
  prompt = chat.render((U,), add_generation_prompt=True)
  assert prompt.text.endswith('<think>\n\n</think>\n\n')
  with pytest.raises(schema.FieldError, match='must be a JSON object'):
    schema.Tokenizer(template_variables='[1]')
