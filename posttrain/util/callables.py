"""Functions and classes of this process, under import paths.

A config names functions by import path. What a notebook or a closure defines
has none; `path` keeps it here, as an attribute of this module, until the
process ends.
"""

import sys
from collections.abc import Callable
from typing import Any

from posttrain.util import foreign, imports


def path(value: Callable[..., Any]) -> str:
  """Returns an import path of a function or class, for a config.

  What can be imported keeps its own path. Anything else gets one that is valid
  in this process only, by its name: a later object of the same name replaces
  it, as in a notebook whose cell is run again.

  Raises:
    ValueError: the object cannot be called, or has no name.
  """
  name = getattr(value, '__qualname__', '')
  module = getattr(value, '__module__', None)
  if not callable(value) or not name.split('.')[-1].isidentifier():
    raise ValueError(
      'a function must be callable and have a name: got '
      f'{foreign.quote(value)}; define it with def'
    )
  if module and module != '__main__' and '<' not in name:
    try:
      if imports.load(f'{module}:{name}', 'a function') is value:
        return f'{module}:{name}'
    except ValueError:
      pass  # of a file that was run and cannot be imported
  name = name.split('.')[-1]
  if name in _OWN:
    raise ValueError(f'a function must not be named {name!r}; rename it')
  setattr(sys.modules[__name__], name, value)
  return f'{__name__}:{name}'


_OWN = frozenset(vars(sys.modules[__name__])) | {'_OWN'}
