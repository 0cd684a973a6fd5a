"""The data source of generated databases and questions, see `synth`."""

import dataclasses
from collections.abc import Sequence

from posttrain import schema
from posttrain.envs.sql import database, record, schemas, synth


class Generated:
  """`schema.SqlSynth`."""

  def __init__(
    self, name: str, cfg: schema.SqlSynth, difficulties: Sequence[str]
  ):
    """Builds the data source; databases are generated on access.

    Args:
      name: the environment's name; not used.
      cfg: the options.
      difficulties: difficulties of the questions.
    """
    del name
    self._cfg, self._difficulties = cfg, tuple(difficulties)

  def questions(self, split: str) -> Sequence[record.Question]:
    """Returns the questions of a split, database by database."""
    return _Questions(
      self._databases(split), self._split(split), self._difficulties
    )

  def fingerprint(self, split: str) -> str:
    """Returns the hash of the split's first eight databases and questions."""
    seeds = range(min(self._databases(split), 8))
    return synth.fingerprint(seeds, self._split(split))

  def open(self, db_id: str) -> database.Database:
    """Opens a database in memory."""
    return database.Database.from_bytes(synth.open_id(db_id))

  def tables(self, db_id: str) -> tuple[str, ...]:
    """Returns the names of a database's tables."""
    return tuple(t.name for t in schemas.make(*schemas.locate(db_id)).tables)

  def _databases(self, split: str) -> int:
    return getattr(self._cfg, f'{split}_databases')

  def _split(self, split: str) -> str:
    return 'train' if split == 'train' else self._cfg.eval_split


@dataclasses.dataclass(frozen=True)
class _Questions(Sequence):
  """A sequence of questions, each built on access, `_each` per database."""

  databases: int
  split: str
  difficulties: tuple[str, ...]

  def __len__(self) -> int:
    return self.databases * self._each

  def __getitem__(self, index: int) -> record.Question:
    seed, place = divmod(range(len(self))[index], self._each)
    return [
      question
      for question in synth.questions(seed, self.split)
      if question.difficulty in self.difficulties
    ][place]

  @property
  def _each(self) -> int:
    return synth.PER_DIFFICULTY * len(self.difficulties)
