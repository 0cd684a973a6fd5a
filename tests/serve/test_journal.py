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


def test_trims_what_precedes_the_last_save(path, monkeypatch):
  db = journal.Journal(path)
  assert db.point('a') == -1
  for number, verb in enumerate(
    ('create_model', 'optim_step', 'save_weights', 'optim_step'), 0
  ):
    db.accept(row(number, verb))
    db.finish(f'a:{number}', 'json', b'', point=verb == 'save_weights')
  for number in (0, 1):
    db.accept(row(number, 'asample', 'b'))
  db.finish('b:0', 'proto', b'')
  assert db.point('a') == 2
  db.trim()
  assert len(db.rows()) == 6  # their results can be fetched again
  monkeypatch.setattr(journal, 'KEPT', -1.0)
  db.trim()
  assert [x.id for x in db.rows()] == ['a:0', 'a:2', 'a:3', 'b:1']
