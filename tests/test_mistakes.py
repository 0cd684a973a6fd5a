"""Frequent mistakes: each message of docs/mistakes.md, as it is and its score.

A message scores one point for each of three listed texts that it contains: the
key or the file and row, the fault of the value, and the remedy or the allowed
values. Nothing but these substrings is judged; the page lists them.
"""

import pathlib
import re
import shlex
import sys

import huggingface_hub.constants
import pytest

from posttrain import main
from posttrain.stage import progress
from posttrain.util import exits, locks

PAGE = pathlib.Path(__file__).parents[1] / 'docs' / 'mistakes.md'
ROWS = '{{"prompt": "{0} + 1 =", "completion": "{1}"}}\n'
FILES = {
  'rows.jsonl': ''.join(ROWS.format(i, i + 1) for i in range(20)),
  'broken.jsonl': ROWS.format(3, 4) + '{"prompt": "4 + 1 =", "completion": 5\n',
  'long.jsonl': ''.join(f'{{"prompt": "{i}{"0" * 1500}"}}\n' for i in range(9)),
  'text.jsonl': '{"text": "3 + 1 = 4"}\n',
  'list.jsonl': '[\n{"prompt": "3 + 1 =", "completion": "4"}\n]\n',
  'rewards.py': (
    'def short(completions, **columns):\n'
    '  return [-len(text) / 100 for text in completions]\n\n\n'
    'def right(completions, anwser):\n'
    '  return [float(a in c) for a, c in zip(completions, anwser)]\n\n\n'
    'def single(completion, ground_truth):\n'
    '  return float(ground_truth in completion)\n'
  ),
}
# The title of a mistake -> what the message must contain for each point.
SCORES = {
  'An option by the name that another library gives it': (
    'config.grpo',
    "no option 'learning_rate'",
    "TRL's learning_rate is config.grpo.optim.lr",
  ),
  'A misspelt option': (
    'config.grpo.optim',
    "no option 'wieght_decay'",
    'did you mean config.grpo.optim.weight_decay?',
  ),
  'An option of a stage, without the stage': (
    'config',
    "no option 'optim'",
    'config.sft.optim.lr or config.grpo.optim.lr? The stages are sft, grpo',
  ),
  'A stage that the recipe does not have': (
    'config',
    "no stage 'rl'",
    'the stages are sft, grpo',
  ),
  'Nucleus sampling while training': (
    'config.grpo.envs.data.sampler',
    "no option 'top_p'",
    'generate and serve have it',
  ),
  'A flag that is an option of the config': (
    'arguments must be flags',
    "got '--learning_rate=1e-4'",
    "TRL's learning_rate is --config.STAGE.optim.lr",
  ),
  'A value of another type': (
    'config.grpo.steps',
    'must be of type int: got 1000.0 (float)',
    'write a whole number, as in 100',
  ),
  'A value that is not allowed': (
    'config.grpo.optim.schedule',
    "got 'cosine_with_restarts'",
    "one of ('constant', 'linear', 'cosine')",
  ),
  'An algorithm that does not exist': (
    'config.grpo.envs.arithmetic.algorithm',
    "got 'ppo'",
    '--config.grpo.loss.rl=clip does with the algorithms grpo and rloo',
  ),
  'A loss by the name of another library': (
    'config.grpo.loss.rl',
    "got 'dr_grpo'",
    '--config.grpo.loss.rl.aggregation=constant',
  ),
  'An environment that does not exist': (
    'config.grpo.envs.arithmetic.env',
    "got 'gms8k'",
    'did you mean gsm8k?',
  ),
  'A recipe that does not exist': (
    '--config',
    "got 'arithmetc'",
    'did you mean arithmetic?',
  ),
  'A stage left out, whose weights a later one begins with': (
    'config.grpo.init',
    "got 'stage:sft', but config.stages has none before it",
    'name a workdir of this recipe, --config.grpo.init=RUN',
  ),
  'A file that does not exist': (
    "got 'row.jsonl'",
    'a file of data must exist',
    'there is no file /data/row.jsonl; did you mean rows.jsonl?',
  ),
  'A row that is not JSON': (
    '/data/broken.jsonl:2',
    'got b\'{"prompt": "4 + 1 ="',
    'must be one JSON object',
  ),
  'A missing column': (
    '/data/rows.jsonl:1',
    "got columns ['completion', 'prompt']",
    "must have 'prompt', 'chosen' and 'rejected'",
  ),
  'A prompt that is longer than a row of the batch': (
    '/data/long.jsonl:1',
    'below batch.row_tokens=1024: got 1504 tokens',
    'raise row_tokens, or shorten the prompt',
  ),
  'A text without an answer': (
    '/data/text.jsonl:1',
    "got columns ['text']",
    "split it into 'prompt' and 'completion'",
  ),
  'A JSON list in place of lines': (
    '/data/list.jsonl:1',
    'looks like a JSON list',
    'JSONL has an object on each line',
  ),
  'A data set of the hub': (
    "the argument after the recipe's name",
    "got 'trl-lib/Capybara', which is no directory",
    "datasets.load_dataset('trl-lib/Capybara'",
  ),
  'A function that does not exist': (
    'config.grpo.envs.data.rewards.shrt.fn',
    "rewards has no 'shrt'",
    'did you mean short?',
  ),
  'An argument that no row has': (
    'config.grpo.envs.data.rewards.right.fn',
    "got ['anwser']",
    'did you mean answer for anwser? Each is a list',
  ),
  'A function of a single answer': (
    'config.grpo.envs.data.rewards.single.fn',
    "got ['completion', 'ground_truth']",
    'did you mean completions for completion? Each is a list',
  ),
  'A model that is not here': (
    "the argument after the recipe's name",
    "got 'Qwen/Qwen3-0.6B', which is no directory",
    '`hf download Qwen/Qwen3-0.6B`',
  ),
  'LoRA of random weights': (
    'config.grpo.lora.rank',
    "must be 0 where init is 'random': got 16",
    '--config=RECIPE:DIR,data.jsonl',
  ),
  'A micro-batch that is smaller than a row': (
    'config.sft.batch.micro_batch_tokens',
    'must be a multiple of row_tokens=2048: got 512',
    '2048 is one row, the least',
  ),
  'Completions that are as long as a row': (
    'config.grpo.envs.data.sampler.max_tokens',
    'must be below batch.row_tokens=1024',
    'raise row_tokens above both',
  ),
  'A mesh that does not divide the devices': (
    'config.mesh',
    'must multiply to the 8 devices: got data=-1, fsdp=3, tensor=1',
    'fsdp must be one of [1, 2, 4, 8]',
  ),
  'Groups of one rollout': (
    'config.grpo.envs.data.group_size',
    'got 1; a rollout',
    "must be at least 2 for algorithm 'grpo'",
  ),
  'A run continued with other options': (
    'config.sft.optim.lr',
    '(0.001 -> 1e-05)',
    'use another --workdir, or undo the change',
  ),
  'A folder that another run uses': (
    '--workdir must have one run at a time',
    'in use by process 4711 on node7',
    'wait for its end, or stop it',
  ),
}


