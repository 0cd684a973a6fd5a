"""The bench of lags: its runs, its table, and its uncorrected loss."""

import pytest

from experiments.benchmarks import lags
from tests.losses import helpers


def test_a_trial_has_its_lag_and_correction():
  trials = lags.expand('algorithms/grpo:tiny', [0, 8], lags.CORRECTIONS, [1])
  assert len({trial.name for *_, trial in trials}) == 2 * len(lags.CORRECTIONS)
  modes = set()
  for lag, kind, trial in trials:
    stage = trial.run.stages['main']
    assert (stage.rollout.max_lag, trial.run.seed) == (lag, 1)
    assert stage.updates_per_rollout == (2 if '2 updates' in kind else 1)
    modes.add(stage.loss.rl.sampler_is_mode)
  assert modes == {'none', 'token_truncate', 'token_mask', 'sequence_mask'}
  with pytest.raises(ValueError, match='--corrections must be'):
    lags.expand('algorithms/grpo:tiny', [0], ['tis'], [0])


def test_the_uncorrected_loss_reads_no_sampler():
  new, old, credit, weights = helpers.random()
  for sampler in (old, new):
    _, grad = helpers.grad(
      new, sampler, credit, weights, type='custom', function=lags.uncorrected
    )
    assert (grad == -weights * credit).all()


def test_the_table_is_of_runs_that_have_ended():
  def row(seed, step, sampled, greedy=0.5, correction='clip'):
    named = {'lag': 8, 'correction': correction, 'env': 'sums', 'seed': seed}
    values = {'sampled': sampled, 'greedy': greedy, 'cpu_s': 10.0 * step}
    return {**named, 'step': step, **values}

  rows = [row(0, 0, 0.2), row(0, 9, 0.4, 0.6), row(1, 0, 0.3), row(1, 9, 0.8)]
  rows += [row(2, 0, 0.9), row(0, 0, 0.1, correction='dppo')]
  *_, line = lines = lags.table(rows)
  assert len(lines) == 3
  cells = [x.strip() for x in line.strip('|').split('|')]
  assert cells[:4] == ['8', 'clip', 'sums', '2']
  assert cells[4:] == [
    *('0.250', '0.600', '0.400 / 0.800', '0.500 -> 0.550', '90')
  ]
