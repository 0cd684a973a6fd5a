"""Every union of option types against the dict of its implementations."""

import dataclasses
import inspect
import typing

import pytest

from posttrain import algorithms, pipeline, schema
from posttrain.algorithms import length
from posttrain.envs import registry, sql
from posttrain.losses import preference, ref_kl, rl
from posttrain.rollout import samplers
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


@pytest.mark.parametrize(
  'registry', [objectives.TYPES, pipeline.DATA, build.PIPELINES]
)
def test_every_registry_of_stage_kinds_has_all_of_them(registry):
  assert set(schema.KINDS) == set(registry)


# Functions of arrays, and the option classes with the same keywords.
FUNCTIONS = {
  'ref_kl': (ref_kl.loss, schema.RefKl),
  'ranking': (preference.ranking, schema.Ranking),
  **{
    f'{name} {options.type}': (REGISTRIES[name][1][options.type], options)
    for name in ('rl losses', 'preference losses')
    for options in typing.get_args(REGISTRIES[name][0])
  },
}


def _option_defaults(options: type) -> dict[str, object]:
  return {field.name: field.default for field in dataclasses.fields(options)}


def _keyword_defaults(function) -> dict[str, object]:
  parameters = inspect.signature(function).parameters.values()
  return {
    parameter.name: parameter.default
    for parameter in parameters
    if parameter.kind is parameter.KEYWORD_ONLY
    and parameter.default is not parameter.empty
  }


@pytest.mark.parametrize('name', FUNCTIONS)
def test_keyword_defaults_equal_option_defaults(name):
  function, options = FUNCTIONS[name]
  keywords, fields = _keyword_defaults(function), _option_defaults(options)
  shared = keywords.keys() & fields.keys()
  assert {x: keywords[x] for x in shared} == {x: fields[x] for x in shared}
  assert shared == keywords.keys() - {'margins'}  # of each pair, no option


def test_rl_keyword_defaults_equal_those_of_the_default_type():
  keywords = _keyword_defaults(rl.denominator) | _option_defaults(rl.Options)
  del keywords['constants']
  fields = _option_defaults(type(schema.Loss().rl))
  assert keywords == {name: fields[name] for name in keywords}
