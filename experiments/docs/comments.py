"""What the source of the schema says of each field: meaning and bounds.

1. `read` parses a module of the schema.
2. `meanings` joins the comments above the fields of each class.
3. `bounds` reads what the checks in `__post_init__` require of each field.
"""

import ast
import dataclasses
import re
import types
from collections.abc import Iterator

# Helpers of `schema.base` -> what they require of the fields they name.
_HELPERS = {
  'require_positive': '> 0',
  'require_non_negative': '>= 0',
  'require_seconds': '> 0, in seconds',
  'require_regex': 'a regular expression',
  'require_import_path': "'package.module:function'",
}
# Requirements on combinations of options, which the errors explain.
_CONDITIONAL = re.compile(r'be left|be None$|be another|name roles|name ')


@dataclasses.dataclass(frozen=True)
class Source:
  """A module of the schema, as text and as a tree."""

  module: types.ModuleType
  lines: list[str]
  tree: ast.Module

  def classes(self) -> Iterator[ast.ClassDef]:
    return (x for x in self.tree.body if isinstance(x, ast.ClassDef))


def read(module: types.ModuleType) -> Source:
  """Parses a module's file."""
  assert module.__file__ is not None
  with open(module.__file__) as file:
    text = file.read()
  return Source(module, text.splitlines(), ast.parse(text))


def meanings(source: Source) -> dict[tuple[str, str], str]:
  """Returns (class, field) -> the comment above the field, on one line."""
  found = {}
  for node in source.classes():
    for item in node.body:
      if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
        text = _above(source.lines, item.lineno - 1)
        if text:
          found[node.name, item.target.id] = text
  return found


def _above(lines: list[str], index: int) -> str:
  comment: list[str] = []
  while index and lines[index - 1].lstrip().startswith('#'):
    index -= 1
    comment.insert(0, lines[index].strip().removeprefix('#').strip())
  return ' '.join(comment)


def bounds(source: Source) -> dict[tuple[str, str], list[str]]:
  """Returns (class, field) -> what every value of the field must satisfy."""
  functions = {
    x.name: x for x in source.tree.body if isinstance(x, ast.FunctionDef)
  }
  found: dict[tuple[str, str], list[str]] = {}
  for node in source.classes():
    methods = {x.name: x for x in node.body if isinstance(x, ast.FunctionDef)}
    if '__post_init__' not in methods:
      continue
    reader = _Reader(vars(source.module), functions | methods)
    reader.read(methods['__post_init__'], {})
    for field, must in reader.found:
      found.setdefault((node.name, field), []).append(must)
  return found


def _number(value: float) -> str:
  return f'{value:,}' if isinstance(value, int) else f'{value:g}'


class _Reader:
  """Collects the requirements of a `__post_init__`, without running it."""

  def __init__(self, names: dict, functions: dict[str, ast.FunctionDef]):
    self._names, self._functions = names, functions
    self.found: list[tuple[str, str]] = []

  def read(self, function: ast.FunctionDef, known: dict) -> None:
    """Reads the statements that always run; those of branches are left out."""
    for statement in function.body:
      if isinstance(statement, ast.For):
        self._loop(statement, known)
      elif isinstance(statement, ast.Expr):
        self._call(statement.value, known)

  def _loop(self, node: ast.For, known: dict) -> None:
    if not isinstance(node.iter, ast.Tuple | ast.Name):
      return
    if not isinstance(node.target, ast.Name):
      return
    values = self._fields([node.iter], known)
    for statement in node.body:
      if isinstance(statement, ast.Expr):
        self._call(statement.value, known | {node.target.id: values})

  def _call(self, node: ast.expr, known: dict) -> None:
    if not isinstance(node, ast.Call):
      return
    *_, name = ast.unparse(node.func).split('.')
    owner = ast.unparse(node.func).split('.')[0]
    args = node.args
    if owner == 'base' and name in _HELPERS:
      self._add(self._fields(args[1:], known), _HELPERS[name])
    elif owner == 'base' and name == 'require_within':
      low, high = (self._value(x) for x in args[1:3])
      if None not in (low, high):
        must = f'in [{_number(low)}, {_number(high)}]'
        self._add(self._fields(args[3:], known), must)
    elif owner == 'base' and name == 'require_choice':
      choices = self._value(args[2])
      if choices is not None:
        options = ', '.join(map(repr, choices))
        self._add(self._fields(args[1:2], known), f'one of {options}')
    elif owner == 'base' and name == 'require':
      must = self._text(args[2])
      if must and not _CONDITIONAL.match(must):
        self._add(self._fields(args[1:2], known), must.removeprefix('be '))
    elif name in self._functions and owner in ('self', name):
      function = self._functions[name]
      rest = function.args.vararg
      fields = {rest.arg: self._fields(args[1:], known)} if rest else {}
      self.read(function, fields)

  def _add(self, fields: list[str], must: str) -> None:
    self.found += [(field, must) for field in fields]

  def _fields(self, nodes: list[ast.expr], known: dict) -> list[str]:
    fields: list[str] = []
    for node in nodes:
      if isinstance(node, ast.Starred):
        node = node.value
      if isinstance(node, ast.Name):
        fields += known.get(node.id, [])
      elif isinstance(node, ast.Tuple):
        fields += self._fields(node.elts, known)
      elif isinstance(node, ast.Constant):
        fields.append(node.value)
    return fields

  def _value(self, node: ast.expr):
    """Returns the value of an expression of constants, else None."""
    try:
      code = compile(ast.Expression(node), '<schema>', 'eval')
      return eval(code, dict(self._names))
    except NameError:  # of a field or a local variable
      return None

  def _text(self, node: ast.expr) -> str | None:
    """Returns a requirement; in it `name={self.name}` becomes `name`."""
    if isinstance(node, ast.Constant):
      return node.value
    if not isinstance(node, ast.JoinedStr):
      return None
    text = ''
    for part in node.values:
      if isinstance(part, ast.Constant):
        text += part.value
        continue
      assert isinstance(part, ast.FormattedValue)
      value = self._value(part.value)
      if value is None:
        name = re.search(r'(\w+)=$', text)
        if name is None:
          return None
        text = text.removesuffix('=')
      elif part.format_spec is not None:
        spec = self._value(part.format_spec)
        text += format(value, spec)
      else:
        text += str(value)
    return text
