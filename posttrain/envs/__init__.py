"""Environments: where tasks come from, and what an answer is worth (np)."""

from typing import Any

from posttrain import schema
from posttrain.envs import (
  alphabet_sort,
  arithmetic,
  base,
  gsm8k,
  reverse_text,
  rows,
)
from posttrain.envs.adapters import openenv, trl_env, verifiers_v1
from posttrain.envs.sql import env as sql

TYPES = {
  schema.Arithmetic: arithmetic.Arithmetic,
  schema.ReverseText: reverse_text.ReverseText,
  schema.AlphabetSort: alphabet_sort.AlphabetSort,
  schema.Gsm8k: gsm8k.Gsm8k,
  schema.Rows: rows.Rows,
  schema.Sql: sql.Sql,
  schema.OpenEnv: openenv.OpenEnv,
  schema.Trl: trl_env.Trl,
  schema.Verifiers: verifiers_v1.Verifiers,
}


def make(name: str, cfg: Any) -> base.Env:
  """Makes the environment of `envs.<name>.env`.

  Args:
    name: what the config calls it; tasks and errors carry it.
    cfg: a node of `posttrain.schema.envs`.

  Raises:
    ValueError: the environment cannot have what the options ask for.
  """
  return TYPES[type(cfg)](name, cfg)
