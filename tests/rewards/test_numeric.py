r"""The number that a text ends on: forms, places, what must not be one."""

import fractions
import json
import os
import pathlib
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.rewards import numeric

DATA = os.environ.get('POSTTRAIN_DATA')
needs_data = pytest.mark.skipif(
  DATA is None, reason='POSTTRAIN_DATA (folder of real files) is unset'
)
F = fractions.Fraction


@pytest.mark.parametrize(
  'text, value',
  [
    ('7', 7),
    ('\u22127', -7),
    ('- 7', -7),
    ('-.5', F(-1, 2)),
    ('1,234,567', 1234567),
    ('$18', 18),
    ('$5$', 5),
    ('50%', 50),
    ('3/4', F(3, 4)),
    ('1 1/2', F(3, 2)),
    ('2½', F(5, 2)),
    ('1e3', 1000),
    ('2.5 x 10^3', 2500),
    ('25 cm^2', 25),
    ('x = 5', 5),
    ('**5**', 5),
    ('US$5', 5),
    ('总共42个', 42),
    ('5 \ud800\0', 5),
  ],
)
def test_numbers(text, value):
  assert numeric.parse(text) == value
  assert numeric.final_answer(f'\\boxed{{{text}}}') == value
  # A line `#### Answer: 5` is a heading.
  marked = 8 if text[0].isalpha() else value
  assert numeric.final_answer(f'4 and 2 are\n#### {text}\n8') == marked


@pytest.mark.parametrize(
  'text, value',
  [
    (r'\$1{,}234', 1234),
    (r'1\,234', 1234),
    ('1\u202f234\xa0567', 1234567),
    (r'\text{Total: }\mathbf{42}\text{ kg}', 42),
    (r'50\%', 50),
    (r'90^{\circ}\text{C}', 90),
    (r'\frac{3}{4}', F(3, 4)),
    (r'2\frac{1}{2}', F(5, 2)),
    (r'2.5 \times 10^{3}', 2500),
  ],
)
def test_latex(text, value):
  assert numeric.parse(text) == value
  assert numeric.final_answer(f'Thus ${text}$.') == value
  assert numeric.boxed(f'3 \\boxed{{{text}}} 4') == value


@pytest.mark.parametrize(
  'text',
  [
    '',
    'five',
    '1.2.3',
    '5/0',
    '2024-01-05',
    '3 5/2',
    '5!',
    '2^3',
    '0x1F',
    r'\sqrt{5}',
    r'\pm 5',
    'H2O',
    '٣',
    '5²',
    '1e9999',
    '9' * 65,
    '5' + ' ' * 1000,
    '1' * 5000 + '/' + '1' * 5000,
  ],
)
def test_text_without_exactly_one_number_has_no_answer(text):
  """Earlier boxes, marks and numbers do not count either."""
  assert numeric.parse(text) is None
  assert numeric.final_answer(f'\\boxed{{1}} is 2 \\boxed{{{text}}}') is None
  assert numeric.boxed(f'\\boxed{{1}} is 2 \\boxed{{{text}}}') is None


@pytest.mark.parametrize(
  'text, value',
  [
    # Signs: in words, and en and figure dashes, but not those of ranges.
    ('negative 5', -5),
    ('it is minus 5', -5),
    (r'\text{negative } \frac{3}{4}', F(-3, 4)),
    ('\u20135', -5),
    ('\u20145', 5),
    # Scales,
    ('5 hundred', 500),
    ('2 dozen', 24),
    ('5 hundred thousand', 500_000),
    ('5k million', 5 * 10**9),
    (r'\$5\text{ billion}', 5 * 10**9),
    ('5 million-dollar', None),
    # and what is none;
    ('5km', 5),
    ('5m^2', 5),
    ('$5 per dozen', 5),
    ('million dollar question: 5', 5),
    # words that change nothing.
    ('about 5', 5),
    ('half the price: 5', 5),
  ],
)
def test_words_that_change_the_value(text, value):
  assert numeric.parse(text) == value
  assert numeric.boxed(f'3 \\boxed{{{text}}} 4') == value


