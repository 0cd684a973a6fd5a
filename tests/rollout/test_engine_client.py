"""The engine in other processes, against the one of this process."""

import contextlib
import dataclasses
import http.server
import logging
import threading

import jax
import numpy as np
import pytest

import posttrain
from posttrain import sharding, types
from posttrain.decode import engines, requests
from posttrain.rollout import calls, engine_client
from tests import fixtures
from tests.decode import helpers

pytest.importorskip('starlette')
pytest.importorskip('uvicorn')
from tests.rollout import vllm_routes
from tests.serve import samplers

# Those of the tests of the server, with which it shares programs.
SIZES = {
  'slots': 4,
  'capacity': 96,
  'chunk': 4,
  'prefill_rows': 8,
  'prefill_tokens': 64,
  'seed': 5,
}
PARAMS = helpers.params(fixtures.MODEL)
INFO = {
  'posttrain': posttrain.__version__,
  'model': dataclasses.asdict(fixtures.MODEL),
  'engine': SIZES,
  'tensor': 1,
  'scale': 1.0,
  'factors': False,
}
MORE = jax.tree.map(lambda x: 1.1 * x, PARAMS)


@pytest.fixture(autouse=True)
def quick_tries(monkeypatch):
  monkeypatch.setattr(engine_client, '_SHORTEST', 0.01)
  monkeypatch.setattr(engine_client, 'TRIES', 6)


def engine():
  return engines.Engine(
    fixtures.MODEL, engines.Options(**SIZES), sharding.one_device()
  )


def client(*urls, **options):
  spec = types.Samplers(urls, **options)
  return engine_client.EngineClient(spec, INFO, engine(), fixtures.RENDERER)


