"""Every union of option types against the dict of its implementations."""

import typing

import pytest

from posttrain import algorithms, pipeline, schema
from posttrain.algorithms import length
from posttrain.envs import registry, sql
from posttrain.losses import preference, rl
from posttrain.rollout import samplers
from posttrain.schema import architecture, objective, run, signals, tasks
from posttrain.stage import build
from posttrain.training import objectives

# Union of option classes, dict of implementations.
REGISTRIES = {
  'algorithms': (schema.Algorithm, algorithms.TYPES),
  'environments': (schema.Env, registry.TYPES),
  'data of sql': (schema.SqlData, sql.DATA),
  'samplers': (schema.Sampler, samplers.TYPES),
  'length penalties': (schema.LengthPenalty, length.TYPES),
  'rl losses': (schema.RlLoss, rl.TYPES),
  'preference losses': (schema.PreferenceLoss, preference.TYPES),
}


@pytest.mark.parametrize('name', REGISTRIES)
def test_union_types_equal_implementation_keys(name):
  union, implementations = REGISTRIES[name]
  types = [options.type for options in typing.get_args(union)]
  assert len(set(types)) == len(types)
  assert set(types) == set(implementations)


def test_the_modules_of_options_share_no_name():
  modules = architecture, objective, run, signals, tasks
  names = [
    name
    for module in modules
    for name, value in vars(module).items()
    if getattr(value, '__module__', '') == module.__name__
  ]
  assert len(set(names)) == len(names) > 50


@pytest.mark.parametrize(
  'registry', [objectives.TYPES, pipeline.DATA, build.PIPELINES]
)
def test_every_registry_of_stage_kinds_has_all_of_them(registry):
  assert set(schema.KINDS) == set(registry)
