"""docs/metrics.md names files and functions that exist."""

import importlib
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
TEXT = (ROOT / 'docs' / 'metrics.md').read_text()


def test_every_path_in_the_page_exists():
  paths = set(re.findall(r'posttrain/[\w/]+(?:\.py)?', TEXT))
  assert len(paths) > 10
  assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_every_attribute_in_the_page_exists():
  modules = {
    'combine': 'posttrain.losses.combine',
    'curves': 'posttrain.report.curves',
    'page': 'posttrain.report.page',
    'types': 'posttrain.types',
    'writers': 'posttrain.metrics.writers',
    'Environment': 'posttrain.pipeline.environment',
    'Evaluator': 'posttrain.evaluation.evaluator',
    'Objective': 'posttrain.training.base',
    'TokenComponents': 'posttrain.training.objectives',
  }
  names = re.findall(r'`(\w+)\.(\w+)[`(]', TEXT)
  names = [(owner, name) for owner, name in names if owner in modules]
  assert len(names) > 10
  for owner, name in names:
    place = importlib.import_module(modules[owner])
    if owner[0].isupper():
      place = getattr(place, owner)
    assert hasattr(place, name), (owner, name)
