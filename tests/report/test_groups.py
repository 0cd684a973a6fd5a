"""Groups of training rollouts, sampled answers, and rewards as bars."""

import json

import numpy as np
import pytest

from posttrain.report import groups, runs, samples

MINUS = '\N{MINUS SIGN}'


def rollout(group, reward, text='hi', **fields):
  return {
    'env': 'sums',
    'task': f't{group}',
    'group': group,
    'prompt': [
      {'role': 'system', 'content': 'S'},
      {'role': 'user', 'content': f'Q{group}'},
    ],
    'completion': [{'role': 'assistant', 'content': text}],
    'answer': 3,
    'reward': reward,
    'rewards': {'format': -0.5},
    'correct': True,
    'advantage': 0.25,
    'stop_reason': 'eos',
    'tokens': 7,
    'error': None,
    **fields,
  }


def save(folder, name, rows):
  (folder / 'rollouts').mkdir(exist_ok=True)
  path = folder / 'rollouts' / f'{name}.jsonl'
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))


def read(folder):
  rows = [{'stage': 'grpo', 'step': 1}]
  return groups.read(runs.Run(str(folder), '', rows, {}, {}, None))


def test_first_middle_and_last_logged_steps_are_read(tmp_path):
  for step in (1, 10, 20, 30, 40, 50):
    save(tmp_path, f'grpo_train_{step:06d}', [rollout(0, float(step))])
  (stage,) = groups.stories(read(tmp_path))
  assert (stage['stage'], stage['env']) == ('grpo', 'sums')
  assert [step['step'] for step in stage['steps']] == [1, 30, 50]
  assert groups.stories(read(tmp_path / 'none')) == []


def test_the_best_and_the_worst_group_are_shown_whole(tmp_path):
  rewards = {0: (0.0, 1.0), 1: (1.0, 1.0), 2: (None, 0.25), 3: (None, None)}
  rows = [rollout(g, x, f'{x}') for g, xs in rewards.items() for x in xs]
  save(tmp_path, 'grpo_train_000001', rows)
  ((step,),) = [stage['steps'] for stage in groups.stories(read(tmp_path))]
  assert (step['groups'], step['mean']) == (4, 0.65)
  best, worst = step['shown']
  assert (best['title'], best['mean'], best['task']) == ('best group', 1, 't1')
  assert (worst['title'], worst['mean']) == ('worst group', 0.25)
  assert (worst['prompt'], worst['answer']) == ('system: S\nuser: Q2', '3')
  assert [x['reward'] for x in worst['rollouts']] == ['n/a', '+0.25']
  assert best['rollouts'][0] == {
    'kind': 'good',
    'reward': '+1',
    'details': [f'format {MINUS}0.5', 'advantage +0.25', 'eos', '7 tokens'],
    'text': '1.0',
  }


def test_groups_of_equal_means_are_shown_once(tmp_path):
  rows = [rollout(g, 0.0, advantage=None) for g in (0, 0, 1)]
  save(tmp_path, 'grpo_train_000001', rows)
  (step,) = groups.stories(read(tmp_path))[0]['steps']
  (shown,) = step['shown']
  assert shown['title'] == 'one group; all have the same mean'
  assert 'does not train' in shown['rollouts'][0]['details']


def test_without_rewards_no_group_is_shown(tmp_path):
  save(tmp_path, 'grpo_train_000001', [rollout(0, None)])
  found = read(tmp_path)
  (step,) = groups.stories(found)[0]['steps']
  assert step['shown'] == [] and step['mean'] is None
  assert groups.histograms(found) == []


def test_rows_without_a_group_are_left_out_with_a_warning(tmp_path):
  save(tmp_path, 'grpo_train_000001', [{'env': 'sums'}, rollout(0, 1.0)])
  with pytest.warns(UserWarning, match='lack env or group'):
    (stage,) = groups.stories(read(tmp_path))
  assert stage['steps'][0]['groups'] == 1


def test_few_rewards_have_a_bar_each_and_shares_add_up(tmp_path):
  save(tmp_path, 'grpo_train_000001', [rollout(0, x) for x in (0, 0, 1, 0.5)])
  save(tmp_path, 'grpo_train_000009', [rollout(0, x) for x in (1, 1, None)])
  (chart,) = groups.histograms(read(tmp_path))
  assert (chart['title'], chart['binned']) == ('sums', False)
  assert chart['x'] == [0, 0.5, 1]
  assert chart['bars'] == [
    {'step': 1, 'count': 4, 'y': [0.5, 0.25, 0.25]},
    {'step': 9, 'count': 2, 'y': [0, 0, 1]},
  ]


def test_many_rewards_have_bins(tmp_path):
  values = np.linspace(0, 1, 40).tolist()
  save(tmp_path, 'grpo_train_000001', [rollout(0, x) for x in values])
  (chart,) = groups.histograms(read(tmp_path))
  assert chart['binned'] and len(chart['x']) == groups.BINS
  assert chart['x'][0] == 0.025 and chart['x'][-1] == 0.975
  (bars,) = chart['bars']
  assert bars['y'] == [0.05] * groups.BINS and bars['count'] == 40


def answer(id, texts, grades, env='sums'):
  return {
    'env': env,
    'id': id,
    'question': f'Q{id}',
    'answer': 3,
    'sampled_texts': texts,
    'sampled': grades,
  }


def test_sampled_answers_are_shown_before_and_after(tmp_path):
  texts = [f'a{i}' for i in range(6)]
  for step, grade in ((0, False), (5, True), (9, True)):
    grades = [grade, None, True, False, grade, grade]
    rows = [answer(i, texts, grades) for i in range(9)]
    save(tmp_path, f'sft_eval_{step:06d}', rows)
  ends = {'sft': ('after sft', None)}
  (env,) = samples.read(str(tmp_path), ends)
  assert (env['env'], env['titles']) == ('sums', ['start', 'after sft'])
  assert len(env['tasks']) == samples.MAX_TASKS
  before, after = env['tasks'][0]['columns']
  assert (before['right'], after['right']) == (
    '1 of 6 correct',
    '4 of 6 correct',
  )
  kinds = [(x['text'], x['kind']) for x in after['answers']]
  assert kinds == [('a0', 'good'), ('a1', ''), ('a2', 'good'), ('a3', 'bad')]
  assert after['hidden'] == 2


@pytest.mark.parametrize('texts', [[], None, 'text'])
def test_without_sampled_answers_there_is_no_section(tmp_path, texts):
  save(tmp_path, 'sft_eval_000000', [answer('a', texts, [])])
  assert samples.read(str(tmp_path), {'sft': ('after sft', None)}) == []
