"""Model references: frozen models that score samples, held in process.

    'policy'      the live parameters, those of the last `set_policy`
    'init'        the stage's initial parameters
    'stage:NAME'  what an earlier stage of the run ended with
    PATH          of a run's or of HuggingFace's, see `weights`

The grammar is that of `init`; references are of the policy's shape and
vocabulary, and lie on the devices as it does.

1. `resolve`: when a stage begins, the folder that a name means from then on.
2. `Loader`: the parameters that lie there.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from posttrain import schema, scoring, types, weights
from posttrain.chat import renderer as chat

Params = Any


class References:
  """The algorithms' scorer: `references(reference, samples)`."""

  def __init__(
      self, scorer: scoring.Scorer, load: Callable[[str], Params],
      held: Mapping[str, Params] | None = None,
  ):  # fmt: skip
    """Holds nothing yet.

    Args:
      scorer: scores sequences under given parameters.
      load: returns the parameters that a name other than 'policy' stands
        for; called once per name, when it is first asked for.
      held: parameters by name that somebody holds anyway.
    """
    self._scorer = scorer
    self._load = load
    self._params: dict[str, Params] = dict(held or {})

  def set_policy(self, params: Params) -> None:
    """Makes these the live parameters; they must not be donated meanwhile."""
    self._params['policy'] = params

  def __call__(
      self, reference: str, samples: Sequence[types.Sample]
  ) -> list[np.ndarray]:
    """Logprobs of each sample's tokens under a reference.

    At the sample's own temperatures, as the losses compute the policy's.

    Args:
      reference: a name, see the module.
      samples: of any environment, in any number.

    Returns:
      One f32[T] per sample, in nats; entry 0 is 0.

    Raises:
      ValueError: nothing goes by that name, or a sample is too long.
    """
    if reference not in self._params:
      assert reference != 'policy', 'set_policy comes before the first score'
      self._params[reference] = self._load(reference)
    return self._scorer(
        self._params[reference],
        [sample.ids for sample in samples],
        [sample.temperatures for sample in samples],
    )


def is_path(name: str) -> bool:
  """Whether a reference, or an `init`, lies outside of the run."""
  known = name in ('policy', 'init', 'random')
  return not known and not name.startswith('stage:')


def resolve(name: str, workdir: str) -> str:
  """The step folder that 'stage:NAME' or a path means now.

  A checkpoint keeps it, so that a resumed stage finds the same weights again,
  whatever was trained since where they came from.

  Args:
    name: of a reference, or an `init`.
    workdir: of the run.

  Returns:
    The name itself where it is 'init', 'policy' or 'random'; else the folder,
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
  """Finds the parameters that a name stands for: `References`' `load`."""

  random: Callable[[], Params]  # makes the parameters of a fresh model
  workdir: str  # of the run
  folders: Mapping[str, str]  # name -> what `resolve` said of it, or 'random'
  like: Params  # the policy's, as arrays or ShapeDtypeStructs, with shardings
  model: schema.Model  # the policy's
  renderer: chat.Renderer  # the policy's

  def __call__(self, name: str) -> Params:
    """Makes or restores the parameters, anew at every call.

    Raises:
      ValueError: no such checkpoint, another model, or other tokens.
    """
    folder = self.folders[name]
    if folder == 'random':
      return self.random()
    path = os.path.join(self.workdir, folder)
    try:
      weights.check(path, self.model, self.renderer)
      return weights.load(path, self.like)
    except ValueError as error:
      raise ValueError(
          f'weights by the name of {name!r} must still be what they were when '
          f'the stage began, at {path}; {error}'
      ) from error
