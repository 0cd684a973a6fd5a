"""Text settings of HuggingFace directories, read and written."""

import json

import pytest
import tokenizers as library

from posttrain import schema
from posttrain.chat import rendering, tokenizers

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


def write(path, template=TEMPLATE, special=(), stops=None, **metadata):
  """Writes a directory with a byte-level tokenizer and special tokens."""
  path.mkdir()
  alphabet = json.loads(tokenizers.Bytes().content)['model']['vocab']
  file = library.Tokenizer(library.models.BPE(vocab=alphabet, merges=[]))
  file.pre_tokenizer = library.pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=False
  )
  file.decoder = library.decoders.ByteLevel()
  file.add_special_tokens(['<s>', '<eos>', '<turn>', '<quiet>', *special])
  file.save(str(path / 'tokenizer.json'))
  metadata = {'bos_token': '<s>', 'eos_token': '<eos>', **metadata}
  if template:
    (path / 'chat_template.jinja').write_text(template)
  (path / 'tokenizer_config.json').write_text(json.dumps(metadata))
  if stops:
    ids = [file.token_to_id(x) for x in stops]
    text = json.dumps({'eos_token_id': ids, 'top_p': 0.9})
    (path / 'generation_config.json').write_text(text)
  return path


def load(path, **options):
  return rendering.load(schema.Tokenizer(path=str(path), **options))


def ids(chat):
  return chat.render(MESSAGES, add_generation_prompt=True).ids.tolist()


@pytest.mark.parametrize(
  ('options', 'eos'),
  [
    ({'stops': ['<eos>', '<turn>']}, '<turn>'),
    ({'stops': ['<eos>']}, '<turn>'),  # a base model with a chat template
    ({'template': None, 'stops': ['<eos>', '<turn>']}, '<eos>'),
    ({'template': '{{ strftime_now("%Y") }}'}, '<eos>'),
  ],
)
def test_eos_is_the_token_that_closes_an_assistant_turn(tmp_path, options, eos):
  chat = load(write(tmp_path / 'd', **options))
  assert chat.tokenizer.eos == eos
  stops = options.get('stops', ())
  assert {chat.tokenizer.text(i) for i in chat.stop_ids} == {eos, *stops}


@pytest.mark.parametrize(
  ('template', 'options'),
  [
    (TEMPLATE, {}),
    (TEMPLATE, {'template_variables': '{"think": true}', 'pad': '<quiet>'}),
    (None, {'eos': '<eos>', 'pad': '<quiet>'}),
  ],
)
def test_a_written_directory_renders_alike_here_and_in_transformers(
  tmp_path, template, options
):
  path = write(tmp_path / 'd', template, stops=['<eos>', '<turn>'])
  chat = load(path, **options)
  before = {p.name: p.read_bytes() for p in path.iterdir()}
  rendering.write(chat, path)
  loaded = load(path)
  assert ids(loaded) == ids(chat)
  assert set(loaded.stop_ids) == set(chat.stop_ids)
  if template and not options:  # nothing to write
    assert before == {p.name: p.read_bytes() for p in path.iterdir()}
  assert json.loads((path / 'generation_config.json').read_text())['top_p']
  # No ordinary text became a special token.
  plain = loaded.tokenizer.encode('hi!! ok!')
  assert plain == list(b'hi!! ok!')
  transformers = pytest.importorskip('transformers')
  theirs = transformers.AutoTokenizer.from_pretrained(path)
  assert ids(chat) == theirs.apply_chat_template(
    list(MESSAGES), add_generation_prompt=True, return_dict=False
  )
  assert theirs('hi!! ok!', add_special_tokens=False)['input_ids'] == plain


def test_special_tokens_without_a_row_are_refused_if_used(tmp_path):
  """Gemma 3's text models share a tokenizer with image tokens."""
  path = write(tmp_path / 'd', special=['<image>'])
  rows = load(path).tokenizer.vocab_size - 1
  chat = load(path).with_embedding_rows(rows)
  assert chat.render(({**MESSAGES[0], 'content': '<image>'},)).ids.max() < rows
  (path / 'chat_template.jinja').write_text('<image>' + TEMPLATE)
  chat = load(path).with_embedding_rows(rows)
  with pytest.raises(ValueError, match="rows for: got '<image>' in '<image>"):
    chat.render(MESSAGES)


def test_the_config_overrides_the_directory(tmp_path):
  path = write(tmp_path / 'd', stops=['<turn>'])
  other = tmp_path / 'other.jinja'
  other.write_text(TEMPLATE.replace('[{{', '({{'))
  chat = load(path, chat_template=str(other), eos='<eos>', pad='<s>')
  assert chat.render(MESSAGES[:1]).text == '<s>(user]hi!! ok!'
  assert chat.tokenizer.eos == '<eos>' and chat.tokenizer.pad_id == 256
  assert chat.fingerprint != load(path).fingerprint


def test_variables_that_the_template_does_not_read_are_refused(tmp_path):
  path = write(tmp_path / 'd')
  with pytest.raises(ValueError, match=r"expected some of .*'think'"):
    load(path, template_variables='{"today": "2025-01-31"}')
  with pytest.raises(ValueError, match='template_variables must be a JSON '):
    load(path, template_variables='{"today": "31 Jan"}')


@pytest.mark.parametrize(
  ('name', 'content', 'message'),
  [
    ('tokenizer_config.json', '[', 'tokenizer_config.json must be JSON'),
    ('generation_config.json', '{"eos_token_id": "x"}', 'must be a token id'),
    (
      'chat_template.json',
      '{"chat_template": [{"name": "rag", "template": ""}]}',
      "a chat template named 'default'",
    ),
  ],
)
def test_errors_name_the_broken_file(tmp_path, name, content, message):
  path = write(tmp_path / 'd', template=None)
  (path / name).write_text(content)
  with pytest.raises(ValueError, match=message):
    load(path)


@pytest.mark.parametrize(
  ('template', 'options', 'is_warned'),
  [
    (None, {}, True),
    (None, {'chat_template': 'raw'}, False),
    (TEMPLATE, {}, False),
  ],
)
def test_a_directory_without_a_template_is_a_warning(
  tmp_path, caplog, template, options, is_warned
):
  load(write(tmp_path / 'd', template=template), **options)
  is_named = 'config.tokenizer.chat_template' in caplog.text
  assert is_named == ('<|{role}|>' in caplog.text) == is_warned


def test_the_template_named_default_is_used(tmp_path):
  by_name = [
    {'name': name, 'template': template}
    for name, template in (('tools', 'x'), ('default', TEMPLATE))
  ]
  path = write(tmp_path / 'd', template=None, chat_template=by_name)
  assert load(path).template == TEMPLATE
  (path / 'tokenizer.json').unlink()
  with pytest.raises(ValueError, match='must hold a tokenizer.json'):
    load(path)
