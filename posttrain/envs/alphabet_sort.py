"""Names to sort, with more names every turn; graded per list.

    user:      Sort these names: Mio, Ada, Ben
    assistant: Ada, Ben, Mio
    user:      Yes: Ada, Ben, Mio. Add: Lux, Cal
    assistant: Ada, Ben, Cal, Lux, Mio

1. The key of a task is the set of names of its first turn; it determines all
   names and their order.
2. `draws` assigns a fifth of these sets to evaluation, independent of the
   options.
3. An observation between turns is Yes or No, then the correct sorted list so
   far, then the new names. Everything except the new names can be predicted
   from the history, which algorithms that learn from observations need.

The evaluation tasks depend on the options alone. The training tasks also depend
on the seed of the source, which shuffles their order too.
"""

import functools
import math
import re
import zlib
from collections.abc import Sequence

from posttrain import schema, types
from posttrain.data import sources
from posttrain.envs import base, draws
from posttrain.rewards import texts

# Sorted; two to four letters each, so that lists stay short. Adding a name
# changes every task.
NAMES = tuple(
  'Abo Ada Alm Ane Bax Bel Bim Bru Cal Cio Cob Dag Dea Dov Dus Eba Eli Emo '
  'Fen Fia Gav Gil Goro Hal Hedo Hux Iba Ilo Ivo Jax Jem Juno Kal Kemi Kip '
  'Lam Leo Lux Mab Mio Mox Nad Neve Nim Oda Oli Ozo Pax Pim Qin Rae Rolo '
  'Sim Sol Tad Tovi Uma Vex Wim Yara Zed'.split()
)
_LIST = re.compile(r'[A-Za-z]+(?:, *[A-Za-z]+)*')


def parse_answer(text: str, truncated: bool = False) -> tuple[str, ...] | None:
  """Returns the names of a reply that is one line of names and commas.

  None for any other text, and for a truncated one.
  """
  text = text.strip()
  if truncated or not _LIST.fullmatch(text):
    return None
  return tuple(name.strip() for name in text.split(','))


def grade_turn(
  text: str, answer: Sequence[str], truncated: bool = False
) -> float:
  """Returns the similarity of a reply's names to the sorted list.

      2 lcs(names, answer) / (len(names) + len(answer))

  counted in names; 1 only if the list is exact, 0 without an answer.
  """
  names = parse_answer(text, truncated)
  return 0.0 if names is None else texts.ratio(names, answer)


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
        f'names in {cfg.turns} turns, expected at most {len(NAMES)}; lower '
        'first or more'
      )
    space = draws.Space(
      math.comb(len(NAMES), cfg.first), functools.partial(_key, cfg.first)
    )
    self._draws = draws.Draws(name, cfg, [space], 'raise first')

  def source(self, split: str, seed: int) -> sources.Shuffled[types.Task]:
    """Returns the tasks of a split; those of evaluation ignore the seed."""
    keys = self._draws.keys(split, seed)
    fingerprint = sources.fingerprint(
      repr(self._cfg).encode(), *(part.encode() for part in (*NAMES, *keys))
    )
    return sources.Shuffled(base.Tasks(keys, self.task), seed, fingerprint)

  def make(self, task: types.Task) -> 'Episode':
    return Episode(task, self._cfg.role)

  def task(self, key: str) -> types.Task:
    """Returns the task of a key.

    Args:
      key: the sorted names of the first turn, joined by commas.
    """
    turns = self._turns(key)
    answers = _answers(turns)
    demonstration = []
    for turn, answer in enumerate(answers):
      demonstration.append({'role': 'assistant', 'content': ', '.join(answer)})
      for names in turns[turn + 1 : turn + 2]:
        demonstration.append(_observe(True, answer, names, self._cfg.role))
    question = f'Sort these names: {", ".join(turns[0])}'
    return types.Task(
      id=key,
      env=self.name,
      prompt=({'role': 'user', 'content': question},),
      answer=', '.join(answers[-1]),
      demonstration=tuple(demonstration),
      info={'turns': [list(names) for names in turns]},
    )

  def _turns(self, key: str) -> list[list[str]]:
    """Returns the new names of each turn, in the order of its message."""
    cfg, first = self._cfg, key.split(',')
    order = [
      NAMES[i]
      for i in sources.permutation(len(NAMES), zlib.crc32(key.encode()))
    ]
    later = [name for name in order if name not in first]
    return [[name for name in order if name in first]] + [
      later[cfg.more * i : cfg.more * (i + 1)] for i in range(cfg.turns - 1)
    ]


class Episode:
  """One growing list of names."""

  def __init__(self, task: types.Task, role: str):
    """Computes the answers.

    Args:
      task: the task.
      role: the role of the observations.
    """
    self._task, self._role = task, role
    self._turns = task.info['turns']
    self._answers = _answers(self._turns)
    self._grades: list[tuple[float, bool]] = []  # per turn: (grade, readable)

  def reset(self) -> types.Messages:
    self._grades = []
    return self._task.prompt

  def step(self, text: str, truncated: bool) -> types.StepOut:
    """Grades a turn; its reward is its share of the episode's reward."""
    turn = len(self._grades)
    assert turn < len(self._turns), 'the episode is over'
    answer = self._answers[turn]
    grade = grade_turn(text, answer, truncated)
    self._grades.append((grade, parse_answer(text, truncated) is not None))
    reward, messages = grade / len(self._turns), ()
    if turn + 1 < len(self._turns):
      messages = (
        _observe(grade == 1, answer, self._turns[turn + 1], self._role),
      )
    return types.StepOut(messages, reward, done=not messages)

  def grade(self) -> types.Score:
    """Returns the mean of all turns' grades; a turn not played counts 0.

    `correct` if every turn's list is exact; `formatted` if every turn was
    played and could be read. An episode without a turn is not scorable.
    """
    if not self._grades:
      return types.Score(reward=None)
    grades, readable = zip(*self._grades, strict=True)
    whole = len(grades) == len(self._turns)
    return types.Score(
      reward=sum(grades) / len(self._turns),
      correct=whole and all(grade == 1 for grade in grades),
      formatted=whole and all(readable),
    )

  def close(self) -> None:
    pass


def _answers(turns: Sequence[Sequence[str]]) -> list[list[str]]:
  """Returns the sorted list of all names so far, per turn."""
  return [
    sorted(name for names in turns[: i + 1] for name in names)
    for i in range(len(turns))
  ]


def _observe(
  right: bool, answer: Sequence[str], names: Sequence[str], role: str
) -> types.Message:
  """Writes the observation after a turn that is not the last."""
  verdict = f'{"Yes" if right else "No"}: {", ".join(answer)}.'
  return {'role': role, 'content': f'{verdict} Add: {", ".join(names)}'}


def _key(count: int, index: int) -> str:
  """Returns the set of names with a number: sorted, joined by commas.

  By the combinatorial number system: there are C(c, k) sets of k names below
  name c; the largest name is the last c for which that is at most the number.
  """
  names, top = [], len(NAMES)
  for left in range(count, 0, -1):
    top = next(c for c in range(top - 1, -1, -1) if math.comb(c, left) <= index)
    index -= math.comb(top, left)
    names.append(NAMES[top])
  return ','.join(reversed(names))
