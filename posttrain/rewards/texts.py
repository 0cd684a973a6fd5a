"""Measures of a text that need no task, and the similarity of two texts.

`grade` returns the values by name; each is in [0, 1], and a text that has
nothing to measure has none:

  repetition         share of 4-grams of words that occurred before
  broken_characters  share of characters that no reader can read
  refusal            whether it begins with a phrase of refusal, in English
  code_syntax        share of the fenced blocks of code that parse

All are pure functions of one text, of any length and content: their time is
linear in it, and they never raise. None of them says whether a text is good.
"""

import re
from collections.abc import Hashable, Sequence

from posttrain.rewards import code

NGRAM = 4  # words
BEGINNING = 200  # characters in which a refusal must begin

_UNIT = re.compile(r'\w+|[^\w\s]')
# U+FFFD, control characters that are no ASCII white space, lone surrogates.
_BROKEN = re.compile('[\x00-\x08\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffd]')

# Phrases of refusals, in small letters, `I'm` as `i am`, without white space
# beyond single spaces. A phrase of INABILITY is followed by one of ACTIONS.
INABILITY = (
  'i cannot',
  "i can't",
  'i can not',
  "i won't",
  'i will not',
  'i am unable to',
  'i am not able to',
  'i am not allowed to',
  'i am not going to',
)
ACTIONS = (
  'answer',
  'assist',
  'complete',
  'comply',
  'create',
  'discuss',
  'do that',
  'do this',
  'engage',
  'fulfill',
  'generate',
  'give',
  'help',
  'offer',
  'produce',
  'provide',
  'respond',
  'share',
  'support',
  'write',
)
REFUSALS = (
  'as a language model',
  'as an ai',
  'i am not comfortable',
  'i decline to',
  'i do not feel comfortable',
  "i don't feel comfortable",
  'i have to decline',
  'i must decline',
  'i must refuse',
)


def _any(phrases: tuple[str, ...]) -> str:
  return f'(?:{"|".join(map(re.escape, phrases))})'


_REFUSAL = re.compile(
  rf'\b(?:{_any(INABILITY)} {_any(ACTIONS)}\b(?! but\b)|{_any(REFUSALS)}\b)'
)


def repetition(text: str) -> float:
  """Returns the share of a text's 4-grams that occurred in it before.

      1 - distinct 4-grams / 4-grams

  the measure seq-rep-4, over words, and signs one by one, where the paper has
  tokens of a vocabulary: so the values of two tokenizers can be compared. An
  answer that falls into a loop approaches 1. A text of fewer than two 4-grams
  gives 0. A word is a run of letters, digits and underscores: a loop within one
  word, or in a script without spaces, is not seen.

  References:
    Welleck et al., Neural Text Generation with Unlikelihood Training,
    arXiv 1908.04319.
  """
  units = _UNIT.findall(text)
  ngrams = list(zip(*(units[i:] for i in range(NGRAM)), strict=False))
  return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def broken_characters(text: str) -> float:
  """Returns the share of a text's characters that cannot be read.

  U+FFFD, which stands for bytes that are no UTF-8; control characters other
  than tab, line feed, vertical tab, form feed and carriage return; surrogates,
  which are alone in a string of Python. An empty text gives 0. An answer that
  its token budget cuts within a character ends in one U+FFFD.
  """
  return len(_BROKEN.findall(text)) / len(text) if text else 0.0


def refusal(text: str) -> float:
  """Returns 1 if a text begins as a refusal in English does, else 0.

  That is, one of `REFUSALS`, or of `INABILITY` with one of `ACTIONS`, begins in
  the first 200 characters, counted with single spaces. A short list of plain
  phrases, as is usual: it misses refusals in other words and in all other
  languages, and counts quotations.

  References:
    Zou et al., Universal and Transferable Adversarial Attacks on Aligned
    Language Models, arXiv 2307.15043, whose list of prefixes also has
    apologies.
  """
  # A phrase that begins in time may end later; white space may be long.
  start = ' '.join(text.lstrip()[: 8 * BEGINNING].split()).casefold()
  start = start.replace('\N{RIGHT SINGLE QUOTATION MARK}', "'")
  start = re.sub(r"\bi'm\b", 'i am', start)
  match = _REFUSAL.search(start)
  return float(match is not None and match.start() < BEGINNING)


GRADERS = {
  'repetition': repetition,
  'broken_characters': broken_characters,
  'refusal': refusal,
  'code_syntax': code.syntax,
}


def grade(text: str) -> dict[str, float]:
  """Returns {grader: value}; no entry where it has nothing to measure."""
  values = {name: grader(text) for name, grader in GRADERS.items()}
  return {name: value for name, value in values.items() if value is not None}


def lcs(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
  """Returns the length of the longest common subsequence.

  It need not be contiguous: 'abcde' and 'xaye' share 'ae'. One big integer
  holds a row of the dynamic program, with a 0 bit where the row increases.

  References:
    Hyyro, "Bit-Parallel LCS-length Computation Revisited", AWOCA 2004.
  """
  places: dict[Hashable, int] = {}
  for i, item in enumerate(a):
    places[item] = places.get(item, 0) | 1 << i
  full = row = (1 << len(a)) - 1
  for item in b:
    matches = row & places.get(item, 0)
    row = (row + matches | row - matches) & full
  return len(a) - row.bit_count()


def ratio(a: Sequence[Hashable], b: Sequence[Hashable]) -> float:
  """Returns 2 lcs(a, b) / (len(a) + len(b)): 1 = equal, 0 = nothing shared.

  Two empty sequences are equal.
  """
  size = len(a) + len(b)
  return 2 * lcs(a, b) / size if size else 1.0
