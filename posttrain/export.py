"""Writes what a run has trained as a HuggingFace or a PEFT directory.

    python -m posttrain.export --checkpoint=PATH --folder=DIR
        [--format=hf|peft] [--like=DIR] [--dtype=bfloat16]

PATH is as for posttrain.generate; DIR must be new or empty. The weights are
their moving average where the checkpoint has one.

hf (default): config.json, safetensors, and the tokenizer with its chat
template; a LoRA is merged. --like is the directory that the run began with (it
is found by itself where a stage's `init` named one): its config and small files
are copied and its dtypes kept. Without one, --dtype is that of all tensors.

peft: the adapter of a stage with LoRA, float32. --like is its base, a
HuggingFace directory; a stage that began elsewhere needs one that was exported.

Exit codes: 0 done, 2 the command is wrong, 130 interrupted.
"""

import dataclasses
import os
import sys
from collections.abc import Sequence

from posttrain import schema
from posttrain.util import errors

FORMATS, DTYPES = ('hf', 'peft'), ('bfloat16', 'float16', 'float32')


@dataclasses.dataclass
class Flags:
  """The command line."""

  checkpoint: str = ''
  folder: str = ''
  format: str = 'hf'
  like: str | None = None
  dtype: str | None = None


def parse(argv: Sequence[str]) -> Flags:
  """Reads the command line; ValueError names the argument that is wrong."""
  flags = Flags()
  known = [field.name for field in dataclasses.fields(Flags)]
  for argument in argv:
    name, equals, text = argument.removeprefix('--').partition('=')
    if not argument.startswith('--') or name not in known or not equals:
      expected = ', '.join(f'--{flag}=...' for flag in known)
      raise ValueError(f'arguments must be {expected}: got {argument!r}')
    setattr(flags, name, text)
  for name in ('checkpoint', 'folder'):
    if not getattr(flags, name):
      raise ValueError(f'--{name}=PATH must be given')
  if flags.format not in FORMATS:
    raise ValueError(f'--format must be one of {FORMATS}: got {flags.format!r}')
  if flags.dtype is not None and flags.dtype not in DTYPES:
    raise ValueError(f'--dtype must be one of {DTYPES}: got {flags.dtype!r}')
  if flags.dtype is not None and (flags.like or flags.format == 'peft'):
    raise ValueError(
      '--dtype must not be given with --like or --format=peft: got '
      f'{flags.dtype!r}; tensors keep the dtypes of --like, adapters are '
      'float32'
    )
  return flags


def export(flags: Flags) -> None:
  """Writes the directory.

  Raises:
    ValueError: there is no such checkpoint, it holds no adapter (peft), the
      folder is not empty, or no architecture computes this model.
  """
  # Late, so that a mistake in the command line is answered at once.
  from posttrain.checkpoints import weights

  folder = weights.find(flags.checkpoint)
  if weights.is_hf(folder):
    raise ValueError(
      f'--checkpoint must be of a run, or of PEFT: got {flags.checkpoint!r}, '
      'which is a HuggingFace directory already'
    )
  if flags.format == 'peft':
    _adapter(flags, folder)
  else:
    _whole(flags, folder)


def _adapter(flags: Flags, folder: str) -> None:
  from posttrain.checkpoints import weights
  from posttrain.models import peft, transformer

  found, start = weights.adapter(folder, average=True), weights.start(folder)
  if found is None:
    raise ValueError(
      f'--checkpoint must be of a stage with lora.rank > 0: got {folder}, '
      'all of whose weights were trained; use --format=hf'
    )
  if flags.like is None and not weights.is_hf(start):
    raise ValueError(
      f'--like must name the base of the adapter: its stage began with '
      f'{start}; export that with --format=hf, and name its folder here'
    )
  base, model = flags.like or start, weights.model(folder)
  if flags.like is not None:
    _check_base(base, start, model)
  elif weights.is_run(folder):
    like = transformer.shapes(model)
    weights.check_base(folder, weights.load(start, like))
  peft.save(*found, model, flags.folder, os.path.abspath(base))


def _check_base(base: str, start: str, model: schema.Model) -> None:
  """Refuses a base that is not, but for its dtypes, what the stage began with.

  Raises:
    ValueError: names the first tensor that differs.
  """
  import jax.numpy as jnp

  from posttrain import tree
  from posttrain.checkpoints import weights
  from posttrain.models import hf, transformer

  if not weights.is_hf(base):
    raise ValueError(f'--like must name a HuggingFace directory: got {base!r}')
  hf.check_like(base, model)
  like = transformer.shapes(model)
  theirs = tree.flat(hf.load(base, model))
  for path, ours in tree.flat(weights.load(start, like)).items():
    apart = jnp.abs(ours - theirs[path]).max() / jnp.abs(ours).max()
    if not apart < 2**-7:  # bfloat16 rounds by half of that
      raise ValueError(
        f'--like must hold what the adapter was trained on, {start}: '
        f'{path} differs by {apart:.1%}; export that with --format=hf'
      )


def _whole(flags: Flags, folder: str) -> None:
  from posttrain.chat import pretrained
  from posttrain.checkpoints import weights
  from posttrain.models import hf, transformer

  model, like = weights.model(folder), flags.like
  if like is None and flags.dtype is None:
    like = weights.origin(folder)
  params = weights.load(folder, transformer.shapes(model), average=True)
  hf.save(
    params, model, flags.folder, like=like, dtype=flags.dtype or 'bfloat16'
  )
  renderer = weights.renderer(folder)
  if renderer is not None:
    pretrained.write(renderer, flags.folder)


def main(argv: Sequence[str]) -> int:
  """Returns the exit code."""
  if '--help' in argv:
    print(__doc__)
    return 0
  try:
    export(parse(argv))
  except KeyboardInterrupt:
    return 130
  except ValueError as error:
    return errors.report(error)
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
