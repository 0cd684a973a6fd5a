"""The implementation chosen on each platform, and its kernels."""

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import reference
from posttrain import schema
from posttrain.ops import attention, dispatch
from tests.kernels import inputs, lowering

B, T, S, N, K, H = 2, 32, 64, 4, 2, 128
SCALE = 0.125


def shapes(h=H, dtype=jnp.bfloat16):
  """Returns {name of an op: (op, its arguments)}."""

  def array(*shape):
    return jax.ShapeDtypeStruct(shape, dtype)

  q, k, cache = array(B, T, N, h), array(B, T, K, h), array(B, K, S, h)
  ends, row_ends = (jax.ShapeDtypeStruct(x, jnp.int32) for x in ((B, T), (B,)))
  decode_args = array(B, N, h), cache, cache, row_ends, row_ends
  return {
    'attention': (attention.attention, (q, k, k, ends, ends)),
    'cached': (attention.cached, (q, cache, cache, ends, ends)),
    'decode': (attention.decode, decode_args),
  }


def lower(name, target, impl='auto', **kwargs):
  op, args = shapes(**kwargs)[name]
  op = functools.partial(op, scale=SCALE, impl=impl)
  return lowering.lower(op, *args, target=target)


def counts(text):
  return [text.count(name) for name in (lowering.TRITON, lowering.MOSAIC_TPU)]


@pytest.mark.parametrize('name', ['attention', 'cached', 'decode'])
@pytest.mark.parametrize(
  'target, expected', [('cpu', [0, 0]), ('h200', [1, 0]), ('v5e', [0, 1])]
)
def test_auto_lowers_to_the_kernels_of_the_platform(name, target, expected):
  assert counts(lower(name, target)) == expected


def test_xla_lowers_to_no_kernel():
  assert counts(lower('decode', 'h200', 'xla')) == [0, 0]


def test_auto_warns_once_if_the_kernels_are_unsupported(caplog):
  dispatch._warn.cache_clear()
  for _ in range(2):
    assert counts(lower('cached', 'h200', h=300)) == [0, 0]
  assert [(x.levelno, x.message) for x in caplog.records] == [
    (
      logging.WARNING,
      'attention runs as XLA, not as triton: head_dim must be a power of two '
      'from 16 to 256: got 300',
    )
  ]


def test_auto_avoids_the_tpu_decode_kernel_for_narrow_heads():
  assert counts(lower('decode', 'v5e', h=64)) == [0, 0]
  assert counts(lower('decode', 'v5e', 'pallas', h=64)) == [0, 1]
  assert counts(lower('cached', 'v5e', h=64)) == [0, 1]  # a copy per prefill


def test_kernels_pad_heads_but_auto_pads_no_cache_at_every_step():
  for name in ('attention', 'cached'):
    assert counts(lower(name, 'h200', h=80)) == [1, 0]
  assert counts(lower('decode', 'h200', h=80)) == [0, 0]
  assert counts(lower('decode', 'h200', 'pallas', h=80)) == [1, 0]
  assert counts(lower('attention', 'v5e', h=20)) == [0, 1]


@pytest.mark.parametrize(
  'impl, target, h, message',
  [
    ('pallas', 'h200', 300, 'head_dim must be a power of two'),
    ('pallas', 'cpu', 64, 'for a gpu or tpu, not for a cpu; use'),
    ('cudnn', 'v5e', 64, 'for a gpu, not for a tpu'),
    ('cudnn', 'h200', 20, 'head_dim must be a multiple of 8'),
    ('interpret', 'cpu', 300, 'head_dim'),
  ],
)
def test_a_named_implementation_that_is_unsupported_is_refused(
  impl, target, h, message
):
  where = f'attention must be supported here: got {impl!r}; .*{message}'
  with pytest.raises(schema.FieldError, match=where):
    lower('attention', target, impl, h=h)


@pytest.mark.parametrize(
  'options, message',
  [
    ({'attention': 'pallas'}, 'not for a cpu'),
    ({'attention': 'cudnn'}, 'not for a cpu'),
    ({'attention': 'interpret', 'head_dim': 300}, 'got 300'),
  ],
)
def test_a_model_is_checked_before_it_is_traced(options, message):
  with pytest.raises(schema.FieldError, match=message):
    attention.check(dataclasses.replace(schema.Model(), **options))


@pytest.mark.parametrize('impl', ['auto', 'xla', 'interpret'])
def test_a_model_is_served_on_a_cpu(impl):
  attention.check(dataclasses.replace(schema.Model(), attention=impl))


def test_auto_is_xla_on_several_devices_unless_axes_are_manual(monkeypatch):
  mesh = jax.sharding.AbstractMesh(
    (2,), ('data',), (jax.sharding.AxisType.Auto,)
  )
  monkeypatch.setattr(dispatch, 'platform', lambda: 'gpu')
  assert dispatch.choose('auto', lambda name: None) == 'auto'
  with jax.sharding.use_abstract_mesh(mesh):
    assert dispatch.choose('auto', lambda name: None) == 'xla'
  manual = jax.sharding.AbstractMesh(
    (2,), ('data',), (jax.sharding.AxisType.Manual,)
  )
  with jax.sharding.use_abstract_mesh(manual):
    assert dispatch.choose('auto', lambda name: None) == 'auto'
  monkeypatch.setattr(jax, 'device_count', lambda: 8)
  assert dispatch.choose('auto', lambda name: None) == 'xla'


