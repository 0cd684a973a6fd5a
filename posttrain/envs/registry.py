"""The environments by `type` of their options, and how they are made.

A user's environment (`custom`) is a class by import path:

    class Echo(base.Env):
      max_turns = 1

      def __init__(self, name: str, **kwargs): ...
      def source(self, split, seed) -> base.Source: ...
      def make(self, task) -> base.Episode: ...

    --config.sft.envs='{"mine": {"env":
      {"type": "custom", "import_path": "mine:Echo", "kwargs": {}}}}'

The class is called as `Echo(name, **kwargs)`, where `name` is the
environment's name in the config. One that does not inherit from `base.Env` gets
its defaults for the optional attributes that it lacks.
"""

from collections.abc import Mapping

from posttrain import schema
from posttrain.envs import (
  arithmetic,
  base,
  countdown,
  gsm8k,
  rows,
  sql,
  text_games,
  wordle,
)
from posttrain.envs.adapters import (
  openenv,
  reasoning_gym_env,
  trl_env,
  verifiers_v1,
)
from posttrain.util import errors, imports


def custom(name: str, cfg: schema.CustomEnv) -> base.Env:
  """Builds the environment that `cfg.import_path` names.

  Args:
    name: the environment's name in the config.
    cfg: its options.

  Raises:
    ValueError: there is no such class, or its instance is no `base.Env`.
  """
  key = f'envs.{name}.env.import_path'
  env_class = imports.function(cfg.import_path, key)

  def fill() -> base.Env:
    env = env_class(name, **cfg.kwargs)
    for field in ('votes', 'blocking', 'judge'):
      if not hasattr(env, field):
        setattr(env, field, getattr(base.Env, field))
    return env

  env = base.build(key, fill)
  fields = ('name', 'max_turns', 'source', 'make')
  values = {field: getattr(env, field, None) for field in fields}
  turns = values['max_turns']
  fits = values['name'] == name and type(turns) is int and turns >= 1
  if not fits or None in values.values():
    raise ValueError(
      f'{key} must name a class with name={name!r}, max_turns >= 1, source and '
      f'make, see posttrain.envs.base.Env: got {errors.quote(values)}'
    )
  return env


# By `type` of the options.
TYPES = {
  'arithmetic': arithmetic.Arithmetic,
  'reverse_text': text_games.ReverseText,
  'alphabet_sort': text_games.AlphabetSort,
  'countdown': countdown.Countdown,
  'wordle': wordle.Wordle,
  'gsm8k': gsm8k.Gsm8k,
  'rows': rows.Rows,
  'sql': sql.Sql,
  'openenv': openenv.OpenEnv,
  'trl': trl_env.Trl,
  'verifiers': verifiers_v1.Verifiers,
  'reasoning_gym': reasoning_gym_env.ReasoningGym,
  'custom': custom,
}


def make(name: str, cfg: schema.Env) -> base.Env:
  """Builds the environment of `envs.<name>.env`.

  Args:
    name: the environment's name in the config; tasks and errors carry it.
    cfg: its options.

  Raises:
    ValueError: the options do not fit each other or the environment's files.
  """
  return TYPES[cfg.type](name, cfg)


def make_all(entries: Mapping[str, schema.EnvEntry]) -> dict[str, base.Env]:
  """Builds all environments of a stage, by name; see `make`."""
  return {name: make(name, entry.env) for name, entry in entries.items()}
