"""References: names, loading, and logprobs at the samples' temperatures."""

import dataclasses
import types

import jax
import numpy as np
import pytest

from posttrain import schema, scoring, sharding
from posttrain.chat import rendering
from posttrain.checkpoints import store
from posttrain.models import transformer
from posttrain.rollout import frozen_models
from posttrain.stage import preflight
from tests import fixtures
from tests.algorithms import two_turns

ROWS, T = 2, 32


def params(seed):
  return fixtures.params(seed=seed)


def make(load, **options):
  return frozen_models.References(
    fixtures.MODEL,
    fixtures.RENDERER,
    lambda model, width: scoring.Scorer(model, ROWS, width),
    capacity=T,
    load=load,
    **options,
  )


def samples(low=0.5, high=2.0):
  """Returns samples whose temperatures are in this range."""
  rng = np.random.default_rng(0)
  return [
    two_turns.sample(
      task=None,
      temperatures=rng.uniform(low, high, 9).astype(np.float32),
      ids=rng.integers(0, 256, 9).astype(np.int32),
    )
    for _ in range(3)
  ]


def refuse(name):
  raise AssertionError(name)


def policy():
  refs = make(refuse)
  refs.set_policy({'policy': params(0)})
  return refs


def test_policy_logprobs_are_bitwise_at_the_samples_temperatures():
  batch = samples()
  expected = forward([s.ids for s in batch], [s.temperatures for s in batch])
  for a, b in zip(policy()('policy', batch), expected, strict=True):
    np.testing.assert_array_equal(a, b)


def test_each_name_is_loaded_once_with_its_own_parameters():
  names = []

  def load(name):
    names.append(name)
    return frozen_models.Model(params(int(name[-1])), fixtures.MODEL)

  refs, batch = make(load), samples()
  for index in (1, 2, 1):
    refs.set_policy({'policy': params(index)})
    scored = refs(f'stage:{index}', batch)
    for a, b in zip(scored, refs('policy', batch), strict=True):
      np.testing.assert_array_equal(a, b)
  assert names == ['stage:1', 'stage:2']


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  folder = tmp_path_factory.mktemp('run')
  save(folder, 3, params(1), fixtures.MODEL)
  return folder


def save(folder, step, weights, model):
  saver = store.Checkpointer(
    str(folder / 'checkpoints' / 'sft'), schema.Checkpoint()
  )
  host = {
    'tokenizer': fixtures.RENDERER.fingerprint,
    'model': dataclasses.asdict(model),
    'stage': 'sft',
    'config': {'tokenizer': {}, 'sft': {'optim': {}, 'eval': {}}},
  }
  saver.save(step, {'params': weights}, host)
  saver.close()


def loader(workdir, renderer=fixtures.RENDERER, **folders):
  return preflight.Loader(
    0,
    str(workdir),
    folders,
    params(0),
    fixtures.MODEL,
    renderer,
    sharding.make_mesh(schema.Mesh()),
  )


def test_names_are_resolved_to_steps(workdir, tmp_path):
  step = 'checkpoints/sft/3'
  names = [str(workdir / x) for x in ('', 'checkpoints/sft', step)]
  for name in ('stage:sft', *names):
    assert preflight.resolve_folder(name, str(workdir)) == step
  assert preflight.resolve_folder(names[0], str(tmp_path)) == names[-1]
  for name in ('init', 'policy', 'random'):
    assert preflight.resolve_folder(name, str(workdir)) == name
  for name in ('stage:grpo', 'polcy'):
    with pytest.raises(ValueError, match=f'must be .*got .*{name[-4:]}'):
      preflight.resolve_folder(name, str(workdir))


def test_a_run_may_begin_with_random_weights(workdir):
  load = loader(workdir, init='random')
  expected = transformer.init(jax.random.key(0), fixtures.MODEL)
  jax.tree.map(np.testing.assert_allclose, load.init(), expected)


def test_changed_weights_are_refused_on_loading(workdir):
  renderer = rendering.load(schema.Tokenizer(eos='<|tool|>'))
  load = loader(workdir, renderer, init='checkpoints/sft/3')
  with pytest.raises(
    ValueError, match="weights of 'init' must .*config.tokenizer must be what"
  ):
    load('init')


HINT = ({'role': 'system', 'content': 'It is 7.'},)


def forward(sequences, temperatures):
  scorer = scoring.Scorer(fixtures.MODEL, ROWS, T)
  return scorer(params(0), sequences, temperatures)


