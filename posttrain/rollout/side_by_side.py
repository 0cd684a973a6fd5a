"""Work that waits for others, done side by side in one thread.

    first, second = side_by_side.run([play(a), play(b)])
    first.result()

A task is a generator. Before it waits it yields the futures that it waits for,
any of which lets it go on, or () if it can go on now; it returns its result.
All tasks run in the thread that calls `run`: nothing in them need be
thread-safe. Calls that wait for another
machine and use no jax may run in a `thread`, whose future a task yields.
"""

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Any, TypeVar

T = TypeVar('T')
Futures = Collection[concurrent.futures.Future]
Task = Generator[Futures, None, T]


def run(tasks: Sequence[Task[T]]) -> list[concurrent.futures.Future[T]]:
  """Runs tasks to their ends, each while others wait.

  Tasks that can go on take turns, in their order. If all of them yield ()
  alone, the order of everything that they do is fixed, and so the same in every
  process of a run: tasks that launch programs of all processes must do so.

  An exception of a task closes the tasks after it; those before it run to their
  ends. So the first error in the order of tasks is the one that running them
  one after another would raise.

  Args:
    tasks: generators that have not begun.

  Returns:
    A future per task, in order: with its result or exception, or cancelled if
    an earlier task failed.
  """
  results = [concurrent.futures.Future() for _ in tasks]
  waits: dict[int, Futures] = dict.fromkeys(range(len(tasks)), ())
  try:
    while waits:
      if all(waits.values()):
        wait([future for futures in waits.values() for future in futures])
      for i, futures in list(waits.items()):
        if i not in waits:  # closed meanwhile
          continue
        if futures and not any(future.done() for future in futures):
          continue
        try:
          waits[i] = next(tasks[i])
        except StopIteration as end:
          results[i].set_result(end.value)
          del waits[i]
        except Exception as error:
          results[i].set_exception(error)
          for later in [j for j in waits if j >= i]:
            del waits[later]
            tasks[later].close()
            results[later].cancel()  # no effect on that of the error
  finally:
    with contextlib.ExitStack() as stack:
      for task in tasks:
        stack.callback(task.close)
  return results


def wait(futures: Futures) -> None:
  """Waits until one of the futures is done."""
  concurrent.futures.wait(
    futures, return_when=concurrent.futures.FIRST_COMPLETED
  )


def thread(
  fn: Callable[..., T], *args: Any, slots: threading.Semaphore | None = None
) -> concurrent.futures.Future[T]:
  """Calls a function in a daemon thread, which ends with the call.

  Args:
    fn: the function.
    *args: its arguments.
    slots: the call needs one; until then it can be cancelled.
  """
  future = concurrent.futures.Future()

  def call():
    with slots or contextlib.nullcontext():
      if not future.set_running_or_notify_cancel():
        return
      try:
        future.set_result(fn(*args))
      except BaseException as error:  # `result` raises it
        future.set_exception(error)

  threading.Thread(target=call, name='side by side', daemon=True).start()
  return future
