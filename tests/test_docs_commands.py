"""Commands of README.md and docs/: flags and options that exist.

`python -m posttrain.main` is parsed as the command line does, and the recipe is
read with its overrides; nothing trains. docs/mistakes.md has its own test.
"""

import json
import re
import shlex

import pytest

from posttrain import main
from tests import qwen3
from tests.test_docs import PAGES, ROOT

START = 'python -m posttrain.main '
ENDS = ('&', '&&', '|', ';')
# The reader of this page adds these options; test_extending.py does so, too.
ADDED = ('listen', 'sapo', 'env=repeat', 'qwen2_0p5b')
FILES = {  # those of the commands, and of their examples
  'data.jsonl': [{'prompt': 'a', 'completion': 'b'}],
  'prompts.jsonl': [{'prompt': 'a', 'answer': 'b'}],
  'pairs.jsonl': [{'prompt': 'a', 'chosen': 'b', 'rejected': 'c'}],
}


def commands(text):
  """Yields the arguments of each command; a value may have several lines."""
  lines = text.splitlines()
  for i, line in enumerate(lines):
    for code in line.split(START)[1:]:
      code, rest = code.partition('`')[0], iter(lines[i + 1 :])
      while True:
        if code.endswith('\\'):
          code = f'{code[:-1]} {next(rest)}'
          continue
        try:
          words = shlex.split(code, comments=True)
          break
        except ValueError:  # a quotation that goes on
          code = f'{code}\n{next(rest)}'
      stop = [n for n, x in enumerate(words) if x in ENDS] or [len(words)]
      yield [re.sub(r'\$\w+', '1', x) for x in words[: stop[0]]]


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """The current folder, with a model and the files of the examples."""
  for name, rows in FILES.items():
    text = ''.join(json.dumps(row) + '\n' for row in rows)
    (tmp_path / name).write_text(text)
  for name in ('data.csv', 'pairs.parquet', 'PAIRS.jsonl'):
    (tmp_path / name).touch()
  (tmp_path / 'rewards.py').write_text('def short(completions, **columns): ...')
  (tmp_path / 'DIR').mkdir()
  (tmp_path / 'DIR' / 'config.json').write_text(json.dumps(qwen3.CONFIG))
  (tmp_path / 'configs').symlink_to(ROOT / 'configs')
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(tmp_path)
  return tmp_path


@pytest.mark.parametrize(
  'page', [page for page in PAGES if page != 'docs/mistakes.md']
)
def test_every_command_that_trains_can_be_read(page, folder):
  argvs = list(commands((ROOT / page).read_text()))
  for argv in argvs:
    if any('[' == x[0] for x in argv):  # a synopsis: [--dry_run]
      continue
    flags = main.PARSER.parse(argv)
    if flags.config in ('FILE', 'NAME') or any(x in str(argv) for x in ADDED):
      continue
    # `--config.seed=N`: a key that exists, with any value.
    overrides = [(k, '1' if v == 'N' else v) for k, v in flags.overrides]
    main.load(flags.config, overrides, check=False)
  assert argvs or page != 'README.md'