def test_a_hint_precedes_a_sample_without_a_task():
  """Compares with a forward over the concatenated sequence."""
  batch = samples(1.0, 1.0)
  scored = policy()('policy', batch, [HINT] * len(batch))
  head = fixtures.RENDERER.render(HINT).ids
  for sample, logprobs in zip(batch, scored, strict=True):
    ids = np.concatenate([head, sample.ids])
    (whole,) = forward([ids], [np.ones(len(ids), np.float32)])
    np.testing.assert_allclose(
      logprobs[1:], whole[-len(sample) + 1 :], atol=2e-5
    )


def test_a_hint_is_in_the_prompt_of_the_sample():
  """Compares with a forward over the hinted prompt and the completion."""
  render = fixtures.RENDERER.render
  prompt = two_turns.TASK.prompt
  own = render(prompt, add_generation_prompt=True).ids
  completion = samples()[0].ids
  ids = np.concatenate([own, completion])
  heat = np.full(2 * T, 0.7, np.float32)
  sample = two_turns.sample(ids=ids, temperatures=heat[: len(ids)])
  (scored,) = policy()('policy', [sample], [HINT])
  head = render((*HINT, *prompt), add_generation_prompt=True).ids
  ids = np.concatenate([head, completion])
  (whole,) = forward([ids], [heat[: len(ids)]])
  assert len(scored) == len(sample.ids) and not scored[: len(own)].any()
  np.testing.assert_allclose(scored[len(own) :], whole[len(head) :], atol=2e-5)


def test_a_hint_goes_into_the_first_message_of_its_role():
  system, user = ({'role': r, 'content': r[0]} for r in ('system', 'user'))
  hint = {'role': 'user', 'content': 'h'}
  both = {'role': 'user', 'content': 'h\n\nu'}
  assert frozen_models.hinted((system, user, user), (hint,)) == (
    *(system, both, user),
  )
  hint = {'role': 'system', 'content': 'h'}
  assert frozen_models.hinted((user,), (hint,)) == (hint, user)


def test_model_of_another_shape_scores_with_its_own_options(tmp_path):
  """A teacher is often larger than its student."""
  bigger = dataclasses.replace(fixtures.MODEL, layers=3, mlp_dim=48)
  weights = fixtures.params(bigger)
  save(tmp_path, 1, weights, bigger)
  folder = str(tmp_path / 'checkpoints/sft/1')
  load = loader(tmp_path, big=folder, init='checkpoints/sft/1')
  model = load('big')
  assert model.cfg == bigger
  jax.tree.map(np.testing.assert_array_equal, model.params, weights)
  assert all(x.any() for x in make(load)('big', samples()))
  with pytest.raises(ValueError, match='its layers is 3, and config.model'):
    load('init')


def test_model_with_a_smaller_vocabulary_is_refused(monkeypatch):
  few = dataclasses.replace(fixtures.MODEL, vocab_size=100)
  read = preflight.weights.Checkpoint('x', 'hf', few, None)
  monkeypatch.setattr(preflight.weights, 'read', lambda folder: read)
  monkeypatch.setattr(preflight.weights, 'check', lambda *args: None)
  with pytest.raises(ValueError, match='must have 2.. tokens: got 100'):
    preflight.check_reference('x', fixtures.MODEL, fixtures.RENDERER)


def test_equal_endpoints_share_one_client():
  calls = []

  def connect(cfg, caller, vocab_size):
    calls.append(cfg)
    return types.SimpleNamespace(
      check=lambda renderer: None, score=score, close=calls.clear
    )

  def score(sequences, caller):
    assert {t for _, t in sequences} == {0.5}
    return [np.full(len(x), -1, np.float32) for x, _ in sequences]

  a = schema.Endpoint(name='m', base_url='http://h/v1')
  refs = make(refuse, client=connect)
  for name in (a, dataclasses.replace(a)):
    assert all((x[1:] == -1).all() for x in refs(name, samples(0.5, 0.5)))
  assert calls == [a]
  refs.close()
  assert not calls


def test_tokens_beyond_a_references_vocabulary_are_refused():
  """A policy may sample rows beyond its tokenizer's vocabulary."""
  few = dataclasses.replace(fixtures.MODEL, vocab_size=200)
  refs = make(lambda name: frozen_models.Model(None, few))
  sample = samples()[0]
  sample.ids[3] = 250
  with pytest.raises(ValueError, match='got token 2.., expected less than 200'):
    refs('stage:a', [sample])
