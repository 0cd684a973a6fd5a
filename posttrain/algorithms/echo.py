"""ECHO: GRPO, and cross-entropy on the environment's messages."""

from collections.abc import Sequence

import numpy as np

from posttrain import schema, types
from posttrain.algorithms import base, grpo
from posttrain.util import imports


class Echo(base.Algorithm):
  """`grpo` on sampled tokens, cross-entropy on tokens of the environment.

      loss = grpo - sum_o alpha_o log pi(token_o | <o) / N_ce

  over the selected observation tokens o: contents of messages after the prompt
  with a role in `roles`, each once, without tokens of the chat template
  (`observed`). `tools` selects tool messages by name, and `filter` selects
  among the remaining tokens. N_ce is the number of selected tokens, so alpha
  times their mean negative log-likelihood is added to the loss.

  Streams: those of `grpo`; `ce_weights` is the role's alpha on every selected
  token. With no selected token this is `grpo`. A group with equal rewards has
  no credit; its observations are learned all the same.

  References:
    Prime Intellect, "prime-rl", 2026 (the algorithm by this name).
  """

  def __init__(self, cfg: schema.Echo):
    """Imports the filter; ValueError if it cannot be imported."""
    super().__init__(cfg)
    self._grpo = grpo.Grpo(cfg)
    self._alphas = {
      types.ROLES.index(name): role.alpha for name, role in cfg.roles.items()
    }
    self._filter = None
    if cfg.filter.import_path is not None:
      self._filter = imports.function(
        cfg.filter.import_path, 'algorithm.filter.import_path'
      )

  def assign(self, group: base.Group) -> list[float]:
    """Returns the credit of `grpo`."""
    return self._grpo.assign(group)

  def rescale(
    self, groups: Sequence[base.Group], credits: Sequence[Sequence[base.Credit]]
  ) -> Sequence[Sequence[base.Credit]]:
    """Rescales the credit as `grpo` does."""
    return self._grpo.rescale(groups, credits)

  def observation_weights(self, rollout: types.Rollout) -> list[np.ndarray]:
    """Returns alpha on the selected tokens, f32[T] per sample."""
    tools = self.cfg.tools
    selected = np.array(
      [
        not tools or m['role'] != 'tool' or m.get('name') in tools
        for m in rollout.messages
      ]
    )
    weights = []
    for sample, content in zip(
      rollout.samples, base.contents(rollout), strict=True
    ):
      if tools:
        content = content & selected[sample.message_ids]
      weights.append(np.zeros(len(sample), np.float32))
      for role, alpha in self._alphas.items():
        weights[-1][content & (sample.roles == role)] = alpha
    if self._filter is None:
      return weights
    cfg = self.cfg.filter
    masks = self._filter(rollout, **cfg.kwargs)
    name, task = f'{cfg.import_path} must return', rollout.task.id
    what = f'{name} a list with one keep-mask per sample of task {task}'
    got = len(masks) if isinstance(masks, list) else type(masks).__name__
    base.require_equal(what, got, len(rollout.samples))
    for i, (mask, s) in enumerate(zip(masks, rollout.samples, strict=True)):
      got = np.shape(mask), np.asarray(mask).dtype.name
      what = f'{name} a bool per token of sample {i} of task {task}'
      base.require_equal(what, got, ((len(s),), 'bool'))
    return [np.where(k, w, 0) for k, w in zip(masks, weights, strict=True)]
