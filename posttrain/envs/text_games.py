"""Two games with texts: `reverse_text` and `alphabet_sort`.

reverse_text: `Reverse: abcd`, answered with `dcba`. A text is made of letters
of the alphabet; all lengths that the options allow are equally frequent, as far
as there are enough texts.

alphabet_sort: names to sort, with more names every turn.

    user:      Sort these names: Mio, Ada, Ben
    assistant: Ada, Ben, Mio
    user:      Yes: Ada, Ben, Mio. Add: Lux, Cal
    assistant: Ada, Ben, Cal, Lux, Mio

The set of names of the first turn determines all names and their order. An
observation is Yes or No, then the correct list so far, then the new names.
Everything except the new names can be predicted from the history, which
algorithms that learn from observations need.

Tasks are distinct keys of numbered spaces:

1. A space numbers its keys, so that they need no list: a walk visits them in an
   order shuffled by the seed and skips the keys of the other split.
2. A fifth of all keys is for evaluation: a fixed hash of the key's text, which
   depends on no option and no seed, so that no stage trains on an evaluation
   task. A text and its reverse are in the same split.
3. The evaluation tasks depend on the options alone. The training tasks also
   depend on the seed of the source, which shuffles their order too.
"""

import bisect
import dataclasses
import functools
import itertools
import math
import re
import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from posttrain import schema, types
from posttrain.data import sources
from posttrain.envs import base
from posttrain.rewards import texts

# Sorted; two to four letters each, so that lists stay short. Adding a name
# changes every task.
NAMES = tuple(
  'Abo Ada Alm Ane Bax Bel Bim Bru Cal Cio Cob Dag Dea Dov Dus Eba Eli Emo '
  'Fen Fia Gav Gil Goro Hal Hedo Hux Iba Ilo Ivo Jax Jem Juno Kal Kemi Kip '
  'Lam Leo Lux Mab Mio Mox Nad Neve Nim Oda Oli Ozo Pax Pim Qin Rae Rolo '
  'Sim Sol Tad Tovi Uma Vex Wim Yara Zed'.split()
)
EVAL_SHARE = 5  # one key in 5 is an evaluation key
MAX_COUNTED = 2**12  # largest space whose keys are counted per split
_WORD = re.compile('[a-z]+')
_LIST = re.compile(r'[A-Za-z]+(?:, *[A-Za-z]+)*')


@dataclasses.dataclass(frozen=True)
class Space:
  """Keys by number.

  Attributes:
    size: number of keys.
    key: from 0 .. size - 1 to the key, the unique text of a task.
    group: from a key to the text that is hashed; keys of one group are in the
      same split.
  """

  size: int
  key: Callable[[int], str]
  group: Callable[[str], str] = str

  def walk(self, split: str, seed: tuple[int, ...]) -> Iterator[str]:
    """Yields keys of a split, each once, in an order shuffled by the seed.

    Ends only if the space has at most `MAX_COUNTED` keys.
    """
    for index in _shuffled(self.size, seed):
      key = self.key(index)
      held_out = sources.hash64(self.group(key)) % EVAL_SHARE == 0
      if held_out == (split == 'eval'):
        yield key

  def capacity(self, split: str) -> int:
    """Returns how many keys of a split can be drawn.

    All of them, counted, if the space has at most `MAX_COUNTED` keys. Half of
    the expected number in a larger space, which random draws reach quickly.
    """
    if self.size <= MAX_COUNTED:
      return sum(1 for _ in self.walk(split, ()))
    half = self.size // (2 * EVAL_SHARE)
    return half if split == 'eval' else half * (EVAL_SHARE - 1)


def _shuffled(size: int, seed: tuple[int, ...]) -> Iterator[int]:
  """Yields the numbers below `size` in random order, each once."""
  if size <= MAX_COUNTED:
    yield from sources.permutation(size, *seed).tolist()
    return
  # Raw words, see `sources.permutation`; 64 bits more than needed, so that
  # the bias of the remainder is below 2^-64.
  bits = np.random.PCG64(np.random.SeedSequence(seed))
  num_words, visited = size.bit_length() // 64 + 2, set()
  while True:
    raw = bits.random_raw(num_words).astype('<u8').tobytes()
    index = int.from_bytes(raw, 'little') % size
    if index not in visited:
      visited.add(index)
      yield index


