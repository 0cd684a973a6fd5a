"""Names to sort, and more of them every turn; graded by list.

    user:      Sort these names: Mio, Ada, Ben
    assistant: Ada, Ben, Mio
    user:      Yes: Ada, Ben, Mio. Add: Lux, Cal
    assistant: Ada, Ben, Cal, Lux, Mio

1. A task is told from others by the set of names of its first turn; that
   decides which names, in which order, it asks for.
2. `draws` sets a fifth of these sets aside for evaluation, whatever the
   options.
3. Between turns the environment says Yes or No to the answer, then the sorted
   list so far (right in any case), then the new names. So all that it says but
   the new names can be predicted from what was said, which is what
   algorithms that learn from observations need.

The evaluation tasks depend on the options alone; the training tasks also on
the seed of the source, which shuffles their order too.
"""

import dataclasses
import functools
import math
import re
import zlib
from collections.abc import Sequence

from posttrain import schema, types
from posttrain.data import sources
from posttrain.envs import base, draws
from posttrain.rewards import similarity

# In order; of two to four letters, so that lists stay short. One name more
# changes every task.
NAMES = tuple(
  'Abo Ada Alm Ane Bax Bel Bim Bru Cal Cio Cob Dag Dea Dov Dus Eba Eli Emo '
  'Fen Fia Gav Gil Goro Hal Hedo Hux Iba Ilo Ivo Jax Jem Juno Kal Kemi Kip '
  'Lam Leo Lux Mab Mio Mox Nad Neve Nim Oda Oli Ozo Pax Pim Qin Rae Rolo '
  'Sim Sol Tad Tovi Uma Vex Wim Yara Zed'.split()
)
_LIST = re.compile(r'[A-Za-z]+(?:, *[A-Za-z]+)*')


def parse_answer(text: str, truncated: bool = False) -> tuple[str, ...] | None:
  """Returns the names of a reply, if it is one line of names and commas.

  Anything else is no answer, and neither is a reply that was cut off.
  """
  said = text.strip()
  if truncated or not _LIST.fullmatch(said):
    return None
  return tuple(name.strip() for name in said.split(','))


def grade_turn(
  text: str, answer: Sequence[str], truncated: bool = False
) -> float:
  """Returns what the names of a reply share with the sorted list.

      2 lcs(said, answer) / (len(said) + len(answer))

  in names, not letters; 1 only if the list is exact, 0 without an answer.
  """
  said = parse_answer(text, truncated)
  return 0.0 if said is None else similarity.ratio(said, answer)


