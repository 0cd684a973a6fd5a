"""The estimate of a stage's time, against rows whose seconds are known."""

import pytest

from posttrain.metrics import pace


def test_steps_and_evaluations_that_are_left():
  """2 s a step, 10 s an evaluation at 4, 8 and 10; the first step compiles."""
  of = pace.Pace(10, every=4)
  of.add(0, 12.0, {'time/eval': 12.0, 'time/compile': 2.0})
  assert of.left(0) is None
  of.add(1, 60.0, {'time/compile': 40.0})
  assert of.step_seconds is None and of.measured == 0
  of.add(2, 62.0, {})
  assert (of.measured, of.step_seconds) == (1, 2.0)
  assert of.left(2) == 2.0 * 8 + 10.0 * 3
  of.add(3, 67.0, {'time/compile': 3.0})  # another length of rows
  of.add(4, 80.0, {'time/eval': 11.0})
  assert of.step_seconds == 2.0
  assert of.left(4) == 2.0 * 6 + 11.0 * 2
  assert of.left(0) == 2.0 * 10 + 11.0 * 3
  assert of.left(10) == 0.0


@pytest.mark.parametrize('every', [None, 0, 100])
def test_a_stage_without_a_cadence_is_evaluated_at_its_end(every):
  of = pace.Pace(9, every, evaluation=5.0)  # continued: step 7 compiles
  of.add(7, 30.0, {})
  of.add(8, 31.0, {})
  assert of.left(8) == 1.0 + 5.0


def test_old_steps_are_forgotten():
  of = pace.Pace(1000)
  for step in range(1, 300):
    of.add(step, step * (1.0 if step < 100 else 3.0), {})
  assert of.step_seconds == pytest.approx(3.0)
