"""Token exports: the batch of a step, token by token, as JSON lines.

WORKDIR/token_exports/<stage>_<step>.jsonl has one object per packed sequence,
in the order of the batch. A file gets its name once it is complete. Every list
has one entry per token of the sequence:

    ids, positions, mask, versions, temperatures, advantages, sampler_logprobs,
    ref_logprobs, {rl,ce,ref_kl}_weights        as the batch has them
    policy_logprobs, entropy                    under the parameters right
        before the step's first update, at the tokens' temperatures
    log_ratio                                   log pi - log mu, never clamped
    ratio, probability_difference               pi / mu, pi - mu
    k3                                          ratio - log_ratio - 1

and `schema_version stage step micro_batch row segment env` identify the
sequence. log_ratio, ratio, probability_difference and k3 are null where a token
is no member of rl or ref_kl, the components that read mu. A number that is not
finite is null; all others, read as a double and rounded to f32, equal the
batch's bit for bit. In rows with trees every sequence is whole: tokens that it
shares are in each of the objects, with the values of the first of them.

Axes: M micro-batches, B rows, T tokens of a row.
"""

import collections
import functools
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from posttrain import processes, schema, scoring, sharding, types
from posttrain.data import packing
from posttrain.util import disk

SCHEMA_VERSION = 1
FOLDER = 'token_exports'
COMPARED = ('log_ratio', 'ratio', 'probability_difference', 'k3')


# Per micro-batch, not per batch, so that padding is not scored.
@functools.partial(jax.jit, static_argnames=('cfg', 'place'))
def _score(params, rows, cfg, place):
  with sharding.use(place.mesh):
    scored = scoring.score(params, cfg, *rows)
  return jax.lax.with_sharding_constraint(scored, place)


class Exporter:
  """Writes a stage's files; compiles its one program when the first is due."""

  def __init__(
    self,
    every: int | None,
    workdir: str,
    stage: str,
    model: schema.Model,
    envs: Sequence[str],
    mesh: jax.sharding.Mesh,
  ):
    """Compiles nothing.

    Args:
      every: steps between two files; None = no files.
      workdir: the run's folder.
      stage: the stage's name.
      model: the model's options, with the vocabulary resolved.
      envs: environment names in `env_ids` order.
      mesh: devices that hold the parameters; rows are split over them.
    """
    self._every, self._stage, self._envs = every, stage, tuple(envs)
    self._folder = os.path.join(workdir, FOLDER)
    self._model = model
    self._place = NamedSharding(mesh, PartitionSpec(*sharding.BATCH[1:]))
    self._whole = NamedSharding(mesh, PartitionSpec())

  def due(self, step: int) -> bool:
    """Returns whether the step has a file."""
    return self._every is not None and step % self._every == 0

  def __call__(self, step: int, params: Any, batch: types.Batch) -> None:
    """Writes the file of a step.

    Args:
      step: the number of the step.
      params: the whole model's parameters before the step's first update.
      batch: the step's batch, on the host.
    """
    micro_batches = range(int(batch.num_micro_batches))
    scored = (self._scored(params, batch, micro) for micro in micro_batches)
    if not processes.is_first():
      collections.deque(scored, maxlen=0)  # all processes must score
      return
    os.makedirs(self._folder, exist_ok=True)
    path = os.path.join(self._folder, f'{self._stage}_{step:06d}.jsonl')
    head = {
      'schema_version': SCHEMA_VERSION,
      'stage': self._stage,
      'step': step,
    }
    with disk.replacing(path) as f:
      for micro, values in enumerate(scored):
        for record in records(batch, micro, *values, self._envs):
          f.write(json.dumps({**head, **record}, allow_nan=False) + '\n')

  def _scored(
    self, params: Any, batch: types.Batch, micro: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns (policy_logprobs, entropy) of a micro-batch, f32[B, T]."""
    rows = sharding.put(
      tuple(
        getattr(batch, name)[micro]
        for name in ('ids', 'positions', 'segment_ids', 'temperatures')
      )
      + tuple(
        x if x is None else x[micro]
        for x in (batch.parents, batch.ends, batch.routes)
      ),
      self._place,
    )
    return jax.device_get(_score(params, rows, self._model, self._whole))


def records(
  batch: types.Batch,
  micro: int,
  logprobs: np.ndarray,
  entropy: np.ndarray,
  envs: Sequence[str],
) -> Iterator[dict[str, Any]]:
  """Yields the sequences of a micro-batch, row by row, as plain JSON.

  Args:
    batch: on the host.
    micro: index of the micro-batch.
    logprobs: f32[B, T], log pi of each token in nats.
    entropy: f32[B, T], of the distribution that each token was drawn from, in
      nats.
    envs: names in `env_ids` order.
  """
  for row, segments in enumerate(batch.segment_ids[micro]):
    own = np.bincount(segments)[1:]
    # Without trees, a sequence begins at position 0 and shares no tokens.
    shared = batch.positions[micro, row][np.cumsum(own) - own]
    sizes = list(zip((own + shared).tolist(), shared.tolist(), strict=True))
    for segment, here in enumerate(packing.paths(sizes), 1):
      streams = {
        name: getattr(batch, name)[micro, row][here]
        for name in (*types.TOKEN_FIELDS, 'positions')
      }
      streams['policy_logprobs'] = logprobs[row][here]
      streams['entropy'] = entropy[row][here]
      streams |= _compared(streams)
      yield {
        'micro_batch': micro,
        'row': row,
        'segment': segment,
        'env': envs[batch.env_ids[micro, row, here[-1]]],
        **{
          name: [
            value if finite else None
            for value, finite in zip(
              values.tolist(), np.isfinite(values).tolist(), strict=True
            )
          ]
          for name, values in streams.items()
        },
      }


def _compared(streams: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Compares policy and sampler, f32[T] each; NaN where nothing reads it."""
  member = (streams['rl_weights'] != 0) | (streams['ref_kl_weights'] != 0)
  new, old = (
    np.where(member, streams[name], np.float32(np.nan))
    for name in ('policy_logprobs', 'sampler_logprobs')
  )
  with np.errstate(over='ignore', invalid='ignore'):
    log_ratio = new - old
    values = (
      log_ratio,
      np.exp(log_ratio),
      np.exp(new) - np.exp(old),
      # exp(x) - 1 as one function: k3 is about x^2 / 2, which the
      # difference of exp(x) and 1 + x loses for a small x.
      np.expm1(log_ratio) - log_ratio,
    )
  return dict(zip(COMPARED, values, strict=True))
