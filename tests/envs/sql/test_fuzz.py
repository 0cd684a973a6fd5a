"""Fuzzed episodes: every turn gets an observation and changes no database."""

import math
import pathlib
import random
import re
from collections import Counter

import pytest

from posttrain import schema
from posttrain.envs import registry
from posttrain.envs.sql import dialogue
from tests.envs.sql import test_database

SYNTH = schema.SqlSynth(train_databases=40, eval_databases=1)
ALL = ('easy', 'medium', 'hard')
SAID = r'(?:(result): .{1,400}|error: .{1,60})\nleft: (\d+)'
ATTACKS = (
  *test_database.REFUSED,
  *(f'SELECT {call} FROM {{t}}' for call in test_database.FUNCTIONS),
  "ATTACH 'loot.db' AS x",
  "PRAGMA temp_store_directory = '{cwd}'",
  'CREATE TABLE loot AS SELECT * FROM {t}',
  'CREATE TRIGGER x AFTER INSERT ON {t} BEGIN DELETE FROM {t}; END',
  "SELECT writefile('loot.txt', 'x') FROM {t}",
  'SELECT zeroblob(1000000000)',
  f"SELECT strftime('{'%J' * 900}', rowid) FROM {{t}}, {{t}} u",
  'SELECT count(*) FROM ' + ', '.join(f'{{t}} t{i}' for i in range(9)),
  f"SELECT group_concat('{'a' * 1900}') FROM {{t}}",
  'SELECT ' + '(' * 900 + '1' + ')' * 900,
)
PIECES = (
  'SELECT~FROM~WHERE~JOIN~GROUP BY~LIMIT~UNION ALL~WITH~AS~IN~count(*)~max(~('
  "~)~,~;~*~'~\"~`~[~--~/*~*/~\n\n~```~=~||~-1~9e999~NULL~x'ff'~?~é~\0~\ud800~"
  '%~\nANSWER: 1~name~id~COLLATE~VALUES~strftime('
).split('~')


def _turn(rng: random.Random, task, cwd: pathlib.Path) -> str:
  """Returns the turn of a hostile, confused or nearly correct policy."""
  tokens = re.findall(r"\s+|\w+|'[^']*'|\S", task.info['gold_sql'])
  for _ in range(rng.choice((0, 0, 1, 2, 5))):
    tokens[rng.randrange(len(tokens))] = f' {rng.choice(PIECES)} '
  nested = ''.join(tokens)
  for _ in range(rng.choice((0, 0, 0, 1, 3, 40))):
    nested = f'SELECT * FROM ({nested})'
  attack = rng.choice(ATTACKS).replace('{t}', rng.choice(task.info['tables']))
  noise = ''.join(chr(rng.randrange(0x10FFFF)) for _ in range(30))
  sql = rng.choice((nested, nested, attack.replace('{cwd}', str(cwd))))
  kind = rng.choice(dialogue.TYPES)
  argument = rng.choice((*task.info['tables'], task.answer, noise, '"' * 2000))
  fenced = f'query ```sql\n{sql}\n```'
  action = f'{kind} {argument}'
  return rng.choice((f'QUERY: {sql}', sql, fenced, action, noise))


def _check(out, left: int) -> str:
  """Checks the result of a turn; returns its kind."""
  assert math.isfinite(out.reward)
  if out.done:
    assert out.messages == () and out.reward in (0.0, 1.0)
    return 'right' if out.reward else 'wrong'
  assert -0.10 <= out.reward <= 0.15
  (message,) = out.messages
  found = re.fullmatch(SAID, message['content'], re.DOTALL)
  assert found, message
  assert int(found[2]) == left
  return 'result' if found[1] else 'error'


def test_fuzzed_episodes_are_harmless(tmp_path, monkeypatch):
  """Nothing changes, neither the database nor the working directory."""
  monkeypatch.chdir(tmp_path)
  cfg = schema.Sql(data=SYNTH, difficulties=ALL)
  rng, count = random.Random(0), 800
  env, kinds = registry.make('sql', cfg), Counter()
  source = env.source('train', 0)
  while kinds.total() < count:
    task = next(source)
    episode = env.make(task)
    assert episode.reset() == task.prompt
    rewards = [episode.step('QUERY: SELECT 1', False).reward]
    before = episode._database._connection.serialize()
    for left in reversed(range(cfg.budget - 1)):
      text, cut = _turn(rng, task, tmp_path), rng.random() < 0.02
      out = episode.step(text, cut)
      kinds[_check(out, left)] += 1
      assert not (cut and out.done), text
      rewards.append(out.reward)
      if out.done:
        break
    assert episode._database._connection.serialize() == before
    assert episode.grade().reward == pytest.approx(sum(rewards))
    episode.close()
  # Or else nothing got through, or nothing was refused.
  assert min(kinds['result'], kinds['error']) > 0.1 * count, kinds
  assert kinds['right'] and kinds['wrong'], kinds
  assert not list(tmp_path.iterdir())
