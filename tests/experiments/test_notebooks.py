"""The notebooks of experiments/examples/, run at their tiny size."""

import ast
import importlib
import os
import pathlib
import re
import types

import pytest

from posttrain.data import row_files

nbformat = pytest.importorskip('nbformat')
nbclient = pytest.importorskip('nbclient')

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / 'experiments/examples').glob('*.ipynb'))
WORDS = {  # words of the output, in this order
  'quickstart': (
    'Open in Colab',
    'for this machine: jax',
    'parameters',
    'What is',
    r'\boxed{',
    'pass rate',
    'untrained',
    'after sft',
    'after grpo',
    'report.html',
    'What is 38 + 47?',
  ),
  'own_model': (
    'Open in Colab',
    'for this machine: jax',
    'Is ',
    'model.safetensors',
    'held-out loss',
    '[1.0, 0.0]',
    'right',
    'reward/right',
    'exported: ',
  ),
  'sql_grpo': (
    'Open in Colab',
    'for this machine: jax',
    'parameters',
    "'ANSWER",
    'random weights',
    'pass rate',
    'random actions',
    'after sft',
    'after grpo',
    'report.html',
    'reloaded',
  ),
}


def read(path):
  return nbformat.read(path, as_version=4)


def code(notebook):
  return [cell for cell in notebook.cells if cell.cell_type == 'code']


def test_every_notebook_has_expected_words():
  assert {path.stem for path in NOTEBOOKS} == WORDS.keys()


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_have_no_outputs_and_short_cells(path):
  notebook = read(path)
  nbformat.validate(notebook)
  assert notebook.metadata.kernelspec.name == 'python3'
  assert notebook.cells[0].source.startswith('# ')
  for cell in code(notebook):
    assert not cell.outputs and cell.execution_count is None, cell.id
  for cell in notebook.cells:
    assert not cell.metadata, f'{cell.id} has {cell.metadata}'
    assert len(cell.source.splitlines()) <= 25, f'{cell.id} is long'


def test_notebooks_install_from_the_same_variable():
  """Without it they say what to set; its link opens the notebook itself."""
  first, *others = (read(path) for path in NOTEBOOKS)
  for path, notebook in zip(NOTEBOOKS, (first, *others), strict=True):
    link, install = code(notebook)[:2]
    assert f'blob/main/experiments/examples/{path.name}' in link.source
    expected = code(first)[0].source.replace(NOTEBOOKS[0].name, path.name)
    assert link.source == expected
    assert install.source == code(first)[1].source
    assert '<repository-url>' not in path.read_text()


def test_the_notebook_of_a_model_of_yours_reads_rows_of_any_kind(tmp_path):
  (path,) = (x for x in NOTEBOOKS if x.stem == 'own_model')
  table = tmp_path / 'rows.csv'
  table.write_text('prompt,completion\nq,a\n')
  namespace = {'ROWS': str(table), 'row_files': row_files}
  (cell,) = (x.source for x in code(read(path)) if 'row_files.obj' in x.source)
  exec(cell[cell.index('rows = ') :], namespace)
  assert namespace['rows'] == [{'prompt': 'q', 'completion': 'a'}]


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_use_names_that_exist(path):
  """Each `module.name` of a package of ours is there."""
  source = '\n'.join(cell.source for cell in code(read(path)))
  tree = ast.parse(re.sub(r'(?m)^( *)[%!].*', r'\1pass', source))
  modules = {}
  for node in ast.walk(tree):
    if isinstance(node, ast.ImportFrom) and node.module.startswith('posttrain'):
      for alias in node.names:
        try:
          found = importlib.import_module(f'{node.module}.{alias.name}')
        except ModuleNotFoundError:
          found = getattr(importlib.import_module(node.module), alias.name)
        if isinstance(found, types.ModuleType):
          modules[alias.asname or alias.name] = found
  assert modules
  for node in ast.walk(tree):
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
      if module := modules.get(node.value.id):
        assert hasattr(module, node.attr), f'{node.value.id}.{node.attr}'


@pytest.mark.slow
@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run_from_top_to_bottom(path, tmp_path):
  notebook = read(path)
  client = nbclient.NotebookClient(
    notebook,
    timeout=600,
    kernel_name='python3',
    resources={'metadata': {'path': str(tmp_path)}},
  )
  client.execute(
    env={  # an exception in a cell is raised here
      **os.environ,
      'POSTTRAIN_TINY': '1',
      'PYTHONPATH': str(ROOT),
      'IPYTHONDIR': str(tmp_path / '.ipython'),
    }
  )
  if folder := os.environ.get('NOTEBOOK_OUTPUTS'):  # the site shows them
    nbformat.write(notebook, pathlib.Path(folder) / path.name)
  outputs = [output for cell in code(notebook) for output in cell.outputs]
  assert any('image/png' in output.get('data', {}) for output in outputs)
  text = ''.join(
    output.get('text') or output.get('data', {}).get('text/html', '')
    for output in outputs
  )
  place = 0
  for word in WORDS[path.stem]:
    place = text.find(word, place)
    assert place >= 0, f'{word!r} is missing, or too early, in:\n{text}'
