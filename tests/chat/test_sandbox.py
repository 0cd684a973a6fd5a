"""Templates under limits: what is refused, and what is not."""

import threading
import time

import pytest

from posttrain.chat import meter, renderer, templates, tokenizers

HI = ({'role': 'user', 'content': 'hi'},)
LOOP = '{% for i in range(100000) %}'
# A text in which CPython's search compares a million characters.
SLOW = "{% set a = 'a' * 2499 %}{% set n = 'a' * 624 + 'b' + 'a' * 625 %}"
FEW = '{% for i in range(3000) %}'  # a second of such searches, and more
SEARCHES = (
  'n in a',
  'n not in a',
  f"n in '{'a' * 2499}'",
  f"'{'a' * 624}b{'a' * 625}' in a",
  'n in a in [1]',
  'i in [i] and n in a',
  'n is in a',
  f"n is in '{'a' * 2499}'",
  'n is in(seq=a)',
  "[n] | select('in', a) | first",
  "[n] | reject('in', a) | first",
  "[{'k': n}] | selectattr('k', 'in', a) | first",
  'a.find(n)',
  'a.rfind(n)',
  'a.count(n)',
  'a.split(n)',
  'a.rsplit(n)',
  'a.split(sep=n)',
  'a.partition(n)',
  'a.rpartition(n)',
  "a.replace(n, 'c')",
  "a | replace(n, 'c')",
  "a | replace(new='c', old=n)",
  "[a] | map('replace', n, 'c') | first",
  'a.strip(n[:600] ~ n[600:])',
  'a | trim(n)',
)
GROWS = '{% set n = namespace(x=[1]) %}' + LOOP + '{% set n.x = '


def render(source, messages=HI, **variables):
  return templates.Jinja(source, variables).text(messages)


@pytest.mark.parametrize(
  'source',
  [
    LOOP * 3 + '{% endfor %}' * 3,
    LOOP * 2 + "{{ 'a'.upper() | trim }}" + '{% endfor %}' * 2,
    LOOP + '{% for j in range(100000) if false %}{% endfor %}{% endfor %}',
    '{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}'
    '{% endmacro %}{{ m(50) }}',
    GROWS + 'n.x + n.x %}{% endfor %}',
    GROWS + '[n.x, n.x] %}{% endfor %}',
    GROWS + "{'a': n.x, 'b': n.x} %}{% endfor %}",
    GROWS + '(n.x ~ n.x) %}{% endfor %}',
    '{{ 9 ** (9 ** 9) }}',
    "{{ 'a' * 10**9 }}",
    '{{ ([1] * 10**9) | length }}',
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (10**9, 1) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 10**9) }}",
    "{{ 'a' | center(10**9) }}",
    "{{ 'a'.center(10**9) }}",
    "{{ 'a\\nb' | indent(10**9) }}",
    "{{ range(99999) | map('string') | join('a' * 10000) }}",
    "{{ ('a' * 10000).join(range(99999) | map('string')) }}",
    "{{ ('a' * 99999) | replace('a', 'a' * 99999) }}",
    "{{ ('a' * 99999).replace('', 'a' * 99999) }}",
    '{{ [1] | slice(10**9) | list }}',
    '{{ 5 | round(-10**9) }}',
    '{{ ([[1]] * 9999) | sum(start=[]) }}',
    "{{ ('a' * 99).translate({97: 'b'}) }}",
    LOOP + 'a' * 10000 + '{% endfor %}',
    "{% set a = 'a' * 1900000 %}" + LOOP + "{% if 'b' in a %}{% endif %}"
    '{% endfor %}',
    "{{ 'a'.startswith(('b',) * 40000) }}",
    "{% set b = ('b',) * 9999 %}"
    + LOOP
    + "{{ 'a'.startswith(b) }}{% endfor %}",
    "{% set b = 'b' * 1900000 %}" + LOOP + "{{ 'a'.rfind(b) }}{% endfor %}",
    "{% set a = 'a' * 1900000 %}{{ a.rfind('ab' + 'a' * 300000) }}",
    "{% set a = 'a' * 1900000 %}{{ a.strip('b' * 1900000 ~ 'a') }}",
    "{% set a = 'a' * 1900000 %}{{ a | trim('b' * 1900000 ~ 'a') }}",
    "{% set a = 'a' * 4000 %}{% set b = 'ab' ~ a[:2000] %}"
    + LOOP
    + '{% set x = a.rsplit(b) %}{% endfor %}',
    "{{ ('%(' * 500000) % 1 }}",
    "{{ '%((a))999999999s' % {'(a)': 1} }}",
    "{{ ('a' | safe).center(10**9) }}",
    "{{ ('\t' | escape).expandtabs(10**9) }}",
    "{{ '{:٩٩٩٩٩٩٩٩٩}'.format('a') }}",
    "{{ '{0.a.a.a.a.a.a.a.a}'.format('a') }}",
    "{{ 'ab' | map(attribute='0.' * 100000 ~ '0') | list }}",
    "{{ 'ab' | list | sort(false, false, '0.0.0.0.0.0.0.0.0') }}",
    "{{ [1] | selectattr('a' * 65) | list }}",
    '{% set n = namespace(p=0) %}' + LOOP + '{% set n.p = namespace(p=n.p, '
    "s='x' * 4080 ~ i) %}{% endfor %}",
    '{% macro m() %}{% endmacro %}{{ m(*range(300)) }}',
    '{% set m = 2**59 %}{{ range(0, 9 * m, m) | unique | list }}',
    "{{ '2305843009213693951' | int }}",
    '{{ -(2**59) - 2**59 - 1 - 1 }}',
    "{{ ('1' * 100000) | float }}",
    '{{ cycler(1).__class__ }}{{ dict.fromkeys(range(9)) }}',
    '{{ [1] | tojson(indent=10**9) }}',
    "{{ (range(999) | list) | tojson(separators=('a' * 9999, ':')) }}",
  ],
)
def test_hostile_templates_are_refused_by_name(source):
  with pytest.raises(ValueError) as error:
    render(source)
  assert 'config.tokenizer.chat_template must render within' in str(error.value)
  assert '\n' not in str(error.value) and len(str(error.value)) < 300


