"""Model references: frozen models that score samples, held in process.

    'policy'      the live parameters, those of the last `set_policy`
    'init'        the stage's initial parameters
    'stage:NAME'  what an earlier stage of the run ended with
    PATH          of a workdir, a stage's folder or a step, see `checkpoint`

The grammar is that of `init`; references are of the policy's shape and
vocabulary, and lie on the devices as it does.
"""

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from posttrain import checkpoint, scoring, types

Params = Any


class References:
  """The algorithms' scorer: `references(reference, samples)`."""

  def __init__(
      self, scorer: scoring.Scorer, load: Callable[[str], Params]
  ):
    """Holds nothing yet.

    Args:
      scorer: scores sequences under given parameters.
      load: returns the parameters that a name other than 'policy' stands
        for; called once per name, when it is first asked for.
    """
    self._scorer = scorer
    self._load = load
    self._params: dict[str, Params] = {}

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


@dataclasses.dataclass(frozen=True)
class Loader:
  """Resolves a reference's name to parameters: `References`' `load`."""

  init: Callable[[], Params]  # makes the stage's initial parameters
  workdir: str  # of the run
  like: Params  # the policy's, as arrays or ShapeDtypeStructs, with shardings
  fingerprint: str  # of the policy's tokenizer and template

  def __call__(self, reference: str) -> Params:
    """Restores a reference.

    Raises:
      ValueError: no such checkpoint, another model, or other tokens.
    """
    if reference == 'init':
      return self.init()
    kind, _, name = reference.partition(':')
    path = reference
    if kind == 'stage':
      path = os.path.join(self.workdir, 'checkpoints', name)
    try:
      self._check_tokens(path)
      return checkpoint.restore_params(path, self.like)
    except ValueError as error:
      raise ValueError(
          "an algorithm's reference must be 'policy', 'init', 'stage:NAME' or "
          "the path of a checkpoint of the policy's model: got "
          f'{reference!r}; {error}'
      ) from error

  def _check_tokens(self, path: str) -> None:
    """Refuses a model whose ids mean other texts."""
    theirs = checkpoint.read_host(path)['tokenizer']
    if theirs != self.fingerprint:
      raise ValueError(
          "its tokenizer must be the policy's, template included: got "
          f'fingerprint {theirs[:12]}, expected {self.fingerprint[:12]}'
      )
