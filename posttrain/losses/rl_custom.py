"""The `custom` type of the rl component: a user's function, held to shapes."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from posttrain.losses import combine, ratio, rl_types

_NAME = "config.<stage>.loss.rl.import_path's function"


def custom(
  inputs: rl_types.Inputs,
  at: ratio.Moved,
  *,
  function: Callable[..., Any],
  kwargs: Mapping[str, Any],
) -> rl_types.Result:
  """Calls `function(inputs, **kwargs)`, which returns a loss per token.

      def importance(inputs, scale):
        ratio = jnp.exp(inputs.logprobs - inputs.sampler_logprobs)
        return -scale * inputs.advantages * ratio, {'ratio': ratio}

  Its loss is multiplied by the weights and divided by the global count
  afterwards, as that of every type: it must neither sum nor average. Nothing
  is clamped for it; non-members come as zeros, and what it makes of them is
  dropped.

  Args:
    inputs: see `rl_types.Inputs`; a row may hold several sequences, told
      apart by `segment_ids`.
    at: read for membership alone.
    function: traced once per compilation, so of jax operations.
    kwargs: its other arguments.

  Returns:
    The loss per token, and the means over the members of the metrics that it
    returned.

  Raises:
    ValueError: what it returns is neither a loss per token nor a pair of it
      and a dict of metrics per token.
  """
  found = function(inputs, **kwargs)
  values, named = found if isinstance(found, tuple) else (found, {})
  shape = inputs.logprobs.shape
  _require_tokens(values, shape, 'a loss')
  if not isinstance(named, Mapping):
    raise ValueError(
      f'{_NAME} must return its metrics as a dict of arrays: got '
      f'{type(named).__name__}'
    )
  for name, value in named.items():
    _require_tokens(value, shape, f'a metric {name!r}')
  dtype = jnp.promote_types(values.dtype, jnp.float32)
  values = jnp.where(at.member, values.astype(dtype), 0.0)
  return values, {
    name: combine.pair(value, at.member) for name, value in named.items()
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
