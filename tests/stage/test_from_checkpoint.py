"""Pairs of a stage on a restart, and without its training data."""

import dataclasses
import json
import types

import pytest

from posttrain import main, schema
from posttrain.checkpoints import weights
from posttrain.rollout import frozen_models
from posttrain.stage import from_checkpoint, models, pairs, preflight
from tests import qwen3

GONE = '{"type": "file", "path": "gone.jsonl", "eval_path": null}'
SERVER = {'type': 'endpoint', 'name': 'ours', 'base_url': 'http://127.0.0.1:9'}


def _load(*overrides):
  return main.load('configs/arithmetic_dpo.py:tiny', list(overrides))


def test_playing_a_checkpoint_needs_no_file_of_pairs():
  run = _load(('dpo.pairs', GONE))
  with pytest.raises(ValueError, match='config.dpo.pairs cannot be used'):
    preflight.make(preflight.resolve(run), 'dpo')
  asked = from_checkpoint.for_playing(run, 'dpo')
  assert preflight.make(preflight.resolve(asked), 'dpo').data.envs.keys() == {
    'arithmetic'
  }


def test_a_checkpoint_of_a_sampler_mesh_is_played_on_all_devices():
  sizes = ('mesh.data', '2'), ('mesh.sampler', '{"tensor": 4}')
  asked = from_checkpoint.for_playing(_load(*sizes), 'dpo')
  assert asked.mesh == schema.Mesh(tensor=4)


def _models(run, load=None):
  return models.Models(
    preflight.make(preflight.resolve(run), 'dpo'),
    load,
    None,
    types.SimpleNamespace(on_request=lambda wake: None),
  )


def test_cached_logprobs_of_pairs_need_no_server(tmp_path, monkeypatch):
  """A server that has scored the pairs may be gone on the next start."""
  rows = [{'prompt': x, 'chosen': 'a', 'rejected': 'b'} for x in 'qr']
  path = tmp_path / 'pairs.jsonl'
  path.write_text('\n'.join(map(json.dumps, rows)))
  run = _load(
    (
      'dpo.loss.preference',
      json.dumps({'type': 'sigmoid', 'reference': SERVER}),
    ),
    (
      'dpo.pairs',
      json.dumps({'type': 'file', 'path': str(path), 'eval_fraction': 0.0}),
    ),
  )
  load = types.SimpleNamespace(workdir=str(tmp_path), folders={})
  own = _models(run, load)
  with monkeypatch.context() as patch:
    patch.setattr(frozen_models.References, '__call__', _scores)
    pairs.pipeline(own, None, None)
  monkeypatch.setattr(frozen_models.References, 'endpoint', None)
  pipeline = pairs.pipeline(own, None, None)
  batch = next(pipeline).batch
  assert set(batch.ref_logprobs[batch.present].tolist()) == {1, 2, 3, 4}


def _scores(self, reference, samples):
  """Scores that sum up to 1, 2, 3 and 4."""
  return [i * x.mask / x.mask.sum() for i, x in enumerate(samples, 1)]


def test_a_fingerprint_depends_on_dtype_and_lora():
  load = types.SimpleNamespace(fingerprint=lambda name: f'/d/{name}')

  def of(run):
    return pairs._fingerprint(_models(run, load), 'init')

  run = _load()
  half = dataclasses.replace(run.model, dtype='bfloat16')
  stage = dataclasses.replace(run.stages['dpo'], lora=schema.Lora(rank=2))
  lora = dataclasses.replace(run, stages={**run.stages, 'dpo': stage})
  found = {of(run), of(dataclasses.replace(run, model=half)), of(lora)}
  assert len(found) == 3 and all(x.startswith('/d/init in ') for x in found)


def test_a_fingerprint_depends_on_the_options_of_an_adapter(tmp_path):
  base, adapter = tmp_path / 'base', tmp_path / 'adapter'
  for folder, file in ((base, 'model'), (adapter, 'adapter_model')):
    folder.mkdir()
    (folder / f'{file}.safetensors').write_bytes(b'x')
  (base / 'config.json').write_text(json.dumps(qwen3.CONFIG))
  found = set()
  options = {'peft_type': 'LORA', 'base_model_name_or_path': str(base)}
  options |= {'r': 4, 'target_modules': ['q_proj']}
  for alpha in (8, 64, 8):
    text = json.dumps({**options, 'lora_alpha': alpha})
    (adapter / 'adapter_config.json').write_text(text)
    found.add(weights.fingerprint(str(adapter)))
  assert len(found) == 2
