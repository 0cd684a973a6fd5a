"""The pages of functions: signatures and docstrings, read from the source.

Nothing is imported: `ast` has signatures and docstrings alike, and the text is
the same under every version of Python.
"""

import ast
import inspect
import pathlib
import re
import textwrap
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]
WIDTH = 80
_NAMED = re.compile(r'([\w*.]+(?:, [\w*.]+)*): (.*)')  # an entry of Args
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef

API_HEAD = """# Python API

The commands as functions, for notebooks and programs. [Own data](own_data.md)
shows them at work, and [internals](internals.md) has the functions inside of a
run. Generated from the docstrings of `posttrain/api.py` by
`python -m experiments.docs`.
"""
INTERNALS_HEAD = """# Internals

The signatures on which the parts of the program meet, in the order of the data:
what an environment, an algorithm or a loss of yours implements or calls.
[Design](design.md) says how they fit together, and [extending](extending.md)
adds to each. Generated from docstrings by `python -m experiments.docs`.
"""
# Title -> the names of a module; a class comes with its public methods.
INTERNALS = (
  ('Host types', 'types', ('Task', 'StepOut', 'Score', 'Rollout', 'Sample')),
  ('Environments', 'envs/base', ('Env', 'Episode')),
  ('The decode engine', 'decode/engine', ('Engine',)),
  ('Algorithms', 'algorithms/base', ('Algorithm', 'Scorer')),
  ('Packing', 'data/packing', ('pack',)),
  ('The transformer', 'models/transformer', ('trunk', 'head', 'init')),
  ('Logprobs', 'losses/logprobs', ('linear',)),
  ('The component rl', 'losses/rl', ('loss', 'denominator')),
  ('The component ce', 'losses/ce', ('loss',)),
  ('The component ref_kl', 'losses/ref_kl', ('loss',)),
  ('The train step', 'training/step', ('make_train_step', 'TrainStep')),
  ('Checkpoints', 'checkpoints/store', ('Checkpointer',)),
  ('Pipelines', 'pipeline/base', ('StageData', 'Pipeline')),
)


def api_page() -> str:
  """Returns the page of `posttrain.api`, as Markdown."""
  tree, lines = _read('api')
  parts = [API_HEAD, _fence(_example(tree))]
  for node in tree.body:
    if _is_public(node):
      parts += _entry(node, '##', lines)
  return '\n\n'.join(part.strip() for part in parts) + '\n'


def internals_page() -> str:
  """Returns the page of the main signatures, as Markdown."""
  parts = [INTERNALS_HEAD]
  for title, module, names in INTERNALS:
    tree, lines = _read(module)
    nodes = {getattr(x, 'name', ''): x for x in tree.body}
    parts += [f'## {title}', f'`posttrain/{module}.py`']
    for name in names:
      parts += _entry(nodes[name], '###', lines)
  return '\n\n'.join(part.strip() for part in parts) + '\n'


def _read(module: str) -> tuple[ast.Module, list[str]]:
  text = (ROOT / 'posttrain' / f'{module}.py').read_text()
  return ast.parse(text), text.splitlines()


def _is_public(node: ast.AST) -> bool:
  named = isinstance(node, FUNCTION | ast.ClassDef)
  return named and not node.name.startswith('_')


def _example(tree: ast.Module) -> str:
  """Returns the indented block of a module's docstring."""
  lines = (ast.get_docstring(tree) or '').splitlines()
  block = [x for x in lines if x.startswith('    ') or not x]
  return textwrap.dedent('\n'.join(block)).strip()


def _fence(code: str) -> str:
  return f'```python\n{code}\n```'


def _entry(node: ast.AST, level: str, lines: list[str]) -> Iterator[str]:
  """Yields the Markdown of a function, or of a class with its methods."""
  if isinstance(node, FUNCTION):
    yield f'{level} {node.name}'
    yield _fence(_signature(node))
    yield from _docstring(node)
    return
  assert isinstance(node, ast.ClassDef)
  yield f'{level} {node.name}'
  yield from _docstring(node)
  fields = _fields(node, lines)
  if fields:
    yield _fence(fields)
  for item in node.body:
    if isinstance(item, FUNCTION) and item.name == '__init__':
      yield _fence(_signature(item, node.name))
      yield from _docstring(item)
    elif isinstance(item, FUNCTION) and _is_public(item):
      yield f'{level}# {node.name}.{item.name}'
      yield _fence(_signature(item))
      yield from _docstring(item)


