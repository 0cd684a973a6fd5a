"""Checks that span several options of a run.

They refuse what could not run, or would end long after it began. Each error is
one line with the dotted key, the requirement, and the value given.
"""

import inspect
import re
import warnings
from collections.abc import Mapping
from typing import Any

from posttrain import algorithms, schema
from posttrain.envs import registry
from posttrain.util import errors, imports

# Names that metrics have in the place of an environment's.
_TAKEN = ('pairs', 'suite')
# Algorithms of rewards alone.
_NEED_REWARDS = (schema.Grpo, schema.MaxRl, schema.Rloo, schema.Reward)
# Measures that can select weights: of graded answers and of demonstrations, of
# the SQL environment, and of pairs.
_GRADED = ('pass_rate', 'format_rate', 'reward')
_DEMONSTRATED = ('nll', 'token_accuracy')
_SQL = ('operational', 'progress', 'answered')
_PAIRS = ('rewards/accuracies', 'rewards/margins')
# Environments whose scores may add metrics of any name.
_OPEN = (schema.OpenEnv, schema.Trl, schema.Verifiers, schema.CustomEnv)
# Measures of all environments that have no best value.
_NO_BEST = re.compile('(entropy|length|stop|kl|errors|truncated|calls)(/|$)')


def check(run: schema.Run) -> None:
  """Refuses impossible combinations of options.

  Raises:
    ValueError: one line with the dotted key.
  """
  earlier: dict[str, str] = {}  # name -> kind of the stages before this one
  for name, stage in run.stages.items():
    path = f'config.{name}'
    _check_name(name, path)
    _check_earlier(stage.init, earlier, f'{path}.init')
    _check_updates(stage, path)
    if stage.lora.rank and stage.init == 'random':
      raise ValueError(
        f"{path}.lora.rank must be 0 where init is 'random': got "
        f'{stage.lora.rank}; name a directory with weights, as in '
        '--config=RECIPE:DIR,data.jsonl'
      )
    if stage.lora.rank and stage.kind == 'ranking':
      raise ValueError(
        f"{path}.lora.rank must be 0 where kind is 'ranking': got "
        f'{stage.lora.rank}; the head of a reward model trains with the rest'
      )
    _check_best(stage, path)
    if stage.kind == 'tokens':
      for env, entry in stage.envs.items():
        _check_entry(entry, stage, earlier, f'{path}.envs.{env}')
    else:
      _check_pairs(stage, earlier, path)
    earlier[name] = stage.kind
  _check_apart(run.stages)


def check_makes_pairs(stage: schema.Stage, path: str) -> None:
  """Checks that a stage has an environment whose answers form pairs.

  Raises:
    ValueError: one line with the dotted key.
  """
  try:
    stage.require_envs()
  except schema.FieldError as error:
    raise ValueError(f'{path}.{error.field} {error.detail}') from None


def _check_updates(stage: schema.Stage, path: str) -> None:
  updates = stage.steps * stage.updates_per_rollout
  if stage.optim.warmup_steps >= updates:
    raise ValueError(
      f"{path}.optim.warmup_steps must be < the stage's {updates} "
      f'updates: got {stage.optim.warmup_steps}; lower it too'
    )
  rl, path = stage.loss.rl, f'{path}.loss.rl'
  if rl.sampler_is_mode != 'none' and stage.updates_per_rollout > 1:
    raise ValueError(
      f"{path}.sampler_is_mode must be 'none' where updates_per_rollout is "
      f'{stage.updates_per_rollout}: got {rl.sampler_is_mode!r}; after the '
      'first update the policy is no longer the one that sampled'
    )
  if isinstance(rl, schema.CustomRl):
    _check_takes('inputs', rl.import_path, rl.kwargs, f'{path}.import_path')


def _check_pairs(
  stage: schema.Stage, earlier: Mapping[str, str], path: str
) -> None:
  """Checks a stage on pairs."""
  if isinstance(stage.pairs, schema.MadePairs):
    check_makes_pairs(stage, path)
  for name, entry in stage.envs.items():
    _check_name(name, f'{path}.envs.{name}')
    _check_env(entry, f'{path}.envs.{name}')
  if stage.kind == 'preference':
    reference = getattr(stage.loss.preference, 'reference', None)
    _check_earlier(reference, earlier, f'{path}.loss.preference.reference')


