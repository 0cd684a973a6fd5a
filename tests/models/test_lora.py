"""LoRA: merged equals unmerged, gradients, targets, training."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain import schema, scoring, sharding, tree
from posttrain.models import lora, transformer
from posttrain.training import objectives, optim
from posttrain.training import step as train_step
from tests import fixtures

CFG = schema.Lora(rank=4, alpha=8.0, targets='^(layers/.*|head)/kernel$')
MODEL = dataclasses.replace(
  fixtures.MODEL, layers=2, qkv_bias=True, tied_head=False
)
PARAMS = fixtures.params(MODEL)
BASE = lora.Base(PARAMS, lora.scale(CFG))
ROWS = (
  np.arange(40, dtype=np.int32).reshape(2, 20) * 7 % 256,
  np.tile(np.arange(20, dtype=np.int32), (2, 1)),
  np.ones((2, 20), np.int32),
  np.ones((2, 20), np.float32),
)


def trained(cfg=CFG, params=PARAMS, seed=1):
  """Returns an adapter whose B is not 0."""
  adapter = lora.init(jax.random.key(seed), cfg, params)
  return tree.map_with_path(
    lambda path, x: (
      x
      if path.endswith('a')
      else jax.random.normal(jax.random.key(len(path)), x.shape) / 10
    ),
    adapter,
  )


@jax.jit
def logprobs(params):
  return scoring.score(params, MODEL, *ROWS)[0]


@pytest.mark.parametrize('dora', [False, True])
def test_a_fresh_adapter_changes_nothing(dora):
  cfg = dataclasses.replace(CFG, dora=dora)
  fresh = BASE.attach(lora.init(jax.random.key(1), cfg, PARAMS))
  np.testing.assert_allclose(
    logprobs(fresh), logprobs(PARAMS), atol=1e-5 if dora else 0
  )


def test_an_adapter_has_the_shapes_of_its_targets():
  cfg = dataclasses.replace(CFG, targets='attention/v/kernel|mlp/down')
  adapter = lora.init(jax.random.key(1), cfg, PARAMS)
  assert {path: x.shape for path, x in tree.flat(adapter).items()} == {
    'layers/attention/v/kernel/a': (2, 32, 4),
    'layers/attention/v/kernel/b': (2, 4, 16),
    'layers/mlp/down/kernel/a': (2, 64, 4),
    'layers/mlp/down/kernel/b': (2, 4, 32),
  }
  a = adapter['layers']['mlp']['down']['kernel']['a']
  assert 0.9 / 8 < np.abs(a).max() <= 1 / 8  # uniform within 1 / sqrt(64)


@pytest.mark.parametrize('targets', ['embed', 'nothing', ''])
def test_targets_must_match_kernels_of_layers(targets):
  cfg = dataclasses.replace(CFG, targets=targets)
  with pytest.raises(ValueError, match='targets must match kernels of la'):
    lora.shapes(cfg, PARAMS)


def test_scale_is_alpha_over_rank_or_its_root():
  assert lora.scale(schema.Lora(rank=16, alpha=32.0)) == 2.0
  assert lora.scale(schema.Lora(rank=16, alpha=32.0, rslora=True)) == 8.0


def test_merge_and_matmul_of_literal_numbers():
  adapted = lora.Adapted(
    jnp.eye(2), jnp.array([[1.0], [2.0]]), jnp.array([[3.0, -1.0]]), 0.5
  )
  np.testing.assert_array_equal(adapted.merge(), [[2.5, -0.5], [3.0, 0.0]])
  np.testing.assert_array_equal(
    lora.matmul(jnp.array([[1.0, 1.0]]), adapted, sharding.COLUMNS),
    [[5.5, -0.5]],
  )


def test_dora_of_literal_numbers():
  """W + s A B has the columns (3, 4) and (0, 1)."""
  adapted = lora.Adapted(
    jnp.eye(2),
    jnp.array([[1.0], [2.0]]),
    jnp.array([[2.0, 0.0]]),
    1.0,
    column_scale=jnp.array([10.0, 3.0]),
  )
  np.testing.assert_allclose(adapted.merge(), [[6.0, 0.0], [8.0, 3.0]])
  np.testing.assert_allclose(
    lora.matmul(jnp.array([[1.0, 1.0]]), adapted, sharding.COLUMNS),
    [[14.0, 3.0]],
  )

  def total(column_scale):  # norms are constants: the gradient is that of m / 5
    return dataclasses.replace(adapted, column_scale=column_scale).merge().sum()

  np.testing.assert_allclose(
    jax.grad(total)(adapted.column_scale), [7 / 5, 1.0], rtol=1e-6
  )


@pytest.mark.parametrize('dora', [False, True])
def test_merged_logprobs_equal_unmerged_ones(dora):
  params = BASE.attach(trained(dataclasses.replace(CFG, dora=dora)))
  merged = lora.merge(params)
  assert jax.tree.structure(merged) == jax.tree.structure(PARAMS)
  unmerged_logprobs, merged_logprobs = logprobs(params), logprobs(merged)
  assert np.abs(merged_logprobs - logprobs(PARAMS)).max() > 0.1
  np.testing.assert_allclose(unmerged_logprobs, merged_logprobs, atol=1e-5)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
    transformer.decode_view(params, MODEL),
    transformer.decode_view(merged, MODEL),
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  ('kind', 'dora'),
  [('int4', True), ('int8', False), ('int8', True), ('float', True)],
)
def test_a_base_is_what_its_numbers_are(kind, dora):
  """Gradients, and both decode views; q alone of what a view joins is adapted.

  Those of the dequantized weights, without factors, are expected.
  """
  held = lora.quantize(PARAMS, kind)
  numbers = lora.merge(held)
  targets = 'attention/(q|o)/kernel$|mlp/.*/kernel$'
  cfg = dataclasses.replace(CFG, dora=dora, base=kind, targets=targets)
  adapter = trained(cfg, held)

  def whole(params, factors):
    return lora.Base(params, BASE.scale, factors).attach(adapter)

  def total(adapter, params):
    return logprobs(lora.Base(params, BASE.scale).attach(adapter)).sum()

  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max()),
    *(jax.grad(total)(adapter, x) for x in (held, numbers)),
  )
  view = transformer.decode_view(whole(held, True), MODEL)
  expected = transformer.decode_view(whole(numbers, False), MODEL)
  merged = transformer.decode_view(whole(held, False), MODEL)
  for other in (lora.merge(view), merged):
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), other, expected
    )
  attention = view['layers'][0]['attention']
  assert attention['qkv']['kernel'].a.shape == (32, 4)
  dtype = jax.tree.leaves(attention['o']['kernel'].kernel)[0].dtype
  assert dtype == {'float': 'float32', 'int8': 'int8', 'int4': 'uint8'}[kind]


@pytest.mark.parametrize('kind', ['float', 'int4'])
def test_fused_kernels_compute_what_they_do_alone(kind):
  """DoRA's scale goes into the kernel, whose columns it multiplies."""
  keys = iter(jax.random.split(jax.random.key(0), 9))

  def draw(*shape):
    return jax.random.normal(next(keys), shape)

  first, second = (
    lora.quantize({'layers': {'x': {'kernel': draw(32, 4)}}}, kind)
    for _ in range(2)
  )
  first, second = (x['layers']['x']['kernel'] for x in (first, second))
  adapted = lora.Adapted(first, draw(32, 2), draw(2, 4), 0.5, draw(4), True)
  whole = {'q': {'kernel': adapted}, 'k': {'kernel': second}}
  whole = lora.decode_form(whole)(whole)
  kernels = [whole[name]['kernel'] for name in 'kq']
  fused = lora.fuse(lambda *x: jnp.concatenate(x, axis=-1), kernels)
  x = draw(3, 32)
  parts = [lora.matmul(x, y, sharding.COLUMNS) for y in (second, adapted)]
  np.testing.assert_allclose(
    lora.matmul(x, fused, sharding.COLUMNS),
    jnp.concatenate(parts, axis=-1),
    atol=1e-4,
  )