def _fields(node: ast.ClassDef, lines: list[str]) -> str:
  """Returns the source of a class's fields, with their comments."""
  fields = [x for x in node.body if isinstance(x, ast.AnnAssign)]
  if not fields:
    return ''
  first, last = fields[0].lineno - 1, fields[-1].end_lineno
  while lines[first - 1].lstrip().startswith('#'):
    first -= 1
  return textwrap.dedent('\n'.join(lines[first:last]))


def _signature(node: ast.AST, name: str = '') -> str:
  """Returns the call of a function with its annotations, in 80 columns."""
  assert isinstance(node, FUNCTION)
  if any(ast.unparse(x) == 'property' for x in node.decorator_list):
    return f'{node.name}: {ast.unparse(node.returns)}' if node.returns else ''
  args = [x for x in _arguments(node.args) if x != 'self']
  result = f' -> {ast.unparse(node.returns)}' if node.returns else ''
  result = '' if name else result
  line = f'{name or node.name}({", ".join(args)}){result}'
  if len(line) <= WIDTH:
    return line
  body = ''.join(f'  {arg},\n' for arg in args)
  return f'{name or node.name}(\n{body}){result}'


def _arguments(args: ast.arguments) -> list[str]:
  plain = args.posonlyargs + args.args
  defaults = [None] * (len(plain) - len(args.defaults)) + list(args.defaults)
  texts = [_argument(*x) for x in zip(plain, defaults, strict=True)]
  if args.vararg:
    texts.append(f'*{_argument(args.vararg, None)}')
  elif args.kwonlyargs:
    texts.append('*')
  named = zip(args.kwonlyargs, args.kw_defaults, strict=True)
  texts += [_argument(*x) for x in named]
  if args.kwarg:
    texts.append(f'**{_argument(args.kwarg, None)}')
  return texts


def _argument(arg: ast.arg, default: ast.expr | None) -> str:
  text = arg.arg
  if arg.annotation is not None:
    text += f': {ast.unparse(arg.annotation)}'
  if default is not None:
    text += f'{" = " if arg.annotation else "="}{ast.unparse(default)}'
  return text


def _docstring(node: ast.AST) -> Iterator[str]:
  """Yields a docstring's paragraphs; its sections become lists."""
  assert isinstance(node, FUNCTION | ast.ClassDef)
  text = inspect.cleandoc(ast.get_docstring(node) or '')
  for block in re.split(r'\n\s*\n', text):
    head, _, rest = block.partition('\n')
    if head in ('Args:', 'Raises:', 'Returns:', 'Attributes:'):
      yield f'**{head.removesuffix(":")}**'
      yield '\n'.join(_items(textwrap.dedent(rest)))
    elif head == 'References:':
      yield f'References: {_escape(" ".join(rest.split()))}'
    elif block.startswith(' '):
      yield f'```text\n{textwrap.dedent(block)}\n```'
    elif block:
      yield _escape(block)


def _items(text: str) -> Iterator[str]:
  """Yields a list item for each entry; continued lines are indented."""
  entries: list[str] = []
  for line in text.splitlines():
    if line.startswith(' ') and entries:
      entries[-1] += f' {line.strip()}'
    else:
      entries.append(line)
  named = [
    re.fullmatch(r'([\w*.]+(?:, [\w*.]+)*): (.*)', entry) for entry in entries
  ]
  if not any(named):
    yield _escape(' '.join(entries))
    return
  for entry, match in zip(entries, named, strict=True):
    if match:
      yield f'- `{match[1]}`: {_escape(match[2])}'
    else:
      yield f'- {_escape(entry)}'


def _escape(text: str) -> str:
  """Escapes what Markdown would read as markup, outside of code."""
  parts = text.split('`')
  parts[::2] = [re.sub(r'([<*_|\[\]])', r'\\\1', x) for x in parts[::2]]
  return '`'.join(parts)
