"""Preference and ranking as objectives: identities, cuts, KTO's baseline."""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain import schema, scoring, tree, types
from posttrain.data import preferences
from posttrain.losses import combine
from posttrain.models import transformer
from posttrain.training import pair_objectives
from posttrain.training import step as train_step
from tests import fixtures

PARAMS = fixtures.params()
LOSSES = (
  schema.Sigmoid(beta=0.3, label_smoothing=0.1),
  schema.SigmoidNorm(),
  schema.IpoPairs(),
  schema.IpoNorm(),
  schema.SimPo(),
  schema.Kto(),
)
KINDS = (*LOSSES, 'ranking')
FIRST = (LOSSES[0], LOSSES[-1], 'ranking')  # the others with the slow tests
PROMPT = 3


def _sample(rng, length):
  """Behind the answer stands what a chat template might end a turn with."""
  ids = rng.integers(0, fixtures.MODEL.vocab_size, length).astype(np.int32)
  zeros = np.zeros(length, np.float32)
  return types.Sample(
    env='',
    row='',
    ids=ids,
    mask=(np.arange(length) >= PROMPT) & (np.arange(length) < length - 1),
    roles=zeros,
    is_content=zeros,
    sampler_logprobs=zeros,
    temperatures=zeros + 1,
    versions=zeros,
  )


def _choices(count=6, seed=0):
  rng = np.random.default_rng(seed)
  return [
    types.Pair(
      _sample(rng, 8 + i % 3),
      _sample(rng, 6 + i % 4),
      np.float32(rng.normal(-25, 3, 2)),
      margin=0.1 * i,
    )
    for i in range(count)
  ]


def _pack(choices, others=(), rows=2):
  """With dead micro-batches behind: one program for all but other `rows`."""
  batch = preferences.pack(choices, others, rows=rows, row_tokens=32, per_row=2)
  more = 6 - len(batch.ids)
  return jax.tree.map(
    lambda x: np.pad(x, [(0, more), *[(0, 0)] * (x.ndim - 1)]) if x.ndim else x,
    batch,
  )


def _objective(kind):
  if kind == 'ranking':
    return pair_objectives.Ranking(fixtures.MODEL, (), schema.Loss())
  loss = schema.Loss(preference=kind)
  return pair_objectives.Preference(fixtures.MODEL, (), loss)


@functools.cache
def _run(kind):
  """Gradients, metrics and loss of a batch."""
  objective = _objective(kind)

  def run(params, batch):
    batch = objective.prepare(params, batch)
    grads, metrics, loss = train_step.accumulate(objective, params, batch)
    return grads, combine.means(metrics), loss

  return jax.jit(run)


def _params(kind):
  if kind != 'ranking':
    return PARAMS
  params = transformer.add_reward(PARAMS)
  kernel = params['reward']['kernel']
  params['reward'] = {'kernel': jnp.cos(jnp.arange(kernel.size, dtype='f'))}
  return params


def _name(kind):
  return getattr(kind, 'type', kind)


@pytest.mark.parametrize(
  'kind',
  [
    pytest.param(x, marks=() if x in FIRST else pytest.mark.slow) for x in KINDS
  ],
  ids=_name,
)
def test_the_cut_does_not_matter(kind):
  """Rows of a micro-batch, order of choices: same loss and gradients."""
  choices = _choices()
  others = [dataclasses.replace(x, rejected=None) for x in _choices(4, seed=1)]
  params = _params(kind)
  grads, metrics, loss = _run(kind)(params, _pack(choices, others))
  cuts = [_pack(choices[::-1], others)]
  if kind != 'ranking':
    cuts.append(_pack(choices, others, rows=6))
  for batch in cuts:
    grads_cut, metrics_cut, loss_cut = _run(kind)(params, batch)
    np.testing.assert_allclose(loss, loss_cut, rtol=1e-5)
    assert fixtures.worst(grads, grads_cut) < 1e-5
    for name, value in metrics.items():
      np.testing.assert_allclose(
        value, metrics_cut[name], rtol=1e-4, atol=1e-5, err_msg=name
      )


@pytest.mark.parametrize('kind', [schema.Sigmoid(), 'ranking'], ids=_name)
def test_no_number_is_held_per_answer_and_token(kind):
  batch = jax.tree.map(lambda x: x[0] if x.ndim else x, _pack(_choices()))
  shapes = jax.make_jaxpr(jax.grad(lambda p: _objective(kind)(p, batch)[0]))
  text = str(shapes(_params(kind)))
  assert 'f32[2,2,2]' in text and 'f32[2,2,2,32]' not in text


