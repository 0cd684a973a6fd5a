"""References: whose logprobs they are, at whose temperatures."""

import dataclasses

import jax
import numpy as np
import pytest

from posttrain import schema, scoring, sharding, types
from posttrain.chat import renderer as chat
from posttrain.checkpoints import store
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


def make(load, tokens=fixtures.RENDERER, capacity=T, **options):
  return references.References(
    fixtures.MODEL,
    tokens,
    lambda model, width: scoring.Scorer(model, ROWS, width),
    capacity=capacity,
    load=load,
    **options,
  )


def samples(temperature=None):
  rng = np.random.default_rng(0)
  made = []
  for n in LENGTHS:
    heat = rng.uniform(0.5, 2.0, n)
    made.append(
      types.Sample(
        env='e',
        row='r',
        ids=rng.integers(0, 256, n).astype(np.int32),
        mask=np.arange(n) > 4,
        roles=np.ones(n, np.int8),
        is_content=np.ones(n, bool),
        sampler_logprobs=np.zeros(n, np.float32),
        temperatures=np.float32(
          heat if temperature is None else (np.full(n, temperature))
        ),
        versions=np.zeros(n, np.int32),
      )
    )
  return made


def refuse(name):
  raise AssertionError(name)


@pytest.mark.parametrize('temperature', [None, 1.0])
def test_the_policy_is_scored_to_the_bit_at_the_samples_temperatures(
  temperature,
):
  given = samples(temperature)
  made = make(refuse)
  made.set_policy({'policy': params(0)})
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
      scored[index], expected[row, start : start + LENGTHS[index]]
    )


def test_each_name_has_its_parameters_and_is_loaded_once():
  asked = []

  def load(name):
    asked.append(name)
    return references.Model(params(int(name[-1])), fixtures.MODEL)

  made, given = make(load), samples()
  assert not asked
  first = made('stage:1', given)
  made.set_policy({'policy': params(1)})
  for a, b in zip(first, made('policy', given), strict=True):
    np.testing.assert_array_equal(a, b)
  made.set_policy({'policy': params(2)})
  for a, b, c in zip(
    made('policy', given),
    made('stage:2', given),
    made('stage:1', given),
    strict=True,
  ):
    np.testing.assert_array_equal(a, b)
    assert np.abs(a - c).max() > 1e-3
  assert asked == ['stage:1', 'stage:2']
  with pytest.raises(AssertionError, match='set_policy comes before'):
    make(refuse)('policy', given)


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  folder = tmp_path_factory.mktemp('run')
  saver = store.Checkpointer(
    str(folder / 'checkpoints' / 'sft'), schema.Checkpoint()
  )
  saver.save(
    3,
    {'params': params(1)},
    {
      'tokenizer': PRINT,
      'model': dataclasses.asdict(fixtures.MODEL),
      'stage': 'sft',
      'config': {'sft': {}},
    },
  )
  saver.close()
  return folder


def loader(
  workdir, renderer=fixtures.RENDERER, model=fixtures.MODEL, **folders
):
  return references.Loader(
    lambda: 'fresh',
    str(workdir),
    folders,
    params(0),
    model,
    renderer,
    sharding.make_mesh(schema.Mesh()),
  )


def test_names_are_resolved_to_steps(workdir, tmp_path):
  step = 'checkpoints/sft/3'
  names = (
    'stage:sft',
    *(str(workdir / x) for x in ('', 'checkpoints/sft', step)),
  )
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


@pytest.mark.parametrize(
  'name, says',
  [
    ('stage:grpo', 'must be a workdir, .* got .*grpo'),
    ('stage:', 'no saved step'),
    ('polcy', "a checkpoint path must be .* got 'polcy'"),
    ('/nowhere', "got '/nowhere'"),
  ],
)
def test_unknown_names_are_refused(workdir, name, says):
  with pytest.raises(ValueError, match=says):
    references.resolve(name, str(workdir))


def test_the_loader_gives_what_was_resolved(workdir):
  step = 'checkpoints/sft/3'
  load = loader(
    workdir, init='random', inside=step, outside=str(workdir / step)
  )
  assert load('init') == ('fresh', fixtures.MODEL)
  assert load.init() == 'fresh'
  for name in ('inside', 'outside'):
    found = load(name)
    jax.tree.map(np.testing.assert_array_equal, found.params, params(1))
    assert found.cfg == fixtures.MODEL


@pytest.mark.parametrize(
  'options, says',
  [
    (
      {'renderer': chat.load(schema.Tokenizer(eos='<|tool|>'))},
      'config.tokenizer must be what the checkpoint',
    ),
    (
      {'model': dataclasses.replace(fixtures.MODEL, rope_theta=5e5)},
      'its rope_theta is 10000.0, and config.model.rope_theta is 500000.0',
    ),
    ({'init': 'checkpoints/sft/2'}, 'a checkpoint must exist|no saved step'),
  ],
)
def test_what_changed_meanwhile_is_refused(workdir, options, says):
  load = loader(workdir, **{'init': 'checkpoints/sft/3', **options})
  with pytest.raises(ValueError, match=says) as error:
    load('init')
  assert str(error.value).startswith("weights by the name of 'init' must still")


