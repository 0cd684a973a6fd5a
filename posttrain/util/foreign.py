"""Values from outside, quoted in messages and logs: short, printable, masked.

Rewards, environments, servers, templates and files come from users or from
elsewhere: their texts may have megabytes, control characters or an API key, and
their `str` may raise. Every message that quotes one of them quotes it through
this module:

  1. `str` or `repr` of the value; if that raises, its type and the error's;
  2. secrets are masked: texts that `mask` has registered, the values of the
     process's variables whose name ends with KEY, TOKEN, SECRET or PASSWORD,
     and forms such as `Bearer ...`, `sk-...` and passwords of addresses. Known
     secrets are found in any case, in base64, and where characters are
     escaped, as in JSON, Python, HTML or an address, or lines are broken;
  3. white space becomes one space; characters that cannot be printed are
     escaped;
  4. a long text is cut, with the number of characters that are left out.
"""

import base64
import functools
import html
import os
import re
import sysconfig
import threading
import traceback
from typing import Any

LIMIT = 300  # characters of a quoted value
MASK = '[masked]'

# Folders of Python's library and of packages; frozen modules have no file.
_INSTALLED = (
  '<frozen ',
  *(sysconfig.get_path(x) for x in ('stdlib', 'purelib', 'platlib')),
)
_secrets: set[str] = set()
# The variables of the process, and the secrets among them.
_known: tuple[dict[Any, Any], frozenset[str]] = {}, frozenset()
_LEAST_SECRET = 4  # characters; shorter ones would mask ordinary words
_LEAST_BASE64 = 8  # characters
_URL_SAFE = str.maketrans('+/', '-_')
_LONGEST_ESCAPE = 16  # characters that one character of a secret may take
# Between the characters of a secret: line breaks, and what is not shown.
_BREAK = r'(?:[\s\x00-\x1f\x7f-\x9f\u200b-\u200f\u2060\ufeff]|\\[nrt]){0,4}+'
# Variables of the process with a secret, and the values that are one.
_VARIABLE = re.compile(r'(?:KEY|TOKEN|SECRET|PASSWORD)$', re.IGNORECASE)
_VALUE = re.compile(r'(?!/)(?=.*[^\d.])\S{12,4096}')
_LOOKS_SECRET = re.compile(
  r"(?<=bearer )[^\s\"',;]+"
  r'|\b(?:sk|hf|ghp|xox[abp])[-_][A-Za-z0-9_-]{12,}'
  r'|(?<=://)[^\s/@:]*:[^\s/@]+(?=@)',
  re.IGNORECASE,
)


def mask(secret: str) -> None:
  """Registers a secret, such as an API key; quoted texts no longer show it."""
  if len(secret) >= _LEAST_SECRET:
    _secrets.add(secret)


def text(value: object, limit: int = LIMIT) -> str:
  """Returns `str(value)` as a part of a one-line message.

  Args:
    value: any object; its `str` may raise.
    limit: the most characters, without the note about those left out.
  """
  return _quote(str, value, limit)


def quote(value: object, limit: int = LIMIT) -> str:
  """Returns `repr(value)` as a part of a one-line message; see `text`."""
  return _quote(repr, value, limit)


def kind(value: object) -> str:
  """Returns the name of a value's type; see `text`."""
  try:  # a metaclass may define another `__name__`
    name = type.__dict__['__name__'].__get__(type(value))
  except Exception:
    name = 'object'
  return text(str.__str__(name), 80)


def error(value: BaseException, limit: int = LIMIT) -> str:
  """Returns 'Type: message' of an exception; see `text`."""
  name, message = kind(value), text(value, limit)
  return f'{name}: {message}' if message else name


def place(value: BaseException) -> str:
  """Returns 'file.py:12', where an exception was raised; '' if unknown.

  The last place outside of Python's library and of installed packages, if there
  is one: that is where a user looks.
  """
  frames = _frames(value, 30)
  if not frames:
    return ''
  own = [x for x in frames if not x.filename.startswith(_INSTALLED)]
  frame = (own or frames)[-1]
  return f'{text(os.path.basename(frame.filename), 80)}:{frame.lineno}'


def stack(value: BaseException, limit: int = 12) -> str:
  """Returns the last frames of an exception, a line each; for a log."""
  frames = _frames(value, limit)
  return '\n'.join(
    f'  {text(frame.filename)}:{frame.lineno} in {text(frame.name, 80)}: '
    f'{text(frame.line or "", 120)}'
    for frame in frames
  )


