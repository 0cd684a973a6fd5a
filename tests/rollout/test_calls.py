"""Calls in threads: time limits, clocks, coroutines, and logical times."""

import asyncio
import signal
import threading
import time
from concurrent import futures

import pytest

from posttrain.rollout import calls
from posttrain.util import coroutines
from tests.rollout import fakes

WAITS = 10  # seconds after which a test that hangs fails
LIMIT = 0.05


def run(fn, seconds=WAITS):
  return calls.run(fn, calls.Clock(seconds))


def coroutine(fn, seconds=WAITS):
  return run(lambda: coroutines.wait(fn()), seconds)


def test_prints_of_a_users_code_go_to_stderr(capsys):
  async def later():
    print('from the loop')

  print('ours')
  run(lambda: print('from a thread'))
  coroutine(later)
  calls.inline(lambda: print('inline'), WAITS)
  own = threading.Thread(target=lambda: print('ours'))
  own.start()
  own.join()
  captured = capsys.readouterr()
  assert captured.out == 'ours\nours\n'
  assert captured.err == 'from a thread\nfrom the loop\ninline\n'


def test_generators_are_no_results():
  async def later():
    yield 1

  for result in (later(), (x for x in 'ab')):
    with pytest.raises(TypeError, match='got a generator'):
      coroutines.wait(result)


def test_too_many_hanging_threads_end_the_run(gate, monkeypatch):
  monkeypatch.setattr(calls, 'MOST_HUNG', 1)
  with pytest.raises(calls.Late):
    run(gate.wait, LIMIT)
  with pytest.raises(calls.TooManyThreads, match='got 2 that were given up'):
    run(gate.wait, LIMIT)


def test_interrupt_leaves_a_hanging_call(gate):
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  main = threading.main_thread().ident
  for call in (run, calls.inline):
    threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
      call(gate.wait, 60)
  signal.signal(signal.SIGINT, before)
  assert calls.hung() == 2 and calls.inline(lambda: 7, WAITS) == 7


def test_own_time_excludes_judge_calls():
  clock = calls.Clock(0.2)
  judge = clock.stopped()(lambda: time.sleep(0.3))

  def score():
    with futures.ThreadPoolExecutor() as pool:  # at once: they count once
      for _ in range(4):
        pool.submit(judge)
    judge()
    return 'score'

  assert calls.run(score, clock) == 'score'
  assert clock.wall > 0.6 and 0 <= clock.own < 0.2


def test_coroutines_share_a_loop_also_within_a_running_one():
  semaphore = asyncio.Semaphore(1)

  async def limited():
    async def use():
      async with semaphore:
        await asyncio.sleep(0)
      return asyncio.get_running_loop()

    return set(await asyncio.gather(use(), use()))

  async def notebook():
    return coroutine(limited)

  (loop,) = coroutine(limited)
  assert asyncio.run(notebook()) == {loop}

  async def fails():
    raise SystemExit

  with pytest.raises(SystemExit):
    coroutine(fails)
  assert coroutine(limited) == {loop}


def test_a_late_coroutine_is_cancelled_and_a_blocked_loop_replaced(gate):
  events, hung = [], calls.hung()  # of tests before

  async def hangs():
    try:
      await asyncio.Event().wait()
    except asyncio.CancelledError:
      events.append('cancelled')
      raise

  async def blocks():
    gate.wait()

  for fn in (hangs, blocks):
    with pytest.raises(calls.Late):
      coroutine(fn, LIMIT)
  fakes.wait_for(lambda: events == ['cancelled'])

  async def works():
    return 7

  assert coroutine(works) == 7 and calls.hung() <= hung


def test_calls_are_due_after_a_number_of_chunks_in_order():
  begun = threading.Event()

  def slow():
    assert begun.wait(WAITS)  # the other call has run
    return 'slow'

  with calls.Pool(threads=2, chunks=2, timeout=WAITS) as pool:
    pool.add(1, slow)
    pool.tick()
    pool.add(2, lambda: begun.set() or 'quick')
    assert pool.due(idle=False) == [] and len(pool) == 2
    assert begun.wait(WAITS)  # it has returned, but is not due
    assert pool.due(idle=False) == []
    pool.tick()
    assert pool.due(idle=False) == [(1, 'slow')]
    assert pool.due(idle=False) == []
    pool.tick()
    assert pool.due(idle=False) == [(2, 'quick')] and not len(pool)
