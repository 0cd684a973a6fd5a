"""The components of a stage before it runs, and the models built from them.

`preflight` builds and checks `Components`: nothing is compiled for them, and no
weights are read. The run then trains on the same objects. The models, beside
the one that trains:

engine        decodes with the policy's weights, for training and evaluation
references    score samples, under the policy, its copies, or frozen models
players       one engine per frozen model that plays episodes
judges        one engine, or server, per model that grades
reward model  one per name
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

import posttrain
from posttrain import processes, schema, scoring, sharding, types
from posttrain.chat import rendering
from posttrain.decode import engines
from posttrain.evaluation import evaluator, measures
from posttrain.models import lora, transformer
from posttrain.pipeline import batches, tokens
from posttrain.rollout import calls, env_calls, episodes, frozen_models, grading
from posttrain.stage import learner
from posttrain.util import preemption, watchdog


@dataclasses.dataclass(frozen=True)
class Outside:
  """What a stage gets from files and servers, see `preflight`.

  Attributes:
    options: the run's options as plain data, for checkpoints.
    resolve: (name, workdir) -> the folder of a reference or an `init`.
    loader: returns the models of the folders that the stage's references and
      `init` name; its arguments are those of `preflight.Loader`.
    connect: (endpoint, caller, number of tokens) -> the client of a server.
    player: (client, caller, seed) -> an engine that samples from a server.
    samplers: the processes that decode with the policy; None = this one does.
    engine_client: (samplers, init_info, engine, renderer) -> their client.
  """

  options: dict[str, Any]
  resolve: Callable[[str, str], str]
  loader: Callable[..., Any]
  connect: Callable[[schema.Endpoint, str, int], Any]
  player: Callable[[Any, str, int], Any]
  samplers: types.Samplers | None
  engine_client: Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Resolved:
  """A run's options with nothing left open, from `preflight.resolve`."""

  cfg: schema.Run  # each stage with its model, vocabulary and sizes
  options: dict[str, Any]  # as they were given, as plain data
  renderer: rendering.Renderer
  mesh: jax.sharding.Mesh  # an AbstractMesh in a plan for other devices
  sampler_mesh: jax.sharding.Mesh  # the same, unless config.mesh.sampler is set
  platform: str  # 'cpu', 'gpu' or 'tpu'
  hosts: int  # number of processes, one per host
  samplers: types.Samplers | None  # as in `Outside`


@dataclasses.dataclass(frozen=True)
class Components:
  """A stage before anything is compiled or restored."""

  cfg: schema.Run  # the resolved options
  name: str
  stage: schema.Stage  # those of the stage
  renderer: rendering.Renderer
  model: schema.Model  # with its vocabulary
  mesh: jax.sharding.Mesh  # an AbstractMesh in a plan for other devices
  # Of the models that sample and score: the same, unless mesh.sampler is set.
  sampler_mesh: jax.sharding.Mesh
  data: batches.StageData
  eval_tasks: evaluator.EvalTasks
  capacity: int  # tokens of the longest sequence to decode or score
  spec: learner.LearnerSpec
  plan: Any  # a `plan.Plan`
  slots: int  # of this process
  workers: env_calls.Workers | None  # worker processes; None = threads
  outside: Outside

  @property
  def score_rows(self) -> int:
    """Rows that a model scores at a time, as many per device as train."""
    meshes, axes = (self.mesh, self.sampler_mesh), sharding.ROW_AXES
    own, sampler = (sharding.batch_ways(mesh, axes) for mesh in meshes)
    return self.stage.batch.rows // own * sampler


def make_engine(
  components: Components, model: schema.Model | None = None
) -> engines.Engine:
  """Builds a decode engine of the stage's sizes, without weights.

  Each process of a run has its share of the slots, on its own devices.

  Args:
    components: the stage's components.
    model: options of the model; None = the policy's.
  """
  mesh = sharding.local_mesh(components.sampler_mesh)
  model = model or components.model
  return engines.Engine(model, _engine_options(components), mesh)


