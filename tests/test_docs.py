"""README.md and docs/ name files, commands and attributes that exist."""

import ast
import importlib
import importlib.util
import pathlib
import re
import types

import pytest

from posttrain import schema
from tests import test_layers

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = ('README.md', 'docs/design.md', 'docs/metrics.md')
TOPS = 'configs|docs|experiments|kernels|posttrain|tests'
# Owner, as the pages write it -> module that has it, or that it is.
OWNERS = {
  'checks': 'posttrain.config.checks',
  'combine': 'posttrain.losses.combine',
  'components': 'posttrain.stage.components',
  'config': 'posttrain.config.load',
  'curves': 'posttrain.report.curves',
  'job': 'posttrain.stage.job',
  'learner': 'posttrain.stage.learner',
  'main': 'posttrain.main',
  'models': 'posttrain.stage.models',
  'objectives': 'posttrain.training.objectives',
  'page': 'posttrain.report.page',
  'pair_objectives': 'posttrain.training.pair_objectives',
  'pairs': 'posttrain.pipeline.pairs',
  'pipeline': 'posttrain.pipeline',
  'plan': 'posttrain.stage.plan',
  'progress': 'posttrain.stage.progress',
  'schema': 'posttrain.schema',
  'scoring': 'posttrain.scoring',
  'store': 'posttrain.checkpoints.store',
  'streams': 'posttrain.algorithms.streams',
  'tokens': 'posttrain.pipeline.tokens',
  'train': 'posttrain.train',
  'types': 'posttrain.types',
  'writers': 'posttrain.metrics.writers',
  'Environment': 'posttrain.pipeline.environment',
  'Evaluator': 'posttrain.evaluation.evaluator',
  'Objective': 'posttrain.training.base',
  'TokenComponents': 'posttrain.training.objectives',
}
EACH_PAGE = pytest.mark.parametrize('page', PAGES)


def _text(page):
  return (ROOT / page).read_text()


@EACH_PAGE
def test_every_path_exists(page):
  text = re.sub(r'python -m \S+', '', _text(page))
  paths = set(re.findall(rf'(?<![\w/.])(?:{TOPS})/[\w./-]*\w', text))
  # NAME and the files of the examples are the reader's.
  mine = re.compile(r'NAME|/(listen|parrot)\.py$')
  paths = {path for path in paths if not mine.search(path)}
  assert len(paths) > 10
  assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


@EACH_PAGE
def test_every_link_leads_to_a_file(page):
  links = re.findall(r'\]\(([^)#:]+)\)', _text(page))
  folder = (ROOT / page).parent
  assert [link for link in links if not (folder / link).exists()] == []


@EACH_PAGE
def test_every_command_is_a_module(page):
  names = set(
    re.findall(r'python -m ((?:posttrain|experiments)\S*)', _text(page))
  )
  names = {name.rstrip('`:,.;)') for name in names}
  specs = {name: importlib.util.find_spec(name) for name in names}
  assert [name for name, spec in specs.items() if spec is None] == []
  assert names or page != 'README.md'


@pytest.mark.parametrize('page', PAGES[1:])  # the README has config keys
def test_every_attribute_exists(page):
  names = re.findall(r'`(\w+)\.(\w+)[`(]', _text(page))
  missing = []
  for owner, name in names:
    if owner not in OWNERS or name == 'py':
      continue
    place = importlib.import_module(OWNERS[owner])
    if owner[0].isupper():
      place = getattr(place, owner)
    if not hasattr(place, name):
      missing.append(f'{owner}.{name}')
  assert missing == []
  assert len(names) > 5


def test_the_table_of_floors_equals_the_enforced_one():
  rows = re.findall(r'^\| (\d+) \| (.+?) \|', _text('docs/design.md'), re.M)
  roots = ('posttrain', 'kernels')
  table = {
    int(floor): {
      name if name in roots else f'posttrain.{name}'
      for name in re.findall(r'`(\w+)`', names)
    }
    for floor, names in rows
  }
  assert table == dict(enumerate(map(set, test_layers.STOREYS)))
  assert [int(floor) for floor, _ in rows] == sorted(table, reverse=True)


def test_the_table_of_registries_names_unions_and_files_with_dicts():
  rows = re.findall(
    r'^\| `schema\.(\w+)` \| (?:`(\w+)` in )?`(\S+\.py)` \|$',
    _text('docs/design.md'),
    re.M,
  )
  assert len(rows) == 7
  for union, name, path in rows:
    assert isinstance(getattr(schema, union), types.UnionType)
    tree = ast.parse((ROOT / path).read_text())
    assert any(
      isinstance(node, ast.Assign)
      and isinstance(node.value, ast.Dict)
      and ast.unparse(node.targets[0]) == (name or 'TYPES')
      for node in tree.body
    ), f'{path} has no dict {name or "TYPES"}'


def _tree(text):
  """Yields the paths of the file tree in the README."""
  (block,) = re.findall(r'^```\n(configs/.*?)^```', text, re.M | re.S)
  folders = []
  for line in block.splitlines():
    names, *_ = re.split(r' {2,}', line.strip())
    depth = (len(line) - len(line.lstrip())) // 2
    for name in names.split(' '):
      path = '/'.join((*folders[:depth], name.rstrip('/')))
      yield path
      if name.endswith('/'):
        folders[depth:] = [name.rstrip('/')]


def test_the_file_tree_of_the_readme_equals_the_packages():
  paths = set(_tree(_text('README.md')))
  assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []
  packages = {place.replace('.', '/') for place in test_layers.FLOORS}
  listed = {path.removesuffix('.py') for path in paths}
  assert packages - listed == set()
