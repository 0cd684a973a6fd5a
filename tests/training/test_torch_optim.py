"""The optimizer against PyTorch: its updates, over all options it has.

1. `optim.make`, update by update, against the formulas (see `torch_peer`).
2. The formulas, and the rates, against `torch.optim`.
3. The train step around it: micro-batches, what it skips, the average.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain import schema, sharding, tree
from posttrain.training import optim
from posttrain.training import step as train_step
from tests.training import torch_peer, torch_trajectories

torch = pytest.importorskip('torch')

UPDATES = 12
# Every option but `max_skipped`, which is the train loop's, and
# `moments_dtype`; in company, and at the edges of what the schema allows.
GRID = {
  'defaults': {},
  'constant': {'schedule': 'constant', 'lr': 0.3},
  'linear': {'schedule': 'linear', 'clip_norm': 1e6},
  'linear_to_third': {'schedule': 'linear', 'final_lr_fraction': 1 / 3},
  'cosine_to_third': {'final_lr_fraction': 1 / 3, 'clip_norm': 1e-3},
  'warmup_1': {'warmup_steps': 1, 'beta1': 0.0},
  'warmup_2': {'warmup_steps': 2, 'schedule': 'constant'},
  'warmup_5': {'warmup_steps': 5, 'schedule': 'linear', 'average': 0.9},
  'warmup_7': {'warmup_steps': 7, 'final_lr_fraction': 0.1},
  'ends_within_warmup': {'warmup_steps': 20},
  'signs': {'beta1': 0.0, 'beta2': 0.0, 'final_lr_fraction': 1.0},
  'momentum_alone': {'beta1': 0.99, 'beta2': 0.0},
  'as_the_paper': {'beta2': 0.999, 'weight_decay': 0.0},
  'strong_decay': {'weight_decay': 10.0, 'eps': 0.1},
  'all_decays': {'no_decay': r'$^', 'weight_decay': 1.0},
  'matrices_do_not': {'no_decay': 'kernel', 'weight_decay': 1.0},
}


def _params(rng):
  return {
    'mlp': {'kernel': rng.normal(size=(5, 7)), 'bias': rng.normal(size=7)},
    'norm': {'scale': 1 + 0.1 * rng.normal(size=5)},
  }


def _gradients(rng):
  """Of any size; one entry is always 0, one only at first."""
  found = []
  for update in range(UPDATES):
    grads = _params(rng)
    grads['mlp']['kernel'][0, 0] = 0
    grads['mlp']['bias'][0] *= update > 3
    size = np.float32(10 ** rng.uniform(-3, 1))
    found.append(jax.tree.map(lambda x, size=size: size * np.float32(x), grads))
  return found


def _tree(tensors):
  """The peer's weights, as ours are."""
  return tree.map_with_path(
    lambda path, _: jnp.asarray(tensors[path], jnp.float32),
    _params(np.random.default_rng(0)),
  )


def _theirs(cfg):
  """(weights before every update, gradients, weights behind all)."""
  rng = np.random.default_rng(0)
  params = torch_peer.tensors(jax.tree.map(np.float32, _params(rng)))
  peer = torch_peer.AdamW(cfg, UPDATES, params)
  trees, seen = _gradients(rng), []
  for grads in trees:
    seen.append(params)
    params = peer.step(params, torch_peer.tensors(grads))
  return seen, trees, params


@pytest.mark.parametrize('name', GRID)
def test_updates_are_the_formulas(name):
  """Each from the peer's weights, so that changes alone are compared."""
  cfg = schema.Optim(**GRID[name])
  seen, trees, last = _theirs(cfg)
  optimizer = optim.make(cfg, UPDATES)
  state, update = optimizer.init(trees[0]), jax.jit(optimizer.update)
  # 1 - beta2^t loses digits in float32, whose numbers below 1 are 6e-8 apart.
  rtol = max(1e-5, 1.5e-8 / (1 - cfg.beta2))
  for i, (before, behind) in enumerate(
    zip(seen, (*seen[1:], last), strict=True)
  ):
    change, state = update(trees[i], state, _tree(before))
    for path, ours in tree.flat(change).items():
      expected = (behind[path] - before[path]).numpy()
      # Where momentum or decay cancel the gradient, by the largest of all.
      np.testing.assert_allclose(
        ours,
        expected,
        rtol=rtol,
        atol=1e-6 * np.abs(expected).max(),
        err_msg=f'{path}, update {i}',
      )
    np.testing.assert_allclose(
      optim.learning_rate(state),
      torch_peer.rate(cfg, i, UPDATES),
      rtol=1e-6,
      atol=1e-7 * cfg.lr,
    )


