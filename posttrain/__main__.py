"""Lists the commands: `python -m posttrain`."""

import ast
import pathlib

COMMANDS = 'main evaluate generate export make_pairs serve report'.split()


def lines() -> list[str]:
  """Returns a line per command: its name, and the first line of its docstring.

  Files are read, not imported.
  """
  folder, shown = pathlib.Path(__file__).parent, []
  for name in COMMANDS:
    path = folder / f'{name}.py'
    if not path.exists():  # a package
      path = folder / name / '__main__.py'
    text = ast.get_docstring(ast.parse(path.read_text('utf-8'))) or ''
    shown.append(f'python -m posttrain.{name:<11}{text.splitlines()[0]}')
  return shown


if __name__ == '__main__':
  print(*lines(), 'Each has --help.', sep='\n')