def _frames(value: BaseException, limit: int) -> list[traceback.FrameSummary]:
  """Returns the last frames of an exception; none if its module hides them."""
  try:  # a class may define another `__traceback__`, a module its own source
    trace = BaseException.__dict__['__traceback__'].__get__(value)
    return traceback.extract_tb(trace, limit=-limit)
  except Exception:
    return []


def _quote(convert, value: object, limit: int) -> str:
  try:
    # A `str` may return an instance of its own subclass of str.
    whole = str.__str__(convert(value))
  except BaseException as failure:
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and isinstance(failure, KeyboardInterrupt):
      raise  # Ctrl-C; other threads do not get it
    return f'<{kind(value)}, whose {convert.__name__} raises {kind(failure)}>'
  secrets = {*_secrets, *_variables()}
  longest = max(map(len, secrets), default=0) * _LONGEST_ESCAPE
  # A secret may begin within the limit and end after it.
  window = whole[: limit + longest + 256]
  masked = _masked(window, secrets)
  left_out = len(whole) - len(window)
  if left_out:
    kept = masked[: max(len(masked) - longest, 0)]
    left_out += len(masked) - len(kept)
    masked = kept
  return _fit(' '.join(masked.split()), limit, left_out)


def _fit(value: str, limit: int, left_out: int) -> str:
  """Escapes a text, cuts it, and adds the number of characters left out."""
  if not left_out and len(value) <= limit and value.isprintable():
    return value
  shown, length = [], 0
  for character in value:
    piece = character if character.isprintable() else _escape(character)
    length += len(piece)
    if length > limit:
      break
    shown.append(piece)
  left_out += len(value) - len(shown)
  note = f'... ({left_out} more characters)' if left_out else ''
  return ''.join(shown) + note


def _masked(shown: str, secrets: set[str]) -> str:
  for secret in sorted(secrets, key=len, reverse=True):
    shown = _pattern(secret).sub(MASK, shown.replace(secret, MASK))
    for part in _base64(secret):
      shown = shown.replace(part, MASK)
  return _LOOKS_SECRET.sub(MASK, shown)


def _variables() -> frozenset[str]:
  """Returns the secrets among the variables of the process."""
  global _known
  # `os.environ` decodes every value that is read; the bytes behind it, which
  # other interpreters may not have, are compared a hundred times faster.
  values = getattr(os.environ, '_data', os.environ)
  if _known[0] != values:
    copied = dict(values)
    _known = (
      copied,
      frozenset(
        value
        for name, value in os.environ.items()
        if _VARIABLE.search(name) and _VALUE.fullmatch(value)
      ),
    )
  return _known[1]


@functools.lru_cache(maxsize=256)
def _pattern(secret: str) -> re.Pattern[str]:
  """Returns the pattern of a secret, each character as it is or escaped."""
  units = re.findall(r'\\+|[^\\]', secret)
  between = '' if re.search(r'[\s\\]', secret) else _BREAK
  return re.compile(between.join(map(_any_form, units)), re.IGNORECASE)


@functools.lru_cache(maxsize=256)
def _base64(secret: str) -> tuple[str, ...]:
  """Returns what all base64 texts with the secret in them have in common.

  It may begin at each of the three bytes of a group of four characters; the
  characters at its ends depend on its neighbours.
  """
  data = secret.encode(errors='surrogatepass')
  parts = []
  for shift in range(3):
    encoded = base64.b64encode(bytes(shift) + data).decode()
    part = encoded[(8 * shift + 5) // 6 : 8 * (shift + len(data)) // 6]
    parts += [part, part.translate(_URL_SAFE)]
  return tuple(part for part in parts if len(part) >= _LEAST_BASE64)


def _any_form(unit: str) -> str:
  """Returns the pattern of a character, or of several backslashes.

  It is atomic and so takes linear time: an escape is not tried again as the
  characters that it has.
  """
  character = unit[0]
  code = ord(character)
  forms = (
    rf'\\{{1,8}}+(?:u{code:04x}|x{code:02x})',
    ''.join(
      f'%(?:25)*{byte:02x}' for byte in character.encode(errors='surrogatepass')
    ),
    rf'&#0{{0,8}}{code};|&#x0{{0,8}}{code:x};',
    *([html.escape(character)] if character in '<>&"\'' else []),
    # A backslash may be escaped, and itself escape, once or more often.
    r'\\(?!u[0-9a-f]{4}|x[0-9a-f]{2})'
    if character == '\\'
    else rf'\\{{0,8}}+{re.escape(character)}',
  )
  return f'(?>{"|".join(forms)})' + ('++' if character == '\\' else '')


def _escape(character: str) -> str:
  return character.encode('unicode_escape').decode('ascii')
