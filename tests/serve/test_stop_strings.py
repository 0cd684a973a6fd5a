"""Stop strings: any split of the text gives the first match."""

import random

import pytest

from posttrain.serve import detokenizer, stop_strings
from tests import fixtures

decode = fixtures.RENDERER.tokenizer.decode


def first_match(text, strings):
  """Returns (start, string) of the match that ends first, by brute force."""
  for end in range(len(text) + 1):
    found = [(end - len(x), x) for x in strings if text[:end].endswith(x)]
    if found:
      return min(found)
  return None


def search(pieces, strings):
  state, before = stop_strings.Search(stop_strings.Strings(strings)), 0
  for piece in pieces:
    match = state.feed(piece)
    if match is not None:
      return before + match.start, match.string
    before += len(piece)
  return None


@pytest.mark.parametrize('seed', range(30))
def test_characters_one_by_one_give_the_first_match(seed):
  rng = random.Random(seed)
  text = ''.join(rng.choices('ab', k=60))
  strings = [''.join(rng.choices('ab', k=rng.randint(1, 9))) for _ in range(3)]
  assert search(text, strings) == first_match(text, strings)


def test_a_piece_with_several_matches_gives_the_one_that_starts_first():
  assert search(['xabcd'], ['bc', 'abcd']) == (1, 'abcd')
  assert search(['aaaa'], ['aa']) == (0, 'aa')


def test_held_is_the_longest_possible_beginning():
  state = stop_strings.Search(stop_strings.Strings(['abab!', 'ba?']))
  held = []
  for character in 'xababab':
    assert state.feed(character) is None
    held.append(state.held)
  assert held == [0, 1, 2, 3, 4, 3, 4]


def decoded(ids, size, strings, reason='max_tokens'):
  """Returns (text, ids, stop) of a choice whose ids come in pieces."""
  choice = detokenizer.Detokenizer(decode, stop_strings.Strings(strings))
  for start in range(0, len(ids), size):
    if choice.finish is None:
      some = ids[start : start + size]
      last = start + size >= len(ids)
      choice.append(some, [0.0] * len(some), reason if last else None)
  return choice.text, choice.ids, choice.stop


@pytest.mark.parametrize('seed', range(20))
def test_any_bytes_in_any_pieces_give_the_text_of_all(seed):
  """Broken UTF-8 and special tokens included, with stop strings and without."""
  rng = random.Random(seed)
  alphabet = [*'ab€é🙂'.encode(), 0xFF, 0x80, 257, 260]
  ids = rng.choices(alphabet, k=120)
  for strings in ((), ('ba€',), ('aba', 'b\ufffda', '🙂')):
    expected = decoded(ids, len(ids), strings)
    if expected[2] is None:
      assert expected[0] == decode(ids)
    else:
      assert decode(expected[1]).rstrip('\ufffd').endswith(expected[2])
      assert expected[2] not in decode(expected[1][:-1]).rstrip('\ufffd')
    for size in (1, 2, 7):
      assert decoded(ids, size, strings) == expected


def test_work_per_token_does_not_grow_with_the_text():
  """Counts decoded tokens, of ordinary text and of endless broken UTF-8."""
  for byte in (97, 0xFF, 257):
    counts = []
    for size in (1000, 4000):
      count = 0

      def counting(ids):
        nonlocal count
        count += len(ids)
        return decode(ids)

      choice = detokenizer.Detokenizer(
        counting, stop_strings.Strings(['a' * 3000 + 'b'])
      )
      for i in range(size):
        choice.append([byte], [0.0], 'max_tokens' if i == size - 1 else None)
      counts.append(count / size)
    assert counts[1] < 12 and counts[1] < 1.5 * counts[0] + 1


def test_decoder_that_joins_words_is_decoded_with_context():
  """As sentencepiece: a space at the beginning of a text is dropped."""
  words = ['\u2581a', '\u2581b', 'c', '\u2581', '\u2581d']

  def joined(ids):
    text = ''.join(words[i] for i in ids).replace('\u2581', ' ')
    return text.removeprefix(' ')

  ids = [0, 1, 2, 3, 4, 1, 1, 2, 0] * 9
  choice = detokenizer.Detokenizer(joined, stop_strings.Strings(['zz']))
  pieces = [
    choice.append([x], [0.0], 'max_tokens' if i == len(ids) - 1 else None)
    for i, x in enumerate(ids)
  ]
  assert ''.join(pieces) == choice.text == joined(ids)
