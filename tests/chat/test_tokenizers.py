"""Tokenizers: ids, special tokens, fingerprints, errors."""

import os
import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain import schema
from posttrain.chat import tokenizers

DATA = os.environ.get('POSTTRAIN_DATA')


@pytest.fixture(scope='module')
def words(tmp_path_factory):
  """A small tokenizer.json: a word per token, bos in front."""
  import tokenizers as library

  names = ['<unk>', '<s>', '</s>', '<pad>', 'a', 'b', 'c', 'stop']
  tokenizer = library.Tokenizer(
    library.models.WordLevel(
      {name: i for i, name in enumerate(names)}, unk_token='<unk>'
    )
  )
  tokenizer.pre_tokenizer = library.pre_tokenizers.Whitespace()
  tokenizer.add_special_tokens(['<s>', '</s>', '<pad>'])
  tokenizer.post_processor = library.processors.TemplateProcessing(
    single='<s> $A', special_tokens=[('<s>', 1)]
  )
  tokenizer.enable_truncation(2)
  path = tmp_path_factory.mktemp('words') / 'tokenizer.json'
  tokenizer.save(str(path))
  return str(path)


def test_byte_tokenizer_has_literal_ids():
  tokenizer = tokenizers.load(schema.Tokenizer())
  assert tokenizer.encode('aé') == [97, 195, 169]
  assert (tokenizer.pad_id, tokenizer.eos_id) == (256, 257)
  assert tokenizer.bos_id is None
  assert tokenizer.special_id('<|assistant|>') == 260
  assert tokenizer.special_id('<|nope|>') is None
  assert tokenizer.vocab_size == 264
  text = '<|user|>a<|end|>'
  assert tokenizer.encode_scaffold(text) == [259, 97, 257]
  assert tokenizers.show(tokenizer, [259, 97, 257]) == text
  assert tokenizer.decode([97, 257, 195, 263, 98]) == 'a\ufffdb'


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
    ({'path': __file__, 'eos': 'x'}, 'path must name a Hugging'),
    ({'path': 'words'}, 'eos must be given.*</s>'),
    ({'path': 'words', 'eos': 'stop'}, 'eos must not be spelled by ordinary'),
  ],
)
def test_unknown_tokens_and_missing_files_are_refused(words, cfg, error):
  if cfg.get('path') == 'words':
    cfg = {**cfg, 'path': words}
  with pytest.raises(ValueError, match=f'config.tokenizer.{error}'):
    tokenizers.load(schema.Tokenizer(**cfg))


@pytest.mark.skipif(
  DATA is None, reason='POSTTRAIN_DATA (folder of real files) is unset'
)
def test_ids_of_a_real_tokenizer_file():
  path = pathlib.Path(DATA) / 'neox20b_tokenizer' / 'tokenizer.json'
  cfg = schema.Tokenizer(path=str(path), eos='<|endoftext|>')
  neox = tokenizers.load(cfg)
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
