"""Packing of pairs: each whole in its row, counted, nothing lost."""

import numpy as np
import pytest

from posttrain import types
from posttrain.data import preferences


def sample(length, first=0, prompt=2):
  """Ids count up from `first`; the answer begins after the prompt."""
  empty = np.zeros(length, np.float32)
  return types.Sample(
    env='',
    row=f'row {first}',
    ids=np.arange(first, first + length),
    mask=np.arange(length) >= prompt,
    roles=empty,
    is_content=empty,
    sampler_logprobs=empty,
    temperatures=empty,
    versions=empty,
  )


def make_pair(chosen, rejected, first=0, **options):
  answers = [
    None if length is None else sample(length, first + 100 * i)
    for i, length in enumerate((chosen, rejected))
  ]
  logprobs = np.float32([-first - 1, -first - 2])
  return types.Pair(*answers, logprobs, **options)


def pack(*args, rows=2, row_tokens=16, per_row=3, longest_pairs=1):
  return preferences.pack(
    *args,
    rows=rows,
    row_tokens=row_tokens,
    per_row=per_row,
    longest_pairs=longest_pairs,
    pad_id=999,
  )


def test_present_and_segment_ids_locate_every_answer():
  pairs = [
    make_pair(4, 3, 1000, margin=0.5),
    make_pair(6, 8, 2000),
    make_pair(None, 5, 3000),
    make_pair(3, None, 4000),
  ]
  batch = pack(pairs)
  assert batch.ids.shape == (2, 2, 16) and batch.present.shape == (2, 2, 3, 2)
  assert (batch.pairs, batch.answers, batch.num_micro_batches) == (2, 6, 1)
  packed = {}
  for m, b, k, a in np.argwhere(batch.present):
    here = batch.segment_ids[m, b] == 2 * k + a + 1
    ids = batch.ids[m, b][here]
    packed[int(ids[0])] = (
      ids,
      batch.mask[m, b][here],
      batch.positions[m, b][here],
      batch.ref_logprobs[m, b, k, a],
      batch.margins[m, b, k],
    )
  for pair in pairs:
    for a, answer in enumerate((pair.chosen, pair.rejected)):
      if answer is not None:
        ids, mask, positions, logprob, margin = packed.pop(int(answer.ids[0]))
        np.testing.assert_array_equal(ids, answer.ids)
        np.testing.assert_array_equal(mask, answer.mask)
        np.testing.assert_array_equal(positions, np.arange(len(answer)))
        assert (logprob, margin) == (pair.ref_logprobs[a], pair.margin)
  assert not packed
  assert (batch.ids[batch.segment_ids == 0] == 999).all()
  assert not batch.mask[batch.segment_ids == 0].any()


def test_mismatched_pairs_follow_in_micro_batches_that_are_not_counted():
  trained = [make_pair(4, 4, 100 * i) for i in range(5)]
  mismatched = [make_pair(6, None, 5000 + 100 * i) for i in range(3)]
  batch = pack(trained, mismatched)
  assert (batch.pairs, batch.answers) == (5, 10)
  # Two pairs, or two mismatched ones, fit into a row.
  assert batch.num_micro_batches == 2 and batch.scored == 3
  assert len(batch.ids) == 3 + 2  # shape for one pair per row
  present = batch.present[batch.num_micro_batches : batch.scored]
  assert present[..., 0].sum() == 3 and not present[..., 1].any()
  assert not batch.present[batch.scored :].any()


def test_batches_of_equally_many_pairs_have_one_shape():
  short, long = ([make_pair(n, n, 100 * i) for i in range(6)] for n in (2, 8))
  assert pack(short).ids.shape == pack(long).ids.shape
  assert pack(short).num_micro_batches < pack(long).num_micro_batches


def test_the_shape_follows_the_longest_pairs_that_surely_fit():
  pairs = [make_pair(4, 4, 100 * i) for i in range(9)]
  batch = pack(
    pairs, row_tokens=32, per_row=4, longest_pairs=2
  )  # of up to 16 tokens
  assert batch.ids.shape == (3, 2, 32) and batch.pairs == 9
  assert batch.num_micro_batches == 2  # rows of 4, 4 and 1


def test_the_error_for_a_long_pair_names_its_row():
  with pytest.raises(ValueError, match='row row 7: .* got 17 tokens'):
    pack([make_pair(9, 8, 7)])
