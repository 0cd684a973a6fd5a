"""GRPO that also learns to foresee what the environment says."""

import numpy as np

from posttrain import types
from posttrain.algorithms import base, grpo, observed
from posttrain.util import imports


class Echo(base.Algorithm):
  """`grpo` on own tokens, cross-entropy on chosen tokens of the environment.

      loss = grpo - sum_o alpha_o log pi(token_o | <o) / N_ce

  over observation tokens o: what messages of a role in `roles` contain behind
  the prompt, each once, without what the chat template adds around them
  (`observed`). `tools` chooses among tool messages by name;
  `filter` narrows further. The denominator counts tokens: alpha times the mean
  negative log-likelihood of what is chosen is what is added.

  Streams: those of `grpo`; `ce_weights = alpha` of its role on every chosen
  token. Where nothing is chosen, this is `grpo`. A group whose rewards tie
  has no credit, and its observations are learned all the same.

  References:
    Prime Intellect, "prime-rl", 2026 (the algorithm by this name).
  """

  component = 'rl'
  group_relative = True

  def __init__(self, cfg):
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
    return self._grpo.assign(group)

  def rescale(self, groups, credits):
    return self._grpo.rescale(groups, credits)

  def observation_weights(self, rollout: types.Rollout) -> list[np.ndarray]:
    weights = [
      self._weights(rollout, sample, chosen)
      for sample, chosen in zip(
        rollout.samples, observed.contents(rollout), strict=True
      )
    ]
    if self._filter is None:
      return weights
    kept = self._kept(rollout)
    return [np.where(k, w, 0) for k, w in zip(kept, weights, strict=True)]

  def _weights(self, rollout, sample: types.Sample, chosen) -> np.ndarray:
    if self.cfg.tools:
      chosen = chosen & self._by_tool(rollout, sample)
    weights = np.zeros(len(sample), np.float32)
    for role, alpha in self._alphas.items():
      weights[chosen & (sample.roles == role)] = alpha
    return weights

  def _by_tool(self, rollout, sample: types.Sample) -> np.ndarray:
    """Where a token is of no tool, or of one that is asked for."""
    named = np.array(
      [
        m['role'] != 'tool' or m.get('name') in self.cfg.tools
        for m in rollout.messages
      ]
    )
    return named[sample.message_ids]

  def _kept(self, rollout: types.Rollout) -> list[np.ndarray]:
    """The filter's word, a bool per token of each sample."""
    cfg = self.cfg.filter
    masks = self._filter(rollout, **cfg.kwargs)
    name = f'{cfg.import_path} must return'
    if not isinstance(masks, list) or len(masks) != len(rollout.samples):
      got = len(masks) if isinstance(masks, list) else type(masks).__name__
      raise ValueError(
        f'{name} a list with one keep-mask per sample of task '
        f'{rollout.task.id}: got {got}, expected {len(rollout.samples)}'
      )
    for i, (mask, s) in enumerate(zip(masks, rollout.samples, strict=True)):
      if np.shape(mask) != (len(s),) or np.asarray(mask).dtype != bool:
        raise ValueError(
          f'{name} a bool per token: got shape {np.shape(mask)} of type '
          f'{np.asarray(mask).dtype} for sample {i} of task '
          f'{rollout.task.id}, expected {(len(s),)}'
        )
    return [np.asarray(mask) for mask in masks]
