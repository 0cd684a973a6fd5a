"""Episodes as HTML: escaped, cut, in order, each turn with its reward."""

import dataclasses
import html.parser
import json
import re

import pytest

from posttrain import types
from posttrain.evaluation import answers
from posttrain.report import transcripts


def attempt(*turns, **fields):
  messages = [{'role': role, 'content': text} for role, text in turns]
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
    **fields,
  }


def actions(text):
  return re.findall('<p class="act">(.*?)</p>', text, re.DOTALL)


class Balance(html.parser.HTMLParser):
  """Asserts that every tag is closed, in order."""

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
    {'env': 'e', 'id': 'only the id'},
  ],
)
def test_tags_are_balanced(row):
  reader = Balance()
  reader.feed(transcripts.page({'now': [row, row], 'then': [row, LONG]}))
  assert not reader.open


def test_turns_come_in_order_with_their_rewards():
  text = transcripts.task({'now': LONG})
  assert actions(text) == [
    '<i>+0.01 </i><b>DESCRIBE</b> dogs',
    '<i>\N{MINUS SIGN}0.04 </i><b>QUERY</b> SELECT COUNT(*)\nFROM dogs',
    '<i>+1.00 </i><b>ANSWER</b> 3',
  ]
  words = ('DESCRIBE', 'id, name', 'QUERY', '>3<', 'ANSWER', 'env_done', '0.97')
  places = [text.index(word, text.index('<ol>')) for word in words]
  assert places == sorted(places)
  assert text.count('<li>') == 3


@pytest.mark.parametrize('rewards', [(), (0.0, 0.0, 0.0)])
def test_rewards_that_are_all_zero_are_not_shown(rewards):
  text = transcripts.task({'now': LONG | {'turn_rewards': rewards}})
  assert '<i>' not in text


def test_turns_without_a_reward_show_none():
  text = transcripts.task({'now': LONG | {'turn_rewards': [0.5]}})
  assert [act.count('<i>') for act in actions(text)] == [1, 0, 0]


def test_rewards_belong_to_the_policys_turns_if_the_environment_comes_first():
  messages = [{'role': 'tool', 'content': 'hi'}, *LONG['messages']]
  text = transcripts.task({'now': LONG | {'messages': messages}})
  assert actions(text) == actions(transcripts.task({'now': LONG}))


@pytest.mark.parametrize(
  'text, expected',
  [
    ('SELECT', 'SELECT'),  # a word without an argument
    ('Ada, Ben', 'Ada, Ben'),
    ('QUERY:x', '<b>QUERY</b> x'),
    ('I think\nQUERY: x', 'I think\nQUERY: x'),
    ('', '(empty)'),
    (' \n', '(empty)'),
    ('<script>', '&lt;script&gt;'),
    ('QUERY: a < b', '<b>QUERY</b> a &lt; b'),
  ],
)
def test_the_kind_of_an_action_is_marked(text, expected):
  page = transcripts.task({'now': attempt(('assistant', text))})
  assert actions(page) == [expected]


@pytest.mark.parametrize(
  'place, size',
  [
    ('question', transcripts.MAX_QUESTION),
    ('answer', transcripts.MAX_QUESTION),
    ('action', transcripts.MAX_ACTION),
    ('observation', transcripts.MAX_OBSERVATION),
  ],
)
def test_long_texts_are_cut_before_they_are_escaped(place, size):
  text, row = '<' * (size + 1), attempt(('assistant', 'a'), ('tool', 'b'))
  if place in row:
    row[place] = text
  else:
    index = place == 'observation'
    row['messages'][index]['content'] = text
  page = transcripts.task({'now': row})
  assert page.count('&lt;') == size
  assert ('... &lt;' if place == 'question' else '&lt; ...') in page


@pytest.mark.parametrize(
  'correct, expected',
  [(True, 'correct'), (False, 'wrong'), (None, 'not graded')],
)
def test_the_grade_the_error_and_the_reward_are_shown(correct, expected):
  row = attempt(correct=correct, reward=None, error='boom & bust')
  text = transcripts.task({'now': row})
  assert expected in text and 'boom &amp; bust' in text
  assert ', reward' not in text
  assert 'reward +1.00' in transcripts.task({'now': attempt()})


def test_multi_turn_environments_have_an_episode_of_several_messages():
  rows = [
    attempt(('assistant', 'a')) | {'env': 'one'},
    attempt(('assistant', 'a')) | {'env': 'two'},
    attempt(('assistant', 'a'), ('tool', 'b')) | {'env': 'two'},
    {'env': 'without messages'},
  ]
  assert transcripts.multi_turn(rows) == {'two'}
  assert transcripts.multi_turn([]) == set()


def test_an_answer_keeps_messages_rewards_and_metrics():
  prompt = tuple(
    {'role': role, 'content': text}
    for role, text in (('system', 'S'), ('user', 'Q'))
  )
  completion = (
    {'role': 'assistant', 'content': 'QUERY x'},
    {'role': 'tool', 'content': 'y'},
    {'role': 'assistant', 'content': 'z'},
  )
  score = types.Score(0.5, True, metrics={'progress': 1})
  turns = [types.Turn(0, 0, 1, reward, 'eos') for reward in (0.1, 0.4)]
  answer = answers.of(
    types.Rollout(
      # The environment's prompt differs from the task's.
      7,
      types.Task('t', 'sql', (prompt[0], completion[1]), 'y'),
      (*prompt, *completion),
      (),
      score,
      'env_done',
      turns=tuple(turns),
    )
  )
  assert (answer.prompt, answer.question) == ('S\nQ', 'Q')
  assert answer.messages == completion and answer.turn_rewards == (0.1, 0.4)
  assert answer.metrics == {'progress': 1.0}
  row = json.loads(json.dumps(dataclasses.asdict(answer)))
  text = transcripts.task({'now': row})
  assert actions(text) == ['<i>+0.10 </i><b>QUERY</b> x', '<i>+0.40 </i>z']