def test_the_grid_has_every_option():
  options = {field.name for field in dataclasses.fields(schema.Optim)}
  assert set().union(*GRID.values()) == options - {
    'max_skipped',
    'moments_dtype',
  }


def test_clipping_bites_at_times():
  sizes = [
    torch_peer.norm(torch_peer.tensors(grads))
    for grads in _gradients(np.random.default_rng(0))
  ]
  assert min(sizes) < schema.Optim().clip_norm < max(sizes)


def test_matrices_alone_decay():
  """Of all that a model may be made of: no scale and no bias."""
  params = torch_trajectories.start(torch_trajectories.FULL, ranks=True)
  for path in tree.flat(params):
    kept = re.search(schema.Optim().no_decay, path) is not None
    assert kept == path.endswith(('/scale', '/bias')), path
    assert kept != path.endswith(('/kernel', '/table')), path


@pytest.mark.parametrize('name', GRID)
def test_the_formulas_are_torch_adamw(name):
  cfg = schema.Optim(**GRID[name])
  seen, trees, last = _theirs(cfg)
  params = {k: x.clone().requires_grad_() for k, x in seen[0].items()}
  groups = [
    {
      'params': [
        params[k]
        for k in params
        if bool(re.search(cfg.no_decay, k)) is not decays
      ],
      'weight_decay': cfg.weight_decay * decays,
    }
    for decays in (True, False)
  ]
  peer = torch.optim.AdamW(
    [group for group in groups if group['params']],
    lr=cfg.lr,
    betas=(cfg.beta1, cfg.beta2),
    eps=cfg.eps,
  )
  for i, grads in enumerate(trees):
    for path, grad in torch_peer.tensors(grads).items():
      params[path].grad = grad
    size = torch_peer.norm({k: p.grad for k, p in params.items()})
    torch.nn.utils.clip_grads_with_norm_(  # adds 1e-6 to the norm
      params.values(), cfg.clip_norm, size - 1e-6
    )
    for group in peer.param_groups:
      group['lr'] = torch_peer.rate(cfg, i, UPDATES)
    peer.step()
  for path, ours in last.items():
    torch.testing.assert_close(
      ours, params[path].detach(), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize('kind', ['constant', 'linear', 'cosine'])
@pytest.mark.parametrize('final', [0.0, 0.25])
@pytest.mark.parametrize('warmup', [0, 3])
def test_rates_are_torch_schedulers(kind, final, warmup):
  cfg = schema.Optim(
    lr=0.5, schedule=kind, warmup_steps=warmup, final_lr_fraction=final
  )
  made, span = torch.optim.lr_scheduler, UPDATES - warmup

  def rates(count, scheduler, *args, **options):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=cfg.lr)
    scheduler, found = scheduler(optimizer, *args, **options), []
    for _ in range(count):
      found += scheduler.get_last_lr()
      optimizer.step()
      scheduler.step()
    return found

  expected = rates(warmup, made.LinearLR, 1 / 3, total_iters=2)
  expected += {
    'constant': lambda: rates(span + 1, made.ConstantLR, 1.0),
    'linear': lambda: rates(span + 1, made.LinearLR, 1.0, final, span),
    'cosine': lambda: rates(
      span + 1, made.CosineAnnealingLR, span, final * cfg.lr
    ),
  }[kind]()
  rate = optim.schedule(kind, optim.numbers(cfg, UPDATES))
  ours = [float(rate(i)) for i in range(UPDATES + 1)]
  np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-7)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Given:
  """A batch that says what the gradients are, [M, ...] each."""

  grads: dict
  num_micro_batches: np.ndarray  # i32[]
  members: np.ndarray  # f32[]


