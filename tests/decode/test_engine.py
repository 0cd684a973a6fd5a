"""The gates of the engine, G1 to G7, against forwards that keep no cache.

E is what the engine says, R a full forward over prompt + E (teacher forcing),
so that one flip does not hide the rest.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from posttrain import compilation, scoring
from posttrain.decode import loop, requests
from posttrain.models import transformer
from tests.decode import helpers


@functools.partial(jax.jit, static_argnums=1)
def forward(params, model, ids):
  """Logits f32[B, T, V]."""
  positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
  hidden, _ = transformer.trunk(
    params, model, ids, positions, jnp.ones_like(ids)
  )
  return scoring.next_logits(params, model, hidden)


def sequences(asked, done):
  """i32[24, WIDTH]: prompts and what followed them, padded to one shape."""
  ids = np.zeros((24, helpers.WIDTH), np.int32)
  for row, request, completion in zip(ids, asked, done, strict=False):
    said = np.concatenate([request.ids, completion.ids])
    row[: len(said)] = said
  return ids


def before_drawn(logits, asked, done):
  """Per request, f32[n, V], the logits before each drawn token."""
  return [
    row[len(r.ids) - 1 : len(r.ids) - 1 + len(c.ids)]
    for row, r, c in zip(logits, asked, done, strict=False)
  ]


def reference(asked, done, model=helpers.MODEL):
  """R, before each drawn token."""
  ids = sequences(asked, done)
  logits = np.asarray(forward(helpers.params(model), model, ids))
  return before_drawn(logits, asked, done)


def cached(asked, done, model):
  """What decoding sees before each drawn token: E is fed to a cache."""
  ids = sequences(asked, done)
  view = loop.view(helpers.params(model), model, None)
  cache = transformer.empty_cache(model, *ids.shape)
  logits = jnp.zeros((len(ids), model.vocab_size))
  one, found = np.ones(len(ids), np.int32), []
  for at in range(helpers.WIDTH):
    cache, logits = loop.prefill(
      view, model, cache, logits, ids[:, at : at + 1], at * one, one
    )
    found.append(np.array(logits))  # a copy: they are donated
  return before_drawn(np.stack(found, 1), asked, done)


def top_gaps(logits):
  best = np.sort(logits, -1)
  return best[:, -1] - best[:, -2]


def log_softmax(z):
  z = np.asarray(z, np.float64)
  z = z - z.max(-1, keepdims=True)
  return z - np.log(np.exp(z).sum(-1, keepdims=True))


def test_g1_greedy_is_the_argmax_of_a_full_forward():
  asked = helpers.ask(24, seed=2, sampling=helpers.GREEDY)
  done = helpers.make().generate(asked)
  for logits, completion in zip(reference(asked, done), done, strict=True):
    assert top_gaps(logits).min() > 1e-3  # or equality would prove luck
    np.testing.assert_array_equal(logits.argmax(-1), completion.ids)
    law = log_softmax(logits)[np.arange(len(logits)), completion.ids]
    np.testing.assert_allclose(completion.logprobs, law, rtol=0, atol=5e-5)


def test_g2_greedy_bfloat16_differs_only_at_ties():
  model = dataclasses.replace(helpers.MODEL, dtype='bfloat16')
  asked = helpers.ask(24, sampling=helpers.GREEDY)
  done = helpers.make(model).generate(asked)
  full = np.concatenate(reference(asked, done, model))
  fed = np.concatenate(cached(asked, done, model))
  ids = np.concatenate([completion.ids for completion in done])
  said = np.concatenate([completion.logprobs for completion in done])
  at = np.arange(len(ids))
  error = np.abs(said - log_softmax(full)[at, ids])
  assert error.mean() <= 0.03 and error.max() <= 0.15
  flips = full.argmax(-1) != ids
  assert flips.mean() <= 0.03
  assert (top_gaps(full)[flips] <= 2 * np.abs(fed - full).max()).all()
  # That bound is the engine's, for what was fed is nearly what it saw.
  np.testing.assert_allclose(said, log_softmax(fed)[at, ids], rtol=0, atol=0.05)


def test_g3_sampled_tokens_are_those_of_a_naive_sampler():
  """The same numbers, a full forward, and a flat CDF in double precision."""
  hot = requests.Sampling(temperature=0.8)
  asked = helpers.ask(24, seed=2, sampling=hot)
  done = helpers.make(seed=5).generate(asked)
  edges = 0
  for request, completion, logits in zip(
    asked, done, reference(asked, done), strict=True
  ):
    count = len(completion.ids)
    high = np.full(count, request.id >> 32, np.uint32)
    low = np.full(count, request.id & 0xFFFFFFFF, np.uint32)
    keys = loop.request_keys(5, high, low)
    u = loop.uniforms(keys, len(request.ids) + np.arange(count))
    law = log_softmax(logits / 0.8)
    cdf = np.exp(law).cumsum(-1)
    for i, token in enumerate(completion.ids):
      expected = np.searchsorted(cdf[i], u[i], side='right')
      if expected != token:
        edges += 1
        assert np.abs(cdf[i] - u[i]).min() < 1e-5
    np.testing.assert_allclose(
      completion.logprobs, law[np.arange(count), completion.ids], atol=5e-5
    )
  assert edges == 0


def test_g4_slots_company_chunks_and_capacity_do_not_matter():
  asked, expected = helpers.baseline()
  # Other slots, other company.
  back = helpers.make().generate(asked[::-1])[::-1]
  assert helpers.same(back, expected)
  for options in ({}, {'chunk': 1}, {'chunk': 64}, helpers.WIDE, helpers.SMALL):
    done = helpers.make(**options).generate(asked)
    assert helpers.same(done, expected), options
  alone = [helpers.make().generate([request])[0] for request in asked[:3]]
  assert helpers.same(alone, expected[:3])


def test_g4_a_rerun_is_bitwise():
  asked, expected = helpers.baseline()
  for a, b in zip(helpers.make().generate(asked), expected, strict=True):
    assert a.logprobs.tobytes() == b.logprobs.tobytes()


def test_g4_numbers_differ_by_seed_and_id_and_not_by_slot():
  prompt = np.arange(5)
  group = [requests.Request(i, prompt, 16) for i in range(4)]
  far = [requests.Request(2**40 + i, prompt, 16) for i in range(4)]
  engine = helpers.make()
  first, again = engine.generate(group), engine.generate(group[::-1])[::-1]
  assert helpers.same(first, again)
  said = {c.ids.tobytes() for c in (*first, *engine.generate(far))}
  assert len(said) == 8
  assert not helpers.same(first, helpers.make(seed=1).generate(group))


def test_g5_a_stop_token_is_kept_and_ends_it():
  asked, done = helpers.baseline()
  _, cut = asked[0], done[0]
  stop = int(cut.ids[5])
  first = int(np.flatnonzero(cut.ids == stop)[0])
  (short,) = helpers.make().generate(
    [dataclasses.replace(asked[0], stop_ids=(helpers.EOS, stop))]
  )
  assert short.stop_reason == 'eos'
  np.testing.assert_array_equal(short.ids, cut.ids[: first + 1])
  np.testing.assert_allclose(
    short.logprobs, cut.logprobs[: first + 1], atol=1e-6
  )


def test_g5_the_first_token_may_stop_and_budgets_hold():
  asked, done = helpers.baseline()
  stop = (int(done[1].ids[0]),)
  first, one, rest = helpers.make().generate(
    [
      dataclasses.replace(asked[1], stop_ids=stop),
      dataclasses.replace(asked[2], max_tokens=1),
      asked[3],
    ]
  )
  assert first.stop_reason == 'eos' and len(first.ids) == 1
  assert one.stop_reason == 'max_tokens'
  np.testing.assert_array_equal(one.ids, done[2].ids[:1])
  assert helpers.same([rest], [done[3]])


def test_g5_prompts_of_every_length():
  width = helpers.WIDTH
  prompt = np.random.default_rng(0).integers(0, 256, width)
  lengths = (1, 7, 8, 9, 16, width - 1, width)  # around the prefill chunk
  asked = [requests.Request(n, prompt[:n], 100) for n in lengths]
  done = helpers.make().generate(asked)
  for request, completion in zip(asked, done, strict=True):
    assert completion.stop_reason == 'overflow'
    assert len(completion.ids) == width - len(request.ids)
  for logits, completion in zip(reference(asked, done), done, strict=True):
    law = log_softmax(logits)[np.arange(len(logits)), completion.ids]
    np.testing.assert_allclose(completion.logprobs, law, atol=5e-5)


def test_g6_score_is_what_the_sampler_said():
  for temperature in (1.0, 0.7):
    sampling = requests.Sampling(temperature=temperature)
    asked = helpers.ask(8, seed=3, sampling=sampling)
    engine = helpers.make()
    done = engine.generate(asked)
    whole = [
      np.concatenate([r.ids, c.ids]) for r, c in zip(asked, done, strict=True)
    ]
    scores = engine.score(whole, temperature)
    for request, completion, score in zip(asked, done, scores, strict=True):
      np.testing.assert_allclose(
        score[len(request.ids) :], completion.logprobs, atol=1e-5
      )


def test_g7_nothing_recompiles():
  engine = helpers.make()
  engine.generate(helpers.ask(10, seed=4))
  with compilation.CompileCounter() as compiles:
    for wave in range(3):
      engine.set_params(helpers.params(seed=wave), wave)
      laws = (
        requests.Sampling(0.5 + wave, 3 * wave, 1 - wave / 4, wave / 10),
        requests.Sampling(0.0),
      )
      for i, law in enumerate(laws):
        done = engine.generate(
          helpers.ask(
            7 + 5 * wave,
            seed=5 + 2 * wave + i,
            sampling=law,
            max_tokens=3 + 7 * wave,
          )
        )
        assert all(completion.version == wave for completion in done)
  assert compiles.count == 0


def test_new_weights_are_used():
  asked, expected = helpers.baseline()
  engine = helpers.make()
  engine.set_params(helpers.params(seed=1), 1)
  assert not helpers.same(engine.generate(asked), expected)
  engine.set_params(helpers.params(), 2)
  assert helpers.same(engine.generate(asked), expected)


def test_the_view_survives_donated_params():
  asked, expected = helpers.baseline()
  engine = helpers.make()
  mine = jax.tree.map(jnp.copy, helpers.params())
  engine.set_params(mine, 1)
  jax.tree.map(lambda x: x.delete(), mine)
  assert helpers.same(engine.generate(asked), expected)
