"""The notebooks of experiments/examples/, run at their tiny size."""

import os
import pathlib
import re

import pytest

nbformat = pytest.importorskip('nbformat')
nbclient = pytest.importorskip('nbclient')

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / 'experiments/examples').glob('*.ipynb'))
WORDS = {  # words of the output, in this order
  'quickstart': (
    'What is',
    r'\boxed{',
    'pass rate',
    'after grpo',
    'report.html',
  ),
  'own_model': ('model.safetensors', 'held-out loss', 'right', 'exported: '),
  'sql_grpo': ("'ANSWER", 'random actions', 'after grpo', 'reloaded'),
}


@pytest.mark.slow
@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run_from_top_to_bottom(path, tmp_path):
  notebook = nbformat.read(path, as_version=4)
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
  cells = (cell for cell in notebook.cells if cell.cell_type == 'code')
  outputs = [output for cell in cells for output in cell.outputs]
  assert any('image/png' in output.get('data', {}) for output in outputs)
  text = ''.join(
    output.get('text') or output.get('data', {}).get('text/html', '')
    for output in outputs
  )
  words = map(re.escape, WORDS[path.stem])
  assert re.search('.*'.join(words), text, re.DOTALL), text