@pytest.mark.parametrize('search', SEARCHES)
def test_a_search_of_a_text_in_a_text_pays_for_its_worst_case(search):
  with pytest.raises(ValueError, match='must render within'):
    render(SLOW + FEW + '{% if ' + search + ' %}{% endif %}{% endfor %}')


@pytest.mark.parametrize(
  'source',
  [
    # `loop` is read to its end by what looks through it.
    FEW + LOOP + "{% if 'a' in loop %}{% endif %}" + '{% endfor %}' * 2,
    FEW + LOOP + '{% if 1 is in loop %}{% endif %}' + '{% endfor %}' * 2,
    FEW + LOOP + '{% set x = namespace(loop) %}' + '{% endfor %}' * 2,
    "{% set a = 'é' * 4000 %}{% for i in range(15000) %}"
    '{{ a.swapcase() | length }}{% if a is upper %}{% endif %}{% endfor %}',
    "{% set a = ['\U0001f600' * 4000] %}{% for i in range(20000) %}"
    "{% set x = a ~ '' %}{% endfor %}",
    "{% set a = '\r' * 4000 %}" + LOOP + '{{ (a | indent) is none }}'
    '{% endfor %}',
    # Texts of gigabytes.
    "{{ ('a\r' * 900000) | indent(9999) }}",
    "{{ ('a' * 999999) | replace(new='b' * 9999, old='a') }}",
    # Keys with equal hashes.
    '{% set n = namespace(x=[]) %}{% for i in range(16) %}{% for j in range(16)'
    ' %}{% set n.x = n.x + [((2.0**(61 * i), 2.0**(61 * j)), 1)] %}'
    '{% endfor %}{% endfor %}{% set d = dict(n.x) %}',
    '{% set d = {' + ', '.join(f'(i, {i}): 1' for i in range(65)) + '} %}',
  ],
)
def test_what_looks_through_values_pays_for_its_worst_case(source):
  with pytest.raises(ValueError, match='must render within'):
    render(source)


