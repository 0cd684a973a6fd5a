"""What a directory says of its text, and what is written into one."""

import json

import numpy as np
import pytest
import tokenizers as library

from posttrain import schema
from posttrain.chat import pretrained, renderer, tokenizers

TEMPLATE = (
  "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}"
  "{% if m['role'] == 'assistant' %}<turn>{% endif %}{% endfor %}"
  '{% if add_generation_prompt %}[assistant]'
  '{% if not think %}<quiet>{% endif %}{% endif %}'
)
MESSAGES = (
  {'role': 'user', 'content': 'hi!! ok!'},
  {'role': 'assistant', 'content': 'é'},
  {'role': 'user', 'content': 'so?'},
)


def write(path, template=TEMPLATE, special=(), stops=None, **about):
  """A directory with a byte-level tokenizer of other special tokens."""
  path.mkdir()
  alphabet = json.loads(tokenizers.Bytes().content)['model']['vocab']
  file = library.Tokenizer(library.models.BPE(vocab=alphabet, merges=[]))
  file.pre_tokenizer = library.pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=False
  )
  file.decoder = library.decoders.ByteLevel()
  file.add_special_tokens(['<s>', '<eos>', '<turn>', '<quiet>', *special])
  file.save(str(path / 'tokenizer.json'))
  about = {'bos_token': '<s>', 'eos_token': '<eos>', **about}
  if template:
    (path / 'chat_template.jinja').write_text(template)
  (path / 'tokenizer_config.json').write_text(json.dumps(about))
  if stops:
    ids = [file.token_to_id(x) for x in stops]
    text = json.dumps({'eos_token_id': ids, 'top_p': 0.9})
    (path / 'generation_config.json').write_text(text)
  return path


def load(path, **options):
  return renderer.load(schema.Tokenizer(path=str(path), **options))


def ids(made):
  return [
    made.render(MESSAGES[:n], add_generation_prompt=True).ids.tolist()
    for n in (1, 3)
  ]


@pytest.mark.parametrize(
  ('options', 'eos'),
  [
    ({'stops': ['<eos>', '<turn>']}, '<turn>'),
    ({'stops': ['<eos>']}, '<turn>'),  # a base model with a chat template
    ({}, '<turn>'),
    ({'template': None, 'stops': ['<eos>', '<turn>']}, '<eos>'),
    ({'template': '{{ strftime_now("%Y") }}'}, '<eos>'),
  ],
)
def test_the_token_that_closes_a_turn(tmp_path, options, eos):
  made = load(write(tmp_path / 'd', **options))
  assert made.tokenizer.eos == eos
  stops = options.get('stops', ())
  assert {made.tokenizer.text(i) for i in made.stop_ids} == {eos, *stops}


@pytest.mark.parametrize(
  'options',
  [
    {},
    {'eos': '<eos>'},
    {'template_variables': '{"think": true}'},
    {'pad': '<quiet>'},
  ],
)
@pytest.mark.parametrize('template', [TEMPLATE, None])
def test_what_is_written_speaks_as_the_renderer_does(
  tmp_path, template, options
):
  if template is None and 'template_variables' in options:
    pytest.skip('nothing reads them')
  path = write(tmp_path / 'd', template, stops=['<eos>', '<turn>'])
  made = load(path, **options)
  before = {p.name: p.read_bytes() for p in path.iterdir()}
  pretrained.write(made, path)
  again = load(path)
  assert ids(again) == ids(made)
  assert set(again.stop_ids) == set(made.stop_ids)
  if template and not options:  # it did already
    assert before == {p.name: p.read_bytes() for p in path.iterdir()}
  about = json.loads((path / 'generation_config.json').read_text())
  assert about['top_p'] == 0.9
  # No ordinary text has become a special token.
  plain = again.tokenizer.encode('hi!! ok!')
  assert plain == list(b'hi!! ok!') and again.tokenizer.decode(plain) == (
    'hi!! ok!'
  )
  about = json.loads((path / 'tokenizer_config.json').read_text())
  assert about.get('pad_token') in (None, '<quiet>')
  # And so in transformers.
  transformers = pytest.importorskip('transformers')
  theirs = transformers.AutoTokenizer.from_pretrained(path)
  for n, expected in zip((1, 3), ids(made), strict=True):
    assert expected == theirs.apply_chat_template(
      list(MESSAGES[:n]), add_generation_prompt=True, return_dict=False
    )
  assert theirs('hi!! ok!', add_special_tokens=False)['input_ids'] == plain


