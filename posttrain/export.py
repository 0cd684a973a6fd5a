"""The command that exports trained weights as a HuggingFace or PEFT directory.

    python -m posttrain.export --checkpoint=runs/gsm8k --folder=exported
    python -m posttrain.export --checkpoint=runs/gsm8k --folder=adapter \\
        --format=peft

The weights are the moving average where the checkpoint has one.

The weights are split over all devices; those of several hosts, if each runs
the command with its place (--coordinator, --num_processes, --process_id), as
`posttrain.main` does. Tensors are gathered and written one at a time.

hf: config.json, safetensors, and the tokenizer with its chat template; a LoRA
is merged. With --like, that directory's config and small files are copied and
its dtypes kept; its README.md becomes BASE_README.md.

peft: the adapter of a stage with LoRA, in float32. A stage that started from
anything but a HuggingFace directory needs --like: its start, exported as hf.

README.md is a model card: how the weights were trained, and what was measured.
The licence is left to you.

Exit codes: 0 done, 1 the machine failed, 2 the command line is wrong, 130
interrupted.
"""

import dataclasses
import os
import sys
from collections.abc import Sequence

from posttrain import processes, schema
from posttrain.util import commands

FORMATS, DTYPES = ('hf', 'peft'), ('bfloat16', 'float16', 'float32')


@dataclasses.dataclass
class Flags:
  """The command line."""

  checkpoint: str = commands.checkpoint()
  folder: str = commands.required('DIR', 'The output; a new or empty folder.')
  format: str = commands.flag(
    'hf', 'A HuggingFace directory, or a PEFT adapter.', choices=FORMATS
  )
  like: str | None = commands.flag(
    None,
    'A HuggingFace directory: the template of hf, the base model of peft.',
    value='DIR',
    if_absent="the directory in the stage's init, if any",
  )
  coordinator: str | None = commands.coordinator()
  num_processes: int | None = commands.num_processes()
  process_id: int | None = commands.process_id()
  dtype: str | None = commands.flag(
    None,
    'The dtype of all tensors of hf, in place of --like.',
    if_absent='as --like, else the one that the model computes in',
    choices=DTYPES,
  )

  def __post_init__(self):
    if self.dtype is not None and (self.like or self.format == 'peft'):
      raise ValueError(
        '--dtype must not be given with --like or --format=peft: got '
        f'{self.dtype!r}; tensors keep the dtypes of --like, adapters are '
        'float32'
      )


PARSER = commands.Parser(Flags, __doc__)


def export(flags: Flags) -> None:
  """Writes the directory.

  Raises:
    ValueError: there is no such checkpoint, it holds no adapter (peft), the
      folder is not empty, or no HuggingFace architecture fits this model.
  """
  place = commands.place(
    flags.coordinator, flags.num_processes, flags.process_id
  )
  # Imported here so that command-line mistakes are reported without jax.
  from posttrain.hosts import joining

  with joining.join(place, None):
    _export(flags)


def _export(flags: Flags) -> None:
  from posttrain.checkpoints import weights

  folder = weights.find(flags.checkpoint)
  checkpoint = weights.read(folder)
  if checkpoint.kind == 'hf':
    raise ValueError(
      '--checkpoint must name a run or a PEFT directory: got '
      f'{flags.checkpoint!r}, which is a HuggingFace directory already'
    )
  if processes.is_first():
    checkpoint.print_named()
  if flags.format == 'peft':
    if processes.count() > 1:
      raise ValueError(
        f'--format=peft must be run by one process: got {processes.count()}; '
        'an adapter is small'
      )
    _save_peft(flags, folder)
  else:
    _save_hf(flags, folder)


def _save_peft(flags: Flags, folder: str) -> None:
  from posttrain.checkpoints import cards, weights
  from posttrain.models import peft, transformer

  checkpoint = weights.read(folder)
  adapter, start = weights.adapter(folder, average=True), checkpoint.start()
  if adapter is None:
    raise ValueError(
      '--checkpoint must name a stage with lora.rank > 0: got '
      f'{folder}, which trained all weights; use --format=hf'
    )
  if flags.like is None and not weights.is_hf(start):
    raise ValueError(
      f'--like must name the base model of the adapter: got none, and its '
      f'stage started from {start}; export that with --format=hf and pass the '
      'folder as --like'
    )
  base, model = flags.like or start, checkpoint.model
  if flags.like is not None:
    _check_base(base, folder, model)
  elif checkpoint.kind == 'run':
    like = transformer.shapes(model)
    weights.check_base(folder, weights.load_start(folder, like))
  peft.save(*adapter, model, flags.folder, os.path.abspath(base))
  cards.write(folder, flags.folder, flags.format)
  print(f'{flags.folder} holds the adapter of {folder}, in float32')


def _check_base(base: str, folder: str, model: schema.Model) -> None:
  """Checks that a base model holds the weights that a stage started from.

  Dtypes may differ: values are compared to bfloat16 precision.

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
  base_params = tree.flat(hf.load(base, model))
  start = weights.load_start(folder, like)
  for path, value in tree.flat(start).items():
    error = jnp.abs(value - base_params[path]).max() / jnp.abs(value).max()
    if not error < 2**-7:  # the rounding error of bfloat16 is half of that
      raise ValueError(
        '--like must hold the weights the adapter was trained on, '
        f'{weights.read(folder).start()}: '
        f'{path} differs by {error:.1%}; export that with --format=hf'
      )


def _save_hf(flags: Flags, folder: str) -> None:
  from posttrain import sharding
  from posttrain.chat import pretrained
  from posttrain.checkpoints import cards, weights
  from posttrain.models import hf, transformer

  checkpoint, like = weights.read(folder), flags.like
  model = checkpoint.model
  if like is None and flags.dtype is None:
    *_, first = weights.chain(folder)
    like = None if first == 'random' else first
  shapes = sharding.spread(transformer.shapes(model))
  params = weights.load(folder, shapes, average=True)
  dtype = flags.dtype or model.dtype
  hf.save(params, model, flags.folder, like=like, dtype=dtype)
  renderer = checkpoint.renderer()
  if renderer is not None:
    processes.on(0, lambda: pretrained.write(renderer, flags.folder))
  processes.on(0, lambda: cards.write(folder, flags.folder, flags.format))
  dtypes = dtype if like is None else f'the dtypes of {like}'
  if processes.is_first():
    print(f'{flags.folder} holds {folder}, in {dtypes}')


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns the exit code. `argv=None`: the process's."""
  return PARSER.run(export, argv)


if __name__ == '__main__':
  sys.exit(main())
