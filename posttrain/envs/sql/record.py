"""The record of a question about a database, generated or from a file."""

import dataclasses

from posttrain.schema import sql

ANSWER_TYPES = ('integer', 'float', 'string', 'list', 'table')
DIFFICULTIES = sql.DIFFICULTIES

Cell = int | float | str | None
Rows = tuple[tuple[Cell, ...], ...]


@dataclasses.dataclass(frozen=True)
class Question:
  """A question in words, with its gold SQL and answer."""

  id: str  # unique within its data set
  db_id: str
  text: str
  gold_sql: str
  gold_rows: Rows  # result of `gold_sql`; never empty
  answer_type: str  # one of `ANSWER_TYPES`
  difficulty: str  # one of `DIFFICULTIES`
  tables: tuple[str, ...]  # tables that `gold_sql` reads
  template: str = ''  # template of a generated question
  other_golds: tuple[Rows, ...] = ()  # further correct answers
  # The position of each gold row's key in the order of `gold_sql`, ties having
  # one; () = the order of an answer's rows does not count.
  ranks: tuple[int, ...] = ()
