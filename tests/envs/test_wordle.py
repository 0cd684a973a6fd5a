"""Wordle: marks of letters, guesses that are read, games and their rewards."""

import random

import pytest

from posttrain import schema
from posttrain.envs import wordle


@pytest.mark.parametrize(
  ('guess', 'secret', 'marks'),
  [
    ('crane', 'crane', 'GGGGG'),
    ('crane', 'quilt', 'XXXXX'),
    ('crane', 'caner', 'GYYYY'),
    # A letter is marked as often as the secret has it, G before Y.
    ('allow', 'label', 'YYYXX'),
    ('eerie', 'geese', 'YGXXG'),
    ('geese', 'eerie', 'XGYXG'),
    ('paper', 'apple', 'YYGYX'),
  ],
)
def test_marks(guess, secret, marks):
  assert wordle.feedback(guess, secret) == marks


@pytest.mark.parametrize(
  ('text', 'guess'),
  [
    *((' crane\n', 'crane'), ('CRANE', 'crane'), ('crane quilt', '')),
    *(('cran', ''), ('cranes', ''), ('cr4ne', ''), ('', '')),
    ('<guess>[crane]</guess>', 'crane'),
    ('<guess>crane</guess> or <guess>Quilt</guess>', 'quilt'),
    ('<think><guess>crane</guess></think> quilt', 'quilt'),
  ],
)
def test_guesses_are_read(text, guess):
  assert wordle.parse_guess(text) == guess


def play(cfg, *turns):
  env = wordle.Wordle('e', cfg)
  episode = env.make(env.task('crane'))
  outs = [episode.step(turn, False) for turn in turns]
  assert [x.done for x in outs[:-1]] == [False] * (len(outs) - 1)
  assert (
    sum(x.reward for x in outs) == episode.grade().reward or not outs[-1].done
  )
  return outs, episode.grade()


def test_a_game_ends_with_the_secret_or_the_last_guess():
  cfg = schema.Wordle(guesses=3, style='compact', reward='published')
  outs, score = play(cfg, 'paper', 'xx', 'crane')
  texts = [x.messages[0]['content'] for x in outs[:2]]
  assert texts == ['pXaYpXeYrY', '?'] and outs[2].done
  assert score.correct and not score.formatted
  assert score.reward == 1 + 1 / 3
  outs, score = play(cfg, 'paper', 'quilt', 'crank')
  assert outs[2].done and score.correct is False and score.formatted
  assert score.reward == pytest.approx(0.2 * 4 + 0.2)
  _, score = play(schema.Wordle(guesses=3), 'paper', 'quilt', 'crank')
  assert score.reward == 0.0


def test_verbose_feedback_has_marks_below_letters():
  outs, _ = play(schema.Wordle(), '<guess>paper</guess>')
  (message,) = outs[0].messages
  assert 'P A P E R\nX Y X Y Y\n' in message['content']
  assert '5 guesses left' in message['content']


def test_guesses_of_demonstrations_agree_with_all_feedback():
  for secret in wordle.WORDS[::97]:
    game = list(wordle.consistent_game(secret, wordle.WORDS, random.Random(0)))
    assert game[-1] == secret
    for i, guess in enumerate(game):
      for before in game[:i]:
        marks = [wordle.feedback(before, x) for x in (secret, guess)]
        assert marks[0] == marks[1]


def test_a_fifth_of_the_words_is_never_secret_in_training(tmp_path):
  assert len(set(wordle.WORDS)) == len(wordle.WORDS) == 679
  env = wordle.Wordle('e', schema.Wordle(train_tasks=551, eval_tasks=128))
  secrets = [
    {task.answer for task in env.source(split, 0).take(551)}
    for split in ('train', 'eval')
  ]
  assert [len(x) for x in secrets] == [551, 128]
  assert secrets[0] | secrets[1] == set(wordle.WORDS)
  # A word of a file is on the side where it is in the repository's list.
  path = tmp_path / 'words.txt'
  path.write_text('ready Steam\nno alone abcde crane crane paper label quilt')
  cfg = schema.Wordle(path=str(path), eval_tasks=3, train_tasks=9)
  env = wordle.Wordle('e', cfg)
  held_out = {task.answer for task in env.source('eval', 0).take(3)}
  assert held_out == {'ready', 'steam', 'alone'}
  assert len({task.answer for task in env.source('train', 0).take(9)}) == 5
