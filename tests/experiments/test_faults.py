"""The fault matrix: its table, its registry, and all of it (slow)."""

import pytest

from experiments.trials import __main__ as faults
from experiments.trials import base


def test_each_trial_has_a_name_of_its_own_and_a_promise():
  trials = faults.find()
  assert len({t.name for t in trials}) == len(trials)
  assert all(t.promise for t in trials)
  with pytest.raises(ValueError, match=r"must name trials: got \['nothing'\]"):
    faults.find('nothing')


def test_a_trial_that_falls_short_or_breaks_is_told(tmp_path):
  def holds(scratch):
    assert scratch.folder.exists()
    return 'held | fast'

  def falls(scratch):
    assert scratch is None, 'exit 1, not 2'

  def breaks(scratch):
    raise OSError('no space')

  def lacks(scratch):
    raise base.NotTried('no package')

  shared = base.Shared(tmp_path)
  rows = [
    faults.run(base.Trial('here', 'holds', f, False), tmp_path, shared)
    for f in (holds, falls, breaks, lacks)
  ]
  assert [row['result'] for row in rows] == [
    faults.GOOD,
    faults.SHORT,
    faults.SHORT,
    faults.NOT_TRIED,
  ]
  lines = [faults.line(row) for row in rows]
  assert lines[0].startswith('| here.holds | holds | held \\| fast | 0.0 | go')
  assert 'exit 1, not 2' in lines[1] and lines[1].endswith('FELL SHORT |')
  assert 'OSError: no space' in lines[2]


@pytest.mark.slow
def test_all_promises_hold():
  rows = faults.run_all(faults.find(), jobs=2)
  assert not {
    row['trial']: row['seen'] for row in rows if row['result'] == faults.SHORT
  }
