"""Ten steps of training on both sides: ours, and that of `torch_peer`.

Ours is float32, the peer float64. Losses and norms of gradients are compared
at every step, and in the end the weights and their moving average. Adam makes
the last hard: where a gradient is near 0, it divides rounding by rounding. So
`eps` is 1e-4 on both sides, which bounds that division, and differences of
weights are measured by how far weights have gone.
"""

import dataclasses

import jax
import numpy as np
import pytest

from posttrain import schema, sharding, tree, types
from posttrain.models import transformer
from posttrain.training import optim
from posttrain.training import step as train_step
from tests.training import torch_peer

torch = pytest.importorskip('torch')

STEPS = 10
PROMPT = 3
TIED = dataclasses.replace(schema.PRESETS['tiny'], layers=2, vocab_size=64)
# With all that a parameter can be: a head, biases, norms of heads.
FULL = dataclasses.replace(TIED, tied_head=False, qkv_bias=True, qk_norm=True)
OPTIM = schema.Optim(
  lr=3e-3, warmup_steps=3, final_lr_fraction=0.1, eps=1e-4, average=0.8
)


def start(model: schema.Model, ranks: bool = False):
  """Weights, none of which is 0 or 1; nothing is compiled for them."""
  rng = np.random.default_rng(0)
  shapes = transformer.shapes(model)
  if ranks:
    shapes = jax.eval_shape(transformer.add_reward, shapes)

  def draw(path, leaf):
    x = rng.normal(size=leaf.shape)
    if path.endswith('scale'):
      return np.float32(1 + 0.1 * x)
    fan_in = model.embed_dim if leaf.ndim < 3 else leaf.shape[1]
    return np.float32(x * fan_in**-0.5)

  return tree.map_with_path(draw, shapes)


def sample(rng, length: int, temperature: float = 1.0) -> types.Sample:
  """Tokens at random, an answer behind a prompt."""
  ids = rng.integers(0, TIED.vocab_size, length).astype(np.int32)
  mask = np.arange(length) >= PROMPT
  return types.Sample(
    env='toy',
    row='',
    ids=ids,
    mask=mask,
    roles=np.zeros(length, np.int8),
    is_content=mask,
    sampler_logprobs=np.zeros(length, np.float32),
    temperatures=np.where(mask, np.float32(temperature), np.float32(1)),
    versions=np.where(mask, 0, -1).astype(np.int32),
  )


def answer(params, model: schema.Model, made: types.Sample, temperature=1.0):
  """log pi of the answer's tokens, by the peer."""
  found = torch_peer.logprobs(params, model, made.ids, temperature)
  return found[PROMPT - 1 :]


def compare(objective, params, batches, theirs):
  """Runs both sides and holds one against the other.

  Args:
    objective: one of `objectives`.
    params: of `start`.
    batches: for the train step, one per step.
    theirs: (the peer's parameters, step) -> loss.

  Returns:
    The metrics of every step.
  """
  state, metrics = _ours(objective, params, batches)
  weights, average, expected = _peer(params, theirs)
  for name, values in expected.items():
    # What is a sum of both signs may be next to 0.
    np.testing.assert_allclose(
      [x[name] for x in metrics], values, rtol=1e-5, atol=5e-7, err_msg=name
    )
  assert _moved_apart(state.params, weights, params) < 1e-4
  assert _moved_apart(state.average, average, params) < 1e-4
  return metrics


def _ours(objective, params, batches):
  """(last state, the metrics of every step)."""
  mesh, rules = sharding.make_mesh(schema.Mesh()), (('', ()),)
  optimizer = optim.make(OPTIM, STEPS)
  step = train_step.make_train_step(
    objective, optimizer, mesh=mesh, rules=rules, average=OPTIM.average
  )
  state = train_step.init_state(params, optimizer, average=True)
  state = jax.device_put(state, sharding.shardings(state, rules, mesh))
  seen = []
  for batch in batches:
    state, metrics = step(state, batch)
    seen.append({name: float(x) for name, x in metrics.items()})
  assert step.compiles == 1 and len(seen) == STEPS
  return state, seen


def _peer(params, theirs):
  """(last weights, their average, what is compared at every step)."""
  weights = torch_peer.tensors(params)
  optimizer = torch_peer.AdamW(OPTIM, STEPS, weights)
  seen = {'loss/total': [], 'optim/grad_norm': []}
  for i in range(STEPS):
    weights = {path: x.requires_grad_() for path, x in weights.items()}
    loss = theirs(weights, i)
    grads = torch.autograd.grad(
      loss, list(weights.values()), materialize_grads=True
    )
    grads = dict(zip(weights, grads, strict=True))
    seen['loss/total'].append(float(loss.detach()))
    seen['optim/grad_norm'].append(float(torch_peer.norm(grads)))
    with torch.no_grad():
      weights = optimizer.step(weights, grads)
  return weights, optimizer.average, seen


def _moved_apart(ours, theirs, begin) -> float:
  """Largest difference of weights, by the largest way a weight has gone."""
  ours, begin = tree.flat(jax.device_get(ours)), tree.flat(begin)
  assert ours.keys() == theirs.keys() == begin.keys()
  theirs = {path: value.numpy() for path, value in theirs.items()}
  apart = max(np.abs(ours[path] - x).max() for path, x in theirs.items())
  way = max(np.abs(begin[path] - x).max() for path, x in theirs.items())
  return apart / way
