"""Values as annotations declare them, and the errors of others."""

from typing import Any

import pytest
from ml_collections import config_dict

from posttrain import schema
from posttrain.config import conversion


@pytest.mark.parametrize(
  ('value', 'kind', 'expected'),
  [
    (None, int | None, None),
    (3, float, 3.0),
    ({'a': 1}, dict[str, float], {'a': 1.0}),
    (config_dict.ConfigDict({'a': {'b': [1]}}), Any, {'a': {'b': [1]}}),
    ('gspo', schema.Clip | schema.Gspo, schema.Gspo()),
    (
      {'type': 'clip', 'low': 0.1},
      schema.Clip | schema.Gspo,
      schema.Clip(low=0.1),
    ),
  ],
)
def test_a_value_becomes_what_its_annotation_declares(value, kind, expected):
  converted = conversion.to_type(value, kind, 'config.x')
  assert converted == expected and type(converted) is type(expected)


@pytest.mark.parametrize(
  ('value', 'kind', 'message'),
  [
    (True, int, 'config.x must be of type int: got True'),
    (2**1024, float, 'config.x must be of type float'),
    ((1, 'b'), tuple[int, ...], r'config.x\[1\] must be of type int'),
    ({'a': 'b'}, dict[str, int], 'config.x.a must be of type int'),
    ({'lr': -1.0}, schema.Optim, 'config.x.lr must be > 0'),
    ('clipp', schema.Clip | schema.Gspo, 'config.x.type .* did you mean clip?'),
  ],
)
def test_another_value_is_refused_by_key(value, kind, message):
  with pytest.raises(ValueError, match=message):
    conversion.to_type(value, kind, 'config.x')


def test_an_unknown_key_comes_with_the_known_ones():
  with pytest.raises(ValueError, match="^config.x has no option 'rate'"):
    conversion.to_type({'rate': 1.0}, schema.Optim, 'config.x')


@pytest.mark.parametrize(
  ('text', 'value'),
  [('1e-4', 1e-4), ('true', True), ("('a',)", ('a',)), ('a b', 'a b')],
)
def test_literals_are_json_or_python_or_the_text(text, value):
  assert conversion.literal(text, 'config.x') == value
