"""Which steps a profile traces, and what is warned of."""

import pytest

from posttrain.stage import logbook


@pytest.mark.parametrize(
  ('done', 'total', 'left'),
  [(0, 9, [3, 4, 5]), (3, 9, [4, 5]), (5, 9, []), (3, 4, [4])],
)
def test_steps_that_remain(done, total, left, caplog):
  assert list(logbook.traced('a', range(3, 6), done, total)) == left
  assert bool(caplog.text) == (left != [3, 4, 5])


def test_a_trace_ends_where_the_stage_fails(tmp_path):
  profiler = logbook.Profiler(str(tmp_path), 'a', range(2, 9))
  profiler.begin(2)
  profiler.close()
  profiler.close()  # does nothing
  assert list((tmp_path / 'profiles' / 'a').rglob('*.xplane.pb'))
