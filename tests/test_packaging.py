"""The installed packages and scripts, and the top level of the checkout."""

import ast
import importlib
import importlib.util
import inspect
import pathlib
import re
import subprocess
import sys

import pytest

import kernels
import posttrain

ROOT = pathlib.Path(__file__).resolve().parent.parent
VISIBLE = {
  'setup.py',
  'posttrain',
  'configs',
  'kernels',
  'experiments',
  'tests',
  'README.md',
  'docs',
  'LICENSE',
}
EXTRAS = {
  'test',
  'serve',
  'hf',
  'notebook',
  'parity',
  'tensorboard',
  'launch',
  'openenv',
  'verifiers',
  'cluster',
}


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
  """The module setup.py, with the packages that setuptools would install."""
  setuptools = pytest.importorskip('setuptools')
  spec = importlib.util.spec_from_file_location('setup', ROOT / 'setup.py')
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  module.packages = setuptools.find_namespace_packages(
    str(ROOT), include=['posttrain*', 'kernels*', 'configs*', 'experiments*']
  )
  return module


def test_versions_agree_and_stay_below_0_9(setup):
  assert setup.version() == posttrain.__version__ == kernels.__version__
  major, minor, _ = map(int, posttrain.__version__.split('.'))
  assert (major, minor) < (0, 9)
  assert kernels.OWNER == 'posttrain'


def test_ruff_versions_of_setup_and_pre_commit_are_equal(setup):
  text = (ROOT / '.pre-commit-config.yaml').read_text()
  hooks = re.findall(r'ruff==[\d.]+', text)
  extras = [x for x in sum(setup.EXTRAS.values(), []) if x.startswith('ruff')]
  assert len(hooks) == 2 and {*hooks} == {*extras}


def test_kernels_init_imports_nothing():
  body = ast.parse((ROOT / 'kernels' / '__init__.py').read_text()).body
  assert not [n for n in body if isinstance(n, ast.Import | ast.ImportFrom)]


def test_every_folder_with_code_is_a_package_of_the_installation(setup):
  folders = {
    '.'.join(pathlib.Path(name).parent.parts)
    for name in tracked()
    if name.endswith('.py') and not name.startswith('tests')
  } - {''}
  assert folders <= set(setup.packages)


def test_console_scripts_are_commands_without_arguments(setup):
  scripts = dict(line.split(' = ') for line in setup.SCRIPTS)
  assert scripts == {
    'posttrain': 'posttrain.main:main',
    'posttrain-serve': 'posttrain.serve.__main__:main',
  }
  for path in scripts.values():
    module, _, name = path.partition(':')
    function = getattr(importlib.import_module(module), name)
    inspect.signature(function).bind()


@pytest.mark.parametrize('name', ['posttrain', 'posttrain-serve'])
def test_installed_console_scripts_return_the_exit_code(name):
  script = pathlib.Path(sys.executable).parent / name
  if not script.is_file():
    pytest.skip(f'{name} is not installed beside {sys.executable}')
  done = subprocess.run(
    [script, '--no_such_flag'], capture_output=True, text=True
  )
  assert done.returncode == 2 and done.stderr.count('\n') == 1
  assert done.stderr.startswith('error: arguments must be flags of this comm')


def test_extras_have_the_documented_names(setup):
  assert set(setup.EXTRAS) == EXTRAS
  names = {re.split('[<>=]', line)[0] for line in setup.CORE}
  assert not names & {'kernels', 'tensorflow', 'torch', 'transformers'}
  assert {'jax', 'flax', 'optax', 'orbax-checkpoint'} <= names


def test_every_import_of_the_program_is_declared(setup):
  import_names = {
    'absl-py': 'absl',
    'ml-collections': 'ml_collections',
    'orbax-checkpoint': 'orbax',
    'tensorflow-datasets': 'tensorflow_datasets',
  }
  lines = setup.CORE + sum(setup.EXTRAS.values(), [])
  names = [re.split('[<>=]', line)[0] for line in lines]
  declared = {import_names.get(name, name) for name in names}
  declared |= {'posttrain', 'kernels', 'configs', 'experiments'}
  declared |= {'etils'}  # orbax-checkpoint's paths
  for path in sorted((ROOT / 'posttrain').rglob('*.py')):
    for node in ast.walk(ast.parse(path.read_text())):
      modules = []
      if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
      elif isinstance(node, ast.ImportFrom):
        modules = [node.module]
      for name in modules:
        top = name.split('.')[0]
        assert top in declared or top in sys.stdlib_module_names, (
          f'{path.relative_to(ROOT)} imports {top}, which setup.py lacks'
        )


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
