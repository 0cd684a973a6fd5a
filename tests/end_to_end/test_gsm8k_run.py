"""The recipes for GSM8K, from a small directory with a real tokenizer."""

import json
import os
import pathlib
import shutil

import jax
import pytest

from posttrain import evaluate, export, schema, tree
from posttrain.checkpoints import store, weights
from posttrain.metrics import writers
from posttrain.models import hf, transformer
from tests import toys

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


def train(recipe, workdir, *flags):
  assert toys.command(f'configs/{recipe}', workdir, *flags) == 0


@pytest.fixture(scope='module')
def runs(folder, tmp_path_factory):
  """SFT, what is exported of it, and GRPO with LoRA on top of that."""
  root = tmp_path_factory.mktemp('runs')
  sft, grpo, exported = (root / name for name in ('sft', 'grpo', 'hf'))
  train(f'gsm8k_sft.py:{folder},tiny', sft, '--config.sft.optim.lr=1e-2')
  argv = [f'--checkpoint={sft}', f'--folder={exported}']
  assert export.main(argv) == 0
  train(f'gsm8k_grpo.py:{exported},tiny,lora', grpo)
  return root


def rows(workdir):
  return writers.read(str(workdir / 'metrics.jsonl'))


def test_sft_on_the_real_file(folder, runs):
  steps = [row for row in rows(runs / 'sft') if 'loss/ce' in row]
  assert len(steps) == 2
  assert 9 < steps[0]['loss/ce'] < 13  # about log 50304: nothing is learned
  assert steps[1]['loss/ce'] < steps[0]['loss/ce']
  assert steps[0]['batch/ce_tokens'] > 200
  host = store.read_host(str(runs / 'sft'))
  assert host['start'] == str(folder.resolve())
  assert host['model']['dtype'] == 'bfloat16'


def test_grpo_with_lora_on_the_real_file(runs):
  steps = [row for row in rows(runs / 'grpo') if 'loss/rl' in row]
  assert len(steps) == 2
  for row in steps:
    assert row['batch/rl_tokens'] > 0 and row['rollout/errors/gsm8k'] == 0
    assert row['mismatch/abs_mean'] < 0.05  # bfloat16, and merged to decode
  adapter, made = weights.adapter(weights.find(str(runs / 'grpo')))
  assert made.rank == 32 and len(tree.flat(adapter)) == 14


def test_a_directory_is_evaluated_by_a_recipe(folder, tmp_path, capsys):
  argv = [f'--checkpoint={folder}']
  assert evaluate.main(argv) == 2  # it has no tasks of its own
  argv += [
    f'--config=configs/gsm8k_sft.py:{folder},tiny',
    '--config.compilation_cache=None',
    f'--answers={tmp_path / "answers.jsonl"}',
  ]
  assert evaluate.main(argv) == 0
  values = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert values['eval/pass_rate/gsm8k'] == 0.0
  assert len((tmp_path / 'answers.jsonl').read_text().splitlines()) == 2
