"""Dynamic sampling: tied groups are replaced within a step."""

import dataclasses
import json

import pytest

from posttrain import schema
from posttrain.pipeline import environment, tokens
from tests import toys
from tests.pipeline.test_tokens import _equal

PROMPTS, GROUP = 6, 2  # of two rollouts each, many are tied


@pytest.fixture(autouse=True)
def letters(monkeypatch):
  toys.install(monkeypatch)


def pipeline(max_draws, **entry):
  """Returns a pipeline, and a list that gets the groups of every round."""
  cfg = toys.stage(PROMPTS, {'toy': toys.entry(GROUP, **entry)})
  batch = dataclasses.replace(cfg.batch, max_draws=max_draws)
  made, driver = toys.pipeline_and_driver(dataclasses.replace(cfg, batch=batch))
  rounds, play = [], driver.play

  def recorded(specs):
    rollouts = yield from play(specs)
    rounds.append(
      [rollouts[i : i + GROUP] for i in range(0, len(rollouts), GROUP)]
    )
    return rollouts

  driver.play = recorded
  return made, rounds


def tied(group):
  return len({rollout.score.reward for rollout in group}) == 1


def spread(groups):
  return [group for group in groups if not tied(group)]


def test_rounds_go_on_until_the_batch_is_full_or_the_draws_are_used_up():
  made, rounds = pipeline(max_draws=12)
  ends = set()
  for _ in range(6):
    rounds.clear()
    item = next(made)
    drawn = 0
    for before, groups in zip([None, *rounds], rounds, strict=False):
      wanted = PROMPTS if before is None else sum(map(tied, before))
      assert len(groups) == min(wanted, 12 - drawn)
      drawn += len(groups)
    last = sum(map(tied, rounds[-1]))
    assert last == 0 or drawn == 12
    ends.add('full' if last == 0 else 'used up')
    groups = [group for found in rounds for group in found]
    assert item.metrics['rollout/draws/toy'] == drawn
    # Statistics are of all that was played, the batch of what has a spread.
    rewards = [r.score.reward for group in groups for r in group]
    assert item.metrics['rollout/reward/toy'] == sum(rewards) / len(rewards)
    kept = spread(groups)
    assert len(kept) <= PROMPTS
    expected = sum(r.samples[0].mask.sum() for g in kept for r in g)
    assert item.batch.rl_count == expected
    assert item.metrics['batch/samples'] == GROUP * PROMPTS
    uids = [r.uid for group in groups for r in group]
    assert uids == list(range(uids[0], uids[0] + len(uids)))
  assert ends == {'full', 'used up'}


def test_the_first_round_is_that_of_a_run_without():
  (with_draws, rounds), (without, plain) = pipeline(12), pipeline(None)
  next(with_draws)
  item = next(without)
  ids = [
    [r.samples[0].ids.tolist() for group in found[0] for r in group]
    for found in (rounds, plain)
  ]
  assert ids[0] == ids[1] and len(plain) == 1
  assert 'rollout/draws/toy' not in item.metrics


def test_a_resumed_run_draws_the_same():
  whole, _ = pipeline(12)
  items = [next(whole) for _ in range(4)]
  resumed, _ = pipeline(12)
  resumed.set_state(json.loads(json.dumps(items[1].state)))
  for item in items[2:]:
    again = next(resumed)
    _equal(item.batch, again.batch)
    assert (item.state, item.metrics) == (again.state, again.metrics)


def test_replacements_are_of_the_environment_of_the_tied_group():
  """So that the ratio of environments in the batch stays."""
  envs = {name: toys.entry(GROUP) for name in ('a', 'b')}
  cfg = toys.stage(PROMPTS, envs)
  batch = dataclasses.replace(cfg.batch, max_draws=18)
  made, driver = toys.pipeline_and_driver(dataclasses.replace(cfg, batch=batch))
  names, play = [], driver.play

  def recorded(specs):
    rollouts = yield from play(specs)
    groups = [rollouts[i : i + GROUP] for i in range(0, len(rollouts), GROUP)]
    names.append([(group[0].samples[0].env, tied(group)) for group in groups])
    return rollouts

  driver.play = recorded
  next(made)
  assert len(names) > 1
  for before, after in zip(names, names[1:], strict=False):
    wanted = sorted(name for name, is_tied in before if is_tied)
    assert sorted(name for name, _ in after) == wanted[: len(after)]


@pytest.mark.parametrize(
  ('algorithm', 'replaced'),
  [
    (schema.Grpo(), True),
    (schema.Rloo(), True),
    (schema.MaxRl(), True),
    (schema.Reward(), False),  # equal rewards teach, too
    (schema.Opd(reference='init'), False),  # reads none
  ],
)
def test_algorithms_that_do_not_compare_keep_all_groups(algorithm, replaced):
  entry = dataclasses.replace(toys.entry(GROUP), algorithm=algorithm)
  cfg = toys.stage(PROMPTS, {'toy': entry})
  data = tokens.TokenData(cfg, toys.fixtures.RENDERER, 3)
  is_tied = data.environments['toy'].is_tied
  _, rounds = made = pipeline(None)
  next(made[0])
  assert any(map(tied, rounds[0])) and is_tied([]) == replaced
  assert [is_tied(group) for group in rounds[0]] == [
    replaced and tied(group) for group in rounds[0]
  ]


def test_metrics_of_rounds_are_means_over_rollouts():
  rounds = [
    environment.Graded([[0] * n], [[0] * n], {'rewards/x': value}, (str(n),))
    for n, value in ((3, 1.0), (1, 0.0))
  ]
  joined = environment.join(rounds)
  assert joined.metrics == {'rewards/x': 0.75}
  assert joined.errors == ('3', '1') and len(joined.groups) == 2


def test_fewer_draws_than_prompts_are_refused():
  with pytest.raises(schema.FieldError, match='>= prompts_per_step=64'):
    schema.Batch(max_draws=10)
