"""Real models' templates: the texts and ids that transformers makes of them.

The files are in `templates/`, with where they come from in PROVENANCE.md; the
ids are those of a byte-level tokenizer with each model's special tokens.
"""

import datetime
import itertools
import json
import pathlib
import re

import numpy as np
import pytest

from posttrain import schema, types
from posttrain.chat import renderer, tokenizers

FOLDER = pathlib.Path(__file__).parent / 'templates'
TOKENS = json.loads((FOLDER / 'tokens.json').read_text())
# Who asks for the date.
TODAY = {'today': datetime.date.today().isoformat()}
DATED = {'granite3_3': TODAY, 'llama3_2': TODAY}
# What a template does to the demonstration user, assistant, user, assistant.
SAMPLES = {
  'qwen3': 2,  # thoughts, even empty ones, are shown in the last turn only
  'phi3': 2,
  'phi3_5': 2,  # an eos_token ends whatever comes last
}
FORCED = 'deepseek_r1_distill'  # prompts for a thought, and shows none
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
  """A directory per model, as its makers write them."""
  root = tmp_path_factory.mktemp('models')
  made = {}
  for name, about in TOKENS.items():
    import tokenizers as library

    template = (FOLDER / f'{name}.jinja').read_text()
    special = [
      about['bos_token'],
      about['eos_token'],
      *about['stop_tokens'],
      '<pad>',
      *re.findall(r'<[|｜][^<>{}\s]+[|｜]>', template),
    ]
    file = library.Tokenizer.from_str(tokenizers.Bytes().content.decode())
    file.add_special_tokens(list(dict.fromkeys(filter(None, special))))
    folder = made[name] = root / name
    folder.mkdir()
    file.save(str(folder / 'tokenizer.json'))
    stops = [file.token_to_id(x) for x in about['stop_tokens']]
    for path, value in {
      'tokenizer_config.json': {
        'tokenizer_class': 'PreTrainedTokenizerFast',
        'pad_token': '<pad>',
        'eos_token': {
          '__type': 'AddedToken',
          'content': about['eos_token'],
          'lstrip': False,
          'normalized': False,
          'rstrip': False,
          'single_word': False,
          'special': True,
        },
        'bos_token': about['bos_token'],
        'chat_template': template,
      },
      'generation_config.json': {
        'eos_token_id': stops if len(stops) > 1 else stops[0]
      },
    }.items():
      (folder / path).write_text(json.dumps(value))
  return made


def load(folders, name):
  variables = json.dumps(DATED.get(name, {}))
  return renderer.load(
    schema.Tokenizer(path=str(folders[name]), template_variables=variables)
  )


def text(made, ids):
  return made.tokenizer._plain.decode(ids.tolist(), skip_special_tokens=False)


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
def test_texts_and_ids_are_those_of_transformers(folders, name):
  transformers = pytest.importorskip('transformers')
  theirs = transformers.AutoTokenizer.from_pretrained(folders[name])
  ours, rendered = load(folders, name), 0
  for messages, prompt in itertools.product(CONVERSATIONS, (False, True)):
    options = {'add_generation_prompt': prompt, **DATED.get(name, {})}
    try:
      shown = theirs.apply_chat_template(
        list(messages), tokenize=False, **options
      )
    except Exception as error:  # the template's own
      assert 'emplate' in type(error).__name__, error
      with pytest.raises(ValueError, match='must be ones that config'):
        ours.render(messages, add_generation_prompt=prompt)
      continue
    if S['content'] not in shown and S in messages:
      assert name == 'mistral_nemo'  # shows it to a question that is open
      with pytest.raises(ValueError, match=r'shows that of messages\[0\]'):
        ours.render(messages, add_generation_prompt=prompt)
      continue
    made = ours.render(messages, add_generation_prompt=prompt)
    assert made.text == shown
    assert made.ids.tolist() == theirs.apply_chat_template(
      list(messages), return_dict=False, **options
    )
    for i, role in enumerate(types.ROLES):
      said = [m['content'] for m in messages if m['role'] == role]
      here = made.is_content & (made.roles == i)
      assert text(ours, made.ids[here]) == ''.join(said)
    rendered += 1
  assert rendered >= 6, 'most conversations are ones that it knows'


