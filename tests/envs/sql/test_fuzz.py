"""Fuzzed episodes: every turn gets an observation and changes no database."""

import hashlib
import math
import pathlib
import random
import re
from collections import Counter

import pytest

from posttrain import schema
from posttrain.envs import registry
from posttrain.envs.sql import dialogue

SYNTH = schema.SqlSynth(train_databases=40, eval_databases=1)
ALL = ('easy', 'medium', 'hard')
SAID = {  # style -> what an observation may look like
  'compact': r'(?:(result): .{1,400}|error: .{1,60})\nleft: (\d+)',
  'verbose': r'(?:(Result):\n.{1,2000}|Error: .{1,500})\nSteps left: (\d+)',
}
ATTACKS = (
  "ATTACH 'loot.db' AS x",
  "VACUUM INTO 'loot.db'",
  'PRAGMA query_only = OFF',
  "PRAGMA temp_store_directory = '{cwd}'",
  'DROP TABLE {t}',
  'INSERT INTO {t} SELECT * FROM {t}',
  'BEGIN',
  'CREATE TABLE loot AS SELECT * FROM {t}',
  'CREATE TEMP TABLE loot (a)',
  'CREATE TRIGGER x AFTER INSERT ON {t} BEGIN DELETE FROM {t}; END',
  'SELECT 1; DROP TABLE {t}',
  'WITH x AS (SELECT 1) DELETE FROM {t} RETURNING *',
  "SELECT load_extension('{cwd}/loot.so')",
  "SELECT readfile('/etc/passwd')",
  "SELECT writefile('loot.txt', 'x') FROM {t}",
  'SELECT zeroblob(1000000000)',
  "SELECT printf('%999999999d', 1)",
  "SELECT date('now', '+999999999999 days', 'localtime') FROM {t}",
  f"SELECT strftime('{'%J' * 900}', rowid) FROM {{t}}, {{t}} u",
  f"SELECT date('{'9' * 1900}') FROM {{t}}",
  "SELECT group_concat(strftime('%J%f%s', t0.rowid)) FROM {t} t0, {t}, {t} a",
  "SELECT date(load_extension('{cwd}/loot.so')), CURRENT_TIMESTAMP",
  'SELECT * FROM sqlite_master',
  "SELECT * FROM pragma_table_info('{t}')",
  'WITH RECURSIVE x(a) AS (SELECT 1 UNION ALL SELECT a + 1 FROM x) '
  'SELECT count(*) FROM x',
  'SELECT count(*) FROM ' + ', '.join(f'{{t}} t{i}' for i in range(9)),
  'SELECT t0.* FROM {t} t0, {t}, {t} a, {t} b, {t} c, {t} d, {t} e ORDER BY '
  'a.rowid + e.rowid',
  'WITH a AS (SELECT 1 FROM {t}, {t} u), b AS (SELECT 1 FROM a, a u), '
  'c AS (SELECT 1 FROM b, b u), d AS (SELECT 1 FROM c, c u) '
  'SELECT count(*) FROM d, d u',
  f"SELECT * FROM {{t}} WHERE rowid LIKE '{'%_' * 900}'",
  f"SELECT * FROM {{t}} WHERE rowid LIKE '{'%1' * 49}x'",
  f"SELECT group_concat('{'a' * 1900}') FROM {{t}}",
  'SELECT ' + '(' * 900 + '1' + ')' * 900,
  'SELECT 1' + ' UNION SELECT 1' * 120,
  'SELECT ' + '- ' * 900 + '1',
  '/*' * 900,
  'SELECT ' * 250,
  '.shell touch loot',
  "'; DROP TABLE {t}; --",
  'SELECT ?',
  '\0',
)
PIECES = (
  'SELECT~FROM~WHERE~JOIN~GROUP BY~LIMIT~UNION ALL~WITH~AS~IN~count(*)~max(~('
  "~)~,~;~*~'~\"~`~[~--~/*~*/~\n\n~```~=~||~-1~9e999~NULL~x'ff'~?~é~\0~\ud800~"
  '%~\nANSWER: 1~name~id~COLLATE~VALUES~strftime('
).split('~')


