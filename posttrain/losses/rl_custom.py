"""The `custom` type of the rl component: a user's function, shapes checked."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from posttrain.losses import combine, ratios, rl_types

_NAME = "config.<stage>.loss.rl.import_path's function"


def custom(
  inputs: rl_types.Inputs,
  ratio: ratios.Ratio,
  *,
  function: Callable[..., Any],
  kwargs: Mapping[str, Any],
) -> rl_types.Result:
  """Returns the loss per token that `function(inputs, **kwargs)` computes.

      def importance(inputs, scale):
        ratio = jnp.exp(inputs.logprobs - inputs.sampler_logprobs)
        return -scale * inputs.advantages * ratio, {'ratio': ratio}

  As for every type, the loss is multiplied by the weights and divided by the
  global count afterwards: the function must neither sum nor average. Its
  inputs are not clamped; they are 0 at non-members, where its outputs are
  dropped.

  Args:
    inputs: see `rl_types.Inputs`; a row may hold several sequences, with
      different `segment_ids`.
    ratio: policy over sampler; only `member` is read.
    function: made of jax operations, as it is traced once per compilation.
    kwargs: the function's keyword arguments.

  Returns:
    The loss per token, and the means over the members of the function's
    metrics.

  Raises:
    ValueError: the function returns neither a loss per token nor a pair of a
      loss and a dict of metrics per token.
  """
  outputs = function(inputs, **kwargs)
  values, metrics = outputs if isinstance(outputs, tuple) else (outputs, {})
  shape = inputs.logprobs.shape
  _require_tokens(values, shape, 'a loss')
  if not isinstance(metrics, Mapping):
    raise ValueError(
      f'{_NAME} must return its metrics as a dict of arrays: got '
      f'{type(metrics).__name__}'
    )
  for name, value in metrics.items():
    _require_tokens(value, shape, f'a metric {name!r}')
  dtype = jnp.promote_types(values.dtype, jnp.float32)
  values = jnp.where(ratio.member, values.astype(dtype), 0.0)
  return values, {
    name: combine.pair(value, ratio.member) for name, value in metrics.items()
  }


def _require_tokens(value, shape: tuple[int, ...], what: str) -> None:
  is_array = isinstance(value, jax.Array)
  if not is_array or value.shape != shape:
    got = f'shape {value.shape}' if is_array else type(value).__name__
    raise ValueError(
      f'{_NAME} must return {what} per token: got {got}, expected shape '
      f'{shape}; do not sum or average, weights and denominators are '
      'applied to what it returns'
    )
