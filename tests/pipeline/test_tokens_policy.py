"""The pipeline with the policy as its sampler, against the real engine."""

import json

import numpy as np
import pytest

from posttrain import schema, scoring, types
from posttrain.envs import registry
from posttrain.pipeline import tokens as token_pipeline
from tests import fixtures, toys
from tests.pipeline.test_tokens import _equal


@pytest.fixture(autouse=True)
def letters(monkeypatch):
  toys.install(monkeypatch)


def _by_rollout(batch):
  """Sample by the bytes of its ids: no two answers of several are equal."""
  found = {}
  for micro, row in np.ndindex(batch.ids.shape[:2]):
    for segment in range(1, batch.segment_ids[micro, row].max() + 1):
      place = (micro, row, batch.segment_ids[micro, row] == segment)
      made = {name: getattr(batch, name)[place] for name in types.TOKEN_FIELDS}
      assert found.setdefault(made['ids'].tobytes(), made) is made
  return found


def _groups(rollouts, size=4):
  return [rollouts[i : i + size] for i in range(0, len(rollouts), size)]


def _check_credit(batch, groups):
  """The batch trains on these groups, each by its own mean, and no other."""
  found, expected = _by_rollout(batch), {}
  for group in groups:
    mean = np.mean([r.score.reward for r in group])
    for rollout in group:
      if rollout.score.reward != mean:
        ids = rollout.samples[0].ids.tobytes()
        expected[ids] = rollout.score.reward - mean
  assert found.keys() == expected.keys()
  for ids, advantage in expected.items():
    mask = found[ids]['mask']
    np.testing.assert_allclose(
      found[ids]['advantages'], np.where(mask, advantage, 0), atol=1e-6
    )
    np.testing.assert_array_equal(found[ids]['rl_weights'], mask)
  assert batch.rl_count == sum(s['mask'].sum() for s in found.values()) > 0
  return found


def test_groups_become_streams():
  source, driver = toys.pipeline_and_driver(toys.stage())
  first = token_pipeline.UIDS_PER_STAGE  # of the second stage
  pruned = 0
  for step in range(3):
    item = next(source)
    uids = [rollout.uid for rollout in driver.rollouts]
    assert uids == list(range(first + 16 * step, first + 16 * (step + 1)))
    groups = _groups(driver.rollouts)
    assert all(len({r.task.id for r in group}) == 1 for group in groups)
    found = _check_credit(item.batch, groups)
    # Groups that tie are pruned.
    pruned += sum(len({r.score.reward for r in x}) == 1 for x in groups)
    for sample in found.values():
      mask = sample['mask']
      np.testing.assert_array_equal(sample['versions'], np.where(mask, 5, -1))
      assert (sample['sampler_logprobs'][mask] < 0).all()
    assert item.metrics['batch/samples'] == 16
    assert item.metrics['batch/rl_tokens'] == item.batch.rl_count
  assert pruned > 0


def test_environments_of_both_kinds_share_a_batch(tmp_path):
  path = tmp_path / 'rows.jsonl'
  rows = [{'prompt': 'Say it.', 'completion': word} for word in ('yes', 'no')]
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  chat = schema.EnvEntry(env=schema.Rows(path=str(path)))
  cfg = toys.stage(prompts=8, envs={'chat': chat, 'toy': toys.entry()})
  source, driver = toys.pipeline_and_driver(cfg)
  batch = next(source).batch
  assert {r.task.env for r in driver.rollouts} == {'toy'}
  shown = (batch.env_ids == 0) & batch.mask
  np.testing.assert_array_equal(batch.ce_weights > 0, shown)
  said = (batch.env_ids == 1) & batch.mask
  np.testing.assert_array_equal(batch.rl_weights > 0, said)
  assert batch.ce_count == shown.sum() > 0 < said.sum() == batch.rl_count


class Failing(toys.Letters):
  """Cannot grade some of the answers: about a quarter of them."""

  def grade(self, task, text):
    if len(text) % 4 == 1:
      raise RuntimeError(f'no grade for {len(text)}')
    return super().grade(task, text)


