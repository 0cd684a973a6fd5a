"""README.md and docs/ name files, commands and attributes that exist."""

import ast
import importlib
import importlib.util
import json
import pathlib
import re
import types

import numpy as np
import pytest

from posttrain import algorithms, envs, schema
from posttrain.algorithms import streams
from posttrain.rollout import driver
from tests import test_layers
from tests.algorithms import two_turns
from tests.rollout import fakes

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = (
  'README.md',
  *sorted(f'docs/{path.name}' for path in (ROOT / 'docs').glob('*.md')),
)
# Pages that name no file of the repository.
WITHOUT_PATHS = (
  'docs/api.md',
  'docs/changelog.md',
  'docs/comparison.md',
  'docs/glossary.md',
  'docs/names.md',
  'docs/serving.md',
)
TOPS = 'configs|docs|experiments|kernels|posttrain|tests'
# Owner, as the pages write it -> module that has it, or that it is.
OWNERS = {
  'checks': 'posttrain.config.checks',
  'combine': 'posttrain.losses.combine',
  'components': 'posttrain.stage.components',
  'config': 'posttrain.config.load',
  'held_out': 'posttrain.metrics.held_out',
  'job': 'posttrain.stage.job',
  'learner': 'posttrain.stage.learner',
  'main': 'posttrain.main',
  'models': 'posttrain.stage.models',
  'objectives': 'posttrain.training.objectives',
  'pair_objectives': 'posttrain.training.pair_objectives',
  'pairs': 'posttrain.pipeline.pairs',
  'pipeline': 'posttrain.pipeline',
  'plan': 'posttrain.stage.plan',
  'panels': 'posttrain.report.panels',
  'progress': 'posttrain.stage.progress',
  'results': 'posttrain.report.results',
  'schema': 'posttrain.schema',
  'scoring': 'posttrain.scoring',
  'seconds': 'posttrain.report.seconds',
  'series': 'posttrain.report.series',
  'store': 'posttrain.checkpoints.store',
  'streams': 'posttrain.algorithms.streams',
  'tokens': 'posttrain.pipeline.tokens',
  'train': 'posttrain.train',
  'trust': 'posttrain.config.trust',
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
  mine = re.compile(r'NAME|/(listen|parrot|test_sapo)\.py$')
  paths = {path for path in paths if not mine.search(path)}
  assert paths or page in WITHOUT_PATHS
  assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_the_front_page_is_short_and_leads_to_the_pages():
  text = _text('README.md')
  assert 9_000 < len(text.encode()) < 11_000
  assert len(set(re.findall(r'\]\((docs/\w+\.md)\)', text))) > 15


def test_the_index_has_a_row_for_every_page():
  index = _text('docs/index.md')
  for page in PAGES[1:]:
    if page != 'docs/index.md':
      assert f']({page.removeprefix("docs/")}) | ' in index, page


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


@EACH_PAGE
def test_launchers_are_said_to_need_a_checkout(page):
  """The wheel has none of them: Python's error is all that one would get."""
  for module in ('experiments.launch', 'experiments.cluster'):
    before, found, _ = _text(page).partition(f'python -m {module} ')
    assert not found or 'checkout' in before[-600:], module


# Owners that are the names of options and files, too, on other pages.
CODE_PAGES = ('docs/design.md', 'docs/metrics.md')
OPTIONS = ('config', 'pairs')
SUFFIXES = ('py', 'md', 'json', 'jsonl')


@EACH_PAGE
def test_every_attribute_exists(page):
  names = re.findall(r'`(\w+)\.(\w+)[`(]', _text(page))
  missing = []
  for owner, name in names:
    is_option = owner in OPTIONS and page not in CODE_PAGES
    if owner not in OWNERS or is_option or name in SUFFIXES:
      continue
    place = importlib.import_module(OWNERS[owner])
    if owner[0].isupper():
      place = getattr(place, owner)
    if not hasattr(place, name):
      missing.append(f'{owner}.{name}')
  assert missing == []
  assert len(names) > 5 or page not in CODE_PAGES


@EACH_PAGE
def test_every_constant_is_in_the_file_that_the_page_names(page):
  """As in: `PANELS` of `posttrain/report/series.py`."""
  pairs = re.findall(
    rf'`([A-Z][A-Z_]+)`\s+(?:of|in)\s+`((?:{TOPS})/\S+?\.py)`', _text(page)
  )
  missing = [
    (name, path)
    for name, path in pairs
    if not re.search(rf'^ *{name}\b', (ROOT / path).read_text(), re.M)
  ]
  assert missing == []


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
  """Yields the paths of the file tree."""
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


def test_the_file_tree_equals_the_packages():
  paths = set(_tree(_text('docs/files.md')))
  assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []
  packages = {place.replace('.', '/') for place in test_layers.FLOORS}
  listed = {path.removesuffix('.py') for path in paths}
  assert packages - listed == set()


@pytest.fixture
def example(tmp_path, monkeypatch):
  """Returns a function: file name -> path of a page's example module."""
  monkeypatch.syspath_prepend(tmp_path)

  def write(name, page='docs/extending.md'):
    blocks = re.findall(r'```python\n(.*?)```', _text(page), re.S)
    (block,) = (x for x in blocks if re.match(rf'# \S*\b{name}', x))
    (tmp_path / name).write_text(block)
    return tmp_path / name

  return write


def test_the_environment_of_the_page_grades_its_demonstration(example):
  example('parrot.py')
  text = _text('docs/extending.md')
  (entry,) = re.findall(r"envs='(\{\s+\"parrot.*?)'", text, re.S)
  options = json.loads(entry)['parrot']['env']
  assert options.pop('type') == 'custom'
  env = envs.make('parrot', schema.CustomEnv(**options))
  (task,) = env.source('eval', 0).take(2)
  episode = env.make(task)
  assert episode.reset() == task.prompt and episode.grade().reward is None
  assert episode.step(task.demonstration[0]['content'], False).done
  assert episode.grade().reward == 1 and episode.grade().correct


def test_the_environment_with_tools_plays_an_episode(example):
  """A scripted policy writes a call that is wrong, a call, and the answer."""
  block = example('squares.py', 'docs/environments.md').read_text()
  entry, own = re.findall(
    r"envs='(\{\s+\"squares.*?)'", _text('docs/environments.md'), re.S
  )
  options = json.loads(entry)['squares']['env']
  assert json.loads(own)['squares']['env'] == options
  assert options.pop('type') == 'custom' and len(block.splitlines()) < 32
  env = envs.make('squares', schema.CustomEnv(**options))
  (task,) = env.source('train', 0).take(1)
  engine = fakes.Engine(
    {1: ['multiply({"a": 100})', 'multiply({"a": 100, "b": 100})', '10000']}
  )
  spec = driver.EpisodeSpec(1, env, task, 1.0, 64)
  (rollout,) = driver.Driver(engine, fakes.RENDERER, 2000).run([spec])
  assert [m['content'] for m in rollout.messages if m['role'] == 'tool'] == [
    "error: multiply must have the argument 'b': it is missing",
    '10000',
  ]
  assert rollout.score.reward == 1 and rollout.stop_reason == 'env_done'
  assert rollout.score.metrics['malformed'] == 1 / 3
  assert env.source('eval', 0).take(1)[0].id == '101'


def test_the_credit_function_of_the_page_gives_one_number_per_token(example):
  example('mine.py')
  cfg = schema.Custom(import_path='mine:above_median', kwargs={'scale': 2.0})
  credit = algorithms.make(cfg).assign(two_turns.group(1.0, 0.0))
  assert [set(x[two_turns.MASK]) for x in credit] == [{0.0}, {-2.0}]


def test_the_algorithm_of_the_page_weighs_the_other_messages(example):
  namespace = {}
  exec(example('listen.py').read_text(), namespace)
  cfg = types.SimpleNamespace(weight=0.1)
  samples = streams.finalize(
    namespace['Listen'](cfg), [two_turns.group(1.0, 0.0)]
  )
  for sample in samples:
    weights = np.where(sample.mask, 1, np.float32(0.1) * sample.is_content)
    weights[0] = 0
    np.testing.assert_array_equal(sample.ce_weights, np.float32(weights))
