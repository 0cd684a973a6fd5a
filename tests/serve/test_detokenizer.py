"""Detokenizer: the text does not depend on the size of the pieces."""

import pytest

from posttrain.serve import detokenizer, stop_strings
from tests import fixtures

decode = fixtures.RENDERER.tokenizer.decode
EOS = fixtures.RENDERER.tokenizer.eos_id


def feed(text, size, stops=(), reason='max_tokens', end=()):
  """Appends the bytes of a text in pieces; returns (detokenizer, texts)."""
  ids = [*(text.encode() if isinstance(text, str) else text), *end]
  choice, pieces = (
    detokenizer.Detokenizer(decode, stop_strings.Strings(stops)),
    [],
  )
  for start in range(0, len(ids), size):
    if choice.finish:
      break
    some = ids[start : start + size]
    last = start + size >= len(ids)
    pieces.append(
      choice.append(some, [-1.0] * len(some), reason if last else None)
    )
  assert ''.join(pieces) == choice.text
  assert len(choice.logprobs) == len(choice.ids)
  return choice, pieces


@pytest.mark.parametrize('size', [1, 2, 3, 5, 100])
def test_multibyte_characters_are_not_split(size):
  text = 'né € 你好 🙂🙂!'
  choice, pieces = feed(text, size)
  assert (
    choice.text == text and choice.finish == 'length' and choice.stop is None
  )
  assert not any('\ufffd' in piece for piece in pieces)


def test_invalid_bytes_are_replaced_once_final():
  choice, pieces = feed([65, 0xE2, 0x82], 1)
  assert pieces == ['A', '', '\ufffd'] and choice.text == 'A\ufffd'
  choice, pieces = feed(
    [65, 0xFF, 66], 1
  )  # the next byte shows that 0xFF is invalid
  assert pieces == ['A', '', '\ufffdB']


@pytest.mark.parametrize('size', [1, 2, 3, 4, 7, 100])
def test_stop_string_ends_the_choice_at_the_completing_token(size):
  choice, pieces = feed('ab STO STOP cd STOP', size, ('STOP', 'zz'))
  assert choice.text == 'ab STO ' and choice.finish == 'stop'
  assert choice.stop == 'STOP' and bytes(choice.ids) == b'ab STO STOP'


@pytest.mark.parametrize('size', [1, 2, 9])
def test_first_completed_stop_string_wins(size):
  choice, _ = feed('xabcd', size, ('abcd', 'bc'))
  assert (choice.text, choice.stop, len(choice.ids)) == ('xa', 'bc', 4)


def test_possible_start_of_a_stop_string_is_held_back():
  choice, pieces = feed('aXYbXY', 1, ('XYZ',))
  assert pieces == ['a', '', '', 'XYb', '', 'XY']
  assert choice.finish == 'length'


@pytest.mark.parametrize(
  ('reason', 'finish'),
  [('eos', 'stop'), ('max_tokens', 'length'), ('overflow', 'length')],
)
def test_stop_reasons_map_to_finish_reasons(reason, finish):
  choice, _ = feed('ab', 1, reason=reason, end=[EOS])
  assert (choice.finish, choice.text, choice.ids[-1]) == (finish, 'ab', EOS)


def test_text_revised_by_the_decoder_is_sent_once():
  """Byte fallback decodes a run of bytes only if all of it is valid."""

  def fallback(ids):
    try:
      return bytes(ids).decode()
    except UnicodeDecodeError:
      return '\ufffd' * len(ids)

  choice = detokenizer.Detokenizer(fallback)
  pieces = [
    choice.append([byte], [0.0], 'eos' if i == 5 else None)
    for i, byte in enumerate('aé€'.encode())
  ]
  assert pieces == ['a', '', 'é', '', '', '€']
