"""The pool: small tasks first, none of callers that have left."""

import asyncio
import threading

import pytest

from posttrain.serve import pool as pools


async def blocked(pool):
  """Occupies the pool's only thread; returns (task, event that ends it)."""
  started, gate = threading.Event(), threading.Event()

  def run():
    started.set()
    gate.wait(30)

  task = asyncio.ensure_future(pool.run(0, run))
  await asyncio.to_thread(started.wait)
  return task, gate


def test_small_tasks_overtake_large_ones():
  async def main():
    pool, order = pools.Pool(1, 9), []
    task, gate = await blocked(pool)
    sizes = (100 * pools.RATE, 2 * pools.RATE, 0)
    later = [
      asyncio.ensure_future(pool.run(size, lambda x=size: order.append(x)))
      for size in sizes
    ]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(task, *later)
    assert order == sorted(sizes)

  asyncio.run(main())


def test_large_tasks_leave_a_thread_to_small_ones():
  async def main():
    pool, gate = pools.Pool(2, 99), threading.Event()
    large = [
      asyncio.ensure_future(pool.run(pools.LARGE, lambda: gate.wait(30)))
      for _ in range(9)
    ]
    await asyncio.sleep(0.05)
    for size in (0, pools.LARGE - 1):
      assert await asyncio.wait_for(pool.run(size, lambda: 7), 10) == 7
    gate.set()
    assert await asyncio.gather(*large) == [True] * 9

  asyncio.run(main())


def test_tasks_of_cancelled_callers_do_not_run_and_free_their_place():
  async def main():
    pool, ran = pools.Pool(1, 1), []
    task, gate = await blocked(pool)
    left = asyncio.ensure_future(pool.run(0, lambda: ran.append('left')))
    await asyncio.sleep(0)
    with pytest.raises(pools.Full, match='1 requests of 1'):
      await pool.run(0, lambda: None)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    stays = asyncio.ensure_future(pool.run(0, lambda: ran.append('stays')))
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(task, stays)
    assert ran == ['stays']

  asyncio.run(main())


def test_errors_reach_the_caller_and_the_thread_goes_on():
  async def main():
    pool = pools.Pool(1, 9)

    def broken():
      raise ValueError('out of luck')

    with pytest.raises(ValueError, match='out of luck'):
      await pool.run(0, broken)
    assert await pool.run(0, lambda: 7) == 7

  asyncio.run(main())