@NAMES
def test_the_stop_tokens_of_a_directory(folders, name):
  made, about = load(folders, name), TOKENS[name]
  closing = {
    'gemma2': '<end_of_turn>',
    'gemma3': '<end_of_turn>',
    'phi3': '<|end|>',
    'phi3_5': '<|end|>',
  }
  assert made.tokenizer.eos == closing.get(name, about['eos_token'])
  texts = [made.tokenizer.text(i) for i in made.stop_ids]
  assert set(texts) == set(about['stop_tokens'])
  assert made.tokenizer.text(made.tokenizer.pad_id) == '<pad>'


@NAMES
def test_demonstrations(folders, name):
  """Each answer is live once, as the policy would sample it."""
  made = load(folders, name)
  conversation = (U, A, U2, A2)
  if name == FORCED:
    with pytest.raises(ValueError, match='open an assistant turn as it prompt'):
      made.demonstrate(conversation)
    return
  samples = made.demonstrate(conversation)
  assert len(samples) == SAMPLES.get(name, 1)
  live = ''.join(text(made, part.ids[part.sampled]) for part in samples)
  eos, lead = made.tokenizer.eos, '<think>\n\n</think>\n\n'
  lead = lead if name in ('qwen3', 'qwen3_training') else ''
  gap = ' ' if name.startswith(('mistral_7b', 'mixtral')) else ''
  turns = live.replace(lead, '') if lead else live
  assert turns == f'{gap}{A["content"]}{eos}{gap}{A2["content"]}{eos}' or (
    turns == f'{A["content"]}{eos}{A2["content"]}{eos}'
  )
  assert live.count(lead) == 2 if lead else True
  # The ids are those of the whole conversation, as it is shown in the end.
  whole = made.render(conversation)
  last = samples[-1]
  np.testing.assert_array_equal(last.ids, whole.ids)


@NAMES
def test_a_thought_that_is_forgotten(folders, name):
  """Played turn by turn: what was sampled is kept, or a new sample begins."""
  made = load(folders, name)
  opened = made.render((U,), add_generation_prompt=True)
  says = '<think>\n132\n</think>\n\nIt is 132.'
  eos = made.tokenizer.eos_id
  if name == 'mistral_7b_instruct_v0_2':
    says = ' ' + says  # as it shows answers
  spoken = made.append(opened, [*made.tokenizer.encode(says), eos])
  history = (U, {'role': 'assistant', 'content': says})
  forgets = name in ('qwen3', FORCED, 'lfm2_5')
  if forgets:
    with pytest.raises(renderer.Rewritten):
      made.extend(spoken, history, (U2,), add_generation_prompt=True)
    again = made.render((*history, U2), add_generation_prompt=True)
    assert '132\n</think>' not in again.text and 'It is 132.' in again.text
    return
  after = made.extend(spoken, history, (U2,), add_generation_prompt=True)
  np.testing.assert_array_equal(after.ids[: len(spoken)], spoken.ids)
  bare = {'role': 'assistant', 'content': says.strip()}
  shown = made.render((U, bare, U2), add_generation_prompt=True)
  np.testing.assert_array_equal(after.ids, shown.ids)


@NAMES
def test_a_system_message_is_shown_or_refused(folders, name):
  made = load(folders, name)
  if name in NO_SYSTEM:
    with pytest.raises(ValueError, match='must be ones that config.tokenizer'):
      made.render((S, U), add_generation_prompt=True)
    return
  shown = made.render((S, U), add_generation_prompt=True)
  here = shown.is_content & (shown.roles == types.ROLES.index('system'))
  assert text(made, shown.ids[here]) == S['content']


def test_a_content_that_decides_how_others_are_shown(folders):
  """Qwen3 takes a user's message of this form for a tool's answer."""
  made = load(folders, 'qwen3')
  asks = {'role': 'user', 'content': '<tool_response>\n7\n</tool_response>'}
  thinks = {'role': 'assistant', 'content': '<think>\nhm\n</think>\n\nyes'}
  shown = made.render((U, thinks, asks), add_generation_prompt=True)
  said = text(made, shown.ids[shown.is_content])
  assert said == f'{U["content"]}{thinks["content"]}{asks["content"]}'


def test_variables_reach_a_template(folders):
  made = renderer.load(
    schema.Tokenizer(
      path=str(folders['qwen3']),
      template_variables='{"enable_thinking": false}',
    )
  )
  prompt = made.render((U,), add_generation_prompt=True)
  assert prompt.text.endswith('<think>\n\n</think>\n\n')
  with pytest.raises(schema.FieldError, match='must be a JSON object'):
    schema.Tokenizer(template_variables='[1]')
