"""Environments of the user: a class by import path.

    class Echo(base.Env):
      max_turns = 1

      def __init__(self, name: str, **kwargs): ...
      def source(self, split, seed) -> sources.Shuffled[types.Task]: ...
      def make(self, task) -> base.Episode: ...

    --config.sft.envs='{"mine": {"env":
      {"type": "custom", "import_path": "mine:Echo", "kwargs": {}}}}'

The class is called as `Echo(name, **kwargs)`, where `name` is the
environment's name in the config. One that does not inherit from `base.Env` gets
its defaults for the optional attributes that it lacks.
"""

from posttrain import schema
from posttrain.envs import base
from posttrain.util import errors, imports


def make(name: str, cfg: schema.CustomEnv) -> base.Env:
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
  required = ('name', 'max_turns', 'source', 'make')
  if missing := [x for x in required if not hasattr(env, x)]:
    raise ValueError(
      f'{key} must name a class with {", ".join(required)}: got '
      f'{cfg.import_path!r} without {", ".join(missing)}; see '
      'posttrain.envs.base.Env'
    )
  if env.name != name or type(env.max_turns) is not int or env.max_turns < 1:
    raise ValueError(
      f'{key} must name a class with name={name!r} and max_turns >= 1: got '
      f'name={errors.quote(env.name)} and '
      f'max_turns={errors.quote(env.max_turns)}'
    )
  return env
