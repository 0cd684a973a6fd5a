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
its dtypes kept; its README.md becomes BASE_README.md. A reward model becomes a
sequence classification with one label, the value at the last token.

peft: the adapter of a stage with LoRA, in float32. A stage that started from
anything but a HuggingFace directory needs --like: its start, exported as hf.

README.md is a model card: how the weights were trained, and what was measured.
The licence is left to you.

Exit codes: 0 done, 1 the machine failed, 2 the command line is wrong, 130
interrupted.
"""

import dataclasses
import functools
import os
import sys
from typing import Any

from posttrain import processes
from posttrain.config import names
from posttrain.util import commands


@dataclasses.dataclass
class Flags:
  """The command line."""

  checkpoint: str = commands.checkpoint()
  folder: str = commands.required('DIR', 'The output; a new or empty folder.')
  format: str = commands.flag(
    'hf', 'A HuggingFace directory, or a PEFT adapter.', value='hf|peft'
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
    choices=('bfloat16', 'float16', 'float32'),
  )

  def __post_init__(self):
    if self.format not in ('hf', 'peft'):
      raise ValueError(
        f"--format must be 'hf' or 'peft': got {self.format!r}; a gguf is made "
        "from --format=hf by llama.cpp's convert_hf_to_gguf.py"
      )
    if self.dtype is not None and (self.like or self.format == 'peft'):
      raise ValueError(
        '--dtype must not be given with --like, whose dtypes are kept, or with '
        f'--format=peft, which is float32: got {self.dtype!r}'
      )


PARSER = commands.Parser(Flags, __doc__, names.flag)


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
  from posttrain.checkpoints import cards, weights
  from posttrain.hosts import joining

  save = {'hf': _save_hf, 'peft': _save_peft}[flags.format]
  if place is not None and save is _save_peft:
    raise ValueError('--format=peft must be run by one process: got several')
  with joining.join(place, None):
    folder = weights.find(flags.checkpoint)
    checkpoint = weights.read(folder)
    content = save(flags, folder, checkpoint)
    processes.on(0, lambda: cards.write(folder, flags.folder, flags.format))
    if processes.is_first():
      print(f'{flags.folder} holds {content}')


def _save_peft(flags: Flags, folder: str, checkpoint: Any) -> str:
  """Writes an adapter; returns the words that describe it."""
  import jax.numpy as jnp

  from posttrain import tree
  from posttrain.checkpoints import weights
  from posttrain.models import hf, peft, transformer

  model, start = checkpoint.model, checkpoint.start()
  adapter, base = weights.adapter(folder, average=True), flags.like or start
  if adapter is None:
    raise ValueError(
      '--checkpoint must name a stage with lora.rank > 0 for --format=peft: '
      f'got {folder}; leave out --format, for all its weights'
    )
  if not weights.is_hf(base):
    raise ValueError(
      f'--like must name the base model, a HuggingFace directory: got {base}; '
      f'export {start} with --format=hf'
    )
  like = transformer.shapes(model)
  if flags.like is not None:
    # The base must hold the weights that the stage started from, to bfloat16
    # precision, whose rounding error is half of the limit.
    hf.check_like(base, model)
    base_params = tree.flat(hf.load(base, model))
    for path, value in tree.flat(weights.load_start(folder, like)).items():
      difference = jnp.abs(value - base_params[path]).max()
      if not difference <= 2**-7 * jnp.abs(value).max():
        raise ValueError(
          f'--like must hold the weights of {start}, which the adapter was '
          f'trained on: {path} differs; export them with --format=hf'
        )
  elif checkpoint.kind == 'run':
    like = weights.base_like(adapter[1], like)
    weights.check_base(folder, weights.load_start(folder, like))
  peft.save(*adapter, model, flags.folder, os.path.abspath(base))
  return f'the adapter of {folder}, in float32'


def _save_hf(flags: Flags, folder: str, checkpoint: Any) -> str:
  """Writes a HuggingFace directory; returns the words that describe it."""
  from posttrain import sharding
  from posttrain.chat import rendering
  from posttrain.checkpoints import weights
  from posttrain.models import hf

  model, like = checkpoint.model, flags.like
  if like is None and flags.dtype is None:
    *_, first = weights.chain(folder)
    like = None if first == 'random' else first
  shapes = sharding.spread(weights.shapes(folder, model))
  params = weights.load(folder, shapes, average=True)
  dtype = flags.dtype or model.dtype
  renderer = checkpoint.renderer()
  pad = renderer and renderer.tokenizer.pad_id
  hf.save(params, model, flags.folder, like=like, dtype=dtype, pad_id=pad)
  if renderer is not None:
    processes.on(0, lambda: rendering.write(renderer, flags.folder))
  return f'{folder}, in {dtype if like is None else f"the dtypes of {like}"}'


# Returns the exit code; takes the arguments, None = those of the process.
main = functools.partial(PARSER.run, export)

if __name__ == '__main__':
  sys.exit(main())