def _sections():
  """Yields (title, command, message) of the page."""
  pattern = r'\*\*(.+?)\*\*\n\n```bash\n(.+?)\n```\n\n```text\n(.+?)\n```'
  return re.findall(pattern, PAGE.read_text(), re.S)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Yields the folder in which the commands run."""
  folder = tmp_path_factory.mktemp('mistakes')
  with pytest.MonkeyPatch.context() as patch:
    patch.chdir(folder)
    patch.syspath_prepend(str(folder))
    patch.delitem(sys.modules, 'rewards', raising=False)
    for name, text in FILES.items():
      (folder / name).write_text(text)
    for name in ('sft', 'busy'):
      workdir = folder / 'runs' / name
      workdir.mkdir(parents=True)
    progress.write_config(main.load('sft:small,rows.jsonl'), 'runs/sft')
    (folder / 'runs' / 'sft' / 'metrics.jsonl').touch()
    with locks.hold('runs/busy', '--workdir'):
      yield folder
    sys.modules.pop('rewards', None)


def _run(command, folder, capsys):
  """Returns the exit code, stdout, and stderr with the names of the page."""
  *program, name = shlex.split(command)[:3]
  assert (program, name) == (['python', '-m'], 'posttrain.main')
  code = main.main(shlex.split(command)[3:])
  out, err = capsys.readouterr()
  cache = huggingface_hub.constants.HF_HUB_CACHE
  err = err.replace(str(folder), '/data').replace(cache, '/data/hub')
  running = 'process 4711 on node7, since 2026-11-25T09:00:00+00:00'
  err = re.sub(r'process \d+ on \S+, since [^;]+', running, err)
  return code, out, err


def _points(title, text):
  return sum(part in text for part in SCORES[title])


@pytest.mark.parametrize(
  ('title', 'command', 'message'), _sections(), ids=lambda x: x[:40]
)
def test_a_mistake_is_the_line_of_the_page(
  title, command, message, folder, capsys
):
  code, out, err = _run(command, folder, capsys)
  assert (code, out) == (exits.USAGE, '')
  (line,) = err.splitlines()
  assert line == message
  assert 'Traceback' not in line and len(line) < 800
  assert _points(title, line) >= 2


def test_the_page_lists_the_texts_that_score():
  _, table = PAGE.read_text().split('## Scores')
  rows = re.findall(r'^\| (.+?) \| (.+) \|$', table, re.M)[1:]
  texts = {
    title: tuple(re.findall(r'`` (.+?) ``|`(.+?)`', cells))
    for title, cells in rows
    if title != '---'
  }
  texts = {k: tuple(a or b for a, b in x) for k, x in texts.items()}
  assert texts == SCORES


def test_the_mean_score_is_nearly_full():
  sections = _sections()
  assert {title for title, _, _ in sections} == set(SCORES)
  assert len(sections) == len(SCORES) >= 20
  scores = [_points(title, text) for title, _, text in sections]
  assert sum(scores) / len(scores) >= 2.8
