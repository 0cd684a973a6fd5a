"""Deep copies: equal, apart, linear, and of odd objects."""

import collections
import dataclasses
import threading
import time
import types as std

import numpy as np
import pytest

from posttrain.rollout import copies
from tests.algorithms import two_turns


def test_copy_is_equal_and_shares_nothing_that_can_be_edited():
  value = {'a': [1, ({'b': {2}},)], 'c': collections.deque([[3]]), 4: b'x'}
  new = copies.of(value)
  assert new == value and type(new['c']) is collections.deque
  new['a'][1][0]['b'].add(5)
  new['c'][0].append(6)
  assert value == {
    'a': [1, ({'b': {2}},)],
    'c': collections.deque([[3]]),
    4: b'x',
  }


def test_rollouts_are_copied_with_their_arrays():
  rollout = two_turns.rollout(1.0)
  new = copies.of(rollout)
  assert repr(new) == repr(rollout) and new.task is new.samples[0].task
  assert new.task is not rollout.task
  assert not np.shares_memory(new.samples[0].ids, rollout.samples[0].ids)
  view = np.arange(6).reshape(2, 3).T
  assert copies.of(view).strides == view.strides


def test_proxies_and_objects_without_a_copy():
  lock = threading.Lock()
  inner = {'lock': lock, 'list': []}
  new = copies.of(std.MappingProxyType(inner))
  assert isinstance(new, std.MappingProxyType) and new['lock'] is lock
  assert new['list'] == [] and new['list'] is not inner['list']


class _Rows(list):
  pass


@dataclasses.dataclass(frozen=True)
class _Node:
  items: list
  lock: object


class _Session:
  """Its copy would close what the original holds."""

  def __init__(self, lock):
    self.lock, self.items = lock, []


@pytest.mark.parametrize(
  'build',
  [
    lambda lock: collections.OrderedDict(items=[1], lock=lock),
    lambda lock: {'items': _Node([1], lock)}['items'],
    lambda lock: _Rows([[1], lock]),
    lambda lock: collections.namedtuple('Pair', 'items lock')([1], lock),
    lambda lock: collections.defaultdict(list, items=[1], lock=lock),
  ],
)
def test_containers_and_dataclasses_are_copied_around_a_lock(build):
  lock = threading.Lock()
  value = build(lock)

  def parts(x):
    if isinstance(x, dict):
      x = list(x.values())
    return list(x) if isinstance(x, list | tuple) else [x.items, x.lock]

  new = copies.of({'info': value})['info']
  assert type(new) is type(value) and parts(new)[1] is lock
  parts(new)[0].append(2)
  assert parts(value)[0] == [1]


def test_other_objects_with_a_lock_stay_as_they_are():
  value = _Session(threading.Lock())
  assert copies.of([value, {'again': value}])[1]['again'] is value


def test_cycles_and_shared_objects_take_linear_time():
  loop = []
  loop.append((loop,))
  new = copies.of(loop)
  assert new[0][0] is new and new is not loop
  doubled = []
  for _ in range(200):
    doubled = [doubled, doubled]
  start = time.monotonic()
  new = copies.of({'x': doubled})['x']
  assert new[0] is new[1] and time.monotonic() - start < 1
  deep = []
  for _ in range(100_000):
    deep = [deep]
  with pytest.raises(RecursionError):
    copies.of(deep)
