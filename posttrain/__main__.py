"""Lists the commands: `python -m posttrain`."""

import ast
import importlib.util
import pathlib

COMMANDS = (
  'main',
  'evaluate',
  'generate',
  'export',
  'make_pairs',
  'serve',
  'report',
)


def lines() -> list[str]:
  """Returns a line per command: its name, and the first line of its text."""
  return [f'python -m posttrain.{name:<11}{_first(name)}' for name in COMMANDS]


def _first(name: str) -> str:
  """Returns the first line of a command's docstring, without importing it."""
  spec = importlib.util.find_spec(f'posttrain.{name}')
  assert spec is not None and spec.origin is not None, name
  path = pathlib.Path(spec.origin)
  if spec.submodule_search_locations:  # a package
    path = path.with_name('__main__.py')
  text = ast.get_docstring(ast.parse(path.read_text('utf-8'))) or ''
  return text.partition('\n')[0]


if __name__ == '__main__':
  print(*lines(), 'Each has --help.', sep='\n')
