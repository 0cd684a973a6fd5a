"""Checks of what a template calls: filters, tests, methods, operators.

Only the filters and methods listed here can be called. Each call pays for the
lengths of its arguments and result, and for the product of lengths where it may
compare a text with another at each place. Multiplications are checked before
they run: their results may be far larger than their arguments.
"""

import collections.abc
import functools
import types
from collections.abc import Callable
from typing import Any

import jinja2.filters
import jinja2.runtime
import jinja2.utils

from posttrain.chat import formats
from posttrain.chat import meter as meters

_WIDTH = 10_000  # a width, a precision, a number of columns
_DIGITS = 1000  # characters of a text that is made a number
_ARGUMENTS = 256  # of a call

# Slow for some inputs, random, or for HTML: no chat template needs them.
_NO_FILTERS = ('pprint', 'random', 'striptags', 'urlize', 'wordwrap', 'xmlattr')
_FREE = ('length', 'count', 'default', 'd', 'first')  # make nothing
_SHORT = ('capitalize', 'lower', 'string', 'trim', 'upper')
_MARKUP = ('e', 'escape', 'forceescape', 'safe')  # give plain text here
# Filters that handle a text character by character.
_OF_ELEMENTS = (
  *('batch', 'dictsort', 'groupby', 'list', 'map', 'max', 'min', 'reject'),
  *('rejectattr', 'select', 'selectattr', 'slice', 'sort', 'sum', 'title'),
  *('unique', 'urlencode', 'wordcount'),
)
_SORTING = ('dictsort', 'groupby', 'map', 'max', 'min', 'sort', 'unique')
_WITH_WIDTH = ('batch', 'center', 'indent', 'round', 'slice', 'truncate')
# The place of an attribute's path among a filter's options.
_ATTRIBUTES = {
  **{'groupby': 0, 'rejectattr': 0, 'selectattr': 0, 'sum': 0},
  **{'join': 1, 'max': 1, 'min': 1, 'sort': 2, 'unique': 1},
}
_COMPARING = (
  *('eq', '==', 'equalto', 'ne', '!=', 'in', 'lt', 'lessthan', '<', 'le'),
  *('<=', 'gt', 'greaterthan', '>', 'ge', '>=', 'lower', 'upper'),
)
# Methods whose time is linear in the length of their text.
_LINEAR = (
  *('capitalize', 'endswith', 'isalnum', 'isalpha', 'isdecimal', 'isdigit'),
  *('islower', 'isnumeric', 'isspace', 'istitle', 'isupper', 'join', 'lower'),
  *('removeprefix', 'removesuffix', 'splitlines', 'startswith', 'swapcase'),
  *('title', 'upper'),
)
# Methods that may compare their argument at each place of their text.
_SEARCHING = (
  *('count', 'find', 'index', 'lstrip', 'partition', 'replace', 'rfind'),
  *('rindex', 'rpartition', 'rsplit', 'rstrip', 'split', 'strip'),
)
_BACKWARD = ('rfind', 'rindex', 'rpartition', 'rsplit')
_STRIPPING = ('lstrip', 'rstrip', 'strip')
_PADDING = ('center', 'ljust', 'rjust', 'zfill')
_SPLITTING = ('rsplit', 'split', 'splitlines')
_METHODS = {
  str: frozenset((*_LINEAR, *_SEARCHING, *_PADDING)),
  dict: frozenset(('copy', 'get', 'items', 'keys', 'values')),
  list: frozenset(('copy', 'count', 'index')),
  tuple: frozenset(('count', 'index')),
}
_CHEAP = frozenset((*_LINEAR, *_SEARCHING)) - {'join'}
_PRODUCT = 16_384  # characters that such a method compares
_TUPLES = 64  # keys of a dict that are tuples: these can have equal hashes
_LINES = '\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029'  # of `splitlines`
_KEYED = (dict, jinja2.utils.Namespace)
_OBJECTS = (jinja2.runtime.LoopContext, jinja2.utils.Cycler)


def filters(functions: dict[str, Callable[..., Any]]) -> dict[str, Any]:
  """Wraps filters in checks of their arguments; leaves `_NO_FILTERS` out."""
  functions = {**functions, 'unique': _unique}
  return {
    name: function if name in _FREE else _filter(name, function)
    for name, function in functions.items()
    if name not in _NO_FILTERS
  }


def tests(functions: dict[str, Callable[..., Any]]) -> dict[str, Any]:
  """Returns tests that pay for their arguments."""
  return {
    name: _test(name, function) if name in _COMPARING else function
    for name, function in functions.items()
  }


def is_cheap(method: Any, args: tuple) -> bool:
  """Returns whether a call is one of a short text, and then pays for it."""
  owner = method.__self__
  if type(owner) is not str or method.__name__ not in _CHEAP:
    return False
  size = len(owner)
  if args:
    text = args[0]
    product = size * len(text) if type(text) is str else 1 << 40
    if len(args) > 1 or product > _PRODUCT:
      return False
  elif size > meters.SHORT:
    return False
  if size > meters.PAID:
    meters.current().charge(size >> 5)
  return True


