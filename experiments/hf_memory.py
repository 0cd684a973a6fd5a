"""Host memory of loading and saving a HuggingFace directory.

    python -m experiments.hf_memory --gigabytes=3 --folder=/tmp

1. A random directory of the Qwen3 shape is written under `--folder`, in
   bfloat16, tensor by tensor; it is deleted at the end.
2. Three processes, on the CPU: `start` imports everything and starts jax;
   `load` also loads the directory, into float32 parameters; `save` is measured
   while it saves the loaded parameters, with `like=`. The kernel keeps the
   highest resident memory of each (`VmHWM`), mapped files included.
3. The saved directory must equal the first one, tensor by tensor.

Prints one JSON row, in units of 1e9 bytes. `over_largest` is the peak beyond
baseline and parameters, in units of the largest tensor of the files; `file` is
the largest share of mapped files that a sampling thread measured. Linux only.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np

from experiments.benchmarks import timing

SHARD_BYTES = 2**30
PERIOD = 0.01  # seconds between two readings of the resident memory


def main(argv=None) -> None:
  """Runs the command, or one of its processes."""
  args = parse(argv)
  if args.child:
    timing.emit(**CHILDREN[args.child](pathlib.Path(args.folder)))
    return
  pathlib.Path(args.folder).mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=args.folder) as root:
    folder = pathlib.Path(root)
    row = make(folder / 'model', args.gigabytes)
    base = launch('start', folder)
    row |= {'baseline': base['peak'], 'baseline_file': base['file']}
    for name in ('load', 'save'):
      figures = launch(name, folder)
      over = figures['peak'] - base['peak'] - row['parameters']
      row |= {f'{name}_{key}': value for key, value in figures.items()}
      row[f'{name}_over_largest'] = over / row['largest']
    same = equal(folder / 'model', folder / 'saved')
  row = {name: timing.rounded(value) for name, value in row.items()}
  timing.emit(bench='hf_memory', **row, equal=same)
  if not same:
    sys.exit('the saved directory differs from the first one')


def parse(argv):
  """Reads the command line."""
  parser = argparse.ArgumentParser()
  parser.add_argument('--gigabytes', type=float, default=3.0)
  parser.add_argument('--folder', default=tempfile.gettempdir())
  parser.add_argument('--child', choices=CHILDREN, help=argparse.SUPPRESS)
  args = parser.parse_args(argv)
  if args.gigabytes < 1:
    parser.error(
      f'--gigabytes must be >= 1: got {args.gigabytes}; the embedding alone '
      'has 0.6'
    )
  return args


def launch(child: str, folder: pathlib.Path) -> dict:
  """Runs one of `CHILDREN` in its own process; returns its figures."""
  done = subprocess.run(
    [
      sys.executable,
      '-m',
      'experiments.hf_memory',
      f'--child={child}',
      f'--folder={folder}',
    ],
    env={**os.environ, 'JAX_PLATFORMS': 'cpu'},
    stdout=subprocess.PIPE,
    text=True,
  )
  if done.returncode:
    sys.exit(f'{child} failed')
  return json.loads(done.stdout)


def make(folder: pathlib.Path, gigabytes: float) -> dict:
  """Writes a random model of about this size; returns its sizes."""
  import jax.numpy as jnp

  from posttrain import schema
  from posttrain.models import hf, hf_config, hf_files, transformer

  def size(layers):
    cfg = dataclasses.replace(schema.PRESETS['qwen3_1p7b'], layers=layers)
    return cfg, transformer.num_params(cfg)

  (_, one), (_, two) = size(1), size(2)
  more = (gigabytes * 1e9 / 2 - one) / (two - one)
  cfg, count = size(1 + max(round(more), 0))
  shapes = {name: tensor.shape for name, tensor in hf.tensors(cfg).items()}
  dtypes = dict.fromkeys(shapes, jnp.dtype('bfloat16'))
  rng = np.random.default_rng(0)

  def draw(name):
    bits = np.frombuffer(rng.bytes(2 * np.prod(shapes[name])), np.uint16)
    # Any sign and mantissa; exponents of 2**-31 to 1, no zero, inf or nan.
    bits = (bits & 0x8FFF) | 0x3000
    return bits.view(dtypes[name]).reshape(shapes[name])

  folder.mkdir()
  hf_files.write(folder, shapes, dtypes, draw, SHARD_BYTES)
  text = json.dumps(hf_config.write(cfg))
  (folder / 'config.json').write_text(text)
  files = list(folder.glob('*.safetensors'))
  return {
    'files': len(files),
    'directory': sum(path.stat().st_size for path in files) / 1e9,
    'largest': 2 * max(np.prod(shape) for shape in shapes.values()) / 1e9,
    'parameters': 4 * count / 1e9,
  }


def equal(a: pathlib.Path, b: pathlib.Path) -> bool:
  """Returns whether two directories hold the same tensors, bit by bit.

  The files are read by the library `safetensors`, not by ours.
  """
  import safetensors

  def files(folder):
    return {
      name: path
      for path in sorted(folder.glob('*.safetensors'))
      for name in safetensors.safe_open(path, 'numpy').keys()
    }

  def bits(path, name):
    with safetensors.safe_open(path, 'numpy') as file:
      array = file.get_tensor(name)
    return array.dtype, array.shape, array.tobytes()

  first, second = files(a), files(b)
  return first.keys() == second.keys() and all(
    bits(first[name], name) == bits(second[name], name) for name in first
  )


class Meter:
  """The highest resident memory of this process since construction.

  The kernel's own mark is exact; it is reset by `clear_refs`. The kernel keeps
  no mark for the share of mapped files, which is sampled.
  """

  def __init__(self):
    pathlib.Path('/proc/self/clear_refs').write_text('5')
    self._file, self._start = 0.0, time.perf_counter()
    threading.Thread(target=self._watch, daemon=True).start()

  def read(self) -> dict:
    """Returns peak and file share in 1e9 bytes, and the seconds so far."""
    seconds = time.perf_counter() - self._start
    return {'peak': self._sample(), 'file': self._file, 'seconds': seconds}

  def _sample(self) -> float:
    status = pathlib.Path('/proc/self/status').read_text()
    sizes = {
      name: int(kib) * 1024 / 1e9
      for name, kib in re.findall(r'(VmHWM|RssFile):\s+(\d+) kB', status)
    }
    self._file = max(self._file, sizes['RssFile'])
    return sizes['VmHWM']

  def _watch(self):
    while True:
      self._sample()
      time.sleep(PERIOD)


def start(folder: pathlib.Path) -> dict:
  """Measures imports and the start of jax."""
  meter = Meter()
  begin()
  return meter.read()


def load(folder: pathlib.Path) -> dict:
  """Measures loading, imports included."""
  meter = Meter()
  begin()
  read(folder)
  return meter.read()


def save(folder: pathlib.Path) -> dict:
  """Measures saving alone."""
  begin()
  params, cfg = read(folder)
  from posttrain.models import hf

  meter = Meter()  # resets the peak, which includes loading
  hf.save(params, cfg, folder / 'saved', like=folder / 'model')
  return meter.read()


def begin() -> None:
  """Imports everything and starts jax."""
  import jax
  import jax.numpy as jnp

  from posttrain.models import hf  # noqa: F401

  jax.block_until_ready(jnp.zeros(1) + 1)


def read(folder: pathlib.Path):
  """Returns the parameters and the model."""
  from posttrain.models import hf, hf_config

  cfg = hf_config.read(folder / 'model')
  return hf.load(folder / 'model', cfg), cfg


CHILDREN = {'start': start, 'load': load, 'save': save}

if __name__ == '__main__':
  main()
