"""What a stage on pairs needs, and what it does without."""

import dataclasses
import json
import types

import pytest

from posttrain import main, schema
from posttrain.checkpoints import fingerprints
from posttrain.rollout import references as refs
from posttrain.stage import components, from_checkpoint
from posttrain.stage import models as stage_models
from posttrain.stage import pairs as stage_pairs

GONE = '{"type": "file", "path": "gone.jsonl", "eval_path": null}'
SERVED = {
  'type': 'sigmoid',
  'reference': {
    'type': 'endpoint',
    'name': 'ours',
    'base_url': 'http://127.0.0.1:9',
  },
}


def _load(*overrides):
  return main.load('configs/arithmetic_dpo.py:tiny', list(overrides))


def test_a_checkpoint_is_asked_without_the_pairs_that_it_learned_from():
  run = _load(('dpo.pairs', GONE))
  with pytest.raises(ValueError, match='config.dpo.pairs cannot be used'):
    components.make(run, 'dpo')
  asked = from_checkpoint.without_pairs(run, 'dpo')
  assert components.make(asked, 'dpo').envs.keys() == {'arithmetic'}
  assert from_checkpoint.without_pairs(run, 'sft') == run


def test_a_server_that_was_asked_about_pairs_may_be_gone(monkeypatch):
  """What it said of them is kept; nobody else asks it."""
  run = _load(('dpo.loss.preference', json.dumps(SERVED)))
  built = components.make(run, 'dpo')
  (reference,) = built.pipeline.references
  assert isinstance(reference, schema.Endpoint)
  monkeypatch.setattr(refs.References, 'endpoint', _never)
  stop = types.SimpleNamespace(wakes=lambda wake: None)
  stage_models.connect(run, run.stages['dpo'], built, None, None, stop)


def _never(*_):
  raise AssertionError('the server was asked')


def test_what_a_reference_says_depends_on_how_it_is_computed(monkeypatch):
  monkeypatch.setattr(fingerprints, 'of_weights', lambda folder: folder)
  load = types.SimpleNamespace(folders={'init': 'w'})

  def of(run):
    built = types.SimpleNamespace(model=run.model)
    return stage_pairs._fingerprint(run, 'dpo', built, load, '/d', 'init')

  run = _load()
  half = dataclasses.replace(run.model, dtype='bfloat16')
  stage = dataclasses.replace(run.stages['dpo'], lora=schema.Lora(rank=2))
  lora = dataclasses.replace(run, stages={**run.stages, 'dpo': stage})
  found = {of(run), of(dataclasses.replace(run, model=half)), of(lora)}
  assert len(found) == 3 and all(x.startswith('/d/w in ') for x in found)


def test_an_adapter_is_its_options_as_well(tmp_path):
  base, adapter = tmp_path / 'base', tmp_path / 'adapter'
  for folder, file in ((base, 'model'), (adapter, 'adapter_model')):
    folder.mkdir()
    (folder / f'{file}.safetensors').write_bytes(b'x')
  (base / 'config.json').write_text(
    json.dumps(
      {
        'model_type': 'llama',
        'architectures': ['LlamaForCausalLM'],
        'hidden_size': 16,
        'intermediate_size': 32,
        'num_hidden_layers': 1,
        'num_attention_heads': 2,
        'num_key_value_heads': 2,
        'vocab_size': 64,
        'rms_norm_eps': 1e-5,
        'rope_theta': 10000.0,
        'hidden_act': 'silu',
        'max_position_embeddings': 64,
        'tie_word_embeddings': True,
      }
    )
  )
  found = set()
  for alpha in (8, 64, 8):
    (adapter / 'adapter_config.json').write_text(
      json.dumps(
        {
          'peft_type': 'LORA',
          'base_model_name_or_path': str(base),
          'r': 4,
          'lora_alpha': alpha,
          'target_modules': ['q_proj'],
        }
      )
    )
    found.add(fingerprints.of_weights(str(adapter)))
  assert len(found) == 2
