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
from posttrain.decode import engine, requests
from posttrain.models import hf, hf_config, transformer
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
BEGINNING = (
  'Once upon a time, there was a little girl named Lily. She loved to play '
  'outside in the park. One day, she saw a big, red ball. She wanted to play '
  "with it, but it was too high.\nLily's mom said, "
  '"Lily, let\'s go to the park."'
)


def path(name):
  return pathlib.Path(DATA) / 'stories260K' / name


@functools.cache
def tokenizer():
  return stories.tokenizer(path('tok512.bin'))


@functools.cache
def weights():
  return stories.read(path('stories260K.bin'))


@functools.cache
def params():
  return jax.tree.map(jnp.asarray, stories.convert(weights()))


@functools.cache
def story():
  """Returns (prompt, greedy continuation, its logits), by numpy."""
  prompt = [stories.BOS, *tokenizer().encode('Once upon a time')]
  return prompt, *stories.greedy(weights(), prompt, NEW)


@functools.cache
def generated():
  """Returns the engine and its greedy completion."""
  slot_engine = engine.Engine(
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


def test_converted_weights_have_the_shapes_of_the_model():
  ours = jax.tree.map(lambda x: (x.shape, x.dtype), params())
  expected = transformer.shapes(MODEL)
  assert ours == jax.tree.map(lambda x: (x.shape, x.dtype), expected)
  assert transformer.num_params(MODEL) == 260_032


def test_the_tokenizer_merges_and_falls_back_to_bytes():
  pieces = tokenizer().pieces
  assert tokenizer().encode('Once upon a time') == [403, 407, 261, 378]
  assert [pieces[i] for i in (403, 407, 261, 378)] == [
    b' Once',
    b' upon',
    b' a',
    b' time',
  ]
  text = 'Zoë saw <s> and 日.\n'
  ids = tokenizer().encode(text)
  assert [i - 3 for i in ids if 3 <= i < 259] == list('ë日\n'.encode())
  assert stories.BOS not in ids
  assert tokenizer().decode(ids) == text


def test_greedy_decoding_equals_numpy_token_for_token():
  prompt, ids, _ = story()
  _, answer = generated()
  assert answer.ids.tolist() == ids
  assert answer.stop_reason == 'max_tokens'
  text = tokenizer().decode([*prompt, *answer.ids.tolist()])
  assert text.startswith(BEGINNING)


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