@pytest.mark.parametrize(
  'text',
  [
    # Scales that cannot be read,
    '5m',
    '5 thousand 300',
    '5 hundred-dollar bills',
    '5 million million million million',
    '5 hundredths',
    '5k-10k',
    # numerals of other notations,
    '5_000',
    # signs of no number, or too many,
    '10 minus 5',
    'negative -5',
    '3\u20135',
    # and words that operate.
    '5 squared',
    'half of 5',
    'at least 5',
    'less than or equal to 5',
    'two times 5',
    'square root of 5',
  ],
)
def test_words_that_make_a_number_unreadable(text):
  assert numeric.parse(text) is None
  assert numeric.boxed(f'\\boxed{{1}} is 2 \\boxed{{{text}}}') is None


@pytest.mark.parametrize(
  'text, value',
  [
    # A sign in words is no heading.
    ('#### minus 5\n8', -5),
    ('#### Minus points\n8', 8),
    ('#### 5 squared\n8', None),
    ('#### 2 dozen', 24),
    # The last result: signs and scales, but a dozen is a unit,
    ('They sold 5 million.', 5 * 10**6),
    ('it is minus 5', -5),
    ('3 \u20135', -5),
    # no sign is what something is taken from,
    ('10 minus 5', 5),
    # what cannot be read is the last one, too,
    ('3 is 5_000', None),
    # and other words leave it.
  ],
)
def test_words_outside_of_boxes(text, value):
  assert numeric.final_answer(text) == value


@pytest.mark.parametrize(
  'text, value',
  [
    # The last box, whatever stands around it,
    (r'\boxed{1} then \boxed{2}', 2),
    (r'\boxed{\boxed{5}}', 5),
    (r'\boxed{1} \boxed{13', None),
    (r'\boxed{5\}', None),
    # which the bare word is not;
    (r'\boxed{5}, i.e. the \boxed answer', 5),
    # then the last mark of GSM8K.
    ('#### 1\n#### 2', 2),
    ('#### $1,000\n7', 1000),
    ('#### 1. First\nso 7', None),
    ('#### 5\n#### **Step 3**\nso 7', 5),
  ],
)
def test_boxes_and_marks(text, value):
  assert numeric.final_answer(text) == value
  assert numeric.final_answer(text, lenient=False) == value


@pytest.mark.parametrize(
  'text, value',
  [
    # Headings are no marks, words are no boxes.
    ('#### Step 3\nso 7', 7),
    (r'\boxed 6', 6),
    ('He has 3 of 4.', 4),
    ('10 - 3', 3),
    ('on 2024-01-05', 5),
    ('1,2,3', 3),
    ('3 from 1:00 to 5:00 PM', 3),
    ('3 * 4 = 12.', 12),
    ('4 ٣', 4),
    (r'$\frac{3}{4}$ of it', F(3, 4)),
    # What cannot be read is the last one, too.
    ('3 = 2^5', None),
    ('', None),
    ('5' + ' x' * 5000, None),
    ('1,' * 20_000, None),
  ],
)
def test_the_last_number(text, value):
  assert numeric.final_answer(text) == value
  assert numeric.final_answer(text, lenient=False) is None


@pytest.mark.parametrize(
  'text, value',
  [
    ('so it is 5', None),
    ('#### 5', None),
    ('#### 5\nmore', 5),
    (r'is \boxed{5}', 5),
    (r'is \boxed{5} and 6', 5),
    (r'is \boxed{5', None),
  ],
)
def test_a_truncated_text(text, value):
  assert numeric.final_answer(text, truncated=True) == value


def test_calculator_marks_are_removed_first():
  text = 'She sold 48/2 = <<48/2=24>>24 clips <<7>>'
  assert numeric.without_marks(text) == 'She sold 48/2 = 24 clips '
  assert numeric.final_answer(text) == 24
  assert numeric.final_answer(r'\boxed{<<1+1=2>>2}') == 2
  assert numeric.final_answer('5 <<3\n4') == 4  # not closed in its line


