"""Answers before and after, episodes, groups of rollouts, rewards as bars."""

import re

import pytest

from posttrain import types
from posttrain.evaluation import answers
from posttrain.report import page, runs, stories
from tests.report.example import save

MINUS = '\N{MINUS SIGN}'


def run_of(folder, *stages):
  rows = [{'stage': stage, 'step': 120} for stage in stages or ('sft', 'grpo')]
  return runs.Run(str(folder), '', rows, {}, {}, None)


def render(folder):
  return page.render([run_of(folder)], None)


# --- Answers and episodes -----------------------------------------------------


def attempt(*turns, **fields):
  messages = [{'role': role, 'content': text} for role, text in turns]
  return {
    **dict.fromkeys(('prompt', 'question', 'answer', 'text', 'error')),
    'env': 'sql',
    'id': 'x1',
    'messages': messages,
    'correct': True,
    'reward': 1.0,
    'stop_reason': 'env_done',
    **fields,
  }


LONG = attempt(
  ('assistant', 'DESCRIBE: dogs'),
  ('tool', 'id, name'),
  ('assistant', 'QUERY SELECT COUNT(*)\nFROM dogs'),
  turn_rewards=[0.01, -0.04],
  reward=0.97,
)


ENDS = 'after sft', 'after grpo'


def actions(text):
  return re.findall('<p class="act">(.*?)</p>', text, re.DOTALL)


def test_turns_come_in_order_with_their_rewards():
  text = stories.transcripts({'now': [LONG]})
  assert actions(text) == [
    '<i>+0.01 </i><b>DESCRIBE</b> dogs',
    f'<i>{MINUS}0.04 </i><b>QUERY</b> SELECT COUNT(*)\nFROM dogs',
  ]
  words = ('DESCRIBE', 'id, name', 'QUERY', 'env_done', '0.97')
  places = [text.index(word, text.index('<ol>')) for word in words]
  assert places == sorted(places)


def test_a_text_of_no_kind_is_cut_and_has_no_mark():
  row = attempt(('assistant', 'I\nQUERY: x' + '<' * 600), turn_rewards=[0.0])
  expected = 'I\nQUERY: x' + '&lt;' * 590 + ' ...'
  assert actions(stories.transcripts({'now': [row]})) == [expected]


def test_an_answer_keeps_messages_and_rewards_of_turns():
  roles = 'system', 'user', 'assistant', 'tool'
  messages = tuple({'role': role, 'content': role[0]} for role in roles)
  task = types.Task('t', 'sql', (messages[1],) * 2, 'y')
  turns = (types.Turn(0, 0, 1, 0.4, 'eos'),)
  score = types.Score(0.5, True, metrics={'progress': 1})
  answer = answers.of(
    # The environment's prompt differs from the task's.
    types.Rollout(7, task, messages, (), score, 'env_done', turns=turns)
  )
  assert (answer.prompt, answer.question) == ('s\nu', 'u')
  assert answer.messages == messages[2:] and answer.turn_rewards == (0.4,)
  assert answer.metrics == {'progress': 1.0}


def test_tasks_of_one_turn_have_a_table_and_others_episodes(tmp_path):
  one = [attempt(env='one', id=f'{i}', correct=False) for i in range(15)]
  for stage, step in (('sft', 0), ('sft', 120), ('grpo', 120)):
    rows = [LONG | {'id': f'{i}'} for i in range(8)]
    save(tmp_path, f'{stage}_eval_{step:06d}', one + rows)
  story = stories.answers(run_of(tmp_path))
  assert story['count'] == 15 and story['tasks'] == [[x, x] for x in one[:12]]
  (env,) = story['episodes']
  assert (env['env'], env['count'], len(env['tasks'])) == ('sql', 8, 6)
  titles = [x['title'] for x in env['tasks'][0]['plays']]
  assert titles == ['start', *ENDS]


def test_the_attempt_at_step_0_is_that_before(tmp_path):
  for step in (0, 50, 90):
    save(tmp_path, f'grpo_eval_{step:06d}', [attempt(text=step)])
  story = stories.answers(run_of(tmp_path))
  assert story['titles'] == ['before grpo', 'after grpo']
  assert [row['text'] for row in story['tasks'][0]] == [0, 90]


def test_the_suite_is_shown_before_and_after(tmp_path):
  for name, texts in {
    'sft_suite_000000': {'Hi': 'nothing', 'Why?': ''},
    'sft_suite_000120': {'Hi': 'Hello', 'New?': 'Yes'},
  }.items():
    rows = [
      {'prompt': k, 'text': x, 'grades': {'a': 1}} for k, x in texts.items()
    ]
    save(tmp_path, name, rows)
  story = stories.suite(run_of(tmp_path))
  assert story['titles'] == ['start', ENDS[0]]
  assert [[row and row['text'] for row in x] for x in story['tasks']] == [
    ['nothing', 'Hello'],
    ['', None],
    [None, 'Yes'],
  ]
  text = render(tmp_path)
  assert '>nothing<small>\na 1.00</small>' in text and '>(empty)<' in text


