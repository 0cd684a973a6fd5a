"""The journal: what was accepted is there in the next process, once."""

import pytest

from posttrain.serve import journal


def row(number, verb='optim_step', owner='a'):
  body = b'%d' % number
  return journal.Row(f'{owner}:{number}', owner, number, verb, body, None)


@pytest.fixture
def path(tmp_path):
  return str(tmp_path / 'journal.db')


def test_accepted_once(path):
  first = journal.Journal(path)
  assert first.accept(row(2)) and first.accept(row(1))
  assert not first.accept(row(2))
  first.finish('a:2', 'json', b'x')
  first.finish('a:2', 'json', b'other')  # the same request, carried out again
  again = journal.Journal(path)
  assert again.has('a:1') and not again.has('a:3')
  assert again.rows() == [row(2)._replace(kind='json'), row(1)]
  assert again.result('a:2') == ('json', b'x')
  assert again.result('a:1') is None
  with pytest.raises(KeyError):
    again.result('a:3')


def test_points_are_the_saves_of_a_model(path):
  db = journal.Journal(path)
  assert db.points('a') == []
  for number in range(4):
    for owner in 'ab':
      db.accept(row(number, owner=owner))
    db.finish(f'a:{number}', 'json', b'', point=number % 2 == 1)
  assert db.points('a') == [1, 3] and db.points('b') == []
