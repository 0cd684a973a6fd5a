"""jinja2's sandbox with limits: the time and memory of a rendering are counted.

The sandbox of jinja2 keeps a template from what is outside of it, not from
loops within loops or from `'a' * 10**10`. Here a template also pays, from a
budget per rendering (`meter`):

1. operations: each run of the template's body, or of a loop's or macro's, costs
   its nodes, and what reads long values costs their length;
2. size: each text, list or number that is made must be smaller than a limit,
   and so must be the sum of all; where an operation multiplies, its operands
   are checked before (`guards`).

The budgets grow with the messages, so that the 21 templates in tests/chat stay
far below them. No clock is read: whether a template is refused depends on its
input only, and on whether the caller may leave: then no single operation may
take long, as none can be interrupted.
"""

import types
from collections.abc import Callable, Iterable, Sized
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import jinja2.utils

from posttrain.chat import formats, guards
from posttrain.chat import meter as meters

_SMALL, _SHORT = meters.SMALL, meters.SHORT
_STEPS = 4096  # of a search that its operator has paid for
_TOKENS = 10_000  # of a template's source
_SCOPES = ('_loop_vars', '_block_vars')  # arguments that jinja2 adds to calls
_PLAIN = frozenset((int, bool, float, type(None)))
_LARGE = 2**meters.BITS
_PLAIN_SUM = 4  # operands of +, besides constants, that are added at once


class _Namespace(jinja2.utils.Namespace):
  """A namespace; its text does not show its attributes, which may nest."""

  def __repr__(self) -> str:
    return '<Namespace>'


class _Generation(jinja2.ext.Extension):
  """`{% generation %}` marks trained text; ignored, `spans` finds it.

  The length of a source is bounded as well: some take quadratic time to
  compile.
  """

  tags = frozenset(['generation'])

  def filter_stream(self, stream):
    for count, token in enumerate(stream):
      if count > _TOKENS:
        raise jinja2.TemplateSyntaxError(
          f'it has more than {_TOKENS} tokens', token.lineno
        )
      yield token

  def parse(self, parser):
    next(parser.stream)
    return parser.parse_statements(('name:endgeneration',), drop_needle=True)


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
  """The sandbox; see the module."""

  intercepted_binops = frozenset(['*', '**', '%'])

  def __init__(self, filters: dict[str, Callable[..., Any]]):
    """Builds an environment.

    Args:
      filters: filters besides those of jinja2.
    """
    super().__init__(
      trim_blocks=True,
      lstrip_blocks=True,
      extensions=[_Generation, 'jinja2.ext.loopcontrols'],
      finalize=self.shown,
    )
    self.code_generator_class = _Generator
    del self.globals['lipsum']  # random
    self.globals['namespace'] = _Namespace
    self.filters = guards.filters({**self.filters, **filters})
    self.tests = guards.tests(self.tests)

  # The code of a template calls the methods below; see `_Generator`.

  def charge(self, operations: int) -> None:
    """Pays for one run of a body."""
    meters.current().charge(operations)

  def concat(self, texts: Iterable[str]) -> str:
    """Returns the output of a body, or of the template."""
    texts = list(texts)
    size = sum(map(len, texts))
    if size > _SMALL:
      meters.current().pay(size, 'the text')
    return ''.join(texts)

  def made(self, value: Any) -> Any:
    """Pays for a value that was made, and returns it."""
    kind = type(value)
    if kind is str:
      if len(value) > _SMALL:
        meters.current().pay(len(value))
      return value
    if kind is int:
      if -_LARGE < value < _LARGE:
        return value
    elif kind in _PLAIN:
      return value
    return meters.current().made(value)

  def read(self, value: Any) -> Any:
    """Pays for reading a value, and returns it."""
    kind = type(value)
    if kind not in _PLAIN and (kind is not str or len(value) > _SHORT):
      meters.current().read(value)
    return value

  def searched(self, values: Any, wanted: Any) -> Any:
    """Pays for `wanted in values`, and returns the values."""
    if type(values) is str and type(wanted) is str:
      if len(values) * len(wanted) > _STEPS:
        meters.current().compare(values, wanted, forward=True)
      return values
    self.read(wanted)
    return values if type(values) is dict else self.read(values)

  def keyed(self, value: dict[Any, Any]) -> Any:
    """Pays for a dict with computed keys, and returns it."""
    guards.check_keys(value)
    return self.made(value)

  def iterated(self, values: Any, operations: int) -> Any:
    """Pays for a loop's condition on each value."""
    meter = meters.current()
    if isinstance(values, Sized):
      meter.charge(operations * len(values))
      return values
    return meter.made(iter(values))

  def joined(self, values: tuple[Any, ...], join: Callable[..., str]) -> str:
    """Returns the values' texts, joined."""
    meter = meters.current()
    size = sum(map(meter.size, values))
    if size > meters.PAID:
      meter.fits(size, "the result of '~'")
      meter.charge(size >> 5)
    return self.made(join(values))

  def shown(self, value: Any) -> Any:
    """Returns a value's text, which is a part of the output."""
    if isinstance(value, str):
      return value
    meter = meters.current()
    meter.charge(10)
    size = meter.size(value)
    if size > _SMALL:
      meter.fits(10 * size, "a value's text")
      meter.charge(size >> 5)
    return meter.made(str(value))

  def call_binop(self, context, operator: str, left: Any, right: Any) -> Any:
    """Returns the result of an operator."""
    if operator == '%' and type(left) is int and type(right) is int:
      return left % right
    guards.operator(meters.current(), operator, left, right)
    return self.made(super().call_binop(context, operator, left, right))

  def call(__self, __context, __obj, *args: Any, **kwargs: Any) -> Any:
    """Calls a function, macro or method."""
    scopes = {name: kwargs.pop(name) for name in _SCOPES if name in kwargs}
    if type(__obj) is types.BuiltinMethodType:
      if kwargs or not guards.is_cheap(__obj, args):
        args = guards.call(meters.current(), __obj, args, kwargs)
      return __self.made(__obj(*args, **kwargs))
    if args or kwargs or type(__obj) is types.MethodType:
      args = guards.call(meters.current(), __obj, args, kwargs)
    return __self.made(
      super().call(__context, __obj, *args, **kwargs, **scopes)
    )

  def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
    """Returns `str.format` with checks of its widths."""
    format_text = super().wrap_str_format(value)
    if format_text is None:
      return None

    def call(*args, **kwargs):
      formats.check_fields(meters.current(), value.__self__, (args, kwargs))
      return format_text(*args, **kwargs)

    return call


