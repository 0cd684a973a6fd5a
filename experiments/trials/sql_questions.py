"""Questions of the SQL environment: refusals, several golds, orders, ties."""

import contextlib
import itertools
import json
import logging
import random
import sqlite3
from collections import Counter
from collections.abc import Iterator

from experiments.trials import base
from experiments.trials import envs as foreign_envs
from experiments.trials import sql as queries
from posttrain import envs, schema
from posttrain.envs.sql import database, ordering, verifier

# Golds that run, then golds that are refused.
_DATED = (
  "strftime('%Y', '2020-02-03')",
  "julianday('2020-02-03') - julianday('2020-02-01')",
  "date('now') > '2000-01-01'",
  "CAST(strftime('%J', 'now') AS INTEGER) > 0",
  "datetime('now', '-1 year', 'start of year') IS NOT NULL",
  'unixepoch(CURRENT_TIMESTAMP) > 0',
  "time('12:00', '+90 minutes') = '13:30:00'",
  "strftime('%m', name) IS NULL FROM pet LIMIT 1",
  "count(*) / 50 FROM pet WHERE date('now', id || ' days') >= CURRENT_DATE",
  "datetime(1092941466, 'unixepoch', 'localtime') > '2004'",
)
_BAD = (
  "SELECT replace('a', 'a', 'b')",
  'SELECT absent FROM pet',
  'DELETE FROM pet',
  'SELECT count(*) FROM ' + ', '.join(f'pet p{i}' for i in range(9)),
)
_YOUNGEST = 'SELECT name FROM pet WHERE id < 8 ORDER BY age'
_GOLD = ['pet0', 'pet5', 'pet1', 'pet6', 'pet2', 'pet7', 'pet3', 'pet4']
_TIED = [_GOLD[i ^ 1] if i < 6 else _GOLD[i] for i in range(8)]
# Question, answer, whether it is right; and whether without `ordered`.
_ANSWERS = (
  (1, '1', True, True),
  (1, '2; 1', True, True),
  (1, 'One', True, True),
  (1, '2', False, False),
  (2, '; '.join(_GOLD), True, True),
  (2, ', '.join(_TIED), True, True),
  (2, '; '.join(_GOLD[::-1]), False, True),
  (2, '; '.join([*_GOLD[1:3], _GOLD[0], *_GOLD[3:]]), False, True),
  (3, 'pet5; pet6; pet1', True, True),
  (3, 'pet1; pet5; pet6', False, True),
  (4, '; '.join(_GOLD[::-1]), True, True),
  (2, '', False, False),
)


@contextlib.contextmanager
def _log() -> Iterator[list[str]]:
  """Yields the messages that are logged meanwhile."""
  messages, logger = [], logging.getLogger('absl')
  handler = logging.Handler()
  handler.emit = lambda record: messages.append(record.getMessage())
  logger.addHandler(handler)
  try:
    yield messages
  finally:
    logger.removeHandler(handler)


class _Data:
  """Questions about pets, as files."""

  def __init__(self, scratch: base.Scratch, rows: list[dict], name: str):
    self._folder = scratch.folder / name
    pets = self._folder / 'database' / 'pets'
    pets.mkdir(parents=True)
    (pets / 'pets.sqlite').write_bytes(queries.pets())
    (self._folder / 'questions.json').write_text(json.dumps(rows))

  def make(self, **options):
    """Returns the environment."""
    data = schema.SqlFiles(
      questions=f'{self._folder}/questions.json',
      databases=f'{self._folder}/database',
      **{'eval_share': 0.0, **options},
    )
    return envs.make('sql', schema.Sql(data=data))


def _question(index: int, sql: str, gold, kind: str = 'list', **fields) -> dict:
  return {
    'id': index,
    'question': 'Which?',
    'db_id': 'pets',
    'tables': ['pet'],
    'gold_sql': sql,
    'gold_answer': gold,
    'answer_type': kind,
    **fields,
  }


def _grade(env, index: int, answer: str) -> bool:
  tasks = env.source('train', 0).take(99)
  episode = env.make(next(t for t in tasks if t.id == str(index)))
  with contextlib.closing(episode):
    episode.step(f'ANSWER: {answer}', False)
    return bool(episode.grade().correct)