class Linear:
  """The objective whose gradients are those of `Given`."""

  def prepare(self, params, batch):
    del params
    return batch

  def __call__(self, params, micro):
    products = jax.tree.map(lambda p, g: jnp.sum(p * g), params, micro.grads)
    return sum(jax.tree.leaves(products)), {}


EMPTY, BAD = 8, {3: np.nan, 5: np.inf, 6: -np.inf}


def _batches(trees):
  """Cut into three micro-batches, and a dead one."""
  rng = np.random.default_rng(1)
  for i, grads in enumerate(trees):
    parts = rng.dirichlet(np.ones(3))

    def cut(x, parts=parts):
      pieces = [part * x for part in parts] + [np.full_like(x, np.nan)]
      return np.float32(np.stack(pieces))

    batch = Given(jax.tree.map(cut, grads), np.int32(3), np.float32(i != EMPTY))
    batch.grads['norm']['scale'][1, 2] += BAD.get(i, 0)
    yield batch


@pytest.mark.parametrize('average', [None, 0.75])
def test_the_train_step_is_its_formula(average):
  """Bad gradients and empty batches leave all as it was, their count too."""
  cfg = schema.Optim(
    lr=0.02,
    warmup_steps=2,
    final_lr_fraction=0.1,
    weight_decay=0.5,
    average=average,
  )
  seen, trees, _ = _theirs(cfg)
  optimizer, mesh = optim.make(cfg, UPDATES), sharding.make_mesh(schema.Mesh())
  rules = (('', ()),)
  step = train_step.make_train_step(
    Linear(), optimizer, mesh=mesh, rules=rules, average=average
  )
  state = train_step.init_state(
    _tree(seen[0]), optimizer, average=average is not None
  )
  state = jax.device_put(state, sharding.shardings(state, rules, mesh))
  theirs = seen[0]
  peer, skipped = torch_peer.AdamW(cfg, UPDATES, theirs), 0
  for i, batch in enumerate(_batches(trees)):
    state, metrics = step(state, batch)
    skipped += i in BAD
    assert metrics['optim/skipped'] == skipped
    assert metrics['optim/empty'] == (i == EMPTY)
    if i not in (*BAD, EMPTY):
      theirs = peer.step(theirs, torch_peer.tensors(trees[i]))
      size = torch_peer.norm(torch_peer.tensors(trees[i]))
      np.testing.assert_allclose(metrics['optim/grad_norm'], size, rtol=1e-6)
    _compare(state.params, theirs)
    if average is not None:
      _compare(state.average, peer.average)
  assert int(state.step) == UPDATES and step.compiles == 1


@pytest.mark.parametrize('kind', ['constant', 'linear', 'cosine'])
def test_the_program_is_the_same_for_every_rate_and_number_of_steps(kind):
  seen, trees, _ = _theirs(schema.Optim())
  mesh, texts = sharding.make_mesh(schema.Mesh()), set()
  for lr, warmup_steps, steps in ((0.02, 2, 9), (0.3, 0, 40)):
    cfg = schema.Optim(lr=lr, schedule=kind, warmup_steps=warmup_steps)
    optimizer = optim.make(cfg, steps)
    step = train_step.make_train_step(
      Linear(), optimizer, mesh=mesh, rules=(('', ()),)
    )
    state = train_step.init_state(_tree(seen[0]), optimizer, average=False)
    lowered = step._update.lower(
      state, next(_batches(trees)), None, optimizer.numbers
    )
    texts.add(lowered.as_text())
  assert len(texts) == 1


def _compare(ours, theirs):
  for path, value in tree.flat(jax.device_get(ours)).items():
    np.testing.assert_allclose(
      value, theirs[path], rtol=1e-6, atol=1e-6, err_msg=path
    )