def _logprobs(samples):
  """Log probability of each answer, one forward each."""
  made = scoring.Scorer(fixtures.MODEL, 1, 32)
  scored = made(
    PARAMS, [s.ids for s in samples], [s.temperatures for s in samples]
  )
  return np.array(
    [x[s.mask].sum() for x, s in zip(scored, samples, strict=True)]
  )


def _undecided():
  """Choices whose reference is the policy at first."""
  return [
    dataclasses.replace(
      x, ref_logprobs=np.float32(_logprobs([x.chosen, x.rejected]))
    )
    for x in _choices()
  ]


def test_a_policy_that_is_its_reference():
  """log 2, no reward, no drift; half of KTO's weight."""
  choices = _undecided()
  dpo = schema.Sigmoid(beta=0.3)
  _, metrics, loss = _run(dpo)(PARAMS, _pack(choices))
  np.testing.assert_allclose(loss, np.log(2), rtol=1e-5)
  for name in (
    'rewards/chosen',
    'rewards/rejected',
    'rewards/margins',
    'drift/chosen',
    'drift/rejected',
  ):
    np.testing.assert_allclose(metrics[name], 0, atol=1e-5)
  _, metrics, loss = _run(LOSSES[-1])(PARAMS, _pack(choices, choices))
  np.testing.assert_allclose(loss, 0.5, atol=1e-5)
  np.testing.assert_allclose(metrics['kto/baseline'], 0, atol=1e-4)


def test_dpo_is_the_formula_on_one_forward_each():
  choices = _choices()
  chosen = _logprobs([x.chosen for x in choices])
  rejected = _logprobs([x.rejected for x in choices])
  ref = np.array([x.ref_logprobs for x in choices])
  margins = 0.3 * (chosen - ref[:, 0] - rejected + ref[:, 1])
  expected = np.log1p(np.exp(-margins)).mean()
  _, metrics, loss = _run(schema.Sigmoid(beta=0.3))(PARAMS, _pack(choices))
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  np.testing.assert_allclose(
    metrics['rewards/margins'], margins.mean(), rtol=1e-4
  )
  np.testing.assert_allclose(
    metrics['rewards/accuracies'], (margins > 0).mean(), rtol=1e-6
  )
  np.testing.assert_allclose(metrics['logps/chosen'], chosen.mean(), rtol=1e-5)


def test_kto_reads_its_baseline_off_the_others():
  """The mean log ratio of mismatched answers, of the whole batch."""
  others = [
    dataclasses.replace(x, rejected=None, ref_logprobs=np.float32([low, 0]))
    for x, low in zip(_choices(5, seed=1), range(-80, -30, 10), strict=True)
  ]
  drift = _logprobs([x.chosen for x in others]) - np.arange(-80, -30, 10)
  _, metrics, _ = _run(LOSSES[-1])(PARAMS, _pack(_choices(), others))
  assert drift.mean() > 0
  np.testing.assert_allclose(metrics['kto/baseline'], drift.mean(), rtol=1e-4)


def test_answers_alone_are_for_kto():
  """A pair needs both; KTO reads what there is."""
  choices = _choices(4)
  choices[1] = dataclasses.replace(choices[1], rejected=None)
  choices[2] = dataclasses.replace(choices[2], chosen=None)
  batch = _pack(choices)
  assert (batch.pairs, batch.answers) == (2, 6)
  whole = _run(LOSSES[0])(PARAMS, batch)
  fewer = _run(LOSSES[0])(PARAMS, _pack([choices[0], choices[3]]))
  np.testing.assert_allclose(whole[2], fewer[2], rtol=1e-5)
  _, metrics, loss = _run(LOSSES[-1])(PARAMS, batch)
  assert 0 < loss < 1 and np.isfinite(metrics['rewards/rejected'])


def test_a_reward_is_read_at_the_answers_last_token():
  """Whatever stands behind it in its row, and nothing of what it follows."""
  choices, params = _choices(1), _params('ranking')
  _, alone, _ = _run('ranking')(params, _pack(choices))
  _, metrics, _ = _run('ranking')(params, _pack(choices + choices))
  np.testing.assert_allclose(
    alone['rewards/chosen'], metrics['rewards/chosen'], rtol=1e-5
  )
  sample = choices[0].rejected
  n = len(sample)
  hidden, _ = transformer.trunk(
    params,
    fixtures.MODEL,
    sample.ids[None],
    jnp.arange(n)[None],
    jnp.ones((1, n), jnp.int32),
  )
  value = transformer.rewards(params, hidden)
  # Of the answer, not of the sequence: a token follows that is none of its.
  np.testing.assert_allclose(alone['rewards/rejected'], value[0, -2], rtol=1e-5)


