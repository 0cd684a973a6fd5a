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

TYPES = {
    schema.Arithmetic: arithmetic.Arithmetic,
    schema.ReverseText: reverse_text.ReverseText,
    schema.AlphabetSort: alphabet_sort.AlphabetSort,
    schema.Gsm8k: gsm8k.Gsm8k,
    schema.Rows: rows.Rows,
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
