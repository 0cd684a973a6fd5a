"""`Reverse: abcd`, answered with `dcba`; graded by what the two share.

1. A text is of letters of the alphabet; its length is any of the options', and
   all lengths are equally frequent, as far as there are texts.
2. `draws` sets a fifth of all texts aside for evaluation, whatever the
   options; a text and its reverse lie on the same side.

The evaluation texts depend on the options alone; the training texts also on
the seed of the source, which shuffles their order too.
"""

import dataclasses
import functools
import re
from collections.abc import Sequence

from posttrain import schema, types
from posttrain.data import sources
from posttrain.envs import base, draws
from posttrain.rewards import similarity

_ANSWER = re.compile('[a-z]+')


def parse_answer(text: str, truncated: bool = False) -> str | None:
  """Returns the reply without the space around it, if it is one word.

  Lower-case ASCII letters and nothing else: `The answer is dcba` is none. A
  reply that was cut off is none either, for nobody knows where it would end.
  """
  said = text.strip()
  return said if not truncated and _ANSWER.fullmatch(said) else None


def grade(text: str, answer: str, truncated: bool = False) -> types.Score:
  """Grades an assistant turn by the longest common subsequence.

      reward = 2 lcs(said, answer) / (len(said) + len(answer))

  0 if there is no answer; `correct` only if every letter is right. The text
  itself, unreversed, is worth a little: what it shares with its reverse.

  References:
    Prime Intellect's environment `reverse-text`, whose ratio is difflib's: of
    matching blocks, which hold no more letters than the subsequence.
  """
  said = parse_answer(text, truncated)
  return types.Score(
    reward=0.0 if said is None else similarity.ratio(said, answer),
    correct=said == answer,
    formatted=said is not None,
    answer=said,
  )


class ReverseText(base.Env):
  """`schema.ReverseText`, single turn."""

  max_turns, votes = 1, True

  def __init__(self, name: str, cfg: schema.ReverseText):
    """Counts the texts of both splits.

    Raises:
      ValueError: a split asks for more tasks than it has texts.
    """
    self.name, self._cfg = name, cfg
    self._spaces = [
      draws.Space(
        len(cfg.alphabet) ** length,
        functools.partial(_text, cfg.alphabet, length),
        _alike,
      )
      for length in range(cfg.min_length, cfg.max_length + 1)
    ]
    for split in base.SPLITS:
      draws.check_room(
        name,
        split,
        getattr(cfg, f'{split}_tasks'),
        self._spaces,
        'raise max_length, or add letters to alphabet',
      )

  def source(self, split: str, seed: int) -> sources.Shuffled[types.Task]:
    """Returns the tasks of a split; evaluation ones are the same ever."""
    base.check_split(split)
    texts = draws.draw(
      self._spaces,
      split,
      getattr(self._cfg, f'{split}_tasks'),
      seed if split == 'train' else 0,
    )
    made_of = sources.fingerprint(
      repr(self._cfg).encode(), *(text.encode() for text in texts)
    )
    return sources.Shuffled(_Tasks(self, texts), seed, made_of)

  def make(self, task: types.Task) -> 'Episode':
    return Episode(task)

  def task(self, text: str) -> types.Task:
    """Returns the task of a text."""
    return types.Task(
      id=text,
      env=self.name,
      prompt=({'role': 'user', 'content': f'Reverse: {text}'},),
      answer=text[::-1],
      demonstration=({'role': 'assistant', 'content': text[::-1]},),
      info={'length': len(text)},
    )


class Episode:
  """One answer to one text."""

  def __init__(self, task: types.Task):
    self._task, self._score = task, types.Score(reward=None)

  def reset(self) -> types.Messages:
    self._score = types.Score(reward=None)
    return self._task.prompt

  def step(self, text: str, truncated: bool) -> types.StepOut:
    self._score = grade(text, self._task.answer, truncated)
    return types.StepOut(reward=self._score.reward)

  def grade(self) -> types.Score:
    """Returns the grade of the answer; without one it is not scorable."""
    return self._score

  def close(self) -> None:
    pass


@dataclasses.dataclass(frozen=True)
class _Tasks(Sequence):
  """Tasks made when asked for."""

  env: ReverseText
  texts: list[str]

  def __len__(self) -> int:
    return len(self.texts)

  def __getitem__(self, index: int) -> types.Task:
    return self.env.task(self.texts[index])


def _text(alphabet: str, length: int, index: int) -> str:
  """Returns the text of a number: its digits to the base of the alphabet."""
  letters = []
  for _ in range(length):
    index, digit = divmod(index, len(alphabet))
    letters.append(alphabet[digit])
  return ''.join(letters)


def _alike(text: str) -> str:
  return min(text, text[::-1])
