"""A server process with a tiny model, and the delays of its /health route.

    python -m experiments.benchmarks.served --watch=URL

asks URL/health until its stdin is closed, and prints how often it asked
and the longest delay in seconds. It is a process of its own: a busy client is
not a busy server.
"""

import argparse
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping

import httpx

from experiments.benchmarks import serve

NAME = 'bench'
EVERY = 0.05  # seconds between two requests of the watch


class Server:
  """A running server process."""

  def __init__(self, folder: pathlib.Path, *argv: str):
    """Starts it, and waits for its address.

    Args:
      folder: holds the model; it is written if it is missing.
      *argv: arguments of `posttrain.serve`.
    """
    model = folder / NAME
    if not model.exists():
      serve.publish('tiny', model)
    begin = time.monotonic()
    self.log = folder / 'server.log'
    with self.log.open('a') as log:
      self.process = subprocess.Popen(
        [
          *(sys.executable, '-m', 'posttrain.serve'),
          *('--port=0', f'--checkpoint={model}'),
          *argv,
        ],
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
      )
    assert self.process.stdout is not None
    words = self.process.stdout.readline().split()
    assert words, f'the server must start: {self.log.read_text()[-900:]}'
    self.url = words[-1].removesuffix('/v1')
    self.seconds = time.monotonic() - begin  # to start

  @property
  def address(self) -> tuple[str, int]:
    """Host and port."""
    parts = urllib.parse.urlsplit(self.url)
    assert parts.hostname is not None and parts.port is not None
    return parts.hostname, parts.port

  def client(self, timeout: float = 60) -> httpx.Client:
    """Returns a new client."""
    return httpx.Client(base_url=self.url, timeout=timeout)

  def counts(self) -> dict[str, int]:
    """Returns what /health counts."""
    return httpx.get(f'{self.url}/health', timeout=60).json()

  def megabytes(self) -> int:
    """Returns the resident memory."""
    return self._memory('VmRSS:')

  def peak(self) -> int:
    """Returns the largest resident memory so far, in megabytes."""
    return self._memory('VmHWM:')

  def _memory(self, name: str) -> int:
    status = pathlib.Path(f'/proc/{self.process.pid}/status').read_text()
    return int(status.partition(name)[2].split()[0]) // 1024

  def descriptors(self) -> int:
    """Returns the number of open file descriptors."""
    return len(os.listdir(f'/proc/{self.process.pid}/fd'))

  def stop(self) -> int:
    """Stops the process; returns its exit code."""
    self.process.terminate()
    try:
      return self.process.wait(30)
    finally:
      self.process.kill()


class Watch:
  """The longest delay of /health; complete after the `with` block."""

  def __init__(self):
    self.count, self.longest = 0, 0.0


@contextlib.contextmanager
def watch(server: Server) -> Iterator[Watch]:
  """Measures the delays of /health while the block runs."""
  result = Watch()
  with subprocess.Popen(
    [
      sys.executable,
      '-m',
      'experiments.benchmarks.served',
      f'--watch={server.url}',
    ],
    cwd=pathlib.Path(__file__).resolve().parents[2],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  ) as process:
    assert process.stdout is not None
    process.stdout.readline()  # it has begun
    yield result
    out, _ = process.communicate('', 60)
    result.count, result.longest = json.loads(out)


def measure(url: str) -> None:
  """Asks /health until stdin is closed; prints [count, longest delay]."""
  done = threading.Event()
  threading.Thread(
    target=lambda: (sys.stdin.read(), done.set()), daemon=True
  ).start()
  count, longest = 0, 0.0
  with httpx.Client(base_url=url, timeout=60) as client:
    client.get('/health')
    print('begun', flush=True)
    while not done.wait(EVERY):
      begin = time.monotonic()
      client.get('/health').raise_for_status()
      longest = max(longest, time.monotonic() - begin)
      count += 1
  print(json.dumps([count, round(longest, 3)]))


def body(**fields: object) -> Mapping[str, object]:
  """Returns a request for the model."""
  return {'model': NAME, **fields}


if __name__ == '__main__':
  parser = argparse.ArgumentParser(
    prog='python -m experiments.benchmarks.served'
  )
  parser.add_argument('--watch', required=True)
  measure(parser.parse_args().watch)
