"""An update of Gemma 4 on several devices is that of one."""

import dataclasses
import sys

import jax
import numpy as np
import pytest

from posttrain import schema, sharding
from posttrain.models import transformer
from posttrain.training import objectives, optim
from posttrain.training import step as train_step
from tests import fixtures
from tests.models import test_transformer

CFG = dataclasses.replace(
  test_transformer.GEMMA4, vocab_size=fixtures.MODEL.vocab_size
)
OPTIM = dataclasses.replace(fixtures.OPTIM, eps=1e-3)  # not to magnify rounding


def outcome(mesh):
  """Returns the metrics and the state of an update, gradients as moments."""
  rules = transformer.SHARDING_RULES
  optimizer = optim.make_all(OPTIM, schema.Critic(), 10)
  objective = objectives.TokenComponents(CFG, ('arithmetic',), schema.Loss())
  params = fixtures.params(CFG)
  # Small ones would shrink the residual stream, and its norm magnify rounding.
  params['layers']['scalar'] = np.ones((CFG.layers, 1), np.float32)
  state = train_step.init_state(params, optimizer, average=False)
  state = sharding.put(state, sharding.shardings(state, rules, mesh))
  step = train_step.make_train_step(
    objective, optimizer, mesh=mesh, rules=rules
  )
  # Demonstrations: a ratio of probabilities would magnify rounding.
  (batch,) = fixtures.batches(1, micro_batch_tokens=512)
  state, metrics = jax.block_until_ready(step(state, batch))
  # Noise of half a bit in the weights changes the norm of the gradients by 8e-5
  # and the new parameters by up to 1.9e-5.
  del metrics['optim/grad_norm']
  return metrics, state


@pytest.mark.slow
def test_four_devices_match_one(tmp_path):
  meshes = [(1, 1, 2, 1, 2), (1, 2, 2, 1, 1)]
  path = tmp_path / 'arrays.npz'
  one = fixtures.assert_devices_match_one(outcome, path, 4, meshes, 2e-5)
  # Heads of both sizes, and the embeddings of layers, have gradients.
  for name in ('global_attention', 'attention', 'layer_embed'):
    moments = [
      x for key, x in one.items() if f"'{name}'" in key and 'mu' in key
    ]
    assert moments and all(x.any() for x in moments), name


if __name__ == '__main__':
  fixtures.write_outcomes(outcome, *sys.argv[1:])
