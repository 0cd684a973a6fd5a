"""Which steps a profile traces, and what is warned of."""

import pytest

from posttrain.stage import profiles


@pytest.mark.parametrize(
  ('done', 'total', 'left', 'warning'),
  [
    (0, 9, [3, 4, 5], ''),
    (3, 9, [4, 5], 'a continues after step 3, so steps 4 to 5 are traced'),
    (5, 9, [], 'a continues after step 5, so no step is traced'),
    (0, 4, [3, 4], 'a ends at step 4, so steps 3 to 4 are traced'),
    (3, 4, [4], 'a continues after step 3 and ends at step 4, so steps 4 to 4'),
  ],
)
def test_steps_that_remain(done, total, left, warning, caplog):
  assert list(profiles.remaining('a', range(3, 6), done, total)) == left
  assert bool(caplog.text) == bool(warning)
  assert warning in caplog.text


def test_a_trace_ends_where_the_stage_fails(tmp_path):
  profiler = profiles.make(str(tmp_path), 'a', range(2, 9))
  profiler.begin(2)
  profiler.close()
  profiler.close()  # does nothing
  assert list((tmp_path / 'profiles' / 'a').rglob('*.xplane.pb'))
