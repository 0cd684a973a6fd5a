"""Turns and their rewards, episode budgets, and truncated histories."""

import numpy as np
import pytest

from posttrain import types
from posttrain.rollout import episodes
from tests.rollout import fakes
from tests.rollout.fakes import EOS, RENDERER, Recall, spec

USER, ASSISTANT = 259, 260  # headers
NAME = [USER, *b'name', EOS]


def run(script, max_length=200, max_turns=9, renderer=RENDERER, **options):
  """Returns the rollout of one episode, and its engine."""
  episode_spec = spec(
    7, Recall(max_turns), options.pop('turns', len(script)), **options
  )
  engine = fakes.Restarting({7: script})
  (rollout,) = episodes.Driver(engine, renderer, max_length).run([episode_spec])
  assert not engine.held and not engine.running
  return rollout, engine


def test_turns_have_places_rewards_and_stop_reasons():
  rollout, _ = run(['red', 'crimson', 'blue'], max_tokens=4)
  assert rollout.turns == (
    types.Turn(0, 7, 4, 0.5, 'eos'),
    types.Turn(0, 16, 4, 1.0, 'max_tokens'),
    # After the turn before: an unsampled eos, and five tokens.
    types.Turn(0, 26, 4, 1.5, 'max_tokens'),
  )
  sampled = [i for t in rollout.turns for i in range(t.start, t.start + 4)]
  assert np.flatnonzero(rollout.samples[0].mask).tolist() == sampled


# A prompt of 7, 4 sampled, a reply of 5, 4 sampled.
@pytest.mark.parametrize(
  'budget, added, reason',
  [
    (None, 13, 'env_done'),
    (10, 10, 'overflow'),
    (9, 4, 'overflow'),
    (2, 2, 'overflow'),
  ],
)
def test_max_episode_tokens_limits_added_tokens(budget, added, reason):
  rollout, engine = run(['red', 'red'], max_episode_tokens=budget)
  assert len(rollout.samples[0]) == 7 + added
  assert rollout.stop_reason == reason
  assert engine.requests[0].max_tokens == min(8, budget or 8)


def test_truncated_history_in_literal_tokens():
  rollout, _ = run(['a', 'b', 'c', 'd'], keep_exchanges=1)
  reply = [[USER, *f'{i}?'.encode(), EOS] for i in range(5)]
  turn = {x: [ASSISTANT, *x.encode(), EOS] for x in 'abcd'}
  first, second, third = rollout.samples
  assert first.ids.tolist() == [*NAME, *turn['a'], *reply[1], *turn['b']]
  assert second.ids.tolist() == [*NAME, *turn['b'], *reply[2], *turn['c']]
  assert third.ids.tolist() == [*NAME, *turn['c'], *reply[3], *turn['d']]
  ends = [np.flatnonzero(s.mask).tolist() for s in rollout.samples]
  assert ends == [[7, 8, 14, 15], [14, 15], [14, 15]]
  # Indices into the rollout's messages: name a 1? b 2? c 3? d 4?
  assert second.message_ids.tolist() == ([0] * 6 + [3] * 3 + [4] * 4 + [-1] * 3)
  assert [(t.sample, t.start, t.reward) for t in rollout.turns] == [
    (0, 7, 0.5),
    (0, 14, 1.0),
    (1, 14, 1.5),
    (2, 14, 2.0),
  ]


def test_repeated_history_does_not_count_towards_the_budget():
  for budget in range(1, 40):
    options = {'script': ['ab', 'c', 'd', 'e'], 'max_episode_tokens': budget}
    cut, _ = run(**options, keep_exchanges=1)
    whole, _ = run(**options)
    assert cut.messages == whole.messages
    assert cut.stop_reason == whole.stop_reason
    assert [t.length for t in cut.turns] == [t.length for t in whole.turns]
