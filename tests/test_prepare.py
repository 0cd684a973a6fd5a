"""What the reference said is kept, and noticed where it is stale."""

import numpy as np
import pytest

from posttrain import prepare

KEY = {'dataset': 'a', 'model': 'b', 'tokenizer': 'c'}


@pytest.fixture
def asked(tmp_path):
  """(asks through a file, how often the reference was asked)."""
  calls = []

  def ask(**changes):
    def score(samples):
      calls.append(samples)
      return [1.5, len(calls)]

    path = str(tmp_path / 'pairs' / 'x.npz')
    return prepare.cached(path, {**KEY, **changes}, score, 'samples').tolist()

  return ask, calls


def test_the_reference_is_asked_once(asked, caplog):
  ask, calls = asked
  assert ask() == ask() == [1.5, 1.0] and calls == ['samples']
  assert not caplog.text


@pytest.mark.parametrize('part', KEY)
def test_a_stale_file_is_noticed_by_what_changed(asked, caplog, part):
  ask, calls = asked
  ask()
  assert ask(**{part: 'new'}) == [1.5, 2.0]
  assert f'is stale: the {part} is another by now' in caplog.text
  assert ask(**{part: 'new'}) == [1.5, 2.0] and len(calls) == 2


def test_a_damaged_file_is_made_again(asked, tmp_path, caplog):
  ask, calls = asked
  ask()
  path = tmp_path / 'pairs' / 'x.npz'
  path.write_bytes(path.read_bytes()[:100])
  assert ask() == [1.5, 2.0] and 'cannot be read' in caplog.text
  assert np.float32(ask()).tolist() == [1.5, 2.0] and len(calls) == 2
