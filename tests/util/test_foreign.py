"""Quoted values are short, printable, and show no secret."""

import base64
import html
import json
import urllib.parse

import pytest

from posttrain.util import foreign


@pytest.fixture(autouse=True)
def no_secrets(monkeypatch):
  """Forgets the secrets that other tests have registered."""
  monkeypatch.setattr(foreign, '_secrets', set())


class Bad:
  """A value whose `str` and `repr` raise."""

  def __init__(self, error):
    self._error = error

  def __str__(self):
    raise self._error

  __repr__ = __str__


class Nameless(type):
  """A metaclass whose `__name__` raises."""

  @property
  def __name__(cls):
    raise ValueError('no name')


class Hidden(Exception, metaclass=Nameless):
  """An exception of which nothing can be read."""

  @property
  def __traceback__(self):
    raise ValueError('no traceback')


def test_names_that_a_metaclass_hides_are_read():
  assert foreign.error(Hidden('x')) == 'Hidden: x'
  assert foreign.text(Bad(Hidden())) == '<Bad, whose str raises Hidden>'
  try:
    raise Hidden
  except Hidden as error:
    assert foreign.place(error).startswith('test_foreign.py:')
    assert 'test_foreign.py' in foreign.stack(error)
  assert foreign.kind(type('a\n\x1b' + 'b' * 99, (), {})()).startswith(
    'a \\x1bb'
  )


@pytest.mark.parametrize('error', [ValueError('x'), SystemExit(3)])
def test_a_value_whose_str_raises_is_named_by_its_type(error):
  kind = type(error).__name__
  assert foreign.text(Bad(error)) == f'<Bad, whose str raises {kind}>'
  assert foreign.quote([Bad(error)]) == f'<list, whose repr raises {kind}>'


def test_ctrl_c_in_a_str_is_not_swallowed():
  with pytest.raises(KeyboardInterrupt):
    foreign.text(Bad(KeyboardInterrupt()))


def test_short_texts_stay():
  assert foreign.text('no route to host') == 'no route to host'
  assert foreign.quote({'a': 1}) == "{'a': 1}"
  assert foreign.error(KeyError('a')) == "KeyError: 'a'"
  assert foreign.error(ValueError()) == 'ValueError'


def test_long_texts_are_cut():
  shown = foreign.text('x' * 50_000_000, 10)
  assert shown == 'xxxxxxxxxx... (49999990 more characters)'


def test_texts_are_one_printable_line():
  assert foreign.text('a\n\t b\x1b[31m\ud800\u202e') == (
    'a b\\x1b[31m\\ud800\\u202e'
  )


def test_numbers_of_too_many_digits_and_deep_values_are_named():
  assert foreign.text(10**5000) == '<int, whose str raises ValueError>'
  deep = []
  for _ in range(100_000):
    deep = [deep]
  assert foreign.quote(deep) == '<list, whose repr raises RecursionError>'


@pytest.mark.parametrize(
  ('shown', 'expected'),
  [
    ('key: Bearer abc.def', 'key: Bearer [masked]'),
    ('got sk-abcdefghijklmnop!', 'got [masked]!'),
    ('https://me:secret@host/v1', 'https://[masked]@host/v1'),
    ('a risk-averse-policy', 'a risk-averse-policy'),
  ],
)
def test_what_looks_like_a_secret_is_masked(shown, expected):
  assert foreign.text(shown) == expected


def test_registered_secrets_are_masked(monkeypatch):
  foreign.mask('p/ss word')
  assert foreign.text('got p/ss word') == 'got [masked]'
  assert foreign.text('/?key=p%2Fss%20word') == '/?key=[masked]'
  # A cut never shows a part of it.
  for limit in range(30):
    assert 'ss wor' not in foreign.text('01234 p/ss word' * 99, limit)[:limit]


KEY = 'p"a\\ss/w+\u00f6rd-1'
FORMS = (
  KEY,
  repr(KEY),
  json.dumps(KEY),
  json.dumps(json.dumps(KEY)),
  urllib.parse.quote(KEY),
  urllib.parse.quote_plus(KEY).lower(),
  html.escape(KEY),
  ''.join(f'\\u{ord(c):04X}' for c in KEY),
  ''.join(f'&#{ord(c)};' for c in KEY),
  KEY.replace('/', '\\/'),
  KEY.upper(),
)


@pytest.mark.parametrize('form', FORMS)
def test_escaped_secrets_are_masked(monkeypatch, form):
  monkeypatch.setattr(foreign, '_secrets', {KEY})
  assert foreign.text(f'x {form} y', 10_000).count(foreign.MASK) == 1
  assert 'rd-1' not in foreign.quote(f'x {form} y').lower()


def test_secrets_in_variables_of_the_process_are_masked(monkeypatch):
  monkeypatch.setenv('SANDBOX_API_KEY', 'open-sesame-1234')
  monkeypatch.setenv('MAX_TOKEN', '123456789012')  # a number
  monkeypatch.setenv('TLS_KEY', '/etc/tls/key.pem')  # a path
  shown = foreign.text('open-sesame-1234 123456789012 /etc/tls/key.pem')
  assert shown == '[masked] 123456789012 /etc/tls/key.pem'
  # Values that change are read again; others are not.
  monkeypatch.setenv('SANDBOX_API_KEY', 'open-sesame-5678')
  assert foreign.text('open-sesame-1234 open-sesame-5678') == (
    'open-sesame-1234 [masked]'
  )
  assert foreign._variables() is foreign._variables()
  monkeypatch.delenv('SANDBOX_API_KEY')
  assert foreign.text('open-sesame-5678') == 'open-sesame-5678'


def test_secrets_are_masked_across_lines_twice_escaped_and_in_base64(
  monkeypatch,
):
  secret = 'zq-Secret.Key+77/ab=='
  monkeypatch.setattr(foreign, '_secrets', {secret})
  quote = urllib.parse.quote
  for text in (
    f'{secret[:9]}\n{secret[9:]}',
    f'{secret[:3]}\u200b\x00{secret[3:]}',
    repr(f'{secret[:9]}\n{secret[9:]}'),
    quote(quote(quote(secret))),
    *(
      encode(f'{"x" * shift}{secret} end'.encode()).decode()
      for shift in range(4)
      for encode in (base64.b64encode, base64.urlsafe_b64encode)
    ),
  ):
    shown = foreign.text(f'got {text}')
    assert foreign.MASK in shown and secret[10:] not in shown, shown
    assert 'Secret' not in shown and 'NlY3JldC' not in shown


@pytest.mark.parametrize(
  'name', ['PGPASSWORD', 'APIKEY', 'GITHUBTOKEN', 'my_secret']
)
def test_variables_with_secrets_need_no_underscore(name, monkeypatch):
  monkeypatch.setenv(name, 'opaque-value-1')
  assert foreign.text('got opaque-value-1') == f'got {foreign.MASK}'


def test_a_cut_states_how_many_characters_are_missing():
  shown = foreign.text('\x00' * 200, 100)
  assert shown == r'\x00' * 25 + '... (175 more characters)'
  shown = foreign.text('ab' * 10_000, 10)
  assert shown == 'ababababab... (19990 more characters)'


def test_the_place_of_an_error_is_in_the_users_file():
  try:
    json.loads('')  # raised in Python's library
  except ValueError as error:
    assert foreign.place(error).startswith('test_foreign.py:')
