"""A trainer whose caller has the loop: gradients, updates, samples, saves.

    mine = trainer.Trainer(policy, adapter=schema.Lora(rank=8))
    mine.forward_backward(data, 'importance_sampling')       # gradients add up
    mine.optim_step(optim.Adam(learning_rate=1e-4))
    api.generate(mine.policy(), prompts, temperature=1.0)

Losses, and their sums over tokens, are those of the Tinker API. With log pi and
log mu of a target under the trained parameters and at sampling time, rho their
ratio, w its weight and A its advantage:

    cross_entropy        -w log pi
    importance_sampling  -w A rho
    ppo                  -w min(rho A, clip(rho, low, high) A)
    cispo                -w sg(clip(rho, low, high)) A log pi
    dro                  -w (A log pi - beta/2 (log rho)^2)

Several trainers may share the weights of one base model, and share all compiled
programs: these depend on the shapes of rows and parameters, and on the loss.
The rows of a call depend on its data alone, so equal calls give equal bits.

Axes: B rows, T tokens.
"""

import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from posttrain import schema, scoring, sharding
from posttrain.checkpoints import policies, store, weights
from posttrain.data import packing
from posttrain.losses import ce, rl
from posttrain.models import lora
from posttrain.training import arrays, optim, step

STAGE = 'trainer'  # name of the stage in a trainer's checkpoints
# The most tokens of a micro-batch, unless a sequence is longer; of a large
# model on a CPU they are one row, and otherwise `_ROWS` of them.
_TOKENS, _TOKENS_OF_LARGE, _ROWS = 4096, 2048, 8
# Loss -> (its options, its numbers by default).
_LOSSES = {
  'cross_entropy': (None, {}),
  'importance_sampling': (
    functools.partial(schema.Dppo, low=1.0, high=1.0, kl_tau=0.0),
    {},
  ),
  'ppo': (schema.Clip, {'clip_low_threshold': 0.8, 'clip_high_threshold': 1.2}),
  'cispo': (
    schema.Cispo,
    {'clip_low_threshold': 0.0, 'clip_high_threshold': 4.0},
  ),
  'dro': (schema.Dro, {'beta': 0.05}),
}
_STREAMS = 'weights', 'logprobs', 'advantages'  # arrays of a `Datum`
_ADAM = optim.Adam()


@dataclasses.dataclass(frozen=True)
class Datum:
  """A sequence that trains.

  Target t follows the ids up to and with t, so all targets but the last one are
  the ids from the second one on.
  """

  ids: np.ndarray  # i32[T]
  targets: np.ndarray  # i32[T]
  weights: np.ndarray | float = 1.0  # f32[T], may be negative
  # Of all losses but cross_entropy, where they must be given:
  logprobs: np.ndarray | float = 0.0  # f32[T], at sampling time, nats
  advantages: np.ndarray | float = 0.0  # f32[T]


def sampled(
  prompt: np.ndarray, ids: np.ndarray, logprobs: np.ndarray, advantage: float
) -> Datum:
  """Returns a sampled completion as data of the losses with an advantage.

  Args:
    prompt: i32[P].
    ids: i32[n], the tokens sampled after it.
    logprobs: f32[n], nats.
    advantage: of each of them; the prompt's tokens have a weight of 0.
  """
  every, before = np.concatenate([prompt, ids]), (len(prompt) - 1, 0)
  own = np.pad(np.ones(len(ids), np.float32), before)
  return Datum(
    every[:-1],
    every[1:],
    weights=own,
    logprobs=np.pad(logprobs, before),
    advantages=advantage * own,
  )


