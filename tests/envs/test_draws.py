"""Key spaces: disjoint splits and distinct draws."""

import dataclasses
import itertools

import pytest

from posttrain import schema
from posttrain.envs import draws


def space(size, **options):
  return draws.Space(size, key=str, **options)


def draw(spaces, split, count, seed):
  cfg = schema.ReverseText(**{f'{split}_tasks': count, 'max_length': 8})
  other = 'eval' if split == 'train' else 'train'
  cfg = dataclasses.replace(cfg, **{f'{other}_tasks': 1})
  return draws.Draws('toy', cfg, spaces, 'raise size').keys(split, seed)


def first(walk, count):
  return list(itertools.islice(walk, count))


def test_splits_of_a_small_space_are_disjoint_and_complete():
  small = space(3000)
  sides = [list(small.walk(split, (1,))) for split in ('train', 'eval')]
  assert sorted(map(int, sides[0] + sides[1])) == list(range(3000))
  assert 0.17 < len(sides[1]) / 3000 < 0.23
  assert [small.capacity(split) for split in ('train', 'eval')] == [
    len(side) for side in sides
  ]
  assert sides[0] != list(small.walk('train', (2,)))
  assert set(sides[0]) == set(small.walk('train', (2,)))


@pytest.mark.parametrize('size', [draws.MAX_COUNTED + 1, 26**64])
def test_capacity_of_a_large_space_is_half_of_the_expected_number(size):
  large = space(size)
  assert large.capacity('eval') == size // 10
  assert large.capacity('train') == size // 10 * 4
  drawn = {
    split: first(large.walk(split, (0,)), 300) for split in ('train', 'eval')
  }
  for keys in drawn.values():
    numbers = [int(key) for key in keys]
    assert len(set(keys)) == 300 and 0 <= min(numbers) <= max(numbers) < size
    # Uniform: the mean of 300 has a standard deviation of 0.017.
    assert 0.43 < sum(number / size for number in numbers) / 300 < 0.57
  assert not set(drawn['train']) & set(drawn['eval'])


def test_spaces_take_turns_until_they_are_exhausted():
  spaces = [
    draws.Space(size, lambda i, tag=tag: f'{tag}{i}')
    for size, tag in ((4, 'a'), (1000, 'b'), (1000, 'c'))
  ]
  capacities = [each.capacity('train') for each in spaces]
  keys = draw(spaces, 'train', 401, 5)
  assert len(set(keys)) == 401
  counts = [sum(key[0] == tag for key in keys) for tag in 'abc']
  assert counts[0] == capacities[0] and abs(counts[1] - counts[2]) <= 1
  assert [key[0] for key in keys[:3]] == ['a', 'b', 'c']
  assert keys[:9] == draw(spaces, 'train', 9, 5)
  assert set(keys) != set(draw(spaces, 'train', 401, 6))


def test_keys_of_one_group_share_a_split():
  paired = space(2000, group=lambda key: str(int(key) // 2))
  held = set(map(int, paired.walk('eval', (0,))))
  assert held == {number ^ 1 for number in held}
