"""The models of a stage, beside the one that trains.

engine        decodes with the policy's weights, for training and evaluation
references    score samples, under the policy, its copies, or frozen models
players       one engine per frozen model that plays episodes
judges        one engine, or server, per model that grades
reward models one per name
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from posttrain import processes, schema, scoring, sharding, types
from posttrain.decode import engines
from posttrain.evaluation import measures as measures_lib
from posttrain.models import lora
from posttrain.pipeline import tokens as token_pipeline
from posttrain.rollout import calls, episodes, frozen_models, grading
from posttrain.stage import components as components_lib
from posttrain.util import preemption, watchdog


def engine(
  components: components_lib.Components, model: schema.Model | None = None
) -> engines.Engine:
  """Builds a decode engine of the stage's sizes, without weights.

  Each process of a run has its share of the slots, on its own devices.

  Args:
    components: the stage's components.
    model: options of the model; None = the policy's.
  """
  rollout = components.stage.rollout
  return engines.Engine(
    model or components.model,
    slots=rollout.slot_count // processes.count(),
    capacity=components.plan.slot_tokens,
    chunk=rollout.chunk,
    prefill_rows=rollout.prefill_rows,
    prefill_tokens=rollout.prefill_tokens,
    seed=components.cfg.seed,
    mesh=sharding.local_mesh(components.mesh),
  )


def driver(
  components: components_lib.Components, decoder: Any, max_length: int = 0
) -> episodes.Driver:
  """Builds the driver that plays episodes through an engine.

  Args:
    components: the stage's components.
    decoder: an engine, or a server's.
    max_length: tokens of an episode; 0 = those of the longest one.
  """
  return episodes.Driver(
    decoder,
    components.renderer,
    max_length or components.capacity,
    components.stage.rollout,
    components.workers,
  )


def measures(
  components: components_lib.Components,
  decoder: engines.Engine,
  reward_model: Callable[[str], grading.Model] | None = None,
) -> measures_lib.Measures:
  """Builds the measures of a stage's held-out tasks beside their grade."""
  return measures_lib.Measures(
    measures_lib.functions(components.stage.envs, reward_model),
    functools.partial(decoder.score, reads='logprobs_and_top'),
    components.renderer,
  )


@dataclasses.dataclass(frozen=True)
class Models:
  """Builds the models of one stage, each where it is first needed."""

  components: components_lib.Components
  load: components_lib.Loader
  base: lora.Base | None  # the frozen weights, with LoRA
  stop: preemption.Signal  # ends waits for servers
  clock: watchdog.Timers = dataclasses.field(default_factory=watchdog.Timers)

  def references(self) -> frozen_models.References:
    """Returns the references of the stage, none of which is loaded yet."""
    components = self.components
    rows = components.stage.batch.rows
    references = frozen_models.References(
      components.model,
      components.renderer,
      lambda model, width: scoring.Scorer(model, rows, width, components.mesh),
      capacity=components.capacity,
      load=self.load,
      held=None if self.base is None else {'init': self.base.params},
      connect=components.outside.connect,
    )
    self.stop.on_request(references.close)
    return references

  def token_pipeline(
    self,
    data: token_pipeline.TokenData,
    decoder: engines.Engine,
    references: frozen_models.References,
  ) -> token_pipeline.TokenPipeline:
    """Builds the pipeline of a stage on tokens, with all models it needs.

    Args:
      data: the stage's data.
      decoder: the policy's engine.
      references: the stage's references.

    Raises:
      ValueError: a model is not the one that the stage began with, or has
        other tokens.
      EndpointError: a server is away.
      Preempted: `stop` ended the wait for it.
    """
    self._wait_for_endpoints(references)
    stage = self.components.stage
    decoders: dict[Any, Any] = {
      x: self._player(references, x) for x in data.players
    }
    decoders['policy'] = decoder
    players = {
      model: driver(self.components, one, stage.batch.row_tokens)
      for model, one in decoders.items()
    }
    return token_pipeline.TokenPipeline(
      data,
      players,
      references.start,
      functools.cache(functools.partial(self._judge, references)),
      self.reward_model,
      self.components.workers,
      self.clock,
    )

  def _wait_for_endpoints(self, references: frozen_models.References) -> None:
    """Connects to the servers now, so that a missing one is noticed."""
    for model, key in self.components.data.references.items():
      if isinstance(model, schema.Endpoint):
        try:
          processes.together(lambda m=model, k=key: references.endpoint(m, k))
        except calls.EndpointError:
          self.stop.check(f'{key}, before its stage')
          raise

  def _player(
    self, references: frozen_models.References, model: schema.Reference
  ):
    """Builds an engine that plays episodes with a frozen model."""
    if isinstance(model, schema.Endpoint):
      names = [
        name
        for name, entry in self.components.stage.envs.items()
        if getattr(entry.sampler, 'model', None) == model
      ]
      who = f'environment {", ".join(names)}'
      return self.components.outside.player(
        references.endpoint(model), who, self.components.cfg.seed
      )
    frozen = references.model(model)
    decoder = engine(self.components, frozen.cfg)
    decoder.set_params(frozen.params, -1)
    return decoder

  @functools.cached_property
  def reward_model(self) -> Callable[[str], grading.Model]:
    """A function from a name to its reward model, each loaded once."""
    return functools.cache(self._load_reward_model)

  def _load_reward_model(self, name: str) -> grading.Model:
    """Loads a reward model; it stays on the devices while the stage lasts."""
    components = self.components
    rows = components.stage.batch.rows
    model = self.load.reward_model(
      name,
      lambda model: scoring.Scorer(
        model, rows, components.capacity, components.mesh, reads='rewards'
      ),
    )

    def score(rollouts: Sequence[types.Rollout]) -> grading.Result:
      with self.clock('scoring'):
        return model(rollouts)

    return score

  def _judge(
    self, references: frozen_models.References, model: schema.Reference
  ) -> grading.Judge:
    """Builds a judge with an engine of its own: others decode meanwhile."""
    if isinstance(model, schema.Endpoint):
      key = self.components.data.references[model]
      return functools.partial(references.endpoint(model).chat, caller=key)
    frozen = references.model(model)
    # Of any length: a judge's prompts are longer than the samples that train.
    decoder = engines.Engine(
      frozen.cfg,
      slots=self.components.stage.rollout.slot_count // processes.count(),
      seed=self.components.cfg.seed,
      mesh=sharding.local_mesh(self.components.mesh),
    )
    decoder.set_params(frozen.params, -1)
    return grading.LocalJudge(decoder, self.components.renderer)
