"""A word-level tokenizer for the words of generated questions.

A word that generated databases, questions and actions are made of is one id,
with a space before it or without; digits are single; anything else goes byte
by byte, so that every text comes back as it was. A HuggingFace tokenizer.json:
whatever reads one reads this.
"""

from collections.abc import Sequence

from posttrain.chat import tokenizers as chat
from posttrain.envs.sql import words

# A word, digit or sign with at most one space before it; a name without one, so
# that it is the same in quotes; white space.
_PIECES = (
  r' ?[a-z]+(?:_[a-z]+)*| ?[A-Z]+(?![a-z])|[A-Z][a-z]*| ?[0-9]'
  r'| ?[^\sA-Za-z0-9]|\s'
)


def make(vocabulary: Sequence[str]) -> str:
  """Returns the tokenizer.json of some words.

  Args:
    vocabulary: words, digits and signs.
  """
  import tokenizers as library  # here, because environments do without

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
  made = library.Tokenizer(
    library.models.BPE(
      vocab={text: i for i, text in enumerate(texts)},
      merges=[],
      ignore_merges=True,  # a piece that is a word is its id
    )
  )
  made.pre_tokenizer = library.pre_tokenizers.Sequence(
    [
      library.pre_tokenizers.Split(library.Regex(_PIECES), 'isolated'),
      byte_level,
    ]
  )
  made.decoder = library.decoders.ByteLevel()
  made.add_special_tokens(list(chat.SPECIALS))
  return made.to_str(pretty=True) + '\n'


def vocabulary() -> tuple[str, ...]:
  """Returns the words of `words`, with foreign keys as one word each."""
  keys = [
    words.foreign_key(noun, suffix)
    for suffix in words.SUFFIXES
    for noun in (*words.NOUNS, *words.OOD_NOUNS)
  ]
  return (*words.vocabulary(), *keys)
