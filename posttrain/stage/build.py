"""Assembly of a stage, top to bottom, restored to the step where it stopped.

`make` builds in the order of need: each object gets everything it needs in its
constructor. Engines get weights, and references models, when they are used.
In this file kinds of stages differ only in their pipeline, see `PIPELINES`.
"""

import dataclasses
import logging
import os
from typing import Any

from posttrain import compilation, processes
from posttrain.chat import rendering
from posttrain.checkpoints import store
from posttrain.decode import engines
from posttrain.evaluation import evaluator as evaluation
from posttrain.metrics import writers
from posttrain.pipeline import base, pairs, tokens
from posttrain.rollout import frozen_models
from posttrain.stage import components as components_lib
from posttrain.stage import job, learner, logbook, profiles, progress, selection
from posttrain.stage import models as stage_models
from posttrain.stage import pairs as stage_pairs
from posttrain.training import token_export
from posttrain.util import preemption, watchdog


def make(
  components: components_lib.Components,
  workdir: str,
  position: int,
  stop: preemption.Signal,
  profile: range | None = None,
  goodput: writers.Goodput | None = None,
  report: logbook.Report | None = None,
) -> job.Job:
  """Builds a stage and restores its newest checkpoint, if it has one.

  Args:
    components: the stage's components, from `preflight.check`.
    workdir: the run's folder.
    position: end of metrics.jsonl for a stage without a checkpoint.
    stop: ends waits for servers.
    profile: the steps to trace; None = none.
    goodput: the run's; None = a new one.
    report: writes the report of the run while it goes on; None = no report.

  Raises:
    ValueError: weights, references or pairs are missing or do not fit.
    EndpointError: a server is away.
    Preempted: `stop` ended the wait for it.
  """
  cfg, name = components.cfg, components.name
  clock, compiling = watchdog.Timers(), compilation.CompileCounter().open()
  with clock('setup'):
    # 1. The learner's shapes, its newest checkpoint, the initial weights.
    spec = learner.make_spec(
      cfg, name, components.model, components.mesh, components.data.env_names
    )
    checkpointer = _checkpointer(components, workdir)
    state, host = checkpointer.restore(spec.state_like) or (None, {})
    metadata = processes.on(0, lambda: _metadata(components, workdir, host))
    _warn_of_devices(name, host.get('devices'), metadata['devices'])
    models = _models(components, workdir, host, metadata, spec, stop, clock)
    # 2. The other models, and the pipeline that samples and scores with them.
    engine, references = stage_models.engine(components), models.references()
    make_pipeline = PIPELINES[components.stage.kind]
    pipeline = make_pipeline(models, engine, references, host.get('pipeline'))
    # 3. The learner, from the restored state or a fresh one.
    if state is None:
      state = spec.fresh(models.load.init, models.base)
    trained = spec.learner(state, models.base)
    # 4. The evaluation of its weights.
    driver = stage_models.driver(components, engine)
    evaluator = evaluation.Evaluator(
      components.eval_tasks,
      driver,
      references,
      stage_models.measures(components, engine, models.reward_model),
    )
    held_out = learner.held_out(trained, pipeline.held_out)
    selecting = learner.held_out(trained, pipeline.selecting, 'select')
  step, position = host.get('step', 0), host.get('metrics_position', position)
  sampling = job.Sampling(
    pipeline, engine, references, evaluator, held_out, selecting
  )
  log = logbook.make(
    cfg, name, workdir, clock, compiling, step, position, goodput, report
  )
  saves = job.Saves(checkpointer, cfg.checkpoint.every, metadata)
  traced = profiles.remaining(name, profile, step, components.stage.steps)
  return job.Job(
    name=name,
    cfg=components.stage,
    step=step,
    learner=trained,
    sampling=sampling,
    exporter=_exporter(components, workdir),
    logbook=log,
    profiler=profiles.make(workdir, name, traced),
    saves=saves,
    selection=selection.make(name, components.stage.eval, host),
  )


def _token_pipeline(
  models: stage_models.Models,
  engine: engines.Engine,
  references: frozen_models.References,
  state: dict[str, Any] | None,
) -> base.Pipeline:
  data = models.components.data
  assert isinstance(data, tokens.TokenData), data
  if state is not None:
    data.set_state(state)  # refuses other tasks before any model is loaded
  pipeline = models.token_pipeline(data, engine, references)
  if state is not None:
    pipeline.set_state(state)
  return pipeline


