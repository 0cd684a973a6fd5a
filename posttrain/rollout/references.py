"""Model references: models that score (or sample, or judge) and do not train.

    'policy'          the live parameters, those of the last `set_policy`
    'ema:DECAY', 'snapshot:STEPS'   the policy as it was of late, see
                      `train_step.late`; live as well
    'init'            the stage's initial parameters
    'stage:NAME'      what an earlier stage of the run ended with
    PATH              of a run's or of HuggingFace's, see `weights`
    schema.Endpoint   a model that a server answers for, see `endpoint`

The grammar is that of `init`. A model in this process lies on the devices as
the policy does; one of a path may be of another shape. All speak the policy's
tokens. Whoever names the same reference shares it.

1. `resolve`: when a stage begins, the folder that a name means from then on.
2. `Loader`: the model that lies there.
3. `References`: the algorithms' scorer.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from posttrain import schema, scoring, sharding, types
from posttrain.chat import renderer as chat
from posttrain.checkpoints import weights
from posttrain.models import hf_config, transformer
from posttrain.rollout.endpoint import client

Params = Any


class Model(NamedTuple):
  """A model in this process."""

  params: Params
  cfg: schema.Model  # with its vocabulary


class References:
  """The algorithms' scorer: `references(reference, samples)`."""

  def __init__(
    self,
    model: schema.Model,
    renderer: chat.Renderer,
    scorer: Callable[[schema.Model, int], scoring.Scorer],
    *,
    capacity: int,
    load: Callable[[str], Model],
    held: Mapping[str, Params] | None = None,
  ):
    """Holds nothing yet.

    Args:
      model: the policy's.
      renderer: the policy's.
      scorer: makes one of a model's sequences, of so many tokens at most.
      capacity: tokens of the longest sample.
      load: returns the model that a name stands for which is neither live nor
        held; called once per name, when it is first asked for.
      held: parameters of the policy's shape that somebody holds anyway.
    """
    self._model, self._renderer = model, renderer
    self._scorer, self._capacity, self._load = scorer, capacity, load
    self._scorers: dict[tuple[schema.Model, int], scoring.Scorer] = {}
    self._models = {k: Model(v, model) for k, v in (held or {}).items()}
    self._endpoints: dict[schema.Endpoint, client.Endpoint] = {}

  def set_policy(self, params: Mapping[str, Params]) -> None:
    """Makes these the policy, now and of late; not to be donated meanwhile."""
    self._models |= {k: Model(v, self._model) for k, v in params.items()}

  def model(self, reference: str) -> Model:
    """Returns a model of this process; loads it where nobody has.

    Raises:
      ValueError: nothing goes by that name.
    """
    if reference not in self._models:
      assert not tracks_policy(reference), (
        'set_policy comes before the first score'
      )
      self._models[reference] = self._load(reference)
    return self._models[reference]

  def endpoint(
    self, reference: schema.Endpoint, who: str = 'the run'
  ) -> client.Endpoint:
    """Returns who speaks with a server; asks it first who it is.

    Args:
      reference: which server and model.
      who: waits for it, if this is the first to ask.

    Raises:
      ValueError: it serves another model, or other tokens.
    """
    if reference not in self._endpoints:
      made = client.Endpoint(reference, who)
      self._endpoints[reference] = made  # before it is asked: `close` ends that
      made.check(self._renderer)
    return self._endpoints[reference]

  def close(self) -> None:
    """Hangs up wherever there is a server."""
    for one in self._endpoints.values():
      one.close()

  def __call__(
    self,
    reference: schema.Reference,
    samples: Sequence[types.Sample],
    hints: Sequence[types.Messages] | None = None,
  ) -> list[np.ndarray]:
    """Logprobs of each sample's tokens under a reference.

    At the sample's own temperatures, as the losses compute the policy's; an
    endpoint scores all tokens at that of the sampled ones.

    Args:
      reference: a name or an endpoint, see the module.
      samples: of any environment, in any number.
      hints: messages that the reference reads in front of each sample, rendered
        as a conversation of their own; a bos is not repeated behind them.

    Returns:
      One f32[T] per sample, in nats; entry 0 is 0.

    Raises:
      ValueError: nothing goes by that name, or a sample is too long.
    """
    ids = [sample.ids for sample in samples]
    if hints is not None:
      pairs = zip(hints, ids, strict=True)
      ids = [self._behind(hint, own) for hint, own in pairs]
    if isinstance(reference, schema.Endpoint):
      # A server scores a whole sequence at one temperature: that of what the
      # policy sampled, which is all that is read.
      hot = [s.temperatures[s.mask].max(initial=0) or 1 for s in samples]
      heat = [
        np.full(len(i), t, np.float32) for i, t in zip(ids, hot, strict=True)
      ]
      names = ', '.join(sorted({sample.env for sample in samples} - {''}))
      who = f'environment {names}' if names else 'a stage on pairs'
      found = self.endpoint(reference).score(ids, heat, who)
    else:
      heat = [
        np.append(np.ones(len(i) - len(s), np.float32), s.temperatures)
        for i, s in zip(ids, samples, strict=True)
      ]
      found = self._score(self.model(reference), ids, heat)
    # Token 0 has no prediction, hint or not.
    return [
      np.append(np.float32(0), x[len(x) - len(s) + 1 :])
      for x, s in zip(found, samples, strict=True)
    ]

  def _behind(self, hint: types.Messages, ids: np.ndarray) -> np.ndarray:
    """The hint's ids and then these; a bos that both have stands once."""
    head = self._renderer.render(hint).ids
    if len(head) and head[0] == ids[0] == self._renderer.tokenizer.bos_id:
      return np.concatenate([head, ids[1:]])
    return np.concatenate([head, ids])

  def _score(self, model: Model, ids, heat) -> list[np.ndarray]:
    highest = max((int(x.max()) for x in ids), default=0)
    if highest >= model.cfg.vocab_size:
      raise ValueError(
        'a reference must know the tokens that it scores: got token '
        f'{highest}, expected less than {model.cfg.vocab_size}; the policy '
        'has more rows than it, and sampled one that no text has'
      )
    width = self._capacity
    longest = max(map(len, ids), default=0)
    while width < longest:  # a hint makes it longer; few widths compile
      width *= 2
    key = (model.cfg, width)
    if key not in self._scorers:
      self._scorers[key] = self._scorer(*key)
    return self._scorers[key](model.params, ids, heat)


