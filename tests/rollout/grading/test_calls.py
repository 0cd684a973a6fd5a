"""Calls in threads: their time, and who ends them."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from posttrain.rollout.endpoint import client
from posttrain.rollout.grading import calls
from tests.rollout.grading import judged


def call(fn, timeout=0.05, **given):
  clock = calls.Clock(timeout)
  return calls.call(fn, {'rollouts': 'ab', **given}, clock)


def test_coroutines_finish_within_a_running_loop():
  async def notebook():
    return call(judged.slow, 5.0, completion_ids=[[1, 2]])

  assert asyncio.run(notebook()) == [2.0]


def test_a_hung_coroutine_is_cancelled():
  judged.events.clear()
  with pytest.raises(calls.Fault, match='within its timeout of 0.05 s'):
    call(judged.hangs_on)
  end = time.monotonic() + 5
  while judged.events != ['cancelled']:
    assert time.monotonic() < end
    time.sleep(0.005)


def test_time_stands_still_while_a_judge_is_asked():
  clock = calls.Clock(0.2)
  judge = clock.without(lambda: time.sleep(0.3))

  def asks():
    judge()
    judge()
    return 'said'

  assert calls.call(asks, {}, clock) == 'said'
  assert clock.wall > 0.6 and clock.own < 0.2
  with pytest.raises(RuntimeError, match='must not use its judge'):
    judge()


def test_judges_may_be_asked_side_by_side():
  clock = calls.Clock(5.0)
  judge = clock.without(lambda: time.sleep(0.2))

  def asks():
    threads = [threading.Thread(target=judge) for _ in range(4)]
    for one in threads:
      one.start()
    for one in threads:
      one.join()

  calls.call(asks, {}, clock)
  assert 0.0 <= clock.own < clock.wall - 0.15


def test_an_interrupt_goes_through():
  # Who runs behind a shell may have been told to ignore it.
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  with pytest.raises(KeyboardInterrupt):
    call(judged.interrupts)
  main = threading.main_thread().ident
  threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT)).start()
  start = time.monotonic()
  with pytest.raises(KeyboardInterrupt):
    call(judged.hangs, 30.0, log_metric=lambda *_: None)
  assert time.monotonic() - start < 10
  signal.signal(signal.SIGINT, before)
  judged.ended.set()
  judged.ended.clear()


def test_a_signal_is_heard_meanwhile():
  heard = []
  before = signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
  threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
  try:
    assert call(lambda rollouts: time.sleep(0.3), 5.0) is None
  finally:
    signal.signal(signal.SIGTERM, before)
  assert heard == [1]


@pytest.mark.parametrize('name', ['hangs', 'hangs_on', 'hangs_aside'])
def test_an_exit_does_not_wait_for_what_was_abandoned(name):
  """Neither for the threads of `asyncio.to_thread`."""
  program = f"""
from posttrain.rollout.grading import calls
from tests.rollout.grading import judged
try:
  given = {{'rollouts': 'ab'}}
  if {name!r} == 'hangs':
    given['log_metric'] = print
  calls.call(judged.{name}, given, calls.Clock(0.1))
except calls.Fault as fault:
  print(fault)
