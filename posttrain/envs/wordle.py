"""Wordle: a secret word of five letters is guessed from feedback, turn by turn.

    user:      a secret word of five letters; guess it
    assistant: crane
    user:      cXrYaGnXeX
    assistant: quart

1. The secrets are words of a list. A fifth of all words, by a fixed hash, is
   for evaluation and never a secret in training; it may be guessed there.
2. Feedback per letter: G = right, Y = elsewhere, X = not (again) in the
   secret. A letter is marked as often as the secret has it, first where it is
   right.
3. The game ends when the secret is guessed, or after `guesses` turns. Any five
   letters are a guess, a word or not, in which this differs from TextArena. A
   reply without five letters is a lost turn.
4. A demonstration is the game of a random consistent guesser: every guess is
   drawn from the words of the list that agree with all feedback before it.

References: TextArena's Wordle, whose marks these are; the environment `wordle`
of Prime Intellect's verifiers, whose sum of rewards `published` is.
"""

import dataclasses
import random
import re
from collections.abc import Iterator, Sequence

from posttrain import schema, types
from posttrain.chat import tool_calls
from posttrain.data import sources
from posttrain.envs import base

EVAL_SHARE = 5  # one word in 5 is a secret of evaluation
WORDS = """
about above actor admit adult after again agent agree ahead alarm album alert
alike alive allow alone along aloud alter among anger angle angry ankle apart
apple apply apron arena argue arise armor array arrow aside asset avoid awake
award aware bacon badge badly baker basic basin batch beach beard beast begin
being below bench berry birth black blade blame blank blast blaze bleed blend
bless blind block blood bloom board boast bonus boost booth bound brain brake
brand brass brave bread break breed brick bride brief bring broad broom brown
brush build bunch burst buyer cabin cable camel canal candy cargo carry carve
catch cause cedar chain chair chalk charm chart chase cheap check cheek cheer
chess chest chief child chill china choir chord civil claim clamp class clean
clear clerk click cliff climb clock close cloth cloud clown coach coast cocoa
color comet coral couch cough count court cover crack craft crane crash crawl
cream creek crime crisp cross crowd crown crude cruel crush curve cycle daily
dairy dance death debut decay delay dense depth diary dirty ditch diver dizzy
dodge doubt dough draft drain drama dream dress drift drill drink drive drown
eager eagle early earth eight elbow elder elect empty enemy enjoy enter entry
equal error essay event every exact exist extra fable faint fairy faith false
fancy fault favor feast fence ferry fever fiber field fifth fifty fight final
first flame flash fleet flesh float flock flood floor flour fluid flute focus
force forge forty frame fresh front frost fruit funny ghost giant given glass
globe glove going grace grade grain grand grant grape graph grasp grass grave
great green greet grief grill groan group guard guess guest guide habit happy
harsh heart heavy hedge hello hobby honey honor horse hotel house human humor
hurry ideal image index inner input issue ivory jelly jewel joint jolly judge
juice kneel knife knock known label labor large laser laugh layer learn lemon
level light limit linen liver local logic loose lover lower loyal lucky lunch
magic major maker maple march marry match mayor medal media melon mercy merge
merit metal might minor mixed model money month moral motor mount mouse mouth
movie music naval nerve never night noble noise north novel nurse ocean offer
often olive onion opera orbit order organ other ought outer owner paint panel
panic paper party pasta patch pause peace peach pearl penny phase phone photo
piano piece pilot pitch pizza place plain plane plant plate plaza point polar
pouch pound power press price pride prime print prize proof proud pulse pupil
puppy purse queen query quest quick quiet quilt quite radar radio rainy raise
ranch range rapid ratio reach react ready realm rebel relax reply rider ridge
rifle right rigid rival river roast robot rocky rough round route royal rugby
ruler rural salad salty sauce scale scarf scene scent scout sense serve seven
shade shake shape share shark sharp sheep sheet shelf shell shift shine shiny
shirt shock shore short shout shown silly siren sixth skate skill skirt sleep
slice slide slope small smart smell smile smoke snake sneak solar solid solve
sorry sound south space spare spark speak speed spend spice spill spine spoon
sport spray squad stage stair stamp stand start state steak steal steam steel
steep stick still sting stock stone stool store storm story stove straw strip
study stuff style sugar sunny super swamp swear sweat sweet swift swing sword
table taste teach tempo tenth thank theft theme thick thief thing think third
thorn throw thumb tiger tight timer tired title toast today tooth topic torch
total touch tough towel tower toxic trace track trade trail train treat trend
trial tribe trick troop truck truly trunk trust truth tulip tutor twice twist
uncle under union unity until upper upset urban usage usual valid value vapor
vault verse video virus visit vital vivid vocal voice wagon waist waste watch
water weary weave wedge weird whale wheat wheel where which while white whole
widen width woman world worry worth wound wreck wrist write wrong yacht yield
young youth zebra
""".split()
_GUESS = re.compile(
  r'<guess>\s*\[?\s*([A-Za-z]{5})\s*\]?\s*</guess>'
  r'|\A\s*([A-Za-z]{5})\s*\Z'
)
RULES = """\
Guess a secret English word of five letters in {guesses} guesses. Each guess has
its letters marked: G is in the right place, Y is elsewhere in the word, X is
not in the word. Give it in <guess> </guess> tags, as in <guess>crane</guess>.
"""