def _check_entry(
  entry: schema.EnvEntry,
  stage: schema.Stage,
  earlier: Mapping[str, str],
  path: str,
) -> None:
  """Checks an environment's entry in a stage of kind 'tokens'."""
  _check_name(path.rpartition('.')[2], path)
  _check_env(entry, path)
  _check_sampler(entry, stage, path)
  algorithm = entry.algorithm
  kind = algorithms.TYPES[algorithm.type]
  has_baseline = kind.group_relative and getattr(algorithm, 'baseline', True)
  if has_baseline and entry.group_size < 2 and entry.ratio:
    message = (
      f'at least 2 for algorithm {algorithm.type!r}: got {entry.group_size}; a '
      "rollout's baseline is its group's mean reward"
    )
    if algorithm.type != 'echo' and not getattr(algorithm, 'kl_beta', 0):
      raise ValueError(f'{path}.group_size must be {message}')
    warnings.warn(f'{path}.group_size should be {message}', stacklevel=2)
  named = {
    'algorithm.reference': getattr(algorithm, 'reference', None),
    'sampler.model': getattr(entry.sampler, 'model', None),
    'judge': entry.judge,
    **{f'rewards.{k}.judge': x.judge for k, x in entry.rewards.items()},
  }
  for key, name in named.items():
    _check_earlier(name, earlier, f'{path}.{key}')
  for key, reward in entry.rewards.items():
    key = f'{path}.rewards.{key}'
    _check_name(key.rpartition('.')[2], key)
    _check_earlier(reward.model, earlier, f'{key}.model', 'ranking')
    if reward.fn is not None:
      judge = {} if reward.judge is None else {'judge': reward.judge}
      _check_reward(reward.fn, {**reward.kwargs, **judge}, f'{key}.fn')
  if (
    isinstance(entry.env, schema.Rows)
    and isinstance(algorithm, _NEED_REWARDS)
    and entry.ratio
    and not entry.rewards
  ):
    raise ValueError(
      f'{path}.rewards must have an entry: got none, and nothing else grades '
      "answers to rows; name a function after the recipe's name, as in "
      'grpo:DIR,PROMPTS.jsonl,rewards:short; in Python by `rewards` of api.load'
    )
  key = f'{path}.algorithm'
  if isinstance(algorithm, schema.Custom):
    _check_takes(
      'inputs', algorithm.import_path, algorithm.kwargs, f'{key}.import_path'
    )
  if isinstance(algorithm, schema.Echo) and algorithm.filter.import_path:
    _check_takes(
      'rollout',
      algorithm.filter.import_path,
      algorithm.filter.kwargs,
      f'{key}.filter.import_path',
    )
  if isinstance(algorithm, schema.Opsd) and ':' in algorithm.demonstration:
    _check_takes('task', algorithm.demonstration, {}, f'{key}.demonstration')


def _check_sampler(
  entry: schema.EnvEntry, stage: schema.Stage, path: str
) -> None:
  """Refuses samplers that the algorithm cannot learn from."""
  kind, name = entry.sampler.type, entry.algorithm.type
  imitates = algorithms.TYPES[name].component == 'ce'
  if imitates == (kind == 'policy'):
    raise ValueError(
      f'{path}.sampler.type must be '
      f'{"dataset or frozen" if imitates else "policy"!r} for algorithm '
      f"{name!r}: got {kind!r}; algorithm 'sft' imitates rollouts of other "
      "models, whose logprobs are not the policy's"
    )
  if kind == 'dataset':
    if entry.group_size != 1:
      raise ValueError(
        f'{path}.group_size must be 1 with a dataset sampler: got '
        f'{entry.group_size}; a data set has one demonstration per task'
      )
  elif entry.sampler.max_tokens >= stage.batch.row_tokens:
    raise ValueError(
      f'{path}.sampler.max_tokens must be below batch.row_tokens='
      f'{stage.batch.row_tokens}, which holds the prompt too: got '
      f'{entry.sampler.max_tokens}; raise row_tokens above both'
    )


def _check_env(entry: schema.EnvEntry, path: str) -> None:
  if isinstance(entry.env, schema.CustomEnv):
    _check_takes(
      'name', entry.env.import_path, entry.env.kwargs, f'{path}.env.import_path'
    )


def _check_takes(
  what: str, name: str, kwargs: dict[str, Any], key: str
) -> None:
  """Refuses a function that does not take one argument and its kwargs.

  Args:
    what: name of the argument, for the error.
    name: import path of the function.
    kwargs: its keyword arguments.
    key: dotted key of the import path.
  """
  signature = inspect.signature(imports.function(name, key))
  try:
    signature.bind(None, **kwargs)
  except TypeError as error:
    raise ValueError(
      f'{key} must be a function of ({what}, **kwargs): got {name}'
      f'{signature}, kwargs {errors.quote(kwargs)}; {error}'
    ) from None


def _check_reward(name: str, kwargs: dict[str, Any], key: str) -> None:
  """Refuses a reward function that does not take each of its kwargs."""
  parameters = inspect.signature(imports.function(name, key)).parameters
  wrong = sorted(kwargs.keys() - parameters.keys())
  if wrong and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
    raise ValueError(
      f'{key} must take its kwargs: got {wrong}, expected some of '
      f'{tuple(parameters)}'
    )


