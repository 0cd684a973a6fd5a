"""Writes the generated pages of docs/.

    python -m experiments.docs

A test compares them with the schema, the names of other libraries and the
docstrings that they are from.
"""

import pathlib

from experiments.docs import llms, names, options, signatures

DOCS = pathlib.Path(__file__).resolve().parents[2] / 'docs'


def pages() -> dict[str, str]:
  """Returns the generated pages: file name -> text."""
  return {
    'options.md': options.page(),
    'names.md': names.page(DOCS / 'names.md'),
    'api.md': signatures.api_page(),
    'internals.md': signatures.internals_page(),
    'llms.txt': llms.page(DOCS / 'index.md'),
  }


def main() -> None:
  for name, text in pages().items():
    path = DOCS / name
    changed = not path.exists() or path.read_text() != text
    path.write_text(text)
    print(f'{"wrote" if changed else "unchanged"}: docs/{name}')


if __name__ == '__main__':
  main()
