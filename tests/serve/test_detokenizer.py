"""Detokenizer: the text does not depend on the size of the pieces."""

import random

import pytest

from posttrain.serve import call
from tests import fixtures

decode = fixtures.RENDERER.tokenizer.decode


def feed(text, size, stops=(), decode=decode):
  """Appends the bytes of a text in pieces; returns (detokenizer, texts)."""
  ids = [*(text.encode() if isinstance(text, str) else text)]
  choice, pieces = call.Detokenizer(decode, stops), []
  for start in range(0, len(ids), size):
    if choice.finish:
      break
    some = ids[start : start + size]
    reason = 'max_tokens' if start + size >= len(ids) else None
    pieces.append(choice.append(some, [-1.0] * len(some), reason))
  assert ''.join(pieces) == choice.text
  assert len(choice.logprobs) == len(choice.ids)
  return choice, pieces


@pytest.mark.parametrize(
  ('ids', 'stops', 'expected'),
  [
    # The next byte shows that 0xFF is invalid.
    ([65, 0xFF, 66], (), ['A', '', '\ufffdB']),
    ('aXYbXY', ('XYZ',), ['a', '', '', 'XYb', '', 'XY']),
  ],
)
def test_text_that_may_change_is_held_back(ids, stops, expected):
  choice, pieces = feed(ids, 1, stops)
  assert pieces == expected and choice.finish == 'length'


@pytest.mark.parametrize('size', [1, 3, 100])
@pytest.mark.parametrize(
  ('text', 'stops', 'expected'),
  [
    ('ab STO STOP cd STOP', ('STOP', 'zz'), ('ab STO ', 'STOP', 11)),
    ('xabcd', ('abcd', 'bc'), ('xa', 'bc', 4)),  # it is complete first
  ],
)
def test_stop_string_ends_the_choice_at_the_completing_token(
  size, text, stops, expected
):
  choice, _ = feed(text, size, stops)
  assert (choice.text, choice.stop, len(choice.ids)) == expected
  assert choice.finish == 'stop'


@pytest.mark.parametrize('seed', range(10))
def test_any_bytes_in_any_pieces_give_the_text_of_all(seed):
  """Broken UTF-8 and special tokens included, with stop strings and without."""
  rng = random.Random(seed)
  alphabet = [*'ab€é🙂'.encode(), 0xFF, 0x80, 257, 260]
  ids = rng.choices(alphabet, k=120)
  for stops in ((), ('ba€',), ('aba', 'b\ufffda', '🙂')):
    expected, _ = feed(ids, len(ids), stops)
    if expected.stop is None:
      assert expected.text == decode(ids)
    else:
      assert decode(expected.ids).rstrip('\ufffd').endswith(expected.stop)
    for size in (1, 2, 7):
      choice, _ = feed(ids, size, stops)
      assert (choice.text, choice.ids) == (expected.text, expected.ids)


def test_decoder_that_joins_words_is_decoded_with_context():
  """As sentencepiece: a space at the beginning of a text is dropped."""
  words = [' a', ' b', 'c', ' ']

  def joined(ids):
    return ''.join(words[i] for i in ids).removeprefix(' ')

  ids = [0, 1, 2, 3, 1, 2, 0] * 9
  assert feed(ids, 1, ('zz',), decode=joined)[0].text == joined(ids)
