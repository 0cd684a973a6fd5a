"""The journal: what was accepted is there in the next process, once."""

import pytest

from posttrain.serve import journal


def row(number, verb='optim_step', owner='a'):
  body = b'%d' % number
  return journal.Row(f'{owner}:{number}', owner, number, verb, body)


@pytest.fixture
def path(tmp_path):
  return str(tmp_path / 'journal.db')


def test_accepted_once(path):
  first = journal.Journal(path)
  assert first.accept(row(2)) and first.accept(row(1))
  assert not first.accept(row(2))
  first.finish('a:2', 'json', b'x', point=True)
  first.finish('a:2', 'json', b'other')  # the same request, carried out again
  again = journal.Journal(path)
  assert again.rows() == [row(2)._replace(kind='json', point=True), row(1)]
  assert again.result('a:2') == ('json', b'x')
  assert again.result('a:1') == (None, None)
  assert again.result('a:3') is None
