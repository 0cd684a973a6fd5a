"""What a question about a database is, whoever made it."""

import dataclasses

from posttrain.schema import sql

ANSWER_TYPES = ('integer', 'float', 'string', 'list', 'table')
DIFFICULTIES = sql.DIFFICULTIES

Cell = int | float | str | None
Rows = tuple[tuple[Cell, ...], ...]


@dataclasses.dataclass(frozen=True)
class Question:
  """A question in words, and what the database answers to it."""

  id: str  # unique within its data set
  db_id: str
  text: str
  gold_sql: str
  gold_rows: Rows  # what `gold_sql` returns; never empty
  answer_type: str  # of `ANSWER_TYPES`
  difficulty: str  # of `DIFFICULTIES`
  tables: tuple[str, ...]  # that `gold_sql` reads
  template: str = ''  # of a generated question: which one
