"""Caches of reference logprobs and of pairs: kept, and noticed when stale."""

import json

import numpy as np
import pytest

from posttrain.data import preferences
from posttrain.stage import pairs

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
    return pairs.cached(path, {**KEY, **changes}, score, 'ab').tolist()

  return ask, calls


def test_cached_logprobs_are_scored_once(asked, caplog):
  ask, calls = asked
  assert ask() == ask() == [1.5, 1.0] and calls == ['ab']
  assert not caplog.text


@pytest.mark.parametrize('part', KEY)
def test_a_changed_key_entry_is_named_and_scored_again(asked, caplog, part):
  ask, _ = asked
  ask()
  assert ask(**{part: 'new'}) == [1.5, 2.0]
  assert f'the {part} has changed' in caplog.text


@pytest.mark.parametrize(
  ('key', 'logprobs', 'length'),
  [
    (json.dumps(KEY), [0.0, 0.0], 100),  # damaged
    ('[1]', [0.0, 0.0], None),
    (json.dumps(KEY), [1.0, np.nan], None),
    (json.dumps(KEY), [0.0], None),
  ],
)
def test_a_cache_of_other_things_is_scored_again(
  asked, tmp_path, caplog, key, logprobs, length
):
  ask, calls = asked
  path = tmp_path / 'pairs' / 'x.npz'
  path.parent.mkdir()
  np.savez(path, key=np.str_(key), logprobs=logprobs)
  path.write_bytes(path.read_bytes()[:length])
  assert ask() == [1.5, 1.0] == ask() and len(calls) == 1
  assert 'is stale' in caplog.text


def test_pairs_are_made_again_for_another_model(tmp_path, caplog):
  files = {x: str(tmp_path / f'{x}.jsonl') for x in ('train', 'eval')}
  of, asked = tmp_path / 'of.json', []

  def made(prompt, model='a'):
    def make(split):
      asked.append((prompt, split))
      user = {'role': 'user', 'content': prompt}
      yes, no = ({'role': 'assistant', 'content': x} for x in 'yn')
      return [preferences.Preference((user,), (yes,), (no,), 'here')]

    pairs.write_pairs(files, str(of), {'model': model}, make)
    found = (preferences.read(path)[0] for path in files.values())
    return [x.prompt[0]['content'] for x in found]

  assert made('one') == made('two') == ['one', 'one'] and not caplog.text
  assert made('three', 'b') == ['three', 'three']
  assert 'the model has changed; the pairs are made again' in caplog.text
  of.write_text('{"mod')
  assert made('new', 'b') == made('other', 'b') == ['new'] * 2
  # Killed between the two files.
  (tmp_path / 'eval.jsonl').unlink()
  assert made('last', 'b') == ['new', 'last']
  assert asked[-1] == ('last', 'eval') and len(asked) == 7
