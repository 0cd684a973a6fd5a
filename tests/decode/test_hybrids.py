"""The engine with delta layers: groups, turns, pads, stored prompts.

And with layers that read the keys and values of others.
"""

import numpy as np
import pytest

from posttrain.decode import requests
from tests.decode import helpers
from tests.models import test_hybrids, test_transformer

OPTIONS = {'slots': 4, 'prefill_rows': 2}
GREEDY = requests.Sampling(temperature=0.0)
models = pytest.mark.parametrize(
  'model',
  [
    test_hybrids.CFG,
    pytest.param(test_transformer.GEMMA4, marks=pytest.mark.slow),
  ],
  ids=['delta', 'shared_keys'],
)


def make(model, **options):
  engine = helpers.make(model, **OPTIONS, **options)
  is_hybrid = model is test_hybrids.CFG
  params = test_transformer.make_params(model)
  engine.set_params(test_hybrids.make_params() if is_hybrid else params, 0)
  return engine


def make_requests(hold=False):
  """Two groups, and prompts of one token and of one that begins as another."""
  rng = np.random.default_rng(0)
  prompts = [rng.integers(0, 48, n) for n in (13, 1, 5, 21)]
  prompts[3][:13] = prompts[0]
  order = (0, 0, 1, 3, 2, 2, 3)
  return [
    requests.Request(i, prompts[k], 6 + 3 * i, (), GREEDY, hold=hold)
    for i, k in enumerate(order)
  ]


def check(engine, done):
  """Compares greedy completions with the full forward.

  Args:
    engine: it decoded them.
    done: pairs of a sequence and the completion that ends it.
  """
  sequences, completions = zip(*done, strict=True)
  scores = engine.score(sequences, reads='logprobs_and_top')
  for x, completion in zip(scores, completions, strict=True):
    x = x[-len(completion.ids) :]
    np.testing.assert_allclose(completion.logprobs, x[:, 0], atol=1e-4)
    assert x[:, 1].all()


@models
@pytest.mark.parametrize('stored', [0, 8])
def test_groups_are_greedy_continuations(stored, model):
  """Also with the first tokens of prompts that are stored once."""
  options = {'prefix_cache': False, 'prompt_tokens': stored, 'group_size': 3}
  engine = make(model, **options if stored else {})
  batch = make_requests(stored > 0)
  for request in batch:
    engine.submit(request)
  done = []
  while engine.in_flight:
    for x in engine.poll():
      done.append((np.concatenate([batch[x.id].ids, x.ids]), x))
      if stored:
        engine.release(x.id)
  assert len(done) == len(batch)
  check(engine, done)


@models
def test_held_turns_are_one_sequence(model):
  """Others decode in between, and leave the held state as it is."""
  engine = make(model)
  rng = np.random.default_rng(1)
  whole, ended = {}, []
  for id, length in ((100, 9), (101, 3)):
    whole[id] = rng.integers(0, 48, length)
    engine.submit(requests.Request(id, whole[id], 5, (), GREEDY, hold=True))
  for _ in range(3):
    for done in helpers.poll(engine, 2):
      whole[done.id] = np.concatenate([whole[done.id], done.ids])
      ended.append((whole[done.id], done))
    for request in make_requests()[:3]:
      engine.submit(request)
    helpers.poll(engine, 3)
    for id, length in ((100, 1), (101, 4)):
      new = rng.integers(0, 48, length)
      whole[id] = np.concatenate([whole[id], new])
      engine.extend(id, new, 4)
  check(engine, ended)
