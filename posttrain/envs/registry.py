"""The environments by `type` of their options, and how they are made."""

from collections.abc import Mapping

from posttrain import schema
from posttrain.envs import (
  alphabet_sort,
  arithmetic,
  base,
  custom,
  gsm8k,
  reverse_text,
  rows,
)
from posttrain.envs.adapters import openenv, trl_env, verifiers_v1
from posttrain.envs.sql import env

# By `type` of the options.
TYPES = {
  'arithmetic': arithmetic.Arithmetic,
  'reverse_text': reverse_text.ReverseText,
  'alphabet_sort': alphabet_sort.AlphabetSort,
  'gsm8k': gsm8k.Gsm8k,
  'rows': rows.Rows,
  'sql': env.Sql,
  'openenv': openenv.OpenEnv,
  'trl': trl_env.Trl,
  'verifiers': verifiers_v1.Verifiers,
  'custom': custom.make,
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
