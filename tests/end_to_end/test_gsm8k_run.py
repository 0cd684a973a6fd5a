"""The recipes for GSM8K, from a small directory with a real tokenizer."""

import json
import os
import pathlib
import shutil

import jax
import pytest

from posttrain import evaluate, export, main, schema, tree
from posttrain.checkpoints import reading, weight_folders, weights
from posttrain.metrics import estimates, writers
from posttrain.models import hf, transformer

DATA = os.environ.get('POSTTRAIN_DATA')
pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(
    DATA is None, reason='POSTTRAIN_DATA (folder of real files) is unset'
  ),
]
MODEL = schema.Model(
  vocab_size=50_304,
  layers=2,
  embed_dim=32,
  heads=2,
  kv_heads=1,
  head_dim=16,
  mlp_dim=64,
  qk_norm=True,
  rope_theta=1e6,
)
QUIET = ['--config.metrics.progress=False', '--config.compilation_cache=None']
CHATML = (
  "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}"
  '<|endoftext|>\n{% endfor %}'
  '{% if add_generation_prompt %}<|assistant|>\n{% endif %}'
)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Random weights under the real tokenizer, with a chat template."""
  path = tmp_path_factory.mktemp('hf') / 'small'
  hf.save(transformer.init(jax.random.key(0), MODEL), MODEL, path)
  file = pathlib.Path(DATA) / 'neox20b_tokenizer' / 'tokenizer.json'
  shutil.copy(file, path)
  for name, value in {
    'tokenizer_config': {'eos_token': '<|endoftext|>', 'chat_template': CHATML},
    'generation_config': {'eos_token_id': 0},
  }.items():
    (path / f'{name}.json').write_text(json.dumps(value))
  return path


@pytest.fixture(scope='module')
def runs(folder, tmp_path_factory):
  """SFT, what is exported of it, and GRPO with LoRA on top of that."""
  root = tmp_path_factory.mktemp('runs')
  assert (
    main.main(
      [
        f'--config=configs/gsm8k_sft.py:{folder},tiny',
        f'--workdir={root / "sft"}',
        '--config.sft.optim.lr=1e-2',
        *QUIET,
      ]
    )
    == 0
  )
  assert (
    export.main([f'--checkpoint={root / "sft"}', f'--folder={root / "hf"}'])
    == 0
  )
  assert (
    main.main(
      [
        f'--config=configs/gsm8k_grpo.py:{root / "hf"},tiny,lora',
        f'--workdir={root / "grpo"}',
        *QUIET,
      ]
    )
    == 0
  )
  return root


def rows(workdir):
  return writers.read(str(workdir / 'metrics.jsonl'))


def test_sft_on_the_real_file(folder, runs):
  steps = [row for row in rows(runs / 'sft') if 'loss/ce' in row]
  assert len(steps) == 2
  assert 9 < steps[0]['loss/ce'] < 13  # about log 50304: nothing is learned
  assert steps[1]['loss/ce'] < steps[0]['loss/ce']
  assert steps[0]['batch/ce_tokens'] > 200
  host = reading.read_host(str(runs / 'sft'))
  assert host['start'] == str(folder.resolve())
  assert host['config']['model']['dtype'] == 'bfloat16'


def test_grpo_with_lora_on_the_real_file(runs):
  steps = [row for row in rows(runs / 'grpo') if 'loss/rl' in row]
  assert len(steps) == 2
  for row in steps:
    assert row['batch/rl_tokens'] > 0 and row['rollout/errors/gsm8k'] == 0
    assert row['mismatch/abs_mean'] < 0.05  # bfloat16, and merged to decode
  adapter, made = weights.adapter(weight_folders.find(str(runs / 'grpo')))
  assert made.rank == 32 and len(tree.flat(adapter)) == 14


def test_the_prompts_are_those_of_the_template(runs):
  path = runs / 'sft/rollouts/sft_eval_000002.jsonl'
  answers = [json.loads(line) for line in path.read_text().splitlines()]
  assert len(answers) == 2
  for answer in answers:
    assert answer['correct'] is False and answer['formatted'] is False
    assert answer['prompt'].endswith('put the final answer in \\boxed{}.')
    assert float(answer['answer']) >= 0


def test_evaluation_alone_repeats_that_of_the_run(runs, capsys):
  last = rows(runs / 'grpo')[-1]
  assert evaluate.main([f'--checkpoint={runs / "grpo"}']) == 0
  *lines, values = capsys.readouterr().out.splitlines()
  values = json.loads(values)
  assert len(values.pop('suite')) == 4
  tasks = lines.index('held-out tasks: 2 of gsm8k')
  table = lines[tasks + 1 :]  # below the suite's answers
  assert values == {k: v for k, v in last.items() if k.startswith('eval/')}
  shown = [key for key in values if not estimates.is_bound(key, values)]
  assert len(table) == 1 + len(shown) and 'pass_rate' in ''.join(table)


def test_a_directory_is_evaluated_by_a_recipe(folder, tmp_path, capsys):
  argv = [f'--checkpoint={folder}']
  assert evaluate.main(argv) == 2
  assert '--config=FILE must be given' in capsys.readouterr().err
  argv += [
    f'--config=configs/gsm8k_sft.py:{folder},tiny',
    *QUIET,
    f'--answers={tmp_path / "answers.jsonl"}',
  ]
  assert evaluate.main(argv) == 0
  values = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert values['eval/pass_rate/gsm8k'] == 0.0
  assert len((tmp_path / 'answers.jsonl').read_text().splitlines()) == 2
