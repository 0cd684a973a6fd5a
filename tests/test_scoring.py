"""The scoring forward: values, invariances, and the packing `Scorer`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain import compilation, schema, scoring, sharding
from posttrain.models import transformer
from posttrain.schema import architecture
from tests import fixtures

CFG = schema.Model(
  vocab_size=40,
  layers=2,
  embed_dim=32,
  heads=4,
  kv_heads=2,
  head_dim=8,
  mlp_dim=48,
  tied_head=False,
)
LENGTHS = (5, 1, 7)
T = 16  # 13 tokens and 3 pads

score = jax.jit(scoring.score, static_argnames='cfg')


@pytest.fixture(scope='module')
def params():
  return fixtures.params(CFG)


def alone(params, ids, temperatures):
  """Returns (logprobs, entropies) of one sequence, before pads: f32[n]."""
  n = len(ids)
  pads = (0, T - n)
  out = score(
    params,
    CFG,
    np.pad(ids, pads)[None],
    np.arange(T, dtype=np.int32)[None],
    (np.arange(T) < n).astype(np.int32)[None],
    np.pad(temperatures, pads, constant_values=1)[None],
  )
  return [x[0, :n] for x in out]


@pytest.fixture(scope='module')
def row():
  rng = np.random.default_rng(0)
  ids = rng.integers(0, 40, (1, T)).astype(np.int32)
  temperatures = rng.uniform(0.5, 2.0, (1, T)).astype(np.float32)
  lengths = (*LENGTHS, T - sum(LENGTHS))
  segments = np.repeat(np.int32([1, 2, 3, 0]), lengths)[None]
  positions = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
  return ids, positions * (segments > 0), segments, temperatures


def test_logprobs_are_shifted_log_softmax_at_the_token_temperature(params, row):
  ids, _, _, temperatures = row
  ours, entropy = alone(params, ids[0], temperatures[0])
  positions = np.arange(T, dtype=np.int32)[None]
  hidden, _ = transformer.trunk(params, CFG, ids, positions, np.ones_like(ids))
  logits = np.asarray(hidden @ params['head']['kernel'], np.float64)[0]
  for t in range(1, T):
    z = logits[t - 1] / temperatures[0, t]
    logprobs = z - np.log(np.exp(z).sum())
    np.testing.assert_allclose(ours[t], logprobs[ids[0, t]], rtol=1e-5)
    expected = -(np.exp(logprobs) * logprobs).sum()
    np.testing.assert_allclose(entropy[t], expected, rtol=1e-5)


def test_packed_sequences_score_as_separate_ones(params, row):
  """First tokens and pads score zero."""
  packed = score(params, CFG, *row)
  for x in packed:
    assert np.flatnonzero(x[0] == 0.0).tolist() == [0, 5, 6, 13, 14, 15]
  start = 0
  for length in LENGTHS:
    ids, *_, temperatures = (x[0, start : start + length] for x in row)
    separate = alone(params, ids, temperatures)
    for a, b in zip(packed, separate, strict=True):
      np.testing.assert_allclose(a[0, start : start + length], b, atol=1e-5)
    start += length


def test_pads_have_no_gradient(params, row):
  ids, positions, segments, temperatures = row
  other = np.where(segments == 0, 3, ids)

  @jax.jit
  def grads(ids):
    def loss(params):
      out = score(params, CFG, ids, positions, segments, temperatures)
      return out[0].sum() + out[1].sum()

    return jax.grad(loss)(params)

  jax.tree.map(np.testing.assert_array_equal, grads(ids), grads(other))


def test_log_softmax_of_next_logits_is_the_scored_logprob(params, row):
  cfg = dataclasses.replace(CFG, dtype='bfloat16')
  ids, positions, segments, _ = row

  @jax.jit
  def both(params):
    hidden, _ = transformer.trunk(params, cfg, ids, positions, segments)
    logits = scoring.next_logits(params, cfg, hidden)
    at_one = jnp.ones(ids.shape)
    scored, _ = scoring.score(params, cfg, ids, positions, segments, at_one)
    return logits, scored

  logits, scored = both(params)
  assert logits.dtype == jnp.float32 and logits.shape == (1, T, 40)
  logprobs = np.asarray(jax.nn.log_softmax(logits))[0]
  t = np.flatnonzero(positions[0])
  np.testing.assert_allclose(
    logprobs[t - 1, ids[0, t]], scored[0, t], atol=1e-5, rtol=1e-5
  )


def _sequences(lengths):
  rng = np.random.default_rng(1)
  ids = [rng.integers(0, 40, n).astype(np.int32) for n in lengths]
  temperatures = [rng.uniform(0.5, 2.0, n).astype(np.float32) for n in lengths]
  return ids, temperatures


def test_scorers_of_a_shape_score_any_lengths_with_one_program(params):
  mesh = sharding.make_mesh(schema.Mesh())
  scoring.Scorer(CFG, 2, T, mesh)(params, *_sequences([3]))
  for lengths in ([5, 1, 7, 16, 2, 9, 16, 3], [0, 2], []):
    ids, temperatures = _sequences(lengths)
    with compilation.CompileCounter() as compiling:
      scored = scoring.Scorer(CFG, 2, T, mesh)(params, ids, temperatures)
    assert compiling.count == 0
    assert [len(x) for x in scored] == lengths
    for ours, *sequence in zip(scored, ids, temperatures, strict=True):
      expected, _ = alone(params, *sequence)
      np.testing.assert_allclose(ours, expected, atol=1e-5)


def test_top_tokens_are_those_of_the_full_logits(params):
  """A random sequence, and prefixes of it with the greedy token behind."""
  (ids,), _ = _sequences([T])
  positions = np.arange(T, dtype=np.int32)[None]
  segments = np.ones((1, T), np.int32)
  hidden, _ = transformer.trunk(params, CFG, ids[None], positions, segments)
  best = np.asarray(scoring.next_logits(params, CFG, hidden))[0].argmax(-1)
  sequences = [np.append(ids[:n], best[n - 1]) for n in (3, T - 1)] + [ids]
  ones = [np.ones(len(x), np.float32) for x in sequences]
  both = scoring.Scorer(CFG, 2, T, reads='logprobs_and_top')
  plain = scoring.Scorer(CFG, 2, T)(params, sequences, ones)
  for x, ours, logprobs in zip(
    sequences, both(params, sequences, ones), plain, strict=True
  ):
    assert ours[:, 1].tolist() == [0, *(best[: len(x) - 1] == x[1:])]
    np.testing.assert_allclose(ours[:, 0], logprobs, atol=1e-6)


def test_arrays_of_a_large_model_are_as_wide_as_a_call_needs(
  params, monkeypatch
):
  """On a CPU, whose positions are dear."""
  sequences = _sequences([3, 16, 7, 9, 16, 16])
  fixed = scoring.Scorer(CFG, 4, 64)(params, *sequences)
  monkeypatch.setattr(architecture, 'LARGE', 1)
  shapes = []
  read = scoring._read
  monkeypatch.setattr(
    scoring,
    '_read',
    lambda p, x, *y: shapes.append(x[0].shape) or read(p, x, *y),
  )
  fitted = scoring.Scorer(CFG, 4, 64)(params, *sequences)
  assert shapes == [(1, 80)]  # of 67 tokens
  for a, b in zip(fixed, fitted, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)


def _alike():
  """Few beginnings, two equal sequences, one at another temperature."""
  rng = np.random.default_rng(0)
  begins = rng.integers(0, 40, (3, 5))
  ids = [np.append(begins[i % 3], [i]) for i in range(12)]
  ids = [x.astype(np.int32) for x in (*ids, ids[0], ids[1][:4], ids[2])]
  temperatures = [np.full(len(x), 0.7, np.float32) for x in ids]
  temperatures[-1] = temperatures[-1] * np.float32([1, 1, 1, 1, 2, 1])
  return ids, temperatures


def test_trees_give_every_sequence_its_scores(params, monkeypatch):
  read, rows = scoring._read, []
  monkeypatch.setattr(
    scoring, '_read', lambda p, x, *y: rows.append(x[2]) or read(p, x, *y)
  )
  results, tokens = [], []
  for trees in (False, True):
    scorer = scoring.Scorer(CFG, 2, T, reads='logprobs_and_top', trees=trees)
    results.append(scorer(params, *_alike()))
    tokens.append(sum(int((x > 0).sum()) for x in rows))
    rows.clear()
  assert tokens[0] == 88 > 2 * tokens[1]
  for whole, shared in zip(*results, strict=True):
    np.testing.assert_allclose(whole, shared, atol=1e-5)


SPLIT = """
import jax, numpy as np
from posttrain import schema, scoring, sharding
from posttrain.models import transformer
from tests import fixtures
from tests.test_scoring import CFG as cfg, _alike, _sequences
mesh = sharding.make_mesh(schema.Mesh(data=2, fsdp=2, tensor=1))
whole = fixtures.params(cfg)
params = jax.device_put(
    whole, sharding.shardings(whole, transformer.SHARDING_RULES, mesh)
)
sequences = _sequences(range(1, 17))
for reads in ('logprobs', 'logprobs_and_top'):
  split = scoring.Scorer(cfg, 4, 16, mesh, reads)(params, *sequences)
  single = scoring.Scorer(cfg, 4, 16, None, reads)(whole, *sequences)
  trees = scoring.Scorer(cfg, 4, 16, mesh, reads, trees=True)
  alike = scoring.Scorer(cfg, 4, 16, None, reads)(whole, *_alike())
  pairs = [*zip(split, single), *zip(trees(params, *_alike()), alike)]
  for a, b in pairs:
    np.testing.assert_allclose(a, b, atol=1e-5)
"""


@pytest.mark.slow
def test_scores_on_a_mesh_equal_those_of_one_device():
  fixtures.run_on_devices(4, '-c', SPLIT)


def test_scorer_refuses_a_sequence_longer_than_a_row(params):
  scorer = scoring.Scorer(CFG, rows=2, row_tokens=T)
  with pytest.raises(ValueError, match='sequence 1 must fit .* got 17 tokens'):
    scorer(params, *_sequences([3, 17]))