def loss_options(loss: str, **numbers: float) -> schema.RlLoss | None:
  """Returns the options of a loss; None = cross_entropy.

  Args:
    loss: one of those of the module.
    **numbers: low, high and beta of the module's formulas, as
      `clip_low_threshold`, `clip_high_threshold` and `beta`.

  Raises:
    ValueError: there is no such loss, or it has no such number.
  """
  if loss not in _LOSSES:
    raise ValueError(f'loss must be one of {[*_LOSSES]}: got {loss!r}')
  kind, own = _LOSSES[loss]
  if unknown := numbers.keys() - own:
    raise ValueError(
      f'loss {loss} must have numbers of {[*own]}: got {sorted(unknown)}'
    )
  if kind is None:
    return None
  own = own | {k: float(x) for k, x in numbers.items()}
  if 'clip_low_threshold' in own:
    low, high = own.values()
    if not 0 <= low <= 1 <= high:
      raise ValueError(
        'clip_low_threshold and clip_high_threshold must be in [0, 1] and '
        f'>= 1: got {low:g} and {high:g}'
      )
    own = {'low': 1 - low, 'high': high - 1}
  return kind(**own, max_log_ratio=80.0)  # the most that float32 carries


def lora_options(
  rank: int, *, attention: bool = True, mlp: bool = True, head: bool = False
) -> schema.Lora:
  """Returns options of LoRA on parts of a model.

  Args:
    rank: the rank; alpha is 32.
    attention: whether to correct attention, and delta layers.
    mlp: whether to correct the layers between, experts included.
    head: whether to correct the head, unless it is the embedding's table.

  Raises:
    ValueError: the rank is no rank, or nothing is corrected.
  """
  parts = ['attention', 'delta'] * attention + ['mlp', 'experts'] * mlp
  others = r'experts/(router|shared_gate)/'
  kinds = [rf'layers/(?!{others})\w*{part}/.*' for part in parts]
  kinds += ['head'] * head
  if not kinds or rank < 1:
    raise ValueError(
      'a LoRA must have a rank >= 1, and correct attention, mlp or head: got '
      f'{rank}, {attention}, {mlp} and {head}'
    )
  return schema.Lora(rank=rank, targets=f'^({"|".join(kinds)})/kernel$')


