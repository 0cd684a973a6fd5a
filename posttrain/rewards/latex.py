r"""Conversion of LaTeX around numbers to plain characters.

`\$1{,}234` -> `$1,234`; `2\frac{1}{2}` and `2½` -> `2 1/2`. Unknown commands
stay, with their backslash, so that the next reader can reject them.
"""

import re
import unicodedata

_THIN = '\u2009'  # stands for every space that may group digits

# Command -> plain text; any other command makes a box unreadable.
_COMMANDS = {
  **dict.fromkeys(
    (
      'text textbf textit textrm mathrm mathbf mbox left right displaystyle !'
    ).split(),
    '',
  ),
  **dict.fromkeys((',', ':', ';'), _THIN),
  **dict.fromkeys((' ', '\n', '\\', '(', ')', '[', ']', 'quad'), ' '),
  **dict.fromkeys(('frac', 'dfrac', 'tfrac', 'cfrac'), '\\frac'),
  **dict.fromkeys(('times', 'cdot'), '×'),
  **dict.fromkeys(('circ', 'degree'), '°'),
  **{sign: sign for sign in '$%_'},
  'pounds': '£',
  'euro': '€',
  '{': '(',
  '}': ')',
}
_CHARS = str.maketrans(
  {
    **dict.fromkeys('\u2212\u2013\u2012', '-'),  # minus, en and figure dash
    **dict.fromkeys('\xa0\u202f', _THIN),
    **dict.fromkeys('~\u200b', ' '),
  }
)
_VULGAR = {
  char: unicodedata.normalize('NFKC', char).replace('\u2044', '/')
  for char in '¼½¾' + ''.join(map(chr, range(0x2150, 0x215F)))
}

_COMMAND = re.compile(r'\\([A-Za-z]+|[^A-Za-z])')
_DEGREES = re.compile(r'\^ ?(?:\{°\}|°)')
_PART = r' ?(?:\{ ?(-?[0-9,]{1,99}) ?\}|([0-9]))'
_FRAC = re.compile(rf'([0-9][ {_THIN}]?)?\\frac{_PART}{_PART}')
_VULGARS = re.compile(rf'([0-9][ {_THIN}]?)?([{"".join(_VULGAR)}])')
_GROUPS = re.compile(
  rf'(?<![0-9.,{_THIN}])[1-9][0-9]{{0,2}}(?:{_THIN}[0-9]{{3}})++'
  rf'(?!{_THIN}?[0-9])'
)


def plain(text: str) -> str:
  """Returns a text with LaTeX around numbers as plain characters."""
  text = text.translate(_CHARS).replace('{,}', ',')
  text = _COMMAND.sub(lambda m: _COMMANDS.get(m[1], m[0]), text)
  text = _DEGREES.sub('°', text)
  # The brace separates the number from following digits.
  text = _FRAC.sub(
    lambda m: f'{_whole(m[1])}{m[2] or m[3]}/{m[4] or m[5]}}}', text
  )
  text = _VULGARS.sub(lambda m: f'{_whole(m[1])}{_VULGAR[m[2]]}}}', text)
  text = _GROUPS.sub(lambda m: m[0].replace(_THIN, ','), text)
  text = text.replace(_THIN, ' ')
  return text.replace('^{', '^').replace('_{', '_')


def _whole(digit: str | None) -> str:
  """Returns the last digit of a mixed number's whole part, and one space."""
  return f'{digit[0]} ' if digit else ''