class AlphabetSort(base.Env):
  """`schema.AlphabetSort`, `turns` turns."""

  def __init__(self, name: str, cfg: schema.AlphabetSort):
    """Counts the tasks of both splits.

    Raises:
      ValueError: a task needs more names than there are, or a split asks for
        more tasks than there are sets of first names.
    """
    self.name, self._cfg, self.max_turns = name, cfg, cfg.turns
    needs = cfg.first + cfg.more * (cfg.turns - 1)
    if needs > len(NAMES):
      raise ValueError(
        f'envs.{name}.env.first must leave names for all turns: got {needs} '
        f'names in {cfg.turns} turns, expected at most {len(NAMES)}; lower '
        'first or more'
      )
    self._spaces = [
      draws.Space(
        math.comb(len(NAMES), cfg.first), functools.partial(_key, cfg.first)
      )
    ]
    for split in base.SPLITS:
      draws.check_room(
        name, split, getattr(cfg, f'{split}_tasks'), self._spaces, 'raise first'
      )

  def source(self, split: str, seed: int) -> sources.Shuffled[types.Task]:
    """Returns the tasks of a split; evaluation ones are the same ever."""
    base.check_split(split)
    keys = draws.draw(
      self._spaces,
      split,
      getattr(self._cfg, f'{split}_tasks'),
      seed if split == 'train' else 0,
    )
    made_of = sources.fingerprint(
      repr(self._cfg).encode(), *(part.encode() for part in (*NAMES, *keys))
    )
    return sources.Shuffled(_Tasks(self, keys), seed, made_of)

  def make(self, task: types.Task) -> 'Episode':
    return Episode(task, self._cfg.role)

  def task(self, key: str) -> types.Task:
    """Returns the task whose first turn asks for the names of a key.

    Args:
      key: sorted names, joined by commas.
    """
    turns = self._turns(key)
    answers = _answers(turns)
    says = []
    for turn, answer in enumerate(answers):
      says.append({'role': 'assistant', 'content': ', '.join(answer)})
      for names in turns[turn + 1 : turn + 2]:
        says.append(_observe(True, answer, names, self._cfg.role))
    asks = f'Sort these names: {", ".join(turns[0])}'
    return types.Task(
      id=key,
      env=self.name,
      prompt=({'role': 'user', 'content': asks},),
      answer=', '.join(answers[-1]),
      demonstration=tuple(says),
      info={'turns': [list(names) for names in turns]},
    )

  def _turns(self, key: str) -> list[list[str]]:
    """Returns the names that each turn brings, in the order it says them."""
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
  """One list of names that grows."""

  def __init__(self, task: types.Task, role: str):
    """Args: role: of what the environment says between turns."""
    self._task, self._role = task, role
    self._turns = task.info['turns']
    self._answers = _answers(self._turns)
    self._said: list[tuple[float, bool]] = []  # per turn: (grade, readable)

  def reset(self) -> types.Messages:
    self._said = []
    return self._task.prompt

  def step(self, text: str, truncated: bool) -> types.StepOut:
    """Grades a turn; its reward is its share of the episode's."""
    turn = len(self._said)
    assert turn < len(self._turns), 'the episode is over'
    answer = self._answers[turn]
    worth = grade_turn(text, answer, truncated)
    self._said.append((worth, parse_answer(text, truncated) is not None))
    reward, messages = worth / len(self._turns), ()
    if turn + 1 < len(self._turns):
      messages = (
        _observe(worth == 1, answer, self._turns[turn + 1], self._role),
      )
    return types.StepOut(messages, reward, done=not messages)

  def grade(self) -> types.Score:
    """Returns the mean of all turns' grades; one that never came has 0.

    `correct` if every turn's list is exact; `formatted` if every turn came and
    could be read. Without any turn the episode is not scorable.
    """
    if not self._said:
      return types.Score(reward=None)
    worths, readable = zip(*self._said, strict=True)
    whole = len(worths) == len(self._turns)
    return types.Score(
      reward=sum(worths) / len(self._turns),
      correct=whole and all(worth == 1 for worth in worths),
      formatted=whole and all(readable),
    )

  def close(self) -> None:
    pass


@dataclasses.dataclass(frozen=True)
class _Tasks(Sequence):
  """Tasks made when asked for."""

  env: AlphabetSort
  keys: list[str]

  def __len__(self) -> int:
    return len(self.keys)

  def __getitem__(self, index: int) -> types.Task:
    return self.env.task(self.keys[index])


def _answers(turns: Sequence[Sequence[str]]) -> list[list[str]]:
  """Returns the sorted list of all names so far, per turn."""
  return [
    sorted(name for names in turns[: i + 1] for name in names)
    for i in range(len(turns))
  ]


def _observe(
  right: bool, answer: Sequence[str], names: Sequence[str], role: str
) -> types.Message:
  """Writes what the environment says after a turn that is not the last."""
  says = f'{"Yes" if right else "No"}: {", ".join(answer)}.'
  return {'role': role, 'content': f'{says} Add: {", ".join(names)}'}


def _key(count: int, index: int) -> str:
  """Returns the names of a set's number, sorted, joined by commas.

  By the combinatorial number system: with C(c, k) sets of k names below name
  c, the largest name is the last c for which these are no more than the number.
  """
  chosen, top = [], len(NAMES)
  for left in range(count, 0, -1):
    top = next(c for c in range(top - 1, -1, -1) if math.comb(c, left) <= index)
    index -= math.comb(top, left)
    chosen.append(NAMES[top])
  return ','.join(reversed(chosen))