def _questions() -> list:
  """Returns questions with dates, and nine that are refused."""
  rows: list = [_question(i, f'SELECT {x}', [1]) for i, x in enumerate(_DATED)]
  rows += [_question(10 + i, sql, [1]) for i, sql in enumerate(_BAD)]
  return [
    *rows,
    _question(20, 'SELECT 1', [1], 'number'),
    _question(21, 'SELECT 1', [[None]]),
    _question(22, 'SELECT 1', [1], db_id='gone'),
    _question(0, 'SELECT 1', [1]),
    7,
  ]


@base.trial('envs', 'refused questions are told at once, or left out')
def sql_refusals(scratch: base.Scratch) -> str:
  rows = _questions()
  data = _Data(scratch, rows, 'many')
  with _log() as messages:
    line = foreign_envs.refused(
      data.make, f'got 9 refusals for {len(rows)} questions'
    )
  assert len(messages) == 9, messages
  assert all(x.removeprefix('refused: ')[:60] in line for x in messages[:3])
  with _log() as messages:
    env = data.make(skip_refused=True)
  kept = len(env.source('train', 0))
  assert kept == len(_DATED) and len(messages) == 10, (kept, messages)
  assert f'9 of {len(rows)} questions are left out' in messages[-1]
  with _log() as messages:
    assert not len(
      data.make(skip_refused=True, eval_share=0.3).source('eval', 0)
    )
  assert 'env.data.eval_share should hold out' in messages[-1], messages
  return (
    f'{len(_DATED)} golds with dates run; 9 refusals in one line of '
    f'{len(line)} characters and 9 lines of log; left out and counted'
  )


@base.trial('envs', 'any of several golds is right; an asked order counts')
def sql_golds(scratch: base.Scratch) -> str:
  several = _question(1, 'SELECT 1', None, 'list')
  del several['gold_answer']
  several['gold_answers'] = [[1], [[1], [2]], ['one']]
  rows = [
    several,
    _question(2, _YOUNGEST, _GOLD),
    _question(3, f'{_YOUNGEST} LIMIT 3 OFFSET 1', ['pet5', 'pet1', 'pet6']),
    _question(4, _YOUNGEST, _GOLD, ordered=False),
  ]
  env = _Data(scratch, rows, 'golds').make(ordered=True)
  loose = _Data(scratch, rows, 'loose').make()
  cases = len(_ANSWERS)
  for index, answer, want, any_order in _ANSWERS:
    assert _grade(env, index, answer) is want, (index, answer)
    assert _grade(loose, index, answer) is any_order, (index, answer)
  for sql, words in (
    ('SELECT name FROM pet LIMIT 2', 'has no ORDER BY'),
    (f'{_YOUNGEST} DESC LIMIT 2', 'in the order of its gold_sql'),
  ):
    row = _question(1, sql, ['pet0', 'pet5'], ordered=True)
    name = f'refused{cases}'
    foreign_envs.refused(_Data(scratch, [row], name).make, words)
    cases += 1
  assert not verifier.correct('";"; ";"', ((';',),), 'list')
  return f'{cases} cases as they must be, ties and cut ties included'


@base.trial('envs', 'a tie may come in any order, and nothing else may')
def sql_ties(scratch: base.Scratch) -> str:
  del scratch
  rng, seen = random.Random(1), Counter()
  limits = database.Limits(steps=10_000_000, sql_length=9_000, column=128)
  for _ in range(60):
    connection = sqlite3.connect(':memory:')
    connection.execute('CREATE TABLE t (a, b)')
    rows = [(rng.choice('uvwxyz'), rng.randrange(3)) for _ in range(6)]
    connection.executemany('INSERT INTO t VALUES (?, ?)', rows)
    connection.commit()
    db = database.Database.from_bytes(connection.serialize(), limits)
    sql = f'SELECT a FROM t ORDER BY b{rng.choice(["", " DESC"])}'
    gold = db.query(sql, 9).rows
    order = ordering.read(db, sql, len(rows))
    db.close()
    keys = sorted((b for _, b in rows), reverse='DESC' in sql)
    orders = list(itertools.permutations(rows))
    valid = {
      tuple(a for a, _ in each)
      for each in orders
      if [b for _, b in each] == keys
    }
    for each in (*rng.sample(orders, 40), *map(_with_key, valid)):
      names = tuple(a for a, _ in each)
      right = verifier.correct('; '.join(names), gold, 'list', order.ranks)
      assert right == (names in valid), (sql, rows, names)
      seen[right] += 1
  return f'{seen.total()} orders: {seen[True]} right, {seen[False]} wrong'


def _with_key(names):
  return [(name, None) for name in names]