def _check_name(name: str, path: str) -> None:
  """Refuses names that cannot be part of metric and file names."""
  if not re.fullmatch(r'[A-Za-z0-9_-]+', name) or name in _TAKEN:
    raise ValueError(
      f'{path} must be named with letters, digits, _ and -, and not be one of '
      f'{_TAKEN}: metric names and file names are made of it'
    )


def _check_earlier(
  name: schema.Reference | None,
  earlier: Mapping[str, str],
  key: str,
  kind: str = '',
) -> None:
  """Refuses 'stage:NAME' unless it is an earlier stage of the right kind.

  Args:
    name: a reference; only 'stage:NAME' is checked.
    earlier: name -> kind of the stages before this one.
    key: dotted key of the reference.
    kind: 'ranking' for a reward model; '' = a stage that trains a policy.
  """
  target = name.removeprefix('stage:') if isinstance(name, str) else None
  if target is None or target == name:
    return
  fitting = [x for x in earlier if (earlier[x] == 'ranking') == bool(kind)]
  if target not in fitting:
    what = 'a reward model' if kind else 'a policy'
    raise ValueError(
      f'{key} must name an earlier stage that trains {what}, one of {fitting}, '
      f'or the path of a run: got {name!r}'
    )


# --- eval.best ---------------------------------------------------------------


def _check_best(stage: schema.Stage, path: str) -> None:
  """Checks that a stage measures the metric of `eval.best`.

  A name that no evaluation measures would end the run where its stage begins,
  after all earlier stages have trained.
  """
  best = stage.eval.best
  if best is None:
    return
  if stage.eval.selects_pairs:
    pairs = stage.pairs
    held_out = pairs.eval_fraction or any(
      getattr(pairs, x, None) for x in ('eval_prompts', 'eval_path')
    )
    has_some = stage.kind != 'tokens' and held_out
    known = [f'eval/pairs/{x}' for x in _PAIRS if has_some]
  else:
    envs = {} if stage.kind == 'ranking' else stage.envs
    assert stage.eval.selects is not None, 'checked by the schema'
    name, env = stage.eval.selects
    known = [
      f'eval/{measure}/{env}'
      for env, entry in envs.items()
      for measure in _measures(entry, stage.eval)
    ]
    is_open = env in envs and isinstance(envs[env].env, _OPEN)
    is_own = re.match(r'(sampled_)?\w+_rate|reward|pass@|maj@', name)
    if is_open and not is_own and not _NO_BEST.match(name):
      return
  if best not in known:
    raise ValueError(
      f'{path}.eval.best must be a measure that this stage takes and that has '
      f'a best value, one of {known}: got {best!r}'
      f'{errors.nearest(best, known)}'
    )


def _measures(entry: schema.EnvEntry, cfg: schema.Eval) -> list[str]:
  """Returns the measures of an environment that can select."""
  env = entry.env
  if isinstance(env, schema.Rows):
    known = [*_DEMONSTRATED]
  else:
    known = [*_GRADED]
    if isinstance(env, schema.OpenEnv | schema.Trl | schema.Verifiers):
      known = ['reward'] + ['pass_rate'] * (env.correct_at is not None)
    if cfg.samples > 1 and 'pass_rate' in known:
      is_custom = isinstance(env, schema.CustomEnv)
      votes = is_custom or registry.TYPES[env.type].votes
      kinds = ('pass', 'maj') if votes else ('pass',)
      known += [f'{x}@{k}' for x in kinds for k in (*cfg.ks, cfg.samples)]
    if isinstance(env, schema.CustomEnv):
      known += _DEMONSTRATED
    if isinstance(env, schema.Sql):
      known += [*_SQL, *(f'pass_rate_{x}' for x in env.difficulties)]
  known += [
    f'reward/{name}'
    for name, reward in entry.rewards.items()
    if reward.fn is not None and reward.judge is None
  ]
  if cfg.samples:
    known += [f'sampled_{x}' for x in known if x.startswith(_GRADED)]
  return known


def _check_apart(stages: Mapping[str, schema.Stage]) -> None:
  """Refuses stages that report the tasks on which an earlier one selects.

  Environments with equal options have the same evaluation tasks, in an equal
  order: the first `eval.prompts` are reported, and those after them select.
  """
  names = list(stages)
  for index, name in enumerate(names):
    selects, reported = stages[name].eval.selects, stages[name].eval.prompts
    if selects is None:
      continue
    env = stages[name].envs[selects[1]].env
    for later in names[index + 1 :]:
      stage = stages[later]
      shares = any(entry.env == env for entry in stage.envs.values())
      if stage.kind != 'ranking' and shares and stage.eval.prompts > reported:
        raise ValueError(
          f'config.{later}.eval.prompts must be at most '
          f'config.{name}.eval.prompts={reported}: got {stage.eval.prompts}, '
          f'but config.{name}.eval.best selects on the tasks after those'
        )
