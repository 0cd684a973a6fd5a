"""The trainer of a loop of one's own: losses, gradients, models, saves."""

import dataclasses
import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from posttrain import schema, tree
from posttrain.chat import rendering
from posttrain.checkpoints import policies, weights
from posttrain.decode import engines, requests
from posttrain.envs import registry
from posttrain.models import hf, lora, transformer
from posttrain.training import optim, trainer
from tests import fixtures

LORA = schema.Lora(rank=2)


@functools.cache
def _base(model=fixtures.MODEL):
  return policies.Policy(
    fixtures.params(model),
    model,
    fixtures.RENDERER,
    fixtures.RENDERER.stop_ids,
    8,
  )


def _data(seed=0, count=5, **changes):
  draw = np.random.default_rng(seed)
  data = []
  for length in draw.integers(2, 20, count):
    ids = draw.integers(0, fixtures.MODEL.vocab_size, length + 1)
    data.append(
      trainer.Datum(
        ids[:-1],
        ids[1:],
        weights=draw.normal(size=length),
        logprobs=draw.normal(-5.5, 0.3, length),
        advantages=draw.normal(size=length),
      )
    )
  return [dataclasses.replace(x, **changes) for x in data]


def _importance(new, old, a):
  rho = np.exp(new - old)
  return -rho * a, -rho * a


def _ppo(new, old, a, low=0.8, high=1.2):
  rho = np.exp(new - old)
  loss = -np.minimum(rho * a, np.clip(rho, low, high) * a)
  inside = np.where(a > 0, rho <= high, rho >= low)
  return loss, np.where(inside, -rho * a, 0)


def _cispo(new, old, a, low=0.0, high=4.0):
  weight = np.clip(np.exp(new - old), low, high)
  return -weight * new * a, -weight * a


def _dro(new, old, a, beta=0.05):
  gap = new - old
  return 0.5 * beta * gap**2 - new * a, beta * gap - a


FORMULAS = [
  ('cross_entropy', lambda new, old, a: (-new, -np.ones_like(new)), {}),
  ('importance_sampling', _importance, {}),
  ('ppo', _ppo, {}),
  ('ppo', functools.partial(_ppo, low=0.9, high=1.5), (0.9, 1.5)),
  ('cispo', _cispo, {}),
  ('cispo', functools.partial(_cispo, low=0.7, high=1.1), (0.7, 1.1)),
  ('dro', _dro, {}),
  ('dro', functools.partial(_dro, beta=0.5), {'beta': 0.5}),
]


@pytest.mark.parametrize(
  ('loss', 'formula', 'numbers'),
  [
    x if x == FORMULAS[2] else pytest.param(*x, marks=pytest.mark.slow)
    for x in FORMULAS  # a program each
  ],
)
def test_losses_and_gradients_are_those_of_the_formulas(loss, formula, numbers):
  """In float64, given the logprobs; cross-entropy carries their gradients."""
  if isinstance(numbers, tuple):
    names = 'clip_low_threshold', 'clip_high_threshold'
    numbers = dict(zip(names, numbers, strict=True))
  mine = trainer.Trainer(_base(), adapter=LORA)
  data = _data()
  logprobs, _ = mine.forward(data, 'cross_entropy')
  data = [  # near the policy, on both sides of every bound
    dataclasses.replace(x, logprobs=y + x.weights)
    for x, y in zip(data, logprobs, strict=True)
  ]
  logprobs, metrics = mine.forward_backward(data, loss, **numbers)
  expected, carried = 0.0, []
  for x, new in zip(data, logprobs, strict=True):
    new, old = new.astype(np.float64), x.logprobs.astype(np.float32)
    a, w = (np.float32(y).astype(np.float64) for y in (x.advantages, x.weights))
    value, slope = formula(new, old.astype(np.float64), a)
    expected += (w * value).sum()
    carried.append(dataclasses.replace(x, weights=-w * slope))
  assert metrics['loss:sum'] == pytest.approx(expected, rel=1e-5)
  other = trainer.Trainer(_base(), adapter=LORA)
  other.forward_backward(carried, 'cross_entropy')
  assert fixtures.worst(mine._grads, other._grads) < 1e-5


@pytest.mark.slow
def test_gradients_of_several_calls_are_those_of_one():
  data, (one, several) = _data(), (_trainer() for _ in range(2))
  whole, _ = one.forward_backward(data, 'ppo')
  cut = [several.forward_backward([x], 'ppo')[0][0] for x in data]
  for x, y in zip(whole, cut, strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5)
  assert fixtures.worst(one._grads, several._grads) < 1e-5
  loss = one.forward(data, 'ppo')[1]['loss:sum']
  one.optim_step(optim.Adam(learning_rate=1e-2))
  assert not any(map(jnp.any, jax.tree.leaves(one._grads)))
  assert one.step == 1 and one.forward(data, 'ppo')[1]['loss:sum'] < loss


def _trainer(seed=0, **options):
  return trainer.Trainer(_base(), adapter=LORA, seed=seed, **options)


