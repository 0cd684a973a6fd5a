"""Bodies: received all together within a bound, whoever is slow."""

import asyncio
import contextlib

import pytest

from posttrain.serve import bodies, fields, release


class Request:
  """A request whose body arrives when the test says so."""

  def __init__(self, **headers):
    self.headers, self._parts = headers, asyncio.Queue()

  def send(self, part):
    """Sends a part; None ends the body."""
    self._parts.put_nowait(part)

  async def stream(self):
    while (part := await self._parts.get()) is not None:
      yield part


async def read(reader, request, gate=None):
  async with reader.read(request) as content:
    if gate is not None:
      await gate.wait()
    return content


async def settle():
  for _ in range(9):
    await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def receivers(reader, count, *parts):
  """Starts requests that have sent parts of their bodies."""
  sent = [Request() for _ in range(count)]
  tasks = [asyncio.ensure_future(read(reader, x)) for x in sent]
  for request in sent:
    for part in parts:
      request.send(part)
    await settle()
  yield sent, tasks
  for task in tasks:
    task.cancel()
  await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture(autouse=True)
def small(monkeypatch):
  monkeypatch.setattr(bodies, 'SMALL', 10)
  monkeypatch.setattr(bodies, 'HELD', 100)
  monkeypatch.setattr(release, 'soon', lambda: None)


def test_slow_large_bodies_keep_no_other_out():
  async def main():
    reader = bodies.Bodies(50)
    async with receivers(reader, 2, b'x' * 20, b'x'):
      honest = Request()
      honest.send(b'y' * 50)
      honest.send(None)
      assert await asyncio.wait_for(read(reader, honest), 5) == b'y' * 50

  asyncio.run(main())


def test_the_oldest_arriving_body_makes_room():
  async def main():
    reader = bodies.Bodies(50)
    async with receivers(reader, 4, b'x' * 30) as (sent, tasks):
      with pytest.raises(fields.Refused, match='at most 100 bytes') as error:
        await tasks[0]
      assert error.value.status == 503
      for request in sent[1:]:
        request.send(None)
      assert await asyncio.gather(*tasks[1:]) == [b'x' * 30] * 3
      assert reader._held == 0 and not reader._arriving

  asyncio.run(main())


def test_bodies_that_have_arrived_are_counted_until_they_are_parsed():
  async def main():
    reader, gate = bodies.Bodies(50), asyncio.Event()
    parsed = []
    for _ in range(2):
      request = Request()
      request.send(b'x' * 50)
      request.send(None)
      parsed.append(asyncio.ensure_future(read(reader, request, gate)))
      await settle()
    async with receivers(reader, 1, b'x') as (_, (late,)):
      with pytest.raises(fields.Refused, match='at most 100 bytes'):
        await late
    gate.set()
    assert await asyncio.gather(*parsed) == [b'x' * 50] * 2
    assert reader._held == 0

  asyncio.run(main())


@pytest.mark.parametrize('end', ['leaves', 'too large'])
def test_bodies_that_are_not_read_to_their_end_are_given_back(end):
  async def main():
    reader = bodies.Bodies(50)
    async with receivers(reader, 1, b'x' * 40) as ((request,), (task,)):
      assert reader._held == 40
      if end == 'leaves':
        task.cancel()
      else:
        request.send(b'x' * 11)
      (error,) = await asyncio.gather(task, return_exceptions=True)
      assert isinstance(error, asyncio.CancelledError | fields.Refused)
      assert reader._held == 0 and not reader._arriving

  asyncio.run(main())


def test_bodies_that_say_that_they_are_too_large_are_not_received():
  async def main():
    request = Request(**{'content-length': '51'})
    with pytest.raises(fields.Refused, match='at most 50 bytes') as error:
      await read(bodies.Bodies(50), request)
    assert error.value.status == 413

  asyncio.run(main())
