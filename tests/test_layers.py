"""The floor table: a file imports only from strictly lower floors.

`FLOORS` names every module and sub-package; inside a sub-package imports are
free. Imports are read from the syntax tree, those inside functions included.
"""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ('kernels', 'posttrain', 'configs', 'experiments')

# From the bottom up; one entry per package and per root module.
STOREYS = (
  ('kernels', 'posttrain.util'),
  ('posttrain', 'posttrain.schema', 'posttrain.types'),
  (
    'posttrain.chat',
    'posttrain.compilation',
    'posttrain.processes',
    'posttrain.tree',
  ),
  ('posttrain.hosts', 'posttrain.machine', 'posttrain.sharding'),
  ('posttrain.ops',),
  (
    'posttrain.data',
    'posttrain.losses',
    'posttrain.metrics',
    'posttrain.models',
  ),
  ('posttrain.scoring',),
  ('posttrain.checkpoints', 'posttrain.rewards'),
  ('posttrain.envs',),
  ('posttrain.decode',),
  ('posttrain.rollout',),
  ('posttrain.algorithms',),
  ('posttrain.training',),
  ('posttrain.pipeline',),
  ('posttrain.evaluation',),
  ('posttrain.config', 'posttrain.report'),
  ('posttrain.stage',),
  ('posttrain.serve',),
  ('posttrain.train',),
  (
    'posttrain.main',
    'posttrain.generate',
    'posttrain.evaluate',
    'posttrain.make_pairs',
    'posttrain.export',
  ),
  ('posttrain.api',),
)
FLOORS = {
  place: floor for floor, places in enumerate(STOREYS) for place in places
}
COMMANDS = FLOORS['posttrain.main']
# Packages that import numpy and the standard library, but no jax.
NUMPY_ROOMS = (
  'posttrain.types',
  'posttrain.schema',
  'posttrain.util',
  'posttrain.chat',
  'posttrain.processes',
  'posttrain.data',
  'posttrain.metrics',
  'posttrain.rewards',
  'posttrain.envs',
)
# Who alone may import what.
ONLY = {
  'kernels': ('kernels', 'posttrain.ops'),
  'flax': ('posttrain.models',),
  'experiments': ('experiments',),
  'tests': ('experiments',),
  'configs': ('configs', 'experiments'),
  'tensorflow': (),
  'torch': (),
  'ray': ('posttrain.rollout',),
}


def module_of(path):
  parts = path.relative_to(ROOT).with_suffix('').parts
  return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


FILES = {
  module_of(path): path
  for package in PACKAGES
  for path in sorted((ROOT / package).rglob('*.py'))
}


def place_of(module):
  """'posttrain.losses.rl' -> 'posttrain.losses'; others: the package."""
  parts = module.split('.')
  return '.'.join(parts[: 2 if parts[0] == 'posttrain' else 1])


def imports_of(module):
  """Yields (line, dotted name) for every import in a module."""
  for node in ast.walk(ast.parse(FILES[module].read_text())):
    if isinstance(node, ast.Import):
      for alias in node.names:
        yield node.lineno, alias.name
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f'{module}:{node.lineno}: a relative import'
      for alias in node.names:
        full = f'{node.module}.{alias.name}'
        ours = node.module.split('.')[0] in PACKAGES
        is_module = full in FILES or full in FLOORS or not ours
        yield node.lineno, full if is_module else node.module


def test_every_module_has_a_floor():
  places = {place_of(m) for m in FILES if m.startswith(('posttrain', 'kern'))}
  entry = {m for m in FILES if m.endswith('.__main__')}
  assert not (missing := places - FLOORS.keys() - entry), (
    f'give these a floor in FLOORS of {__file__}: {sorted(missing)}'
  )


@pytest.mark.parametrize(
  'module', [m for m in FILES if m.startswith(('posttrain', 'kernels'))]
)
def test_imports_go_down(module):
  place = place_of(module)
  floor = COMMANDS if module.endswith('.__main__') else FLOORS.get(place, 0)
  for line, name in imports_of(module):
    target = place_of(name)
    if target == place or name.split('.')[0] not in ('posttrain', 'kernels'):
      continue
    assert target in FLOORS, f'{module}:{line} imports {name}: no such place'
    assert FLOORS[target] < floor, (
      f'{module}:{line} (floor {floor}) imports {name} (floor '
      f'{FLOORS[target]}); it may import strictly lower floors'
    )


@pytest.mark.parametrize('module', FILES)
def test_some_packages_are_for_some_places_only(module):
  for line, name in imports_of(module):
    allowed = ONLY.get(name.split('.')[0])
    if allowed is not None and not module.startswith('experiments'):
      assert place_of(module) in allowed, (
        f'{module}:{line} imports {name}; only {allowed or "tests"} may'
      )


@pytest.mark.parametrize(
  'module', [m for m in FILES if place_of(m) == 'posttrain.losses']
)
def test_losses_see_no_config_but_their_own(module):
  own = 'posttrain.schema.objective'
  for line, name in imports_of(module):
    place = None if name == own else place_of(name)
    assert place not in ('posttrain.schema', 'posttrain.models'), (
      f'{module}:{line} imports {name}; a loss takes arrays and numbers'
    )


@pytest.mark.parametrize(
  'module', [m for m in FILES if not m.startswith('experiments')]
)
def test_only_util_commands_reads_the_command_line(module):
  readers = {name for _, name in imports_of(module)}
  if module != 'posttrain.util.commands':
    assert not readers & {'argparse', 'absl.flags', 'absl.app'}
    assert 'sys.argv' not in FILES[module].read_text()


# What recipes may import beside the schema, and who.
FOR_RECIPES = {
  'configs.common': (
    'posttrain.config.options',
    'posttrain.data.row_files',
    'posttrain.util.hub',
  ),
  'configs.arguments': (
    'posttrain.data.row_files',
    'posttrain.util.errors',
    'posttrain.util.hub',
  ),
}


@pytest.mark.parametrize('module', [m for m in FILES if m[:7] == 'configs'])
def test_recipes_import_little(module):
  tops = {'configs', 'ml_collections', *sys.stdlib_module_names}
  for line, name in imports_of(module):
    ok = name.split('.')[0] in tops or place_of(name) == 'posttrain.schema'
    assert ok or name in FOR_RECIPES.get(module, ()), (
      f'{module}:{line} imports {name}; a recipe is data'
    )


def loaded(modules, watched):
  """Imports the modules in one fresh process; says which brought what."""
  code = (
    'import importlib, sys\n'
    f'for name in {modules!r}:\n'
    '  importlib.import_module(name)\n'
    f'  for bad in {watched!r}:\n'
    '    if bad in sys.modules: sys.exit(f"{name} imports {bad}")\n'
  )
  return subprocess.run(
    [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True
  )


def test_numpy_rooms_import_no_jax():
  rooms = [m for m in FILES if place_of(m) in NUMPY_ROOMS]
  done = loaded(rooms, ['jax', 'jaxlib', 'tensorflow', 'torch'])
  assert done.returncode == 0, done.stderr


def test_importing_everything_brings_no_tensorflow_and_no_torch():
  modules = [
    m
    for m in FILES
    if m.startswith(('posttrain', 'configs'))
    and not m.endswith('__main__')
    # The SDK is an extra, which imports torch where there is one.
    and all(name.split('.')[0] != 'tinker' for _, name in imports_of(m))
  ]
  done = loaded(modules, ['tensorflow', 'torch', 'transformers'])
  assert done.returncode == 0, done.stderr