def tracks_policy(reference: schema.Reference) -> bool:
  """Whether it changes while a stage trains."""
  return reference == 'policy' or schema.ema_or_snapshot(reference) is not None


def is_path(name: str) -> bool:
  """Whether a reference, or an `init`, lies outside of the run."""
  known = name in ('init', 'random') or tracks_policy(name)
  return not known and not name.startswith('stage:')


def resolve(name: str, workdir: str) -> str:
  """The step folder that 'stage:NAME' or a path means now.

  A checkpoint keeps it, so that a resumed stage finds the same weights again,
  whatever was trained since where they came from.

  Args:
    name: of a reference, or an `init`.
    workdir: of the run.

  Returns:
    The name itself where it is 'init', 'random' or live; else the folder,
    relative to the workdir if it lies inside.

  Raises:
    ValueError: no weights lie there.
  """
  kind, _, target = name.partition(':')
  if kind == 'stage':
    path = os.path.join(workdir, 'checkpoints', target)
  elif is_path(name):
    path = name
  else:
    return name
  found, root = weights.find(path), os.path.realpath(workdir)
  inside = os.path.commonpath([found, root]) == root
  return os.path.relpath(found, root) if inside else found


@dataclasses.dataclass(frozen=True)
class Loader:
  """Finds the model that a name stands for: `References`' `load`."""

  random: Callable[[], Params]  # makes the parameters of a fresh model
  workdir: str  # of the run
  folders: Mapping[str, str]  # name -> what `resolve` said of it, or 'random'
  like: Params  # the policy's, as arrays or ShapeDtypeStructs, with shardings
  model: schema.Model  # the policy's
  renderer: chat.Renderer  # the policy's
  mesh: jax.sharding.Mesh

  def __call__(self, name: str) -> Model:
    """Makes or restores a model, anew at every call.

    Raises:
      ValueError: no such checkpoint, other tokens, or 'init' is of another
        model.
    """
    folder = self.folders[name]
    if folder == 'random':
      return Model(self.random(), self.model)
    path = os.path.join(self.workdir, folder)
    try:
      return self._load(path, same=name == 'init')
    except ValueError as error:
      raise ValueError(
        f'weights by the name of {name!r} must still be what they were when '
        f'the stage began, at {path}; {error}'
      ) from error

  def init(self) -> Params:
    """What the stage begins with."""
    return self('init').params

  def _load(self, path: str, same: bool) -> Model:
    if same:
      weights.check(path, self.model, self.renderer)
    cfg = self.model if same else check(path, self.model, self.renderer)
    if cfg == self.model:
      return Model(weights.load(path, self.like), cfg)
    like = sharding.placed(
      transformer.shapes(cfg), transformer.SHARDING_RULES, self.mesh
    )
    return Model(weights.load(path, like), cfg)


def check(
  folder: str, policy: schema.Model, renderer: chat.Renderer
) -> schema.Model:
  """Refuses a reference that speaks other tokens; reads no weight.

  Returns:
    Its model: the policy's where it is of that shape. One of another computes
    in the policy's dtype.

  Raises:
    ValueError: its tokens are others, or it does not know them all.
  """
  cfg = weights.model(folder)
  weights.check(folder, cfg, renderer)
  if not hf_config.differing(cfg, policy):
    return policy
  if cfg.vocab_size < renderer.tokenizer.vocab_size:
    raise ValueError(
      f'{folder} must know the {renderer.tokenizer.vocab_size} tokens of '
      f'config.tokenizer: got {cfg.vocab_size}; use a reference of the same '
      'tokenizer'
    )
  return dataclasses.replace(cfg, dtype=policy.dtype, remat='none')
