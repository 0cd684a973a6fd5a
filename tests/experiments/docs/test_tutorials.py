"""The tutorials of docs/: their blocks, run as one program of a few steps."""

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
    '2 reward ',
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


def program(page):
  """Returns the page's blocks, with two steps per stage."""
  text = '\n'.join(re.findall(r'^```python\n(.*?)^```', page, re.M | re.S))
  text, count = re.subn(
    r'^(\w+_STEPS, \w+_STEPS) = \d+, \d+$', r'\1 = 2, 2', text, flags=re.M
  )
  assert count == 1
  return text


def test_every_tutorial_has_words():
  assert [page.stem for page in PAGES] == sorted(WORDS)


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.stem)
def test_the_blocks_are_a_program(page):
  compile(program(page.read_text()), page.name, 'exec')


@pytest.mark.slow
@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.stem)
def test_tutorials_run_from_top_to_bottom(page, tmp_path):
  (tmp_path / 'tutorial.py').write_text(program(page.read_text()))
  done = subprocess.run(
    [sys.executable, 'tutorial.py'],
    cwd=tmp_path,
    env=os.environ
    | {'PYTHONPATH': str(ROOT), 'JAX_DISABLE_MOST_OPTIMIZATIONS': '1'},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  place = 0
  for word in WORDS[page.stem]:
    place = done.stdout.find(word, place)
    assert place >= 0, f'{word!r} is missing, or too early:\n{done.stdout}'
