"""Throughput of the server: requests all at once against one by one.

    python -m experiments.benchmarks.serve [--preset=small] [--requests=64]
        [--prompt=32] [--new=64] [--slots=64] [--repeats=1]

Writes a random model of a preset into a temporary HuggingFace directory and
starts the server on it, a process of its own on the loopback device. The same
requests are sent all at once and one after the other, alternately, and both
must sample the same tokens. The cost of a decode step is that of all slots, so
requests are also sent one after the other to a server of one slot. Prints one
JSON object: new tokens per second (medians over the repeats), and the ratios of
the first to the others.
"""

import argparse
import asyncio
import dataclasses
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import httpx

from experiments.benchmarks import timing


def publish(preset: str, folder: pathlib.Path) -> None:
  """Writes a random model, with the byte tokenizer."""
  import jax

  from posttrain import schema
  from posttrain.chat import pretrained, rendering
  from posttrain.models import hf, transformer

  renderer = rendering.load(schema.Tokenizer())
  model = dataclasses.replace(
    schema.PRESETS[preset], vocab_size=renderer.tokenizer.vocab_size
  )
  params = transformer.init(jax.random.key(0), model)
  hf.save(params, model, folder, dtype='float32')
  pretrained.write(renderer, folder)


def bodies(args) -> list[dict]:
  """Returns requests with distinct prompts and completions of equal length."""
  return [
    {
      'model': 'bench',
      'prompt': [(7 * i + j * j) % 256 for j in range(args.prompt)],
      'max_tokens': args.new,
      'seed': i,
      'ignore_eos': True,
      'return_token_ids': True,
    }
    for i in range(args.requests)
  ]


async def complete(client: httpx.AsyncClient, body: dict) -> list[int]:
  """Returns the sampled ids of a request."""
  response = await client.post('/completions', json=body)
  response.raise_for_status()
  return response.json()['choices'][0]['token_ids']


async def measure(url: str, args, at_once: tuple[bool, ...]) -> list[float]:
  """Returns new tokens per second, per entry of `at_once`."""
  requests, seconds = bodies(args), [[] for _ in at_once]
  limits = httpx.Limits(max_connections=args.requests)
  async with httpx.AsyncClient(
    base_url=url, timeout=None, limits=limits
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


def serve(folder: str, args, slots: int, at_once: tuple[bool, ...]):
  """Returns `measure` of a server with so many slots."""
  with subprocess.Popen(
    [
      sys.executable,
      '-m',
      'posttrain.serve',
      '--port=0',
      f'--checkpoint={folder}/bench',
      f'--slots={slots}',
      f'--max_model_len={args.prompt + args.new}',
    ],
    stdout=subprocess.PIPE,
    text=True,
  ) as server:
    try:
      url = server.stdout.readline().split()[-1]
      return asyncio.run(measure(url, args, at_once))
    finally:
      server.terminate()


def main(argv: list[str]) -> None:
  """Runs the command."""
  parser = argparse.ArgumentParser(
    prog='python -m experiments.benchmarks.serve'
  )
  parser.add_argument('--preset', default='small')
  for name, default in (
    ('requests', 64),
    ('prompt', 32),
    ('new', 64),
    ('slots', 64),
    ('repeats', 1),
  ):
    parser.add_argument(f'--{name}', type=int, default=default)
  args = parser.parse_args(argv)
  with tempfile.TemporaryDirectory() as folder:
    publish(args.preset, pathlib.Path(folder) / 'bench')
    together, alone = serve(folder, args, args.slots, (True, False))
    (one_slot,) = serve(folder, args, 1, (False,))
  print(
    json.dumps(
      {
        **vars(args),
        'together_tokens_per_s': round(together, 1),
        'one_by_one_tokens_per_s': round(alone, 1),
        'ratio': round(together / alone, 2),
        'one_slot_tokens_per_s': round(one_slot, 1),
        'ratio_to_one_slot': round(together / one_slot, 2),
      }
    )
  )
  timing.emit_matmul()


if __name__ == '__main__':
  main(sys.argv[1:])