def _trained(models, data):
  """Trains models in turn; returns the logprobs of each."""
  for _ in range(2):
    for model, own in zip(models, data, strict=True):
      model.forward_backward(own, 'importance_sampling')
    for model in models:
      model.optim_step(optim.Adam(learning_rate=1e-2, grad_clip_norm=1.0))
  return [
    np.concatenate(x.forward(y, 'cross_entropy')[0])
    for x, y in zip(models, data, strict=True)
  ]


@pytest.mark.slow
def test_models_on_one_base_do_not_mix_and_share_programs():
  """8 models in turn have the bits of each alone."""
  data = [_data(seed) for seed in range(8)]
  alone = [
    _trained([_trainer(seed)], [own])[0] for seed, own in enumerate(data)
  ]
  before = trainer._add_grads._cache_size(), trainer._update._cache_size()
  together = _trained([_trainer(seed) for seed in range(8)], data)
  after = trainer._add_grads._cache_size(), trainer._update._cache_size()
  assert before == after
  for x, y in zip(alone, together, strict=True):
    np.testing.assert_array_equal(x, y)


@pytest.mark.slow
def test_adam_is_optax_with_numbers_per_update():
  mine, data = trainer.Trainer(_base()), _data()
  params = mine.policy().params
  peer = optax.chain(
    optax.clip_by_global_norm(0.5), optax.adamw(1e-2, 0.8, 0.9, 1e-7)
  )
  state = peer.init(params)
  for rate in (1e-2, 1e-2):
    mine.forward_backward(data, 'cross_entropy')
    grads = jax.tree.map(jnp.copy, mine._grads)
    changes, state = peer.update(grads, state, params)
    params = optax.apply_updates(params, changes)
    mine.optim_step(optim.Adam(rate, 0.8, 0.9, 1e-7, 1e-4, 0.5))
  assert fixtures.worst(mine.policy().params, params) < 1e-5


@pytest.mark.slow
def test_a_failed_call_adds_no_gradient(monkeypatch):
  """One that fails after its first micro-batch."""
  mine, data = _trainer(), _data()
  mine.forward_backward(data, 'ppo')
  before = jax.tree.map(np.asarray, mine._grads)
  monkeypatch.setattr(trainer, '_ROWS', 1)
  monkeypatch.setattr(trainer, '_TOKENS', 16)
  add, calls = trainer._add_grads, []

  def fail_second(*args):
    calls.append(args)
    if len(calls) == 2:
      raise MemoryError
    return add(*args)

  monkeypatch.setattr(trainer, '_add_grads', fail_second)
  with pytest.raises(MemoryError):
    mine.forward_backward(data, 'ppo')
  assert fixtures.worst(mine._grads, before) == 0


def test_bad_gradients_change_nothing():
  mine = _trainer()
  mine.forward_backward(_data(), 'ppo')
  mine._grads = jax.tree.map(lambda x: x * jnp.nan, mine._grads)
  before = mine.policy().params
  assert mine.optim_step()['optim/skipped'] == 1
  assert fixtures.worst(mine.policy().params, before) == 0


@pytest.mark.parametrize(
  ('loss', 'data', 'numbers', 'key'),
  [
    ('gspo', {}, {}, 'loss'),
    ('dro', {}, {'clip_low_threshold': 1}, 'dro'),
    ('ppo', {}, {'clip_high_threshold': 0.5}, 'clip_high_threshold'),
    ('ppo', {'advantages': None}, {}, 'advantages'),
    ('ppo', {'logprobs': np.full(3, np.nan)}, {}, 'logprobs'),
    ('cross_entropy', {'targets': np.zeros(3, int)}, {}, 'targets'),
    ('cross_entropy', {'targets': np.array([2, 3, 999])}, {}, 'ids'),
    ('cross_entropy', {'ids': [1], 'targets': []}, {}, 'targets'),
  ],
)
def test_wrong_calls_are_refused(loss, data, numbers, key):
  ids = np.arange(4)
  fields = dict.fromkeys(('weights', 'logprobs', 'advantages'), np.ones(3))
  fields = {'ids': ids[:-1], 'targets': ids[1:], **fields, **data}
  with pytest.raises(ValueError, match=key):
    _trainer().forward([trainer.Datum(**fields)], loss, **numbers)


@pytest.mark.slow
@pytest.mark.parametrize('adapter', [LORA, None])
def test_saves_are_read_as_weights_and_go_on(adapter, tmp_path):
  folder = tmp_path / 'base'
  hf.save(fixtures.params(), fixtures.MODEL, folder, dtype='float32')
  rendering.write(fixtures.RENDERER, folder)
  base = policies.load(str(folder), initial=True)
  mine, other = (trainer.Trainer(base, adapter=adapter) for _ in range(2))
  data, adam = _data(), optim.Adam(learning_rate=1e-2)
  mine.forward_backward(data, 'ppo')
  mine.optim_step(adam)
  where = mine.save(str(tmp_path / 'saved'))
  assert weights.read(weights.find(where)).start() == str(folder)
  read = policies.load(where)
  assert read.text([65]) == base.text([65])
  scores, _ = trainer.Trainer(read).forward(data, 'cross_entropy')
  expected, _ = mine.forward(data, 'cross_entropy')
  for x, y in zip(scores, expected, strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5)
  other.load(where, optimizer=True)
  assert other.step == 1
  for x in (mine, other):
    x.forward_backward(data, 'ppo')
    x.optim_step(adam)
  assert fixtures.worst(mine.policy().params, other.policy().params) == 0
  other.load(where)
  assert other.step == 0
  with pytest.raises(ValueError, match=re.escape(where)):
    trainer.Trainer(base, adapter=schema.Lora(rank=3)).load(where)


