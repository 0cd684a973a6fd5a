"""The tutorials of docs/: their blocks, run as one program of a few steps.

The example of docs/own_data.md as well.
"""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
# Page -> words of its output, in this order.
WORDS = {
  'tutorial_reward': (
    'held-out loss: ',
    'greedy answers that are right: ',
    'reward/right',
  ),
  'tutorial_preferences': (
    'held-out pairs ranked right: ',
    '2 loss/total ',
    'runs/dpo polite answers: ',
  ),
  'tutorial_environment': (
    "['guess 1 to 7', ",
    'Score(reward=',
    'sft 2 pass_rate ',
    'grpo 2 pass_rate ',
    'first guesses: ',
  ),
}
PAGES = sorted((ROOT / 'docs').glob('tutorial_*.md'))


def blocks(page):
  return re.findall(r'^```python\n(.*?)^```', page, re.M | re.S)


def program(page):
  """Returns the page's blocks, with two steps per stage."""
  text = '\n'.join(blocks(page))
  text, count = re.subn(
    r'^(\w+_STEPS, \w+_STEPS) = \d+, \d+$', r'\1 = 2, 2', text, flags=re.M
  )
  assert count == 1
  return text


def run(text, folder):
  """Runs a program in a folder; returns its exit code and output."""
  (folder / 'program.py').write_text(text)
  return subprocess.run(
    [sys.executable, 'program.py'],
    cwd=folder,
    env=os.environ
    | {'PYTHONPATH': str(ROOT), 'JAX_DISABLE_MOST_OPTIMIZATIONS': '1'},
    capture_output=True,
    text=True,
  )


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.stem)
def test_the_blocks_are_a_program(page):
  compile(program(page.read_text()), page.name, 'exec')


@pytest.mark.slow
@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.stem)
def test_tutorials_run_from_top_to_bottom(page, tmp_path):
  done = run(program(page.read_text()), tmp_path)
  assert done.returncode == 0, done.stderr[-3000:]
  place = 0
  for word in WORDS[page.stem]:
    place = done.stdout.find(word, place)
    assert place >= 0, f'{word!r} is missing, or too early:\n{done.stdout}'


# Makes DIR, of random weights, and prompts for the block.
FIRST = """
import pathlib
from posttrain import api
api.train(api.load('sft:tiny'), 'seed')
api.export('seed', 'DIR')
rows = ''.join(f'{{"prompt": "What is {i}?"}}\\n' for i in range(9))
pathlib.Path('prompts.jsonl').write_text(rows)
"""


@pytest.mark.slow
def test_the_example_from_python_runs(tmp_path):
  page = (ROOT / 'docs' / 'own_data.md').read_text()
  text = blocks(page.partition('## From Python')[2])[0]
  text = text.replace('prompts.jsonl', 'prompts.jsonl,tiny')
  text = text.replace("'grpo.steps': 50", "'grpo.steps': 2")
  done = run(FIRST + text, tmp_path)
  assert done.returncode == 0, done.stderr[-3000:]
  assert 'reward/short' in done.stdout
  assert (tmp_path / 'exported' / 'model.safetensors').exists()


@pytest.mark.slow
def test_the_loop_of_forty_lines_learns_its_reward(tmp_path):
  (text,) = blocks((ROOT / 'docs' / 'reading.md').read_text())
  assert len(text.splitlines()) <= 42
  done = run(text, tmp_path)
  assert done.returncode == 0, done.stderr[-3000:]
  rewards = [float(line.split()[1]) for line in done.stdout.splitlines()]
  assert rewards[0] < 0.1 and rewards[-1] > 0.9
