"""Reward calls in threads: timeouts, interrupts, and coroutines."""

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


def call(fn, timeout=0.05, **arguments):
  clock = calls.Clock(timeout)
  return calls.call(fn, {'rollouts': 'ab', **arguments}, clock)


def test_coroutines_finish_within_a_running_loop():
  async def notebook():
    return call(judged.slow, 5.0, completion_ids=[[1, 2]])

  assert asyncio.run(notebook()) == [2.0]


def test_hanging_coroutine_is_cancelled():
  judged.events.clear()
  with pytest.raises(calls.Fault, match='within its timeout of 0.05 s'):
    call(judged.hangs_on)
  end = time.monotonic() + 5
  while judged.events != ['cancelled']:
    assert time.monotonic() < end
    time.sleep(0.005)


def test_own_time_excludes_judge_calls():
  clock = calls.Clock(0.2)
  judge = clock.untimed(lambda: time.sleep(0.3))

  def score():
    judge()
    judge()
    return 'score'

  assert calls.call(score, {}, clock) == 'score'
  assert clock.wall > 0.6 and clock.own < 0.2
  with pytest.raises(RuntimeError, match='must not use its judge'):
    judge()


def test_concurrent_judge_calls_count_once():
  clock = calls.Clock(5.0)
  judge = clock.untimed(lambda: time.sleep(0.2))

  def score():
    threads = [threading.Thread(target=judge) for _ in range(4)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()

  calls.call(score, {}, clock)
  assert 0.0 <= clock.own < clock.wall - 0.15


def test_keyboard_interrupt_is_raised():
  # A shell may start background processes with SIGINT ignored.
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  with pytest.raises(calls.Fault, match='it raised KeyboardInterrupt'):
    call(judged.interrupts)  # its own: Ctrl-C reaches the main thread alone
  main = threading.main_thread().ident
  threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT)).start()
  start = time.monotonic()
  with pytest.raises(KeyboardInterrupt):
    call(judged.hangs, 30.0, log_metric=lambda *_: None)
  assert time.monotonic() - start < 10
  signal.signal(signal.SIGINT, before)
  judged.ended.set()
  judged.ended.clear()


def test_signal_handlers_run_during_a_call():
  signals = []
  before = signal.signal(signal.SIGTERM, lambda *_: signals.append(1))
  threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
  try:
    assert call(lambda rollouts: time.sleep(0.3), 5.0) is None
  finally:
    signal.signal(signal.SIGTERM, before)
  assert signals == [1]


@pytest.mark.parametrize('name', ['hangs', 'hangs_on', 'hangs_aside'])
def test_exit_does_not_wait_for_abandoned_calls(name):
  """This includes the threads of `asyncio.to_thread`."""
  program = f"""
from posttrain.rollout.grading import calls
from tests.rollout.grading import judged
try:
  arguments = {{'rollouts': 'ab'}}
  if {name!r} == 'hangs':
    arguments['log_metric'] = print
  calls.call(judged.{name}, arguments, calls.Clock(0.1))
except calls.Fault as fault:
  print(fault)
"""
  process = subprocess.run(
    [sys.executable, '-c', program], capture_output=True, text=True, timeout=60
  )
  assert process.returncode == 0 and not process.stderr, process.stderr
  assert 'within its timeout of 0.1 s' in process.stdout


def test_coroutines_may_use_threads():
  async def work(rollouts):
    first = asyncio.to_thread(sum, [1.0, 2.0])
    second = asyncio.to_thread(int, 'x')
    return await asyncio.gather(first, second, return_exceptions=True)

  total, error = call(work, 5.0)
  assert total == 3.0 and isinstance(error, ValueError)


def test_all_calls_share_one_event_loop():
  semaphore = asyncio.Semaphore(1)

  async def limited(rollouts):
    async def use():
      async with semaphore:
        await asyncio.sleep(0)
      return asyncio.get_running_loop()

    return await asyncio.gather(*(use() for _ in rollouts))

  loops = {loop for _ in range(3) for loop in call(limited, 5.0)}
  assert len(loops) == 1


async def loop_of(rollouts):
  return asyncio.get_running_loop()


@pytest.mark.parametrize(
  'error', [KeyError, asyncio.CancelledError, SystemExit, KeyboardInterrupt]
)
def test_exception_of_a_coroutine_does_not_end_the_loop(error):
  async def fails(rollouts):
    raise error

  async def fails_aside(rollouts):
    await asyncio.gather(asyncio.create_task(fails(rollouts)))

  before = call(loop_of, 5.0)
  for fn in (fails, fails_aside):
    with pytest.raises(calls.Fault):
      call(fn, 5.0)
  assert call(loop_of, 5.0) is before


def test_coroutine_returned_after_the_timeout_is_cancelled():
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


def test_blocked_loop_is_replaced(monkeypatch):
  monkeypatch.setattr(calls, 'LOOP_TIMEOUT', 0.1)
  ended = threading.Event()

  async def blocks(rollouts):
    ended.wait(5)

  first = call(loop_of, 5.0)
  with pytest.raises(calls.Fault, match='within its timeout'):
    call(blocks)
  second = call(loop_of, 5.0)
  ended.set()
  assert call(loop_of, 5.0) is second is not first


def test_loop_restarts_after_a_stop():
  async def stops(rollouts):
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0.01)
    return asyncio.get_running_loop()

  assert call(stops, 5.0) is call(loop_of, 5.0)


def test_hanging_threads_are_bounded_and_do_not_block_later_calls():
  ended = threading.Event()

  async def hangs(rollouts):
    await asyncio.gather(*(asyncio.to_thread(ended.wait) for _ in range(512)))

  async def swallows(rollouts):
    waits = asyncio.to_thread
    tasks = [asyncio.create_task(waits(ended.wait)) for _ in 'ab' * 20]
    await asyncio.wait(tasks, timeout=0.02)

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


def test_more_thread_calls_than_workers_all_run():
  async def many(rollouts):
    return await asyncio.gather(*(asyncio.to_thread(int, i) for i in range(99)))

  assert call(many, 5.0) == list(range(99))


def test_endpoint_error_within_a_group_is_raised():
  async def away(error):
    raise error

  async def calls_judge(rollouts):
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
    call(calls_judge, 5.0)

  async def fails(rollouts):
    async with asyncio.TaskGroup() as group:
      group.create_task(away(KeyError('x')))

  with pytest.raises(calls.Fault, match='raised ExceptionGroup'):
    call(fails, 5.0)


class Broken(Exception):
  """An exception whose attributes raise."""

  @property
  def __class__(self):
    raise OSError('no class')

  @property
  def __traceback__(self):
    raise OSError('no traceback')


class BrokenGroup(ExceptionGroup):
  """A group whose parts cannot be taken."""

  def subgroup(self, condition):
    raise OSError('no parts')

  @property
  def exceptions(self):
    raise OSError('no parts')


@pytest.mark.parametrize('is_group', [False, True])
def test_exceptions_whose_attributes_raise_are_faults(is_group):
  def raises():
    raise BrokenGroup('x', [ValueError()]) if is_group else Broken('x')

  with pytest.raises(calls.Fault, match=r'it raised Broken.*\(test_calls.py:'):
    calls.call(raises, {}, calls.Clock(60))
