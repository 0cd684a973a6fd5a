"""References: whose logprobs they are, at whose temperatures."""

import dataclasses

import jax
import numpy as np
import pytest

from posttrain import checkpoint, schema, scoring, types
from posttrain.chat import renderer as chat
from posttrain.models import transformer
from posttrain.rollout import references
from tests import fixtures

ROWS, T = 2, 32
LENGTHS = (20, 12, 25)  # the rows are 25 and 20 + 12
PRINT = fixtures.RENDERER.fingerprint


@jax.jit
def score(params, *rows):
  return scoring.score(params, fixtures.MODEL, *rows)[0]


def params(seed):
  return transformer.init(jax.random.key(seed), fixtures.MODEL)


@pytest.fixture(scope='module')
def scorer():
  return scoring.Scorer(fixtures.MODEL, ROWS, T)


def samples(temperature=None):
  rng = np.random.default_rng(0)
  made = []
  for n in LENGTHS:
    heat = rng.uniform(0.5, 2.0, n)
    made.append(types.Sample(
        env='e', row='r', ids=rng.integers(0, 256, n).astype(np.int32),
        mask=np.arange(n) > 4, roles=np.ones(n, np.int8),
        is_content=np.ones(n, bool), sampler_logprobs=np.zeros(n, np.float32),
        temperatures=np.float32(heat if temperature is None else (
            np.full(n, temperature)
        )), versions=np.zeros(n, np.int32),
    ))
  return made


def refuse(name):
  raise AssertionError(name)


@pytest.mark.parametrize('temperature', [None, 1.0])
def test_the_policy_is_scored_to_the_bit_at_the_samples_temperatures(
    scorer, temperature
):
  given = samples(temperature)
  made = references.References(scorer, refuse)
  made.set_policy(params(0))
  scored = made('policy', given)
  ids, positions, segments = np.zeros((3, ROWS, T), np.int32)
  heat = np.ones((ROWS, T), np.float32)
  places = {2: (0, 0), 0: (1, 0), 1: (1, 20)}
  for segment, (index, (row, start)) in enumerate(places.items(), 1):
    place = row, slice(start, start + LENGTHS[index])
    ids[place], segments[place] = given[index].ids, segment
    positions[place] = np.arange(LENGTHS[index])
    heat[place] = given[index].temperatures
  expected = score(params(0), ids, positions, segments, heat)
  for index, (row, start) in places.items():
    np.testing.assert_array_equal(
        scored[index], expected[row, start:start + LENGTHS[index]]
    )


def test_each_name_has_its_parameters_and_is_loaded_once(scorer):
  asked = []

  def load(name):
    asked.append(name)
    return params(int(name[-1]))

  made, given = references.References(scorer, load), samples()
  assert not asked
  first = made('stage:1', given)
  made.set_policy(params(1))
  for a, b in zip(first, made('policy', given), strict=True):
    np.testing.assert_array_equal(a, b)
  made.set_policy(params(2))
  for a, b, c in zip(
      made('policy', given), made('stage:2', given), made('stage:1', given),
      strict=True,
  ):
    np.testing.assert_array_equal(a, b)
    assert np.abs(a - c).max() > 1e-3
  assert asked == ['stage:1', 'stage:2']
  with pytest.raises(AssertionError, match='set_policy comes before'):
    references.References(scorer, refuse)('policy', given)


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  folder = tmp_path_factory.mktemp('run')
  saver = checkpoint.Checkpointer(
      str(folder / 'checkpoints' / 'sft'), schema.Checkpoint()
  )
  saver.save(3, {'params': params(1)}, {
      'tokenizer': PRINT, 'model': dataclasses.asdict(fixtures.MODEL),
      'stage': 'sft', 'config': {'sft': {}},
  })  # fmt: skip
  saver.close()
  return folder


def loader(
    workdir, renderer=fixtures.RENDERER, model=fixtures.MODEL, **folders
):
  return references.Loader(
      lambda: 'fresh', str(workdir), folders, params(0), model, renderer
  )


def test_names_are_resolved_to_steps(workdir, tmp_path):
  step = 'checkpoints/sft/3'
  names = ('stage:sft', *(str(workdir / x) for x in (
      '', 'checkpoints/sft', step
  )))  # fmt: skip
  for name in names:
    assert references.resolve(name, str(workdir)) == step
  for name in names[1:]:
    outside = references.resolve(name, str(tmp_path))
    assert outside == str((workdir / step).resolve())
    assert references.is_path(name)
  for name in ('init', 'policy', 'random'):
    assert references.resolve(name, str(workdir)) == name
  for name in ('init', 'policy', 'random', 'stage:sft'):
    assert not references.is_path(name)


@pytest.mark.parametrize('name, says', [
    ('stage:grpo', 'must be a workdir, .* got .*grpo'),
    ('stage:', 'no saved step'),
    ('polcy', "a checkpoint path must be .* got 'polcy'"),
    ('/nowhere', "got '/nowhere'"),
])
def test_unknown_names_are_refused(workdir, name, says):
  with pytest.raises(ValueError, match=says):
    references.resolve(name, str(workdir))


def test_the_loader_gives_what_was_resolved(workdir):
  step = 'checkpoints/sft/3'
  load = loader(
      workdir, init='random', inside=step, outside=str(workdir / step)
  )
  assert load('init') == 'fresh'
  for name in ('inside', 'outside'):
    jax.tree.map(np.testing.assert_array_equal, load(name), params(1))


@pytest.mark.parametrize('options, says', [
    ({'renderer': chat.load(schema.Tokenizer(eos='<|tool|>'))},
     'config.tokenizer must be what the checkpoint'),
    ({'model': dataclasses.replace(fixtures.MODEL, rope_theta=5e5)},
     'its rope_theta is 10000.0, and config.model.rope_theta is 500000.0'),
    ({'x': 'checkpoints/sft/2'}, 'a checkpoint must exist|no saved step'),
])
def test_what_changed_meanwhile_is_refused(workdir, options, says):
  load = loader(workdir, **{'x': 'checkpoints/sft/3', **options})
  with pytest.raises(ValueError, match=says) as error:
    load('x')
  assert str(error.value).startswith("weights by the name of 'x' must still be")
