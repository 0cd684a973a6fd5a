"""Frequent mistakes: one line that names the key or the file, and the value."""

import json
import shlex
import sys

import pytest

from posttrain import main
from posttrain.util import disk, errors

ROWS = '{{"prompt": "{0} + 1 =", "completion": "{1}"}}\n'
TEACHER = {
  'model_type': 'qwen3',
  'hidden_act': 'silu',
  'head_dim': 16,
  'hidden_size': 64,
  'intermediate_size': 128,
  'num_attention_heads': 4,
  'num_hidden_layers': 2,
  'num_key_value_heads': 2,
  'rms_norm_eps': 1e-6,
  'rope_theta': 10000.0,
  'tie_word_embeddings': True,
  'vocab_size': 600,
}
FILES = {
  'rows.jsonl': ''.join(ROWS.format(i, i + 1) for i in range(20)),
  'broken.jsonl': ROWS.format(3, 4) + '{"prompt": "4 + 1 =", "completion": 5\n',
  'long.jsonl': ''.join(f'{{"prompt": "{i}{"0" * 1500}"}}\n' for i in range(9)),
  'asked.jsonl': '{"question": "3 + 1 =", "answer": "4"}\n',
  'text.jsonl': '{"text": "3 + 1 = 4"}\n',
  'pointer.jsonl': 'version https://git-lfs.github.com/spec/v1\nsize 9\n',
  'excel.csv': 'prompt;completion\n3 + 1 =;4\n',
  'spider/database/pets/pets.sqlite': '',
  'teacher/config.json': json.dumps(TEACHER),
  'teacher/tokenizer.json': '{}',
  'rewards.py': (
    'def short(completions, **columns):\n'
    '  return [-len(text) / 100 for text in completions]\n\n\n'
    'def other(completions, solution):\n  return []\n\n\n'
    'def right(completions, anwser):\n'
    '  return [float(a in c) for a, c in zip(completions, anwser)]\n\n\n'
    'def words(completions, **columns):\n'
    '  return ["good" for _ in completions]\n\n\n'
  ),
}
GRPO = 'grpo:small,rows.jsonl,rewards:short'
MISTAKES = (
  ('arithmetic --config.optim.lr=1e-4', 'config.sft.optim.lr'),
  ('arithmetic --learning_rate=1e-4', '--config.STAGE.optim.lr'),
  ('arithmetic --config.grpo.steps=1e3', 'config.grpo.steps'),
  ('arithmetic --config.grpo.envs.arithmetic.algorithm=a2c', "'a2c'"),
  ('arithmetc', '--config', "'arithmetc'", 'did you mean arithmetic?'),
  ("""arithmetic --config.stages='("grpo",)'""", 'config.grpo.init'),
  ('sft:small,row.jsonl', "'row.jsonl'", 'did you mean rows.jsonl?'),
  ('sft:small,broken.jsonl', '/broken.jsonl:2', '4 + 1 ='),
  ('dpo:small,rows.jsonl', '/rows.jsonl:1', "'chosen'"),
  ('sft:small,text.jsonl', '/text.jsonl:1', "['text']"),
  (
    'grpo:small,long.jsonl,rewards:short',
    '/long.jsonl:',
    'row_tokens=1505 holds',
  ),
  (
    'grpo:small,rows.jsonl,rewards:shrt',
    'envs.data.rewards.shrt.fn',
    'did you mean short?',
  ),
  (
    'grpo:small,rows.jsonl,rewards.py:short --config.seed=1',
    "got 'rewards.py:short'",
    'no .py',
    'or installed; did you mean rewards:short?',
  ),
  ('grpo:small,rows.jsonl,./rewards.py:short', "such as 'rewards:short'"),
  (
    'grpo:small,asked.jsonl,rewards:short',
    "['answer', 'question']",
    """columns='{"question": "prompt"}'""",
  ),
  ('sft:run/busy,rows.jsonl', 'did you mean runs/busy?'),
  ('arithmetic sft.steps=2', '--config.sft.steps=2'),
  ('arithmetic --train_dataset=x', '--config=RECIPE:DIR,data.jsonl'),
  ('grpo:small,rows.jsonl,rewards:other', '"OWN": "solution"'),
  (
    'sft:small,rows.jsonl --config.batch.row_tokens=8',
    "too_long='truncate'",
    'row_tokens=',
    'of 18 the prompt alone is too long',
  ),
  (
    'opd:small,rows.jsonl,teacher=teacher',
    'algorithm.reference',
    'take one with the same tokenizer.json',
  ),
  (
    'sql_llm:tiny --config.sft.envs.sql.env.data.questions=rows.jsonl '
    '--config.sft.envs.sql.env.data.databases=spider',
    'data.databases',
    '/spider/database',
  ),
  ('sft:small,pointer.jsonl', 'pointer.jsonl is a pointer', 'git lfs pull'),
  ('sft:small,excel.csv', 'commas between them'),
  ('train.yaml', "'train.yaml'", 'YAML is not read', 'sft:DIR,data.jsonl'),
  ('arithmetic --config.model.dtype=bf16', 'did you mean bfloat16?'),
  (
    'arithmetic --config.model.rope_scaling.kind=dynamic '
    '--config.model.rope_scaling.original_length=16',
    'config.model.rope_length',
    'above original_length=16: got None',
  ),
  ('arithmetic --config.grpo.epochs=3', 'RECIPE:DIR,data.jsonl,epochs=3'),
  ('arithmetic --config.mesh.fsdp=9', 'so 9 or a multiple; lower one'),
  ('grpo:small,rows.jsonl,rewards:words', 'rewards.words', "got 'good'"),
  ('grpo:small,rows.jsonl,rewards:right', 'rewards.right.fn', "'anwser'"),
  ('sft:Qwen/Qwen3-0.6B,rows.jsonl', 'hf download Qwen/Qwen3-0.6B'),
  ('sft:small,rows.jsonl --config.init=run', "'run'", 'did you mean runs?'),
  (
    'sft:small,rows.jsonl --config.envs.data.env.eval_path=row.jsonl '
    '--config.envs.data.env.eval_fraction=0.0',
    "'row.jsonl'; did you mean rows.jsonl?",
  ),
  (
    'sft:small,rows.jsonl --config.steps=5 --config.optim.warmup_steps=5',
    'config.sft.optim.warmup_steps',
    '5 updates',
  ),
  (
    f'{GRPO} --config.batch.row_tokens=256',
    'config.grpo.envs.data.sampler.max_tokens',
    'of --config=grpo or a default',
  ),
  (f'{GRPO} --config.lora.rank=16', 'config.grpo.lora.rank', '16'),
  (
    f'{GRPO} --config.envs.data.sampler.max_tokens=4096',
    'config.grpo.envs.data.sampler.max_tokens',
    'row_tokens=1024',
  ),
  (f'{GRPO} --config.envs.data.group_size=1', 'data.group_size', 'got 1'),
  # Data that are missing: where they are from, and their form.
  (
    'gsm8k_sft:tiny --config.envs.gsm8k.env.path=none/train.jsonl',
    'config.sft.envs.gsm8k.env.path',
    'github.com/openai/grade-school-math',
    '`#### N`',
  ),
  (
    'sql_llm:tiny --config.sft.envs.sql.env.data.questions=q.json',
    'data.questions',
    'https://yale-lily.github.io/spider',
  ),
  (
    'gsm8k_sft:tiny --config.envs.gsm8k.env.path=$NO_DATA/train.jsonl',
    'the variable in $NO_DATA/train.jsonl',
  ),
  (
    'sft:small,rows.jsonl --config.tokenizer.path=tokenizer.json',
    'config.tokenizer.path',
    'hf download OWNER/NAME tokenizer.json',
  ),
  ('sft:small,none/row.jsonl', "got 'none/row.jsonl'; its parts are"),
  (
    'sft:small,rows.jsonl --config.envs.data.env.path=none/row.jsonl',
    "its rows have 'prompt' and 'completion'",
  ),
)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Yields the folder in which the commands run."""
  folder = tmp_path_factory.mktemp('mistakes')
  with pytest.MonkeyPatch.context() as patch:
    patch.chdir(folder)
    patch.syspath_prepend(str(folder))
    patch.delitem(sys.modules, 'rewards', raising=False)
    for name, text in FILES.items():
      (folder / name).parent.mkdir(parents=True, exist_ok=True)
      (folder / name).write_text(text)
    (folder / 'runs' / 'busy').mkdir(parents=True)
    with disk.lock('runs/busy', '--workdir'):
      yield folder
    sys.modules.pop('rewards', None)


@pytest.mark.parametrize(
  ('words', 'parts'),
  [
    *((f'{words} --dry_run', parts) for words, *parts in MISTAKES),
    ('sft:small,rows.jsonl --workdir=runs/busy', ['--workdir', 'runs/busy']),
  ],
)
@pytest.mark.usefixtures('folder')
def test_a_mistake_is_one_line(words, parts, capsys):
  assert main.main(shlex.split(f'--config={words}')) == errors.USAGE
  out, err = capsys.readouterr()
  (line,) = err.splitlines()
  assert not out and line.startswith('error: ')
  assert all(part in line for part in parts), line
