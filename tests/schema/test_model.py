"""Bounds and types of a model's options, from any source."""

import dataclasses

import pytest

from posttrain import schema, tree
from posttrain.models import transformer

NAN, INF, DIGITS = float('nan'), float('inf'), 10**400


@pytest.mark.parametrize(
  'options, field',
  [
    ({'layers': 10**9}, 'layers'),
    ({'layers': True}, 'layers'),
    ({'vocab_size': 10**12}, 'vocab_size'),
    ({'heads': 0}, 'heads'),
    ({'head_dim': 2**30}, 'head_dim'),
    ({'embed_dim': 2.5}, 'embed_dim'),
    ({'mlp_dim': '64'}, 'mlp_dim'),
    # Each within its bound, but not their product.
    ({'layers': 10_000, 'embed_dim': 2**20, 'mlp_dim': 2**20}, 'layers'),
    ({'norm_eps': NAN}, 'norm_eps'),
    ({'rope_theta': INF}, 'rope_theta'),
    ({'query_scale': 1e300}, 'query_scale'),
    ({'logit_softcap': -30.0}, 'logit_softcap'),
    ({'window': DIGITS, 'local_layers': (0,)}, 'window'),
    ({'local_layers': (0, 10**9), 'window': 4}, 'local_layers'),
    ({'dtype': ['float32']}, 'dtype'),
    ({'tied_head': 'false'}, 'tied_head'),
    ({'rope_scaling': {'factor': 2}}, 'rope_scaling'),
  ],
)
def test_impossible_options_are_refused_by_name(options, field):
  with pytest.raises(schema.FieldError, match=f'^{field} must ') as error:
    schema.Model(**options)
  assert len(str(error.value)) < 500


@pytest.mark.parametrize(
  'options',
  [
    {'factor': 1e300},
    {'kind': 'llama3', 'original_length': 10**30},
    {'kind': 'llama3', 'high_frequency': INF},
    {'original_length': 1.5},
  ],
)
def test_absurd_scalings_are_refused_by_name(options):
  *_, field = options
  with pytest.raises(schema.FieldError, match=f'^{field} must '):
    schema.RopeScaling(**options)


@pytest.mark.parametrize(
  'preset',
  [
    # Ten of its blocks are traced, which takes seconds.
    pytest.param(x, marks=pytest.mark.slow) if x.shared_kv_layers else x
    for x in schema.PRESETS.values()
  ],
)
def test_matrix_parameters_are_those_of_the_matrices(preset):
  cfg = dataclasses.replace(preset, vocab_size=99, tied_head=False)
  leaves = tree.flat(transformer.shapes(cfg))
  kinds = 'kernel', 'table'
  sizes = [x.size for path, x in leaves.items() if path.endswith(kinds)]
  assert cfg.matrix_parameters == sum(sizes)


@pytest.mark.parametrize(
  'values, message',
  [
    ([], 'model must be an object'),
    ({'colour': 1}, "model must .*'colour'"),
    ({'rope_scaling': {'x': 1}}, "model must .*'x'"),
    ({'local_layers': 5}, 'local_layers must .*5'),
    ({'norm_eps': None}, 'norm_eps must be of type float'),
  ],
)
def test_options_of_a_checkpoint_are_checked(values, message):
  with pytest.raises(schema.FieldError, match=message):
    schema.Model.from_json(values)


def test_options_survive_json():
  cfg = schema.Model(local_layers=(0, 2), window=3, norm_eps=1e-5)
  values = dataclasses.asdict(cfg) | {'local_layers': [0, 2]}
  assert schema.Model.from_json(values) == cfg
