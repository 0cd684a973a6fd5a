"""Training of a stage on the rollouts that an earlier run exported.

    python -m experiments.replay --config=configs/arithmetic.py \\
        --exports=runs/arithmetic/token_exports --stage=grpo \\
        --workdir=runs/replay --config.grpo.optim.lr=1e-4

1. The stage's files in --exports (`config.metrics.export_tokens`) are read in
   the order of their steps, the first N of them.
2. Their sequences become samples again, streams and all, and are packed.
3. The stage's own train step trains on them, from the parameters that `init`
   says. 'stage:NAME' is looked up in WORKDIR.

No engine decodes, no environment is played: what was sampled stays what it is,
so that losses, optimizers and their settings can be compared on the very same
rollouts. From a run that exported every step, with its own config, loss and
gradient norm come out as they were to the bit: sequences are packed in the
order in which packing had left them, which is a fixed point of it, so that the
batch is the same and the same program reads it. With other options, later
rollouts are those of another policy, which the importance ratios say.

DIR is new and gets metrics.jsonl, a row per step as in a run, but for what is
sampled and evaluated. Prints the last row on stdout.
"""

import dataclasses
import json
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from posttrain import compilation, schema, sharding, types
from posttrain.chat import renderer as chat
from posttrain.config import checks
from posttrain.config import load as config
from posttrain.data import packing
from posttrain.metrics import writers
from posttrain.models import lora, transformer
from posttrain.pipeline import tokens as token_pipeline
from posttrain.rollout import references as refs
from posttrain.stage import job
from posttrain.training import arrays, objectives, optim, token_export
from posttrain.training import state as train_state
from posttrain.training import step as train_step
from posttrain.util import flags as flags_lib
from posttrain.util import timers


@dataclasses.dataclass
class Flags:
  """The command line."""

  config: str = flags_lib.required('FILE', 'The recipe.')
  exports: str = flags_lib.required(
    'DIR', 'WORKDIR/token_exports of the earlier run.'
  )
  stage: str = flags_lib.required('NAME', 'The stage to train.')
  workdir: str = flags_lib.required('DIR', 'The new folder for metrics.jsonl.')
  steps: int | None = flags_lib.flag(
    None, 'The number of steps to train.', if_absent='all exported', least=1
  )
  overrides: list[tuple[str, str]] = flags_lib.overrides()


PARSER = flags_lib.Parser(Flags, __doc__)


def files(exports: str, stage: str) -> dict[int, str]:
  """Returns the paths of a stage's files by step, in order.

  Raises:
    ValueError: the folder holds none.
  """
  pattern = re.compile(rf'{re.escape(stage)}_(\d{{6,}})\.jsonl')
  names = os.listdir(exports) if os.path.isdir(exports) else []
  found = {
    int(match[1]): os.path.join(exports, name)
    for name in names
    if (match := pattern.fullmatch(name))
  }
  if not found:
    raise ValueError(
      f'--exports must be a folder with files {stage}_<step>.jsonl: got '
      f'{exports!r}; set config.metrics.export_tokens in the run'
    )
  return dict(sorted(found.items()))


def read(path: str) -> list[types.Sample]:
  """Returns the samples of a file, in order.

  Raises:
    ValueError: it is of another version.
  """
  with open(path) as f:
    return [
      sample(json.loads(line), f'{path}:{number}')
      for number, line in enumerate(f, 1)
    ]


def sample(record: dict[str, Any], where: str) -> types.Sample:
  """Returns the sample of an exported sequence.

  Args:
    record: a line of the file.
    where: names it in errors.
  """
  version = record.get('schema_version')
  if version != token_export.SCHEMA_VERSION:
    raise ValueError(
      f'{where}: schema_version must be {token_export.SCHEMA_VERSION}: got '
      f'{version!r}; export anew'
    )
  streams = {
    name: np.array(record[name], dtype)
    for name, dtype in types.TOKEN_FIELDS.items()
  }
  tokens = len(streams['ids'])
  return types.Sample(
    env=record['env'],
    row=where,
    **streams,
    # Whose words they were: read by those who write streams, not after.
    roles=np.zeros(tokens, np.int8),
    is_content=np.zeros(tokens, bool),
  )


