"""The parts of `gpu.sh`: each prints its rows as JSON, `table` a page of them.

    python -m experiments.benchmarks.gpu decode --size=0p6b

Needs no recipes, so no ml_collections, and no data: models are random, and
works are built from the schema. Seconds are by the clock, medians of three
repeats.
"""

import dataclasses
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
import types

from experiments.benchmarks import counts, sizes, timing

REPEATS = 3
# Name in the device kind -> FLOP/s of bfloat16, bytes/s of memory, both from
# data sheets.
CHIPS = {'H100': (989e12, 3.35e12), 'H200': (989e12, 4.8e12)}
# What others publish, on one H100 but where another machine is named; see
# `docs/results.md`.
FIELD = {
  'sft_8192': 'prime-rl: 26,000 tok/s, 16.8 % MFU',
  'sft_16384': 'prime-rl: 25,500 tok/s, 23.7 % MFU',
  'decode_1': 'megakernels: 74 % of bandwidth (RTX 5090); vLLM 8B: 77 % (A100)',
  'decode_64': 'RPA kernel, Llama-3-8B: 86 % of bandwidth (TPU7x)',
}


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Sizes of the parts."""

  preset: str
  product: int  # rows and columns of a matrix product
  rows: dict[int, int]  # tokens of a row -> rows of an SFT step
  decoded: tuple[int, int]  # tokens of a prompt, and of its completion
  step: sizes.Step


SIZES = {
  '0p6b': Sizes(
    'qwen3_0p6b',
    8192,
    {8192: 4, 16384: 2},
    (32, 256),
    sizes.Step(prompt=256, new=256, micro_rows=16),
  ),
  'tiny': Sizes(
    'tiny', 256, {64: 4, 128: 2}, (16, 16), sizes.Step(prompts=2, group=2)
  ),
}


def main() -> None:
  """Runs a part, or prints the page."""
  parser = timing.parser(__doc__, size='0p6b', rows='')
  parser.add_argument('part', choices=[*PARTS, 'table'])
  args = parser.parse_args()
  if importlib.util.find_spec('ml_collections') is None:
    # Recipes alone need it, and none is read.
    stub = types.ModuleType('ml_collections')
    stub.config_dict = types.SimpleNamespace(ConfigDict=dict)
    sys.modules['ml_collections'] = stub
  if args.part == 'table':
    with open(args.rows) as file:
      print('\n'.join(table([json.loads(line) for line in file])))
  else:
    PARTS[args.part](SIZES[args.size])


def model(size: Sizes):
  """Returns the options of the model."""
  from posttrain import schema

  cfg = schema.PRESETS[size.preset]
  return cfg if cfg.vocab_size else dataclasses.replace(cfg, vocab_size=512)


def seconds(work) -> dict[str, float]:
  """Returns the medians of what a work counts, after two runs that compile."""
  clock = timing.Clock(work)
  for _ in range(2):
    clock.run()
  clock.forget()
  for _ in range(REPEATS):
    clock.run()
  return {key: clock.median(key) for key in clock.rows[0]}


def emit(bench: str, **figures: float) -> None:
  """Prints a row, with the most memory that the device has used."""
  import jax

  stats = jax.local_devices()[0].memory_stats() or {}
  if 'peak_bytes_in_use' in stats:
    figures['peak_gib'] = stats['peak_bytes_in_use'] / 2**30
  rows = {key: timing.rounded(x) for key, x in figures.items()}
  timing.emit(bench=bench, **rows)


def calibrate(size: Sizes) -> None:
  """Measures a matrix product, and a copy of memory."""
  import jax
  import jax.numpy as jnp

  from posttrain import machine

  timing.emit(
    bench='box',
    time=time.strftime('%Y-%m-%d %H:%M', time.gmtime()),
    devices=machine.devices(),
    versions=machine.versions(*machine.VERSIONS),
  )
  n = size.product
  a = jax.random.normal(jax.random.key(0), (n, n), jnp.bfloat16)
  product, copy = jax.jit(lambda x: x @ x), jax.jit(lambda x: x + 1)
  flat = jnp.zeros(64 * n * 1024 // 4)
  times = {}
  for name, function, x in (('matmul', product, a), ('copy', copy, flat)):

    def work(function=function, x=x):
      for _ in range(10):
        y = function(x)
      y.block_until_ready()

    times[name] = seconds(work)['wall'] / 10
  tflops = 2 * n**3 / times['matmul'] / 1e12
  emit('machine', tflops=tflops, bytes_per_s=2 * flat.nbytes / times['copy'])


def kernels(size: Sizes) -> None:
  """Compares the compiled kernels with their oracles."""
  command = '-m', 'pytest', '-q', '-m', 'gpu', 'tests/kernels', 'tests/ops'
  done = subprocess.run(
    [sys.executable, *command], capture_output=True, text=True
  )
  print(done.stdout, file=sys.stderr)
  timing.emit(bench='kernels', result=done.stdout.strip().splitlines()[-1])
  if done.returncode not in (0, 5):
    raise SystemExit(done.returncode)


def decode(size: Sizes) -> None:
  """Decodes one sequence, and 64."""
  from experiments.benchmarks import works
  from posttrain.models import transformer

  cfg, (prompt, new) = model(size), size.decoded
  weights = 2 * transformer.num_params(cfg)
  token = 2 * 2 * cfg.layers * cfg.kv_heads * cfg.head_dim  # keys and values
  for count in (1, 64):
    work = works.generate(
      cfg,
      sizes.random_ids(cfg.vocab_size, count, prompt),
      new,
      capacity=prompt + new,
      prefill_rows=min(count, 16),
      prefill_tokens=prompt,
    )
    figures = seconds(work)
    read = weights + count * (prompt + new / 2) * token
    emit(
      f'decode_{count}',
      tokens_per_s=count * new / figures['wall'],
      read_bytes_per_s=read * new / figures['wall'],
    )


def sft(size: Sizes) -> None:
  """Trains rows of one sequence each, a row per micro-batch."""
  from experiments.benchmarks import works

  cfg = model(size)
  for length, rows in size.rows.items():
    ids = sizes.random_ids(cfg.vocab_size, rows, length)
    figures = seconds(works.update(cfg, works.make_batch(ids, 1)))
    emit(
      f'sft_{length}',
      tokens_per_s=rows * length / figures['wall'],
      flops_per_s=counts.flops(cfg, rows * length, length, True)
      / figures['wall'],
    )


def grpo(size: Sizes) -> None:
  """Runs whole GRPO steps."""
  from experiments.benchmarks import works

  step = size.step
  with tempfile.TemporaryDirectory() as folder:
    figures = seconds(works.grpo(model(size), step, folder))
  sampled = step.prompts * step.group * step.new
  emit('grpo', **figures, sampled_per_s=sampled / figures['wall'])


PARTS = {
  'machine': calibrate,
  'kernels': kernels,
  'decode': decode,
  'sft': sft,
  'grpo': grpo,
}


def table(rows) -> list[str]:
  """Returns the lines of the page."""
  by_name = {row['bench']: row for row in rows}
  box = by_name.get('box', {'time': '?', 'devices': '?', 'versions': {}})
  versions = ', '.join(f'{k} {v}' for k, v in box['versions'].items())
  own = by_name.get('machine', {})
  chip = next((x for k, x in CHIPS.items() if k in box['devices']), None)
  lines = [
    '# One GPU',
    '',
    'A random Qwen3-0.6B in bfloat16. `experiments/benchmarks/gpu.sh`, '
    f'{box["time"]} UTC, {box["devices"]}; {versions}.',
    '',
    '| | ours | others |',
    '|---|---|---|',
  ]

  def share(x: float, index: int, measured: str) -> str:
    parts = [f'{x / chip[index]:.1%} of the data sheet'] if chip else []
    if measured in own:
      scale = 1e12 if measured == 'tflops' else 1
      parts.append(f'{x / own[measured] / scale:.1%} of the measured rate')
    return ', '.join(parts)

  for row in rows:
    name = row['bench']
    if 'failed' in row:
      text = f'failed, exit code {row["failed"]}'
    elif name == 'machine':
      text = (
        f'matrix product {own["tflops"]:.4g} TFLOP/s, '
        f'copy {own["bytes_per_s"] / 1e12:.4g} TB/s'
      )
    elif name == 'kernels':
      text = row['result']
    elif name.startswith('decode'):
      text = f'{row["tokens_per_s"]:,.0f} tok/s; bandwidth: '
      text += share(row['read_bytes_per_s'], 1, 'bytes_per_s')
    elif name.startswith('sft'):
      text = f'{row["tokens_per_s"]:,.0f} tok/s; MFU: '
      text += share(row['flops_per_s'], 0, 'tflops')
    elif name == 'grpo':
      text = f'{row["wall"]:.3g} s a step: rollout {row["rollout_s"]:.3g}, '
      text += f'update {row["update_s"]:.3g}; '
      text += f'{row["sampled_per_s"]:,.0f} sampled tok/s'
    else:
      continue
    if 'peak_gib' in row:
      text += f'; {row["peak_gib"]:.3g} GiB'
    lines.append(f'| {name} | {text} | {FIELD.get(name, "")} |')
  return lines


if __name__ == '__main__':
  main()
