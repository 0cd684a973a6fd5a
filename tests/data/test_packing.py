"""Packing: every sample once, whole and unchanged; counts; leftovers."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain import types
from posttrain.data import packing

ENVS = ('sums', 'chats')


def make(length, *, env='sums', row='r', start=1, **fields):
  """Returns a sample whose tokens from `start` on are rl members."""
  mask = np.arange(length) >= start
  return types.Sample(
    **{
      'env': env,
      'row': row,
      'ids': np.arange(length, dtype=np.int32) + 7,
      'mask': mask,
      'roles': np.full(length, 2, np.int8),
      'is_content': mask,
      'sampler_logprobs': np.where(mask, np.float32(-0.5), np.float32(0)),
      'temperatures': np.ones(length, np.float32),
      'versions': np.where(mask, 3, -1).astype(np.int32),
      'advantages': np.where(mask, np.float32(2), np.float32(0)),
      'rl_weights': mask.astype(np.float32),
      'ce_weights': np.zeros(length, np.float32),
      'ref_kl_weights': np.zeros(length, np.float32),
      'ref_logprobs': np.zeros(length, np.float32),
      **fields,
    }
  )


def pack(samples, *, row_tokens=8, rows=1, micro_batches=8, **options):
  options = {'longest': row_tokens, **options}
  layout = packing.Layout(rows=rows, envs=ENVS, **options)
  return packing.pack(samples, layout, micro_batches, row_tokens)


def lengths(batch):
  """Returns the lengths of each used row's segments."""
  return [
    np.bincount(row)[1:].tolist()
    for row in batch.segment_ids.reshape(-1, batch.ids.shape[-1])
    if row.any()
  ]


def test_first_fit_decreasing():
  batch, left = pack([make(n) for n in (7, 5, 3, 2, 2, 2)])
  assert lengths(batch) == [[7], [5, 3], [2, 2, 2]] and not left


def test_positions_segments_and_pads():
  batch, _ = pack([make(4), make(2, env='chats')], pad_id=256)
  (row,) = batch.positions[0]
  assert row.tolist() == [0, 1, 2, 3, 0, 1, 0, 0]
  assert batch.segment_ids[0, 0].tolist() == [1, 1, 1, 1, 2, 2, 0, 0]
  assert batch.env_ids[0, 0].tolist() == [0, 0, 0, 0, 1, 1, -1, -1]
  pad = batch.segment_ids == 0
  pads = {'ids': 256, 'temperatures': 1, 'versions': -1}
  for field in types.TOKEN_FIELDS:
    assert (getattr(batch, field)[pad] == pads.get(field, 0)).all(), field


