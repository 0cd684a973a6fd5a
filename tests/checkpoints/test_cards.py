"""Model cards: front matter that YAML reads, and texts that are no markup."""

import dataclasses
import json

import pytest
import yaml

from configs import grpo
from posttrain import config, schema
from posttrain.checkpoints import cards, weights


@pytest.fixture
def run(tmp_path, monkeypatch):
  """Returns a function from options to the folder of a step of GRPO."""

  def make(rank=0, start='random'):
    folder = str(tmp_path / 'run' / 'checkpoints' / 'grpo' / '4')
    entry = dataclasses.replace(
      grpo.GRPO.envs['data'],
      env=schema.Rows(path='/mine/here/prompts.jsonl'),
      rewards={'data': schema.RewardFn(fn='a:b')},
    )
    stage = dataclasses.replace(
      grpo.GRPO, envs={'data': entry}, lora=schema.Lora(rank=rank)
    )
    options = config.to_dict(schema.Run(stages={'grpo': stage}))
    host = {'stage': 'grpo', 'step': 4, 'config': options, 'tokenizer': 'x'}
    host['model'] = options['model']
    lora = stage.lora if rank else None
    made = weights.Checkpoint(
      folder, 'run', schema.Model(), start, host, options['grpo'], lora
    )
    base = weights.Checkpoint(start, 'hf', schema.Model(), None)
    monkeypatch.setattr(weights, 'chain', lambda _: [folder, start])
    monkeypatch.setattr(weights, 'read', {folder: made, start: base}.get)
    return folder

  return make


def matter(*args):
  _, front, body = cards.text(*args).split('---\n', 2)
  return yaml.safe_load(front), body


def test_a_card_says_how_the_weights_were_trained(run, tmp_path):
  front, body = matter(run(), 'hf')
  assert front == {
    'library_name': 'transformers',
    'pipeline_tag': 'text-generation',
    'tags': ['posttrain', 'grpo'],
  }
  assert 'started from random weights, trained in 1 stage with' in body
  assert '`rows` of `prompts.jsonl` with the algorithm `grpo`' in body
  assert '| steps | `4` |' in body and '| trained weights | all |' in body
  assert 'Not measured at this step' in body
  assert '/mine' not in body and str(tmp_path) not in body


def test_an_adapter_names_its_base(run, tmp_path):
  snapshot = '/c/models--mine--model/snapshots/abc123'
  front, body = matter(run(8, snapshot), 'peft')
  assert front == {
    'library_name': 'peft',
    'base_model': 'mine/model',
    'base_model_relation': 'adapter',
    'pipeline_tag': 'text-generation',
    'tags': ['posttrain', 'grpo', 'lora'],
  }
  assert 'adapter that started from `mine/model` at commit `abc123`' in body
  assert '| trained weights | LoRA of rank `8` |' in body


def test_the_numbers_of_the_step_have_their_intervals(run, tmp_path):
  folder = run()
  row = {'stage': 'grpo', 'step': 4, 'loss/total': 3.0}
  row |= {'eval/pass_rate/data': 0.5, 'eval/length/data': None}
  row |= {'eval/pass_rate_low/data': 0.25, 'eval/pass_rate_high/data': 0.75}
  rows = [row | {'step': 2}, row | {'eval/suite/length': 12.5}]
  metrics = tmp_path / 'run' / 'metrics.jsonl'
  metrics.parent.mkdir(exist_ok=True)
  metrics.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  lines = cards.text(folder, 'hf').splitlines()
  start = lines.index('| metric | value | 95 % interval |') + 2
  assert lines[start : start + 3] == [
    '| `eval/pass_rate/data` | 0.5 | [0.25, 0.75] |',
    '| `eval/suite/length` | 12.5 |  |',
    '',
  ]
  metrics.write_text('no metrics\n')
  assert 'Not measured at this step' in cards.text(folder, 'hf')


def test_the_card_of_the_base_is_kept_beside(run, tmp_path):
  (tmp_path / 'README.md').write_text('the base')
  cards.write(run(), tmp_path, 'hf')
  assert (tmp_path / 'BASE_README.md').read_text() == 'the base'
