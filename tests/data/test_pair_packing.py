"""Choices in rows: whole, in their places, counted; nothing is lost."""

import numpy as np
import pytest

from posttrain import types
from posttrain.data import pair_packing


def sample(length, first=0, prompt=2):
  """Ids count up from `first`; the answer begins behind the prompt."""
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


def choice(chosen, rejected, first=0, **options):
  made = [
    None if length is None else sample(length, first + 100 * i)
    for i, length in enumerate((chosen, rejected))
  ]
  logprobs = np.float32([-first - 1, -first - 2])
  return types.Pair(*made, logprobs, **options)


def pack(*args, rows=2, row_tokens=16, per_row=3):
  return pair_packing.pack(
    *args, rows=rows, row_tokens=row_tokens, per_row=per_row, pad_id=999
  )


def test_every_answer_is_where_it_says():
  made = [
    choice(4, 3, 1000, margin=0.5),
    choice(6, 8, 2000),
    choice(None, 5, 3000),
    choice(3, None, 4000),
  ]
  batch = pack(made)
  assert batch.ids.shape == (2, 2, 16) and batch.present.shape == (2, 2, 3, 2)
  assert (batch.pairs, batch.answers, batch.num_micro_batches) == (2, 6, 1)
  found = {}
  for m, b, k, a in np.argwhere(batch.present):
    here = batch.segment_ids[m, b] == 2 * k + a + 1
    ids = batch.ids[m, b][here]
    found[int(ids[0])] = (
      ids,
      batch.mask[m, b][here],
      batch.positions[m, b][here],
      batch.ref_logprobs[m, b, k, a],
      batch.margins[m, b, k],
    )
  for one in made:
    for a, answer in enumerate((one.chosen, one.rejected)):
      if answer is not None:
        ids, mask, positions, logprob, margin = found.pop(int(answer.ids[0]))
        np.testing.assert_array_equal(ids, answer.ids)
        np.testing.assert_array_equal(mask, answer.mask)
        np.testing.assert_array_equal(positions, np.arange(len(answer)))
        assert (logprob, margin) == (one.ref_logprobs[a], one.margin)
  assert not found
  assert (batch.ids[batch.segment_ids == 0] == 999).all()
  assert not batch.mask[batch.segment_ids == 0].any()


def test_a_row_holds_no_more_than_it_may():
  batch = pack([choice(2, 2, 100 * i) for i in range(7)])
  assert batch.present.any(-1).sum(-1).max() == 3
  assert (batch.pairs, batch.num_micro_batches) == (7, 2)  # rows of 3, 3 and 1


def test_others_lie_behind_and_do_not_count():
  trained = [choice(4, 4, 100 * i) for i in range(5)]
  others = [choice(6, None, 5000 + 100 * i) for i in range(3)]
  batch = pack(trained, others)
  assert (batch.pairs, batch.answers) == (5, 10)
  assert (batch.num_micro_batches, batch.scored) == (
    2,
    3,
  )  # two choices a row; two others
  assert len(batch.ids) == 3 + 2  # room for one per row
  behind = batch.present[batch.num_micro_batches : batch.scored]
  assert behind[..., 0].sum() == 3 and not behind[..., 1].any()
  assert not batch.present[batch.scored :].any()


def test_batches_of_as_many_choices_have_one_shape():
  short, long = ([choice(n, n, 100 * i) for i in range(6)] for n in (2, 8))
  assert pack(short).ids.shape == pack(long).ids.shape
  assert pack(short).num_micro_batches < pack(long).num_micro_batches


def test_no_choices_are_padding():
  batch = pack([])
  assert (
    batch.ids.shape == (0, 2, 16)
    and batch.num_micro_batches == batch.members == 0
  )


def test_too_long_names_the_row():
  with pytest.raises(ValueError, match='row row 7: .* got 17 tokens'):
    pack([choice(9, 8, 7)])
