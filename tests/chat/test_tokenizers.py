"""Tokenizers: ids, special tokens, fingerprints, errors."""

import json
import os
import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain import schema
from posttrain.chat import tokenizers

DATA = os.environ.get('POSTTRAIN_DATA')
needs_data = pytest.mark.skipif(
  DATA is None, reason='POSTTRAIN_DATA (folder of real files) is unset'
)


@pytest.fixture(scope='module')
def neox():
  path = pathlib.Path(DATA) / 'neox20b_tokenizer' / 'tokenizer.json'
  return tokenizers.load(schema.Tokenizer(path=str(path), eos='<|endoftext|>'))


@pytest.fixture(scope='module')
def words(tmp_path_factory):
  """A small tokenizer.json: a word per token, bos in front."""
  import tokenizers as library
  from tokenizers import models, pre_tokenizers, processors

  names = ['<unk>', '<s>', '</s>', '<pad>', 'a', 'b', 'c', 'stop']
  tokenizer = library.Tokenizer(
    models.WordLevel(
      {name: i for i, name in enumerate(names)}, unk_token='<unk>'
    )
  )
  tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
  tokenizer.add_special_tokens(['<s>', '</s>', '<pad>'])
  tokenizer.post_processor = processors.TemplateProcessing(
    single='<s> $A', special_tokens=[('<s>', 1)]
  )
  tokenizer.enable_truncation(2)
  path = tmp_path_factory.mktemp('words') / 'tokenizer.json'
  tokenizer.save(str(path))
  return str(path)


def test_text_is_shown_with_its_special_tokens():
  text = '<|user|>aé<|end|><|end|><|assistant|>'
  tokenizer = tokenizers.load(schema.Tokenizer())
  ids = tokenizer.encode_scaffold(text)
  assert tokenizers.show(tokenizer, ids) == text
  assert tokenizer.decode(ids) == 'aé'


def test_byte_tokenizer_has_literal_ids():
  tokenizer = tokenizers.load(schema.Tokenizer())
  assert tokenizer.encode('aé') == [97, 195, 169]
  assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.bos_id) == (
    256,
    257,
    None,
  )
  assert tokenizer.special_id('<|assistant|>') == 260
  assert tokenizer.special_id('<|nope|>') is None
  assert tokenizer.vocab_size == 264 and tokenizer.vocab_size % 8 == 0
  assert tokenizer.encode_scaffold('<|user|>a<|end|>') == [259, 97, 257]


def test_byte_tokenizer_replaces_invalid_text_and_ids():
  tokenizer = tokenizers.Bytes()
  assert tokenizer.decode([97, 257, 195, 263, 98]) == 'a\ufffdb'
  assert tokenizer.decode([]) == '' and tokenizer.encode('') == []
  assert tokenizer.encode('\ud800') == [ord('?')]


@given(st.text())
@settings(max_examples=60, deadline=None)
def test_bytes_round_trip_without_special_ids(text):
  tokenizer = tokenizers.Bytes()
  ids = tokenizer.encode(text + '<|end|>')
  assert max(ids) < 256
  assert tokenizer.decode(ids) == (
    text.encode('utf-8', 'replace').decode() + '<|end|>'
  )


def test_a_file_has_bos_and_pad_and_does_not_truncate(words):
  tokenizer = tokenizers.load(schema.Tokenizer(path=words, eos='</s>'))
  assert (tokenizer.bos, tokenizer.bos_id) == ('<s>', 1)
  assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size) == (2, 3, 8)
  assert tokenizer.encode('a b c a') == [4, 5, 6, 4]
  assert tokenizer.encode_scaffold('a</s>') == [4, 2]
  assert 2 not in tokenizer.encode('a </s>')
  assert tokenizer.decode([1, 4, 2, 5, 900]) == 'a b'


@pytest.mark.parametrize(
  'cfg, error',
  [
    ({'eos': '<|nope|>'}, 'eos must be a token of the vocabulary'),
    ({'path': '/nowhere.json', 'eos': 'x'}, 'path must name an existing'),
    ({'path': 'words'}, 'eos must be given.*</s>'),
    ({'path': 'words', 'eos': 'stop'}, 'eos must not be spelled by ordinary'),
  ],
)
def test_unknown_tokens_and_missing_files_are_refused(words, cfg, error):
  if cfg.get('path') == 'words':
    cfg = {**cfg, 'path': words}
  with pytest.raises(ValueError, match=f'config.tokenizer.{error}'):
    tokenizers.load(schema.Tokenizer(**cfg))


def test_a_file_of_another_kind_is_refused(tmp_path):
  path = tmp_path / 'config.json'
  path.write_text(json.dumps({'model_type': 'qwen'}))
  with pytest.raises(ValueError, match='tokenizer.path must name a Hugging'):
    tokenizers.load(schema.Tokenizer(path=str(path), eos='x'))


@needs_data
def test_ids_of_a_real_tokenizer_file(neox):
  text = 'What is 47 + 85? é\n    \\boxed{132} <|endoftext|>'
  ids = neox.encode(text)
  assert neox.eos_id == 0 and neox.eos_id not in ids
  assert neox.pad_id == 1 and neox.bos_id is None
  assert neox.decode(ids) == text
  assert neox.encode_scaffold('a<|endoftext|>')[-1] == 0
  assert neox.vocab_size == 50277


def test_a_tokenizer_that_adds_spaces_warns(tmp_path):
  import tokenizers as library

  tokenizer = library.Tokenizer(
    library.models.BPE(vocab={'\u2581': 0, 'a': 1, '</s>': 2}, merges=[])
  )
  tokenizer.pre_tokenizer = library.pre_tokenizers.Metaspace()
  tokenizer.add_special_tokens(['</s>'])
  path = str(tmp_path / 'tokenizer.json')
  tokenizer.save(path)
  with pytest.warns(match='begins every text'):
    tokenizers.load(schema.Tokenizer(path=path, eos='</s>'))
