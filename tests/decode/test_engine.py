"""The gates of the engine, G1 to G7, against forwards that keep no cache.

E is what the engine says, R a full forward over prompt + E (teacher forcing),
so that one flip does not hide the rest.

Programs are shared by engines of one shape, and compiling is all the time that
this takes: the shapes are `make()`, `SMALL` and `WIDE`, and one in bfloat16.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain import instrument, schema, scoring
from posttrain.decode import engine as engines
from posttrain.decode import loop, requests, schedule
from posttrain.models import transformer

MODEL = schema.Model(
    vocab_size=264, layers=2, embed_dim=64, heads=4, kv_heads=2, head_dim=16,
    mlp_dim=96, qk_norm=True,
)  # fmt: skip
EOS = 257
WIDTH = 48  # of every reference forward
SMALL = {'slots': 2, 'prefill_rows': 2}
WIDE = {'capacity': 96}


@functools.cache
def params(model=MODEL, seed=0):
  made = transformer.init(jax.random.key(seed), model)
  # Spread logits: a random model is nearly uniform, and its argmax a toss-up.
  return jax.tree.map(lambda x: 1.5 * x if x.ndim > 1 else x, made)


@functools.partial(jax.jit, static_argnums=1)
def forward(params, model, ids):
  """Logits f32[B, T, V]."""
  positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
  hidden, _ = transformer.trunk(
      params, model, ids, positions, jnp.ones_like(ids)
  )
  return scoring.next_logits(params, model, hidden)


def reference(asked, done, model=MODEL):
  """R: per request, f32[n, V], the logits before each drawn token."""
  ids = np.zeros((len(asked), WIDTH), np.int32)
  for row, request, completion in zip(ids, asked, done, strict=True):
    said = np.concatenate([request.ids, completion.ids])
    row[: len(said)] = said
  logits = np.asarray(forward(params(model), model, ids))
  return [
      row[len(r.ids) - 1 : len(r.ids) - 1 + len(c.ids)]
      for row, r, c in zip(logits, asked, done, strict=True)
  ]


def log_softmax(z):
  z = np.asarray(z, np.float64)
  z = z - z.max(-1, keepdims=True)
  return z - np.log(np.exp(z).sum(-1, keepdims=True))


def make(model=MODEL, slots=8, capacity=WIDTH, **options):
  options = {'prefill_rows': 4, 'prefill_tokens': 8, 'chunk': 4, **options}
  engine = engines.Engine(model, slots=slots, capacity=capacity, **options)
  engine.set_params(params(model), 0)
  return engine


def ask(count, seed=0, sampling=None, max_tokens=16, **options):
  """Requests of ragged prompts, 1 to 20 tokens long."""
  rng = np.random.default_rng(seed)
  sampling = sampling or requests.Sampling()
  return [
      requests.Request(
          1000 * seed + i, rng.integers(0, 256, rng.integers(1, 21)),
          max_tokens, (EOS,), sampling, **options,
      )
      for i in range(count)
  ]  # fmt: skip


GREEDY = requests.Sampling(temperature=0.0)


@functools.cache
def baseline():
  """Some requests, and what they get in the plainest way."""
  asked = ask(12, seed=1)
  return asked, make().generate(asked)


def poll(engine, count):
  """Polls until so many requests have stopped."""
  done = []
  while len(done) < count:
    done += engine.poll()
  assert len(done) == count
  return done


def same(a, b):
  return all(
      x.id == y.id and np.array_equal(x.ids, y.ids)
      and x.stop_reason == y.stop_reason
      for x, y in zip(a, b, strict=True)
  )  # fmt: skip


def test_g1_greedy_is_the_argmax_of_a_full_forward():
  asked = ask(24, sampling=GREEDY)
  done = make().generate(asked)
  gaps = []
  for logits, completion in zip(reference(asked, done), done, strict=True):
    best = np.sort(logits, -1)
    gaps.append((best[:, -1] - best[:, -2]).min())
    np.testing.assert_array_equal(logits.argmax(-1), completion.ids)
    law = log_softmax(logits)[np.arange(len(logits)), completion.ids]
    np.testing.assert_allclose(completion.logprobs, law, atol=5e-5)
  assert min(gaps) > 1e-4  # otherwise equality would prove luck


def test_g2_greedy_bfloat16_differs_only_at_ties():
  model = dataclasses.replace(MODEL, dtype='bfloat16', layers=1)
  asked = ask(24, sampling=GREEDY)
  done = make(model).generate(asked)
  worst, errors, flips, total = 0.0, [], [], 0
  for logits, completion in zip(
      reference(asked, done, model), done, strict=True
  ):
    law = log_softmax(logits)[np.arange(len(logits)), completion.ids]
    errors.append(np.abs(completion.logprobs - law))
    total += len(logits)
    at = np.flatnonzero(logits.argmax(-1) != completion.ids)
    flips += list(logits[at].max(-1) - logits[at, completion.ids[at]])
  errors = np.concatenate(errors)
  worst = errors.max()
  assert errors.mean() <= 0.03 and worst <= 0.15
  assert len(flips) <= 0.03 * total
  assert all(gap <= 4 * worst for gap in flips)


def test_g3_sampled_tokens_are_those_of_a_naive_sampler():
  """The same numbers, a full forward, and a flat CDF in double precision."""
  hot = requests.Sampling(temperature=0.8)
  asked = ask(24, seed=2, sampling=hot)
  done = make(seed=5).generate(asked)
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
  asked, expected = baseline()
  assert same(make().generate(asked), expected)
  back = make().generate(asked[::-1])[::-1]  # other slots, other company
  assert same(back, expected)
  assert same(make(chunk=1).generate(asked), expected)
  assert same(make(chunk=64, prefill_tokens=32).generate(asked), expected)
  assert same(make(**WIDE).generate(asked), expected)
  assert same(make(**SMALL).generate(asked), expected)
  alone = [make(slots=8).generate([request])[0] for request in asked[:3]]
  assert same(alone, expected[:3])


def test_g4_a_rerun_is_bitwise():
  asked, expected = baseline()
  for a, b in zip(make().generate(asked), expected, strict=True):
    assert a.logprobs.tobytes() == b.logprobs.tobytes()


def test_g4_numbers_differ_by_seed_and_id_and_not_by_slot():
  prompt = np.arange(5)
  group = [requests.Request(i, prompt, 16) for i in range(4)]
  far = [requests.Request(2**40 + i, prompt, 16) for i in range(4)]
  engine = make()
  first, again = engine.generate(group), engine.generate(group[::-1])[::-1]
  assert same(first, again)
  said = {c.ids.tobytes() for c in (*first, *engine.generate(far))}
  assert len(said) == 8
  assert not same(first, make(seed=1).generate(group))


def test_g5_a_stop_token_is_kept_and_ends_it():
  asked, done = baseline()
  _, cut = asked[0], done[0]
  stop = int(cut.ids[5])
  first = int(np.flatnonzero(cut.ids == stop)[0])
  (short,) = make().generate(
      [dataclasses.replace(asked[0], stop_ids=(EOS, stop))]
  )
  assert short.stop_reason == 'eos'
  np.testing.assert_array_equal(short.ids, cut.ids[: first + 1])
  np.testing.assert_allclose(
      short.logprobs, cut.logprobs[: first + 1], atol=1e-6
  )


def test_g5_the_first_token_may_stop_and_budgets_hold():
  asked, done = baseline()
  stop = (int(done[1].ids[0]),)
  first, one, rest = make().generate([
      dataclasses.replace(asked[1], stop_ids=stop),
      dataclasses.replace(asked[2], max_tokens=1), asked[3],
  ])
  assert first.stop_reason == 'eos' and len(first.ids) == 1
  assert one.stop_reason == 'max_tokens'
  np.testing.assert_array_equal(one.ids, done[2].ids[:1])
  assert same([rest], [done[3]])


def test_g5_prompts_of_every_length():
  prompt = np.random.default_rng(0).integers(0, 256, WIDTH)
  lengths = (1, 7, 8, 9, 16, WIDTH - 1, WIDTH)  # around the prefill chunk
  asked = [requests.Request(n, prompt[:n], 100) for n in lengths]
  done = make().generate(asked)
  for request, completion in zip(asked, done, strict=True):
    assert completion.stop_reason == 'overflow'
    assert len(completion.ids) == WIDTH - len(request.ids)
  for logits, completion in zip(reference(asked, done), done, strict=True):
    law = log_softmax(logits)[np.arange(len(logits)), completion.ids]
    np.testing.assert_allclose(completion.logprobs, law, atol=5e-5)


def test_g6_score_is_what_the_sampler_said():
  for temperature in (1.0, 0.7):
    sampling = requests.Sampling(temperature=temperature)
    asked = ask(8, seed=3, sampling=sampling)
    engine = make()
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
  engine = make()
  engine.generate(ask(10, seed=4))
  with instrument.CompileCounter() as compiles:
    for wave in range(3):
      engine.set_params(params(seed=wave), wave)
      laws = (
          requests.Sampling(0.5 + wave, 3 * wave, 1 - wave / 4, wave / 10),
          requests.Sampling(0.0),
      )
      for i, law in enumerate(laws):
        done = engine.generate(ask(
            7 + 5 * wave, seed=5 + 2 * wave + i, sampling=law,
            max_tokens=3 + 7 * wave,
        ))  # fmt: skip
        assert all(completion.version == wave for completion in done)
  assert compiles.count == 0


def test_new_weights_are_used():
  asked, expected = baseline()
  engine = make()
  engine.set_params(params(seed=1), 1)
  assert not same(engine.generate(asked), expected)
  engine.set_params(params(), 2)
  assert same(engine.generate(asked), expected)


def test_the_view_survives_donated_params():
  asked, expected = baseline()
  engine = make()
  mine = jax.tree.map(jnp.copy, params())
  engine.set_params(mine, 1)
  jax.tree.map(lambda x: x.delete(), mine)
  assert same(engine.generate(asked), expected)


def test_each_prompt_of_a_group_is_prefilled_once(monkeypatch):
  fed = []
  prefill = loop.prefill

  def spy(view, model, scratch, logits, tokens, start, count):
    fed.append(int(np.sum(count)))
    return prefill(view, model, scratch, logits, tokens, start, count)

  monkeypatch.setattr(loop, 'prefill', spy)
  rng = np.random.default_rng(0)
  prompts = [rng.integers(0, 256, n) for n in (5, 9, 13, 6)]
  asked = [
      requests.Request(4 * i + j, prompt, 8)
      for i, prompt in enumerate(prompts) for j in range(4)
  ]  # fmt: skip
  make(slots=8).generate(asked)
  assert sum(fed) == sum(len(prompt) for prompt in prompts)


def test_the_loop_stops_when_all_rows_have(monkeypatch):
  steps = []
  decode = loop.decode

  def spy(*args):
    before = np.asarray(args[2].length)
    state = decode(*args)
    steps.append(int((np.asarray(state.length) - before).max()))
    return state

  monkeypatch.setattr(loop, 'decode', spy)
  make().generate(
      [requests.Request(i, np.arange(4), 3 + i) for i in range(4)]
  )
  # The first token comes with the prompt; the longest has 5 more.
  assert steps == [5]


def test_extend_goes_on_as_if_it_had_all_been_the_prompt():
  asked = ask(3, seed=6, max_tokens=6, hold=True)
  engine = make()
  for request in asked:
    engine.submit(request)
  first = {c.id: c for c in poll(engine, 3)}
  new = [np.array([65, 66, 67]), np.zeros(0, np.int32), np.arange(70, 81)]
  for request, ids in zip(asked, new, strict=True):
    engine.extend(request.id, ids, 7)
  second = {c.id: c for c in poll(engine, 3)}
  for request, ids in zip(asked, new, strict=True):
    prompt = np.concatenate([request.ids, first[request.id].ids, ids])
    (fresh,) = make().generate(
        [requests.Request(request.id, prompt, 7, (EOS,))]
    )
    assert same([second[request.id]], [fresh])
    np.testing.assert_allclose(
        second[request.id].logprobs, fresh.logprobs, atol=1e-5
    )
    engine.release(request.id)
  assert engine.poll() == []


def test_queued_requests_go_on_beside_held_ones():
  engine = make(**SMALL)
  engine.submit(requests.Request(1, np.arange(3), 4, hold=True))
  for i in range(2, 6):
    engine.submit(requests.Request(i, np.arange(i), 4))
  assert sorted(c.id for c in poll(engine, 5)) == [1, 2, 3, 4, 5]
  engine.release(1)


def test_a_pool_of_held_slots_says_so():
  engine = make(**SMALL)
  for i in (1, 2):
    engine.submit(requests.Request(i, np.arange(3), 4, hold=True))
  engine.submit(requests.Request(3, np.arange(3), 4))
  poll(engine, 2)
  with pytest.raises(ValueError, match='all 2 are held; extend or release'):
    engine.poll()


def test_extensions_overflow():
  engine = make()
  engine.submit(requests.Request(1, np.arange(4), 4, hold=True))
  engine.poll()
  engine.extend(1, np.arange(37), 100)
  (completion,) = engine.poll()
  assert completion.stop_reason == 'overflow' and len(completion.ids) == 3
  engine.extend(1, np.arange(5), 100)
  (completion,) = engine.poll()
  assert completion.stop_reason == 'overflow' and len(completion.ids) == 0
  engine.release(1)
  assert engine.poll() == []


def test_capacity_grows_in_buckets():
  asked, expected = baseline()
  engine = make(capacity=None)
  assert same(engine.generate(asked), expected)
  longest = max(len(request.ids) + 16 for request in asked)
  assert engine.capacity == schedule.bucket(longest) == WIDTH
  engine.submit(requests.Request(99, np.arange(9), 10, hold=True))
  (held,) = poll(engine, 1)
  # It grows around what is held, for another and for itself.
  long = requests.Request(98, np.arange(40), 30)
  engine.submit(long)
  engine.submit(asked[4])
  assert engine.capacity == 96
  done = sorted(poll(engine, 2), key=lambda c: c.id)
  assert same(done, [*make(**WIDE).generate([long]), expected[4]])
  engine.extend(99, np.arange(30), 20)
  (more,) = poll(engine, 1)
  assert engine.capacity == 96 and len(more.ids) == 20
  whole = np.concatenate([np.arange(9), held.ids, np.arange(30)])
  (fresh,) = make(**WIDE).generate([requests.Request(99, whole, 20)])
  assert same([more], [fresh])
  with pytest.raises(ValueError, match='request 99 must ask for a token'):
    engine.extend(99, np.arange(200), 0)
  engine.extend(99, np.zeros(0), 50)  # an extension, too, may ask for more
  assert engine.capacity == 128


@pytest.mark.parametrize(
    'tokens, size', [(1, 32), (32, 32), (33, 48), (49, 64), (65, 96), (97, 128),
                     (129, 192), (1000, 1024)]
)  # fmt: skip
def test_buckets(tokens, size):
  assert schedule.bucket(tokens) == size


def test_errors_name_what_is_wrong():
  engine = make()
  request = requests.Request(7, np.arange(3), 4, hold=True)
  for wrong, message in (
      ({'ids': np.zeros(0)}, 'request 7 must have a prompt'),
      ({'max_tokens': 0}, 'request 7 must ask for a token'),
      ({'stop_ids': tuple(range(9))}, 'at most 8 stop ids'),
      ({'id': -1}, 'request -1 must have an id'),
  ):
    with pytest.raises(ValueError, match=message):
      engine.submit(dataclasses.replace(request, **wrong))
  with pytest.raises(ValueError, match='request 7 must be held'):
    engine.extend(7, np.arange(3), 4)
  engine.submit(request)
  with pytest.raises(ValueError, match='request 7 must not be in flight'):
    engine.submit(request)
  with pytest.raises(ValueError, match='no request is in flight: got 1'):
    engine.set_params(params(), 1)
  engine.poll()
  engine.release(7)
  with pytest.raises(ValueError, match='keep their tree'):
    engine.set_params({'embed': params()['embed']}, 1)
  with pytest.raises(ValueError, match='top_p must be in'):
    requests.Sampling(top_p=0.0)
