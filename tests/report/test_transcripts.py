"""Episodes as HTML: escaped, cut, in order, each turn with its reward."""

import dataclasses
import html.parser
import json
import re

import pytest

from posttrain import types
from posttrain.evaluation import evaluator
from posttrain.report import transcripts


def attempt(*said, **more):
  messages = [{'role': role, 'content': text} for role, text in said]
  return {
    'env': 'sql',
    'id': 'x1',
    'question': 'how many?',
    'answer': '3',
    'messages': messages,
    'correct': True,
    'reward': 1.0,
    'stop_reason': 'env_done',
    'error': None,
    **more,
  }


def acts(text):
  return re.findall('<p class="act">(.*?)</p>', text, re.DOTALL)


class Balance(html.parser.HTMLParser):
  """Asserts that what opens closes, in order."""

  def __init__(self):
    super().__init__()
    self.open = []

  def handle_starttag(self, tag, attrs):
    del attrs
    self.open.append(tag)

  def handle_endtag(self, tag):
    assert self.open.pop() == tag


LONG = attempt(
  ('assistant', 'DESCRIBE: dogs'),
  ('tool', 'id, name'),
  ('assistant', 'QUERY SELECT COUNT(*)\nFROM dogs'),
  ('tool', '3'),
  ('assistant', 'ANSWER: 3'),
  turn_rewards=[0.01, -0.04, 1.0],
  reward=0.97,
)


@pytest.mark.parametrize(
  'row',
  [
    LONG,
    attempt(),
    attempt(('tool', 'first'), ('assistant', '')),
    attempt(('assistant', '<b>&'), ('user', '</p>')),
    {'env': 'e', 'id': 'nothing is known'},
  ],
)
def test_it_is_balanced(row):
  reader = Balance()
  reader.feed(transcripts.page({'now': [row, row], 'then': [row, LONG]}))
  assert not reader.open


def test_turns_come_in_order_with_their_rewards():
  text = transcripts.task({'now': LONG})
  assert acts(text) == [
    '<i>+0.01 </i><b>DESCRIBE</b> dogs',
    '<i>\N{MINUS SIGN}0.04 </i><b>QUERY</b> SELECT COUNT(*)\nFROM dogs',
    '<i>+1.00 </i><b>ANSWER</b> 3',
  ]
  said = ('DESCRIBE', 'id, name', 'QUERY', '>3<', 'ANSWER', 'env_done', '0.97')
  places = [text.index(word, text.index('<ol>')) for word in said]
  assert places == sorted(places)
  assert text.count('<li>') == 3


@pytest.mark.parametrize('rewards', [(), (0.0, 0.0, 0.0)])
def test_turns_that_earn_nothing_show_nothing(rewards):
  text = transcripts.task({'now': LONG | {'turn_rewards': rewards}})
  assert '<i>' not in text


def test_an_unfinished_turn_has_no_reward_yet():
  text = transcripts.task({'now': LONG | {'turn_rewards': [0.5]}})
  assert [act.count('<i>') for act in acts(text)] == [1, 0, 0]


def test_rewards_belong_to_the_policy_whoever_speaks_first():
  said = [{'role': 'tool', 'content': 'hi'}, *LONG['messages']]
  text = transcripts.task({'now': LONG | {'messages': said}})
  assert acts(text) == acts(transcripts.task({'now': LONG}))


@pytest.mark.parametrize(
  'text, want',
  [
    ('SELECT', 'SELECT'),  # a word alone is no action on something
    ('Ada, Ben', 'Ada, Ben'),
    ('QUERY:x', '<b>QUERY</b> x'),
    ('I think\nQUERY: x', 'I think\nQUERY: x'),
    ('', '(empty)'),
    (' \n', '(empty)'),
    ('<script>', '&lt;script&gt;'),
    ('QUERY: a < b', '<b>QUERY</b> a &lt; b'),
  ],
)
def test_actions(text, want):
  shown = transcripts.task({'now': attempt(('assistant', text))})
  assert acts(shown) == [want]


@pytest.mark.parametrize(
  'place, size',
  [
    ('question', transcripts.QUESTION),
    ('answer', transcripts.QUESTION),
    ('action', transcripts.ACTION),
    ('observation', transcripts.OBSERVATION),
  ],
)
def test_long_texts_are_cut_before_they_are_escaped(place, size):
  text, short = '<' * (size + 1), attempt(('assistant', 'a'), ('tool', 'b'))
  if place in short:
    short[place] = text
  else:
    index = place == 'observation'
    short['messages'][index]['content'] = text
  shown = transcripts.task({'now': short})
  assert shown.count('&lt;') == size
  assert ('... &lt;' if place == 'question' else '&lt; ...') in shown


@pytest.mark.parametrize(
  'correct, want', [(True, 'correct'), (False, 'wrong'), (None, 'not graded')]
)
def test_what_came_of_it(correct, want):
  row = attempt(correct=correct, reward=None, error='boom & bust')
  text = transcripts.task({'now': row})
  assert want in text and 'boom &amp; bust' in text
  assert ', reward' not in text
  assert 'reward +1.00' in transcripts.task({'now': attempt()})


def test_who_answers_back_has_several_turns():
  rows = [
    attempt(('assistant', 'a')) | {'env': 'one'},
    attempt(('assistant', 'a')) | {'env': 'two'},
    attempt(('assistant', 'a'), ('tool', 'b')) | {'env': 'two'},
    {'env': 'of an older file'},
  ]
  assert transcripts.multi_turn(rows) == {'two'}
  assert transcripts.multi_turn([]) == set()


def test_an_attempt_is_kept_whole():
  prompt = tuple(
    {'role': role, 'content': text}
    for role, text in (('system', 'S'), ('user', 'Q'))
  )
  said = (
    {'role': 'assistant', 'content': 'QUERY x'},
    {'role': 'tool', 'content': 'y'},
    {'role': 'assistant', 'content': 'z'},
  )
  score = types.Score(0.5, True, metrics={'progress': 1})
  turns = [types.Turn(0, 0, 1, reward, 'eos') for reward in (0.1, 0.4)]
  kept = evaluator.answer(
    types.Rollout(
      # What the environment asked, not what stands for it in the task.
      7,
      types.Task('t', 'sql', (prompt[0], said[1]), 'y'),
      (*prompt, *said),
      (),
      score,
      'env_done',
      turns=tuple(turns),
    )
  )
  assert (kept.prompt, kept.question) == ('S\nQ', 'Q')
  assert kept.messages == said and kept.turn_rewards == (0.1, 0.4)
  assert kept.metrics == {'progress': 1.0}
  row = json.loads(json.dumps(dataclasses.asdict(kept)))
  text = transcripts.task({'now': row})
  assert acts(text) == ['<i>+0.10 </i><b>QUERY</b> x', '<i>+0.40 </i>z']
