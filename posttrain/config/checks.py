"""Checks of whole runs: options that do not fit together, and trust.

`check` refuses what could not run, would end long after it began, or would
mislead: `problems` yields each with the dotted key, the requirement and the
value. What one node knows is checked by the schema.

`check_trust` refuses names in a config that reach beyond the run's own data. A
config can name any function, servers that get the samples, environment
variables whose values are sent to them, addresses in place of local paths, and
a folder of compiled programs. A recipe (FILE.py) is code, and the user wrote
the overrides: they may name all. A `.json` config and the options in a
checkpoint may come from elsewhere: of them, only functions of `OWN` and those
that this process has handed over (`imports.path`) are taken without
--trust_config.
"""

import dataclasses
import inspect
import re
import sys
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from posttrain import algorithms, schema
from posttrain.schema import bounds
from posttrain.util import errors, imports

Problem = tuple[str, str, Any]  # dotted key, requirement, value
# Names that metrics have in the place of an environment's.
_TAKEN = ('pairs', 'suite')
# Environments whose scores may add metrics of any name.
_OPEN = (schema.OpenEnv, schema.Trl, schema.Verifiers, schema.CustomEnv)
# Measures of environments, and metrics of pairs, that have a best value.
_BEST = re.compile(
  r'(sampled_)?(pass_rate|format_rate|reward)([_/].+)?|(pass|maj)@\d+'
  r'|nll|token_accuracy|operational|progress|answered|derived'
)
_BEST_OF_PAIRS = ['eval/pairs/rewards/accuracies', 'eval/pairs/rewards/margins']
# Modules whose public functions are made to be named by a config.
OWN = ('posttrain.envs.sql.functions.', 'posttrain.rewards.', 'configs.')
# Annotations of fields whose values need trust, see `schema.bounds`.
_TRUSTED = ('server', 'variable', 'compiled')
_ADDRESS = re.compile(r'[A-Za-z][\w+.-]*://\S*')


def check(run: schema.Run) -> None:
  """Refuses impossible combinations of options.

  Raises:
    ValueError: one line with the dotted key.
  """
  for key, must, got in problems(run):
    raise ValueError(f'config.{key} must {must}: got {errors.quote(got)}')


