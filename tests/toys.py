"""A toy environment and all that a pipeline needs to play it."""

from posttrain import algorithms, main, schema, scoring, types
from posttrain.data import sources
from posttrain.decode import engines
from posttrain.envs import base, registry
from posttrain.pipeline import environments
from posttrain.pipeline import tokens as token_pipeline
from posttrain.rollout import (
  endpoints,
  env_calls,
  episodes,
  frozen_models,
  samplers,
)
from posttrain.stage import logbook
from posttrain.util import preemption
from tests import fixtures

ROW_TOKENS = 32


class Letters(base.Env):
  """Asks for an answer that begins with an ASCII character, or does not.

  Random weights get about half of it right; what to do is in the prompt,
  whose length differs from task to task.
  """

  max_turns = 1
  prompts = ('yes', 'no', 'yes, and more of it', 'no, and none of it')

  def __init__(self, name, cfg):
    self.name, self._cfg = name, cfg

  def source(self, split, seed):
    return sources.Shuffled(
      [
        types.Task(
          prompt,
          self.name,
          ({'role': 'user', 'content': prompt},),
          answer=prompt[0] == 'y',
        )
        for prompt in self.prompts
      ],
      seed,
    )

  def make(self, task):
    return base.OneTurn(task, lambda text, _: self.grade(task, text))

  def grade(self, task, text):
    correct = text[:1].isascii() == task.answer
    return types.Score(float(correct), correct, formatted=len(text) > 2)


def install(monkeypatch, env=Letters):
  """Puts it where the config says 'arithmetic'."""
  monkeypatch.setitem(registry.TYPES, 'arithmetic', env)


def entry(group_size=4, max_tokens=6, ratio=1.0, temperature=1.0, **grpo):
  return schema.EnvEntry(
    algorithm=schema.Grpo(**grpo),
    group_size=group_size,
    ratio=ratio,
    sampler=schema.Policy(temperature=temperature, max_tokens=max_tokens),
  )


def stage(prompts=4, envs=None, **options):
  return schema.Stage(
    envs=envs or {'toy': entry()},
    batch=schema.Batch(
      prompts_per_step=prompts,
      row_tokens=ROW_TOKENS,
      micro_batch_tokens=4 * ROW_TOKENS,
    ),
    rollout=options.pop('rollout', schema.Rollout(slots=8, prefill_rows=4)),
    **options,
  )


def run(stages, **options):
  """Of the tiny model; no file but its own is written."""
  options = {'model': schema.PRESETS['tiny'], **options}
  return schema.Run(
    compilation_cache=None,
    stages=stages,
    metrics=schema.Metrics(progress=False),
    **options,
  )


def command(config, workdir, *flags):
  """Returns the exit code of a run by the command line."""
  return main.main(
    [
      f'--config={config}',
      f'--workdir={workdir}',
      '--config.compilation_cache=None',
      '--config.metrics.progress=False',
      *flags,
    ]
  )


def stop_at(monkeypatch, last, stage=None):
  """Asks the next run to stop at a step, of one stage or of any."""
  write, signal, stopper = logbook.Logbook.write, preemption.Signal, []

  def stop(self, step, *args):
    if step == last and stage in (None, self.stage):
      stopper[0].requested = True
    return write(self, step, *args)

  monkeypatch.setattr(logbook.Logbook, 'write', stop)
  monkeypatch.setattr(
    preemption, 'Signal', lambda *_: stopper.append(signal()) or stopper[0]
  )


def params(seed=0):
  """Of the tiny model, made to end some of its turns early."""
  made = fixtures.params(seed=seed)
  table = made['embed']['table']
  eos = fixtures.RENDERER.tokenizer.eos_id
  made['embed']['table'] = table.at[eos].multiply(4)
  return made


def engine(capacity=ROW_TOKENS, mesh=None, width=32):
  options = engines.Options(
    slots=8, capacity=capacity, prefill_rows=4, prefill_tokens=width
  )
  return engines.Engine(fixtures.MODEL, options, mesh)


class Driver(episodes.Driver):
  """Remembers what it played."""

  def play(self, specs, *args):
    self.specs, self.rollouts = specs, (yield from super().play(specs, *args))
    return self.rollouts


def pipeline_and_driver(
  cfg, weights=None, init=None, seed=3, mesh=None, judge=None, frozen=None
):
  """Returns a pipeline and its driver, whose engine samples by `weights`.

  `frozen` plays as the model 'stage:a': a driver, or True for the same one.
  """
  weights = params() if weights is None else weights
  player = engine(mesh=mesh)
  player.set_params(weights, 5)
  driver = Driver(player, fixtures.RENDERER, ROW_TOKENS)
  refs = frozen_models.References(
    fixtures.MODEL,
    fixtures.RENDERER,
    lambda model, width: scoring.Scorer(model, 4, width, mesh),
    capacity=ROW_TOKENS,
    load=lambda name: frozen_models.Model(init, fixtures.MODEL),
    client=lambda *args: endpoints.Endpoint(*args[:2], vocab_size=args[2]),
  )
  refs.set_policy({'policy': weights})
  players = {'policy': driver}
  if frozen is not None:
    players['stage:a'] = driver if frozen is True else frozen
  data = token_pipeline.TokenData(
    cfg, registry.make_all(cfg.envs), fixtures.RENDERER, seed, index=1
  )
  return token_pipeline.TokenPipeline(data, players, refs.start, judge), driver


def environment(entry, row_tokens, name='toy'):
  """Returns an environment of a stage, with its sampler and algorithm."""
  env = registry.make(name, entry.env)
  return environments.Environment(
    name,
    entry,
    env,
    env_calls.Source(env, 'train', 0, 60.0),
    samplers.TYPES[entry.sampler.type](
      entry.sampler, env, fixtures.RENDERER, row_tokens
    ),
    algorithms.make(entry.algorithm),
  )
