"""Assembly of a stage, top to bottom, restored to the step where it stopped.

`make` builds in the order of need: each object gets everything it needs in its
constructor. Engines get weights, and references models, when they are used.
In this file kinds of stages differ only in their pipeline, see `PIPELINES`.
"""

import contextlib
import dataclasses
import logging
import os
import sys
from typing import Any

from posttrain import compilation, processes, schema, sharding
from posttrain.chat import rendering
from posttrain.checkpoints import store
from posttrain.decode import engines
from posttrain.evaluation import evaluator
from posttrain.models import transformer
from posttrain.pipeline import ahead, batches
from posttrain.stage import job, learner, logbook, models, pairs, resume
from posttrain.training import token_export
from posttrain.util import preemption, watchdog

# Kind -> the pipeline, from (models, engine, restored state).
PIPELINES = {
  'tokens': models.Models.token_pipeline,
  'preference': pairs.pipeline,
  'ranking': pairs.pipeline,
}


def make(
  components: models.Components,
  workdir: str,
  position: int,
  stop: preemption.Signal,
  profile: range | None = None,
  shared: logbook.Shared | None = None,
) -> job.Job:
  """Builds a stage and restores its newest checkpoint, if it has one.

  Args:
    components: the stage's components, from `preflight.check`.
    workdir: the run's folder.
    position: end of metrics.jsonl for a stage without a checkpoint.
    stop: ends waits for servers.
    profile: the steps to trace; None = none.
    shared: what the stages of the run write together; None = a new one.

  Raises:
    ValueError: weights, references or pairs are missing or do not fit.
    EndpointError: a server is away.
    Preempted: `stop` ended the wait for it.
  """
  cfg, name, stage = components.cfg, components.name, components.stage
  env_names, mesh = components.data.env_names, components.mesh
  clock, compiling = watchdog.Timers(), compilation.CompileCounter().open()
  if stage.init != 'random' and cfg.metrics.progress and processes.is_first():
    print(f'stage {name}: reads the weights of {stage.init}', file=sys.stderr)
  with clock('setup'):
    # 1. The learner's shapes, and its newest checkpoint.
    spec = components.spec
    folder = os.path.join(workdir, 'checkpoints', name)
    checkpointer = store.Checkpointer(folder, cfg.checkpoint)
    max_lag = stage.rollout.max_lag if components.data.uses_policy else 0
    like = spec.stored_like(max_lag)
    state, host = checkpointer.restore(like) or (None, {})
    metadata = processes.on(0, lambda: _metadata(components, workdir, host))
    before, now = host.get('devices'), metadata['devices']
    if before not in (None, now):
      logging.getLogger('absl').warning(
        'stage %s continues on other devices (%s; before: %s): its numbers '
        'agree with those of the former up to rounding, not bit by bit',
        name,
        now,
        before,
      )
    # 2. The initial weights; frozen ones must be those that the run began with.
    load = components.outside.loader(
      cfg.seed,
      workdir,
      {**metadata['references'], 'init': metadata['start']},
      spec.weights_like,
      components.model,
      components.renderer,
      mesh,
    )
    frozen = spec.base(load.init)
    if frozen is not None:
      metadata['base'] = load.base_sums(frozen.params)
      if host:
        load.check_base(os.path.join(folder, str(host['step'])), frozen.params)
    # 3. The other models, and the pipeline that samples and scores with them.
    place = components.sampler_mesh
    rules = transformer.SHARDING_RULES
    like = sharding.placed(spec.weights_like, rules, place)
    own = models.Models(
      components,
      dataclasses.replace(load, like=like, mesh=place),
      frozen,
      stop,
      clock,
    )
    decoder, references = own.make_decoder(), own.references
    pipeline = PIPELINES[stage.kind](own, decoder, host.get('pipeline'))
    # 4. The learner, from the restored state or a fresh one.
    if state is None:
      state = spec.fresh(load.init, frozen)
    past = state.past or ()
    trained = spec.learner(dataclasses.replace(state, past=None), frozen)
    if pipeline.uses_policy:
      pipeline = _ahead(own, pipeline, decoder, host.get('step', 0))
      pipeline.restore(own.to_sampler(past), host.get('ahead', ()))
    # 5. The evaluation of its weights.
    sampling = job.Sampling(
      own,
      pipeline,
      decoder,
      references,
      evaluator.Evaluator(
        components.eval_tasks,
        models.make_driver(components, decoder),
        models.make_measures(
          components,
          decoder,
          own.reward_model,
          own.judge if env_names else None,
        ),
        references,
        {
          env: entry.algorithm.reference
          for env, entry in stage.envs.items()
          if stage.eval.teacher_kl and isinstance(entry.algorithm, schema.Opd)
        },
      ),
      learner.HeldOutPairs(trained, pipeline.held_out, 'eval'),
      learner.HeldOutPairs(trained, pipeline.selecting, 'select'),
    )
  step, position = host.get('step', 0), host.get('metrics_position', position)
  log = logbook.make(
    cfg, name, workdir, clock, compiling, step, position, shared
  )
  return job.Job(
    name=name,
    cfg=stage,
    step=step,
    learner=trained,
    sampling=sampling,
    exporter=token_export.Exporter(
      cfg.metrics.export_tokens if env_names else None,
      workdir,
      name,
      components.model,
      env_names,
      mesh,
    ),
    logbook=log,
    profiler=logbook.Profiler(
      workdir, name, logbook.traced(name, profile, step, stage.steps)
    ),
    saves=job.Saves(checkpointer, cfg.checkpoint.every, metadata),
    selection=resume.Selection(name, stage.eval, **host.get('best', {}))
    if stage.eval.best
    else None,
  )