def test_lm_coef_adds_the_mean_nll_per_token_of_chosen_answers():
  choices, params = _choices(), _params('ranking')
  batch = _pack(choices)
  _, plain, _ = _run('ranking')(params, batch)
  objective = pair_objectives.Ranking(
    fixtures.MODEL, (), schema.Loss(ranking=schema.Ranking(lm_coef=0.3))
  )
  _, metrics, loss = jax.jit(
    lambda p, b: train_step.accumulate(objective, p, b)
  )(params, batch)
  metrics = combine.means(metrics)
  answers = [x.chosen for x in choices if x.rejected and x.chosen]
  nll = -_logprobs(answers) / [x.mask.sum() for x in answers]
  np.testing.assert_allclose(metrics['loss/lm'], 0.3 * nll.mean(), rtol=1e-5)
  np.testing.assert_allclose(
    metrics['loss/ranking'], plain['loss/ranking'], rtol=1e-6
  )
  np.testing.assert_allclose(
    loss, plain['loss/ranking'] + 0.3 * nll.mean(), rtol=1e-5
  )


def test_a_head_stays_where_it_is_needed():
  untied = dataclasses.replace(fixtures.MODEL, tied_head=False)
  assert 'head' not in transformer.reward_shapes(untied)
  assert 'head' in transformer.reward_shapes(untied, keep_lm_head=True)
  assert 'head' not in transformer.reward_shapes(
    fixtures.MODEL, keep_lm_head=True
  )


def test_a_fresh_reward_head_scores_0_and_has_a_gradient():
  params = transformer.add_reward(PARAMS)
  grads, metrics, loss = _run('ranking')(params, _pack(_choices()))
  assert metrics['rewards/chosen'] == 0
  assert metrics['rewards/accuracies'] == 0.5  # a tie
  assert loss > 0 and np.abs(grads['reward']['kernel']).max() > 0


@pytest.mark.parametrize('kind', [LOSSES[0], 'ranking'], ids=_name)
def test_training_raises_margins_and_lowers_the_loss(kind):
  """Starts where both answers have equal scores."""
  init = (lambda: transformer.add_reward(PARAMS)) if kind == 'ranking' else None
  step, state = fixtures.make(objective=_objective(kind), init=init)
  batch = _pack([dataclasses.replace(x, margin=0.0) for x in _undecided()])
  measured = []
  for _ in range(12):
    state, metrics = step(state, batch)
    measured.append(jax.device_get(metrics))
  first, last = measured[0], measured[-1]
  assert abs(first['rewards/margins']) < 1e-5 and last['rewards/margins'] > 1
  assert last['rewards/accuracies'] == 1
  assert last['loss/total'] < 0.7 * first['loss/total']


def _outcome(mesh, kind):
  """What two steps on a mesh measure, and leave."""
  step, state = fixtures.make(
    mesh=schema.Mesh(*mesh),
    objective=_objective(kind),
    # A large eps: Adam's division by small gradients magnifies rounding.
    cfg=dataclasses.replace(fixtures.OPTIM, eps=1e-3),
    init=lambda: _params(kind),
  )
  batch, found = _pack(_choices(), _choices(4, seed=1)), {}
  for i in range(2):
    state, metrics = step(state, batch)
    found |= {f'{i}/{k}': np.asarray(v) for k, v in metrics.items()}
  return found | {k: np.asarray(v) for k, v in tree.flat(state.params).items()}


@pytest.mark.slow
@pytest.mark.parametrize(
  ('kind', 'mesh'), [(LOSSES[-1], (1, 2, 2)), ('ranking', (2, 1, 2))], ids=_name
)
def test_one_device_equals_four(kind, mesh, tmp_path):
  path = tmp_path / 'four.npz'
  words = map(str, (path, KINDS.index(kind), *mesh))
  fixtures.run_on_devices(
    4, '-m', 'tests.training.test_pair_objectives', *words
  )
  four, one = dict(np.load(path)), _outcome((1, 1, 1), kind)
  assert four.keys() == one.keys()
  for name, value in one.items():
    np.testing.assert_allclose(
      four[name], value, rtol=1e-5, atol=1e-5, err_msg=name
    )


if __name__ == '__main__':
  assert jax.device_count() == 4
  _, file, which, *sizes = sys.argv
  np.savez(file, **_outcome(map(int, sizes), KINDS[int(which)]))
