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
from posttrain.util import foreign, imports

_REQUIRED = ('name', 'max_turns', 'source', 'make')
_OPTIONAL = ('votes', 'blocking', 'uses_judge', 'judge')


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
  missing = sorted(getattr(env_class, '__abstractmethods__', ()))
  env = None
  if not missing:
    env = base.build(key, lambda: env_class(name, **cfg.kwargs))
  missing = missing or [x for x in _REQUIRED if not hasattr(env, x)]
  if missing:
    raise ValueError(
      f'{key} must name a class with {", ".join(_REQUIRED)}: got '
      f'{cfg.import_path!r} without {", ".join(missing)}; see '
      'posttrain.envs.base.Env'
    )
  if env.name != name:
    raise ValueError(
      f'{key} must name a class that keeps its name: got '
      f'{foreign.quote(env.name)}, '
      f'expected {name!r}'
    )
  if type(env.max_turns) is not int or env.max_turns < 1:
    raise ValueError(
      f'{key} must name a class with max_turns >= 1: got '
      f'{foreign.quote(env.max_turns)}'
    )
  try:
    for field in _OPTIONAL:
      if not hasattr(env, field):
        setattr(env, field, getattr(base.Env, field))
  except AttributeError as error:  # a frozen dataclass, or slots
    raise ValueError(
      f'{key} must name a class with {", ".join(_OPTIONAL)}, or one whose '
      f'attributes can be set: got {cfg.import_path!r}; inherit from '
      'posttrain.envs.base.Env'
    ) from error
  return env