"""
  done = subprocess.run(
    [sys.executable, '-c', program], capture_output=True, text=True, timeout=60
  )
  assert done.returncode == 0 and not done.stderr, done.stderr
  assert 'within its timeout of 0.1 s' in done.stdout


def test_a_coroutine_may_use_threads():
  async def work(rollouts):
    one = asyncio.to_thread(sum, [1.0, 2.0])
    other = asyncio.to_thread(int, 'x')
    return await asyncio.gather(one, other, return_exceptions=True)

  total, error = call(work, 5.0)
  assert total == 3.0 and isinstance(error, ValueError)


def test_what_a_module_keeps_for_coroutines_serves_all_calls():
  kept = asyncio.Semaphore(1)

  async def limited(rollouts):
    async def one():
      async with kept:
        await asyncio.sleep(0)
      return asyncio.get_running_loop()

    return await asyncio.gather(*(one() for _ in rollouts))

  loops = {loop for _ in range(3) for loop in call(limited, 5.0)}
  assert len(loops) == 1


async def loop_of(rollouts):
  return asyncio.get_running_loop()


@pytest.mark.parametrize(
  'error', [KeyError, asyncio.CancelledError, SystemExit, KeyboardInterrupt]
)
def test_what_a_coroutine_raises_costs_its_call_alone(error):
  async def fails(rollouts):
    raise error

  async def fails_aside(rollouts):
    await asyncio.gather(asyncio.create_task(fails(rollouts)))

  before = call(loop_of, 5.0)
  for fn in (fails, fails_aside):
    with pytest.raises(
      KeyboardInterrupt if error is KeyboardInterrupt else calls.Fault
    ):
      call(fn, 5.0)
  assert call(loop_of, 5.0) is before


def test_a_coroutine_that_comes_too_late_is_cancelled():
  judged.events.clear()

  def late(rollouts):
    judged.ended.wait(5)
    return judged.hangs_on(rollouts)

  with pytest.raises(calls.Fault, match='within its timeout'):
    call(late)
  judged.ended.set()
  end = time.monotonic() + 5
  while judged.events != ['cancelled']:
    assert time.monotonic() < end
    time.sleep(0.005)
  judged.ended.clear()


def test_a_loop_that_somebody_blocks_is_left_to_itself(monkeypatch):
  monkeypatch.setattr(calls, 'PATIENCE', 0.1)
  ended = threading.Event()

  async def blocks(rollouts):
    ended.wait(5)

  first = call(loop_of, 5.0)
  with pytest.raises(calls.Fault, match='within its timeout'):
    call(blocks)
  second = call(loop_of, 5.0)
  ended.set()
  assert call(loop_of, 5.0) is second is not first


def test_nobody_stops_the_loop():
  async def stops(rollouts):
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0.01)
    return asyncio.get_running_loop()

  assert call(stops, 5.0) is call(loop_of, 5.0)


def test_hung_threads_are_few_and_take_no_room():
  ended = threading.Event()

  async def hangs(rollouts):
    await asyncio.gather(*(asyncio.to_thread(ended.wait) for _ in range(512)))

  async def swallows(rollouts):
    waits = asyncio.to_thread
    hung = [asyncio.create_task(waits(ended.wait)) for _ in 'ab' * 20]
    await asyncio.wait(hung, timeout=0.02)

  async def works(rollouts):
    return await asyncio.to_thread(sum, [1.0, 2.0])

  assert call(works, 5.0) == 3.0
  before = threading.active_count()
  with pytest.raises(calls.Fault, match='within its timeout'):
    call(hangs, 0.2)
  assert threading.active_count() <= before + calls.WORKERS
  assert call(works, 5.0) == 3.0
  call(swallows, 5.0)
  assert call(works, 5.0) == 3.0
  ended.set()


def test_threads_do_all_that_they_are_asked():
  async def many(rollouts):
    return await asyncio.gather(*(asyncio.to_thread(int, i) for i in range(99)))

  assert call(many, 5.0) == list(range(99))


def test_a_servers_absence_within_a_group_is_no_fault():
  async def away(error):
    raise error

  async def asks(rollouts):
    async with asyncio.TaskGroup() as group:
      group.create_task(away(KeyError('x')))
      group.create_task(
        away(
          ExceptionGroup(
            '', [client.EndpointError('first'), client.EndpointError('second')]
          )
        )
      )

  with pytest.raises(client.EndpointError, match='first'):
    call(asks, 5.0)

  async def fails(rollouts):
    async with asyncio.TaskGroup() as group:
      group.create_task(away(KeyError('x')))

  with pytest.raises(calls.Fault, match='raised ExceptionGroup'):
    call(fails, 5.0)