def problems(run: schema.Run) -> Iterator[Problem]:
  """Yields the problems of the stages, in order."""
  earlier: dict[str, str] = {}  # name -> kind of the stages before this one
  selected: list[tuple[schema.Env, str, schema.Eval]] = []  # env, stage, eval
  for name, stage in run.stages.items():
    # Names that cannot be part of metric and file names.
    names = {name: name}
    for env, entry in stage.envs.items():
      names[f'{name}.envs.{env}'] = env
      names |= {f'{name}.envs.{env}.rewards.{x}': x for x in entry.rewards}
    for key, text in names.items():
      if not re.fullmatch(r'[A-Za-z0-9_-]+', text) or text in _TAKEN:
        must = f'be named with letters, digits, _ and -, and not as {_TAKEN}'
        yield key, must, text
    # What the updates need.
    updates = stage.steps * stage.updates_per_rollout
    if stage.optim.warmup_steps >= updates:
      must = f"be < the stage's {updates} updates"
      yield f'{name}.optim.warmup_steps', must, stage.optim.warmup_steps
    if stage.rollout.sleep and stage.rollout.max_lag:  # the cache is in use
      must = f'be False with max_lag={stage.rollout.max_lag}'
      yield f'{name}.rollout.sleep', must, True
    for key in ('hold_tokens', 'max_hold', 'keep_cache'):
      got = getattr(stage.rollout, key)
      if not stage.rollout.in_flight and got != getattr(schema.Rollout, key):
        yield f'{name}.rollout.{key}', 'be left out without in_flight', got
    if stage.lora.rank and (stage.init == 'random' or stage.kind == 'ranking'):
      must = "be 0 where init is 'random' or kind is 'ranking'"
      yield f'{name}.lora.rank', must, stage.lora.rank
    if not stage.lora.rank and stage.lora.base != 'float':
      yield f'{name}.lora.base', "be 'float' with rank=0", stage.lora.base
    # A critic, and what learns from it.
    kind = stage.critic.kind
    valued = [
      f'{name}.envs.{env}.algorithm'
      for env, entry in stage.envs.items()
      if stage.kind == 'tokens'
      and entry.ratio
      and algorithms.kind(
        entry.algorithm, f'config.{name}.envs.{env}.algorithm'
      ).needs_critic()
    ]
    if bool(valued) != (kind != 'none'):
      must = "be 'none' without an environment of algorithm ppo"
      must = f"be 'head' or 'model' for {valued[0]}" if valued else must
      yield f'{name}.critic.kind', must, kind
    if kind == 'model' and stage.lora.rank:
      yield f'{name}.critic.kind', "be 'head' with lora.rank > 0", kind
    if stage.critic.warmup_steps >= updates:
      must = f"be < the stage's {updates} updates"
      yield f'{name}.critic.warmup_steps', must, stage.critic.warmup_steps
    # References to earlier stages, of a reward model or of a policy.
    for key, text, reach in texts(stage, name):
      if reach == 'folder' and text.startswith('stage:'):
        is_reward = re.search(r'\.rewards\.[^.]+\.model$', key) is not None
        known = [x for x in earlier if (earlier[x] == 'ranking') == is_reward]
        if text.removeprefix('stage:') not in known:
          what = 'reward model' if is_reward else 'policy'
          must = f'be an earlier stage of a {what}, one of {known}, or a path'
          yield key, must, text
    # Environments, functions and sources of pairs.
    for env, entry in stage.envs.items():
      if stage.kind == 'tokens':
        yield from _entry(f'{name}.envs.{env}', entry, stage)
    yield from _functions(name, stage)
    is_made = isinstance(stage.pairs, schema.MadePairs)
    if stage.kind != 'tokens' and is_made and not stage.has_tasks:
      must = 'hold an environment with a ratio > 0'
      yield f'{name}.envs', must, sorted(stage.envs)
    # An `eval.best` that no evaluation of the stage measures would end the run
    # where its stage begins, after all earlier stages.
    best = stage.eval.best
    if stage.eval.selects_pairs:
      ok = stage.kind != 'tokens' and best in _BEST_OF_PAIRS
    else:
      measure, env = stage.eval.selects or ('', '')
      ok = stage.kind != 'ranking' and env in stage.envs
      ok = ok and bool(
        _BEST.fullmatch(measure) or isinstance(stage.envs[env].env, _OPEN)
      )
    if best is not None and not ok:
      known = [f'eval/pass_rate/{x}' for x in stage.envs] or _BEST_OF_PAIRS
      must = f'be a measure of the stage with a best value, as one of {known}'
      yield f'{name}.eval.best', must, best
    # Environments with equal options have the same evaluation tasks, in an
    # equal order: the first `eval.prompts` are reported, those after them
    # select, and no later stage may report those.
    for env, where, by in selected:
      shares = any(entry.env == env for entry in stage.envs.values())
      first = by.skip + by.prompts
      again = shares and stage.eval.reports(first, by.best_prompts)
      if stage.kind != 'ranking' and again:
        must = f'be at most {first - stage.eval.skip}: {where}.eval.best '
        must += f'selects on the next {by.best_prompts} tasks'
        yield f'{name}.eval.prompts', must, stage.eval.prompts
    if stage.eval.selects is not None:
      env = stage.envs[stage.eval.selects[1]].env
      selected.append((env, name, stage.eval))
    earlier[name] = stage.kind


def texts(
  node: Any, path: str, reach: str = ''
) -> Iterator[tuple[str, str, str]]:
  """Yields dotted key, text and `bounds.reach` of texts; not of defaults."""
  if dataclasses.is_dataclass(node):
    hints = typing.get_type_hints(type(node), include_extras=True)
    for field in dataclasses.fields(node):
      value, hint = getattr(node, field.name), hints[field.name]
      if typing.get_origin(hint) is tuple:
        hint = typing.get_args(hint)[0]
      if value != field.default:
        yield from texts(value, f'{path}.{field.name}', bounds.reach(hint))
  if isinstance(node, dict | list | tuple):
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in items:
      yield from texts(value, f'{path}.{key}', reach)
  if isinstance(node, str):
    yield path, node, reach


