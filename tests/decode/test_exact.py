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


def test_all_that_wait_are_prefilled_between_two_chunks():
  options = engines.Options(4, 64, chunk=2, prefill_rows=1, exact=True)
  engine = engines.Engine(fixtures.MODEL, options)
  engine.take_free_slots()
  engine.set_params(helpers.params(fixtures.MODEL), 0)
  for batch in (range(1), range(1, 4)):
    for i in batch:
      ids = np.arange(1, 4 + i, dtype=np.int32)
      engine.submit(requests.Request(i, ids, 40))
    assert engine.step() == []
  assert all(len(ids) for ids, *_ in engine.partial().values())
