"""The driver: masks and logprobs, stop reasons, errors, and order."""

import dataclasses

import numpy as np
import pytest

from posttrain import types
from posttrain.chat import rendering, tokenizers
from posttrain.rollout import episodes
from tests.rollout import fakes
from tests.rollout.fakes import EOS, RENDERER, Recall, raises, spec

USER, ASSISTANT = 259, 260  # headers
PROMPT = [USER, *b'name', EOS, ASSISTANT]
# The environment's reply to the first turn.
REPLY = [USER, *b'1?', EOS, ASSISTANT]
WHOLE = [*PROMPT, *b'red', EOS, *REPLY, *b'red', EOS]


def run(specs, scripts, max_length=64, **options):
  engine = fakes.Engine(scripts, **options)
  rollouts = episodes.Driver(engine, RENDERER, max_length).run(specs)
  assert not engine.held and not engine.running
  return rollouts, engine


def run_one(script, max_length=64, capacity=10**6, **options):
  """Returns the rollout of one episode; checks that all is closed."""
  episode_spec = spec(7, **options)
  (rollout,), engine = run(
    [episode_spec], {7: script}, max_length, capacity=capacity
  )
  held = [r.id for r in engine.requests if r.hold]
  assert engine.released == held and episode_spec.env.closed == [
    episode_spec.task.id
  ]
  return rollout


def test_sample_of_two_turns_in_literal_tokens():
  episode_spec = spec(7, temperature=0.5)
  (rollout,), engine = run([episode_spec], {7: ['red', 'red']})
  (request,), (sample,) = engine.requests, rollout.samples
  assert request.sampling.temperature == 0.5 and request.hold
  assert request.max_tokens == 8 and request.stop_ids == (EOS,)
  assert sample.ids.tolist() == WHOLE == engine.ids[7].tolist()
  mask = [False] * 7 + [True] * 4 + [False] * 5 + [True] * 4
  assert sample.mask.tolist() == mask
  assert sample.roles.tolist() == ([1] * 6 + [2] * 5 + [1] * 4 + [2] * 5)
  contents = ''.join('.c'[int(x)] for x in sample.is_content)
  assert contents == '.cccc..ccc..cc..ccc.'
  np.testing.assert_array_equal(
    sample.sampler_logprobs, np.where(mask, -np.arange(20) / 8, 0)
  )
  assert sample.temperatures.tolist() == [0.5 if m else 1.0 for m in mask]
  assert sample.versions.tolist() == ([-1] * 7 + [4] * 4 + [-1] * 5 + [5] * 4)
  for field, kind in types.TOKEN_FIELDS.items():
    value = getattr(sample, field)
    assert value is None or value.dtype == kind
  assert (sample.env, sample.row) == ('recall', 't7')
  assert rollout.uid == 7 and rollout.task is episode_spec.task
  assert rollout.stop_reason == 'env_done' and rollout.score.reward == 1
  # The whole conversation, the environment's last message included.
  texts = [m['content'] for m in rollout.messages]
  assert texts == 'name red 1? red 2?'.split()


@pytest.mark.parametrize(
  'pick',
  [lambda uids: uids[-1:], lambda uids: sorted(uids, key=lambda u: u % 3)],
)
def test_episodes_of_different_lengths_do_not_wait_for_each_other(pick):
  turns = {10: 3, 4: 1, 25: 2, 3: 4, 17: 3}
  scripts = {uid: [f'{uid}{x}' for x in 'abcd'[:n]] for uid, n in turns.items()}
  specs = [spec(uid, Recall(max_turns=9), n) for uid, n in turns.items()]
  rollouts, _ = run(specs, scripts, pick=pick)
  assert [rollout.uid for rollout in rollouts] == list(turns)
  for rollout, episode_spec in zip(rollouts, specs, strict=True):
    (alone,), _ = run([episode_spec], scripts)
    fakes.assert_same([rollout], [alone])


def test_a_greedy_turn_has_the_temperature_of_its_logprobs():
  (sample,) = run_one(['red', 'red'], temperature=0.0).samples
  assert (sample.temperatures == 1).all()


@pytest.mark.parametrize(
  'max_turns, turns, script, max_tokens, reason',
  [
    (1, 9, ['red'], 8, 'eos'),  # max_turns ends it before `done`
    (1, 1, ['red'], 3, 'max_tokens'),
    (3, 1, ['red'], 8, 'env_done'),
    (2, 9, ['red', 'red'], 8, 'max_turns'),
    (2, 9, ['red', 'crimson'], 4, 'max_tokens'),
  ],
)
def test_stop_reasons(max_turns, turns, script, max_tokens, reason):
  rollout = run_one(
    script, env=Recall(max_turns), turns=turns, max_tokens=max_tokens
  )
  assert rollout.stop_reason == reason
  assert rollout.samples[0].mask.sum() == sum(
    min(len(text) + 1, max_tokens) for text in script
  )


def test_cut_turn_is_closed_with_an_unsampled_eos():
  (sample,) = run_one(['crimson', 'red'], max_tokens=4).samples
  assert sample.ids.tolist() == [*PROMPT, *b'crim', EOS, *REPLY, *b'red', EOS]
  assert np.flatnonzero(sample.mask).tolist() == [*range(7, 11), *range(17, 21)]
  assert sample.roles[11] == types.ROLES.index('assistant')
  assert sample.versions[11] == -1 and sample.sampler_logprobs[11] == 0
  # A cut turn that ends the episode stays open.
  (sample,) = run_one(['red', 'crimson'], max_tokens=4).samples
  assert sample.ids.tolist() == [*WHOLE[:-4], *b'crim']