def test_equal_is_exact():
  assert numeric.equal(numeric.parse('0.10'), numeric.parse('.1'))
  assert numeric.equal(numeric.parse('18.00'), numeric.parse('18'))
  assert not numeric.equal(numeric.parse('0.3333'), numeric.parse('1/3'))
  near = numeric.parse('1.' + '0' * 60 + '1')
  assert not numeric.equal(near, numeric.parse('1'))
  assert not numeric.equal(None, None) and not numeric.equal(None, F(0))


@pytest.mark.parametrize(
  'piece',
  [
    '1,',
    '<<a',
    r'\boxed{',
    r'\frac{1}',
    '1\u2009234',
    '+-',
    ' ',
    '^{',
    '5 hundred and ',
    'is minus ',
    '5k',
  ],
)
@pytest.mark.parametrize('head', ['', r'\boxed{', '#### ', '1'])
def test_no_text_is_slow(piece, head):
  """Texts of 256 KiB; quadratic patterns would take minutes."""
  text = head + piece * (250_000 // len(piece))
  start = time.process_time()
  for read in (numeric.final_answer, numeric.boxed, numeric.parse):
    read(text)
  assert time.process_time() - start < 10


# --- a known number among distractors ---------------------------------------

WORDS = st.sampled_from(
  [
    'so',
    'she has',
    'that makes',
    '–',
    '—',
    '答案是 ',
    '\u200b',
    'H2O',
    'cm^2',
    'x_{1}',
    'at 5:30',
    '٣٤',
    '{',
    '}',
    '\\',
    '\\text{ each}',
    '$',
    '#',
    '**',
    '\n',
    '\ud83d',
    '-hearted',
    'x',
    '10:2',
    '\0',
  ]
)
NUMBERS = st.sampled_from(
  [
    '12',
    '-3',
    '5-3',
    '1,234',
    '3/4',
    '2024-01-05',
    '$7.25',
    '1.2.3',
    '<<3*4=12>>12',
    '2^5',
    '1e3',
    '2 1/2',
    '1,2,3',
    '½',
    '7²',
  ]
)
GAPS = st.sampled_from([' ', '  ', '\n', ' \n ', '\t'])


def joined(parts, **sizes):
  pairs = st.lists(st.tuples(parts, GAPS), **sizes)
  return pairs.map(lambda found: ''.join(a + b for a, b in found))


SCALES = {
  ' hundred': 100,
  ' millions': 10**6,
  '-million': 10**6,
  '\ntrillion': 10**12,
  'k': 1000,
  ' hundred thousand': 10**5,
  r'\text{ million}': 10**6,
  ' dozen': 12,
}
MINUSES = ('-', '\u2212', '\u2013', '\u2012', 'negative ', 'Minus ')


@st.composite
def known(draw):
  """(a number as somebody may write it, its value)."""
  digits, places = draw(st.integers(0, 10**9)), draw(st.integers(0, 3))
  whole, rest = divmod(digits, 10**places)
  text = draw(st.sampled_from([f'{whole:,}', str(whole)]))
  text += f'.{rest:0{places}}' if places else draw(st.sampled_from(['', '.0']))
  sign = draw(st.sampled_from(['', '', '', '+', *MINUSES]))
  coin = draw(st.sampled_from(['', '', '$', '£', '€']))
  order = [sign + coin] + [coin + sign] * (not sign[:1].isalpha())
  text = draw(st.sampled_from(order)) + text
  value = fractions.Fraction(digits, 10**places)
  scale = draw(st.sampled_from(['', '', *SCALES]))
  value *= {**SCALES, '': 1}[scale]
  return text + scale, -value if sign in MINUSES else value


def dress(draw, text):
  """Draws LaTeX around a number that does not change it."""
  text = draw(
    st.sampled_from(
      [
        text,
        text.replace(',', '{,}'),
        text.replace(',', r'\,'),
        text.replace('$', r'\$'),
      ]
    )
  )
  around = draw(
    st.lists(
      st.sampled_from(
        [
          ('{', '}'),
          (r'\text{', '}'),
          (' ', ' '),
          (r'\text{about }', r'\,\text{km/h}'),
          ('x = ', ''),
          ('', r'\text{ cm}^{2}'),
          ('', ' apples.'),
          ('$', '$'),
        ]
      ),
      max_size=3,
    )
  )
  for before, after in around:
    text = before + text + after
  return text


@st.composite
def boxed_texts(draw):
  text, value = draw(known())
  noise = st.one_of(
    WORDS,
    NUMBERS,
    st.sampled_from([r'\boxed{3}', r'\boxed{x', '#### 5', r'\boxed']),
  )
  after = joined(st.one_of(WORDS, NUMBERS, st.just('#### 5')), max_size=4)
  box = f'\\boxed{{{dress(draw, text)}}}'
  return draw(joined(noise, max_size=6)) + box + draw(after), value


@given(boxed_texts())
@settings(max_examples=200, deadline=None)
def test_final_answer_is_the_known_number(case):
  text, value = case
  assert numeric.final_answer(text) == numeric.boxed(text) == value, text


@pytest.mark.parametrize(
  'text, value',
  [
    ('So 5 * 10 = 50 miles in 7 hours.', 50),
    ('10 = 10, 2 + 3 = 5 of 8', 5),
    ('2 + 3 = 5.\nThat is 5 of 8', 8),
    ('It costs 2.5 = 5/2 dollars. Fine = good.', fractions.Fraction(5, 2)),
    ('a = 3 = 4 and 9', 4),
  ],
)
def test_the_last_result(text, value):
  assert numeric.final_answer(text) == value
  assert numeric.final_answer(text, lenient=False) is None


NOISE = st.text(
  st.one_of(
    st.sampled_from('0123456789,.+-/\\{}$%#<>^_ \n:exboxdfrac½²٣'),
    st.characters(),
  ),
  max_size=80,
)


@given(st.one_of(NOISE, joined(st.one_of(WORDS, NUMBERS, NOISE), max_size=8)))
@settings(max_examples=200, deadline=None)
def test_noise_never_raises(text):
  for form in ('{}', r'\boxed{{{}', '#### {}', r'\boxed{{{}}}'):
    inside = form.format(text)
    for options in ({}, {'lenient': False}, {'truncated': True}):
      found = numeric.final_answer(inside, **options)
      assert found is None or isinstance(found, fractions.Fraction)
  assert numeric.boxed(text) == (
    numeric.final_answer(text) if '\\boxed{' in text else None
  )


# --- solutions of real models ------------------------------------------------

MODELS = (
  '6b_finetuning',
  '6b_verification',
  '175b_finetuning',
  '175b_verification',
)


def solutions():
  """Yields ((line, model), reasoning, line `A: N`, truth, label)."""
  path = pathlib.Path(DATA) / 'gsm8k' / 'example_model_solutions.jsonl'
  with path.open(encoding='utf-8') as lines:
    for number, line in enumerate(lines, 1):
      row = json.loads(line)
      truth = numeric.parse(row['ground_truth'].rpartition('\nA: ')[2])
      for model in MODELS:
        said = row[model]['solution']
        # Eleven have no such line: they broke off.
        reasoning, _, answer = said.rpartition('\nA: ')
        yield (
          (number, model),
          reasoning or said,
          answer if reasoning else '',
          truth,
          row[model]['is_correct'],
        )


@needs_data
def test_labels_of_model_solutions():
  """The last result of the reasoning, and the line of the answer."""
  disagree, count = 0, 0
  for key, reasoning, answer, truth, label in solutions():
    count += 1
    right = numeric.equal(numeric.final_answer(reasoning), truth)
    # Words with another number after the result, rounded or wrong labels.
    disagree += right != label
    whole = f'{reasoning}\nA: {answer}' if answer else reasoning
    assert numeric.equal(numeric.final_answer(whole), truth) == label, key
    gold = f'{reasoning}\n#### {answer}' if answer else reasoning
    assert numeric.equal(numeric.final_answer(gold), truth) == label, key
  assert (count, disagree) == (5276, 17)