class Trainer:
  """One set of trained parameters: an adapter of a model, or all its weights.

  Its arrays are on one device.
  """

  def __init__(
    self,
    base: policies.Policy,
    *,
    adapter: schema.Lora | None = None,
    seed: int = 0,
  ):
    """Starts from a model's weights.

    Args:
      base: from `policies.load` with `initial`; its arrays stay as they are,
        and trainers with LoRA share them.
      adapter: options of LoRA; None = all weights train.
      seed: of the adapter's initial values.
    """
    self.base, self.adapter = base, adapter
    self._frozen, self._seed = None, seed
    if adapter is None:
      params = jax.tree.map(jnp.copy, base.params)
    else:
      assert adapter.base == 'float', 'the base is as it was loaded'
      params = _init_adapter(jax.random.key(seed), adapter, base.params)
      scale, factors = lora.scale(adapter), lora.keeps_factors(adapter)
      self._frozen = lora.Base(base.params, scale, factors)
    self._start(params)

  def _start(self, params: Any) -> None:
    self._state = step.init_state(params, optim.adamw(_ADAM), average=False)
    self._grads = jax.tree.map(jnp.zeros_like, params)

  @property
  def step(self) -> int:
    """The number of calls of `optim_step`."""
    return int(self._state.step)

  def forward(
    self, data: Sequence[Datum], loss: str, **numbers: float
  ) -> tuple[list[np.ndarray], dict[str, float]]:
    """Computes `forward_backward`, and no gradients."""
    options = check(data, loss, numbers, self.base.model.vocab_size)
    return self.run(data, options, backward=False)

  def forward_backward(
    self, data: Sequence[Datum], loss: str, **numbers: float
  ) -> tuple[list[np.ndarray], dict[str, float]]:
    """Adds the gradients of a loss to those since the last update.

    Args:
      data: the sequences.
      loss: the loss, see the module.
      **numbers: those of the loss, see `loss_options`.

    Returns:
      (log pi of each target, f32[T] per sequence, in nats; metrics with
      `loss:sum`, the loss of all targets).

    Raises:
      ValueError: the loss is unknown, or a sequence lacks one of its arrays.
    """
    options = check(data, loss, numbers, self.base.model.vocab_size)
    return self.run(data, options)

  def run(
    self,
    data: Sequence[Datum],
    options: schema.RlLoss | None,
    backward: bool = True,
  ) -> tuple[list[np.ndarray], dict[str, float]]:
    """Computes `forward_backward` of data that `check` has seen.

    Args:
      data: the sequences.
      options: those of the loss, from `check`.
      backward: whether to add gradients; if it fails, none are added.
    """
    model, grads = self.base.model, self._grads
    logprobs: list[Any] = [None] * len(data)
    total = 0.0
    for places, micro in _micro_batches(model, data):
      args = self._state.params, self._frozen, micro, model, options
      if backward:
        grads, outputs = _add_grads(grads, *args)
      else:
        outputs = _forward(*args)
      scores, terms = jax.device_get(outputs)
      for index, place in places:
        logprobs[index] = scores[place]
        total += float(terms[place].sum(dtype=np.float64))
    self._grads = grads
    return logprobs, {'loss:sum': total}

  def optim_step(self, numbers: optim.Adam = _ADAM) -> dict[str, float]:
    """Updates the parameters with the summed gradients, which are 0 then.

    Gradients that are not finite change nothing but the count of updates.

    Returns:
      `optim/grad_norm`, before clipping, and `optim/skipped`, 0 or 1.
    """
    self._state, self._grads, metrics = _update(
      self._state, self._grads, numbers
    )
    return {k: float(x) for k, x in jax.device_get(metrics).items()}

  @property
  def params(self) -> Any:
    """The trained parameters, until the next update: an adapter, or all."""
    return self._state.params

  def policy(self) -> policies.Policy:
    """Returns the policy of now, which later updates leave as it is."""
    params = jax.tree.map(jnp.copy, self._state.params)
    params = lora.whole(params, self._frozen)
    return dataclasses.replace(self.base, params=params)

  def save(self, folder: str) -> str:
    """Writes a checkpoint, from which generate, serve and export read.

    Args:
      folder: a new folder, or one of earlier steps.

    Returns:
      The step's folder.
    """
    base, number = self.base, self.step
    assert base.renderer is not None, 'a policy of text has a tokenizer'
    stage = {
      'kind': 'tokens',
      'lora': dataclasses.asdict(self.adapter or schema.Lora()),
      'optim': {'average': None},
      'eval': {'max_tokens': base.max_tokens},
    }
    host = {
      'stage': STAGE,
      'step': number,
      'start': base.folder,
      'model': dataclasses.asdict(base.model),
      'tokenizer': base.renderer.fingerprint,
      'config': {
        'seed': self._seed,
        'compilation_cache': schema.Run.compilation_cache,
        'tokenizer': dataclasses.asdict(base.tokenizer),
        'stages': [STAGE],
        STAGE: stage,
      },
    }
    if self._frozen is not None:
      host['base'] = self._base_sums
    checkpointer = store.Checkpointer(folder, schema.Checkpoint())
    checkpointer.save(number, self._state, host)
    checkpointer.close()
    return os.path.join(folder, str(number))

  @functools.cached_property
  def _base_sums(self) -> dict[str, Any]:
    return weights.base_sums(self.base.params)

  def load(self, folder: str, *, optimizer: bool = False) -> None:
    """Reads parameters; gradients are 0 then.

    Args:
      folder: one of `save`, of the same model and options of LoRA.
      optimizer: whether the optimizer's state is that of the save; it is new
        otherwise.

    Raises:
      ValueError: the folder does not hold them.
    """
    path = store.find(folder)
    state, _ = store.read_named(path, store.read, self._state)
    self._start(state.params)
    if optimizer:
      self._state = state
    if self.adapter is not None:
      weights.check_base(str(path), self.base.params)


def check(
  data: Sequence[Datum], loss: str, numbers: Mapping[str, float], size: Any
) -> schema.RlLoss | None:
  """Returns the options of a loss that sequences fit.

  Args:
    data: the sequences.
    loss, numbers: those of `loss_options`.
    size: the model's vocabulary.

  Raises:
    ValueError: there are none, or one is wrong, or the loss.
  """
  options = loss_options(loss, **numbers)
  if not data:
    raise ValueError('data must not be empty: got none')
  names = _STREAMS[:1] if options is None else _STREAMS
  for index, datum in enumerate(data):
    what = f'data[{index}] must have'
    ids, targets = np.asarray(datum.ids), np.asarray(datum.targets)
    ok = ids.ndim == 1 and ids.shape == targets.shape and len(ids)
    if not (ok and np.array_equal(ids[1:], targets[:-1])):
      raise ValueError(
        f'{what} ids, and the next ids as targets, of which the last is free: '
        f'got shapes {ids.shape} and {targets.shape}'
      )
    every = np.append(ids, targets[-1])
    if every.min() < 0 or every.max() >= size:
      raise ValueError(
        f'{what} ids in [0, {size}): got {every.min()} to {every.max()}'
      )
    for name in names:
      values = getattr(datum, name)
      shape, ok = np.shape(values), () if name == 'weights' else ids.shape
      if shape not in (ids.shape, ok) or not np.isfinite(values).all():
        raise ValueError(f'{what} {len(ids)} finite {name}: got {shape}')
  return options