class Packer:
  """Stands in for the pipeline: packs as it does, in shapes as it makes."""

  def __init__(self, stage: schema.Stage, pad_id: int):
    self.envs, self._pad_id = tuple(stage.envs), pad_id
    batch = stage.batch
    self._rows = batch.micro_batch_tokens // batch.row_tokens
    self._row_tokens = batch.row_tokens
    groups = max(entry.group_size for entry in stage.envs.values())
    self._micro_batches = -(-batch.prompts_per_step * groups // self._rows)

  def __call__(self, samples: Sequence[types.Sample]) -> types.Batch:
    while True:
      batch, leftover = packing.pack(
        samples,
        row_tokens=self._row_tokens,
        rows=self._rows,
        micro_batches=self._micro_batches,
        envs=self.envs,
        pad_id=self._pad_id,
      )
      if not leftover:
        return batch
      self._micro_batches *= 2


def build(flags: Flags, run: schema.Run) -> job.Job:
  """Makes what trains; what samples, scores or evaluates is None."""
  name, stage = flags.stage, run.stages[flags.stage]
  renderer = chat.load(run.tokenizer)
  model = stage.model or run.model
  size = model.vocab_size or renderer.tokenizer.vocab_size
  model = dataclasses.replace(model, vocab_size=size)
  mesh = sharding.make_mesh(run.mesh)
  optimizer = optim.make(stage.optim, stage.steps * stage.updates_per_rollout)
  state, base = _begin(flags, run, model, renderer, mesh, optimizer)
  objective = objectives.TokenComponents(model, tuple(stage.envs), stage.loss)
  update = train_step.make_train_step(
    objective,
    optimizer,
    mesh=mesh,
    rules=transformer.SHARDING_RULES,
    average=stage.optim.average,
    updates=stage.updates_per_rollout,
    base=base,
  )
  return job.Job(
    name=name,
    cfg=stage,
    workdir=flags.workdir,
    step=0,
    state=state,
    base=base,
    objective=objective,
    update=update,
    measure=None,
    engine=None,
    references=None,
    evaluator=None,
    checkpointer=None,
    save_every=1,
    exporter=None,
    pipeline=Packer(stage, renderer.tokenizer.pad_id),
    writer=writers.Writer(
      os.path.join(flags.workdir, 'metrics.jsonl'), 0, None
    ),
    progress=writers.Progress(name, stage.steps, 0, run.metrics.progress),
    clock=timers.Timers(),
    about={},
    compiling=compilation.CompileCounter().open(),
  )


def _begin(
  flags: Flags, run: schema.Run, model, renderer, mesh, optimizer
) -> tuple[arrays.TrainState, lora.Base | None]:
  """Makes the state that the stage began with."""
  stage, index = run.stages[flags.stage], list(run.stages).index(flags.stage)
  root = os.path.dirname(os.path.abspath(flags.exports))
  like, whole = train_state.shapes(stage, model, optimizer, mesh)
  random = jax.jit(
    lambda: transformer.init(jax.random.key(run.seed), model),
    out_shardings=jax.tree.map(lambda x: x.sharding, whole),
  )
  load = refs.Loader(
    random,
    root,
    {'init': refs.resolve(stage.init, root)},
    whole,
    model,
    renderer,
    mesh,
  )
  base = None
  if stage.lora.rank:
    base = lora.Base(load.init(), lora.scale(stage.lora))
  key = jax.random.fold_in(jax.random.key(run.seed), index)
  return train_state.fresh(stage, optimizer, like, base, load.init, key), base


def replay(flags: Flags, run: schema.Run) -> dict[str, Any]:
  """Trains on what was exported; returns the last row.

  Raises:
    ValueError: the stage is not the config's, the workdir is used, or the
      files do not fit the config.
    NonFiniteError: too many gradients in a row were not finite.
  """
  if flags.stage not in run.stages:
    raise ValueError(
      f'--stage must be one of {tuple(run.stages)}: got {flags.stage!r}'
    )
  path = os.path.join(flags.workdir, 'metrics.jsonl')
  if os.path.exists(path):
    raise ValueError(f'--workdir must be new: got one that holds {path}')
  found = files(flags.exports, flags.stage)
  compilation.enable_compilation_cache(run.compilation_cache)
  made = build(flags, run)
  state = made.state
  try:
    for step in list(found)[: flags.steps]:
      with made.clock('read'):
        samples = read(found[step])
        batch = made.pipeline(samples)
      with made.clock('update'):
        state, measured = made.update(state, batch)
        measured = jax.device_get(measured)
      seen = {
        'batch/samples': len(samples),
        'batch/tokens': sum(len(sample) for sample in samples),
      }
      item = token_pipeline.Item(batch, seen, {})
      made.log(step, made.record(item, measured))
      made.check_finite(step, measured, item)
  finally:
    for part in (made.writer, made.progress, made.compiling):
      part.close()
  return writers.read(path)[-1]


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns the exit code: 1 if the training failed."""
  return PARSER.run(
    _run, argv, 'configs.', 'experiments.', config.RECIPE_PREFIX
  )


def _run(flags: Flags) -> None:
  node = config.load(flags.config)
  for key, value in flags.overrides:
    config.override(node, key, value)
  run = config.build(node)
  checks.check(run)
  print(json.dumps(replay(flags, run)))


if __name__ == '__main__':
  sys.exit(main())