def test_layers_without_factors_decode_as_they_are_held():
  cfg = dataclasses.replace(
    MODEL, experts=schema.Experts(count=2), dense_layers=(0,)
  )
  options = schema.Lora(rank=2, base='int8', targets='/mlp/')

  def view():
    base = lora.quantize(transformer.init(jax.random.key(0), cfg), 'int8')
    adapter = lora.init(jax.random.key(0), options, base)
    whole = lora.Base(base, 1.0, lora.keeps_factors(options)).attach(adapter)
    return transformer.decode_view(whole, cfg)

  _, other = jax.eval_shape(view)['layers']
  assert other['attention']['o']['kernel'].values.dtype == 'int8'


def test_int4_needs_whole_blocks():
  model = dataclasses.replace(fixtures.MODEL, mlp_dim=48)
  with pytest.raises(ValueError, match='base must be int8 .*down.*: got.*int4'):
    jax.eval_shape(lambda: lora.quantize(fixtures.params(model), 'int4'))


def test_adapter_gradients_are_those_of_the_low_rank_product():
  """dA = s dW B^T and dB = s A^T dW, of the gradient of merged weights."""
  adapter = trained()
  grads = jax.jit(jax.grad(lambda x: logprobs(BASE.attach(x)).sum()))(adapter)
  dense = jax.jit(jax.grad(lambda p: logprobs(p).sum()))(
    lora.merge(BASE.attach(adapter))
  )
  assert jax.tree.structure(grads) == jax.tree.structure(adapter)
  for path, dw in tree.flat(dense).items():
    if not path.endswith('kernel'):
      continue
    a, b = (tree.flat(adapter)[f'{path}/{x}'] for x in 'ab')
    by_name = {x: tree.flat(grads)[f'{path}/{x}'] for x in 'ab'}
    for x, expected in (
      ('a', BASE.scale * dw @ b.swapaxes(-1, -2)),
      ('b', BASE.scale * a.swapaxes(-1, -2) @ dw),
    ):
      scale = np.abs(expected).max()
      assert scale > 0
      np.testing.assert_allclose(by_name[x], expected, atol=1e-4 * scale)