def test_parts_of_a_lora_are_those_of_every_family():
  gemma = schema.PRESETS['gemma4_e2b']
  paths = lora.matrices(transformer.shapes(gemma))
  layers = {x for x in paths if re.match('layers/.*/kernel$', x)}

  def named(**parts):
    targets = trainer.lora_options(2, **parts).targets
    return {x for x in paths if re.search(targets, x)}

  mlp, attention = named(attention=False), named(mlp=False)
  assert mlp | attention == layers and not mlp & attention
  assert {'layers/query_mlp/up/kernel', 'layers/mlp/up/kernel'} <= mlp
  assert 'layers/global_attention/q/kernel' in attention
  untied = transformer.shapes(schema.PRESETS['qwen3_8b'])
  options = trainer.lora_options(2, attention=False, mlp=False, head=True)
  assert [*tree.flat(lora.shapes(options, untied))] == [
    'head/kernel/a',
    'head/kernel/b',
  ]


@pytest.mark.slow
def test_samples_have_the_logprobs_of_forward():
  """Of policies of several ranks, by one engine; with a head of their own."""
  model = dataclasses.replace(fixtures.MODEL, tied_head=False)
  engine = engines.Engine(model, engines.Options(4, 32))
  for rank in (2, 3, 0):
    adapter = trainer.lora_options(rank, head=True) if rank else None
    mine = trainer.Trainer(_base(model), adapter=adapter)
    mine.forward_backward(_data(), 'importance_sampling')
    mine.optim_step(optim.Adam(learning_rate=1e-2))
    engine.set_params(mine.policy().params, 0)
    prompt = np.arange(5, 12, dtype=np.int32)
    batch = [requests.Request(i, prompt, 8) for i in range(3)]
    for x in engine.generate(batch):
      ids = np.concatenate([prompt, x.ids])
      scores, _ = mine.forward(
        [trainer.Datum(ids[:-1], ids[1:])], 'cross_entropy'
      )
      np.testing.assert_allclose(
        scores[0][-len(x.ids) :], x.logprobs, atol=1e-5
      )


@pytest.mark.slow
def test_the_loop_of_the_page_learns(tmp_path, monkeypatch, capsys):
  """From demonstrations of small sums, half of which answer 99."""
  cfg = dataclasses.replace(
    fixtures.MODEL, layers=2, embed_dim=64, heads=4, kv_heads=2, mlp_dim=192
  )
  renderer = fixtures.RENDERER
  start = trainer.Trainer(
    policies.Policy(
      transformer.init(jax.random.key(0), cfg),
      cfg,
      renderer,
      renderer.stop_ids,
      16,
    )
  )
  options = {'ops': ('+',), 'max_operand': 9, 'worked': False}
  options |= {'train_tasks': 60, 'eval_tasks': 20}
  sums = schema.Arithmetic(**options)
  tasks = registry.make('sums', sums).source('train', seed=0)
  for _ in range(240):
    data = []
    for i, task in enumerate(next(tasks) for _ in range(32)):
      first = len(renderer.render(task.prompt, add_generation_prompt=True))
      text = f'\\boxed{{{task.answer if i % 2 else 99}}}'
      answer = {'role': 'assistant', 'content': text}
      ids = renderer.render((*task.prompt, answer)).ids
      answers = np.arange(1, len(ids)) >= first
      data.append(trainer.Datum(ids[:-1], ids[1:], weights=answers))
    start.forward_backward(data, 'cross_entropy')
    start.optim_step(optim.Adam(learning_rate=3e-3))
  monkeypatch.chdir(tmp_path)
  start.save('start')
  page = pathlib.Path(__file__).parents[2] / 'docs' / 'api.md'
  (block,) = re.findall(r'```python\n(.*?)```', page.read_text(), re.S)
  block = block.replace('runs/arithmetic/checkpoints/sft', 'start')
  block = block.replace(
    'schema.Arithmetic()', f'schema.Arithmetic(**{options})'
  )
  exec(block, {})
  lines = capsys.readouterr().out.splitlines()
  rewards = [float(x.split()[1]) for x in lines]
  print(rewards)
  assert 0.2 < rewards[0] < 0.8 and np.mean(rewards[-5:]) > rewards[0] + 0.2
  assert weights.read(weights.find('runs/mine')).is_adapter