def test_template_that_drops_thoughts_starts_a_new_sample():
  renderer = rendering.Renderer(
    tokenizers.Bytes(),
    (
      '{% for m in messages %}<|{{ m.role }}|>'
      "{{ m.content if loop.last else m.content.split('#')[-1] }}<|end|>"
      '{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}'
    ),
  )
  engine = fakes.Restarting({7: ['a#red', 'red', 'b#red', 'red']})
  episode_spec = spec(7, Recall(max_turns=4), 4)
  (rollout,) = episodes.Driver(engine, renderer, 64).run([episode_spec])
  first, second, third = rollout.samples
  assert first.ids.tolist() == [*PROMPT, *b'a#red', EOS]
  head = [*PROMPT, *b'red', EOS, *REPLY]
  more = [*head, *b'red', EOS, USER, *b'2?', EOS, ASSISTANT]
  assert second.ids.tolist() == [*more, *b'b#red', EOS]
  last = [*more, *b'red', EOS, USER, *b'3?', EOS, ASSISTANT]
  assert third.ids.tolist() == [*last, *b'red', EOS]
  # Each sampled token is trained once, and never as part of a history.
  assert [np.flatnonzero(s.mask).tolist() for s in rollout.samples] == [
    list(range(7, 13)),
    [*range(len(head), len(head) + 4), *range(len(more), len(more) + 6)],
    list(range(len(last), len(last) + 4)),
  ]
  # Each restart has another id, so other random numbers; slots are released.
  ids = [request.id for request in engine.requests]
  assert len(set(ids)) == 3 and {episodes.uid_of(i) for i in ids} == {7}
  assert engine.released == ids


def test_sampled_ids_without_a_text_are_kept():
  class Garbled(fakes.Engine):
    def poll(self):
      (completion,) = super().poll()
      ids = completion.ids.copy()
      ids[0], self.ids[completion.id][-len(ids)] = 255, 255
      return [dataclasses.replace(completion, ids=ids)]

  engine = Garbled({7: ['red', 'red']})
  (rollout,) = episodes.Driver(engine, RENDERER, 64).run([spec(7)])
  ids = rollout.samples[0].ids
  np.testing.assert_array_equal(ids, engine.ids[7])
  assert (ids == 255).sum() == 2
  assert rollout.messages[1]['content'] == '\ufffded'


def test_assistant_turns_of_the_prompt_are_not_in_the_mask():
  roles = ('user', 'assistant', 'user')
  shot = tuple({'role': role, 'content': 'q'} for role in roles)
  (sample,) = run_one(['x'], env=Recall(prompt=shot), turns=1).samples
  assert sample.ids[sample.mask].tolist() == [ord('x'), EOS]


# WHOLE has 20 tokens: a prompt of 7, 4 sampled, a reply of 5, 4 sampled.
@pytest.mark.parametrize(
  'max_length, reason, length, reward',
  [
    (20, 'env_done', 20, 1),
    (19, 'overflow', 19, 1),  # cuts the second eos only
    (17, 'overflow', 17, 0),
    (16, 'overflow', 11, 1),  # no token left after the reply
  ],
)
def test_max_length_overflows_the_episode(max_length, reason, length, reward):
  rollout = run_one(['red', 'red'], max_length)
  assert rollout.stop_reason == reason
  assert rollout.samples[0].ids.tolist() == WHOLE[:length]
  assert rollout.score.reward == reward


@pytest.mark.parametrize(
  'capacity, reward, samples', [(18, 0, [WHOLE[:18]]), (5, None, [])]
)
def test_engine_capacity_overflows_the_episode(capacity, reward, samples):
  rollout = run_one(['red', 'red'], capacity=capacity)
  assert rollout.stop_reason == 'overflow' and rollout.score.reward == reward
  assert [x.ids.tolist() for x in rollout.samples] == samples


ERRORS = {
  'make': OSError('no file'),
  'reset': KeyError('x'),
  'step': AssertionError('theirs'),
  'grade': StopIteration('end'),
  'close': SystemExit(0),
}


@pytest.mark.parametrize('blocking', [False, True])
@pytest.mark.parametrize('hook', ERRORS)
def test_environment_error_ends_only_its_own_episode(hook, blocking):
  error = ERRORS[hook]
  broken = Recall(fails={hook: raises(error)}, blocking=blocking)
  specs = [spec(1), spec(2, broken), spec(3)]
  rollouts, engine = run(specs, {uid: ['red', 'red'] for uid in (1, 2, 3)})
  for rollout in rollouts[::2]:
    assert rollout.samples[0].ids.tolist() == WHOLE
  failed = rollouts[1]
  assert failed.stop_reason == 'error' and failed.uid == 2
  assert failed.score == types.Score(None) and failed.samples == ()
  assert failed.error.startswith(f'recall/t2: {type(error).__name__}: ')
  assert broken.closed == ([] if hook == 'make' else ['t2'])  # once
  assert (2 in engine.released) == (hook not in ('make', 'reset'))


def test_exception_of_the_engine_is_raised_and_closes_open_episodes():
  env = Recall()
  engine = fakes.Engine({1: ['red'], 2: []}, pick=lambda uids: uids)
  with pytest.raises(IndexError):
    episodes.Driver(engine, RENDERER, 64).run([spec(1, env), spec(2, env)])
  assert env.closed == ['t1', 't2']
