"""Tokens to text: whatever the pieces, the text is the same."""

import pytest

from posttrain.serve import speech
from tests import fixtures

decode = fixtures.RENDERER.tokenizer.decode
EOS = fixtures.RENDERER.tokenizer.eos_id


def say(text, size, stops=(), reason='max_tokens', end=()):
  """Says the bytes of a text, so many at a time; (speech, pieces)."""
  ids = [*(text.encode() if isinstance(text, str) else text), *end]
  one, pieces = speech.Speech(decode, stops), []
  for at in range(0, len(ids), size):
    if one.finish:
      break
    some = ids[at : at + size]
    last = at + size >= len(ids)
    pieces.append(one.hear(some, [-1.0] * len(some), reason if last else None))
  assert ''.join(pieces) == one.text
  assert len(one.logprobs) == len(one.ids)
  return one, pieces


@pytest.mark.parametrize('size', [1, 2, 3, 5, 100])
def test_characters_come_whole(size):
  text = 'né € 你好 🙂🙂!'
  one, pieces = say(text, size)
  assert one.text == text and one.finish == 'length' and one.stop is None
  assert not any('\ufffd' in piece for piece in pieces)


def test_bytes_that_are_no_character_come_in_the_end():
  one, pieces = say([65, 0xE2, 0x82], 1)
  assert pieces == ['A', '', '\ufffd'] and one.text == 'A\ufffd'
  one, pieces = say([65, 0xFF, 66], 1)  # seen to be broken by what follows
  assert pieces == ['A', '', '\ufffdB']


@pytest.mark.parametrize('size', [1, 2, 3, 4, 7, 100])
def test_a_stop_string_ends_it_with_the_token_that_completes_it(size):
  one, pieces = say('ab STO STOP cd STOP', size, ('STOP', 'zz'))
  assert one.text == 'ab STO ' and one.finish == 'stop' == one.finish
  assert one.stop == 'STOP' and bytes(one.ids) == b'ab STO STOP'


@pytest.mark.parametrize('size', [1, 2, 9])
def test_of_several_the_one_that_is_complete_first(size):
  one, _ = say('xabcd', size, ('abcd', 'bc'))
  assert (one.text, one.stop, len(one.ids)) == ('xa', 'bc', 4)


def test_what_may_begin_a_stop_string_is_held_back_and_let_go():
  one, pieces = say('aXYbXY', 1, ('XYZ',))
  assert pieces == ['a', '', '', 'XYb', '', 'XY']
  assert one.finish == 'length'


@pytest.mark.parametrize(
  ('reason', 'finish'),
  [('eos', 'stop'), ('max_tokens', 'length'), ('overflow', 'length')],
)
def test_reasons(reason, finish):
  one, _ = say('ab', 1, reason=reason, end=[EOS])
  assert (one.finish, one.text, one.ids[-1]) == (finish, 'ab', EOS)


def test_a_decoder_that_takes_back_says_nothing_twice():
  """As byte fallback does: a run of bytes is text only when all of it is."""

  def fallback(ids):
    try:
      return bytes(ids).decode()
    except UnicodeDecodeError:
      return '\ufffd' * len(ids)

  one = speech.Speech(fallback)
  pieces = [
    one.hear([byte], [0.0], 'eos' if i == 5 else None)
    for i, byte in enumerate('aé€'.encode())
  ]
  assert pieces == ['a', '', 'é', '', '', '€']