@pytest.mark.parametrize(
  'here, kernel', [('cpu', None), ('gpu', 'triton'), ('tpu', 'mosaic_tpu')]
)
def test_auto_warns_once_about_several_accelerators_without_a_mesh(
  monkeypatch, caplog, here, kernel
):
  dispatch._warn.cache_clear()
  monkeypatch.setattr(dispatch, 'platform', lambda: here)
  monkeypatch.setattr(jax, 'device_count', lambda: 8)
  for _ in range(2):
    assert dispatch.choose('auto', lambda name: None) == 'xla'
  assert [(x.levelno, x.message) for x in caplog.records] == [
    (
      logging.WARNING,
      f'attention runs as XLA, not as {kernel}: several devices and no mesh; '
      'trace it within sharding.use(mesh)',
    )
  ] * (kernel is not None)


@pytest.mark.parametrize('target', ['h200', 'v5e'])
def test_every_device_of_a_shard_map_runs_the_kernels(target):
  (kind, cores, platform), lowered = lowering.TARGETS[target]
  mesh = jax.sharding.AbstractMesh(
    (2,),
    ('data',),
    (jax.sharding.AxisType.Auto,),
    abstract_device=jax.sharding.AbstractDevice(
      device_kind=kind, num_cores=cores, platform=platform
    ),
  )
  split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))
  op, args = shapes()['decode']
  call = jax.jit(
    jax.shard_map(
      functools.partial(op, scale=SCALE),
      mesh=mesh,
      in_specs=split.spec,
      out_specs=split.spec,
    )
  )
  args = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split) for x in args]
  text = call.trace(*args).lower(lowering_platforms=(lowered,)).as_text()
  assert text.count(lowering.CUSTOM_CALLS[target]) == 1


@pytest.mark.parametrize('target', ['h200', 'v5e'])
@pytest.mark.parametrize('kept', ['kept', 'attention'])
def test_backward_of_a_rematerialized_layer_runs_forward_once(target, kept):
  op, args = shapes()['attention']
  policy = jax.checkpoint_policies.save_only_these_names(kept)

  def loss(q, *rest):
    @functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)
    def layer(x, _):
      return x + jnp.sin(op(x, *rest, scale=SCALE)), None

    return jax.lax.scan(layer, q, length=3)[0].astype(jnp.float32).sum()

  text = lowering.lower(jax.grad(loss, (0, 1, 2)), *args, target=target)
  assert text.count(lowering.CUSTOM_CALLS[target]) == 3  # forward, dq, dkv


def test_interpreted_kernels_are_as_exact_as_xla():
  b, h = len(inputs.KINDS), 32
  q, k, v, g = inputs.draw(
    0,
    (b, T, N, h),
    (b, T, K, h),
    (b, T, K, h),
    (b, T, N, h),
    dtype=jnp.bfloat16,
  )
  intervals = inputs.every_kind(T)

  def run(fn, q, k, v, g):
    out, vjp = jax.vjp(lambda *x: fn(*x, *intervals, scale=SCALE), q, k, v)
    return out, *vjp(g)

  def call(fn, *args, **kwargs):
    fn = functools.partial(run, functools.partial(fn, **kwargs))
    return [np.asarray(x, np.float32) for x in jax.jit(fn)(*args)]

  xla = call(attention.attention, q, k, v, g, impl='xla')
  ours = call(attention.attention, q, k, v, g, impl='interpret')
  exact = call(
    reference.attention, *(x.astype(jnp.float32) for x in (q, k, v, g))
  )
  for a, b, c in zip(ours, xla, exact, strict=True):
    assert np.abs(a - c).max() <= 1.5 * np.abs(b - c).max()


@pytest.mark.parametrize(
  'h, dtype, softcap, trees, ours, cudnn',
  [  # the table of docs/models.md
    (128, 'bfloat16', None, False, True, True),
    (80, 'float16', None, False, True, True),
    (128, 'bfloat16', 30.0, False, True, False),
    (128, 'float32', None, False, True, False),
    (128, 'bfloat16', None, True, True, False),
    (264, 'bfloat16', None, False, False, False),
    (20, 'bfloat16', None, False, True, False),
  ],
)
def test_training_on_a_gpu(h, dtype, softcap, trees, ours, cudnn):
  dtypes = (jnp.dtype(dtype),) * 3

  def serves(backend):
    return not attention._unsupported(backend, h, dtypes, softcap, trees)

  assert (serves('triton'), serves('cudnn')) == (ours, cudnn)
  chosen = dispatch.choose(
    'auto', lambda x: None if serves(x) else 'unsupported', here='gpu'
  )
  assert chosen == ('auto' if ours else 'xla')
