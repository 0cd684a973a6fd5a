"""Preferences from files: accepted forms, errors, writing."""

import dataclasses
import json

import pytest

from posttrain.data import preferences

USER = {'role': 'user', 'content': 'What is 1 + 2?'}
YES = {'role': 'assistant', 'content': '3'}
NO = {'role': 'assistant', 'content': '4'}
SYSTEM = {'role': 'system', 'content': 'Add.'}
TOOL = {'role': 'tool', 'content': '3'}


def parse(**raw):
  return preferences.parse(raw, 'x.jsonl:7')


def test_strings_and_messages_give_equal_preferences():
  texts = parse(prompt=USER['content'], chosen='3', rejected='4')
  assert texts.prompt == (USER,)
  assert (texts.chosen, texts.rejected) == ((YES,), (NO,))
  assert texts == parse(prompt=[USER], chosen=[YES], rejected=[NO])
  assert texts == parse(chosen=[USER, YES], rejected=[USER, NO])
  assert texts.margin == 0 and not texts.info


def test_the_shared_prompt_ends_at_the_last_message_that_is_no_assistants():
  more = {'role': 'user', 'content': 'And 2 + 2?'}
  pair = parse(chosen=[USER, YES, more, NO], rejected=[USER, YES, more, YES])
  assert pair.prompt == (USER, YES, more)
  pair = parse(chosen=[USER, YES], rejected=[USER, YES, more, NO])
  assert (pair.prompt, pair.chosen) == ((USER,), (YES,))
  assert pair.rejected == (YES, more, NO)


@pytest.mark.parametrize('prompt', [USER['content'], [SYSTEM, USER]])
def test_a_prompt_before_an_answer_is_cut_off(prompt):
  messages = tuple(prompt) if isinstance(prompt, list) else (USER,)
  whole = parse(
    prompt=prompt, chosen=[*messages, YES], rejected=[*messages, NO]
  )
  assert whole == parse(prompt=prompt, chosen='3', rejected='4')
  assert whole == parse(prompt=prompt, chosen=[*messages, YES], rejected='4')
  assert whole.prompt == messages and whole.chosen == (YES,)
  one = parse(prompt=prompt, completion=[*messages, YES], label=False)
  assert (one.prompt, one.rejected) == (messages, (YES,))


def test_a_labelled_answer_is_chosen_or_rejected():
  good = parse(prompt='1 + 2?', completion='3', label=True, source='me')
  bad = parse(prompt='1 + 2?', completion='4', label=False)
  assert (good.chosen, good.rejected) == ((YES,), None)
  assert (bad.chosen, bad.rejected) == (None, (NO,))
  assert good.info == {'source': 'me'}


@pytest.mark.parametrize(
  ('raw', 'words'),
  [
    ({'prompt': 'a', 'chosen': 'b'}, 'got columns'),
    ({'prompt': 'a', 'chosen': 'b', 'rejected': 'b'}, 'another answer'),
    ({'prompt': 'a', 'completion': 'b', 'label': 1}, 'true or false'),
    (
      {'prompt': 'a', 'chosen': 'b', 'rejected': 'c', 'margin': True},
      'margin must be a finite number of at most 1e+06: got True',
    ),
    # Answers that begin with another question.
    (
      {'prompt': '?', 'chosen': 'b', 'rejected': [USER, YES]},
      'rejected must begin with an assistant or tool turn',
    ),
    ({'chosen': [YES], 'rejected': 'b'}, "put the question into 'prompt'"),
  ],
)
def test_malformed_rows_are_refused_with_their_line(raw, words):
  with pytest.raises(ValueError, match='^x.jsonl:7: ') as error:
    parse(**raw)
  assert words in str(error.value)
  assert len(str(error.value)) < 1000


def test_written_pairs_are_read_back(tmp_path):
  path = tmp_path / 'new' / 'pairs.jsonl'
  pairs = (
    parse(prompt='a', chosen='b', rejected='c', margin=0.5, id=3),
    parse(prompt='a', completion='b', label=False),
  )
  preferences.write(path, pairs)
  read = preferences.read(path)
  for ours, theirs in zip(pairs, read, strict=True):
    assert vars(ours) | {'where': ''} == vars(theirs) | {'where': ''}
  assert read[1].where == f'{path}:2'
  assert [x.name for x in path.parent.iterdir()] == ['pairs.jsonl']


def test_pairs_of_equal_prompts_are_held_out_together():
  pairs = [
    parse(prompt=f'{i}?', chosen=answer, rejected='c')
    for answer in 'bd'
    for i in range(1000)
  ]
  train, held_out = preferences.split(pairs, 0.2)
  assert len(train) + len(held_out) == 2000
  assert 300 < len(held_out) < 500
  ours = {pair.prompt[0]['content'] for pair in held_out}
  assert len(ours) == len(held_out) // 2
  assert not ours & {pair.prompt[0]['content'] for pair in train}
  assert preferences.split(pairs, 0.0) == (pairs, [])


def test_columns_of_other_names(tmp_path):
  path = tmp_path / 'pairs.jsonl'
  row = {'question': 'a', 'good': 'b', 'bad': 'c', 'level': 3}
  path.write_text(json.dumps(row))
  columns = {'question': 'prompt', 'good': 'chosen', 'bad': 'rejected'}
  (pair,) = preferences.read(path, columns)
  assert pair == dataclasses.replace(
    parse(prompt='a', chosen='b', rejected='c', level=3), where=f'{path}:1'
  )
