"""Preferences from files: every form, both ways, and what is refused."""

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


def test_texts_and_messages_are_the_same():
  texts = parse(prompt=USER['content'], chosen='3', rejected='4')
  assert texts.prompt == (USER,)
  assert (texts.chosen, texts.rejected) == ((YES,), (NO,))
  assert texts == parse(prompt=[USER], chosen=[YES], rejected=[NO])
  assert texts == parse(chosen=[USER, YES], rejected=[USER, NO])
  assert texts.margin == 0 and not texts.info


def test_a_conversation_is_divided_behind_the_last_question():
  """What both begin with is no prompt where it ends in an answer."""
  more = {'role': 'user', 'content': 'And 2 + 2?'}
  pair = parse(chosen=[USER, YES, more, NO], rejected=[USER, YES, more, YES])
  assert pair.prompt == (USER, YES, more)
  pair = parse(chosen=[USER, YES], rejected=[USER, YES, more, NO])
  assert (pair.prompt, pair.chosen) == ((USER,), (YES,))
  assert pair.rejected == (YES, more, NO)


@pytest.mark.parametrize(
  'prompt', [USER['content'], [USER], [SYSTEM, USER], [USER, NO, USER]]
)
def test_a_conversation_begins_with_the_prompt_that_it_is_given(prompt):
  asked = tuple(prompt) if isinstance(prompt, list) else (USER,)
  whole = parse(prompt=prompt, chosen=[*asked, YES], rejected=[*asked, NO])
  assert whole == parse(prompt=prompt, chosen='3', rejected='4')
  assert whole == parse(prompt=prompt, chosen=[*asked, YES], rejected='4')
  assert whole.prompt == asked and whole.chosen == (YES,)
  one = parse(prompt=prompt, completion=[*asked, YES], label=False)
  assert (one.prompt, one.rejected) == (asked, (YES,))


def test_a_system_message_is_part_of_the_prompt():
  pair = parse(chosen=[SYSTEM, USER, YES], rejected=[SYSTEM, USER, NO])
  assert pair.prompt == (SYSTEM, USER)
  assert parse(prompt='a', chosen=[TOOL, YES], rejected='b').chosen[0] == TOOL


def test_one_answer_with_a_label():
  good = parse(prompt='1 + 2?', completion='3', label=True, source='me')
  bad = parse(prompt='1 + 2?', completion='4', label=False)
  assert (good.chosen, good.rejected) == ((YES,), None)
  assert (bad.chosen, bad.rejected) == (None, (NO,))
  assert good.info == {'source': 'me'}


@pytest.mark.parametrize(
  ('raw', 'says'),
  [
    ({'prompt': 'a', 'chosen': 'b'}, 'got columns'),
    ({'prompt': 'a', 'chosen': 'b', 'rejected': 'b'}, 'another answer'),
    ({'prompt': 'a', 'chosen': 'b', 'rejected': 5}, 'rejected must be'),
    ({'prompt': 'a', 'chosen': 'b', 'rejected': []}, 'an assistant turn'),
    ({'chosen': [USER], 'rejected': [USER, NO]}, 'chosen must hold'),
    ({'prompt': 'a', 'completion': 'b', 'label': 1}, 'true or false'),
    (
      {'prompt': 'a', 'completion': 'b', 'label': True, 'margin': 1},
      'margin must be left out',
    ),
    (
      {'prompt': 'a', 'chosen': 'b', 'rejected': 'c', 'margin': True},
      'margin must be a finite number: got True',
    ),
    (
      {'prompt': 'a', 'chosen': 'b', 'rejected': 'c', 'label': True},
      'got columns',
    ),
    # Answers that begin with another question.
    (
      {'prompt': '?', 'chosen': 'b', 'rejected': [USER, YES]},
      'rejected must begin with an assistant or tool turn',
    ),
    (
      {'prompt': '?', 'completion': [SYSTEM, YES], 'label': True},
      'completion must begin with',
    ),
    (
      {'prompt': [USER], 'chosen': [USER], 'rejected': [USER, NO]},
      'chosen must hold an assistant turn',
    ),
    # Nothing was asked.
    (
      {'chosen': 'Human: a AI: b', 'rejected': 'Human: a AI: c'},
      'lists of messages that begin with the same question, where there is '
      "no column 'prompt': got 'Human: a",
    ),
    ({'chosen': [USER, YES], 'rejected': [TOOL, NO]}, 'the same question'),
    (
      {'chosen': [SYSTEM, USER, YES], 'rejected': [SYSTEM, YES]},
      'the same question',
    ),
    ({'chosen': [YES], 'rejected': 'b'}, "put what is asked into 'prompt'"),
  ],
)
def test_refused(raw, says):
  with pytest.raises(ValueError, match='^x.jsonl:7: ') as error:
    parse(**raw)
  assert says in str(error.value)


def test_there_and_back(tmp_path):
  path = tmp_path / 'made' / 'pairs.jsonl'
  made = (
    parse(prompt='a', chosen='b', rejected='c', margin=0.5, id=3),
    parse(prompt='a', completion='b', label=False),
  )
  preferences.write(path, made)
  found = preferences.read(path)
  for ours, theirs in zip(made, found, strict=True):
    assert vars(ours) | {'where': ''} == vars(theirs) | {'where': ''}
  assert found[1].where == f'{path}:2'
  assert [x.name for x in path.parent.iterdir()] == ['pairs.jsonl']
  assert json.loads(path.read_text().splitlines()[0])['margin'] == 0.5


def test_where_a_file_can_be_written(tmp_path):
  there = tmp_path / 'there.jsonl'
  there.write_text('x')
  for path in (there, tmp_path / 'a' / 'new.jsonl'):
    preferences.check_writable(path)
  assert there.read_text() == 'x' and not list((tmp_path / 'a').iterdir())
  for path in (tmp_path, there / 'x.jsonl'):
    with pytest.raises(OSError, match=str(path.parent)):
      preferences.check_writable(path)
  assert {x.name for x in tmp_path.iterdir()} == {'a', 'there.jsonl'}


def test_all_of_a_prompt_is_held_out_or_none():
  rows = [parse(prompt=f'{i}?', chosen='b', rejected='c') for i in range(1000)]
  out = [preferences.held_out(row, 0.2) for row in rows]
  assert 150 < sum(out) < 250
  again = [parse(prompt=f'{i}?', chosen='d', rejected='e') for i in range(1000)]
  assert out == [preferences.held_out(row, 0.2) for row in again]
  assert not any(preferences.held_out(row, 0.0) for row in rows)
  assert all(preferences.held_out(row, 1.0) for row in rows)
