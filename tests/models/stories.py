"""The 260k-parameter stories model: its file, and a forward in numpy.

    stories260K.bin   i32[7] sizes, then f32: the arrays of `read`, in order

An oracle independent of posttrain: RoPE rotates neighbors (2i, 2i + 1), as the
file's weights expect. Only `convert` follows posttrain's tree.

Axes: T tokens, L layers, N query heads, K kv heads, H head dim, D model, F mlp,
V vocab. Matrices are [L, out, in].
"""

import math
import pathlib
import struct

import numpy as np

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 5, 8, 4, 8
EPS, THETA = 1e-5, 10_000.0
BOS = 1


def read(path: pathlib.Path) -> dict[str, np.ndarray]:
  """Reads the weights."""
  raw = path.read_bytes()
  sizes = struct.unpack('<7i', raw[:28])
  assert sizes == (64, 172, LAYERS, HEADS, KV_HEADS, 512, 512), sizes
  shapes = {
    'embed': (512, 64),
    'attention_norm': (5, 64),
    'q': (5, 64, 64),
    'k': (5, 32, 64),
    'v': (5, 32, 64),
    'o': (5, 64, 64),
    'mlp_norm': (5, 64),
    'gate': (5, 172, 64),
    'down': (5, 64, 172),
    'up': (5, 172, 64),
    'final_norm': (64,),
    # RoPE's tables, which `forward` computes itself.
    'cos': (512, 4),
    'sin': (512, 4),
  }
  numbers, arrays, start = np.frombuffer(raw, '<f4', offset=28), {}, 0
  for name, shape in shapes.items():
    count = math.prod(shape)
    arrays[name] = numbers[start : start + count].reshape(shape)
    start += count
  assert start == len(numbers)
  return arrays


def forward(w: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
  """Computes the logits f32[T, V] of one sequence, with causal attention."""
  count = len(ids)
  radians = THETA ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
  angles = np.arange(count)[:, None, None] * radians
  rotation = np.exp(1j * angles)  # [T, 1, H / 2]
  causal = np.tril(np.ones((count, count), bool))
  x = w['embed'][ids]
  for i in range(LAYERS):
    y = _norm(x, w['attention_norm'][i])
    q = _rotate((y @ w['q'][i].T).reshape(count, HEADS, HEAD_DIM), rotation)
    k = _rotate((y @ w['k'][i].T).reshape(count, KV_HEADS, HEAD_DIM), rotation)
    v = (y @ w['v'][i].T).reshape(count, KV_HEADS, HEAD_DIM)
    heads = []
    for head in range(HEADS):
      group = head // (HEADS // KV_HEADS)
      scores = q[:, head] @ k[:, group].T / math.sqrt(HEAD_DIM)
      weights = np.exp(log_softmax(np.where(causal, scores, -np.inf)))
      heads.append(weights @ v[:, group])
    x = x + np.concatenate(heads, 1) @ w['o'][i].T
    y = _norm(x, w['mlp_norm'][i])
    gate = y @ w['gate'][i].T
    y = gate / (1 + np.exp(-gate)) * (y @ w['up'][i].T)
    x = x + y @ w['down'][i].T
  return _norm(x, w['final_norm']) @ w['embed'].T


def greedy(w, ids: list[int], new: int) -> tuple[list[int], np.ndarray]:
  """Returns the greedy continuation and its logits f32[new, V]."""
  ids, logits = list(ids), []
  for _ in range(new):
    logits.append(forward(w, np.array(ids))[-1])
    ids.append(int(logits[-1].argmax()))
  return ids[-new:], np.stack(logits)


def log_softmax(x: np.ndarray) -> np.ndarray:
  """Computes the log softmax over the last axis."""
  x = x - x.max(-1, keepdims=True)
  return x - np.log(np.exp(x).sum(-1, keepdims=True))


def _norm(x, scale):
  return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * scale


def _rotate(x, rotation):
  pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * rotation
  return np.stack([pairs.real, pairs.imag], -1).reshape(x.shape).astype('f4')


def convert(w: dict[str, np.ndarray]) -> dict:
  """Returns the weights as our tree: kernels [in, out], half-split RoPE.

  Ours rotates (x[i], x[i + H/2]), the file's (x[2i], x[2i + 1]): the rows of q
  and k are reordered within each head, even ones first.
  """
  order = np.concatenate([np.arange(0, HEAD_DIM, 2), np.arange(1, HEAD_DIM, 2)])

  def halves(x):
    heads = x.reshape(LAYERS, -1, HEAD_DIM, x.shape[-1])
    return heads[:, :, order].reshape(x.shape)

  def kernel(x):
    return {'kernel': np.swapaxes(x, 1, 2)}

  return {
    'embed': {'table': w['embed']},
    'layers': {
      'attention_norm': {'scale': w['attention_norm']},
      'attention': {
        'q': kernel(halves(w['q'])),
        'k': kernel(halves(w['k'])),
        'v': kernel(w['v']),
        'o': kernel(w['o']),
      },
      'mlp_norm': {'scale': w['mlp_norm']},
      'mlp': {name: kernel(w[name]) for name in ('gate', 'up', 'down')},
    },
    'final_norm': {'scale': w['final_norm']},
  }