def test_a_model_without_rows_for_some_special_tokens(tmp_path):
  """As Gemma 3's text models, which share a tokenizer with images."""
  path = write(tmp_path / 'd', special=['<image>'])
  made = load(path)
  rows = made.tokenizer.vocab_size - 1
  made.fit(rows)
  shown = made.render(({'role': 'user', 'content': '<image>'},))
  assert shown.ids.max() < rows
  with pytest.raises(ValueError, match="must hold the tokenizer's 259 tokens"):
    made.fit(258)  # one that ends a turn
  (path / 'chat_template.jinja').write_text('<image>' + TEMPLATE)
  made = load(path)
  made.render(MESSAGES)
  made.fit(rows)
  with pytest.raises(ValueError, match="rows for: got '<image>' in '<image>"):
    made.render(MESSAGES)


def test_the_config_goes_before_the_directory(tmp_path):
  path = write(tmp_path / 'd', stops=['<turn>'])
  other = tmp_path / 'other.jinja'
  other.write_text(TEMPLATE.replace('[{{', '({{'))
  made = load(path, chat_template=str(other), eos='<eos>', pad='<s>')
  assert made.render(MESSAGES[:1]).text == '<s>(user]hi!! ok!'
  assert made.tokenizer.eos == '<eos>' and made.tokenizer.pad_id == 256
  prints = {
    made.fingerprint,
    load(path).fingerprint,
    load(path, template_variables='{"think": 1}').fingerprint,
  }
  assert len(prints) == 3


def test_variables_that_nothing_reads_are_refused(tmp_path):
  path = write(tmp_path / 'd')
  for variables in ('{"thinks": true}', '{"today": "2025-01-31"}'):
    with pytest.raises(ValueError, match=r"expected some of .*'think'"):
      load(path, template_variables=variables)
  for variables in ('{"today": 5}', '{"today": "31 Jan"}', '[]', '{'):
    with pytest.raises(ValueError, match='template_variables must be a JSON '):
      load(path, template_variables=variables)


@pytest.mark.parametrize(
  ('name', 'content', 'says'),
  [
    ('tokenizer_config.json', '[', 'tokenizer_config.json must be JSON'),
    ('tokenizer_config.json', '[]', 'must hold a JSON object'),
    ('tokenizer_config.json', '{"bos_token": 3}', 'bos_token must be a text'),
    ('generation_config.json', '{"eos_token_id": "x"}', 'must be a token id'),
    (
      'chat_template.json',
      '{"chat_template": [{"name": "rag", "template": ""}]}',
      "a chat template named 'default'",
    ),
  ],
)
def test_broken_files_are_named(tmp_path, name, content, says):
  path = write(tmp_path / 'd', template=None)
  (path / name).write_text(content)
  with pytest.raises(ValueError, match=says):
    load(path)


def test_templates_by_name(tmp_path):
  named = [
    {'name': 'tools', 'template': 'x'},
    {'name': 'default', 'template': TEMPLATE},
  ]
  path = write(tmp_path / 'd', template=None, chat_template=named)
  assert load(path).template == TEMPLATE
  (path / 'tokenizer.json').unlink()
  with pytest.raises(ValueError, match='must hold a tokenizer.json'):
    load(path)


def test_a_special_token_of_a_row_is_no_number_of_text(tmp_path):
  made = load(write(tmp_path / 'd'))
  assert made.tokenizer.text_size == 256
  assert np.array(made.tokenizer.encode('<turn>')).max() < 256
