"""Caches of reference logprobs and of pairs: kept, and noticed when stale."""

import json

import numpy as np
import pytest

from posttrain.data import preferences
from posttrain.stage import pairs as stage_pairs

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
    return stage_pairs.cached(path, {**KEY, **changes}, score, 'ab').tolist()

  return ask, calls


def test_cached_logprobs_are_scored_once(asked, caplog):
  ask, calls = asked
  assert ask() == ask() == [1.5, 1.0] and calls == ['ab']
  assert not caplog.text


@pytest.mark.parametrize('part', KEY)
def test_a_changed_key_entry_is_named_and_scored_again(asked, caplog, part):
  ask, calls = asked
  ask()
  assert ask(**{part: 'new'}) == [1.5, 2.0]
  assert f'is stale: the {part} has changed' in caplog.text
  assert ask(**{part: 'new'}) == [1.5, 2.0] and len(calls) == 2


def test_a_damaged_cache_is_scored_again(asked, tmp_path, caplog):
  ask, calls = asked
  ask()
  path = tmp_path / 'pairs' / 'x.npz'
  for count, left in enumerate((100, 0), 2):
    path.write_bytes(path.read_bytes()[:left])
    assert ask() == [1.5, count] and 'cannot be read' in caplog.text
    caplog.clear()
    assert np.float32(ask()).tolist() == [1.5, count] and len(calls) == count


DEEP = '[' * 5000 + ']' * 5000


@pytest.mark.parametrize(
  'arrays',
  [
    {'key': np.str_(DEEP), 'logprobs': np.zeros(2)},
    {'key': np.str_('[1]'), 'logprobs': np.zeros(2)},
    {'key': np.str_('{'), 'logprobs': np.zeros(2)},
    {'key': np.zeros(3), 'logprobs': np.zeros(2)},
    {'logprobs': np.zeros(2)},
    {'key': np.str_('{}'), 'logprobs': np.array([1.0, np.nan])},
    {'key': np.str_('{}'), 'logprobs': np.array(['a', 'b'])},
  ],
)
def test_a_cache_of_other_things_is_scored_again(
  asked, tmp_path, caplog, arrays
):
  ask, calls = asked
  path = tmp_path / 'pairs' / 'x.npz'
  path.parent.mkdir()
  with path.open('wb') as file:
    np.savez(file, **arrays)
  assert ask() == [1.5, 1.0] == ask() and len(calls) == 1
  assert 'cannot be read' in caplog.text and len(caplog.text) < 1000


@pytest.mark.parametrize('shape', [(), (2, 1), (3,)])
def test_a_cache_of_another_shape_is_stale(tmp_path, caplog, shape):
  path = tmp_path / 'x.npz'
  with path.open('wb') as file:
    np.savez(file, key=np.str_(json.dumps(KEY)), logprobs=np.zeros(shape))
  scored = stage_pairs.cached(str(path), KEY, lambda _: [1.0, 2.0], 'ab')
  assert scored.tolist() == [1.0, 2.0] and 'is stale' in caplog.text


@pytest.mark.parametrize('text', [DEEP, '[]', '3', '{', '{"model": ' + DEEP])
def test_pairs_with_a_damaged_key_are_made_again(tmp_path, text):
  path, key = tmp_path / 'x.jsonl', tmp_path / 'x_of.json'
  path.write_text('old')
  key.write_text(text)
  stage_pairs.write_pairs({'train': str(path)}, str(key), KEY, lambda _: [])
  assert json.loads(key.read_text()) == KEY and path.read_text() == ''


def test_another_number_of_answers_is_stale(tmp_path, caplog):
  path = str(tmp_path / 'x.npz')
  stage_pairs.cached(path, KEY, lambda samples: [1.0, 2.0], 'ab')
  found = stage_pairs.cached(path, KEY, lambda samples: [3.0], 'a')
  assert found.tolist() == [3.0] and 'number of answers' in caplog.text


def test_pairs_are_made_again_for_another_model(tmp_path, caplog):
  path, held_out, of = (
    tmp_path / 'pairs' / x for x in ('x.jsonl', 'x_eval.jsonl', 'x_of.json')
  )
  asked = []

  def made(prompt, **key):
    def make(split):
      asked.append((prompt, split))
      said = ({'role': 'assistant', 'content': x} for x in 'yn')
      user = {'role': 'user', 'content': prompt}
      return [preferences.Preference((user,), *((x,) for x in said), 'here')]

    files = {'train': str(path), 'eval': str(held_out)}
    stage_pairs.write_pairs(files, str(of), {'model': 'a', **key}, make)
    (one,), (other,) = map(preferences.read, files.values())
    return one.prompt[0]['content'], other.prompt[0]['content']

  assert made('one') == made('two') == ('one', 'one') and not caplog.text
  assert made('three', model='b') == ('three', 'three')
  assert 'the model has changed; the pairs are made again' in caplog.text
  for damage in (of.unlink, lambda: of.write_text('{"mod')):
    damage()
    assert made('four', model='b') == made('five', model='b') == ('four',) * 2
  # Killed between the two files.
  held_out.unlink()
  assert made('six', model='b') == ('four', 'six')
  assert asked == [
    (x, split)
    for x in ('one', 'three', 'four', 'four')
    for split in ('train', 'eval')
  ] + [('six', 'eval')]
