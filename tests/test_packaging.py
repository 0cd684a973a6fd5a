"""The installed packages and scripts, and the top level of the checkout."""

import ast
import email
import importlib
import importlib.util
import inspect
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

import kernels
import posttrain
from tests import test_layers

ROOT = pathlib.Path(__file__).resolve().parent.parent
VISIBLE = {*'posttrain configs kernels experiments tests docs'.split()}
VISIBLE |= {'setup.py', 'README.md', 'LICENSE'}


def tracked():
  """Paths of the files in the repository, or None outside a checkout."""
  done = subprocess.run(
    ['git', 'ls-files', '--cached', '--others', '--exclude-standard'],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  if done.returncode:
    pytest.skip('not a git checkout')
  return [name for name in done.stdout.splitlines() if (ROOT / name).is_file()]


@pytest.fixture(scope='module')
def setup():
  """The module setup.py."""
  pytest.importorskip('setuptools')
  spec = importlib.util.spec_from_file_location('setup', ROOT / 'setup.py')
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def test_versions_agree_and_stay_below_0_9(setup):
  assert setup.version() == posttrain.__version__ == kernels.__version__
  major, minor, _ = map(int, posttrain.__version__.split('.'))
  assert (major, minor) < (0, 9)
  assert kernels.OWNER == 'posttrain'
  body = ast.parse((ROOT / 'kernels' / '__init__.py').read_text()).body
  assert not [n for n in body if isinstance(n, ast.Import | ast.ImportFrom)]


def test_every_folder_with_code_is_a_package_of_the_installation(setup):
  folders = {
    '.'.join(pathlib.Path(name).parent.parts)
    for name in tracked()
    if name.endswith('.py') and name.startswith(setup.PACKAGES)
  }
  assert folders == set(setup.packages())


@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
  """A wheel of the repository, built without a network."""
  pytest.importorskip('setuptools', minversion='77')
  folder = tmp_path_factory.mktemp('wheel')
  for name in tracked():  # all of it, so that what is left out is seen
    if not name.startswith(('.', 'docs/', 'experiments/results/')):
      (folder / name).parent.mkdir(parents=True, exist_ok=True)
      shutil.copy(ROOT / name, folder / name)
  done = subprocess.run(
    [sys.executable, '-W', 'ignore', 'setup.py', '-q', 'bdist_wheel'],
    cwd=folder,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  (path,) = folder.glob('dist/*.whl')
  return zipfile.ZipFile(path)


def test_a_wheel_installs_three_packages_and_nothing_else(setup, wheel):
  names = wheel.namelist()
  tops = {name.split('/')[0] for name in names}
  info = f'posttrain-{posttrain.__version__}.dist-info'
  assert tops == {*setup.PACKAGES, info}
  for name in tracked():
    if name.startswith(setup.PACKAGES):
      assert name in names, f'{name} is missing'
  assert any(name.endswith('licenses/LICENSE') for name in names)


def test_the_metadata_of_a_wheel_are_complete(setup, wheel):
  (path,) = (x for x in wheel.namelist() if x.endswith('.dist-info/METADATA'))
  metadata = email.message_from_bytes(wheel.read(path))
  assert metadata['Version'] == posttrain.__version__
  assert metadata['Requires-Python'] == '>=3.11'
  license = metadata['License-Expression'] or metadata['License']
  assert license == 'Apache-2.0'
  assert set(metadata.get_all('Provides-Extra')) == set(setup.EXTRAS)


def test_console_scripts_are_commands_without_arguments(setup):
  scripts = dict(line.split(' = ') for line in setup.SCRIPTS)
  assert scripts.keys() == {'posttrain', 'posttrain-serve'}
  for path in scripts.values():
    module, _, name = path.partition(':')
    function = getattr(importlib.import_module(module), name)
    inspect.signature(function).bind()


MODULES = {  # by the names of their requirements
  'absl-py': 'absl',
  'orbax-checkpoint': 'orbax',
  'protobuf': 'google',
  'pyyaml': 'yaml',
}


def test_requirements_are_what_is_imported(setup):
  def modules(lines):
    names = [re.split('[<>=]', line)[0] for line in lines]
    return {MODULES.get(x, x.replace('-', '_')) for x in names}

  core = modules(setup.CORE)
  assert not core & {'kernels', 'tensorflow', 'torch', 'transformers'}
  imported = {
    name.split('.')[0]
    for module in test_layers.FILES
    if module.startswith(setup.PACKAGES)
    for _, name in test_layers.imports_of(module)
  }
  # tensorflow-datasets reads with array_record; orbax logs through absl.
  assert core - imported <= {'array_record', 'absl'}
  declared = core | modules(sum(setup.EXTRAS.values(), []))
  declared |= {*setup.PACKAGES, 'etils', *sys.stdlib_module_names}  # of orbax
  assert imported - declared <= {'experiments'}


def test_the_top_level_has_no_other_visible_files():
  tops = {pathlib.Path(name).parts[0] for name in tracked()}
  assert {top for top in tops if not top.startswith('.')} <= VISIBLE


def test_no_file_has_an_absolute_path_of_a_machine():
  places = '|'.join(('work', 'home', 'root', 'Users', 'opt/venvs'))
  paths = re.compile(rf'(?<![\w.:/<}}*-])/({places})/\w')
  lines = []
  for name in tracked():
    path = ROOT / name
    if path.suffix in ('.png', '.safetensors', '.npz', '.array_record'):
      continue
    for number, line in enumerate(
      path.read_text(errors='replace').splitlines(), 1
    ):
      if paths.search(line):
        lines.append(f'{name}:{number}: {line.strip()[:80]}')
  assert not lines, '\n'.join(lines)


TRANSFORMERS = """
import kernels
assert kernels.OWNER == 'posttrain', kernels.__file__
import torch, transformers
config = transformers.LlamaConfig(
    vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=1,
)
model = transformers.LlamaForCausalLM(config)
print(tuple(model(torch.tensor([[1, 2, 3]])).logits.shape))
"""


@pytest.mark.slow
def test_transformers_works_beside_our_kernels_package():
  for name in ('transformers', 'torch'):
    if importlib.util.find_spec(name) is None:
      pytest.skip(f'{name} is not installed')
  done = subprocess.run(
    [sys.executable, '-c', TRANSFORMERS],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.split('\n')[-2] == '(1, 3, 16)'


def test_the_package_lists_its_commands():
  shown = subprocess.run(
    [sys.executable, '-m', 'posttrain', '--help'],
    **{'capture_output': True, 'text': True, 'check': True},
  ).stdout.splitlines()
  for line in shown[:-1]:
    name = line.split()[2]
    module = importlib.import_module(name)
    if hasattr(module, '__path__'):
      module = importlib.import_module(f'{name}.__main__')
    assert module.__doc__.splitlines()[0] in line and callable(module.main)
