"""The gates of the engine, G1 to G7, against forwards that keep no cache.

E is the engine's completion, R a full forward over prompt + E (teacher
forcing), so that one flip does not hide the rest.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain import compilation, scoring
from posttrain.decode import loop, requests
from posttrain.models import transformer
from tests.decode import helpers

pytestmark = pytest.mark.gate


@functools.partial(jax.jit, static_argnums=1)
def forward(params, model, ids):
  """Returns logits f32[B, T, V]."""
  positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
  hidden, _ = transformer.trunk(
    params, model, ids, positions, jnp.ones_like(ids)
  )
  return scoring.next_logits(params, model, hidden)


def sequences(batch, completions):
  """Returns i32[24, WIDTH]: prompts and completions, padded to one shape."""
  ids = np.zeros((24, helpers.WIDTH), np.int32)
  for row, request, completion in zip(ids, batch, completions, strict=False):
    sequence = np.concatenate([request.ids, completion.ids])
    row[: len(sequence)] = sequence
  return ids


def before_drawn(logits, batch, completions):
  """Returns the logits before each drawn token, f32[n, V] per request."""
  return [
    row[len(r.ids) - 1 : len(r.ids) - 1 + len(c.ids)]
    for row, r, c in zip(logits, batch, completions, strict=False)
  ]


def reference(batch, completions, model=helpers.MODEL):
  """Returns R before each drawn token."""
  ids = sequences(batch, completions)
  logits = np.asarray(forward(helpers.params(model), model, ids))
  return before_drawn(logits, batch, completions)


def cached(batch, completions, model):
  """Returns the logits before each drawn token as decoding computes them."""
  ids = sequences(batch, completions)
  view = loop.view(helpers.params(model), model, None)
  state = loop.fit(None, model, *ids.shape, None)
  one, steps = np.ones(len(ids), np.int32), []
  slots = np.arange(len(ids), dtype=np.int32)
  for i in range(helpers.WIDTH):
    chunk = ids[:, i : i + 1], i * one, one, slots
    state, logits = loop.prefill(
      view, model, state, chunk, helpers.WIDTH, len(ids), None
    )
    steps.append(np.asarray(logits))
  return before_drawn(np.stack(steps, 1), batch, completions)


def top_gaps(logits):
  best = np.sort(logits, -1)
  return best[:, -1] - best[:, -2]


def log_softmax(z):
  z = np.asarray(z, np.float64)
  z = z - z.max(-1, keepdims=True)
  return z - np.log(np.exp(z).sum(-1, keepdims=True))


def test_g1_greedy_is_the_argmax_of_a_full_forward():
  batch = helpers.make_requests(24, seed=2, sampling=helpers.GREEDY)
  completions = helpers.make().generate(batch)
  for logits, completion in zip(
    reference(batch, completions), completions, strict=True
  ):
    assert top_gaps(logits).min() > 1e-3  # no near ties
    np.testing.assert_array_equal(logits.argmax(-1), completion.ids)
    logprobs = log_softmax(logits)[np.arange(len(logits)), completion.ids]
    np.testing.assert_allclose(completion.logprobs, logprobs, rtol=0, atol=5e-5)


def test_g2_greedy_bfloat16_differs_only_at_ties():
  model = dataclasses.replace(helpers.MODEL, dtype='bfloat16')
  batch = helpers.make_requests(24, sampling=helpers.GREEDY)
  completions = helpers.make(model).generate(batch)
  full = np.concatenate(reference(batch, completions, model))
  fed = np.concatenate(cached(batch, completions, model))
  ids = np.concatenate([completion.ids for completion in completions])
  logprobs = np.concatenate([completion.logprobs for completion in completions])
  index = np.arange(len(ids))
  error = np.abs(logprobs - log_softmax(full)[index, ids])
  assert error.mean() <= 0.03 and error.max() <= 0.15
  flips = full.argmax(-1) != ids
  assert flips.mean() <= 0.03
  assert (top_gaps(full)[flips] <= 2 * np.abs(fed - full).max()).all()
  # The bound holds for the engine: its logits are nearly those of `cached`.
  expected = log_softmax(fed)[index, ids]
  np.testing.assert_allclose(logprobs, expected, rtol=0, atol=0.05)


def naive(request, count, logits, seed=5, temperature=0.8):
  """Draws with the engine's numbers from a flat CDF in double precision.

  Returns the tokens, log probabilities and CDF by position, and the numbers.
  """
  high = np.full(count, request.id >> 32, np.uint32)
  low = np.full(count, request.id & 0xFFFFFFFF, np.uint32)
  keys = loop.request_keys(seed, high, low)
  u = np.asarray(loop.uniforms(keys, len(request.ids) + np.arange(count)))
  logprobs = log_softmax(logits / temperature)
  cdf = np.exp(logprobs).cumsum(-1)
  return (cdf <= u[:, None]).sum(-1), logprobs, cdf, u


def test_g3_sampled_tokens_match_a_naive_sampler():
  """The same numbers, a full forward, and a flat CDF in double precision."""
  hot = requests.Sampling(temperature=0.8)
  batch = helpers.make_requests(24, seed=2, sampling=hot)
  completions = helpers.make(seed=5).generate(batch)
  for request, completion, logits in zip(
    batch, completions, reference(batch, completions), strict=True
  ):
    count = len(completion.ids)
    expected, logprobs, _, _ = naive(request, count, logits)
    np.testing.assert_array_equal(completion.ids, expected)
    np.testing.assert_allclose(
      completion.logprobs, logprobs[np.arange(count), completion.ids], atol=5e-5
    )


@pytest.mark.slow
def test_g3_sampled_bfloat16_differs_only_at_edges_of_the_cdf():
  """The number lies in the drawn token's part of the CDF, or beside it."""
  model = dataclasses.replace(helpers.MODEL, dtype='bfloat16')
  hot = requests.Sampling(temperature=0.8)
  batch = helpers.make_requests(24, sampling=hot)
  completions = helpers.make(model, seed=5).generate(batch)
  flips, distances, moved = [], [], 0.0
  for request, completion, full, fed in zip(
    batch,
    completions,
    reference(batch, completions, model),
    cached(batch, completions, model),
    strict=True,
  ):
    count = len(completion.ids)
    expected, _, fed_cdf, _ = naive(request, count, fed)
    flips += [*(expected != completion.ids)]
    _, _, cdf, u = naive(request, count, full)
    parts = np.pad(cdf, ((0, 0), (1, 0)))
    index = np.arange(count)
    low, high = parts[index, completion.ids], cdf[index, completion.ids]
    distances += [*np.maximum(low - u, u - high)]
    moved = max(moved, np.abs(fed_cdf - cdf).max())
  # One token at a time, nearly every token is that of the naive sampler. A full
  # forward moves the CDF, in whose part of the drawn token the number need not
  # be any more: beside it by as much as the CDF has moved, at most.
  assert len(flips) > 200 and np.mean(flips) <= 0.03
  assert moved <= 0.05 and max(distances) <= moved + 1e-3


