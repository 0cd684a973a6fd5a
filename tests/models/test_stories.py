"""Trained weights: the engine against a forward pass in numpy.

Skipped where POSTTRAIN_DATA, the folder with stories260K/, is unset.
"""

import functools
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain import schema
from posttrain.decode import engines, requests
from posttrain.models import hf, hf_config
from tests.models import stories

DATA = os.environ.get('POSTTRAIN_DATA')
pytestmark = [
  pytest.mark.gate,
  pytest.mark.skipif(
    DATA is None, reason='POSTTRAIN_DATA (folder of real files) is unset'
  ),
]

MODEL = schema.Model(
  vocab_size=512,
  layers=5,
  embed_dim=64,
  heads=8,
  kv_heads=4,
  head_dim=8,
  mlp_dim=172,
  norm_eps=1e-5,
)
NEW = 200


def path(name):
  return pathlib.Path(DATA) / 'stories260K' / name


@functools.cache
def weights():
  return stories.read(path('stories260K.bin'))


@functools.cache
def params():
  return jax.tree.map(jnp.asarray, stories.convert(weights()))


@functools.cache
def story():
  """Returns (prompt, greedy continuation, its logits), by numpy."""
  prompt = [stories.BOS, 403, 407, 261, 378]  # Once upon a time
  return prompt, *stories.greedy(weights(), prompt, NEW)


@functools.cache
def generated():
  """Returns the engine and its greedy completion."""
  slot_engine = engines.Engine(
    MODEL, slots=1, capacity=256, prefill_rows=1, prefill_tokens=8
  )
  slot_engine.set_params(params(), 0)
  (answer,) = slot_engine.generate(
    [
      requests.Request(
        id=0,
        ids=np.array(story()[0], np.int32),
        max_tokens=NEW,
        sampling=requests.Sampling(temperature=0.0),
      )
    ]
  )
  return slot_engine, answer


def greedy_logprobs():
  """Returns numpy's logprobs of its greedy tokens, f32[NEW]."""
  _, ids, logits = story()
  return stories.log_softmax(logits)[np.arange(NEW), ids]


def test_greedy_decoding_equals_numpy_token_for_token():
  _, answer = generated()
  assert answer.ids.tolist() == story()[1]
  assert answer.stop_reason == 'max_tokens'


def test_sampled_and_scored_logprobs_equal_those_of_numpy():
  prompt, ids, _ = story()
  slot_engine, answer = generated()
  expected = greedy_logprobs()
  np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)
  (scored,) = slot_engine.score([np.array(prompt + ids, np.int32)])
  np.testing.assert_allclose(scored[len(prompt) :], expected, atol=1e-4)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  out = tmp_path_factory.mktemp('stories') / 'hf'
  hf.save(params(), MODEL, out, dtype='float32')
  return out


def test_a_saved_directory_loads_the_same_bits(folder):
  assert hf_config.read(folder) == MODEL
  jax.tree.map(np.testing.assert_array_equal, hf.load(folder, MODEL), params())


def test_transformers_generates_the_same_tokens(folder):
  torch = pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')
  peer = transformers.LlamaForCausalLM.from_pretrained(
    folder, attn_implementation='eager'
  ).eval()
  prompt, ids, _ = story()
  with torch.no_grad():
    tokens = peer.generate(
      torch.tensor([prompt]), do_sample=False, max_new_tokens=64
    )
  assert tokens[0].tolist() == prompt + ids[:64]
