"""Which worker an episode gets, and the count of lost ones."""

import contextlib

import pytest

from posttrain.rollout.remote import workers


class Handle:
  def __init__(self):
    self.killed, self.starts, self.started = 0, True, True

  def has_started(self):
    return self.started

  def start(self):
    if not self.starts:
      raise workers.Lost('no start')

  def kill(self):
    self.killed += 1


@pytest.fixture
def handles():
  return []


@pytest.fixture
def pair(handles):
  def start():
    handles.append(Handle())
    return handles[-1]

  return workers.Workers(start, 2)


def test_nothing_starts_before_it_is_used(pair, handles):
  assert handles == []
  pair.begin()
  pair.begin()
  assert len(handles) == 2


def test_an_episode_gets_the_worker_with_the_fewest(pair, handles):
  taken = [pair.take() for _ in range(5)]
  assert [handles.index(x.handle) for x in taken] == [0, 1, 0, 1, 0]
  for worker in (taken[0], taken[2]):
    pair.give_back(worker)
  assert pair.take().handle is handles[0]
  assert not any(x.killed for x in handles)


def test_a_worker_that_has_started_comes_before_one_that_has_not(pair, handles):
  pair.begin()
  handles[0].started = False
  assert [pair.take().handle for _ in range(2)] == [handles[1]] * 2
  handles[0].started = True
  assert pair.take().handle is handles[0]


def test_a_lost_worker_is_killed_counted_once_and_replaced(pair, handles):
  first, _, again = (pair.take() for _ in range(3))
  assert first is again
  pair.lose(first)
  pair.lose(again)
  assert pair.losses == 1 and handles[0].killed == 1
  assert len(handles) == 3  # it starts at once
  assert pair.take().handle is handles[2]


def test_a_worker_alone_ends_with_its_episode(pair, handles):
  pair.begin()
  alone = pair.take(alone=True)
  assert alone.handle is handles[2]
  assert {pair.take().handle, pair.take().handle} == set(handles[:2])
  pair.give_back(alone)
  assert handles[2].killed == 1 and pair.losses == 0
  pair.lose(pair.take(alone=True))
  assert handles[3].killed == 1 and pair.losses == 1


def test_a_worker_that_does_not_start_is_lost(pair, handles):
  pair.begin()
  handles[0].starts = False
  with pytest.raises(workers.Lost, match='no start'):
    pair.take()
  assert pair.losses == 1 and handles[0].killed == 1
  assert pair.take().handle is handles[1]


def test_the_only_worker_may_be_lost_while_another_thread_takes_one(handles):
  """It is removed, but its kill takes a while: no other one has begun yet."""

  def start():
    handles.append(Handle())
    return handles[-1]

  one = workers.Workers(start, 1)
  first, lock = one.take(), one._lock

  class Slow(Exception):
    pass

  def kill():
    raise Slow

  @contextlib.contextmanager
  def gap():  # the other thread loses the worker whenever it gets the lock
    with lock:
      yield
    first.handle.kill, one._lock = kill, lock
    with contextlib.suppress(Slow):
      one.lose(first)

  class Gap:
    def __enter__(self):
      self.entered = gap()
      return self.entered.__enter__()

    def __exit__(self, *args):
      return self.entered.__exit__(*args)

  one._lock = Gap()
  assert one.take() is first and first.is_lost
  assert one.take().handle is handles[1]
