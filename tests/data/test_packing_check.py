"""The errors of `packing.check`, and a sample that it accepts."""

import numpy as np
import pytest

from tests.data.test_packing import f32, make, pack


@pytest.mark.parametrize(
  'fields, words',
  [
    ({'env': 'nope'}, ('env must be an environment', "'nope'")),
    ({'length': 9}, ('batch.row_tokens', 'got 9', 'expected 8')),
    ({'length': 0}, ('length must be in',)),
    (
      {'ce_weights': f32(1, 0, 0, 0)},
      ('ce_weights must be 0 at token 0', '1.0'),
    ),
    (
      {'ref_kl_weights': f32(1, 0, 0, 0)},
      ('ref_kl_weights must be 0 at token 0',),
    ),
    (
      {'mask': np.ones(4, bool), 'rl_weights': f32(1, 1, 1, 1)},
      ('rl_weights must be 0 at token 0',),
    ),
    ({'ids': np.zeros(3, np.int32)}, ('mask must have one entry', '(3,)')),
    (
      {'rl_weights': f32(0, 1, 1)},
      ('rl_weights must have one entry', '(3,)', '(4,)'),
    ),
    ({'roles': np.zeros(5, np.int8)}, ('roles must have one entry',)),
    ({'rl_weights': None}, ('rl_weights must be given', 'finalize')),
    ({'advantages': None}, ('advantages must be given where rl',)),
    (
      {'advantages': f32(0, np.nan, 0, 0)},
      ('advantages must be finite', 'nan at token 1'),
    ),
    (
      {'ref_kl_weights': f32(0, 0, 1, 0), 'ref_logprobs': None},
      ('ref_logprobs must be given where ref_kl',),
    ),
    (
      {
        'ref_kl_weights': f32(0, 0, 1, 0),
        'ref_logprobs': f32(0, 0, -np.inf, 0),
      },
      ('ref_logprobs must be finite', '-inf at token 2'),
    ),
    ({'sampler_logprobs': f32(0, 0, 0, np.inf)}, ('sampler_logprobs',)),
    ({'temperatures': f32(1, 1, 0, 1)}, ('temperatures must be > 0',)),
    (
      {
        'start': 4,
        'ce_weights': f32(0, 1, 1, -1),
        'temperatures': f32(1, 1, 1, 0.5),
      },
      ('temperatures must be 1 where ce', '0.5 at token 3', 'expected 1'),
    ),
    # Also a member of rl: its one temperature cannot serve both.
    (
      {
        'start': 2,
        'ce_weights': f32(0, 0, 1, 0),
        'temperatures': f32(1, 1, 2, 2),
      },
      ('2.0 at token 2',),
    ),
  ],
)
def test_errors_name_environment_and_row(fields, words):
  fields = {'length': 4, 'env': 'sums', 'row': 'data.jsonl:3', **fields}
  with pytest.raises(ValueError) as error:
    pack([make(3), make(**fields)])
  message = str(error.value)
  assert all(word in message for word in words)
  assert f"env {fields['env']!r}, row 'data.jsonl:3'" in message


def test_ce_members_may_have_temperature_1_in_a_rollout_at_another_one():
  sample = make(
    5,
    start=3,
    ce_weights=f32(0, 1, 1, 0, 0),
    temperatures=f32(1, 1, 1, 0.7, 0.7),
  )
  batch, _ = pack([sample])
  assert (batch.rl_count, batch.ce_count) == (2, 2)


def test_a_sample_of_the_joined_row_s_length_is_too_long():
  """Such a row holds several samples; none may be longer than `longest`."""
  pack([make(4)], row_tokens=8, longest=4)
  with pytest.raises(
    ValueError, match=r'batch.row_tokens\]: got 5, expected 4'
  ):
    pack([make(5)], row_tokens=8, longest=4)
