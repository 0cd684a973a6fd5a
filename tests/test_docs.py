"""README.md and docs/ name files, commands and attributes that exist."""

import importlib.util
import json
import pathlib
import re
import types

import numpy as np
import pytest

from posttrain import schema
from posttrain.envs import registry
from posttrain.rollout import episodes
from tests import test_layers
from tests.algorithms import two_turns
from tests.rollout import fakes

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = ['README.md', *sorted(f'docs/{x.name}' for x in ROOT.glob('docs/*.md'))]
TOPS = 'configs|docs|experiments|kernels|posttrain|tests'
EACH_PAGE = pytest.mark.parametrize('page', PAGES)


def _text(page):
  return (ROOT / page).read_text()


@EACH_PAGE
def test_every_path_exists(page):
  text = re.sub(r'python -m \S+', '', _text(page))
  paths = set(re.findall(rf'(?<![\w/.])(?:{TOPS})/[\w./-]*\w', text))
  # NAME and the files of the examples are the reader's.
  mine = re.compile(r'NAME|/(listen|parrot|repeat)\.py$')
  paths = {path for path in paths if not mine.search(path)}
  assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


@EACH_PAGE
def test_every_command_is_a_module(page):
  names = set(
    re.findall(r'python -m ((?:posttrain|experiments)\S*)', _text(page))
  )
  names = {name.rstrip('`:,.;)') for name in names}
  specs = {name: importlib.util.find_spec(name) for name in names}
  assert [name for name, spec in specs.items() if spec is None] == []
  assert names or page != 'README.md'


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


def test_the_environment_with_tools_plays_an_episode(example):
  """A scripted policy writes a call that is wrong, a call, and the answer."""
  page = 'docs/environments.md'
  example('squares.py', page)
  entry, *_ = re.findall(r"envs='(\{\s+\"squares.*?)'", _text(page), re.S)
  options = json.loads(entry)['squares']['env']
  assert options.pop('type') == 'custom'
  env = registry.make('squares', schema.CustomEnv(**options))
  (task,) = env.source('train', 0).take(1)
  engine = fakes.Engine(
    {1: ['multiply({"a": 100})', 'multiply({"a": 100, "b": 100})', '10000']}
  )
  spec = episodes.EpisodeSpec(1, env, task, 1.0, 64)
  (rollout,) = episodes.Driver(engine, fakes.RENDERER, 2000).run([spec])
  error, product = (
    m['content'] for m in rollout.messages if m['role'] == 'tool'
  )
  assert error.startswith('error: multiply') and product == '10000'
  assert rollout.score.reward == 1 and rollout.stop_reason == 'env_done'
  assert rollout.score.metrics['malformed'] == 1 / 3


def test_the_algorithm_of_the_page_weighs_the_other_messages(example):
  namespace = {}
  exec(example('listen.py').read_text(), namespace)
  cfg = types.SimpleNamespace(alpha=0.1)
  samples = two_turns.finalize(
    namespace['Listen'](cfg), [two_turns.group(1.0, 0.0)]
  )
  for sample in samples:
    weights = np.where(sample.mask, 1, np.float32(0.1) * sample.is_content)
    weights[0] = 0
    np.testing.assert_array_equal(sample.ce_weights, np.float32(weights))
