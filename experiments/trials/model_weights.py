"""Damaged tensor files, indexes and numbers of models, adapters and runs."""

import json
import pathlib
from collections.abc import Callable

import jax
import numpy as np
from safetensors import numpy as safetensors

from experiments.trials import base, models
from posttrain import schema, tree
from posttrain.chat import renderer as chat
from posttrain.checkpoints import reading, store, weight_folders, weights
from posttrain.models import hf, hf_files, lora, peft, transformer
from posttrain.util import exits

UP = 'model.layers.1.mlp.up_proj.weight'


def mutations(whole: bytes, count: int) -> list[bytes]:
  """Returns a file with a few bytes of its length and header changed."""
  rng = np.random.default_rng(0)
  size = 8 + int.from_bytes(whole[:8], 'little')
  files = []
  for _ in range(count):
    data = bytearray(whole)
    for _ in range(rng.integers(1, 4)):
      data[rng.integers(size)] = rng.integers(256)
    files.append(bytes(data[: rng.integers(8, len(data))]))
    files.append(bytes(data))
  return files


@base.trial(
  'models', 'a hostile weights file or index is one line that names it'
)
def files(scratch: base.Scratch) -> str:
  folder = models.directory(scratch)
  file, index = folder / models.SINGLE, folder / hf_files.INDEX
  whole = file.read_bytes()
  header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], 'little')])
  overlap = header | {UP: header[UP] | {'data_offsets': [0, 8192]}}
  texts = [models.DEEP.encode(), b'[]', b'x', json.dumps(overlap).encode()]
  contents = [len(x).to_bytes(8, 'little') + x + whole for x in texts]
  contents += [b'', b'x', (2**63).to_bytes(8, 'little'), bytes(100), whole[:-1]]
  for content in contents:
    file.write_bytes(content)
    models.expect_refused(
      lambda: hf.check(folder, models.MODEL), file, content[:80]
    )
  fuzzed, refused = mutations(whole, 500), 0
  for content in fuzzed:  # some change only white space
    file.write_bytes(content)
    try:
      hf.check(folder, models.MODEL)
    except ValueError as error:
      assert str(error).isprintable() and len(str(error)) < 1500, error
      refused += 1
  file.unlink()
  names = ['/etc/passwd', '../x.safetensors', 'a/b.safetensors', '..', '', 7]
  names += [None, [], 'x' * 5000 + '.safetensors', 'a\0.safetensors', 'x.bin']
  maps = [{'weight_map': {'x': name}} for name in names]
  for text in (models.DEEP, '[]', '{', '{}', *map(json.dumps, maps)):
    index.write_text(text)
    models.expect_refused(
      lambda: hf.check(folder, models.MODEL), index, text[:80]
    )
  return (
    f'{len(contents)} headers and {len(names) + 4} indexes refused by name; '
    f'{refused} of {len(fuzzed)} changed headers refused, no traceback'
  )


WEIGHTS = {
  'a missing tensor': (lambda t: t.pop(UP), f'must hold tensor {UP}'),
  'an unknown tensor': (lambda t: t.update(x=np.ones(2)), 'x must belong'),
  'another shape': (
    lambda t: t.update({UP: t[UP][:-1]}),
    f'{UP} must have shape',
  ),
  'another dtype': (
    lambda t: t.update({UP: t[UP].astype('i4')}),
    f'{UP} must be of dtype',
  ),
  'another head': (models.other_head, 'must equal'),
}


@base.trial('models', '--dry_run looks at the headers of weights')
def dry_run(scratch: base.Scratch) -> str:
  folder = models.directory(scratch)
  sound = (folder / models.SINGLE).read_bytes()
  for what, (change, words) in WEIGHTS.items():
    (folder / models.SINGLE).write_bytes(sound)
    models.edited(folder / models.SINGLE, change)
    message = models.expect_refused(
      lambda: weights.check(str(folder), models.MODEL, folder_renderer(folder)),
      folder,
      what,
    )
    assert words in message, message
  run = scratch.folder / 'run'
  done = base.command('posttrain.main', *trains(scratch, run, folder))
  base.expect_line(done, exits.USAGE, 'config.sft.init', 'must equal')
  assert not run.exists(), 'the dry run left a workdir'
  return f'{base.words(list(WEIGHTS))}: named; {done.seconds:.0f} s, exit 2'


def folder_renderer(folder: pathlib.Path) -> chat.Renderer:
  """Returns the renderer of a HuggingFace directory."""
  return chat.load(schema.Tokenizer(path=str(folder)))


def trains(
  scratch: base.Scratch, run: pathlib.Path, folder: pathlib.Path
) -> list[str]:
  """Returns arguments of a dry run that starts from a directory."""
  names = ('model', 'tokenizer.path', 'sft.init')
  options = [f'--config.{name}={folder}' for name in names]
  return scratch.tiny(run, *options, '--dry_run')


@base.trial('models', 'weights with NaN or infinity are refused by tensor')
def not_finite(scratch: base.Scratch) -> str:
  folder, like = models.directory(scratch), transformer.shapes(models.MODEL)
  adapter = scratch.folder / 'adapter'
  options = schema.Lora(rank=2, targets='mlp/up')
  drawn = lora.init(jax.random.key(1), options, like)
  peft.save(drawn, options, models.MODEL, adapter, str(folder))
  weights.load(str(adapter), like)
  name = next(iter(safetensors.load_file(adapter / peft.WEIGHTS)))
  bad = (np.nan, np.inf, -np.inf)
  sound = (adapter / peft.WEIGHTS).read_bytes()
  for value in bad:
    (adapter / peft.WEIGHTS).write_bytes(sound)
    models.edited(adapter / peft.WEIGHTS, spoil(name, value))
    models.expect_refused(lambda: weights.load(str(adapter), like), name, value)
    models.edited(folder / models.SINGLE, spoil(UP, value))
    models.expect_refused(lambda: weights.load(str(folder), like), UP, value)
  step = spoiled_run(scratch)
  for argv in (
    ('posttrain.generate', f'--checkpoint={step}', '--prompt=1'),
    (
      'posttrain.main',
      *scratch.tiny(scratch.folder / 'next', f'--config.sft.init={step}'),
    ),
  ):
    done = base.command(*argv)
    base.expect_line(done, exits.USAGE, 'finite', 'layers/mlp/up/kernel')
  return (
    f'{len(bad)} values in a directory and in an adapter, and one in a run for '
    f'generate and for init: {done.last[:160]}'
  )


def spoil(name: str, value: float) -> Callable[[dict], None]:
  """Returns a change of one number of a tensor."""

  def change(tensors: dict) -> None:
    tensors[name].reshape(-1)[-1] = value

  return change


def spoiled_run(scratch: base.Scratch) -> pathlib.Path:
  """Returns a step of a run with one NaN, and sound checksums."""
  source = weight_folders.find(str(scratch.finished_run() / 'checkpoints/sft'))
  host = reading.read_host(source)
  like = transformer.shapes(schema.Model.from_json(host['model']))
  params = tree.flat(reading.restore_params(source, like))
  path = 'layers/mlp/up/kernel'
  params[path] = params[path].at[-1, -1, -1].set(np.nan)
  whole = jax.tree.unflatten(jax.tree.structure(like), params.values())
  folder = scratch.folder / 'spoiled/checkpoints/sft'
  saver = store.Checkpointer(str(folder), schema.Checkpoint())
  saver.save(4, {'params': whole}, host)
  saver.close()
  return folder / '4'