class _Generator(jinja2.compiler.CodeGenerator):
  """The Python code of a template, with calls of `Environment`'s methods."""

  def __init__(self, *args, **kwargs):
    super().__init__(*args, **kwargs)
    self._costs: dict[int, int] = {}  # by the id of a body
    self._conditions: dict[int, int] = {}  # by the id of what a loop iterates

  def visit_Template(self, node, frame=None) -> None:
    self._costs = {id(body): _cost(body) for body in _bodies(node)}
    self._conditions = {
      id(loop.iter): _cost([loop.test])
      for loop in node.find_all(jinja2.nodes.For)
      if loop.test is not None
    }
    super().visit_Template(node, frame)

  def visit(self, node, *args, **kwargs):
    condition = self._conditions.get(id(node))
    if condition is None:
      return super().visit(node, *args, **kwargs)
    self.write('environment.iterated(')
    super().visit(node, *args, **kwargs)
    return self.write(f', {condition})')

  def visit_EvalContextModifier(self, node, frame) -> None:
    del frame
    self.fail("'autoescape' is for HTML", node.lineno)

  def blockvisit(self, nodes, frame) -> None:
    cost = self._costs.get(id(nodes))
    if cost is not None:
      self.writeline(f'environment.charge({cost})')
    super().blockvisit(nodes, frame)

  def _wrapped(self, method: str, visit, node, frame) -> None:
    self.write(f'environment.{method}(')
    visit(node, frame)
    self.write(')')

  def visit_List(self, node, frame) -> None:
    self._wrapped('made', super().visit_List, node, frame)

  def visit_Dict(self, node, frame) -> None:
    constant = all(_is_constant(pair.key) for pair in node.items)
    method = 'made' if constant else 'keyed'
    self._wrapped(method, super().visit_Dict, node, frame)

  def visit_Tuple(self, node, frame) -> None:
    if node.ctx == 'load':
      self._wrapped('made', super().visit_Tuple, node, frame)
    else:
      super().visit_Tuple(node, frame)

  def visit_Add(self, node, frame) -> None:
    operands = [node.right]
    left, variables = node.left, not _is_constant(node.right)
    while isinstance(left, jinja2.nodes.Add) and variables < _PLAIN_SUM:
      operands.append(left.right)
      variables += not _is_constant(left.right)
      left = left.left
    self.write('environment.made(')
    self.visit(left, frame)
    for operand in reversed(operands):
      self.write(' + ')
      self.visit(operand, frame)
    self.write(')')

  def visit_Sub(self, node, frame) -> None:
    self._wrapped('made', super().visit_Sub, node, frame)

  def visit_Concat(self, node, frame) -> None:
    self.write('environment.joined((')
    for arg in node.nodes:
      self.visit(arg, frame)
      self.write(', ')
    escapes = frame.eval_ctx.volatile or frame.eval_ctx.autoescape
    self.write(f'), {"markup_join" if escapes else "str_join"})')

  def visit_Getitem(self, node, frame) -> None:
    if isinstance(node.arg, jinja2.nodes.Slice):
      self._wrapped('made', super().visit_Getitem, node, frame)
    elif _is_constant(node.arg):
      super().visit_Getitem(node, frame)
    else:
      self.write('environment.getitem(')
      self.visit(node.node, frame)
      self.write(', ')
      self._wrapped('read', self.visit, node.arg, frame)
      self.write(')')

  def visit_Compare(self, node, frame) -> None:
    operands = [node.expr, *(operand.expr for operand in node.ops)]
    names = [operand.op for operand in node.ops]
    # A comparison with a constant ends with the constant's characters.
    short = (
      len(operands) == 2
      and names[0] not in _SEARCHES
      and any(map(_is_constant, operands))
    )
    self.write('(')
    wanted = ''  # the variable with the value that `in` looks for
    for name, operand, then in zip(
      ['', *names], operands, [*names, ''], strict=True
    ):
      if name:
        self.write(f' {jinja2.compiler.operators[name]} ')
      value = self.temporary_identifier() if then in _SEARCHES else ''
      if value:
        self.write(f'({value} := ')
      if name in _SEARCHES:
        self.write('environment.searched(')
        self.visit(operand, frame)
        self.write(f', {wanted})')
      elif short or value or _is_constant(operand):
        self.visit(operand, frame)
      else:
        self._wrapped('read', self.visit, operand, frame)
      if value:
        self.write(')')
      wanted = value
    self.write(')')