def test_a_base_cast_to_the_compute_dtype_scores_bitwise_alike():
  cfg = dataclasses.replace(MODEL, dtype='bfloat16')
  small = lora.cast_matrices(PARAMS, 'bfloat16')
  dtypes = {x.dtype.name for x in jax.tree.leaves(small)}
  assert dtypes == {'bfloat16', 'float32'}
  score = jax.jit(lambda params: scoring.score(params, cfg, *ROWS)[0])
  np.testing.assert_array_equal(score(small), score(PARAMS))


def train(mesh, steps=8, **options):
  """Returns (losses, base before and after, first and last state)."""
  mesh = sharding.make_mesh(schema.Mesh(*mesh))
  stage = fixtures.stage(
    lora=CFG, optim=schema.Optim(lr=1e-2, schedule='constant', average=0.5)
  )
  optimizer = optim.make(stage.optim, 10)
  like, whole = train_step.state_shapes(stage, fixtures.MODEL, optimizer, mesh)
  params = jax.device_put(
    transformer.init(jax.random.key(0), fixtures.MODEL),
    jax.tree.map(lambda x: x.sharding, whole),
  )
  before = jax.device_get(params)
  base = lora.Base(params, lora.scale(CFG))
  key = jax.random.key(1)
  state = train_step.fresh_state(stage, optimizer, like, base, None, key)
  first = jax.device_get(state)
  step = train_step.make_train_step(
    objectives.TokenComponents(fixtures.MODEL, ('arithmetic',)),
    optimizer,
    mesh=mesh,
    rules=transformer.SHARDING_RULES,
    average=0.5,
    base=base,
    **options,
  )
  losses = []
  (batch,) = fixtures.batches(1, micro_batch_tokens=256)
  for _ in range(steps):
    state, metrics = jax.block_until_ready(step(state, batch))
    losses.append(float(metrics['loss/total']))
  assert step.compiles == 1
  return losses, before, params, first, state


def test_a_step_trains_the_adapter_and_leaves_the_base():
  losses, before, after, first, last = train((1, 1, 1))
  moments = {x.shape for x in jax.tree.leaves(last.opt_state) if x.ndim}
  assert moments == {x.shape for x in jax.tree.leaves(last.params)}
  assert losses[-1] < losses[0] - 0.3
  jax.tree.map(np.testing.assert_array_equal, after, before)
  changes = jax.tree.map(
    lambda a, b: float(np.abs(a - b).max()), last.params, first.params
  )
  assert min(jax.tree.leaves(changes)) > 1e-3


@pytest.mark.slow
def test_lora_losses_on_four_devices_equal_those_on_one():
  """fsdp x tensor, in a process of its own, for one update and for two."""
  script = (
    'import json; from tests.models import test_lora as t; print(json.dumps('
    '[t.train((1, 2, 2), 3)[0], t.train((2, 2, 1), 3, updates=2)[0]]))'
  )
  output = fixtures.run_on_devices(4, '-c', script)
  once, twice = json.loads(output.splitlines()[-1])
  np.testing.assert_allclose(once, train((1, 1, 1), 3)[0], rtol=1e-5)
  single = train((1, 1, 1), 3, updates=2)[0]
  np.testing.assert_allclose(twice, single, rtol=1e-5)
  assert once[1:] != twice[1:]
