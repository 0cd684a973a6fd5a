"""`Reverse: abcd`, answered with `dcba`; graded by common subsequence.

1. A text is made of letters of the alphabet. All lengths that the options allow
   are equally frequent, as far as there are enough texts.
2. `draws` assigns a fifth of all texts to evaluation, independent of the
   options; a text and its reverse are in the same split.

The evaluation texts depend on the options alone. The training texts also depend
on the seed of the source, which shuffles their order too.
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
  """Returns the reply without surrounding space, if it is one word.

  A word has lower-case ASCII letters only; `The answer is dcba` gives None, and
  so does a truncated reply, whose word may be incomplete.
  """
  text = text.strip()
  return text if not truncated and _ANSWER.fullmatch(text) else None


def grade(text: str, answer: str, truncated: bool = False) -> types.Score:
  """Grades an assistant turn by the longest common subsequence.

      reward = 2 lcs(word, answer) / (len(word) + len(answer))

  0 if there is no answer; `correct` only if every letter is right. The text
  itself, unreversed, has the reward of its subsequence in common with its
  reverse.

  References:
    Prime Intellect's environment `reverse-text`, whose ratio is difflib's: it
    counts matching blocks, which hold no more letters than the subsequence.
  """
  word = parse_answer(text, truncated)
  return types.Score(
    reward=0.0 if word is None else similarity.ratio(word, answer),
    correct=word == answer,
    formatted=word is not None,
    answer=word,
  )


class ReverseText(base.Env):
  """`schema.ReverseText`, single turn."""

  max_turns, votes = 1, True

  def __init__(self, name: str, cfg: schema.ReverseText):
    """Counts the texts of both splits.

    Raises:
      ValueError: an option sets more tasks than the split has texts.
    """
    self.name, self._cfg = name, cfg
    self._spaces = [
      draws.Space(
        len(cfg.alphabet) ** length,
        functools.partial(_text, cfg.alphabet, length),
        _group,
      )
      for length in range(cfg.min_length, cfg.max_length + 1)
    ]
    for split in base.SPLITS:
      draws.check_capacity(
        name,
        split,
        getattr(cfg, f'{split}_tasks'),
        self._spaces,
        'raise max_length, or add letters to alphabet',
      )

  def source(self, split: str, seed: int) -> sources.Shuffled[types.Task]:
    """Returns the tasks of a split; those of evaluation ignore the seed."""
    base.check_split(split)
    texts = draws.draw(
      self._spaces,
      split,
      getattr(self._cfg, f'{split}_tasks'),
      seed if split == 'train' else 0,
    )
    fingerprint = sources.fingerprint(
      repr(self._cfg).encode(), *(text.encode() for text in texts)
    )
    return sources.Shuffled(_Tasks(self, texts), seed, fingerprint)

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
    """Returns the grade; an episode without an answer is not scorable."""
    return self._score

  def close(self) -> None:
    pass


@dataclasses.dataclass(frozen=True)
class _Tasks(Sequence):
  """A sequence of tasks, each built on access."""

  env: ReverseText
  texts: list[str]

  def __len__(self) -> int:
    return len(self.texts)

  def __getitem__(self, index: int) -> types.Task:
    return self.env.task(self.texts[index])


def _text(alphabet: str, length: int, index: int) -> str:
  """Returns the text with a number: its digits, base len(alphabet)."""
  letters = []
  for _ in range(length):
    index, digit = divmod(index, len(alphabet))
    letters.append(alphabet[digit])
  return ''.join(letters)


def _group(text: str) -> str:
  return min(text, text[::-1])