class Fuzzer:
  """Writes turns of hostile, confused and nearly correct policies."""

  def __init__(self, seed: int, cwd: pathlib.Path):
    self._rng, self._cwd = random.Random(seed), cwd
    self._kinds = (
      self._noise,
      self._action,
      self._action,
      self._query,
      self._query,
      self._query,
      self._attack,
      self._attack,
    )

  def turn(self, task) -> tuple[str, bool]:
    """Returns (text, truncated)."""
    text = self._rng.choice(self._kinds)(task)
    return text, self._rng.random() < 0.02

  def _noise(self, task=None) -> str:
    """Returns any code points, surrogates included, sometimes very many."""
    ranges = ((0, 0x7F), (0, 0x7F), (0, 0x2FF), (0x2000, 0x206F), (0, 0x10FFFF))
    size = self._rng.choice((0, 1, 5, 30, 100, 100, 3000))
    return ''.join(
      chr(self._rng.randint(*self._rng.choice(ranges))) for _ in range(size)
    )

  def _action(self, task) -> str:
    """Returns an action in random spelling, with any argument."""
    argument = self._rng.choice(
      (
        *task.info['tables'],
        *task.info['tables'],
        self._table(task).upper(),
        'id',
        'sqlite_master',
        task.answer,
        task.answer,
        str(self._rng.randrange(10**6)),
        self._noise(),
        '"' * 2000,
        task.info['gold_sql'],
        self._attack(task),
      )
    )
    return self._say(self._rng.choice(dialogue.TYPES), argument)

  def _query(self, task) -> str:
    """Returns the gold SQL with tokens removed, swapped or replaced."""
    rng, sql = self._rng, task.info['gold_sql']
    tokens = re.findall(r"\s+|\w+|'[^']*'|\S", sql)
    for _ in range(rng.choice((0, 0, 1, 2, 5))):
      at, other = (rng.randrange(len(tokens)) for _ in range(2))
      match rng.randrange(3):
        case 0:
          tokens[at] = ''
        case 1:
          tokens[at], tokens[other] = tokens[other], tokens[at]
        case 2:
          tokens.insert(at, f' {rng.choice(PIECES)} ')
    sql = ''.join(tokens)
    for _ in range(rng.choice((0, 0, 0, 1, 3, 40))):
      sql = f'SELECT * FROM ({sql})'
    dress = rng.choice(
      (
        '{}',
        '{}',
        '{}',
        '{};',
        '/* x */ {}',
        '```sql\n{}\n```',
        '{}\n\nANSWER: 1',
        '{} /*',
        '{}; {}',
      )
    )
    sql = dress.replace('{}', sql)
    return self._say('QUERY', sql) if rng.random() < 0.8 else sql

  def _attack(self, task) -> str:
    sql = self._rng.choice(ATTACKS).replace('{t}', self._table(task))
    sql = sql.replace('{cwd}', str(self._cwd))
    return self._say('QUERY', sql) if self._rng.random() < 0.7 else sql

  def _table(self, task) -> str:
    return self._rng.choice(task.info['tables'])

  def _say(self, word: str, argument: str) -> str:
    word = self._rng.choice((word, word.lower(), word.title()))
    before = self._rng.choice(('', '', '  ', 'I think\n', '```\n'))
    return before + word + self._rng.choice((' ', ': ', ':', '\t')) + argument


def _digest(db) -> str:
  """Returns the hash of all rows."""
  seen = hashlib.sha256()
  for table in db.tables:
    for start in range(0, db.count(table), 200):
      page = f'SELECT * FROM "{table}" LIMIT 200 OFFSET {start}'
      result = db.query(page, 200)
      assert result.error is None, result.error
      seen.update(repr(result.rows).encode())
  return seen.hexdigest()


def _check(out, cfg: schema.Sql, left: int) -> str:
  """Checks the result of a turn; returns its kind."""
  assert math.isfinite(out.reward)
  if out.done:
    assert out.messages == () and out.reward in (0.0, 1.0)
    return 'right' if out.reward else 'wrong'
  assert -0.10 <= out.reward <= 0.15
  (message,) = out.messages
  assert message['role'] == cfg.role
  found = re.fullmatch(SAID[cfg.style], message['content'], re.DOTALL)
  assert found, message
  assert int(found[2]) == left
  return 'result' if found[1] else 'error'


@pytest.mark.parametrize(
  'style, role', [('compact', 'tool'), ('verbose', 'user')]
)
def test_fuzzed_episodes_are_harmless(tmp_path, monkeypatch, style, role):
  """Nothing changes, neither the database nor the working directory."""
  monkeypatch.chdir(tmp_path)
  cfg = schema.Sql(data=SYNTH, difficulties=ALL, style=style, role=role)
  fuzzer, count = Fuzzer(len(role), tmp_path), 500
  env, kinds = registry.make('sql', cfg), Counter()
  source = env.source('train', 0)
  while kinds.total() < count:
    task = next(source)
    episode = env.make(task)
    assert episode.reset() == task.prompt
    rewards = [episode.step('QUERY: SELECT 1', False).reward]
    before = _digest(episode._database)
    for left in reversed(range(cfg.budget - 1)):
      text, cut = fuzzer.turn(task)
      out = episode.step(text, cut)
      kinds[_check(out, cfg, left)] += 1
      assert not (cut and out.done), text
      rewards.append(out.reward)
      if out.done:
        break
    assert _digest(episode._database) == before
    error = episode._database.query('SELECT * FROM loot', 1).error
    assert error == 'no such table: loot'  # which many attacks would make
    assert episode.grade().reward == pytest.approx(sum(rewards))
    episode.close()
  # Or else nothing got through, or nothing was refused.
  assert min(kinds['result'], kinds['error']) > 0.1 * count, kinds
  assert kinds['right'] and kinds['wrong'], kinds
  assert not list(tmp_path.iterdir())