def test_sampled_answers_are_shown_before_and_after(tmp_path):
  grades = True, None, False, True, True, True
  rows = [
    attempt(id=i, sampled_texts=['a'] * 6, sampled=grades) for i in range(9)
  ]
  for step in (0, 120):
    save(tmp_path, f'sft_eval_{step:06d}', rows)
  (env,) = stories.samples(run_of(tmp_path))
  assert (env['env'], env['titles']) == ('sql', ['start', ENDS[0]])
  assert len(env['tasks']) == stories.MAX_SAMPLED_TASKS
  text = render(tmp_path)
  assert 'start: 4 of 6 correct' in text and 'and 2 more' in text
  items = re.findall('<li class="act (.*?)">(.*?)</li>', text)
  assert items[:3] == [('good', '✓ a'), ('', 'a'), ('bad', '✗ a')]


@pytest.mark.parametrize('line', ['garbage', '{"text": 3}'])
def test_files_that_are_damaged_are_left_out_with_a_warning(tmp_path, line):
  (tmp_path / 'rollouts').mkdir()
  for name in ('eval', 'suite', 'train'):
    file = tmp_path / 'rollouts' / f'sft_{name}_000120.jsonl'
    file.write_text(line + '\n')
  for read in (stories.answers, stories.suite, stories.read_groups):
    with pytest.warns(UserWarning, match='the report leaves'):
      read(run_of(tmp_path))


# --- Groups of training rollouts ----------------------------------------------


def rollout(group, reward, **fields):
  return {
    'env': 'sums',
    'group': group,
    'prompt': [
      {'role': 'system', 'content': 'S'},
      {'role': 'user', 'content': f'Q{group}'},
    ],
    'completion': [{'role': 'assistant', 'content': 'hi'}],
    'reward': reward,
    'rewards': {'format': -0.5},
    'correct': True,
    'advantage': 0.25,
    'stop_reason': 'eos',
    'tokens': 7,
    **fields,
  }


def read(folder):
  return stories.read_groups(run_of(folder, 'grpo'))


def test_first_middle_and_last_logged_steps_are_read(tmp_path):
  for step in (1, 10, 30, 40, 50):
    save(tmp_path, f'grpo_train_{step:06d}', [rollout(0, 1.0)])
  (stage,) = stories.groups(read(tmp_path))
  assert (stage['stage'], stage['env']) == ('grpo', 'sums')
  assert [step['step'] for step in stage['steps']] == [1, 30, 50]
  assert stories.groups(read(tmp_path / 'none')) == []


def test_the_best_and_the_worst_group_are_shown_whole(tmp_path):
  rewards = (0.0, 1.0), (1.0, 1.0), (None, 0.25), (None, None)
  rows = [rollout(g, x) for g, xs in enumerate(rewards) for x in xs]
  save(tmp_path, 'grpo_train_000001', rows)
  ((step,),) = [stage['steps'] for stage in stories.groups(read(tmp_path))]
  assert (step['groups'], step['mean']) == (4, 0.65)
  best, worst = step['shown']
  assert (best['mean'], worst['mean']) == (1, 0.25)
  assert [x['reward'] for x in worst['rollouts']] == [None, 0.25]
  text = render(tmp_path)
  details = f'format {MINUS}0.5, advantage +0.25, eos, 7 tokens</span>'
  assert f'<b class="good">✓ reward +1</b> <span>{details}' in text
  assert 'reward n/a' in text and '>system: S\nuser: Q2<' in text


def test_groups_of_equal_means_are_shown_once_and_ungraded_ones_not(tmp_path):
  for step, reward in (1, 0.0), (2, None):
    rows = [rollout(g, reward, advantage=None) for g in (0, 0, 1)]
    save(tmp_path, f'grpo_train_{step:06d}', rows)
  equal, ungraded = stories.groups(read(tmp_path))[0]['steps']
  (shown,) = equal['shown']
  assert 'does not train' in render(tmp_path)
  assert ungraded['shown'] == [] and ungraded['mean'] is None


def test_few_rewards_have_a_bar_each_and_many_have_bins(tmp_path):
  save(tmp_path, 'grpo_train_000001', [rollout(0, x) for x in (0, 0, 1, 0.5)])
  save(tmp_path, 'grpo_train_000009', [rollout(0, x) for x in (1, 1, None)])
  (chart,) = stories.histograms(read(tmp_path))
  assert chart['x'] == [0, 0.5, 1]
  bars = [(1, 4, [0.5, 0.25, 0.25]), (9, 2, [0, 0, 1])]
  assert [tuple(bar.values()) for bar in chart['bars']] == bars
  rows = [rollout(0, x / 39) for x in range(40)]
  save(tmp_path, 'grpo_train_000001', rows)
  (chart,) = stories.histograms(read(tmp_path))
  assert chart['bars'][0]['y'] == [0.05] * stories.BINS
