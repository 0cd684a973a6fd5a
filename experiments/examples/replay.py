"""Training of a stage on the rollouts that an earlier run exported.

    python -m experiments.examples.replay --config=configs/arithmetic.py \\
        --exports=runs/arithmetic/token_exports --stage=grpo \\
        --workdir=runs/replay --config.grpo.optim.lr=1e-4

1. The stage's files in --exports (`config.metrics.export_tokens`) are read in
   the order of their steps, the first N of them.
2. Their sequences become samples again, streams and all, and are packed.
3. The stage's own train step trains on them, from the parameters of `init`;
   'stage:NAME' is a stage of the earlier run.

No engine decodes and no environment runs, so that losses, optimizers and their
settings can be compared on the very same rollouts. With the config of a run
that exported every step, loss and gradient norm equal the run's to the bit:
sequences are packed in the order of the earlier batch, which is a fixed point
of packing, so that batch and program are the same. With other options, later
rollouts are off-policy, which the importance ratios show.

--workdir must be new; metrics.jsonl has a row per step as in a run, without the
metrics of sampling and evaluation. Prints the last row on stdout.
"""

import contextlib
import dataclasses
import json
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from posttrain import compilation, schema, types
from posttrain import main as main_lib
from posttrain.metrics import writers
from posttrain.pipeline import tokens as token_pipeline
from posttrain.stage import learner, logbook, preflight
from posttrain.training import token_export
from posttrain.util import commands, watchdog


@dataclasses.dataclass
class Flags:
  """The command line."""

  config: str = commands.required('FILE', 'The recipe.')
  exports: str = commands.required(
    'DIR', 'WORKDIR/token_exports of the earlier run.'
  )
  stage: str = commands.required('NAME', 'The stage to train.')
  workdir: str = commands.required('DIR', 'The new folder for metrics.jsonl.')
  steps: int | None = commands.flag(
    None, 'The number of steps to train.', if_absent='all exported', least=1
  )
  overrides: list[tuple[str, str]] = commands.overrides()


PARSER = commands.Parser(Flags, __doc__)


def files(exports: str, stage: str) -> dict[int, str]:
  """Returns the paths of a stage's files by step, in order.

  Raises:
    ValueError: the folder holds none.
  """
  pattern = re.compile(rf'{re.escape(stage)}_(\d{{6,}})\.jsonl')
  names = os.listdir(exports) if os.path.isdir(exports) else []
  paths = {
    int(match[1]): os.path.join(exports, name)
    for name in names
    if (match := pattern.fullmatch(name))
  }
  if not paths:
    raise ValueError(
      f'--exports must be a folder with files {stage}_<step>.jsonl: got '
      f'{exports!r}; set config.metrics.export_tokens in the run'
    )
  return dict(sorted(paths.items()))


def read(path: str) -> list[types.Sample]:
  """Returns the samples of a file, in order.

  Raises:
    ValueError: the file has another schema version.
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
    where: position of the line, for errors.
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
    # Only algorithms read these two, before the streams are written.
    roles=np.zeros(tokens, np.int8),
    is_content=np.zeros(tokens, bool),
  )


def build(
  flags: Flags, run: schema.Run
) -> tuple[learner.Learner, logbook.Logbook, token_pipeline.Packer]:
  """Builds what replaying needs of a stage: learner, logbook, packer.

  The learner starts with the parameters that the stage started with.
  """
  resolved = preflight.resolve(run)
  name, stage = flags.stage, resolved.cfg.stages[flags.stage]
  mesh, model, renderer = resolved.mesh, stage.model, resolved.renderer
  assert model is not None
  spec = learner.make_spec(name, stage, model, mesh, tuple(stage.envs))
  root = os.path.dirname(os.path.abspath(flags.exports))
  folders = {'init': preflight.resolve_folder(stage.init, root)}
  init = preflight.Loader(
    run.seed, root, folders, spec.weights_like, model, renderer, mesh
  ).init
  base = spec.base(init)
  return (
    spec.learner(spec.fresh(init, base), base),
    logbook.make(
      run,
      name,
      flags.workdir,
      watchdog.Timers(),
      compilation.CompileCounter().open(),
    ),
    token_pipeline.Packer(stage, renderer.tokenizer.pad_id),
  )


def replay(flags: Flags, run: schema.Run) -> dict[str, Any]:
  """Trains on the exported sequences; returns the last row.

  Raises:
    ValueError: the config has no such stage, the workdir is used, or the files
      do not fit the config.
    NonFiniteError: too many gradients in a row were not finite.
  """
  if flags.stage not in run.stages:
    raise ValueError(
      f'--stage must be one of {tuple(run.stages)}: got {flags.stage!r}'
    )
  path = os.path.join(flags.workdir, 'metrics.jsonl')
  if os.path.exists(path):
    raise ValueError(f'--workdir must be new: got one that holds {path}')
  paths = files(flags.exports, flags.stage)
  compilation.enable_compilation_cache(run.compilation_cache)
  trained, log, pack = build(flags, run)
  state, clock = trained.state, log.clock
  with contextlib.closing(log):
    for step in list(paths)[: flags.steps]:
      with clock('read'):
        samples = read(paths[step])
        batch = pack(samples)
      with clock('update'):
        state, metrics = trained.update(state, batch)
        metrics = jax.device_get(metrics)
      log.write(
        step,
        {
          'batch/samples': len(samples),
          'batch/tokens': sum(len(sample) for sample in samples),
          **trained.measured(batch, metrics),
          'compiles': trained.update.compiles,
        },
      )
      trained.check_finite(step, metrics, batch, log.bad_batch_path(step))
  return writers.read(path)[-1]


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns the exit code: 1 if the training failed."""
  return PARSER.run(_run, argv, 'experiments.')


def _run(flags: Flags) -> None:
  run = main_lib.load(flags.config, flags.overrides)
  print(json.dumps(replay(flags, run)))


if __name__ == '__main__':
  sys.exit(main())
