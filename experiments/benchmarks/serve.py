"""Throughput of the server: requests all at once against one by one.

    python -m experiments.benchmarks.serve [--preset=small] [--requests=64]
        [--prompt=32] [--new=64] [--slots=64] [--repeats=1]

Trains a model of a preset for one step and starts the server on it, a process
of its own on the loopback device. The same requests are sent all at once and
one after the other, alternately, and both must sample the same tokens. The cost
of a decode step is that of all slots, so requests are also sent one after the
other to a server of one slot. Prints one JSON object: new tokens per second
(medians over the repeats), and the ratios of the first to the others.
"""

import asyncio
import contextlib
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

import httpx

from experiments.benchmarks import timing

NAME = 'bench'  # of the model
EVERY = 0.05  # seconds between two requests of `watch`


class Server:
  """A server process with a model that has hardly been trained."""

  def __init__(self, folder: pathlib.Path, *argv: str, preset: str = 'tiny'):
    """Starts it, and waits for its address.

    Args:
      folder: holds the model, which is trained if it is missing.
      *argv: arguments of `posttrain.serve`.
      preset: the model's sizes.
    """
    model = folder / NAME
    if not model.exists():
      words = ['--config=configs/arithmetic_sft.py:tiny', f'--workdir={model}']
      words += ['--config.sft.steps=1', '--config.sft.optim.warmup_steps=0']
      words += [f'--config.model={preset}', '--config.sft.eval.prompts=1']
      command = [sys.executable, '-m', 'posttrain.main', *words]
      subprocess.run(command, check=True, capture_output=True)
    words = ['--port=0', f'--checkpoint={model}', *argv]
    with (folder / 'server.log').open('a') as log:
      self.process = subprocess.Popen(
        [sys.executable, '-m', 'posttrain.serve', *words],
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
      )
    assert self.process.stdout is not None
    words = self.process.stdout.readline().split()
    assert words, (folder / 'server.log').read_text()[-900:]
    self.url = httpx.URL(words[-1].removesuffix('/v1'))

  @property
  def address(self) -> tuple[str, int]:
    """Host and port."""
    assert self.url.port is not None
    return self.url.host, self.url.port

  def client(self) -> httpx.Client:
    """Returns a new client."""
    return httpx.Client(base_url=self.url, timeout=60)

  def post(self, path: str, **fields) -> httpx.Response:
    """Sends a request for the model."""
    with self.client() as client:
      return client.post(f'/v1/{path}', json={'model': NAME, **fields})

  def megabytes(self) -> int:
    """Returns the resident memory."""
    status = pathlib.Path(f'/proc/{self.process.pid}/status').read_text()
    return int(status.partition('VmRSS:')[2].split()[0]) // 1024

  def cpu_seconds(self) -> float:
    """Returns the CPU seconds since the start."""
    return timing.cpu_seconds(self.process.pid)

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


@contextlib.contextmanager
def watch(server: Server) -> Iterator[list[float]]:
  """Yields a list that gets the delays of /health while the block runs."""
  delays, done = [], threading.Event()

  def measure():
    with server.client() as client:
      while not done.wait(EVERY):
        begin = time.monotonic()
        client.get('/health').raise_for_status()
        delays.append(time.monotonic() - begin)

  thread = threading.Thread(target=measure)
  thread.start()
  try:
    yield delays
  finally:
    done.set()
    thread.join()


async def complete(client: httpx.AsyncClient, body: dict) -> list[int]:
  """Returns the sampled ids of a request."""
  response = await client.post('/v1/completions', json=body)
  response.raise_for_status()
  return response.json()['choices'][0]['token_ids']


async def measure(server: Server, args, at_once: tuple[bool, ...]):
  """Returns new tokens per second, per entry of `at_once`."""
  # Distinct prompts, and completions of equal length.
  requests = [
    {
      'model': NAME,
      'prompt': [(7 * i + j * j) % 256 for j in range(args.prompt)],
      'max_tokens': args.new,
      'seed': i,
      'ignore_eos': True,
      'return_token_ids': True,
    }
    for i in range(args.requests)
  ]
  seconds = [[] for _ in at_once]
  limits = httpx.Limits(max_connections=args.requests)
  async with httpx.AsyncClient(
    base_url=server.url, timeout=None, limits=limits
  ) as client:
    expected = [await complete(client, body) for body in requests]  # compiles
    assert all(len(ids) == args.new for ids in expected)
    for _ in range(args.repeats):
      for together, clock in zip(at_once, seconds, strict=True):
        start = time.perf_counter()
        if together:
          ids = await asyncio.gather(
            *(complete(client, body) for body in requests)
          )
        else:
          ids = [await complete(client, body) for body in requests]
        clock.append(time.perf_counter() - start)
        assert list(ids) == expected, 'tokens must not depend on other requests'
  tokens = args.requests * args.new
  return [tokens / statistics.median(clock) for clock in seconds]


def main() -> None:
  """Prints the tokens per second of two servers."""
  sizes = {'requests': 64, 'prompt': 32, 'new': 64, 'slots': 64, 'repeats': 1}
  args = timing.parser(__doc__, preset='small', **sizes).parse_args()
  rates = []
  with tempfile.TemporaryDirectory() as folder:
    for slots, at_once in ((args.slots, (True, False)), (1, (False,))):
      words = f'--slots={slots}', f'--max_model_len={args.prompt + args.new}'
      server = Server(pathlib.Path(folder), *words, preset=args.preset)
      try:
        rates += asyncio.run(measure(server, args, at_once))
      finally:
        server.stop()
  together, alone, one_slot = (timing.rounded(rate) for rate in rates)
  timing.emit(
    **vars(args),
    together_tokens_per_s=together,
    one_by_one_tokens_per_s=alone,
    ratio=timing.rounded(together / alone),
    one_slot_tokens_per_s=one_slot,
    ratio_to_one_slot=timing.rounded(together / one_slot),
  )
  timing.emit_matmul(timing.matmul_clock(), 'matmul')


if __name__ == '__main__':
  main()
