"""Inputs of the rl component, and its loss as one number."""

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np

from posttrain.losses import combine, preference, ref_kl, rl
from posttrain.schema import objective
from posttrain.util import imports

# Probabilities of policy and sampler, and credit, of five tokens.
NEW = jnp.log(jnp.array([0.9, 0.5, 0.1, 0.30, 0.05]))
OLD = jnp.log(jnp.array([0.6, 0.45, 0.35, 0.55, 0.05]))
CREDIT = jnp.array([1.0, 1.0, -1.0, 1.0, 0.0])
ONES = jnp.ones(5)


def mirror(inputs):
  """A user's function: plain importance weighting, and a metric."""
  ratio = jnp.exp(inputs.logprobs - inputs.sampler_logprobs)
  return -inputs.advantages * ratio, {'ratio': ratio}


sigmoid = functools.partial(preference.sigmoid, beta=0.1, label_smoothing=0.0)
simpo = functools.partial(preference.simpo, beta=2.0, gamma=1.0)
kto = functools.partial(
  preference.kto, beta=0.1, desirable_weight=1.0, undesirable_weight=1.0
)
ranking = functools.partial(preference.ranking, center_coef=0.0)
ref_kl_loss = functools.partial(ref_kl.loss, **vars(objective.RefKl()))


KINDS = {kind.type: kind for kind in typing.get_args(objective.RlLoss)}


def options(type='dppo', aggregation='token', function=None, **values):
  """Returns the options of a type, which the schema has not checked."""
  path = {'import_path': imports.path(function, key='user')} if function else {}
  node = KINDS[type](**path)
  for name, value in (values | {'aggregation': aggregation}).items():
    assert hasattr(node, name), name
    object.__setattr__(node, name, value)
  return node


CUSTOM = {'type': 'custom', 'function': mirror, 'kwargs': {}}
TYPES = tuple({'type': name} for name in rl.TYPES if name != 'custom')
TYPES += (CUSTOM,)


def name(options):
  return options['type']


def terms(
  new,
  old,
  credit,
  weights,
  segments=None,
  entropy=None,
  proximal=None,
  **values,
):
  """Returns `rl.loss`; by default a row is one sequence."""
  segments = jnp.ones(new.shape, 'int32') if segments is None else segments
  entropy = jnp.zeros(new.shape) if entropy is None else entropy
  return rl.loss(
    new, old, credit, weights, segments, entropy, options(**values), proximal
  )


def total(*arrays, **options):
  """Returns (sum of the terms, metrics)."""
  values, metrics = terms(*arrays, **options)
  return values.sum(), combine.sums(metrics)


def grad(new, *rest, **options):
  """Returns ((sum, metrics), gradient in logprobs)."""
  return jax.value_and_grad(lambda x: total(x, *rest, **options), has_aux=True)(
    new
  )


def random(seed=0, spread=0.5, n=10):
  """Returns random inputs; half of the tokens are members."""
  rng = np.random.default_rng(seed)
  new = -rng.exponential(size=n)
  old = np.minimum(new + spread * rng.normal(size=n), -1e-3)
  credit = rng.normal(size=n)
  weights = rng.normal(size=n) * (rng.permutation(n) < n // 2)
  return tuple(jnp.asarray(x, jnp.float32) for x in (new, old, credit, weights))


def rows(seed=0):
  """Two rows of three sequences each and pads; credit per sequence.

  The last sequence of the second row has no member.
  """
  rng = np.random.default_rng(seed)
  segments = np.array(
    [
      [1] * 5 + [2] * 3 + [3] * 4 + [0] * 2,
      [1] * 2 + [2] * 8 + [3] * 3 + [0] * 1,
    ],
    np.int32,
  )
  shape = segments.shape
  new = -rng.exponential(size=shape)
  old = np.minimum(new + 0.3 * rng.normal(size=shape), -1e-3)
  credit = rng.normal(size=(2, 4))[np.arange(2)[:, None], segments]
  member = (segments > 0) & (rng.random(shape) < 0.7)
  member[1, 10:] = False
  member[:, 1] = True
  floats = (np.float32(x) for x in (new, old, credit, member))
  return (*map(jnp.asarray, floats), jnp.asarray(segments))


def sequences(segments, weights):
  """Returns (row, indices of its member tokens) of each sequence."""
  segments, weights = np.asarray(segments), np.asarray(weights)
  indices = []
  for row, ids in enumerate(segments):
    for segment in np.unique(ids):
      (tokens,) = np.nonzero((ids == segment) & (weights[row] != 0))
      if tokens.size:
        indices.append((row, tokens))
  return indices
