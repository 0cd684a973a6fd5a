"""docs/extending.md: its blocks are applied to a copy, and its commands run."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
PAGE = (ROOT / 'docs' / 'extending.md').read_text()
BLOCK = re.compile(r'^```(python|diff|bash)\n(.*?)^```', re.M | re.S)
TITLES = re.findall(r'^## Add an? (.+)$', PAGE, re.M)
FOLDERS = ('posttrain', 'kernels', 'configs', 'tests', 'experiments')


def blocks(title):
  """Returns the (language, text) blocks of a section."""
  text = re.split(rf'^## Add an? {title}$', PAGE, maxsplit=1, flags=re.M)[1]
  return BLOCK.findall(re.split(r'^## ', text, maxsplit=1, flags=re.M)[0])


def apply(text, folder):
  """Applies a diff block: the only place with its old lines gets the new."""
  head, *lines = text.splitlines()
  path = folder / head.strip('@ ')
  old, new = (
    ''.join(f'{line[1:]}\n' for line in lines if line[0] in signs)
    for signs in (' -', ' +')
  )
  content = path.read_text()
  assert f'\n{content}'.count(f'\n{old}') == 1, f'{path.name} has no one {old}'
  path.write_text(f'\n{content}'.replace(f'\n{old}', f'\n{new}')[1:])


@pytest.fixture(scope='module')
def copy(tmp_path_factory):
  """A copy of the repository with every block of the page."""
  folder = tmp_path_factory.mktemp('copy')
  for name in FOLDERS:
    ignored = shutil.ignore_patterns('__pycache__', 'results')
    shutil.copytree(ROOT / name, folder / name, ignore=ignored)
  shutil.copy(ROOT / '.pytest.ini', folder)
  for title in TITLES:
    for language, text in blocks(title):
      if language == 'diff':
        apply(text, folder)
      elif language == 'python':
        name = re.match(r'# ([\w./]+\.py)', text)[1]
        (folder / name).write_text(text)
  return folder


def run(command, folder):
  env = {
    name: value
    for name, value in os.environ.items()
    if name not in ('PYTHONPATH', 'POSTTRAIN_DATA')
  }
  env['JAX_DISABLE_MOST_OPTIMIZATIONS'] = '1'  # quicker to compile
  command = command.replace('python -m', f'{sys.executable} -m')
  done = subprocess.run(
    ['bash', '-ec', command],
    cwd=folder,
    env=env,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
  return done.stdout


def test_every_block_applies_and_the_options_exist(copy):
  assert len(TITLES) == 6
  code = """
from posttrain import schema
from posttrain.algorithms import TYPES
from posttrain.losses import rl
from posttrain.models import families
assert schema.Listen().alpha == 0.1 and 'listen' in TYPES
assert schema.Sapo().positive == 1 and 'sapo' in rl.TYPES
assert 'qwen2_0p5b' in schema.PRESETS and 'seed_oss' in families.FAMILIES
"""
  run(f'{sys.executable} -c "{code}"', copy)


@pytest.mark.slow
@pytest.mark.parametrize('title', TITLES[:-1])  # an option needs no command
def test_the_commands_of_a_section_run(title, copy):
  commands = [text for language, text in blocks(title) if language == 'bash']
  assert commands
  for text in commands:
    run(text, copy)
