"""Sources: every epoch whole, every state resumable."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data import sources


def draw(source, count):
  return [next(source) for _ in range(count)]


@given(st.integers(1, 9), st.integers(0, 2**40), st.integers(0, 40))
@settings(max_examples=40, deadline=None)
def test_resume_continues_exactly(length, seed, before):
  items = [f'task {i}' for i in range(length)]
  whole = sources.Shuffled(items, seed)
  draw(whole, before)
  state = json.loads(json.dumps(whole.get_state()))
  resumed = sources.Shuffled(items, seed)
  draw(resumed, 3)
  resumed.set_state(state)
  assert draw(whole, 20) == draw(resumed, 20)
  assert whole.get_state() == resumed.get_state()


def test_every_epoch_holds_every_item_once_in_another_order():
  source = sources.Shuffled(range(50), seed=3)
  epochs = [draw(source, 50) for _ in range(3)]
  assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
  assert epochs[0] != epochs[1] != epochs[2]


def test_the_permutation_of_a_seed_is_a_literal():
  """A run resumed under another numpy must draw in the same order."""
  assert sources.permutation(8, 0, 0).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]


def test_take_returns_the_first_items_and_keeps_the_position():
  source = sources.Shuffled('abc', seed=0)
  state = source.get_state()
  assert source.take(2) == ('a', 'b')
  assert source.take(9) == ('a', 'b', 'c')
  assert source.get_state() == state and len(source) == 3


def test_state_of_another_source_is_refused():
  other = sources.Shuffled('abd', 0, 'of abd')
  with pytest.raises(AssertionError, match='with another fingerprint'):
    sources.Shuffled('abc', 0).set_state(other.get_state())


def test_fingerprint_of_a_file_depends_on_its_content_alone(tmp_path):
  one, two = tmp_path / 'one', tmp_path / 'two'
  one.write_text('rows')
  two.write_text('rows')
  assert sources.file_fingerprint(one) == sources.file_fingerprint(two)
  two.write_text('sows')
  assert sources.file_fingerprint(one) != sources.file_fingerprint(two)