def _ahead(
  own: models.Models,
  pipeline: batches.Pipeline,
  decoder: engines.Engine,
  step: int,
) -> ahead.Ahead:
  """Builds the pipeline that samples from a policy.

  Args:
    own: the models that score, judge or play.
    pipeline: makes the batches.
    decoder: the policy's engine.
    step: the last trained step.
  """
  components = own.components
  rollout, mesh = components.stage.rollout, components.mesh
  in_thread = components.plan.in_thread

  def use(weights: ahead.Weights, version: int) -> None:
    policies = own.policies(weights)
    decoder.set_params(policies['policy'], version)
    own.references.set_policy(policies)

  if rollout.max_lag and not (rollout.in_turns or in_thread):
    logging.getLogger('absl').warning(
      'stage %s samples and trains in turns, in spite of max_lag=%d: both use '
      'the same %d devices',
      components.name,
      rollout.max_lag,
      mesh.size,
    )
  return ahead.Ahead(
    pipeline,
    use,
    decoder.stop,
    own.references,
    cfg=rollout,
    steps=range(step + 1, components.stage.steps + 1),
    in_thread=in_thread,
    clock=own.clock,
  )


def try_servers(
  components: models.Components, workdir: str, stop: preemption.Signal
) -> None:
  """Connects once to the servers of a stage that has not begun.

  Raises:
    ValueError: a server has another model, or other tokens.
    EndpointError: a server is away.
    Preempted: `stop` ended the wait for it.
  """
  folder = os.path.join(workdir, 'checkpoints', components.name)
  if processes.on(0, lambda: not store.steps(folder)):
    own = models.Models(components, None, None, stop)
    with contextlib.closing(own.references):
      own.connect(tries=4)  # some 10 seconds


def _metadata(
  components: models.Components, workdir: str, host: dict[str, Any]
) -> dict[str, Any]:
  """Returns the self-description of the stage's checkpoints.

  A restored stage keeps the weights that it began with: `start` and
  `references` are those of its checkpoint.
  """
  data, fingerprint = components.data, components.renderer.fingerprint
  samplers = components.outside.samplers
  num_samplers = len(samplers.urls) if samplers else 0
  if host:
    rendering.check_fingerprint(
      fingerprint,
      host['tokenizer'],
      'config.tokenizer',
      'the checkpoint to go on from',
    )

  def resolve(name: str) -> str:
    folder = components.outside.resolve(name, workdir)
    if (stage := schema.stage_of(name)) is not None:
      resume.check_end(components.cfg, stage, workdir)
    return folder

  start, pinned = host.get('start'), host.get('references')
  own = components.cfg.mesh.sampler
  if start is None:
    start = resolve(components.stage.init)
  if pinned is None:
    names = (*data.references, *data.reward_models)
    pinned = {x: resolve(x) for x in names if isinstance(x, str)}
  return {
    'stage': components.name,
    'model': dataclasses.asdict(components.model),
    'tokenizer': fingerprint,
    'data': data.fingerprints(),
    'config': components.outside.options,
    'start': start,
    'references': pinned,
    'devices': {
      **{axis: int(n) for axis, n in components.mesh.shape.items()},
      'processes': processes.count(),
      # One sampler has the bits of none.
      **({'samplers': num_samplers} if num_samplers > 1 else {}),
      **({} if own is None else {'sampler': dataclasses.asdict(own)}),
    },
  }
