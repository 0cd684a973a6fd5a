"""The generated pages of docs/, and the settings of the site."""

import pathlib
import re
import types

import pytest
import yaml

from experiments.docs import hook, options
from posttrain import schema

ROOT = pathlib.Path(__file__).resolve().parents[3]
DOCS = ROOT / 'docs'
# Pages that are made of other files of the repository.
NOTEBOOKS = {
  f'notebooks/{path.stem}.md'
  for path in (ROOT / 'experiments/examples').glob('*.ipynb')
}


def test_every_class_of_options_has_a_section_with_meanings():
  found = {section.options for section in options.sections()}
  classes = {
    value
    for value in vars(schema).values()
    if isinstance(value, type)
    and hasattr(value, '__dataclass_fields__')
    and value.__module__.startswith('posttrain.schema')
  }
  assert classes <= found
  rows = re.findall(r'^\| `\w+` \| .* \| (.*) \|$', options.page(), re.M)
  assert len(rows) > 200 and all(rows)


def test_the_keys_that_one_changes_first_exist():
  keys = re.findall(r'^\| `([\w.]+)` \|', options.HEAD, re.M)
  assert len(keys) > 15
  names = {
    f'{section.path}.{name}'.lstrip('.')
    for section in options.sections()
    for name in section.options.__dataclass_fields__
  }
  assert set(keys) <= names


def _pages(nav):
  if isinstance(nav, str):
    return [nav]
  values = nav.values() if isinstance(nav, dict) else nav
  return [page for value in values for page in _pages(value)]


@pytest.mark.parametrize(
  'path', sorted(DOCS.glob('*.md')), ids=lambda x: x.name
)
def test_the_hook_of_the_site_takes_every_page(path):
  page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri=path.name))
  assert hook.on_page_markdown(path.read_text(), page=page, config={}, files=[])


def test_the_navigation_has_every_page():
  nav = _pages(yaml.safe_load((ROOT / '.mkdocs.yml').read_text())['nav'])
  assert len(set(nav)) == len(nav)
  pages = {path.name for path in DOCS.glob('*.md')}
  assert pages | NOTEBOOKS | {'options.md'} == set(nav)


def test_the_page_of_results_leads_to_every_other_one():
  text = (DOCS / 'results.md').read_text()
  for path in (ROOT / hook.RESULTS).glob('*.md'):
    assert f'](../{hook.RESULTS}/{path.name})' in text, path.name