def _engine_options(components: Components) -> engines.Options:
  rollout, load = components.stage.rollout, components.plan.load
  return engines.Options(
    slots=components.slots,
    capacity=components.plan.slot_tokens,
    chunk=rollout.chunk,
    prefill_rows=rollout.prefill_rows,
    prefill_tokens=rollout.prefill_tokens,
    prefix_cache=rollout.prefix_cache,
    cache_dtype=rollout.cache_dtype,
    group_size=load.group_size,
    prompt_tokens=load.prompt_tokens,
    seed=components.cfg.seed,
  )


def make_driver(
  components: Components, decoder: Any, max_length: int = 0
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


def make_measures(
  components: Components,
  decoder: engines.Engine,
  reward_model: Callable[[str], grading.Model] | None = None,
  judge: Callable[[schema.Reference], grading.Judge] | None = None,
) -> measures.Measures:
  """Builds the measures of a stage's held-out tasks beside their grade."""
  return measures.Measures(
    measures.functions(components.stage.envs, reward_model, judge),
    functools.partial(decoder.score, reads='logprobs_and_top'),
    components.renderer,
  )


@dataclasses.dataclass(frozen=True)
class Models:
  """Builds the models of one stage, each where it is first needed."""

  components: Components
  load: Any  # from `Outside.loader`, onto the sampler's devices
  frozen: lora.Base | None  # with LoRA, on the learner's devices
  stop: preemption.Signal  # ends waits for servers
  clock: watchdog.Timers = dataclasses.field(default_factory=watchdog.Timers)

  def make_references(self) -> frozen_models.References:
    """Returns the references of the stage, none of which is loaded yet."""
    components = self.components
    rows, mesh = components.score_rows, components.sampler_mesh
    references = frozen_models.References(
      components.model,
      components.renderer,
      lambda model, width: scoring.Scorer(
        model, rows, width, mesh, trees=bool(components.stage.batch.trees)
      ),
      capacity=components.capacity,
      load=self.load,
      held=None if self.base is None else {'init': self.base.params},
      client=components.outside.connect,
    )
    self.stop.on_request(references.close)
    return references

  def to_sampler(self, weights: Any) -> Any:
    """Returns arrays on the sampler's devices: a copy, unless they are shared.

    Args:
      weights: arrays on the learner's devices, with paths of a model.
    """
    if self.components.cfg.mesh.sampler is None:
      return weights
    rules, mesh = transformer.SHARDING_RULES, self.components.sampler_mesh
    return jax.block_until_ready(sharding.move(weights, rules, mesh))

  def to_learner(self, weights: Any) -> Any:
    """Returns what trains on the learner's devices, where states are saved.

    It launches no program on the sampler's devices, which may be at work.
    """
    rules, mesh = transformer.SHARDING_RULES, self.components.mesh
    return jax.device_put(weights, sharding.shardings(weights, rules, mesh))

  def policies(self, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Returns whole models from trained weights on the sampler's devices."""
    return {name: lora.whole(x, self.base) for name, x in weights.items()}

  @functools.cached_property
  def base(self) -> lora.Base | None:
    """`frozen`, on the sampler's devices."""
    return self.to_sampler(self.frozen)

  # Those that training and evaluation share.
  references = functools.cached_property(make_references)

  def make_decoder(self) -> Any:
    """Builds the engine of the policy: in this process, or in samplers."""
    components, engine = self.components, make_engine(self.components)
    outside = components.outside
    if outside.samplers is None:
      return engine
    options = components.stage.lora
    info = {
      'posttrain': posttrain.__version__,
      'model': dataclasses.asdict(components.model),
      'engine': dataclasses.asdict(_engine_options(components)),
      'tensor': components.sampler_mesh.shape['tensor'],
      'scale': lora.scale(options) if options.rank else 1.0,
      'factors': lora.keeps_factors(options),
    }
    client = outside.engine_client(
      outside.samplers, info, engine, components.renderer
    )
    self.stop.on_request(client.close)
    return client

  def connect(self, tries: int = 1000) -> None:
    """Connects to the servers that the stage names.

    Args:
      tries: the most attempts at a request.

    Raises:
      ValueError: a server has another model, or other tokens, or refuses.
      EndpointError: a server is away.
      Preempted: `stop` ended the wait for it.
    """
    for model, key in self.components.data.references.items():
      if isinstance(model, schema.Endpoint):
        brief = dataclasses.replace(model, tries=min(model.tries, tries))
        try:
          processes.together(
            functools.partial(self.references.endpoint, brief, key)
          )
        except calls.EndpointError as error:
          self.stop.check(f'{key}, before its stage')
          if error.status:
            raise ValueError(str(error)) from error
          raise

  def token_pipeline(
    self, decoder: engines.Engine, state: dict[str, Any] | None
  ) -> tokens.TokenPipeline:
    """Builds the pipeline of a stage on tokens, with all models it needs.

    Args:
      decoder: the policy's engine.
      state: the restored pipeline's; None = the stage begins.

    Raises:
      ValueError: a model is not the one that the stage began with, or has
        other tokens.
      EndpointError: a server is away.
      Preempted: `stop` ended the wait for it.
    """
    components, stage = self.components, self.components.stage
    data = components.data
    assert isinstance(data, tokens.TokenData), data
    self.connect()
    decoders: dict[Any, Any] = {x: self._player(x) for x in data.players}
    decoders['policy'] = decoder
    players = {
      model: make_driver(components, one, stage.batch.row_tokens)
      for model, one in decoders.items()
    }
    pipeline = tokens.TokenPipeline(
      data,
      players,
      self.references.start,
      self.judge,
      self.reward_model,
      components.workers,
      self.clock,
    )
    if state is not None:
      pipeline.set_state(state)
    return pipeline

  def _player(self, model: schema.Reference):
    """Builds an engine that plays episodes with a frozen model."""
    components = self.components
    if isinstance(model, schema.Endpoint):
      names = [
        name
        for name, entry in components.stage.envs.items()
        if getattr(entry.sampler, 'model', None) == model
      ]
      return components.outside.player(
        self.references.endpoint(model),
        f'environment {", ".join(names)}',
        components.cfg.seed,
      )
    frozen = self.references.model(model)
    decoder = make_engine(components, frozen.cfg)
    decoder.set_params(frozen.params, -1)
    return decoder

  def make_scorer(self, model: schema.Model) -> scoring.Scorer:
    """Builds the scorer of a reward model."""
    components = self.components
    return scoring.Scorer(
      model,
      components.score_rows,
      components.capacity,
      components.sampler_mesh,
      reads='rewards',
      trees=bool(components.stage.batch.trees),
    )

  @functools.cached_property
  def reward_model(self) -> Callable[[str], grading.Model]:
    """A function from a name to its reward model, each loaded once.

    It stays on the devices while the stage lasts.
    """

    @functools.cache
    def load(name: str) -> grading.Model:
      model = self.load.reward_model(name, self.make_scorer)

      def score(rollouts: Sequence[types.Rollout]) -> grading.Result:
        with self.clock('scoring'):
          return model(rollouts)

      return score

    return load

  @functools.cached_property
  def judge(self) -> Callable[[schema.Reference], grading.Judge]:
    """A function from a model to its judge, each built once."""
    return functools.cache(self._judge)

  def _judge(self, model: schema.Reference) -> grading.Judge:
    """Builds a judge with an engine of its own: others decode meanwhile."""
    components = self.components
    if isinstance(model, schema.Endpoint):
      key = components.data.references[model]
      return functools.partial(self.references.endpoint(model).chat, caller=key)
    frozen = self.references.model(model)
    # Of any length: a judge's prompts are longer than the samples that train.
    options = engines.Options(
      slots=components.slots,
      seed=components.cfg.seed,
      prefix_cache=components.stage.rollout.prefix_cache,
    )
    mesh = sharding.local_mesh(components.sampler_mesh)
    decoder = engines.Engine(frozen.cfg, options, mesh)
    decoder.set_params(frozen.params, -1)
    return grading.LocalJudge(decoder, components.renderer)
