"""Intervals and the ranges of blocks that they cover."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import masks
from tests.kernels import inputs

key_blocks = jax.jit(masks.key_blocks, static_argnums=(2, 3))
query_blocks = jax.jit(masks.query_blocks, static_argnums=1)
clip = jax.jit(masks.clip, static_argnums=2)


@pytest.mark.parametrize(
  'size, most, least, expected',
  [
    (256, 64, 16, (64, 256)),
    (160, 64, 16, (32, 160)),  # divides: no padding, hence no copy
    (100, 64, 16, (64, 128)),
    (24, 64, 16, (32, 32)),
    (1, 64, 16, (16, 16)),
    (1000, 512, 128, (512, 1024)),
    (768, 512, 128, (256, 768)),
  ],
)
def test_fit_returns_literal_blocks_and_sizes(size, most, least, expected):
  assert masks.fit(size, most, least) == expected


def test_clip_turns_empty_intervals_into_zeros():
  start = jnp.array([[-2, 3, 5, 7, 9]])
  end = jnp.array([[2, 3, 4, 12, 12]])
  start, end = clip(start, end, 8)
  assert start.tolist() == [[0, 0, 0, 7, 0]]
  assert end.tolist() == [[2, 0, 0, 8, 0]]


def test_block_ranges_of_two_literal_segments():
  # Two segments of 4 and 3 tokens and a pad, in blocks of 2.
  start = jnp.array([[0, 0, 0, 0, 4, 4, 4, 0]])
  end = jnp.array([[1, 2, 3, 4, 5, 6, 7, 0]])
  blocks = key_blocks(start, end, 2, 2)
  assert blocks.tolist() == [
    [[0, 0, 0, 1], [0, 0, 1, 2], [2, 2, 2, 3], [2, 2, 2, 4]]
  ]
  by_key = query_blocks(blocks, 4)
  assert by_key[..., 0].tolist() == [[0, 1, 2, 3]]
  assert by_key[..., 3].tolist() == [[2, 2, 4, 4]]
  assert by_key[0, 0].tolist() == [0, 1, 2, 2]  # block 1 needs no mask


def test_lists_of_a_literal_tree():
  # Two tokens with two branches of two, in blocks of 2: the second branch does
  # not visit the first.
  end = jnp.array([[1, 2, 3, 4, 5, 6]])
  until = jnp.array([[6, 6, 4, 4, 6, 6]])
  blocks = key_blocks(jnp.zeros_like(end), end, 2, 2, until)
  assert blocks[..., :4].tolist() == [
    [[0, 0, 0, 1], [0, 0, 1, 2], [0, 0, 1, 2]]
  ]
  assert blocks[0, 2, 4:].tolist() == [0, 2, 1]  # the first without a mask
  by_key = query_blocks(blocks, 3)
  assert by_key[0, :, 2:4].tolist() == [[2, 3], [0, 1], [0, 1]]
  assert by_key[0, 0, 4:].tolist() == [1, 2, 0]


@pytest.mark.parametrize('block_q, block_k', [(16, 16), (8, 32)])
def test_lists_have_all_seen_blocks_and_few_others(block_q, block_k):
  t = 128
  ends, mask = inputs.forests(t)
  tiled = mask.reshape(-1, t // block_q, block_q, t // block_k, block_k)
  seen, whole = tiled.any((2, 4)), tiled.all((2, 4))
  blocks = key_blocks(*ends[:2], block_q, block_k, ends[2])
  by_key = query_blocks(blocks, t // block_k)
  for lists, some, every in (
    (blocks, seen, whole),
    (by_key, seen.mT, whole.mT),
  ):
    lists = np.asarray(lists)
    ordered = np.take_along_axis(some, lists[..., 4:], -1)
    place = np.arange(some.shape[-1])
    live = place < lists[..., 3:4]
    assert live[ordered].all()
    assert (live & ~ordered).sum() <= live.sum() // 8
    bare = np.take_along_axis(every, lists[..., 4:], -1)
    assert (bare == (place < lists[..., 2:3])).all()


def test_empty_intervals_cover_no_block():
  zero = jnp.zeros((1, 8), jnp.int32)
  blocks = key_blocks(zero, zero, 4, 4)
  assert not blocks.any()
  assert not query_blocks(blocks, 2).any()


@pytest.mark.parametrize('block_q, block_k', [(16, 16), (8, 32)])
def test_ranges_cover_all_keys_and_inner_blocks_need_no_mask(block_q, block_k):
  t = 64
  start, end = clip(*inputs.every_kind(t), t)
  start, end = np.asarray(start), np.asarray(end)
  keys = np.arange(t)
  mask = (start[..., None] <= keys) & (keys < end[..., None])
  tiled = np.asarray(mask).reshape(
    -1, t // block_q, block_q, t // block_k, block_k
  )
  covered, whole = tiled.any((2, 4)), tiled.all((2, 4))
  blocks = key_blocks(start, end, block_q, block_k)
  by_key = query_blocks(blocks, t // block_k)
  for ranges, some, every in (
    (blocks, covered, whole),
    (by_key, covered.mT, whole.mT),
  ):
    assert (np.diff(ranges, axis=-1) >= 0).all()
    lo, inner, outer, hi = (np.asarray(ranges)[..., i, None] for i in range(4))
    index = np.arange(some.shape[-1])
    assert ((lo <= index) & (index < hi))[some].all()
    assert every[(inner <= index) & (index < outer)].all()
  # In a causal row all blocks below the diagonal are inner ones.
  assert blocks[0, -1].tolist() == [
    0,
    0,
    (t - block_q + 1) // block_k,
    t // block_k,
  ]


def test_window_keeps_the_last_keys():
  start, end = inputs.packed((4, 3), 8)
  assert masks.window(start, end, 2).tolist() == [0, 0, 1, 2, 4, 4, 5, 0]
