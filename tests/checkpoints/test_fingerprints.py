"""Content hashes of weights: what they depend on."""

import dataclasses
import hashlib

from posttrain import schema
from posttrain.checkpoints import fingerprints, weight_folders
from posttrain.models import hf_config

MODEL = schema.Model(vocab_size=100)


def test_the_kind_of_attention_is_no_property_of_weights(monkeypatch):
  other = dataclasses.replace(MODEL, attention='pallas')
  assert fingerprints.of_model(other) == fingerprints.of_model(MODEL)
  assert not hf_config.differing(other, MODEL)
  host = {'model': dataclasses.asdict(other)}
  monkeypatch.setattr(weight_folders, 'read_host', lambda _: host)
  monkeypatch.setattr(weight_folders, 'is_hf', lambda _: False)
  monkeypatch.setattr(weight_folders, 'is_peft', lambda _: False)
  assert weight_folders.model('runs/x') == MODEL


def test_hashes_of_earlier_versions_hold():
  text = fingerprints.of_model(MODEL)
  assert hashlib.sha256(text.encode()).hexdigest()[:12] == 'a4674e4af90a'
  deeper = dataclasses.replace(MODEL, layers=9)
  assert fingerprints.of_model(deeper) != text
