"""Checks of `eval.best`: that it is measured, has a best value, stays apart.

A name that no evaluation measures would end the run where its stage begins,
after all earlier stages have trained.
"""

import re
from collections.abc import Mapping

from posttrain import schema
from posttrain.config import env_checks
from posttrain.envs import registry
from posttrain.util import spelling

# Measures of all environments that cannot select, and their reason: the best
# value is unknown, or that of a policy that has learned or answered nothing.
_NO_BEST = {
  'entropy': 'no value of which is the best',
  'length': 'no value of which is the best',
  'stop': 'no value of which is the best',
  'kl': 'which is smallest at the start of the stage',
  'errors': 'which are those of the environment',
  'truncated': 'which is smallest where answers are empty',
  # Of tasks with tools.
  'malformed': 'which is smallest where no tool is called',
  'failures': 'which is smallest where no tool is called',
  'calls': 'no value of which is the best',
}
# Measures of graded answers, and of demonstrations where none is graded.
_GRADED = ('pass_rate', 'format_rate', 'reward')
_DEMONSTRATED = ('nll', 'token_accuracy')
_EVERY = (*_GRADED, *_DEMONSTRATED, *(f'sampled_{x}' for x in _GRADED))
# Metrics that the scores of the SQL environment add, that rise.
_SQL = ('operational', 'progress', 'answered')
_PAIRS = ('rewards/accuracies', 'rewards/margins')
# Environments whose scores may add metrics of any name.
_OPEN = (schema.OpenEnv, schema.Trl, schema.Verifiers, schema.CustomEnv)


def check(stage: schema.Stage, path: str) -> None:
  """Checks that a stage measures the metric of `eval.best`.

  Args:
    stage: the stage's options.
    path: the stage's dotted key.

  Raises:
    ValueError: it does not, or no value of the metric is the best.
  """
  best, has_pairs = stage.eval.best, stage.kind != 'tokens'
  if stage.eval.selects is None:
    env_checks.unread(
      stage.eval, 'best_prompts', f'{path}.eval', f'best is {best!r}'
    )
  names = () if stage.kind == 'ranking' else tuple(stage.envs)
  if (stage.eval.selects_pairs and not has_pairs) or (
    stage.eval.selects is not None and stage.eval.selects[1] not in names
  ):
    pairs = ', or of eval/pairs' if has_pairs else ''
    raise ValueError(
      f'{path}.eval.best must be a metric of one of the environments {names}'
      f'{pairs}: got {best!r}'
    )
  if why := _unmeasured(stage):
    raise ValueError(
      f'{path}.eval.best must be a measure that can select: got {best!r}, {why}'
    )


def check_apart(stages: Mapping[str, schema.Stage]) -> None:
  """Refuses stages that report the tasks on which an earlier one selects.

  Environments with equal options have the same evaluation tasks, in an equal
  order: the first `eval.prompts` are reported, and those after them select.

  Args:
    stages: name -> options, in the order of the run.

  Raises:
    ValueError: names both keys.
  """
  names = list(stages)
  for index, name in enumerate(names):
    selects = stages[name].eval.selects
    if selects is None:
      continue
    env = stages[name].envs[selects[1]].env
    reported = stages[name].eval.prompts
    for later in names[index + 1 :]:
      stage = stages[later]
      shared = [x for x, entry in stage.envs.items() if entry.env == env]
      if not shared or stage.kind == 'ranking':  # which plays no tasks
        continue
      if stage.eval.prompts > reported:
        raise ValueError(
          f'config.{later}.eval.prompts must be at most '
          f'config.{name}.eval.prompts={reported}: got {stage.eval.prompts}, '
          f'but config.{name}.eval.best selects on the tasks of environment '
          f'{shared[0]!r} after those; set both to the same number'
        )


def _unmeasured(stage: schema.Stage) -> str:
  """Returns why `eval.best` cannot select, '' if it can."""
  cfg = stage.eval
  if cfg.selects_pairs:
    return _unmeasured_pairs(stage)
  if cfg.selects is None:
    return ''
  name, env = cfg.selects
  entry = stage.envs[env]
  kind, _, function = name.partition('/')
  if kind in ('reward', 'sampled_reward') and function:
    return _unmeasured_reward(entry, function) or _unsampled(name, cfg)
  if why := _NO_BEST.get(name.partition('/')[0]):
    return why
  if why := _unsampled(name, cfg):
    return why
  known = _known(entry.env, cfg)
  if name in known:
    return ''
  near = spelling.near(name, known)
  if near:
    return f'expected eval/{near[0]}/{env}'
  is_standard = name in _EVERY or re.match(r'(pass|maj)@', name)
  if isinstance(entry.env, _OPEN) and not is_standard:
    return ''
  return f'expected one of {known} of environment {env!r}'


def _unsampled(name: str, cfg: schema.Eval) -> str:
  """Returns which option of evaluation keeps a measure out, '' for none."""
  match = re.fullmatch(r'(pass|maj)@(.*)', name)
  if match and cfg.samples < 2:
    return f'but eval.samples is {cfg.samples}; set it to 2 or more'
  if match and match[2] not in map(str, (*cfg.ks, cfg.samples)):
    return f'but eval.ks is {cfg.ks} and eval.samples {cfg.samples}'
  if name.startswith('sampled_') and not cfg.samples:
    return 'but eval.samples is 0'
  return ''


def _known(env: schema.Env, cfg: schema.Eval) -> tuple[str, ...]:
  """Returns the measures of an environment that can select."""
  if isinstance(env, schema.Rows):
    return _DEMONSTRATED
  graded = _GRADED
  if isinstance(env, schema.OpenEnv | schema.Trl | schema.Verifiers):
    graded = ('reward',) if env.correct_at is None else ('pass_rate', 'reward')
  known = [*graded]
  if cfg.samples:
    known += [f'sampled_{x}' for x in graded]
  if cfg.samples > 1 and 'pass_rate' in graded:
    votes = isinstance(env, schema.CustomEnv) or registry.TYPES[env.type].votes
    kinds = ('pass', 'maj') if votes else ('pass',)
    known += [f'{x}@{k}' for x in kinds for k in (*cfg.ks, cfg.samples)]
  if isinstance(env, schema.CustomEnv):
    known += _DEMONSTRATED
  if isinstance(env, schema.Sql):
    known += [*_SQL, *(f'pass_rate_{x}' for x in env.difficulties)]
  return tuple(dict.fromkeys(known))


def _unmeasured_pairs(stage: schema.Stage) -> str:
  """Returns why a metric of held-out pairs cannot select, '' if it can."""
  name = str(stage.eval.best).removeprefix('eval/pairs/')
  if name.startswith('loss/'):
    return 'whose largest value is the worst'
  if name not in _PAIRS:
    return f'expected one of {tuple(f"eval/pairs/{x}" for x in _PAIRS)}'
  held_out = (
    getattr(stage.pairs, x, None) for x in ('eval_prompts', 'eval_path')
  )
  if not (stage.pairs.eval_fraction or any(held_out)):
    return 'but pairs.eval_fraction holds no pairs out'
  return ''


def _unmeasured_reward(entry: schema.EnvEntry, name: str) -> str:
  """Returns why evaluations do not measure a reward function, '' if they do."""
  function = entry.rewards.get(name)
  if function is None:
    return f"but the environment's rewards are {tuple(entry.rewards)}"
  if function.judge is not None or function.fn is None:
    return 'and evaluations measure reward functions without a model alone'
  return ''
