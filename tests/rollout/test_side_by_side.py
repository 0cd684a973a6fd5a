"""Tasks in one thread: their turns, waits and errors."""

import concurrent.futures

import pytest

from posttrain.rollout import side_by_side

TIMEOUT = 60  # seconds; reached only by a failure


def task(log, name, *waits, error=None):
  """Logs each turn; waits for futures, then returns its name or raises."""
  try:
    for futures in waits:
      log.append(name)
      yield futures
    if error is not None:
      raise error
    log.append(name)
    return name.upper()
  finally:
    log.append(f'{name} ends')


def test_tasks_take_turns_and_keep_their_order():
  log = []
  tasks = [task(log, 'a', (), ()), task(log, 'b'), task(log, 'c', ())]
  results = side_by_side.run(tasks)
  assert [x.result() for x in results] == ['A', 'B', 'C']
  assert [x for x in log if 'ends' not in x] == list('abcaca')


def test_others_go_on_while_one_waits():
  log, future = [], concurrent.futures.Future()

  def opens():
    yield ()
    yield ()
    future.set_result(None)

  never = concurrent.futures.Future()
  side_by_side.run([task(log, 'a', [never, future]), opens(), task(log, 'b')])
  assert log == ['a', 'b', 'b ends', 'a', 'a ends']


def test_the_error_is_the_first_in_the_order_of_tasks():
  """The second task fails first; the one before it runs to its end."""
  log, never = [], concurrent.futures.Future()
  tasks = [
    task(log, 'a', (), (), error=KeyError('a')),
    task(log, 'b', error=ValueError('b')),
    task(log, 'c', [never]),
  ]
  a, b, c = side_by_side.run(tasks)
  assert log[:2] == ['a', 'b ends'] and log[-1] == 'a ends'
  assert c.cancelled() and 'c' not in log  # closed before its turn
  assert type(a.exception()) is KeyError and type(b.exception()) is ValueError


def test_an_interrupt_closes_all_tasks():
  log, never = [], concurrent.futures.Future()
  tasks = [task(log, 'a', [never]), task(log, 'b', error=KeyboardInterrupt())]
  with pytest.raises(KeyboardInterrupt):
    side_by_side.run(tasks)
  assert log == ['a', 'b ends', 'a ends']