def subset(index: int, size: int, below: int) -> list[int]:
  """Returns the set of `size` integers below `below` with a number, ascending.

  By the combinatorial number system: there are C(c, k) sets of k integers below
  c; the largest integer is the last c for which that is at most the number.
  """
  integers = []
  for k in range(size, 0, -1):
    counts = [math.comb(c, k) for c in range(below)]
    below = bisect.bisect(counts, index) - 1
    index -= counts[below]
    integers.append(below)
  return integers[::-1]


class Draws:
  """Distinct tasks of an environment, equally many from each space."""

  def __init__(
    self,
    name: str,
    cfg: schema.ReverseText | schema.AlphabetSort | schema.Countdown,
    spaces: Sequence[Space],
  ):
    """Checks that both splits have enough keys.

    Args:
      name: the environment's name.
      cfg: the options.
      spaces: key spaces.

    Raises:
      ValueError: a split has fewer keys than tasks; names the option.
    """
    self._cfg, self._spaces = cfg, spaces
    self._counts = {'train': cfg.train_tasks, 'eval': cfg.eval_tasks}
    for split, count in self._counts.items():
      base.check_count(
        name, split, count, sum(space.capacity(split) for space in spaces)
      )

  def keys(self, split: str, seed: int) -> list[str]:
    """Returns the keys of a split; those of evaluation ignore the seed.

    The spaces take turns; an exhausted one drops out. So the first n keys also
    come from all spaces.
    """
    count, seed = self._counts[split], seed if split == 'train' else 0
    walks = [
      itertools.islice(
        space.walk(split, (seed, i)), min(count, space.capacity(split))
      )
      for i, space in enumerate(self._spaces)
    ]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*walks))
    return list(itertools.islice(filter(None, turns), count))

  def source(
    self, split: str, seed: int, task: Callable[[str], types.Task], *words: str
  ) -> base.Source:
    """Returns the tasks of a split.

    Args:
      split: 'train' or 'eval'.
      seed: the seed.
      task: from a key to its task.
      *words: further texts that the tasks depend on, for the fingerprint.
    """
    keys = self.keys(split, seed)
    fingerprint = sources.fingerprint(
      repr(self._cfg).encode(), *(text.encode() for text in (*words, *keys))
    )
    return sources.Shuffled(base.Tasks(keys, task), seed, fingerprint)


def grade_word(text: str, answer: str, truncated: bool = False) -> types.Score:
  """Grades a reversed text by the longest common subsequence.

      reward = 2 lcs(word, answer) / (len(word) + len(answer))

  The word is the reply without surrounding space, if it has lower-case ASCII
  letters only: `The answer is dcba` has none, and so does a truncated reply,
  whose word may be incomplete. The reward is 0 without a word; `correct` only
  if every letter is right. The text itself, unreversed, has the reward of its
  subsequence in common with its reverse.

  References:
    Prime Intellect's environment `reverse-text`, whose ratio is difflib's: it
    counts matching blocks, which hold no more letters than the subsequence.
  """
  word = text.strip()
  formatted = not truncated and _WORD.fullmatch(word) is not None
  return types.Score(
    reward=texts.ratio(word, answer) if formatted else 0.0,
    correct=formatted and word == answer,
    formatted=formatted,
    answer=word if formatted else None,
  )


class ReverseText(base.Env):
  """`schema.ReverseText`, single turn."""

  max_turns, votes = 1, True

  def __init__(self, name: str, cfg: schema.ReverseText):
    """Counts the texts of both splits.

    Raises:
      ValueError: an option sets more tasks than the split has texts.
    """

    def text(length: int, index: int) -> str:
      """Returns the text with a number: its digits, base len(alphabet)."""
      letters = []
      for _ in range(length):
        index, digit = divmod(index, len(cfg.alphabet))
        letters.append(cfg.alphabet[digit])
      return ''.join(letters)

    self.name = name
    lengths = range(cfg.min_length, cfg.max_length + 1)
    spaces = [
      Space(
        len(cfg.alphabet) ** length,
        functools.partial(text, length),
        lambda key: min(key, key[::-1]),
      )
      for length in lengths
    ]
    self._draws = Draws(name, cfg, spaces)

  def source(self, split: str, seed: int) -> base.Source:
    """Returns the tasks of a split; those of evaluation ignore the seed."""
    return self._draws.source(split, seed, self.task)

  def make(self, task: types.Task) -> base.OneTurn:
    return base.OneTurn(
      task, lambda text, cut: grade_word(text, task.answer, cut)
    )

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


def grade_list(
  text: str, answer: Sequence[str], truncated: bool = False
) -> float | None:
  """Returns the similarity of a reply's names to the sorted list.

      2 lcs(names, answer) / (len(names) + len(answer))

  counted in names; 1 only if the list is exact. None unless the reply is one
  line of names and commas, and for a truncated one.
  """
  text = text.strip()
  if truncated or not _LIST.fullmatch(text):
    return None
  return texts.ratio([name.strip() for name in text.split(',')], answer)