def test_g4_completions_do_not_depend_on_slots_chunks_or_capacity():
  batch, expected = helpers.baseline()
  # Other slots, next to other requests.
  back = helpers.make().generate(batch[::-1])[::-1]
  assert helpers.same(back, expected)
  for options in ({}, {'chunk': 1}, {'chunk': 64}, helpers.WIDE, helpers.SMALL):
    completions = helpers.make(**options).generate(batch)
    assert helpers.same(completions, expected), options
  alone = [helpers.make().generate([request])[0] for request in batch[:3]]
  assert helpers.same(alone, expected[:3])


def test_g4_completions_do_not_depend_on_the_part_of_the_cache_read(
  monkeypatch,
):
  monkeypatch.setattr(loop, '_SHORTEST', 16)
  capacity = 56  # of no other engine: its programs are traced here
  assert loop.lengths(capacity) == [16, 32, 56]
  batch, expected = helpers.baseline()
  completions = helpers.make(capacity=capacity).generate(batch)
  assert helpers.same(completions, expected)


def test_parts_of_the_cache_are_powers_of_two_and_the_whole():
  assert loop.lengths(64) == [64]
  assert loop.lengths(96) == [64, 96]
  assert loop.lengths(1000) == [64, 128, 256, 512, 1000]


def test_g4_a_rerun_is_bitwise():
  batch, expected = helpers.baseline()
  for a, b in zip(helpers.make().generate(batch), expected, strict=True):
    assert a.logprobs.tobytes() == b.logprobs.tobytes()