HINT = ({'role': 'system', 'content': 'It is 7.'},)


class Bos:
  """The byte tokenizer with a bos, which the template sets first."""

  def __init__(self, renderer):
    self.tokenizer = dataclasses.replace(
      Tokenizer(), bos_id=renderer.tokenizer.pad_id
    )
    self._renderer = renderer

  def render(self, messages):
    made = self._renderer.render(messages)
    ids = np.concatenate([[self.tokenizer.bos_id], made.ids]).astype(np.int32)
    return dataclasses.replace(made, ids=ids)


@dataclasses.dataclass
class Tokenizer:
  bos_id: int | None = None


@pytest.mark.parametrize('bos', [False, True])
def test_a_hint_stands_in_front_and_changes_nothing_else(bos):
  """Against the forward of the whole sequence, laid out by hand."""
  tokens = Bos(fixtures.RENDERER) if bos else fixtures.RENDERER
  given = samples(1.0)
  if bos:  # each begins with it, as the hint does
    for sample in given:
      sample.ids[0] = tokens.tokenizer.bos_id
  made = make(refuse, tokens)
  made.set_policy({'policy': params(0)})
  scored = made('policy', given, [HINT] * len(given))
  head = tokens.render(HINT).ids
  for sample, found in zip(given, scored, strict=True):
    ids = np.concatenate([head, sample.ids[1:] if bos else sample.ids])[None]
    places = np.arange(ids.size, dtype=np.int32)[None]
    whole = score(
      params(0),
      ids,
      places,
      np.ones_like(places),
      np.ones(ids.shape, np.float32),
    )[0]
    assert found.shape == (len(sample),) and found[0] == 0
    np.testing.assert_allclose(found[1:], whole[-len(sample) + 1 :], atol=2e-5)
  assert np.abs(scored[0] - made('policy', given)[0]).max() > 1e-3


def test_a_model_of_another_shape_scores_with_its_own(tmp_path):
  """A teacher is larger than its student, as a rule."""
  bigger = dataclasses.replace(fixtures.MODEL, layers=3, mlp_dim=48)
  weights = transformer.init(jax.random.key(5), bigger)
  saver = store.Checkpointer(
    str(tmp_path / 'checkpoints' / 'sft'), schema.Checkpoint()
  )
  saver.save(
    1,
    {'params': weights},
    {
      'tokenizer': PRINT,
      'model': dataclasses.asdict(bigger),
      'stage': 'sft',
      'config': {'sft': {}},
    },
  )
  saver.close()
  load = loader(tmp_path, big='checkpoints/sft/1', init='checkpoints/sft/1')
  model = load('big')
  assert model.cfg == bigger
  jax.tree.map(np.testing.assert_array_equal, model.params, weights)
  given = samples(1.0)
  found = make(load)('big', given)
  expected = scoring.Scorer(bigger, ROWS, T)(
    weights, [s.ids for s in given], [s.temperatures for s in given]
  )
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_array_equal(a, b)
  with pytest.raises(ValueError, match='its layers is 3, and config.model'):
    load('init')


def test_a_model_of_fewer_tokens_is_refused(monkeypatch):
  few = dataclasses.replace(fixtures.MODEL, vocab_size=100)
  monkeypatch.setattr(references.weights, 'model', lambda folder: few)
  monkeypatch.setattr(references.weights, 'check', lambda *args: None)
  with pytest.raises(ValueError, match='must know the 2.. tokens .* got 100'):
    references.check('x', fixtures.MODEL, fixtures.RENDERER)


def test_who_names_the_same_server_shares_it(monkeypatch):
  made = []

  class Server:
    def __init__(self, cfg, who):
      made.append(cfg)

    def check(self, renderer):
      assert renderer is fixtures.RENDERER

    def score(self, ids, heat, who):
      self.heat = heat
      assert who == 'environment e'
      return [np.full(len(x), -1, np.float32) for x in ids]

    def close(self):
      made.append('closed')

  monkeypatch.setattr(references.client, 'Endpoint', Server)
  a = schema.Endpoint(name='m', base_url='http://h/v1')
  found = make(refuse)
  for name in (a, dataclasses.replace(a), a):
    scored = found(name, samples(0.5))
    assert all(x[0] == 0 and (x[1:] == -1).all() for x in scored)
  assert made == [a]
  assert all((x == 0.5).all() for x in found.endpoint(a).heat)
  found.close()
  assert made == [a, 'closed']


def test_tokens_that_a_reference_has_no_row_for_are_refused():
  """A policy may have more rows than its tokenizer has texts, and use them."""
  few = dataclasses.replace(fixtures.MODEL, vocab_size=200)
  made = make(lambda name: references.Model(None, few))
  sample = samples()[0]
  sample.ids[3] = 250
  with pytest.raises(ValueError, match='got token 2.., expected less than 200'):
    made('stage:a', [sample])
