"""Hostile tokenizer files: one line that names the file and the place."""

import json

import pytest

from posttrain import schema
from posttrain.chat import pretrained, renderer, tokenizer_files, tokenizers

GROWS = {'type': 'Replace', 'pattern': {'String': 'a'}, 'content': 'aa'}


def base():
  return json.loads(tokenizers.Bytes().content)


def changed(**values):
  value = base()
  for path, new in values.items():
    *keys, last = path.split('__')
    place = value
    for key in keys:
      place = place[key]
    place[last] = new
  return json.dumps(value).encode()


def processor(single, pair=(), ids=()):
  tokens = {'<z>': {'id': '<z>', 'ids': ids, 'tokens': ['<z>'] * len(ids)}}
  return {
    'type': 'TemplateProcessing',
    'single': [{'Sequence': {'id': x, 'type_id': 0}} for x in single]
    + [{'SpecialToken': {'id': '<z>', 'type_id': 0}}] * bool(ids),
    'pair': [{'Sequence': {'id': x, 'type_id': 0}} for x in pair],
    'special_tokens': tokens if ids else {},
  }


def added(**token):
  tokens = base()['added_tokens']
  return changed(added_tokens=[*tokens, {**tokens[0], **token}])


def load(path):
  chat = renderer.load(schema.Tokenizer(path=str(path), eos='<|end|>'))
  ids = chat.render([{'role': 'user', 'content': 'a' * 50 + '!'}]).ids
  return chat.tokenizer.decode(ids.tolist())


@pytest.mark.parametrize(
  ('content', 'words'),
  [
    (b'', 'must be JSON'),
    (bytes(range(256)), 'no UTF-8 at byte 128'),
    (b'[' * 9999, 'nested deeper than'),
    (b'[]', 'must hold a JSON object'),
    (changed(model=None), 'model of'),
    (changed(model__vocab={}), 'must have a vocabulary'),
    (changed(model__vocab__a=10**12), "model.vocab['a'] of"),
    (changed(model__vocab__a=-1), 'must be an id of 0 to 16777215: got -1'),
    (changed(model__vocab__a=2**32 - 1), 'got 4294967295'),
    (changed(model__vocab__a='x'), "got 'x'"),
    (changed(model__vocab__a=5), 'must have each id once: got 5'),
    (changed(model__merges=[['q1', 'q2']]), 'its error: Token `q1` out of'),
    (added(content='<z>', id=-5), 'added_tokens[6].id of'),
    (added(content='<z>', id=10**400), 'must be an id of'),
    (added(content='<z>', id=256), "one token, not '<|pad|>' and '<z>'"),
    (added(content='<z>', id=5000), "got 5000 for '<z>'"),
    (added(content=5), 'added_tokens[6].content of'),
    (changed(added_tokens=['x']), 'added_tokens[0] of'),
    (
      changed(normalizer={'type': 'Sequence', 'normalizers': [GROWS] * 40}),
      'normalizer of',
    ),
    (
      changed(decoder={**GROWS, 'pattern': {'String': ''}}),
      'decoder.pattern of',
    ),
    (
      changed(
        normalizer={'type': 'Precompiled', 'precompiled_charsmap': '/////w=='}
      ),
      'normalizer.precompiled_charsmap of',
    ),
    (changed(model__dropout=0.5), 'model.dropout of'),
    (changed(post_processor=processor('AA')), 'post_processor.single of'),
    (changed(post_processor=processor('A', 'AAB')), 'post_processor.pair of'),
    (changed(post_processor=processor('A' * 1000)), 'of 64 pieces at most'),
    (
      changed(post_processor=processor('A', ids=[1] * 99)),
      'add 64 ids at most: got 100',
    ),
    (
      changed(
        post_processor={
          'type': 'Sequence',
          'processors': [processor('A', 'BB')],
        }
      ),
      'post_processor.pair of',
    ),
    # The library's own faults are BaseExceptions.
    (
      changed(pre_tokenizer={'type': 'FixedLength', 'length': 0}),
      'its error: chunk size must be non-zero',
    ),
  ],
)
def test_hostile_files_are_refused_in_one_line(tmp_path, content, words):
  path = tmp_path / 'tokenizer.json'
  path.write_bytes(content)
  with pytest.raises(ValueError) as error:
    load(path)
  message = str(error.value)
  assert words in message and 'tokenizer.json' in message
  assert '\n' not in message and len(message) < 700


def test_a_sound_file_is_taken_and_checked_again_once_it_changes(tmp_path):
  path = tmp_path / 'tokenizer.json'
  path.write_bytes(changed())
  assert load(path).endswith('!')
  assert [token.text for token in tokenizer_files.check(path)][:2] == [
    '<|pad|>',
    '<|end|>',
  ]
  path.write_bytes(
    changed(post_processor=processor('A', 'AB', [1]), model__dropout=None)
  )
  assert tokenizer_files.check(path)
  path.write_bytes(added(content='<z>', id=-5))
  with pytest.raises(ValueError, match='got -5'):
    tokenizer_files.check(path)


@pytest.mark.parametrize(
  ('name', 'content', 'words'),
  [
    (
      'tokenizer_config.json',
      b'\xff\xfe',
      'tokenizer_config.json must be JSON',
    ),
    ('tokenizer_config.json', b'{"a":' * 5000, 'nested deeper'),
    ('tokenizer_config.json', b'{"chat_template": 5}', 'must be a text: got 5'),
    ('tokenizer_config.json', b'{"chat_template": [7]}', "named 'default'"),
    (
      'tokenizer_config.json',
      b'{"chat_template": [{"name": "default", "template": {}}]}',
      'must be a text: got {}',
    ),
    (
      'tokenizer_config.json',
      b'{"eos_token": {"content": 3}}',
      'eos_token must',
    ),
    (
      'generation_config.json',
      b'{"eos_token_id": [1, -1]}',
      'must be a token id',
    ),
    (
      'generation_config.json',
      b'{"eos_token_id": 1000000000000}',
      'a token id',
    ),
    ('generation_config.json', b'{"eos_token_id": true}', 'must be a token id'),
    ('generation_config.json', b'{"a": 1, "a": 2}', "'a' is there twice"),
    ('chat_template.jinja', b'\xff\xfe\x00', 'config.tokenizer.chat_template'),
    ('chat_template.jinja', b'x' * 2**21, 'at most 1048576 bytes'),
    ('chat_template.jinja', b'{{ ' + b'(' * 9999, 'nested too deeply'),
  ],
)
def test_hostile_files_beside_it_are_refused(tmp_path, name, content, words):
  (tmp_path / 'tokenizer.json').write_bytes(changed())
  (tmp_path / name).write_bytes(content)
  with pytest.raises(ValueError) as error:
    pretrained.resolve(schema.Tokenizer(path=str(tmp_path)))
  assert words in str(error.value)
  assert '\n' not in str(error.value) and len(str(error.value)) < 700


@pytest.mark.parametrize('text', ['{"a":' * 5000, '9' * 5000, '{"a":1,"a":2}'])
def test_hostile_variables_are_refused(text):
  with pytest.raises(schema.FieldError, match='must be a JSON object'):
    schema.Tokenizer(template_variables=text)
