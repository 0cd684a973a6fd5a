"""Calls in threads: their time, and who ends them."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from posttrain.rollout import reward_calls
from tests.rollout import judged


def call(fn, timeout=0.05, **given):
  clock = reward_calls.Clock(timeout)
  return reward_calls.call(fn, {'rollouts': 'ab', **given}, clock)


def test_coroutines_finish_within_a_running_loop():
  async def notebook():
    return call(judged.slow, 5.0, completion_ids=[[1, 2]])

  assert asyncio.run(notebook()) == [2.0]


def test_a_hung_coroutine_is_cancelled():
  judged.seen.clear()
  with pytest.raises(reward_calls.Fault, match='within its timeout of 0.05 s'):
    call(judged.hangs_on)
  end = time.monotonic() + 5
  while judged.seen != ['cancelled']:
    assert time.monotonic() < end
    time.sleep(0.005)


def test_time_stands_still_while_a_judge_is_asked():
  clock = reward_calls.Clock(0.2)
  judge = clock.without(lambda: time.sleep(0.3))

  def asks():
    judge()
    judge()
    return 'said'

  assert reward_calls.call(asks, {}, clock) == 'said'
  assert clock.wall > 0.6 and clock.own < 0.2
  with pytest.raises(RuntimeError, match='must not ask its judge'):
    judge()


def test_judges_may_be_asked_side_by_side():
  clock = reward_calls.Clock(5.0)
  judge = clock.without(lambda: time.sleep(0.2))

  def asks():
    threads = [threading.Thread(target=judge) for _ in range(4)]
    for one in threads:
      one.start()
    for one in threads:
      one.join()

  reward_calls.call(asks, {}, clock)
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
from posttrain.rollout import reward_calls
from tests.rollout import judged
try:
  given = {{'rollouts': 'ab'}}
  if {name!r} == 'hangs':
    given['log_metric'] = print
  reward_calls.call(judged.{name}, given, reward_calls.Clock(0.1))
except reward_calls.Fault as fault:
  print(fault)
"""
  done = subprocess.run(
      [sys.executable, '-c', program], capture_output=True, text=True,
      timeout=60,
  )  # fmt: skip
  assert done.returncode == 0 and not done.stderr, done.stderr
  assert 'within its timeout of 0.1 s' in done.stdout


def test_a_coroutine_may_use_threads():
  async def work(rollouts):
    one = asyncio.to_thread(sum, [1.0, 2.0])
    other = asyncio.to_thread(int, 'x')
    return await asyncio.gather(one, other, return_exceptions=True)

  total, error = call(work, 5.0)
  assert total == 3.0 and isinstance(error, ValueError)