@pytest.mark.parametrize('size', [2500, 30_000, 1_000_000])
def test_a_search_for_a_long_text_is_not_refused(size):
  """CPython searches long texts in linear time."""
  text = 'word and ' * (size // 9)
  talk = [{'role': 'user', 'content': text}] * 2
  source = (
    '{% for m in messages %}{{ messages[0].content[9:-9] in m.content }}'
    "{{ m.content.find('</think>' ~ m.content[:size // 4]) }}{% endfor %}"
  )
  assert render(source, talk, size=size) == 'True-1True-1'


@pytest.mark.parametrize('search', [SEARCHES[0], 'a.rfind(n)', 'n is in a'])
def test_a_rendering_ends_soon_after_its_caller_has_left(search):
  loop = '{% for i in range(1500) %}'
  source = SLOW + loop + '{% if ' + search + ' %}{% endif %}{% endfor %}'
  chat = renderer.Renderer(tokenizers.Bytes(), source)
  begin, looks = time.process_time(), []

  def left():
    looks.append(time.process_time())
    return looks[-1] > begin + 0.02

  with pytest.raises(ValueError, match='the caller has left'):
    chat.prompt(HI, left)
  waits = [b - a for a, b in zip(looks, looks[1:], strict=False)]
  assert max(waits) < 0.3, max(waits)


def test_an_operation_that_nobody_can_wait_for_is_refused():
  """It cannot be interrupted; without a caller it may take longer."""
  source = "{{ (messages[0].content * 9).rfind('b' ~ 'a' * 15) }}"
  chat = renderer.Renderer(
    tokenizers.Bytes(), source + '{{ messages[0].content }}'
  )
  talk = [{'role': 'user', 'content': 'a' * 1_500_000}]
  with pytest.raises(ValueError, match='one of its operations would take'):
    chat.prompt(talk, lambda: False)
  assert len(chat.render(talk)) > 1_500_000


@pytest.mark.parametrize(
  ('source', 'words'),
  [
    ('{{ ' + '(' * 5000 + ')' * 5000 + ' }}', 'nested too deeply'),
    ('{{ ' + '1 + ' * 4000 + '1 }}', 'nested too deeply'),
    ('{{ a }}' * 5000, 'more than 10000 tokens'),
    ('{% autoescape true %}{% endautoescape %}', 'is for HTML'),
    ('{% if 1 %}' * 3000 + '{% endif %}' * 3000, 'nested too deeply'),
    ('x' * 300_000, 'at most 262144 characters: got 300000'),
    ('{{ ' + '9' * 5000 + ' }}', 'Exceeds the limit'),
    ('{{ [1] | random }}', "No filter named 'random'"),
  ],
)
def test_sources_that_cannot_be_compiled_are_refused(source, words):
  with pytest.raises(
    ValueError, match='config.tokenizer.chat_template'
  ) as error:
    render(source)
  assert words in str(error.value) and '\n' not in str(error.value)


@pytest.mark.parametrize(
  'source',
  [
    "{{ raise_exception('a\\nb' * 99999) }}",
    '{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}',
    '{{ lipsum(n=10**7) }}',
    "{{ ('a' | forceescape).striptags() }}",
  ],
)
def test_errors_of_templates_are_one_short_line(source):
  with pytest.raises(ValueError, match='messages must be ones that') as error:
    render(source)
  assert '\n' not in str(error.value) and len(str(error.value)) < 600


@pytest.mark.parametrize(
  ('source', 'text'),
  [
    ("{{ 'a' ~ 1 ~ none ~ [1, 'b'] }}", "a1None[1, 'b']"),
    ("{{ 'a' + 'b' + messages[0]['content'] + 'c' + 'd' }}", 'abhicd'),
    ('{{ 1 + 2 + 3 - 4 }} {{ (7 % 4) * 2 ** 3 }} {{ 7 // 2 }}', '2 24 3'),
    ("{{ '%3d|%-5s|' % (7, 'x') }}{{ '{:>4}'.format('a') }}", '  7|x    |   a'),
    ("{{ 'a' | center(5) }}.{{ 'a\\nb' | indent(2) }}", '  a  .a\n  b'),
    ("{{ [3, 1, 2] | sort | join(', ') }}", '1, 2, 3'),
    ("{{ {'a': [1, {'b': none}]} | tojson }}", '{"a": [1, {"b": null}]}'),
    ('{{ [1] | tojson(indent=2) }}', '[\n  1\n]'),
    (
      "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
      '1',
    ),
    ("{{ 'a b'.split() | last }}{{ 'x' in 'xy' }}{{ 1 in {} }}", 'bTrueFalse'),
    ("{{ messages[::-1][0].content[1:] }}{{ messages[0].get('x') }}", 'iNone'),
    ('{% for x in [1, 2, 3] if x > 1 %}{{ loop.index }}{% endfor %}', '12'),
    ('{% for i in range(3) %}{{ i }}{% else %}none{% endfor %}', '012'),
    ("{% set ns = namespace(a='') %}{% set ns.a = 'b' %}{{ ns.a }}", 'b'),
    ('{% macro m(x, y=2) %}{{ x }}{{ y }}{% endmacro %}{{ m(1) }}', '12'),
    (
      '{% macro m() %}({{ caller() }}){% endmacro %}'
      '{% call m() %}x{% endcall %}',
      '(x)',
    ),
    ('{% filter upper %}a{% endfilter %}{% set x %}b{% endset %}{{ x }}', 'Ab'),
    ("{{ '<' | e }}{{ ('<' | safe) ~ '&' | escape }}", '&lt;<&amp;'),
    ("{{ [1, {'é': 2}] | tojson(separators=(',', ':')) }}", '[1,{"é":2}]'),
    ("{{ 'é' | tojson(ensure_ascii=true) }}", '"\\u00e9"'),
    ("{{ 'é' | tojson(ensure_ascii=False, sort_keys=true) }}", '"é"'),
    ("{{ '{{{}}}'.format(1) }}{{ '{0}{{12345}}'.format(2) }}", '{1}2{12345}'),
    ('{{ \'{{"a": {}}}\'.format(1) }}', '{"a": 1}'),
    ("{{ '{a[12345]}'.format(a={12345: 'x'}) }}", 'x'),
    ("{{ '100000%% of %s' % 'x' }}", '100000% of x'),
    ("{{ messages | map(attribute='content') | first }}", 'hi'),
    ("{{ 'x' in nothing }}{{ nothing | default('d') }}", 'Falsed'),
    ('{% for k, v in {"a": 1}.items() %}{{ k }}{{ v }}{% endfor %}', 'a1'),
    ("{{ 1 in [1] in [[1], true] }}{{ 'a' in 'ab' == 'ab' }}", 'TrueTrue'),
    ("{{ 0 < 1 in [1] }}{{ 'a' not in 'b' not in ['b'] }}", 'TrueFalse'),
    (
      "{% for x in ['ab', 'c'] if 'a' in x %}{{ x }}{% endfor %}"
      "{% macro m(x) %}{{ 'a' in x }}{% endmacro %}{{ m('a') }}",
      'abTrue',
    ),
    (
      "{{ 'ab' | replace(new='c', old='a') }}{{ 'aa' is in(seq='a') }}",
      'cbFalse',
    ),
    ("{{ ['a', 'A', (1, 2), (1, 2)] | unique | list }}", "['a', (1, 2)]"),
    ("{{ {(1, 2): 3}[(1, 2)] }}{{ dict([('a', 1)]).a }}", '31'),
    ("{{ 'a\rb' | indent(2) }}", 'a\n  b'),
    ("{{ (1, 2) == (1, 2) }}{{ 1 < 2 < 3 }}{{ 'a' is lower }}", 'TrueTrueTrue'),
  ],
)
def test_what_templates_do_is_unchanged(source, text):
  assert render(source) == text


def test_budgets_grow_with_the_messages():
  content = 'word ' * 200_000  # 1 MB
  talk = [{'role': 'user', 'content': content}] * 3
  source = (
    "{% for m in messages %}{{ '<u>' + m.content | trim + '</u>' }}"
    "{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}"
    '{% endif %}{% endfor %}'
  )
  assert len(render(source, talk)) == 3 * (len(content) - 1 + 7)
  # Work that is quadratic in the messages, as some templates do.
  talk = [{'role': 'user', 'content': 'a'}] * 600
  source = (
    '{% for m in messages %}{% for o in messages[loop.index0:] %}'
    "{% if o.role != 'user' %}x{% endif %}{% endfor %}{% endfor %}"
  )
  assert render(source, talk) == ''


def test_refusals_depend_on_the_input_only():
  source = (
    '{% for m in messages %}'
    + '{% for i in range(90000) %}'
    + ('{{ i }}{% endfor %}{{ m.content }}{% endfor %}')
  )
  template, outcomes = templates.Jinja(source, {}), []

  def run():
    try:
      outcomes.append(len(template.text(HI)))
    except ValueError as error:
      outcomes.append(str(error))

  threads = [threading.Thread(target=run) for _ in range(3)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert len(outcomes) == 3 and len(set(outcomes)) == 1


def test_all_renderings_of_a_chat_have_a_budget(monkeypatch):
  source = '{% for m in messages %}<{{ m.content }}>{% endfor %}'
  chat = renderer.Renderer(tokenizers.Bytes(), source)
  assert len(chat.render(HI)) == 4
  monkeypatch.setattr(meter, 'CHAT', meter.Budget(-1, 0))
  chat = renderer.Renderer(tokenizers.Bytes(), source)  # has rendered nothing
  with pytest.raises(ValueError, match='renderings of one chat need too many'):
    chat.render(HI)