def batch(hold=False):
  """Three groups of three; more requests than slots."""
  rng = np.random.default_rng(0)
  prompts = rng.integers(1, 200, (3, 6)).astype(np.int32)
  return [
    requests.Request(100 + i, prompts[i // 3], 7, (helpers.EOS,), hold=hold)
    for i in range(9)
  ]


def play(decoder, hold=False, disturb=lambda: None):
  """Plays two turns of each request; returns all completions in order."""
  for request in batch(hold):
    decoder.submit(request)
  turns, completions = {}, []
  while len(turns) < 9 or not all(x == 1 + hold for x in turns.values()):
    for x in decoder.poll():
      completions.append(x)
      turns[x.id] = turns.get(x.id, 0) + 1
      if hold and turns[x.id] == 1:
        decoder.extend(x.id, np.array([5, 6], np.int32), 5)
      elif hold:
        decoder.release(x.id)
    disturb()
  return completions


def generate(decoder, some):
  """Returns the completions in the order of the requests."""
  for request in some:
    decoder.submit(request)
  completions = {}
  while len(completions) < len(some):
    completions |= {x.id: x for x in decoder.poll()}
  return [completions[x.id] for x in some]


def equal(got, expected):
  assert [x.id for x in got] == [x.id for x in expected]
  for a, b in zip(got, expected, strict=True):
    assert (a.stop_reason, a.version) == (b.stop_reason, b.version)
    np.testing.assert_array_equal(a.ids, b.ids)
    np.testing.assert_array_equal(a.logprobs, b.logprobs)


def test_one_sampler_draws_the_bits_of_the_engine_here():
  """Under several weights, with slots that are held, and by single chunks."""
  here = engine()
  with samplers.running() as (url, decoder):
    there = client(url)
    for version, params in enumerate((PARAMS, MORE)):
      for x in (here, there):
        x.set_params(params, version)
      for hold in (True, False):
        equal(play(there, hold), play(here, hold))
      equal(generate(there, batch()), here.generate(batch()))
      for x in (here, there):
        x.submit(batch()[0])
      equal(there.step() + there.step(), here.step() + here.step())
      sequences = [np.arange(1, 9, dtype=np.int32)]
      np.testing.assert_array_equal(
        there.score(sequences), here.score(sequences)
      )
    assert decoder.version == 1


def test_a_sampler_that_begins_anew_draws_the_same_tokens_again(caplog):
  """Another session, and another process at the same address."""
  here, undisturbed = engine(), PARAMS
  here.set_params(undisturbed, 4)
  expected = play(here, True)
  with contextlib.ExitStack() as stack:
    first = stack.enter_context(contextlib.ExitStack())
    url, decoder = first.enter_context(samplers.running())
    there, polls = client(url), []

    def disturb():
      polls.append(1)
      if len(polls) == 2:
        decoder._session = ''
      if len(polls) == 4:
        first.close()
        port = int(url.rpartition(':')[2])
        stack.enter_context(samplers.running(port))

    there.set_params(undisturbed, 4)
    with caplog.at_level(logging.WARNING, 'absl'):
      equal(play(there, True, disturb), expected)
  assert caplog.text.count('waits for the sampler') >= 2


def test_requests_are_dealt_by_their_prompts_alone():
  """Two samplers: each gets whole groups, and a rerun is the same."""
  with samplers.running() as (a, _), samplers.running() as (b, _):
    there, results = client(a, b), []
    for _ in range(2):
      there.set_params(PARAMS, 0)
      for request in batch():
        there.submit(request)
      owners = [there._owners[x.id].url for x in batch()]
      assert owners == [a] * 3 + [b] * 3 + [a] * 3
      there.drop()
      results.append(play(there))
    equal(*results)


def test_a_sampler_that_stays_away_is_an_error():
  with samplers.running() as (url, _):
    there = client(url)
    there.set_params(PARAMS, 0)
  there.submit(batch()[0])
  with pytest.raises(calls.EndpointError, match=r'--samplers.*try 6 of 6'):
    there.poll()
  there.drop()
  there.close()  # as SIGTERM does: no further try
  there.submit(batch()[0])
  with pytest.raises(calls.EndpointError, match='try 1 of 6'):
    there.poll()


def test_a_sampler_of_another_learner_is_an_error_at_once():
  with samplers.running() as (url, _):
    first, second = client(url), client(url)
    for x in (first, second):
      x.set_params(PARAMS, 0)
      x.submit(batch()[0])
      assert x.poll()[0].version == 0
    first.set_params(MORE, 1)
    first.submit(batch()[0])
    with pytest.raises(calls.EndpointError, match=f'409.*{url}.*another run'):
      first.poll()


def test_a_server_of_another_kind_is_an_error_at_once():
  class Pages(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
      pass

  with http.server.HTTPServer(('127.0.0.1', 0), Pages) as server:
    threading.Thread(target=server.serve_forever).start()
    there = client(f'http://127.0.0.1:{server.server_port}')
    there.set_params(PARAMS, 0)
    there.submit(batch()[0])
    with pytest.raises(calls.EndpointError, match='501.*serve --sampler') as e:
      there.poll()
    server.shutdown()
  assert '<' not in str(e.value)


def test_a_refusal_is_an_error_at_once(monkeypatch):
  monkeypatch.setenv('RIGHT', 'secret')
  monkeypatch.setenv('WRONG', 'other')
  with samplers.running(api_key='secret') as (url, _):
    for key, raises in (('WRONG', True), ('RIGHT', False)):
      there = client(url, api_key_env=key)
      there.set_params(PARAMS, 0)
      there.submit(batch()[0])
      error = pytest.raises(calls.EndpointError, match='401.*samplers_key_env')
      with error if raises else contextlib.nullcontext():
        there.poll()


def test_only_changed_arrays_travel(monkeypatch):
  with samplers.running() as (url, _):
    there, sent = client(url), []
    post = engine_client._Sampler._post

    def count(self, path, body, **query):
      if path == 'update_weights':
        sent.append(len(engine_client.read_arrays(body)))
      return post(self, path, body, **query)

    monkeypatch.setattr(engine_client._Sampler, '_post', count)
    params = PARAMS
    other = {**params, 'embed': jax.tree.map(lambda x: -x, params['embed'])}
    for version, weights in enumerate((params, other, other)):
      there.set_params(weights, version)
      assert generate(there, batch()[:1])[0].version == version
    assert sent == [len(jax.tree.leaves(params)), 1, 0]


def test_wrong_weights_are_sent_again(monkeypatch, caplog):
  """A bit that changes on the way never samples a token."""
  here = engine()
  here.set_params(PARAMS, 0)
  with samplers.running() as (url, _):
    there, faults = client(url), [1]
    read = engine_client.read_arrays

    def damaged(data):
      arrays = read(data)
      if faults:
        faults.pop()
        name = next(iter(arrays))
        arrays[name] = arrays[name].copy()
        arrays[name].view(np.uint32).flat[0] ^= 1
      return arrays

    monkeypatch.setattr(engine_client, 'read_arrays', damaged)
    there.set_params(PARAMS, 0)
    equal(generate(there, batch()), here.generate(batch()))
    assert not faults and 'status 422' in caplog.text


def test_logprobs_of_a_policy_that_has_diverged_arrive():
  with samplers.running() as (url, _):
    there = client(url)
    there.set_params(jax.tree.map(lambda x: x * np.nan, PARAMS), 0)
    assert np.isnan(generate(there, batch()[:1])[0].logprobs).all()


def test_vllm_gets_weights_by_its_routes_and_samples(tmp_path):
  """The calls in vLLM's order; greedy tokens of both turns, by version."""
  here = engine()
  greedy = [
    dataclasses.replace(x, sampling=helpers.GREEDY, hold=True)
    for x in batch()[::3]
  ]
  update = [
    '/pause?mode=abort',
    '/start_weight_update',
    '/update_weights',
    '/finish_weight_update',
    '/resume',
  ]
  with vllm_routes.running(engine(), fixtures.MODEL) as server:
    there = client(server.url, vllm_folder=str(tmp_path))
    for version, params in enumerate((PARAMS, MORE)):
      for x in (here, there):
        x.set_params(params, version)
        for request in greedy:
          x.submit(request)
      for more in (True, False):
        completions = {}
        for x in (here, there):
          got = {}
          while len(got) < len(greedy):
            got |= {done.id: done for done in x.poll()}
          for id in sorted(got):
            if more:
              x.extend(id, np.array([7], np.int32), 4)
            else:
              x.release(id)
          completions[x] = got
        for id, expected in completions[here].items():
          done = completions[there][id]
          assert done.ids.tolist() == expected.ids.tolist()
          assert (done.version, done.stop_reason) == (
            version,
            expected.stop_reason,
          )
          np.testing.assert_allclose(
            done.logprobs, expected.logprobs, atol=1e-4
          )
      assert server.version == str(version)
    assert server.calls == ['/init_weight_transfer_engine', *update, *update]
