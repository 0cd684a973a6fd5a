"""A word-level tokenizer for the words of generated questions.

A word of generated databases, questions and actions is one id, with or without
a space before it. A digit is one id. All other text is encoded byte by byte, so
that every text round-trips. The format is HuggingFace's tokenizer.json.
"""

from collections.abc import Sequence

from posttrain.chat import tokenizers as chat
from posttrain.envs.sql import words

# A word, digit or sign with at most one space before it; a name without it, so
# that it is the same in quotes; white space.
_PIECES = (
  r' ?[a-z]+(?:_[a-z]+)*| ?[A-Z]+(?![a-z])|[A-Z][a-z]*| ?[0-9]'
  r'| ?[^\sA-Za-z0-9]|\s'
)


def make(vocabulary: Sequence[str]) -> str:
  """Returns the text of a tokenizer.json.

  Args:
    vocabulary: words, digits and signs.
  """
  import tokenizers as library  # late: environments do not need it

  byte_level = library.pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=False
  )
  alphabet = sorted(library.pre_tokenizers.ByteLevel.alphabet())
  pieces = [
    byte_level.pre_tokenize_str(f'{space}{word}')[0][0]
    for word in vocabulary
    for space in (' ', '')
  ]
  texts = dict.fromkeys((*alphabet, *pieces))
  tokenizer = library.Tokenizer(
    library.models.BPE(
      vocab={text: i for i, text in enumerate(texts)},
      merges=[],
      ignore_merges=True,  # a piece that is a word is its id
    )
  )
  tokenizer.pre_tokenizer = library.pre_tokenizers.Sequence(
    [
      library.pre_tokenizers.Split(library.Regex(_PIECES), 'isolated'),
      byte_level,
    ]
  )
  tokenizer.decoder = library.decoders.ByteLevel()
  tokenizer.add_special_tokens(list(chat.SPECIALS))
  return tokenizer.to_str(pretty=True) + '\n'


def vocabulary() -> tuple[str, ...]:
  """Returns `words.vocabulary()` and every foreign key as one word."""
  keys = [
    words.foreign_key(noun, suffix)
    for suffix in words.SUFFIXES
    for noun in (*words.NOUNS, *words.OOD_NOUNS)
  ]
  return (*words.vocabulary(), *keys)
