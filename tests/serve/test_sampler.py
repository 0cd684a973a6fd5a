"""A sampler by its routes: sessions, weights in two phases, the engine."""

import dataclasses

import httpx
import jax
import numpy as np
import pytest
import safetensors.numpy

import posttrain
from posttrain import tree
from tests import fixtures
from tests.decode import helpers

pytest.importorskip('starlette')
pytest.importorskip('uvicorn')
from tests.serve import samplers

INFO = {
  'posttrain': posttrain.__version__,
  'model': dataclasses.asdict(fixtures.MODEL),
  'engine': {'slots': 4, 'capacity': 96, 'seed': 3},
  'tensor': 1,
  'scale': 1.0,
  'factors': False,
}
PARAMS = helpers.params(fixtures.MODEL)
SUMS = tree.checksums(PARAMS)
LEAVES = {k: np.array(x) for k, x in tree.flat(PARAMS).items()}


@pytest.fixture(scope='module')
def served():
  with samplers.running() as (url, decoder):
    yield url, decoder


class Learner:
  """Posts to a sampler, in a session of its own."""

  def __init__(self, url):
    self.url = url
    reply = self.post('init_weight_transfer_engine', json={'init_info': INFO})
    self.session = reply.json()['session']

  def post(self, path, **sent):
    query = {'session': getattr(self, 'session', '')}
    return httpx.post(f'{self.url}/{path}', params=query, timeout=60, **sent)

  def update(self, *files, version='1', sums=None):
    """Sends weights; returns the status of the last answer."""
    assert self.post('pause', json={}).status_code == 200
    self.post('start_weight_update', json={})
    for data in files:
      headers = {'Content-Type': 'application/octet-stream'}
      reply = self.post('update_weights', content=data, headers=headers)
      if reply.status_code != 200:
        return reply.status_code
    body = {'weight_version': version, 'checksums': sums or SUMS}
    return self.post('finish_weight_update', json=body).status_code

  def check(self):
    body = {'action': 'compare', 'baseline': SUMS}
    return self.post('weight_checker', json=body).json()


def test_weights_come_in_parts_and_are_compared(served):
  names = list(LEAVES)
  parts = [
    safetensors.numpy.save({name: LEAVES[name] for name in some})
    for some in (names[:3], names[3:])
  ]
  learner = Learner(served[0])
  assert learner.update(*parts) == 200
  assert learner.check() == {'match': True, 'mismatches': []}
  sums = learner.post('weight_checker', json={'action': 'checksum'}).json()
  assert sums['checksums'] == SUMS
  health = httpx.get(f'{served[0]}/health').json()
  assert health == {'status': 'ok', 'version': 1}


@pytest.mark.parametrize('fault', ['torn', 'wrong', 'lacking', 'swapped'])
def test_other_weights_are_refused_and_the_old_ones_stay(served, fault):
  learner = Learner(served[0])
  assert learner.update(safetensors.numpy.save(LEAVES)) == 200
  path = 'layers/attention/q/kernel'
  leaves = {k: x + 1 for k, x in LEAVES.items()}
  sums = tree.checksums(leaves)
  if fault == 'wrong':  # one bit of one number
    leaves[path].view(np.uint32).flat[7] ^= 1
  if fault == 'lacking':
    del leaves[path]
  if fault == 'swapped':
    flat = leaves[path].reshape(-1)
    flat[[0, 1]] = flat[[1, 0]]
  data = safetensors.numpy.save(leaves)
  if fault == 'torn':
    data = data[: len(data) // 2]
  assert learner.update(data, version='2', sums=sums) == 422
  assert learner.check()['match']
  assert served[1].version == 1
  # The same update, whole.
  whole = {k: x + 1 for k, x in LEAVES.items()}
  whole = safetensors.numpy.save(whole)
  assert learner.update(whole, version='2', sums=sums) == 200
  assert not learner.check()['match'] and served[1].version == 2


def test_a_second_learner_replaces_the_first(served):
  first, second = Learner(served[0]), Learner(served[0])
  assert first.post('pause', json={}).status_code == 409
  assert second.post('pause', json={}).status_code == 200
  assert first.post('engine', json={'commands': []}).status_code == 409


def test_another_version_of_the_code_is_refused(served):
  info = {**INFO, 'posttrain': '0.0.0'}
  reply = httpx.post(
    f'{served[0]}/init_weight_transfer_engine', json={'init_info': info}
  )
  assert reply.status_code == 400 and '0.0.0' in reply.text


def test_a_page_of_a_browser_is_refused(served):
  headers = {'Content-Type': 'text/plain'}
  reply = httpx.post(f'{served[0]}/pause', content=b'{}', headers=headers)
  assert reply.status_code == 415


def test_a_key_is_required():
  with samplers.running(api_key='secret') as (url, _):
    assert httpx.post(f'{url}/pause', json={}).status_code == 401


def test_the_weights_of_an_adapter_keep_their_kernels(served):
  """The tree of arrays by path has the `Adapted` kernels of the learner's."""
  from posttrain import schema
  from posttrain.models import lora

  cfg = schema.Lora(rank=2)
  adapter = lora.init(jax.random.key(0), cfg, PARAMS)
  base = lora.Base(PARAMS, lora.scale(cfg))
  params = base.attach(adapter)
  nested = lora.nest(tree.flat(params), base.scale)
  assert jax.tree.structure(nested) == jax.tree.structure(params)
