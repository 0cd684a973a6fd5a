"""The shared event loop: deadlines, results, cancellation."""

import asyncio
import concurrent.futures
import threading
import time

import pytest

from posttrain.rollout.endpoint import loops


async def after(seconds, value=None):
  await asyncio.sleep(seconds)
  return value


def test_results_and_errors_are_those_of_the_coroutine():
  async def fail():
    raise KeyError('x')

  assert loops.Calls().run(after(0, 3), 5) == 3
  with pytest.raises(KeyError, match='x'):
    loops.Calls().run(fail(), 5)


def test_a_deadline_covers_the_whole_coroutine():
  async def drip():
    while True:
      await asyncio.sleep(0.01)

  begin = time.monotonic()
  with pytest.raises(TimeoutError):
    loops.Calls().run(drip(), 0.1)
  assert time.monotonic() - begin < 2


def test_cancel_ends_running_and_later_calls():
  calls, errors = loops.Calls(), []

  def wait():
    try:
      calls.run(after(60), 60)
    except concurrent.futures.CancelledError as error:
      errors.append(error)

  thread = threading.Thread(target=wait)
  thread.start()
  time.sleep(0.05)
  calls.cancel()
  thread.join(5)
  assert not thread.is_alive() and len(errors) == 1
  with pytest.raises(concurrent.futures.CancelledError):
    calls.run(after(0), 5)
  assert loops.Calls().run(after(0, 'others go on'), 5)
