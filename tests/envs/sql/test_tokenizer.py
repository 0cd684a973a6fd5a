"""The word-level tokenizer of configs/sql_tokenizer.json."""

import functools
import pathlib

import hypothesis
import pytest
from hypothesis import strategies as st

from posttrain import envs, schema
from posttrain.chat import rendering
from posttrain.envs.sql import tokenizer

FILE = pathlib.Path('configs/sql_tokenizer.json')


@functools.cache
def load():
  return rendering.load(
    schema.Tokenizer(path=str(FILE), eos='<|end|>')
  ).tokenizer


def test_the_file_in_configs_is_up_to_date():
  assert FILE.read_text() == tokenizer.make(tokenizer.vocabulary())


@pytest.mark.parametrize(
  'text, pieces',
  [
    (
      "QUERY SELECT wage FROM dogs WHERE name = 'Ann'",
      [
        'QUERY',
        ' SELECT',
        ' wage',
        ' FROM',
        ' dogs',
        ' WHERE',
        ' name',
        ' =',
        " '",
        'Ann',
        "'",
      ],
    ),
    # A name is the same in quotes and in words; digits stand alone.
    ('result: Ann; 42', ['result', ':', ' ', 'Ann', ';', ' 4', '2']),
    (
      'toys.dog_ref = dogs.id',
      ['toys', '.', 'dog_ref', ' =', ' dogs', '.', 'id'],
    ),
    ('COUNT(*)\nleft: 8', ['COUNT', '(', '*', ')', '\n', 'left', ':', ' 8']),
  ],
)
def test_text_is_split_into_pieces(text, pieces):
  made = load()
  assert [made.decode([i]) for i in made.encode(text)] == pieces


@hypothesis.given(st.text())
@hypothesis.settings(deadline=None, derandomize=True, max_examples=100)
def test_every_text_round_trips(text):
  made = load()
  assert (
    made.decode(made.encode(text)) == text.encode('utf-8', 'replace').decode()
  )


@pytest.mark.parametrize('split', ['eval', 'ood'])
def test_generated_episodes_are_words(split):
  """Only white space is encoded as bytes, so that episodes are short."""
  made, longest = load(), 0
  env = envs.make(
    'sql',
    schema.Sql(
      data=schema.SqlSynth(eval_databases=40, eval_split=split),
      difficulties=('easy', 'medium', 'hard'),
      teacher=schema.SqlTeacher(0.5, 0.5, 0.5),
    ),
  )
  source = env.source('eval', 0)
  for task in source.take(len(source)):
    length = 0
    for message in (*task.prompt, *task.demonstration):
      ids = made.encode(message['content'])
      length += len(ids)
      for token in ids:
        text = made.decode([token])
        assert len(text.strip()) != 1 or not text.strip().isalpha(), message[
          'content'
        ]
    longest = max(longest, length)
  assert longest < 220