@pytest.mark.parametrize(
  'count, mean, spread, most, rows, widths',
  [
    (8, 67, 0.1, 2048, 1, 1),  # chats that are alike
    (8, 67, 0.5, 2048, 1, 4),
    (16, 84, 0.2, 2048, 1, 2),
    (32, 300, 0.5, 2048, 1, 2),  # several micro-batches
    (8, 120, 0.3, 512, 2, 3),  # two devices
    (4, 1500, 0.2, 2048, 1, 3),  # a row each
  ],
)
def test_rows_are_as_long_as_the_samples_of_most_steps_need(
  count, mean, spread, most, rows, widths
):
  rng = np.random.default_rng(0)
  chosen, again = packing.Widths(rows, most), packing.Widths(rows, most)
  needed, computed, states = 0, 0, []
  for _ in range(50):
    sizes = rng.normal(mean, spread * mean, count).clip(4, most)
    sizes = sizes.astype(int).tolist()
    again.set_state(chosen.get_state())  # a resumed run chooses the same
    width = chosen(sizes)
    assert again(sizes) == width <= most
    bins, left = packing.first_fit(sizes, width, count)
    assert not left
    needed += sum(sizes)
    computed += -(-len(bins) // rows) * rows * width
    states.append(width)
  assert len(set(states)) <= widths and computed <= 1.25 * needed


def test_a_long_sample_gets_a_longer_row_at_once():
  widths = packing.Widths(1, 2048)
  short, long = widths([60] * 8), widths([1900])
  assert 480 <= short <= 576 and 1900 <= long <= 2048
  assert (widths([60] * 8), widths([])) == (short, short)
  samples = [make(60, row=f'{i}') for i in range(8)]
  batch, left = pack(samples, row_tokens=packing.Widths(1, 2048), longest=2048)
  assert batch.ids.shape == (8, 1, short) and not left


@st.composite
def batches(draw):
  """Random samples with random streams, and a random shape."""
  row_tokens = draw(st.integers(2, 16))
  rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
  samples = []
  for index in range(draw(st.integers(0, 14))):
    length = int(rng.integers(1, row_tokens + 1))
    weights = {}
    for name in types.COMPONENTS:
      here = (np.arange(length) > 0) & (rng.random(length) < 0.4)
      weights[f'{name}_weights'] = (here * rng.normal(size=length)).astype('f4')
    floats = {
      name: rng.normal(size=length).astype(np.float32)
      for name in ('advantages', 'ref_logprobs', 'sampler_logprobs')
    }
    samples.append(
      make(
        length,
        env=ENVS[index % 2],
        row=str(index),
        ids=rng.integers(0, 2**30, length, np.int32),
        mask=rng.random(length) < 0.7,
        temperatures=np.where(
          weights['ce_weights'] == 0, rng.uniform(0.5, 2, length), 1
        ).astype(np.float32),
        versions=rng.integers(0, 9, length, np.int32),
        **weights,
        **floats,
      )
    )
  return samples, dict(
    row_tokens=row_tokens,
    rows=draw(st.integers(1, 3)),
    micro_batches=draw(st.integers(1, 5)),
  )


def unpack(batch):
  """Yields every segment as {field: array}, checking that it is contiguous."""
  shape = (-1, batch.ids.shape[-1])
  for row, segments in enumerate(batch.segment_ids.reshape(shape)):
    for segment in range(1, segments.max() + 1):
      (places,) = np.nonzero(segments == segment)
      assert (np.diff(places) == 1).all()
      yield {
        field: getattr(batch, field).reshape(shape)[row, places]
        for field in (*types.TOKEN_FIELDS, 'positions', 'env_ids')
      }


@given(batches())
@settings(max_examples=80, deadline=None)
def test_every_sample_is_packed_once_whole_and_unchanged(case):
  samples, shape = case
  batch, left = pack(samples, **shape)
  expected = {}
  for sample in samples:
    masked = np.where(sample.mask, sample.rl_weights, 0)
    if masked.any() or sample.ce_weights.any() or sample.ref_kl_weights.any():
      expected[sample.ids.tobytes()] = (sample, masked)
  packed = list(unpack(batch))
  rows = [sample.row for sample in left]
  assert rows == sorted(rows, key=int)
  keys = [segment['ids'].tobytes() for segment in packed]
  keys += [sample.ids.tobytes() for sample in left]
  assert sorted(keys) == sorted(expected)
  for segment in packed:
    sample, masked = expected[segment['ids'].tobytes()]
    for field in types.TOKEN_FIELDS:
      value = masked if field == 'rl_weights' else getattr(sample, field)
      np.testing.assert_array_equal(segment[field], value, err_msg=field)
    assert segment['positions'].tolist() == list(range(len(sample)))
    assert set(segment['env_ids']) == {ENVS.index(sample.env)}
  for component in types.COMPONENTS:
    weights = [segment[f'{component}_weights'] for segment in packed]
    assert getattr(batch, f'{component}_count') == (
      sum(np.count_nonzero(w) for w in weights)
    )
  assert batch.rl_sequences == sum(
    bool(segment['rl_weights'].any()) for segment in packed
  )
  used = sum(map(bool, lengths(batch)))
  assert batch.num_micro_batches == -(-used // shape['rows'])
  if left:  # only where no row is free or has enough free tokens
    assert used == shape['rows'] * shape['micro_batches']
    shortest = min(len(sample) for sample in left)
    assert all(
      sum(row) + shortest > shape['row_tokens'] for row in lengths(batch)
    )


def test_a_tree_by_hand():
  """A group of two, and a sample of which the first two tokens are theirs."""

  def one(*ids, start):
    return make(len(ids), ids=np.int32(ids), start=start)

  samples = one(1, 2, 3, 5, start=3), one(9, 9, start=1)
  samples += one(1, 2, 4, start=2), one(1, 2, 3, 6, 7, start=3)
  batch, left = pack(samples, row_tokens=10, trees=True)
  fields = 'ids', 'segment_ids', 'positions', 'parents', 'ends'
  assert not left and batch.num_micro_batches == 1
  assert [getattr(batch, x)[0, 0].tolist() for x in fields] == [
    [1, 2, 4, 3, 5, 6, 7, 9, 9, 0],
    [1, 1, 1, 2, 2, 3, 3, 4, 4, 0],
    [0, 1, 2, 2, 3, 3, 4, 0, 1, 0],
    [0, 0, 1, 1, 3, 3, 5, 0, 7, 0],
    [7, 7, 3, 7, 5, 7, 7, 9, 9, 0],
  ]


def test_a_group_longer_than_a_row_repeats_its_prompt():
  """In the emptiest rows first; a quarter of a sample is worth a tree."""
  group = [make(6, row=str(i), start=4) for i in range(5)]
  other = [make(9, start=2, ids=np.int32(50 + np.arange(9)))]
  batch, left = pack([*group, *other], row_tokens=10, trees=True)
  assert lengths(batch) == [[6, 2, 2], [6, 2], [9]] and not left
  batch, left = pack(
    [*group, *other], row_tokens=10, trees=True, micro_batches=2
  )
  assert lengths(batch) == [[6, 2, 2], [6, 2]] and left == other
  batch, left = pack(group, row_tokens=10, trees=True, micro_batches=1)
  assert lengths(batch) == [[6, 2, 2]]
  assert [sample.row for sample in left] == ['3', '4']
  widths = packing.Widths(1, 64)
  batch, _ = pack(group, row_tokens=widths, longest=6, trees=True)
  assert batch.ids.shape == (8, 1, 32) and batch.num_micro_batches == 1


@pytest.mark.parametrize('trained', [False, True])
@given(case=batches())
@settings(max_examples=80, deadline=None)
def test_the_path_of_a_sample_in_its_tree_is_the_sample(trained, case):
  samples, shape = case
  rng, kept = np.random.default_rng([len(x) for x in samples]), {}
  for index, sample in enumerate(samples):
    live = np.arange(len(sample)) >= rng.integers(0, len(sample) + 1)
    names = 'mask', *(f'{name}_weights' for name in types.COMPONENTS)
    changes = {name: getattr(sample, name) * live for name in names}
    changes['ids'] = rng.integers(0, 2, len(sample)).astype(np.int32)
    changes['ids'][-1] = 10 + index  # names the sample
    sample = dataclasses.replace(sample, **changes)
    if index:  # most begin as another one does, some but for a stream
      other = samples[rng.integers(index)]
      same = rng.integers(min(len(sample), len(other)))
      sample = dataclasses.replace(sample, env=ENVS[rng.integers(3) // 2])
      odd = rng.integers(2 * len(types.TOKEN_FIELDS))
      for i, name in enumerate(types.TOKEN_FIELDS):
        if i != odd:
          getattr(sample, name)[:same] = getattr(other, name)[:same]
    sample.rl_weights[~sample.mask] = 0
    sample.temperatures[sample.ce_weights != 0] = 1
    samples[index] = sample
    if any(getattr(sample, name).any() for name in names[1:]):
      kept[10 + index] = sample
  batch, left = pack(samples, trees=True, trained=trained, **shape)
  assert [sample.ids[-1] for sample in left] == sorted(
    sample.ids[-1] for sample in left
  )
  for sample in left:
    kept.pop(sample.ids[-1])
  for name in types.COMPONENTS:
    members = [
      np.count_nonzero(vars(x)[f'{name}_weights']) for x in kept.values()
    ]
    assert getattr(batch, f'{name}_count') == sum(members)
  assert batch.rl_sequences == sum(x.rl_weights.any() for x in kept.values())
  rows = {
    name: values.reshape(-1, shape['row_tokens'])
    for name, values in vars(batch).items()
    if values is not None and values.ndim
  }
  for row, segments in enumerate(rows['segment_ids']):
    here = {name: values[row] for name, values in rows.items()}
    assert not here['ends'][segments == 0].any()
    copies = np.zeros_like(segments)
    for segment in range(1, segments.max() + 1):
      (own,) = np.nonzero(segments == segment)
      last, path = own[-1], [own[-1]]
      while here['positions'][path[0]]:
        path.insert(0, here['parents'][path[0]])
      sample = kept.pop(here['ids'][last])
      keys = np.arange(last + 1)
      sees = (keys >= path[0]) & (last < here['ends'][keys])
      assert np.flatnonzero(sees).tolist() == path
      assert here['positions'][path].tolist() == list(range(len(sample)))
      np.testing.assert_array_equal(here['ids'][path], sample.ids)
      copies[path] += 1
      assert copies[last] == 1
      trains = np.any([getattr(sample, name) for name in names], axis=0)
      trains[len(path) - len(own) :] = True  # its own
      path = np.array(path)
      assert trained or path[trains].tolist() == own.tolist()
      assert set(here['env_ids'][path[trains]]) == {ENVS.index(sample.env)}
      for name in types.TOKEN_FIELDS:
        values = here[name][path]
        wanted = getattr(sample, name)
        np.testing.assert_array_equal(
          values[trains], wanted[trains], err_msg=name
        )
        if name in names:  # nothing else trains
          assert not values[~trains].any()
    np.testing.assert_array_equal(here['copies'], copies)
  assert not kept


def test_routes_lie_with_their_tokens():
  """Prompts of other routes are not shared; a sample may have none."""
  rng = np.random.default_rng(0)
  routes = rng.integers(0, 9, (5, 3, 2)).astype(np.int16)
  changed = routes.copy()
  changed[2, 1, 0] += 1
  samples = [
    make(5, start=4, routes=x) for x in (routes, routes.copy(), changed)
  ]
  samples.append(make(3, env='chats'))
  options = {'row_tokens': 16, 'micro_batches': 1}
  batch, _ = pack(samples, **options)
  assert batch.routes.dtype == np.int16
  for i, sample in enumerate(samples, 1):
    here = batch.segment_ids == i
    expected = -1 if sample.routes is None else sample.routes
    assert (batch.routes[here] == expected).all()
  assert (batch.routes[batch.segment_ids == 0] == -1).all()
  batch, _ = pack(samples, trees=True, **options)
  # Of the two that are alike one shares four tokens, the third but two.
  assert lengths(batch) == [[5, 3, 1, 3]]
  assert pack([make(3)], row_tokens=16)[0].routes is None


def test_ce_members_may_have_temperature_1_in_a_rollout_at_another_one():
  streams = {'ce_weights': [0, 1, 1, 0, 0], 'temperatures': [1, 1, 1, 2, 2]}
  streams = {name: np.float32(x) for name, x in streams.items()}
  sample = make(5, start=3, **streams)
  batch, _ = pack([sample])
  assert (batch.rl_count, batch.ce_count) == (2, 2)


def test_a_sample_of_the_joined_row_s_length_is_too_long():
  """Such a row holds several samples; none may be longer than `longest`."""
  pack([make(4)], longest=4)
  with pytest.raises(ValueError, match='batch.row_tokens.* got 5'):
    pack([make(5)], longest=4)