def call(meter: meters.Meter, function: Any, args: tuple, kwargs: dict) -> Any:
  """Checks and pays for a call.

  Args:
    meter: the rendering's budget.
    function: a bound method, a macro or another function.
    args: its arguments.
    kwargs: its keyword arguments.

  Returns:
    The arguments.

  Raises:
    Limit: its result would be too large; or the method may not be called.
  """
  if len(args) + len(kwargs) > _ARGUMENTS:
    raise meters.Limit(f'a call has {len(args) + len(kwargs)} arguments')
  meter.read(*args, *kwargs.values())
  if args and isinstance(function, type) and issubclass(function, _KEYED):
    return (_checked_pairs(meter, args[0]), *args[1:])
  if not isinstance(function, types.MethodType | types.BuiltinMethodType):
    return args
  owner, name = function.__self__, function.__name__
  if isinstance(owner, _OBJECTS):
    return args
  if name not in _METHODS.get(type(owner), ()):
    kind = type(owner).__name__
    raise meters.Limit(f'the method {name!r} of {kind} cannot be called')
  if isinstance(owner, str):
    return _checked_method(meter, owner, name, args, kwargs)
  if name in ('copy', 'count', 'index'):
    meter.read(owner)
  return args


def _checked_method(
  meter: meters.Meter, owner: str, name: str, args: tuple, kwargs: dict
) -> tuple:
  size = len(owner)
  meter.read(owner)
  if name == 'join' and args:
    values = _listed(meter, args[0])
    meter.fits(meter.size(values) + size * len(values), 'joined texts')
    return (values, *args[1:])
  if name in _SEARCHING:
    forward = name not in (*_BACKWARD, *_STRIPPING)
    for option in (*args[:1], *kwargs.values()):
      meter.compare(owner, option, forward)
  if name == 'replace' and len(args) > 1:
    _check_replace(meter, owner, args)
  elif name in _PADDING:
    for width in args:
      _check_width(width, name)
  elif name in _SPLITTING and size > meters.SMALL:
    separator = args[0] if args else kwargs.get('sep')
    texts = size // 2
    if isinstance(separator, str) and separator:
      texts = owner.count(separator)
    meter.fits(meters.ELEMENT * texts, f'the texts of {name!r}')
  return args


def operator(meter: meters.Meter, name: str, left: Any, right: Any) -> None:
  """Checks what an operator would make; raises Limit as `call`."""
  integers = isinstance(left, int) and isinstance(right, int)
  if name == '%':
    if isinstance(left, str):
      formats.check_percent(meter, left, right)
  elif name == '*':
    for value, times in ((left, right), (right, left)):
      if isinstance(times, int) and not isinstance(value, int | float):
        meter.fits(meter.size(value) * max(times, 0), "the result of '*'")
    if integers:
      meters.check_bits(left.bit_length() + right.bit_length() - 1)
  elif name == '**' and integers and right > 0:
    meters.check_bits((abs(left).bit_length() - 1) * right)


def _filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
  passes = hasattr(function, 'jinja_pass_arg')
  what = f'the result of {name!r}'
  plain = name in _MARKUP

  @functools.wraps(function)
  def call(*args, **kwargs):
    meter = meters.current()
    meter.charge(60 if name == 'attr' else 10)
    values = _checked_filter(meter, name, args[passes:], kwargs)
    result = function(*args[:passes], *values, **kwargs)
    return meter.made(str.__str__(result) if plain else result, what)

  @functools.wraps(function)
  def call_short(value, *args, **kwargs):
    if type(value) is str and len(value) <= meters.SHORT:
      if not args and not kwargs:
        if len(value) > meters.PAID:
          meters.current().charge(len(value) >> 5)
        result = function(value)
        if len(result) > meters.SMALL:
          meters.current().pay(len(result))
        return result
    return call(value, *args, **kwargs)

  return call_short if name in _SHORT else call


