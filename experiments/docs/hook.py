"""The steps of `mkdocs build` that the settings in .mkdocs.yml name.

1. `on_files` adds the generated pages, those of experiments/results and the
   notebooks.
2. `on_page_markdown` makes links and lists, which git hosts show as they are,
   fit the site.

The pages of docs/ link to `../experiments/results/NAME.md` and `../README.md`.
In the site the former are pages; other files of the repository are links only
if the variable REPOSITORY_URL names a place to read them at.
"""

import ast
import json
import os
import pathlib
import re
import sys
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]
# mkdocs takes back the path that a hook adds once the hook is loaded, so the
# modules below are imported here.
sys.path.insert(0, str(ROOT))

from experiments.docs import options  # noqa: E402
from posttrain.config import names  # noqa: E402

RESULTS = 'experiments/results'
NOTEBOOKS = 'notebooks'
SCHEMA = 'posttrain/schema/__init__.py'  # a page on the site
# Wide tables have room, and scroll rather than break keys into two lines.
STYLE = """.md-grid { max-width: 76rem; }
.md-typeset table:not([class]) code {
  overflow-wrap: break-word;
  word-break: normal;
}
.md-typeset img { background: white; }
@media screen and (max-width: 44.9375em) {
  .md-typeset table:not([class]) td, .md-typeset table:not([class]) th {
    min-width: 3rem;
    padding: 0.5em 0.6em;
  }
  .md-typeset table:not([class]) td:last-child { min-width: 12rem; }
}
"""
_ITEM = re.compile(r' *([-*]|\d+\.) ')


def on_files(files, config):
  """Adds the pages that are not in docs/."""
  from mkdocs.structure import files as mkdocs_files  # the extra `docs`

  hidden = mkdocs_files.InclusionLevel.NOT_IN_NAV

  def add(uri, **content):
    file = mkdocs_files.File.generated(config, uri, inclusion=hidden, **content)
    files.append(file)

  add('assets/site.css', content=STYLE)
  add('options.md', content=options.page())
  for path in sorted((ROOT / RESULTS).iterdir()):
    if path.suffix == '.md':
      add(f'{RESULTS}/{path.name}', content=path.read_text())
    elif path.suffix == '.png':
      add(f'{RESULTS}/{path.name}', abs_src_path=str(path))
  for path in sorted((ROOT / 'experiments/examples').glob('*.ipynb')):
    add(f'{NOTEBOOKS}/{path.stem}.md', content=_notebook(path))
  return files


def _notebook(path: pathlib.Path) -> str:
  """Returns a notebook as Markdown, with outputs if it has been run.

  Cells in git have none: the executed copy is read from the folder that the
  variable NOTEBOOK_OUTPUTS names.
  """
  place = f'`jupyter lab experiments/examples/{path.name}` runs this page.'
  executed = pathlib.Path(os.environ.get('NOTEBOOK_OUTPUTS', '')) / path.name
  if executed.is_file():
    path, place = executed, f'{place} Its outputs are those of one run.'
  parts = []
  for cell in json.loads(path.read_text())['cells']:
    source = ''.join(cell['source'])
    code = cell['cell_type'] == 'code'
    parts.append(f'```python\n{source}\n```' if code else source)
    parts += _outputs(cell.get('outputs', ()))
  return '\n\n'.join((parts[0], place, *parts[1:]))


def _outputs(outputs: Sequence[dict]) -> list[str]:
  """Returns a cell's images, and its texts as a terminal shows them.

  The pieces of a stream are one text, in which a progress bar is one line.
  """
  streams, shown = {}, []
  for output in outputs:
    data = output.get('data', {})
    text = ''.join(output.get('text') or data.get('text/plain', ''))
    if 'image/png' in data:
      image = ''.join(data['image/png']).replace('\n', '')
      shown.append(f'![output](data:image/png;base64,{image})')
    elif 'name' in output:
      streams[output['name']] = streams.get(output['name'], '') + text
    else:
      shown.append(f'```text\n{text}\n```')
  texts = []
  for text in streams.values():
    text = re.sub(r'\x1b\[[0-9;]*[A-Za-z]', '', text.replace('\r\n', '\n'))
    lines = [x.rstrip('\r').split('\r')[-1] for x in text.split('\n')]
    texts.append('\n'.join(lines).strip('\n'))
  return [f'```text\n{text}\n```' for text in texts if text] + shown


def on_page_markdown(markdown, *, page, config, files):
  """Returns the text of a page with the site's links and lists."""
  folder = pathlib.PurePosixPath(page.file.src_uri).parent
  rows = [
    f'| `{key}` | {", ".join(f"`{x}`" for x in theirs.split())} |'
    for key, theirs in names.NAMES.items()
  ]
  table = '\n'.join(['| ours | elsewhere |', '| --- | --- |', *rows])
  markdown = markdown.replace('<!-- the table of names -->', table)
  head, title, list_ = markdown.partition('## The files')
  if page.file.src_uri == 'reading.md':
    markdown = head + title + _with_lines(list_)
  if str(folder) == RESULTS:
    markdown = markdown.replace('](../../docs/', '](../../')
  else:
    markdown = markdown.replace(f'](../{RESULTS}/', f']({RESULTS}/')
    markdown = markdown.replace(f'](../{SCHEMA})', '](options.md)')
    markdown = re.sub(r'\[([^\]]*)\]\(\.\./([^)]+)\)', _repository, markdown)
  return _lists(markdown)


def _with_lines(markdown: str) -> str:
  """Returns the reading list with the lines of each class and function.

  Raises:
    KeyError: a file has no such class or function.
  """
  lines = {}

  def place(match: re.Match) -> str:
    if not match[1].endswith('.py'):
      return f'{match[0]} ({lines[match[1]]})'
    lines.clear()
    text = (ROOT / match[1]).read_text()
    nodes = [('', ast.parse(text))]
    for name, parent in nodes:
      for node in ast.iter_child_nodes(parent):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
          lines[name + node.name] = f'{node.lineno}-{node.end_lineno}'
          nodes.append((f'{name}{node.name}.', node))
    return f'{match[0]} ({len(text.splitlines())} lines)'

  return re.sub('`([^`]+)`', place, markdown)


def _repository(match: re.Match) -> str:
  """Returns a link to a file of the repository, or its text alone."""
  text, path = match.groups()
  url = os.environ.get('REPOSITORY_URL')
  return f'[{text}]({url.rstrip("/")}/blob/main/{path})' if url else text


def _lists(markdown: str) -> str:
  """Indents the contents of lists by four columns, as Python-Markdown needs.

  Git hosts want two, and no empty line before a list.
  """
  lines, inside, fence = [], False, ''
  for line in markdown.splitlines():
    item = not fence and _ITEM.match(line)
    if item and not inside and lines and lines[-1].strip():
      lines.append('')
    if item:
      inside = True
    elif not fence and line and not line.startswith(' '):
      inside = False
    indent = len(line) - len(line.lstrip(' '))
    if inside and indent and not fence.startswith('`'):
      line = ' ' * min(indent, 2) + line
    elif inside and fence:
      line = f'  {line}'
    lines.append(line)
    mark = re.match(r' *(```+)', line)
    if mark:
      fence = '' if fence else mark[1]
  return '\n'.join(lines)
