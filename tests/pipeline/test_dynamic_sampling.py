"""Dynamic sampling: groups without credit are replaced within a step."""

import collections
import dataclasses
import itertools
import json

import numpy as np
import pytest

from posttrain import schema
from posttrain.envs import registry
from posttrain.pipeline import environments, tokens
from tests import toys
from tests.algorithms import two_turns
from tests.pipeline.test_tokens import _equal

PROMPTS, GROUP = 6, 2  # of two rollouts each, many are tied


@pytest.fixture(autouse=True)
def letters(monkeypatch):
  toys.install(monkeypatch)


def pipeline(max_draws, names=('toy',)):
  """Returns a pipeline, and a list that gets the groups of every round."""
  cfg = toys.stage(PROMPTS, {name: toys.entry(GROUP) for name in names})
  batch = dataclasses.replace(cfg.batch, max_draws=max_draws)
  made, driver = toys.pipeline_and_driver(dataclasses.replace(cfg, batch=batch))
  rounds, play = [], driver.play

  def recorded(*args):
    rollouts = yield from play(*args)
    rounds.append(
      [rollouts[i : i + GROUP] for i in range(0, len(rollouts), GROUP)]
    )
    return rollouts

  driver.play = recorded
  return made, rounds


def tied(group):
  return len({rollout.score.reward for rollout in group}) == 1


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
    is_full = not any(map(tied, rounds[-1]))
    assert is_full or drawn == 12
    ends.add(is_full)
    groups = [group for found in rounds for group in found]
    assert item.metrics['rollout/draws/toy'] == drawn
    # Statistics are of all that was played, the batch of what has a spread.
    rewards = [r.score.reward for group in groups for r in group]
    assert item.metrics['rollout/reward/toy'] == np.mean(rewards)
    kept = [group for group in groups if not tied(group)]
    assert len(kept) <= PROMPTS
    expected = sum(r.samples[0].mask.sum() for g in kept for r in g)
    assert item.batch.rl_count == expected
  assert ends == {True, False}


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
  made, rounds = pipeline(18, names=('a', 'b'))
  next(made)
  assert len(rounds) > 1
  for before, after in itertools.pairwise(rounds):
    wanted, drawn = (
      collections.Counter(group[0].samples[0].env for group in groups)
      for groups in (filter(tied, before), after)
    )
    assert not drawn - wanted
    assert drawn == wanted or drawn.total() < wanted.total()


@pytest.mark.parametrize(
  ('algorithm', 'replaced'),
  [
    (schema.Grpo(), True),
    (schema.Custom(import_path='tests.algorithms.credits:ramp'), False),
    (schema.Opd(reference='init'), False),  # reads no rewards
  ],
)
def test_groups_without_credit_are_those_that_teach_nothing(
  algorithm, replaced
):
  lacks_credit = environment_of(algorithm).lacks_credit
  made, rounds = pipeline(None)
  next(made)
  assert any(map(tied, rounds[0]))
  assert [lacks_credit(group) for group in rounds[0]] == [
    replaced and tied(group) for group in rounds[0]
  ]
  # A group whose episodes have all failed.
  assert lacks_credit([]) == (algorithm.type != 'opd')


def test_credit_of_masked_rollouts_is_no_credit():
  environment = environment_of(schema.Grpo(mask_truncated=True))
  first, last = two_turns.group(1.0, 0.0)
  cut = [dataclasses.replace(x, stop_reason='overflow') for x in (first, last)]
  for group, lacks in (([first, cut[1]], False), (cut, True)):
    assert environment.lacks_credit(group) == lacks
    graded = environments.Graded([group], [group], {}, ())
    metrics = environment.metrics(graded, environment.samples([group]))
    assert metrics['rollout/masked/toy'] == 1 + lacks
    assert metrics['advantage/max/toy'] == 0.5


def test_a_critic_has_advantages_for_groups_without_a_reward():
  environment = environment_of(schema.Ppo(mask_truncated=True))
  group = two_turns.group(0.0, 0.0)
  cut = [dataclasses.replace(x, stop_reason='overflow') for x in group]
  lacks = environment.lacks_credit
  assert [*map(lacks, (group, cut, []))] == [False, True, True]


def environment_of(algorithm):
  entry = dataclasses.replace(toys.entry(GROUP), algorithm=algorithm)
  cfg = toys.stage(PROMPTS, {'toy': entry})
  data = tokens.TokenData(
    cfg, registry.make_all(cfg.envs), toys.fixtures.RENDERER, 3
  )
  return data.environments['toy']


def test_groups_whose_messages_are_learned_are_kept():
  """As those of echo, whose cross-entropy needs no credit."""

  class Echo:
    def lacks_credit(self, group):
      return 'tied' in group

    def observes(self, group):
      return 'tool' in group

  tied, tool, mixed = ['tied'], ['tied', 'tool'], ['mixed']
  usable = [tied, tool, mixed]
  assert environments.Environment.kept(Echo(), usable, 1) == [mixed, tool]
  assert environments.Environment.kept(Echo(), usable, 3) == usable


def test_messages_of_tools_are_learned_by_echo_alone():
  user = schema.Echo(roles={'user': schema.EchoRole()})  # there is none
  for algorithm in (schema.Echo(), user, schema.Grpo()):
    observes = environment_of(algorithm).observes([two_turns.rollout()])
    assert observes == (algorithm == schema.Echo())


def test_metrics_of_rounds_are_means_over_rollouts():
  rounds = [
    environments.Graded([[0] * n], [[0] * n], {'rewards/x': value}, (str(n),))
    for n, value in ((3, 1.0), (1, 0.0))
  ]
  joined = environments.join(rounds)
  assert joined.metrics == {'rewards/x': 0.75}
  assert joined.errors == ('3', '1') and len(joined.groups) == 2
