"""Small things that several tests build: a stage, its batches, its step."""

import dataclasses
import functools
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np

from posttrain import schema, sharding, tree
from posttrain.chat import rendering
from posttrain.envs import registry
from posttrain.models import transformer
from posttrain.pipeline import tokens as token_pipeline
from posttrain.training import objectives, optim
from posttrain.training import step as train_step

RENDERER = rendering.load(schema.Tokenizer())
MODEL = dataclasses.replace(
  schema.PRESETS['tiny'], vocab_size=RENDERER.tokenizer.vocab_size
)
OPTIM = schema.Optim(lr=1e-2, schedule='constant')
ROOT = pathlib.Path(__file__).resolve().parent.parent


def run_on_devices(count, *argv):
  """Runs Python in a process with so many CPU devices; returns its stdout."""
  split = f'--xla_force_host_platform_device_count={count}'
  env = {
    **os.environ,
    'XLA_FLAGS': f'{os.environ.get("XLA_FLAGS", "")} {split}',
    # Told of more threads, the collectives of the devices do not deadlock.
    'NPROC': '16',
  }
  done = subprocess.run(
    [sys.executable, *argv],
    env=env,
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=600,
  )
  assert done.returncode == 0, done.stderr[-2000:]
  return done.stdout


def _arrays(outcome, mesh):
  """Returns the leaves of `outcome(mesh)` by path."""
  leaves = jax.tree_util.tree_leaves_with_path(outcome(mesh))
  return {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}


def write_outcomes(outcome, path, *meshes):
  """Is the program of `assert_devices_match_one`.

  Args:
    outcome: a function mesh -> tree of arrays.
    path: of an npz file.
    *meshes: sizes of `sharding.AXES`, as '1,2,2,1,1'.
  """
  results = {}
  for name in meshes:
    sizes = dict(zip(sharding.AXES, map(int, name.split(',')), strict=True))
    found = _arrays(outcome, sharding.make_mesh(schema.Mesh(**sizes)))
    results |= {f'{name}/{key}': value for key, value in found.items()}
  np.savez(path, **results)


def assert_devices_match_one(outcome, path, devices, meshes, tolerance=1e-5):
  """Compares what meshes compute with what one device does; returns the latter.

  Args:
    outcome: a function mesh -> tree of arrays; its module as a program calls
      `write_outcomes` with its arguments.
    path: of an npz file that is written.
    devices: how many.
    meshes: tuples of sizes of `sharding.AXES`.
    tolerance: of an array's largest number, or of 1 if all are smaller.
  """
  names = [','.join(map(str, mesh)) for mesh in meshes]
  run_on_devices(devices, '-m', outcome.__module__, str(path), *names)
  arrays, expected = np.load(path), _arrays(outcome, sharding.one_device())
  for key, value in expected.items():
    for name in names:
      atol = tolerance * max(1, np.abs(value).max())
      np.testing.assert_allclose(
        arrays[f'{name}/{key}'], value, atol=atol, err_msg=f'{name} {key}'
      )
  return expected


def normal(like, sigma=0.1, seed=0):
  """Draws arrays of the shapes of a tree by numpy: nothing is compiled."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: np.float32(sigma * rng.standard_normal(x.shape)), like
  )


@functools.cache
def _drawn(model, seed, scale):
  rng = np.random.default_rng(seed)
  init = functools.partial(transformer.init, cfg=model)

  def draw(path, x):
    if path.endswith('scale'):
      return np.full(x.shape, scale, x.dtype)
    return 0.15 * rng.standard_normal(x.shape, x.dtype)

  return tree.map_with_path(draw, jax.eval_shape(init, jax.random.key(0)))


def params(model=MODEL, seed=0, scale=1.0):
  """Draws parameters by numpy; compiling `init` takes longer."""
  # `jnp.array` compiles a copy for every shape.
  return jax.device_put(_drawn(model, seed, scale), may_alias=False)


def stage(prompts=8, micro_batch_tokens=128, row_tokens=64, **options):
  """A stage of two-digit additions in rows of one sample or two."""
  env = schema.Arithmetic(ops=('+',), train_tasks=100, eval_tasks=4)
  return schema.Stage(
    envs={'arithmetic': schema.EnvEntry(env=env)},
    batch=schema.Batch(
      prompts_per_step=prompts,
      row_tokens=row_tokens,
      micro_batch_tokens=micro_batch_tokens,
    ),
    **options,
  )


def batches(count, **options):
  """The first batches of a pipeline."""
  pipeline = token_pipeline.TokenPipeline(
    token_pipeline.TokenData(
      stage(**options),
      registry.make_all(stage(**options).envs),
      RENDERER,
      seed=0,
    )
  )
  return [next(pipeline).batch for _ in range(count)]


def sampled(batch, seed=0):
  """The batch as a policy might have sampled it: rl and ref_kl are live."""
  rng = np.random.default_rng(seed)
  weights = np.float32(batch.mask & (batch.positions > 0))
  count = np.float32(weights.sum())

  def normal(mean, sigma):
    return np.float32(rng.normal(mean, sigma, batch.ids.shape))

  return dataclasses.replace(
    batch,
    rl_weights=weights,
    ref_kl_weights=0.1 * weights,
    rl_count=count,
    ref_kl_count=count,
    rl_sequences=sequences(batch.segment_ids, weights),
    advantages=normal(0, 1),
    sampler_logprobs=normal(-4, 0.3),
    ref_logprobs=normal(-4, 0.3),
    versions=np.zeros_like(batch.versions),
  )


def sequences(segment_ids, weights):
  """How many of the packed samples have a member token."""
  rows = segment_ids.reshape(-1, segment_ids.shape[-1])
  weights = weights.reshape(rows.shape)
  return np.float32(
    sum(
      np.unique(row[w != 0]).size for row, w in zip(rows, weights, strict=True)
    )
  )


def make(
  mesh=None,
  average=None,
  objective=None,
  cfg=OPTIM,
  updates=1,
  ema_and_snapshots=(),
  init=None,
  critic=None,
  **options,
):
  """(step, fresh state) of the tiny model on a mesh."""
  mesh = sharding.make_mesh(mesh or schema.Mesh())
  critic = critic or schema.Critic()
  optimizer = optim.make_all(cfg, critic, 10 * updates + critic.warmup_steps)
  step = train_step.make_train_step(
    objective or objectives.TokenComponents(MODEL, ('arithmetic',)),
    optimizer,
    mesh=mesh,
    rules=transformer.SHARDING_RULES,
    average=average,
    updates=updates,
    **options,
  )

  def fresh(params):
    return train_step.init_state(
      params,
      optimizer,
      average=average is not None,
      ema_and_snapshots=ema_and_snapshots,
    )

  weights = jax.device_get(init() if init else params())
  places = sharding.shardings(
    jax.eval_shape(fresh, weights), transformer.SHARDING_RULES, mesh
  )
  return step, jax.jit(fresh, out_shardings=places)(weights)


def worst(a, b):
  """Largest difference of two trees, relative to the largest entry."""
  pairs = list(zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
  return max(
    float(np.max(np.abs(np.asarray(x) - np.asarray(y))))
    / max(float(np.max(np.abs(np.asarray(x)))), 1e-8)
    for x, y in pairs
  )
