"""Which steps a profile traces, and what is warned of."""

import pytest

from posttrain.stage import logbook


@pytest.mark.parametrize(
  ('done', 'total', 'left', 'warning'),
  [
    (0, 9, [3, 4, 5], ''),
    (3, 9, [4, 5], 'has steps 4 to 9 left, so steps 4 to 5 are traced'),
    (5, 9, [], 'has steps 6 to 9 left, so no step is traced'),
    (3, 4, [4], 'has steps 4 to 4 left, so steps 4 to 4 are traced'),
  ],
)
def test_steps_that_remain(done, total, left, warning, caplog):
  assert list(logbook.traced('a', range(3, 6), done, total)) == left
  assert bool(caplog.text) == bool(warning)
  assert warning in caplog.text


def test_a_trace_ends_where_the_stage_fails(tmp_path):
  profiler = logbook.Profiler(str(tmp_path), 'a', range(2, 9))
  profiler.begin(2)
  profiler.close()
  profiler.close()  # does nothing
  assert list((tmp_path / 'profiles' / 'a').rglob('*.xplane.pb'))