def _test(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
  searches = name == 'in'

  @functools.wraps(function)
  def call(*args, **kwargs):
    values = (*args, *kwargs.values())
    if searches and len(values) == 2 and isinstance(values[1], str):
      meters.current().compare(values[1], values[0], forward=True)
    elif any(type(x) is not str or len(x) > meters.PAID for x in values):
      meters.current().read(*values)
    return function(*args, **kwargs)

  return call


def _checked_filter(
  meter: meters.Meter, name: str, values: tuple, kwargs: dict
) -> tuple:
  """Checks and pays for a filter's arguments; returns them."""
  if not values:
    return values
  value, options = values[0], (*values[1:], *kwargs.values())
  if name == 'join':
    value = _listed(meter, value)
  meter.read(value, *options)
  parts = _attribute_parts(name, values[1:], kwargs)
  size = meter.size(value)
  if isinstance(value, str):
    if name in _OF_ELEMENTS and size > meters.SMALL:
      meter.fits(meters.ELEMENT * size, f'the elements of {name!r}')
      meter.charge(size * parts)
    if name in ('float', 'int', 'round') and size > _DIGITS:
      raise meters.Limit(f'a number would have {size} digits')
  else:
    if isinstance(value, collections.abc.Sized):
      per_element = 50 if name in _SORTING else 10
      meter.charge(per_element * len(value) * parts)
    if size > meters.SMALL and name not in ('map', 'list', 'join', 'items'):
      meter.fits(size, 'a value')
  if name in _WITH_WIDTH:
    for option in options:
      _check_width(option, name)
  _check_growth(meter, name, value, size, values[1:], kwargs)
  return value, *values[1:]


def _attribute_parts(name: str, options: tuple, kwargs: dict) -> int:
  """Returns the parts of the attribute's path that a filter reads, or 1."""
  place = _ATTRIBUTES.get(name)
  if place is not None and len(options) > place:
    path = options[place]
  else:
    path = kwargs.get('attribute')
  return formats.check_path(path) if isinstance(path, str) else 1


def _check_growth(
  meter: meters.Meter, name: str, value, size: int, args: tuple, kwargs: dict
) -> None:
  """Checks a filter's result, if it may be larger than its arguments."""
  options = (*args, *kwargs.values())
  if name == 'join':
    separators = len(value) * sum(map(meter.size, options))
    meter.fits(size + separators, 'joined texts')
  elif name == 'indent':
    width = max(map(_width, options), default=4)
    lines = 1 + sum(map(str(value).count, _LINES))
    meter.fits(size + width * lines, 'indented text')
    meter.charge(lines >> 1)
  elif name == 'tojson':
    _check_json(meter, value, size, args, kwargs)
  elif name in ('string', *_MARKUP):
    meter.fits(10 * size if size > meters.SMALL else 0, 'a text')
  elif name == 'trim':
    for option in options[:1]:
      meter.compare(str(value), option)
  elif name == 'replace':
    names = ('old', 'new')[len(args) :]
    texts = *args[:2], *(kwargs[x] for x in names if x in kwargs)
    texts = tuple(map(str, texts))
    if len(texts) == 2:
      meter.compare(str(value), texts[0], forward=True)
      _check_replace(meter, str(value), texts)
  elif name == 'format':
    formats.check_percent(meter, str(value), options)
  elif name == 'sum' and any(isinstance(x, list | tuple) for x in options):
    raise meters.Limit("the start of 'sum' must be a number")


def _check_json(
  meter: meters.Meter, value, size: int, args: tuple, kwargs: dict
) -> None:
  indent = args[1] if len(args) > 1 else kwargs.get('indent')
  if isinstance(indent, int):
    _check_width(indent, 'tojson')
  separators = args[2] if len(args) > 2 else kwargs.get('separators')
  level = meter.size(separators) + _depth(value) * _width(indent)
  meter.fits(12 * size + size // meters.ELEMENT * level, 'JSON')


def _check_replace(meter: meters.Meter, text: Any, args: tuple) -> None:
  if all(isinstance(x, str) for x in args[:2]):
    count = text.count(args[0])
    meter.fits(len(text) + count * len(args[1]), 'a text with replacements')


def _check_width(value: Any, name: str) -> None:
  limit = 300 if name == 'round' else _WIDTH
  if isinstance(value, int | float) and abs(value) > limit:
    shown = meters.number(value)
    raise meters.Limit(f'{name!r} would have a width of {shown}')


@jinja2.utils.pass_environment
def _unique(environment, value, case_sensitive=False, attribute=None):
  """The filter `unique`, which pays for keys that can have equal hashes."""
  lower = None if case_sensitive else jinja2.filters.ignore_case
  key_of = jinja2.filters.make_attrgetter(environment, attribute, lower)
  keys, tuples = set(), 0
  for item in value:
    key = key_of(item)
    if isinstance(key, tuple):
      tuples += 1
      meters.current().charge(tuples)
    if key not in keys:
      keys.add(key)
      yield item


def check_keys(keys: collections.abc.Iterable[Any]) -> None:
  """Raises Limit where many keys of a dict are tuples."""
  if sum(isinstance(key, tuple) for key in keys) > _TUPLES:
    raise meters.Limit(f'more than {_TUPLES} keys of a dict are tuples')


def _checked_pairs(meter, pairs: Any) -> Any:
  """Checks what may become a dict, and returns it; raises as `check_keys`."""
  if isinstance(pairs, collections.abc.Iterator):
    pairs = list(meter.made(iter(pairs)))
  if isinstance(pairs, list | tuple):
    check_keys(
      pair[0] if isinstance(pair, list | tuple) and pair else ()
      for pair in pairs
      if not isinstance(pair, str)
    )
  return pairs


def _width(option: Any) -> int:
  return len(option) if isinstance(option, str) else int(option or 0)


def _listed(meter: meters.Meter, values: Any) -> Any:
  if isinstance(values, str | list | tuple | dict):
    return values
  return list(meter.made(iter(values)))


def _depth(value: Any) -> int:
  if isinstance(value, dict):
    value = value.values()
  elif not isinstance(value, list | tuple):
    return 0
  return 1 + max(map(_depth, value), default=0)