def test_an_error_is_in_neither_loss_nor_baseline(monkeypatch):
  toys.install(monkeypatch, Failing)
  source, driver = toys.pipeline_and_driver(toys.stage())
  item = next(source)
  failed = [r for r in driver.rollouts if r.stop_reason == 'error']
  assert 0 < len(failed) < 10
  alive = [
    [r for r in group if r not in failed] for group in _groups(driver.rollouts)
  ]
  _check_credit(item.batch, alive)
  assert item.metrics['rollout/errors/toy'] == len(failed)
  assert item.metrics['batch/samples'] == 16 - len(failed)
  assert item.errors == tuple(r.error for r in failed)
  assert item.metrics['rollout/reward/toy'] == np.mean(
    [r.score.reward for group in alive for r in group]
  )


def test_a_step_in_which_nothing_is_graded_trains_nothing(monkeypatch):
  monkeypatch.setattr(toys.Letters, 'grade', lambda *_: types.Score(None))
  item = next(toys.pipeline_and_driver(toys.stage())[0])
  assert item.batch.num_micro_batches == 0 and item.batch.rl_count == 0
  assert item.metrics['rollout/ungraded/toy'] == 16


def test_ref_logprobs_are_those_of_the_named_reference():
  grpo = {'kl_beta': 0.25, 'reference': 'init'}
  cfg = toys.stage(envs={'toy': toys.entry(temperature=0.7, **grpo)})
  init = toys.params(seed=1)
  source, driver = toys.pipeline_and_driver(cfg, init=init)
  found = _by_rollout(next(source).batch)
  assert len(found) == 16  # the pruned ones too
  samples = [r.samples[0] for r in driver.rollouts]
  scorer = scoring.Scorer(fixtures.MODEL, 2, 64)
  scored = scorer(
    init, [s.ids for s in samples], [s.temperatures for s in samples]
  )
  for sample, logprobs in zip(samples, scored, strict=True):
    got, mask = found[sample.ids.tobytes()], sample.mask
    np.testing.assert_array_equal(got['ref_kl_weights'], 0.25 * mask)
    np.testing.assert_allclose(
      got['ref_logprobs'][mask], logprobs[mask], atol=1e-5
    )


class Backwards(toys.Driver):
  """Returns what it played in the opposite order."""

  def play(self, specs, *args):
    return (yield from super().play(specs, *args))[::-1]


def test_groups_are_formed_by_id(monkeypatch):
  """Whatever order rollouts come back in: each group has its own mean."""
  straight = next(toys.pipeline_and_driver(toys.stage())[0]).batch
  monkeypatch.setattr(toys, 'Driver', Backwards)
  turned = next(toys.pipeline_and_driver(toys.stage())[0]).batch
  _equal(straight, turned)


def test_a_frozen_model_is_imitated_at_temperature_1():
  sampler = schema.Frozen(model='stage:a', max_tokens=6, temperature=0.5)
  entry = schema.EnvEntry(algorithm=schema.Sft(), group_size=2, sampler=sampler)
  cfg = toys.stage(envs={'frozen': entry})
  source, _ = toys.pipeline_and_driver(cfg, frozen=True)
  data = token_pipeline.TokenData(
    cfg, registry.make_all(cfg.envs), fixtures.RENDERER, seed=0
  )
  assert data.references == {'stage:a': 'envs.frozen.sampler.model'}
  assert data.players == {'stage:a'} and not source.uses_policy
  item = next(source)
  batch = item.batch
  assert batch.ce_count == batch.mask.sum() > 0
  assert not (batch.rl_count or batch.sampler_logprobs.any())
  assert (batch.temperatures == 1).all() and (batch.versions == -1).all()
  assert 'rollout/reward/frozen' in item.metrics  # what the teacher is worth
  assert 'rollout/entropy/frozen' not in item.metrics
