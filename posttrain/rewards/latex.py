r"""LaTeX that numbers are dressed in, and the characters that stand for it.

`\$1{,}234` -> `$1,234`; `2\frac{1}{2}` and `2½` -> `2 1/2`. What is not known
stays, backslash and all, so that who reads on can see it.
"""

import re
import unicodedata

_THIN = '\u2009'  # stands for whatever space may group digits

# What LaTeX's commands come to; one that is not here makes a box unreadable.
_COMMANDS = {
  **dict.fromkeys(
    (
      'text',
      'textbf',
      'textit',
      'textrm',
      'mathrm',
      'mathbf',
      'mbox',
      'left',
      'right',
      'displaystyle',
      '!',
    ),
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
  """Returns a text without the LaTeX that numbers are dressed in."""
  text = text.translate(_CHARS).replace('{,}', ',')
  text = _COMMAND.sub(lambda found: _COMMANDS.get(found[1], found[0]), text)
  text = _DEGREES.sub('°', text)
  # The brace keeps what follows from joining on.
  text = _FRAC.sub(
    lambda m: f'{_whole(m[1])}{m[2] or m[3]}/{m[4] or m[5]}}}', text
  )
  text = _VULGARS.sub(lambda m: f'{_whole(m[1])}{_VULGAR[m[2]]}}}', text)
  text = _GROUPS.sub(lambda found: found[0].replace(_THIN, ','), text)
  text = text.replace(_THIN, ' ')
  return text.replace('^{', '^').replace('_{', '_')


def _whole(digit: str | None) -> str:
  """Returns the last digit of a mixed number's whole, and one space."""
  return f'{digit[0]} ' if digit else ''
