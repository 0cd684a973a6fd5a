"""With `exact`, the bits of a sequence do not depend on others."""

import numpy as np
import pytest

from posttrain.decode import engines, requests
from tests import fixtures
from tests.decode import helpers


@pytest.mark.slow
def test_bits_alone():
  rng = np.random.default_rng(0)
  batch = [
    requests.Request(i, rng.integers(0, 99, size).astype(np.int32), 120, key=i)
    for i, size in enumerate((5, 390, 30, 210, 80))
  ]
  options = engines.Options(
    8, 1024, prefill_rows=1, prefill_tokens=64, exact=True
  )
  engine = engines.Engine(fixtures.MODEL, options)
  engine.set_params(helpers.params(fixtures.MODEL), 0)
  together = engine.generate(batch)
  for request, expected in zip(batch[::-1], together[::-1], strict=True):
    [alone] = engine.generate([request])
    np.testing.assert_array_equal(alone.ids, expected.ids)
    np.testing.assert_array_equal(alone.logprobs, expected.logprobs)
