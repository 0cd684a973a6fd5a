"""Chat templates that must be refused, when compiled or rendered."""


def _loop(body: str) -> str:
  return '{% for i in range(100000) %}' + body + '{% endfor %}'


def _grows(first: str, then: str, shown: str = '') -> str:
  first = '{% set n = namespace(x=' + first + ') %}'
  loop = '{% for i in range(100) %}{% set n.x = ' + then + ' %}{% endfor %}'
  return first + loop + shown


_BIG = "{% set a = 'ab' * 1000000 %}"
_LONG = "{% set a = 'a' * 1900000 %}"
_KEPT = '{% set n = namespace(p=0) %}'
_HASH = 2**61 - 1  # its multiples have equal hashes
# Each must be refused when it is compiled or rendered.
TEMPLATES = {
  'loops': _loop(_loop(_loop(''))),
  'calls': _loop(_loop("{% set x = 'a'.replace('b', 'c') | trim | upper %}")),
  'conditions': _loop('{% for j in range(100000) if false %}{% endfor %}'),
  'generators': _loop("{% set x = range(9999) | map('string') | list %}"),
  'macros': '{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}'
  '{% endmacro %}{{ m(60) }}',
  'a macro without end': '{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}',
  'a loop without end': '{% for x in [1] recursive %}{{ loop([1]) }}'
  '{% endfor %}',
  'blocks': '{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}',
  'callers': '{% macro m() %}' + _loop('{{ caller() }}') + '{% endmacro %}'
  '{% call m() %}' + _loop('x') + '{% endcall %}',
  'powers': '{{ 9 ** (9 ** 9) }}',
  'squares': _grows('9', 'n.x * n.x', '{{ n.x }}'),
  'digits': '{{ ' + '9' * 5000 + ' }}',
  'lipsum': '{{ lipsum(n=10**7) }}',
  'lists that double': _grows('[1]', 'n.x + n.x', ''),
  'lists that nest': _grows('[1]', '[n.x, n.x]', '{{ n.x }}'),
  'tuples that nest': _grows('(1,)', '(n.x, n.x)', '{{ {}[n.x] }}'),
  'dicts that nest': _grows('{}', "{'a': n.x, 'b': n.x}", '{{ n.x }}'),
  'texts that double': _grows("'a'", 'n.x ~ n.x', ''),
  'texts that are added': _grows("'a'", 'n.x + n.x', ''),
  'a block of output': '{% set x %}' + _loop(_loop('a' * 99)) + '{% endset %}',
  'a text many times': "{{ 'a' * 10**9 }}",
  'a list many times': '{{ ([1] * 10**9) | length }}',
  'comparisons': _BIG
  + "{% set b = a ~ 'x' %}{% set c = a ~ 'x' %}"
  + _loop('{% if b == c %}{% endif %}'),
  'searches': _BIG + _loop("{% if 'c' in a %}{% endif %}"),
  'finds': _BIG + _loop("{{ a.find('ab' * 1000 + 'c') }}"),
  'slices': _BIG + _loop('{% set b = a[1:] %}'),
  'reversed lists': '{% set l = range(9999) | list %}'
  + _loop('{% set x = l[::-1] %}'),
  'tests': _BIG + _loop('{% if a is lower %}{% endif %}'),
  'titles': _BIG + '{{ a | title }}',
  'sums': '{{ ([[1]] * 100000) | sum(start=[]) }}',
  'sorts': '{% set l = range(9999) | list %}' + _loop('{% set x=l|sort %}'),
  'groups': '{% set l = range(9999) | list %}'
  + _loop("{% set x = l | groupby('real') %}"),
  'splits': "{{ ('a ' * 900000).split() | length }}",
  'elements': "{{ ('é' * 1900000) | list | length }}",
  'joins': _BIG + '{{ range(9999) | join(a) }}',
  'joined': _BIG + "{{ a.join(range(9999) | map('string')) }}",
  'replacements': _BIG + "{{ a | replace('a', a) }}",
  'replaced': _BIG + "{{ a.replace('', a) }}",
  'output': _BIG + _loop('{{ a }}'),
  'many variables': ''.join(
    f"{{% set v{i} = 'a' * 1900000 %}}" for i in range(200)
  ),
  'a width': "{{ '%1000000000d' % 1 }}",
  'a width of a variable': "{{ '%*d' % (10**9, 1) }}",
  'a precision': "{{ '%.1000000000f' % 1.5 }}",
  'a width of a filter': "{{ '%1000000000d' | format(1) }}",
  'a width of a field': "{{ '{:1000000000}'.format(1) }}",
  'a width in a field': "{{ '{:{}}'.format(1, 10**9) }}",
  'format_map': "{{ '{a:>999999999}'.format_map({'a': 1}) }}",
  'center': "{{ 'a' | center(10**9) }}",
  'a constant center': "{{ 'a' | center(1000000000) }}",
  'indent': "{{ 'a\\nb' | indent(10**9) }}",
  'ljust': "{{ 'a'.ljust(10**9) }}",
  'zfill': "{{ 'a'.zfill(10**9) }}",
  'tabs': "{{ ('\\t' * 1000000).expandtabs(100000) }}",
  'translate': "{{ ('a' * 99999).translate({97: 'b' * 99999}) }}",
  'bytes': "{{ (1).to_bytes(10**10, 'big') }}",
  'rounds': '{{ 5 | round(-10**9) }}',
  'batches': '{{ [1] | batch(10**9, 0) | list }}',
  'columns': '{{ [1] | slice(10**9) | list }}',
  'indented JSON': '{{ ([1] * 99999) | tojson(indent=9999) }}',
  'prefixes': "{% set b = ('b',) * 9999 %}" + _loop("{{ 'a'.startswith(b) }}"),
  'a long strip': _LONG + "{{ a.strip('b' * 1900000 ~ 'a') }}",
  'a long trim': _LONG + "{{ a | trim('b' * 1900000 ~ 'a') }}",
  'long strips': _LONG + _loop("{{ 'a'.strip(a) }}"),
  'a long rfind': _LONG + "{{ a.rfind('ab' + 'a' * 300000) }}",
  'rfinds': "{% set a = 'a' * 4000 %}{% set b = 'ab' ~ a[:2000] %}"
  + _loop('{{ a.rfind(b) }}{{ a.rsplit(b) }}{{ a.rpartition(b) }}'),
  'short rfinds': "{% set a = 'a' * 500 %}{% set b = 'ab' ~ a[:30] %}"
  + _loop('{{ a.rfind(b) }}'),
  'half specifiers': "{{ ('%(' * 500000) % 1 }}",
  'nested keys': "{{ '%((a))999999999s' % {'(a)': 1} }}",
  'safe center': "{{ ('a' | safe).center(10**9) }}",
  'escaped ljust': "{{ ('a' | escape).ljust(10**9) }}",
  'safe tabs': "{{ ('\t' | safe).expandtabs(10**9) }}",
  'safe replacements': "{% set b = ('a' * 1900000) | safe %}"
  "{{ b.replace('a', 'b' * 2000) }}",
  'removed filters': "{{ (('<!--' * 100000) | forceescape).striptags() }}",
  'autoescape': "{% autoescape true %}{{ ('a' ~ 'b').center(10**9) }}"
  '{% endautoescape %}',
  'Arabic digits': "{{ '{:٩٩٩٩٩٩٩٩٩}'.format('a') }}",
  'a path of a field': "{{ '{0" + '.a' * 1000 + "}'.format(1) }}",
  'many fields': "{% set f = '{0}' * 1000 %}" + _loop('{{ f.format(1) }}'),
  **{
    f'a path of {name}': f"{{% set p = '0.' * 900000 ~ '0' %}}"
    f"{{{{ (('a' * 4096) | list) | {name} | list }}}}"
    for name in (
      *('map(attribute=p)', 'sort(attribute=p)', 'groupby(p)', 'sum(p)'),
      *('unique(attribute=p)', 'min(attribute=p)', 'max(false, p)'),
      *("join('', p)", 'selectattr(p)', 'rejectattr(p)'),
    )
  },
  'dates': "{{ strftime_now('%1000000000d' ~ 'a' * 1900000) }}",
  'a width of a date': "{{ strftime_now('%1000000000d') }}",
  'texts that are kept': _KEPT
  + "{% set a = '\U0001f600' * 4080 %}"
  + _loop('{% set n.p = namespace(p=n.p, s=a ~ i) %}'),
  'short texts that are kept': _KEPT
  + "{% set a = '\U0001f600' * 120 %}"
  + _loop('{% set n.p = namespace(p=n.p, a=a~i, b=a~i, c=a~i, d=a~i) %}'),
  'parts that are kept': _KEPT
  + "{% set a = 'bc,' * 1365 %}"
  + _loop("{% set n.p = namespace(p=n.p, s=a.split(',')) %}"),
  'methods that are kept': _KEPT
  + _loop("{% set n.p = namespace(p=n.p, a='a'.upper, b='b'.lower) %}"),
  'many arguments': '{% macro f() %}{% endmacro %}'
  + _loop('{{ f(*range(100000)) }}'),
  'equal hashes': f'{{{{ range(0, {35000 * _HASH}, {_HASH}) '
  '| unique | list }}',
  'equal hashes of a list': '{% set t %}{% for i in range(40000) %}'
  f'{{{{ i * {_HASH} }}}},{{% endfor %}}{{% endset %}}'
  "{{ t.split(',') | map('int') | unique | list }}",
  'numbers that grow': '{% set n = namespace(p=1) %}'
  + _loop('{% set n.p = n.p - -n.p %}'),
  'a number of a text': "{{ ('f' * 1900000) | int(base=16) }}",
  'separators': "{{ (range(999) | list) | tojson(separators=('a' * 9999, ':'))"
  ' }}',
  'many expressions': '{{ a }}' * 30000,
  'many variables of a source': ''.join(
    f'{{% set a{i} = 1 %}}' for i in range(14000)
  ),
  'many comparisons': '{{ ' + '<'.join(['1'] * 20000) + ' }}',
  'parentheses': '{{ ' + '(' * 50000 + '1' + ')' * 50000 + ' }}',
  'brackets': '{{ ' + '[' * 3000 + ']' * 3000 + ' }}',
  'sums of constants': '{{ ' + '1 + ' * 20000 + '1 }}',
  'attributes': '{{ a' + '.b' * 5000 + ' }}',
  'nested loops': '{% for a in [1] %}' * 200 + '{% endfor %}' * 200,
  'nested conditions': '{% if 1 %}' * 3000 + '{% endif %}' * 3000,
  'half a template': '{{ ' * 50000,
  'a long template': 'x' * 300_000,
  'no loader': "{% include 'x' %}",
  'an error of 3 MB': "{{ raise_exception('a\\n' * 1500000) }}",
}