_SEARCHES = ('in', 'notin')
_REPEATED = (
  jinja2.nodes.For,
  jinja2.nodes.Macro,
  jinja2.nodes.CallBlock,
  jinja2.nodes.Block,
)
# About the time of a node, in a quarter of a microsecond; others are 1.
_COSTS = {
  jinja2.nodes.Add: 6,
  jinja2.nodes.Call: 30,
  jinja2.nodes.Compare: 3,
  jinja2.nodes.Concat: 6,
  jinja2.nodes.Dict: 6,
  jinja2.nodes.Filter: 20,
  jinja2.nodes.FilterBlock: 20,
  jinja2.nodes.Getattr: 8,
  jinja2.nodes.Getitem: 6,
  jinja2.nodes.List: 6,
  jinja2.nodes.Mod: 20,
  jinja2.nodes.Mul: 6,
  jinja2.nodes.Output: 10,
  jinja2.nodes.Pow: 20,
  jinja2.nodes.Test: 10,
  jinja2.nodes.Tuple: 6,
}


def _bodies(template) -> list[list]:
  """Returns a template's body and those within it that may run repeatedly."""
  bodies = [template.body]
  for node in template.find_all(_REPEATED):
    bodies.append(node.body)
    if isinstance(node, jinja2.nodes.For):
      bodies.append(node.else_)
  return bodies


def _cost(body) -> int:
  """Returns the cost of a body, without the bodies within it."""
  cost, left = 1, list(body)
  while left:
    node = left.pop()
    cost += _COSTS.get(type(node), 1)
    exclude = ('body', 'else_') if isinstance(node, _REPEATED) else ()
    left += node.iter_child_nodes(exclude=exclude)
  return cost


def _is_constant(node) -> bool:
  return isinstance(node, jinja2.nodes.Const)
