"""The journal: what was accepted is there in the next process, once."""

import concurrent.futures

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


def test_a_result_waits_for_space_on_the_disk(path, monkeypatch):
  monkeypatch.setattr(journal, 'RETRY', 0.01)
  full = journal.Journal(path)
  full.accept(row(1))
  (pages,) = full._db.execute('pragma page_count').fetchone()
  full._db.execute(f'pragma max_page_count = {pages}')
  result = bytes(10**6)
  with concurrent.futures.ThreadPoolExecutor() as pool:
    finished = pool.submit(full.finish, 'a:1', 'json', result)
    with pytest.raises(TimeoutError):
      finished.result(0.1)
    full._db.execute('pragma max_page_count = 1000000')
    finished.result(60)
  assert journal.Journal(path).result('a:1') == ('json', result)


def test_a_request_is_new_while_others_are_stored(path):
  """By several threads; a result that was there is stored again, too."""
  shared = journal.Journal(path)

  def accept(number):
    shared.finish('a:0', 'json', b'')
    return shared.accept(row(number))

  assert accept(0)
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    assert all(pool.map(accept, range(1, 301)))
