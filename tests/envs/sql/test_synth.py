"""Generated databases and questions: pinned, answerable, not guessable."""

import re
import sqlite3
from collections import Counter

import pytest

from posttrain.envs.sql import questions, synth, words

GOLDEN = {
  'train': ('8f34f3f273426e7c9ad8c826be9b4046eaa9ea21c4178a80376216c2fa596056'),
  'eval': ('7f31d732496dd4b9488c43d153511502a4ed5a8f982ba3a327eae4c38dcc776f'),
  'ood': ('3f7d2857e987c685bfc749a1a0bdfdf897ab78479ba6e01260be07fec393ac74'),
}
SEEDS = range(400)


@pytest.fixture(scope='module')
def all_questions():
  return [one for seed in SEEDS for one in synth.ask(seed)]


@pytest.mark.parametrize('split', synth.SPLITS)
def test_the_fingerprint_of_the_data_is_pinned(split):
  """A change makes results incomparable with earlier ones."""
  assert synth.fingerprint(range(30), split) == GOLDEN[split], (
    f'sqlite {sqlite3.sqlite_version}'
  )


def test_splits_share_nothing():
  made = {
    split: [synth.make(seed, split) for seed in range(100)]
    for split in synth.SPLITS
  }
  ids = [synth.ask(99, split)[0].id for split in synth.SPLITS]
  assert ids == ['synth_99_000', 'synth_1000099_000', 'synth_2000099_000']
  assert len({tables for each in made.values() for tables in each}) == 300
  for split, each in made.items():
    ood = split == 'ood'
    found = [table for tables in each for table in tables]
    assert {table.name for table in found} == set(
      map(words.plural, words.OOD_NOUNS if ood else words.NOUNS)
    )
    assert {row[1] for table in found for row in table.rows} == set(
      words.OOD_NAMES if ood else words.NAMES
    )


def test_difficulties_are_balanced_and_all_templates_occur(all_questions):
  assert Counter(one.difficulty for one in all_questions) == {
    kind: 3 * len(SEEDS) for kind in questions.DIFFICULTIES
  }
  templates = Counter(one.template for one in all_questions)
  assert set(templates) == {
    x for kind in synth.TEMPLATES.values() for x in kind
  }
  assert min(templates.values()) > 150


def cells(tables, table, concept):
  """Maps a table's names to their values of a concept, or to its owners."""
  (table,) = (each for each in tables if each.name == table)
  (at,) = (i for i, x in enumerate(table.columns, 2) if x.concept == concept)
  return {row[1]: row[at] for row in table.rows}


def owners(tables, child, parent):
  """Maps a child's names to its owner's."""
  (parent,) = (each for each in tables if each.name == parent)
  names = {row[0]: row[1] for row in parent.rows}
  return {name: names[i] for name, i in cells(tables, child, '').items()}


def answer(text, tables):
  """Answers a question from its text, without SQL."""
  rows = {table.name: table.rows for table in tables}
  match text.split():
    case ['how', 'many', t, 'are', 'there']:
      return [len(rows[t])]
    case ['which', 'of', 'the', t, 'is', 'number', i]:
      return [row[1] for row in rows[t] if row[0] == int(i)]
    case ['what', 'is', 'the', c, 'of', name, 'in', t]:
      return [cells(tables, t, c)[name]]
    case ['which', 'of', 'the', t, 'has', 'the', 'most', child]:
      counts = Counter(owners(tables, child, t).values())
      top = max(counts.values())
      return [name for name, count in counts.items() if count == top]
    case ['which', 'of', 'the', t, 'has', 'the', end, c]:
      values = cells(tables, t, c)
      pick = {'highest': max, 'lowest': min}[end](values.values())
      return [name for name, value in values.items() if value == pick]
    case ['how', 'many', t, 'have', c, side, bound]:
      sign = {'above': 1, 'below': -1}[side]
      values = cells(tables, t, c).values()
      return [sum(sign * value > sign * int(bound) for value in values)]
    case ['what', 'is', 'the', 'total', c, 'of', t]:
      return [sum(cells(tables, t, c).values())]
    case ['how', 'many', child, 'belong', 'to', name, 'in', t]:
      return [list(owners(tables, child, t).values()).count(name)]
    case ['which', child, 'belong', 'to', name, 'in', t]:
      return [k for k, v in owners(tables, child, t).items() if v == name]
  asks = re.fullmatch(
    r'what is the highest (\w+) of (\w+) that belong to (\w+) in (\w+)', text
  )
  c, child, name, t = asks.groups()
  values = cells(tables, child, c)
  mine = [k for k, v in owners(tables, child, t).items() if v == name]
  return [max(values[k] for k in mine)]


@pytest.mark.parametrize('split', synth.SPLITS)
def test_gold_rows_answer_the_text(split):
  """There is no tie, whose text would ask for all of the highest."""
  for seed in range(60):
    tables = synth.make(seed, split)
    for one in synth.ask(seed, split):
      found = sorted(row[0] for row in one.gold_rows)
      assert sorted(answer(one.text, tables)) == found, one
      assert all(len(row) == 1 for row in one.gold_rows)
      named = re.findall(r'(?:FROM|JOIN) (\w+)', one.gold_sql)
      assert one.tables == tuple(named)
