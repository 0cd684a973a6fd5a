"""A peer in plain PyTorch, written from formulas alone: model and optimizer.

What the tests of `optim` and of the whole train step are compared with. Only
the names of parameters are shared with the code under test. Sequences are
scored one by one, with neither packing nor padding. All is in float64, so that
what differs is the rounding of the float32 code and not the peer's own.

Axes: T tokens, D model, H head dim, V vocab.
"""

import math
import re

import jax
import numpy as np
import pytest

from posttrain import schema, tree

torch = pytest.importorskip('torch')
# Matrices this small are done before a second thread is awake.
torch.set_num_threads(1)


def tensors(params):
  """{path: float64 tensor} of a tree of arrays."""
  leaves = tree.flat(jax.device_get(params)).items()
  return {path: torch.tensor(np.float64(x)) for path, x in leaves}


def _norm(x, scale, eps):
  """x / rms(x) * scale (Zhang and Sennrich, arXiv 1910.07467)."""
  return x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps) * scale


def _turn(x, theta):
  """RoPE of [..., T, H]: pair i as a complex number, times e^(i t turns_i).

  turns_i = theta^(-2i / H), the pairs are (x[i], x[i + H / 2]) (Su et al.,
  arXiv 2104.09864).
  """
  length, dim = x.shape[-2:]
  i = torch.arange(dim // 2, dtype=x.dtype)
  angles = torch.outer(torch.arange(length), theta ** (-2 * i / dim))
  pairs = torch.complex(*x.chunk(2, dim=-1))
  turned = pairs * torch.polar(torch.ones_like(angles), angles)
  return torch.cat([turned.real, turned.imag], dim=-1)


def _attention(x, p, cfg: schema.Model):
  """Causal softmax(q k / sqrt(H)) v; neighbouring heads share a key."""

  def heads(name):
    y = x @ p[f'{name}/kernel']
    if cfg.qkv_bias:
      y = y + p[f'{name}/bias']
    y = y.reshape(len(x), -1, cfg.head_dim).transpose(0, 1)
    if cfg.qk_norm and name != 'v':
      y = _norm(y, p[f'{name}_norm/scale'], cfg.norm_eps)
    return y.repeat_interleave(cfg.heads // len(y), dim=0)

  q, k = (_turn(heads(name), cfg.rope_theta) for name in 'qk')
  scores = q @ k.transpose(1, 2) / math.sqrt(cfg.head_dim)
  future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
  found = scores.masked_fill(future, -math.inf).softmax(-1) @ heads('v')
  return found.transpose(0, 1).reshape(len(x), -1) @ p['o/kernel']


def hidden(params, cfg: schema.Model, ids):
  """Hidden states of one sequence, [T, D]."""
  x = params['embed/table'][torch.tensor(ids).long()]
  for layer in range(cfg.layers):
    p = {
      path.removeprefix('layers/'): value[layer]
      for path, value in params.items()
      if path.startswith('layers/')
    }
    attention = {
      path.removeprefix('attention/'): value for path, value in p.items()
    }
    y = _norm(x, p['attention_norm/scale'], cfg.norm_eps)
    x = x + _attention(y, attention, cfg)
    y = _norm(x, p['mlp_norm/scale'], cfg.norm_eps)
    gate, up = y @ p['mlp/gate/kernel'], y @ p['mlp/up/kernel']
    x = x + (gate * torch.sigmoid(gate) * up) @ p['mlp/down/kernel']
  return _norm(x, params['final_norm/scale'], cfg.norm_eps)


def logprobs(params, cfg: schema.Model, ids, temperature=1.0):
  """log pi(token | those before) of all tokens but the first, [T - 1]."""
  tied = params['embed/table'].T if cfg.tied_head else params['head/kernel']
  logits = hidden(params, cfg, ids)[:-1] @ tied / temperature
  chosen = torch.tensor(ids).long()[1:, None]
  return logits.log_softmax(-1).gather(-1, chosen)[:, 0]


def rate(cfg: schema.Optim, update: int, updates: int) -> float:
  """Learning rate of an update, counted from 0.

  A line up to the peak, reached by the last update of the warm-up; then from
  the peak, by the fraction x of what is left, down to the final rate.
  """
  if update < cfg.warmup_steps:
    return cfg.lr * (update + 1) / cfg.warmup_steps
  x = (update - cfg.warmup_steps) / (updates - cfg.warmup_steps)
  share = {
    'constant': 1.0,
    'linear': 1 - min(x, 1),
    'cosine': (1 + math.cos(math.pi * min(x, 1))) / 2,
  }[cfg.schedule]
  final = cfg.lr * cfg.final_lr_fraction
  return final + (cfg.lr - final) * share


class AdamW:
  """Adam with decoupled weight decay, behind clipping by the global norm.

      g <- g min(1, c / |g|)
      m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2
      p <- p - lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + w p)

  Pascanu et al., arXiv 1211.5063, algorithm 1; Kingma and Ba, arXiv 1412.6980,
  algorithm 1; Loshchilov and Hutter, arXiv 1711.05101, algorithm 2, with w
  times the rate (as PyTorch has it) where the paper has w alone. Also keeps
  the average a <- d a + (1 - d) p, from the first p on.
  """

  def __init__(self, cfg: schema.Optim, updates: int, params):
    self.cfg, self.updates, self.done = cfg, updates, 0
    self.m = {name: torch.zeros_like(p) for name, p in params.items()}
    self.v = {name: torch.zeros_like(p) for name, p in params.items()}
    self.average = dict(params)

  def step(self, params, grads):
    """Returns the parameters behind one more update."""
    cfg, lr = self.cfg, rate(self.cfg, self.done, self.updates)
    self.done += 1
    shrink = min(1.0, cfg.clip_norm / max(float(norm(grads)), 1e-300))
    new = {}
    for name, p in params.items():
      g = grads[name] * shrink
      self.m[name] = cfg.beta1 * self.m[name] + (1 - cfg.beta1) * g
      self.v[name] = cfg.beta2 * self.v[name] + (1 - cfg.beta2) * g**2
      m = self.m[name] / (1 - cfg.beta1**self.done)
      v = self.v[name] / (1 - cfg.beta2**self.done)
      w = 0.0 if re.search(cfg.no_decay, name) else cfg.weight_decay
      new[name] = p - lr * (m / (v.sqrt() + cfg.eps) + w * p)
    if cfg.average is not None:
      self.average = {
        name: cfg.average * self.average[name] + (1 - cfg.average) * p
        for name, p in new.items()
      }
    return new


def norm(grads):
  """Root of the sum of squares of all entries."""
  return torch.sqrt(sum((g**2).sum() for g in grads.values()))