def _entry(
  path: str, entry: schema.EnvEntry, stage: schema.Stage
) -> Iterator[Problem]:
  """Yields problems of an environment to train on."""
  sampler, algorithm = entry.sampler, entry.algorithm
  kind = algorithms.kind(algorithm, f'config.{path}.algorithm')
  # Cross-entropy imitates other models; the rest need the policy's logprobs.
  fitting = ('dataset', 'frozen') if kind.component == 'ce' else ('policy',)
  if sampler.type not in fitting:
    must = f'be one of {fitting} for algorithm {algorithm.type!r}'
    yield f'{path}.sampler.type', must, sampler.type
  # A curriculum learns from grades, a replay is corrected by the rl loss; held
  # groups are drawn again on a resume, from the present pass rates.
  for key, ok, must in (
    ('curriculum', sampler.type != 'dataset', 'with a dataset sampler'),
    ('replay', kind.component == 'rl', 'without an algorithm on rewards'),
  ):
    node = getattr(entry, key)
    if node is not None and (stage.rollout.in_flight or not ok):
      must = f'be None with rollout.in_flight, and {must}'
      yield f'{path}.{key}', must, node.type
  row = stage.batch.row_tokens
  if isinstance(sampler, schema.Dataset):
    if entry.group_size != 1:
      must = 'be 1 with a dataset sampler'
      yield f'{path}.group_size', must, entry.group_size
  elif sampler.max_tokens >= row:
    must = f'be below batch.row_tokens={row}, which holds the prompt too'
    yield f'{path}.sampler.max_tokens', must, sampler.max_tokens
  if not (kind.only_rewards and entry.ratio):
    return
  # Without a baseline, or with a KL, one rollout has a gradient.
  has_baseline = kind.group_relative and getattr(algorithm, 'baseline', True)
  needs_group = has_baseline and not getattr(algorithm, 'kl_beta', 0)
  if needs_group and entry.group_size < 2:
    must = f'be > 1, such as 8, for algorithm {algorithm.type!r}'
    yield f'{path}.group_size', must, entry.group_size
  if isinstance(entry.env, schema.Rows) and not entry.rewards:
    must = 'have an entry, as in grpo:DIR,PROMPTS.jsonl,MODULE:FUNCTION'
    yield f'{path}.rewards', must, {}


def _functions(name: str, stage: schema.Stage) -> Iterator[Problem]:
  """Yields the user's functions that do not take their kwargs."""
  nodes: dict[str, Any] = {f'{name}.loss.rl': stage.loss.rl}
  for env, entry in stage.envs.items():
    path = f'{name}.envs.{env}'
    nodes |= {
      f'{path}.env': entry.env,
      f'{path}.algorithm': entry.algorithm,
      f'{path}.algorithm.filter': getattr(entry.algorithm, 'filter', None),
      **{f'{path}.rewards.{k}': x for k, x in entry.rewards.items()},
    }
  for path, node in nodes.items():
    for field in ('import_path', 'fn', 'demonstration'):
      function, key = getattr(node, field, None), f'{path}.{field}'
      if ':' not in (function or ''):
        continue
      signature = inspect.signature(imports.function(function, f'config.{key}'))
      kwargs = dict(getattr(node, 'kwargs', {}))
      if getattr(node, 'judge', None) is not None:
        kwargs['judge'] = node.judge
      try:
        signature.bind_partial(**kwargs)
      except TypeError as error:
        yield key, f'take its kwargs ({error})', f'{function}{signature}'


# --- trust -------------------------------------------------------------------


def check_trust(
  run: schema.Run,
  where: str,
  overrides: Sequence[tuple[str, str]] = (),
  trust: bool = False,
) -> None:
  """Refuses names in a foreign config that the user does not trust.

  Args:
    run: the options, overrides included; no function of them is imported yet.
    where: the file or checkpoint that they are from.
    overrides: (dotted key, text) of the user, whose names are trusted.
    trust: whether the user trusts all of it; it is printed to stderr.

  Raises:
    ValueError: lists the keys and texts that need trust.
  """
  items = [
    f'{key} {errors.quote(text)}'
    for key, text in untrusted(run).items()
    if text not in imports.HANDED_OVER
    and not any(text in value for _, value in overrides)
  ]
  if not items:
    return
  lines = errors.text(', '.join(items), 1000)
  if not trust:
    raise ValueError(
      f'--trust_config must be given to use what {where} names: got {lines}'
    )
  print(f'trusted, as named by {where}: {lines}', file=sys.stderr)


def untrusted(run: schema.Run) -> dict[str, str]:
  """Returns dotted key -> text of all that needs trust."""
  names = {}
  for key, text, reach in texts(run, 'config'):
    # A public function of ours.
    is_plain = re.fullmatch(r'\w+(\.\w+)*:[^\W_]\w*', text) is not None
    is_own = is_plain and text.replace(':', '.').startswith(OWN)
    is_own |= ':' not in text
    needs = not is_own if reach == 'function' else reach in _TRUSTED
    if text and (needs or _ADDRESS.fullmatch(text)):
      names[key.replace('config.stages.', 'config.')] = text
  return names