def test_g4_random_numbers_depend_on_seed_and_id_not_on_slot():
  prompt = np.arange(5)
  group = [requests.Request(i, prompt, 16) for i in range(4)]
  far = [requests.Request(2**40 + i, prompt, 16) for i in range(4)]
  engine = helpers.make()
  first, again = engine.generate(group), engine.generate(group[::-1])[::-1]
  assert helpers.same(first, again)
  completions = {c.ids.tobytes() for c in (*first, *engine.generate(far))}
  assert len(completions) == 8
  assert not helpers.same(first, helpers.make(seed=1).generate(group))


def test_g5_stop_token_ends_the_completion_and_is_kept():
  batch, completions = helpers.baseline()
  _, cut = batch[0], completions[0]
  stop = int(cut.ids[5])
  first = int(np.flatnonzero(cut.ids == stop)[0])
  (short,) = helpers.make().generate(
    [dataclasses.replace(batch[0], stop_ids=(helpers.EOS, stop))]
  )
  assert short.stop_reason == 'eos'
  np.testing.assert_array_equal(short.ids, cut.ids[: first + 1])
  np.testing.assert_allclose(
    short.logprobs, cut.logprobs[: first + 1], atol=1e-6
  )


def test_g5_first_token_may_stop_and_max_tokens_holds():
  batch, completions = helpers.baseline()
  stop = (int(completions[1].ids[0]),)
  first, one, rest = helpers.make().generate(
    [
      dataclasses.replace(batch[1], stop_ids=stop),
      dataclasses.replace(batch[2], max_tokens=1),
      batch[3],
    ]
  )
  assert first.stop_reason == 'eos' and len(first.ids) == 1
  assert one.stop_reason == 'max_tokens'
  np.testing.assert_array_equal(one.ids, completions[2].ids[:1])
  assert helpers.same([rest], [completions[3]])


def test_g5_prompts_of_any_length_match_a_full_forward():
  width = helpers.WIDTH
  prompt = np.random.default_rng(0).integers(0, 256, width)
  lengths = (1, 7, 8, 9, 16, width - 1, width)  # around the prefill chunk
  batch = [requests.Request(n, prompt[:n], 100) for n in lengths]
  completions = helpers.make().generate(batch)
  for request, completion in zip(batch, completions, strict=True):
    assert completion.stop_reason == 'overflow'
    assert len(completion.ids) == width - len(request.ids)
  for logits, completion in zip(
    reference(batch, completions), completions, strict=True
  ):
    logprobs = log_softmax(logits)[np.arange(len(logits)), completion.ids]
    np.testing.assert_allclose(completion.logprobs, logprobs, atol=5e-5)


def test_g6_score_equals_the_sampler_logprobs():
  for temperature in (1.0, 0.7):
    sampling = requests.Sampling(temperature=temperature)
    batch = helpers.make_requests(8, seed=3, sampling=sampling)
    engine = helpers.make()
    completions = engine.generate(batch)
    whole = [
      np.concatenate([r.ids, c.ids])
      for r, c in zip(batch, completions, strict=True)
    ]
    scores = engine.score(whole, temperature)
    for request, completion, score in zip(
      batch, completions, scores, strict=True
    ):
      np.testing.assert_allclose(
        score[len(request.ids) :], completion.logprobs, atol=1e-5
      )