def feedback(guess: str, secret: str) -> str:
  """Returns the marks of a guess, of G, Y and X; none of ''."""
  pairs = list(zip(guess, secret, strict=False))
  rest, marks = [b for a, b in pairs if a != b], ''
  for a, b in pairs:
    if a == b:
      marks += 'G'
    elif a in rest:
      rest.remove(a)
      marks += 'Y'
    else:
      marks += 'X'
  return marks


def parse_guess(text: str) -> str:
  """Returns the guess of a turn: its last tag's, or its only word; or ''."""
  guesses = _GUESS.findall(tool_calls.outside_thoughts(text))
  return ''.join(guesses[-1] if guesses else '').lower()


def consistent_game(
  secret: str, words: Sequence[str], rng: random.Random
) -> Iterator[str]:
  """Yields random guesses that agree with all feedback, up to the secret.

  However many they are; the secret must be one of the words.
  """
  guess = ''
  while guess != secret:
    guess = words[int(rng.random() * len(words))]
    yield guess
    marks = feedback(guess, secret)
    words = [x for x in words if feedback(guess, x) == marks]


class Wordle(base.Env):
  """`schema.Wordle`, at most `guesses` turns."""

  def __init__(self, name: str, cfg: schema.Wordle):
    """Reads the words.

    Raises:
      ValueError: the file is missing, or has fewer secrets of evaluation than
        `eval_tasks`.
    """
    self.name, self._cfg, self.max_turns = name, cfg, cfg.guesses
    self.words = WORDS
    if cfg.path is not None:
      text = base.find(name, 'path', cfg.path, '; a word per line').read_text()
      known = dict.fromkeys(text.lower().split())
      self.words = [x for x in known if re.fullmatch('[a-z]{5}', x)]
    self._secrets: dict[str, list[str]] = {x: [] for x in base.SPLITS}
    for word in sorted(self.words, key=sources.hash64):
      is_held_out = sources.hash64(word) % EVAL_SHARE == 0
      self._secrets['eval' if is_held_out else 'train'].append(word)
    base.check_count(name, 'eval', cfg.eval_tasks, len(self._secrets['eval']))

  def source(self, split: str, seed: int) -> base.Source:
    """Returns a game per secret of evaluation; many of training.

    Those of training have demonstrations of their own, also by the seed.
    """
    secrets = self._secrets[split]
    if split == 'eval':
      ids = secrets[: self._cfg.eval_tasks]
    else:
      ids = [
        f'{secrets[i % len(secrets)]} {seed}.{i // len(secrets)}'
        for i in range(self._cfg.train_tasks)
      ]
    fingerprint = sources.fingerprint(
      *map(str.encode, (repr(self._cfg), *self.words, *ids))
    )
    return sources.Shuffled(base.Tasks(ids, self.task), seed, fingerprint)

  def make(self, task: types.Task) -> 'Game':
    return Game(task, self._cfg)

  def task(self, id: str) -> types.Task:
    """Returns the task of an id: a secret, and what tells its games apart."""
    cfg, secret, rng = self._cfg, id.split()[0], random.Random(id)
    compact = cfg.style == 'compact'
    prompt = 'wordle' if compact else RULES.format(guesses=cfg.guesses)
    task = types.Task(
      id=id,
      env=self.name,
      prompt=({'role': 'user', 'content': prompt},),
      answer=secret,
    )
    game: list[str] = []
    while not 0 < len(game) <= cfg.guesses:
      game = list(consistent_game(secret, self.words, rng))
    episode, demonstration = self.make(task), []
    for guess in game:
      text = guess if compact else f'<guess>{guess}</guess>'
      turn = {'role': 'assistant', 'content': text}
      demonstration += [turn, *episode.step(text, False).messages]
    return dataclasses.replace(task, demonstration=tuple(demonstration))


class Game:
  """An episode: the guesses at one secret."""

  def __init__(self, task: types.Task, cfg: schema.Wordle):
    self._task, self._cfg = task, cfg
    self._guesses: list[str] = []  # per turn; '' = cannot be read

  def reset(self) -> types.Messages:
    self._guesses = []
    return self._task.prompt

  def step(self, text: str, truncated: bool) -> types.StepOut:
    guess, secret = parse_guess(text), self._task.answer
    self._guesses.append(guess)
    left = self._cfg.guesses - len(self._guesses)
    if guess == secret or not left:
      return types.StepOut(reward=self.grade().reward or 0.0)
    marks = feedback(guess, secret)
    if self._cfg.style == 'compact':
      content = ''.join(map(''.join, zip(guess, marks, strict=True))) or '?'
    else:
      content = 'That is no word of five letters in <guess> tags.'
      if guess:
        content = f'Feedback:\n{" ".join(guess.upper())}\n{" ".join(marks)}'
      content += f'\n\nYou have {left} guesses left.'
    message = {'role': 'user', 'content': content}
    return types.StepOut((message,), done=False)

  def grade(self) -> types.Score:
    """Returns 1 for a solved game, or the sum of `schema.Wordle.reward`."""
    turns, secret = len(self._guesses), self._task.answer
    if not turns:
      return types.Score(reward=None)
    solved, formatted = self._guesses[-1] == secret, all(self._guesses)
    reward = float(solved)
    if self._cfg.reward == 'published':
      reward += solved / turns + 0.2 * formatted
      if not solved:
        last = next(filter(None, reversed(self._guesses)), '')
        marks = feedback(last, secret)
        reward += 0.2 * marks.count('G') + 0.1 * marks.count('Y')
    return types.Score(
      reward=reward,
      correct=solved,
      formatted=formatted,
      metrics={'guesses': float(turns)} if solved else {},
    )

  def close(self) -> None:
    pass