class AlphabetSort(base.Env):
  """`schema.AlphabetSort`, `turns` turns."""

  def __init__(self, name: str, cfg: schema.AlphabetSort):
    """Counts the tasks of both splits.

    Raises:
      ValueError: a task needs more names than there are, or an option sets more
        tasks than there are sets of first names.
    """
    self.name, self._cfg, self.max_turns = name, cfg, cfg.turns
    count = cfg.first + cfg.more * (cfg.turns - 1)
    if count > len(NAMES):
      raise ValueError(
        f'envs.{name}.env.first must leave names for all turns: got {count} '
        f'names, expected at most {len(NAMES)}; lower first or more'
      )

    def key(index: int) -> str:
      """Returns the set of names with a number: sorted, joined by commas."""
      return ','.join(NAMES[i] for i in subset(index, cfg.first, len(NAMES)))

    space = Space(math.comb(len(NAMES), cfg.first), key)
    self._draws = Draws(name, cfg, [space])

  def source(self, split: str, seed: int) -> base.Source:
    """Returns the tasks of a split; those of evaluation ignore the seed."""
    return self._draws.source(split, seed, self.task, *NAMES)

  def make(self, task: types.Task) -> 'Sorting':
    return Sorting(task, self._cfg.role)

  def task(self, key: str) -> types.Task:
    """Returns the task of a key.

    Args:
      key: the sorted names of the first turn, joined by commas.
    """
    cfg, first = self._cfg, key.split(',')
    # The new names of each turn, in the order of its message.
    order = sources.permutation(len(NAMES), zlib.crc32(key.encode()))
    names = [NAMES[i] for i in order]
    later = [name for name in names if name not in first]
    turns = [[name for name in names if name in first]] + [
      later[cfg.more * i : cfg.more * (i + 1)] for i in range(cfg.turns - 1)
    ]
    task = types.Task(
      id=key,
      env=self.name,
      prompt=(
        {'role': 'user', 'content': f'Sort these names: {", ".join(turns[0])}'},
      ),
      answer=', '.join(sorted(sum(turns, []))),
      info={'turns': turns},
    )
    # The demonstration is an episode of correct answers.
    episode, demonstration = self.make(task), []
    for answer in episode.answers:
      text = ', '.join(answer)
      demonstration += [
        {'role': 'assistant', 'content': text},
        *episode.step(text, False).messages,
      ]
    return dataclasses.replace(task, demonstration=tuple(demonstration))


class Sorting:
  """An episode: one growing list of names.

  Attributes:
    answers: the sorted list of all names so far, per turn.
  """

  def __init__(self, task: types.Task, role: str):
    """Computes the answers.

    Args:
      task: the task.
      role: the role of the observations.
    """
    self._task, self._role = task, role
    self._turns = task.info['turns']
    self.answers = [
      sorted(sum(self._turns[: i + 1], [])) for i in range(len(self._turns))
    ]
    self._grades: list[float | None] = []  # per turn

  def reset(self) -> types.Messages:
    self._grades = []
    return self._task.prompt

  def step(self, text: str, truncated: bool) -> types.StepOut:
    """Grades a turn; its reward is its share of the episode's reward."""
    turn = len(self._grades)
    answer = self.answers[turn]
    grade = grade_list(text, answer, truncated)
    self._grades.append(grade)
    reward = (grade or 0.0) / len(self._turns)
    if turn + 1 == len(self._turns):
      return types.StepOut((), reward)
    verdict = f'{"Yes" if grade == 1 else "No"}: {", ".join(answer)}.'
    content = f'{verdict} Add: {", ".join(self._turns[turn + 1])}'
    message = {'role': self._role, 'content': content}
    return types.StepOut((message,), reward, done=False)

  def grade(self) -> types.Score:
    """Returns the mean of all turns' grades; a turn not played counts 0.

    `correct` if every turn's list is exact; `formatted` if every turn was
    played and could be read. An episode without a turn is not scorable.
    """
    if not self._grades:
      return types.Score(reward=None)
    whole = len(self._grades) == len(self._turns)
    return types.Score(
      reward=sum(grade or 0.0 for grade in self._grades) / len(self._turns),
      correct=whole and all(grade == 1 for grade in self._grades),
      formatted=whole and None not in self._grades,
    )

  def close(self) -> None:
    pass