@pytest.mark.slow
def test_g4_to_g7_bfloat16_is_bitwise_again_and_its_mismatch_is_bounded():
  """Slots that are refilled, and held ones that are extended."""
  model = dataclasses.replace(helpers.MODEL, dtype='bfloat16')
  engine = helpers.make(model, **helpers.SMALL)
  batch = helpers.make_requests(8, seed=3, max_tokens=8)

  def play():
    found = list(zip(batch, engine.generate(batch), strict=True))
    held = dataclasses.replace(batch[0], id=9, hold=True)
    engine.submit(held)
    (first,) = helpers.poll(engine, 1)
    new = np.array([65, 66, 67])
    engine.extend(9, new, 8)
    (second,) = helpers.poll(engine, 1)
    engine.release(9)
    whole = np.concatenate([held.ids, first.ids, new])
    return [*found, (dataclasses.replace(held, ids=whole), second)]

  runs = [play()]
  with compilation.CompileCounter() as compiles:
    engine.set_params(helpers.params(model), 1)
    runs.append(play())
    stop = int(runs[0][1][1].ids[2])
    request = dataclasses.replace(batch[1], stop_ids=(helpers.EOS, stop))
    (cut,) = engine.generate([request])
  assert compiles.count == 0
  whole = runs[0][1][1]
  end = int(np.flatnonzero(whole.ids == stop)[0]) + 1
  assert cut.stop_reason == 'eos'
  np.testing.assert_array_equal(cut.ids, whole.ids[:end])
  np.testing.assert_array_equal(cut.logprobs, whole.logprobs[:end])
  for (_, one), (_, other) in zip(*runs, strict=True):
    np.testing.assert_array_equal(one.ids, other.ids)
    np.testing.assert_array_equal(one.logprobs, other.logprobs)
  whole = [np.concatenate([r.ids, c.ids]) for r, c in runs[0]]
  scores = engine.score(whole, 1.0)
  errors = np.concatenate(
    [
      np.abs(score[len(r.ids) :] - c.logprobs)
      for (r, c), score in zip(runs[0], scores, strict=True)
    ]
  )
  assert len(errors) > 40 and 0 < errors.mean() <= 0.03
  assert errors.max() <= 0.15


def test_g7_nothing_recompiles():
  engine = helpers.make()
  engine.generate(helpers.make_requests(10, seed=4))
  with compilation.CompileCounter() as compiles:
    for wave in range(3):
      engine.set_params(helpers.params(seed=wave), wave)
      settings = (
        requests.Sampling(0.5 + wave, 3 * wave, 1 - wave / 4, wave / 10),
        requests.Sampling(0.0),
      )
      for i, sampling in enumerate(settings):
        completions = engine.generate(
          helpers.make_requests(
            7 + 5 * wave,
            seed=5 + 2 * wave + i,
            sampling=sampling,
            max_tokens=3 + 7 * wave,
          )
        )
        assert all(completion.version == wave for completion in completions)
  assert compiles.count == 0


def test_new_weights_are_used():
  batch, expected = helpers.baseline()
  engine = helpers.make()
  engine.set_params(helpers.params(seed=1), 1)
  assert not helpers.same(engine.generate(batch), expected)
  engine.set_params(helpers.params(), 2)
  assert helpers.same(engine.generate(batch), expected)


def test_engine_decodes_after_its_params_are_deleted():
  batch, expected = helpers.baseline()
  engine = helpers.make()
  params = jax.tree.map(jnp.copy, helpers.params())
  engine.set_params(params, 1)
  jax.tree.map(lambda x: x.delete(), params)
  assert helpers.same(engine.generate(batch), expected)
