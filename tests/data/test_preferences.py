"""Preferences: accepted forms, errors, writing, and packing of pairs."""

import json

import numpy as np
import pytest

from posttrain import types
from posttrain.chat import rendering, tokenizers
from posttrain.data import preferences

USER = {'role': 'user', 'content': 'What is 1 + 2?'}
YES = {'role': 'assistant', 'content': '3'}
NO = {'role': 'assistant', 'content': '4'}
SYSTEM = {'role': 'system', 'content': 'Add.'}


def parse(**raw):
  return preferences.parse(raw, 'x.jsonl:7')


def test_strings_and_messages_give_equal_preferences():
  texts = parse(prompt=USER['content'], chosen='3', rejected='4')
  assert texts.prompt == (USER,)
  assert (texts.chosen, texts.rejected) == ((YES,), (NO,))
  assert texts == parse(prompt=[USER], chosen=[YES], rejected=[NO])
  assert texts == parse(chosen=[USER, YES], rejected=[USER, NO])


@pytest.mark.parametrize('prompt', [USER['content'], [SYSTEM, USER]])
def test_a_prompt_before_an_answer_is_cut_off(prompt):
  messages = tuple(prompt) if isinstance(prompt, list) else (USER,)
  whole = parse(prompt=prompt, chosen=[*messages, YES], rejected='4')
  assert whole == parse(prompt=prompt, chosen='3', rejected='4')
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
  ('label', 'is_good'),
  [(1, True), (0.0, False), ('True', True), ('0', False), ('no', False)],
)
def test_labels_of_tables(label, is_good):
  pair = parse(prompt='1 + 2?', completion='3', label=label)
  assert (pair.chosen is not None) == is_good != (pair.rejected is not None)


SHARED = [{'from': 'human', 'value': USER['content']}]
ANSWERS = {
  'chosen': {'from': 'gpt', 'value': '3'},
  'rejected': {'from': 'gpt', 'value': '4'},
}


@pytest.mark.parametrize(
  'raw',
  [
    {'conversations': SHARED, **ANSWERS},
    {'instruction': USER['content'], 'chosen': '3', 'rejected': '4'},
    {'conversations': [*SHARED, ANSWERS['chosen']], 'kto_tag': 'true'},
    {'messages': [USER, YES], 'label': 1},
    {'prompt': [USER], 'messages': [USER, YES], 'label': 1},
    {'instruction': USER['content'], 'output': '3', 'kto_tag': True},
  ],
)
def test_columns_of_other_formats_are_recognised(raw):
  pair = parse(**raw)
  assert (pair.prompt, pair.chosen) == ((USER,), (YES,))
  assert pair.rejected == ((NO,) if 'chosen' in raw else None)
  assert not pair.info


@pytest.mark.parametrize('system', [SYSTEM['content'], ''])
def test_a_system_column_and_margins_of_tables_are_read(system):
  row = {'system': system, 'messages': [USER], 'margin': '0.5', **ANSWERS}
  for prompt in ('a', [{'role': 'user', 'content': 'a'}]):
    pair = parse(prompt=prompt, **row)
    assert pair.prompt[0]['content'] == (system or 'a')
    assert (pair.margin, pair.info) == (0.5, {'messages': [USER]})


def test_an_answer_whose_turns_all_weigh_0_is_refused():
  pair = parse(prompt='a', chosen={**YES, 'weight': 0}, rejected='c')
  with pytest.raises(ValueError, match='x.jsonl:7: .* all weigh 0'):
    chat = rendering.Renderer(tokenizers.Bytes())
    preferences.tokenize([pair], chat, 99, 'error')


def test_columns_that_a_pair_does_not_need_are_kept():
  pair = parse(prompt='a', chosen='b', rejected='c', label=1, messages=[USER])
  assert pair.info == {'label': 1, 'messages': [USER]}


def test_tools_and_variables_of_pairs_are_rendered(tmp_path):
  chat = rendering.Renderer(
    tokenizers.Bytes(),
    '{{ tools | tojson }}{{ mood }}{% for m in messages %}{{ m.role }}: '
    '{{ m.content }}{{ eos_token }}{% endfor %}'
    '{% if add_generation_prompt %}assistant: {% endif %}',
  )
  tool = {'type': 'function', 'function': {'name': 'add'}}
  row = {'prompt': 'a', 'chosen': 'b', 'rejected': 'c'}
  row |= {'tools': json.dumps([tool]), 'chat_template_kwargs': {'mood': 'sad'}}
  preferences.write(tmp_path / 'x.jsonl', [parse(**row)])
  for pair in (parse(**row), *preferences.read(tmp_path / 'x.jsonl')):
    ((tokens,),) = (preferences.tokenize([pair], chat, 999, 'error'),)
    text = bytes(i for i in tokens.chosen.ids.tolist() if i < 256).decode()
    assert text.startswith(json.dumps([tool]) + 'sad')
  for wrong in ('moods', 'messages', 'tools', 'add_generation_prompt'):
    with pytest.raises(ValueError, match=f'chat_template_kwargs .*{wrong}'):
      pair = parse(**{**row, 'chat_template_kwargs': {wrong: []}})
      preferences.tokenize([pair], chat, 999, 'error')