def _pair_pipeline(
  models: stage_models.Models,
  engine: engines.Engine,
  references: frozen_models.References,
  state: dict[str, Any] | None,
) -> base.Pipeline:
  del engine, references  # its models are released before the stage trains
  data = models.components.data
  assert isinstance(data, pairs.PairData), data
  pipeline = stage_pairs.pipeline(models, data, fresh=state is None)
  if state is not None:
    pipeline.set_state(state)
  return pipeline


PIPELINES = {
  'tokens': _token_pipeline,
  'preference': _pair_pipeline,
  'ranking': _pair_pipeline,
}


def _metadata(
  components: components_lib.Components, workdir: str, host: dict[str, Any]
) -> dict[str, Any]:
  """Returns the self-description of the stage's checkpoints.

  A restored stage keeps the weights that it began with: `start` and
  `references` are those of its checkpoint.
  """
  data = components.data
  fingerprint = components.renderer.fingerprint
  if host:
    rendering.check_fingerprint(
      fingerprint,
      host['tokenizer'],
      'config.tokenizer',
      'the checkpoint to go on from',
    )
  start, pinned = host.get('start'), host.get('references')
  if start is None:
    start = _resolve(components, components.stage.init, workdir)
  if pinned is None:
    pinned = {
      x: _resolve(components, x, workdir)
      for x in (*data.references, *data.reward_models)
      if isinstance(x, str)
    }
  return {
    'stage': components.name,
    'model': dataclasses.asdict(components.model),
    'tokenizer': fingerprint,
    'config': components.outside.options,
    'start': start,
    'references': pinned,
    'devices': {
      **{axis: int(n) for axis, n in components.mesh.shape.items()},
      'processes': processes.count(),
    },
  }


def _warn_of_devices(
  name: str, before: dict[str, int] | None, now: dict[str, int]
) -> None:
  """Warns of a stage that continues on other devices."""
  if before is None or before == now:
    return
  old, new = (
    ', '.join(f'{k} {v}' for k, v in x.items()) for x in (before, now)
  )
  logging.getLogger('absl').warning(
    'stage %s continues on other devices (%s; before: %s): its numbers agree '
    'with those of the former up to rounding, not bit by bit',
    name,
    new,
    old,
  )


def _resolve(
  components: components_lib.Components, name: str, workdir: str
) -> str:
  """Returns the folder of a reference, or of an `init`."""
  folder = components.outside.resolve(name, workdir)
  kind, _, stage = name.partition(':')
  if kind == 'stage':
    progress.check_end(components.cfg, stage, workdir)
  return folder


def _models(
  components: components_lib.Components,
  workdir: str,
  host: dict[str, Any],
  metadata: dict[str, Any],
  spec: learner.LearnerSpec,
  stop: preemption.Signal,
  clock: watchdog.Timers,
) -> stage_models.Models:
  """Returns the stage's models; adds the frozen weights' sums to `metadata`."""
  load = components.outside.loader(
    components.cfg.seed,
    workdir,
    {**metadata['references'], 'init': metadata['start']},
    spec.weights_like,
    components.model,
    components.renderer,
    components.mesh,
  )
  frozen = spec.base(load.init)
  if frozen is not None:
    metadata['base'] = load.base_sums(frozen.params)
    if host:
      folder = os.path.join(_folder(components, workdir), str(host['step']))
      load.check_base(folder, frozen.params)
  return stage_models.Models(components, load, frozen, stop, clock)


def _checkpointer(
  components: components_lib.Components, workdir: str
) -> store.Checkpointer:
  folder = _folder(components, workdir)
  return store.Checkpointer(folder, components.cfg.checkpoint)


def _folder(components: components_lib.Components, workdir: str) -> str:
  return os.path.join(workdir, 'checkpoints', components.name)


def _exporter(
  components: components_lib.Components, workdir: str
) -> token_export.Exporter:
  names = components.data.env_names
  return token_export.Exporter(
    components.cfg.metrics.export_tokens if names else None,
    workdir,
    components.name,
    components.model,
    names,
    components.mesh,
  )
