"""Episodes with the decode engine: samples, masks and logprobs."""

import jax
import numpy as np
import pytest

from posttrain import scoring
from posttrain.decode import engine as engines
from posttrain.models import transformer
from posttrain.rollout import driver
from tests import fixtures
from tests.rollout import fakes

EOS = fixtures.RENDERER.tokenizer.eos_id
MAX_LENGTH = 40  # too short for three cut turns
CAPACITY = 48
TEMPERATURES = (1.0, 0.7, 1.5, 0.0)


class Engine(engines.Engine):
  """An engine that records the tokens of its slots."""

  def __init__(self):
    super().__init__(fixtures.MODEL, slots=3, capacity=CAPACITY, seed=1)
    self.ids = {}

  def submit(self, request):
    super().submit(request)
    self.ids[request.id] = request.ids.tolist()

  def extend(self, id, ids, max_tokens):
    super().extend(id, ids, max_tokens)
    self.ids[id] += ids.tolist()

  def poll(self):
    completions = super().poll()
    for completion in completions:
      self.ids[completion.id] += completion.ids.tolist()
    return completions


@pytest.fixture(scope='module')
def params():
  """The tiny model with a higher probability of eos."""
  params = transformer.init(jax.random.key(0), fixtures.MODEL)
  table = params['embed']['table']
  params['embed']['table'] = table.at[EOS].multiply(4)
  return params


def run(params, uids, max_length=MAX_LENGTH, more_turns=0):
  engine = Engine()
  engine.set_params(params, version=5)
  rollouts = driver.Driver(engine, fixtures.RENDERER, max_length).run(
    [
      fakes.spec(
        uid,
        fakes.Recall(max_turns=1 + uid % 3 + more_turns),
        turns=9,
        temperature=TEMPERATURES[uid // 3],
        max_tokens=9,
      )
      for uid in uids
    ]
  )
  engine.set_params(params, version=6)  # raises if a slot is taken
  return rollouts, engine


@pytest.fixture(scope='module')
def results(params):
  return run(params, range(12))


def test_all_stop_reasons_occur(results):
  rollouts, _ = results
  assert {rollout.stop_reason for rollout in rollouts} == {
    'eos',
    'max_tokens',
    'max_turns',
    'overflow',
  }
  assert [rollout.uid for rollout in rollouts] == list(range(12))


def test_sampler_logprobs_equal_the_scorers(params, results):
  samples = [rollout.samples[0] for rollout in results[0]]
  scorer = scoring.Scorer(fixtures.MODEL, rows=4, row_tokens=64)
  scored = scorer(
    params,
    [sample.ids for sample in samples],
    [sample.temperatures for sample in samples],
  )
  for sample, logprobs in zip(samples, scored, strict=True):
    np.testing.assert_allclose(
      sample.sampler_logprobs, np.where(sample.mask, logprobs, 0), atol=1e-5
    )
    np.testing.assert_array_equal(sample.versions, np.where(sample.mask, 5, -1))


def test_sample_has_the_tokens_of_its_slot(results):
  for rollout in results[0]:
    (sample,), held = rollout.samples, results[1].ids[rollout.uid]
    assert sample.ids.tolist() == held[: len(sample)]
    # The slot has more tokens only if the last reply left none for a turn.
    assert len(held) == len(sample) or rollout.stop_reason == 'overflow'
    last = rollout.messages[:-1]  # without the environment's last message
    text = ''.join(message['content'] for message in last)
    assert fixtures.RENDERER.tokenizer.decode(sample.ids.tolist()) == text
    turns = sum(message['role'] == 'assistant' for message in last)
    edges = np.diff(np.concatenate([[0], sample.mask, [0]]))
    assert (edges == 1).sum() == turns and sample.mask[-1]


def test_other_episodes_and_slots_do_not_change_an_episode(params, results):
  rollouts, _ = run(params, [8, 4, 2, 1])
  for rollout in rollouts:
    (sample,), (other,) = rollout.samples, results[0][rollout.uid].samples
    np.testing.assert_array_equal(sample.ids, other.ids)
    np.testing.assert_array_equal(sample.mask, other.mask)
    np.testing.assert_allclose(
      sample.sampler_logprobs, other.sampler_logprobs, atol=1e-5
    )


def test_full_slot_ends_the_episode_with_overflow(params):
  rollouts, _ = run(params, range(4), max_length=200, more_turns=6)
  for rollout in rollouts:
    assert rollout.stop_reason == 'overflow'
    assert 30 < len(rollout.samples[0]) <= CAPACITY