@pytest.mark.parametrize(
  ('raw', 'words'),
  [
    ({'prompt': 'a', 'chosen': 'b'}, 'got columns'),
    ({'question': 'a', 'chosen': 'b', 'rejected': 'c'}, 'pairs.columns='),
    ({'prompt': 'a', 'chosen': 'b', 'rejected': 'b'}, 'another answer'),
    ({'prompt': 'a', 'completion': 'b', 'label': 2}, 'true or false'),
    (
      {'prompt': 'a', 'chosen': 'b', 'rejected': 'c', 'margin': True},
      'margin must be',
    ),
    # Answers that begin with another question.
    (
      {'prompt': '?', 'chosen': 'b', 'rejected': [USER, YES]},
      'rejected must hold',
    ),
    ({'chosen': [YES], 'rejected': 'b'}, "without a column 'prompt'"),
    ({'system': 'x', 'chosen': [USER, YES], 'rejected': [USER, NO]}, 'system'),
    ({'prompt': 'a', 'chosen': 'b', 'rejected': 'c', 'margin': '1e7'}, '1e7'),
    ({'instruction': 'a', 'history': [['b']], **ANSWERS}, 'history must be'),
  ],
)
def test_malformed_rows_are_refused_with_their_line(raw, words):
  with pytest.raises(ValueError, match='^x.jsonl:7: ') as error:
    parse(**raw)
  assert words in str(error.value)


def test_written_pairs_are_read_back(tmp_path):
  path = tmp_path / 'new' / 'pairs.jsonl'
  pairs = (
    parse(prompt='a', chosen='b', rejected='c', margin=0.5, id=3),
    parse(prompt='a', completion='b', label=False),
  )
  preferences.write(path, pairs)
  read = preferences.read(path)
  for i, (ours, theirs) in enumerate(zip(pairs, read, strict=True)):
    assert ours._replace(where=f'{path}:{i + 1}') == theirs
  assert [x.name for x in path.parent.iterdir()] == ['pairs.jsonl']


def test_pairs_of_equal_prompts_are_held_out_together():
  pairs = [
    parse(prompt=f'{i}?', chosen=answer, rejected='c')
    for answer in 'bd'
    for i in range(1000)
  ]
  train, held_out = preferences.split(pairs, 0.2)
  assert 300 < len(held_out) < 500
  ours, others = (
    {pair.prompt[0]['content'] for pair in part} for part in (held_out, train)
  )
  assert len(ours) + len(others) == 1000 and not ours & others
  assert preferences.split(pairs, 0.0) == (pairs, [])


def sample(length, first=0, prompt=2):
  """Ids count up from `first`; the answer begins after the prompt."""
  empty = np.zeros(length, np.float32)
  return types.Sample(
    env='',
    row=f'row {first}',
    ids=np.arange(first, first + length),
    mask=np.arange(length) >= prompt,
    roles=empty,
    is_content=empty,
    sampler_logprobs=empty,
    temperatures=empty,
    versions=empty,
  )


def make_pair(chosen, rejected, first=0, **options):
  answers = [
    None if length is None else sample(length, first + 100 * i)
    for i, length in enumerate((chosen, rejected))
  ]
  logprobs = np.float32([-first - 1, -first - 2])
  return types.Pair(*answers, logprobs, **options)


def pack(*args, rows=2, row_tokens=16, per_row=3, longest_pairs=1):
  return preferences.pack(
    *args,
    rows=rows,
    row_tokens=row_tokens,
    per_row=per_row,
    longest_pairs=longest_pairs,
    pad_id=999,
  )


def test_present_and_segment_ids_locate_every_answer():
  pairs = [
    make_pair(4, 3, 1000, margin=0.5),
    make_pair(6, 8, 2000),
    make_pair(None, 5, 3000),
    make_pair(3, None, 4000),
  ]
  batch = pack(pairs)
  assert (batch.pairs, batch.answers, batch.num_micro_batches) == (2, 6, 1)
  packed = {}
  fields = batch.ids, batch.mask, batch.positions
  for m, b, k, a in np.argwhere(batch.present):
    here = batch.segment_ids[m, b] == 2 * k + a + 1
    arrays = [x[m, b][here] for x in fields]
    pair = batch.ref_logprobs[m, b, k, a], batch.margins[m, b, k]
    packed[int(arrays[0][0])] = arrays, pair
  for pair in pairs:
    for a, answer in enumerate((pair.chosen, pair.rejected)):
      if answer is not None:
        arrays, numbers = packed.pop(int(answer.ids[0]))
        expected = answer.ids, answer.mask, np.arange(len(answer))
        np.testing.assert_array_equal(arrays, expected)
        assert numbers == (pair.ref_logprobs[a], pair.margin)
  assert not packed
  assert (batch.ids[batch.segment_ids == 0] == 999).all()
  assert not batch.mask[batch.segment_ids == 0].any()


def test_mismatched_pairs_follow_in_micro_batches_that_are_not_counted():
  trained = [make_pair(4, 4, 100 * i) for i in range(5)]
  mismatched = [make_pair(6, None, 5000 + 100 * i) for i in range(3)]
  batch = pack(trained, mismatched)
  assert (batch.pairs, batch.answers) == (5, 10)
  assert batch.num_micro_batches == 2 and batch.scored == 3
  assert len(batch.ids) == 3 + 2  # shape for one pair per row
  present = batch.present[batch.num_micro_batches : batch.scored]
  assert present[..., 0].sum() == 3 and not present[..., 1].any()
  assert not batch.present[batch.scored :].any()


def test_the_shape_follows_the_longest_pairs_that_surely_fit():
  pairs = [make_pair(4, 4, 100 * i) for i in range(9)]
  batch = pack(
    pairs, row_tokens=32, per_row=4, longest_pairs=2
  )  # of up to 16 tokens
  assert batch.ids.shape == (3, 2, 32) and batch.pairs == 9
  assert batch.num_micro_batches == 2  # rows of 4, 4 and 1