def _micro_batches(
  model: schema.Model, data: Sequence[Datum]
) -> Iterator[tuple[list[tuple[int, tuple[int, slice]]], Any]]:
  """Yields (places of targets in rows, by sequence; arrays [B, T]).

  The arrays are ids, positions, segments, and those of `_STREAMS`.
  """
  lengths = [len(datum.ids) + 1 for datum in data]
  rows, most = _ROWS, max(_TOKENS // _ROWS, *lengths)
  if model.is_large and jax.default_backend() == 'cpu':
    rows, most = 1, max(_TOKENS_OF_LARGE, most)
  width = min(  # with the least padding
    packing.ladder(max(lengths), most, 4),
    key=lambda width: width * packing.micro_batches(lengths, rows, width),
  )
  bins, _ = packing.first_fit(lengths, width, len(lengths))
  for first in range(0, len(bins), rows):
    shape = 3, rows, width
    micro = *np.zeros(shape, np.int32), *np.zeros(shape, np.float32)
    ids, positions, segments, *streams = micro
    places = []
    for row, members in enumerate(bins[first : first + rows]):
      end = 0
      for segment, index in enumerate(members, 1):
        datum, start, end = data[index], end, end + lengths[index]
        own, place = (row, slice(start, end)), (row, slice(start + 1, end))
        ids[own] = [datum.ids[0], *datum.targets]
        positions[own] = np.arange(lengths[index])
        segments[own] = segment
        for name, stream in zip(_STREAMS, streams, strict=True):
          stream[place] = getattr(datum, name)
        places.append((index, place))
    yield places, micro


def _scores(params, base, micro, model, options):
  """Returns (the loss, f32[]; logprobs and terms of tokens, f32[B, T])."""
  ids, positions, segments, factors, old_logprobs, advantages = micro
  with sharding.use(sharding.one_device()):
    whole, temperatures = lora.whole(params, base), jnp.ones(ids.shape)
    logprobs, entropy = scoring.score(
      whole, model, ids, positions, segments, temperatures
    )
  if options is None:
    terms, _ = ce.loss(logprobs, factors)
  else:
    terms, _ = rl.loss(
      logprobs, old_logprobs, advantages, factors, segments, entropy, options
    )
  return jnp.sum(terms), (logprobs, terms)


# At module level, so that all trainers of a shape share one program.
_compiled = functools.partial(jax.jit, static_argnames=('model', 'options'))


@_compiled
def _forward(params, base, micro, model, options):
  return _scores(params, base, micro, model, options)[1]


@_compiled
def _add_grads(sums, params, base, micro, model, options):
  grads, outputs = jax.grad(_scores, has_aux=True)(
    params, base, micro, model, options
  )
  return jax.tree.map(jnp.add, sums, grads), outputs


@functools.partial(jax.jit, donate_argnums=(0, 1))
def _update(
  state: arrays.TrainState, grads: Any, numbers: optim.Adam
) -> tuple[arrays.TrainState, Any, dict[str, jax.Array]]:
  norm = optax.tree.norm(grads)
  ok = jnp.isfinite(norm)
  new, _ = step.optimize(optim.adamw(numbers).update, state, grads, ok)
  new = dataclasses.replace(new, step=state.step + 1)
  metrics = {'optim/grad_norm': norm, 'optim/skipped': ~ok}
  return new, jax.tree.map(jnp.zeros_like, grads), metrics


_init_adapter = jax.jit(lora.init, static_argnums=1)
