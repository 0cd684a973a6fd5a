"""`Reverse: abcd`, answered with `dcba`; graded by common subsequence.

1. A text is made of letters of the alphabet. All lengths that the options allow
   are equally frequent, as far as there are enough texts.
2. `draws` assigns a fifth of all texts to evaluation, independent of the
   options; a text and its reverse are in the same split.

The evaluation texts depend on the options alone. The training texts also depend
on the seed of the source, which shuffles their order too.
"""

import functools
import re

from posttrain import schema, types
from posttrain.data import sources
from posttrain.envs import base, draws
from posttrain.rewards import texts

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
    reward=0.0 if word is None else texts.ratio(word, answer),
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
    spaces = [
      draws.Space(
        len(cfg.alphabet) ** length,
        functools.partial(_text, cfg.alphabet, length),
        _group,
      )
      for length in range(cfg.min_length, cfg.max_length + 1)
    ]
    self._draws = draws.Draws(
      name, cfg, spaces, 'raise max_length, or add letters to alphabet'
    )

  def source(self, split: str, seed: int) -> sources.Shuffled[types.Task]:
    """Returns the tasks of a split; those of evaluation ignore the seed."""
    texts = self._draws.keys(split, seed)
    fingerprint = sources.fingerprint(
      repr(self._cfg).encode(), *(text.encode() for text in texts)
    )
    return sources.Shuffled(base.Tasks(texts, self.task), seed, fingerprint)

  def make(self, task: types.Task) -> base.OneTurn:
    return base.OneTurn(task, lambda text, cut: grade(text, task.answer, cut))

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


def _text(alphabet: str, length: int, index: int) -> str:
  """Returns the text with a number: its digits, base len(alphabet)."""
  letters = []
  for _ in range(length):
    index, digit = divmod(index, len(alphabet))
    letters.append(alphabet[digit])
  return ''.join(letters)


def _group(text: str) -> str:
  return min(text, text[::-1])
