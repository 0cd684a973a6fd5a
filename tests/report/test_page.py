"""The report: self-contained, escaped, complete without some of the files."""

import json
import re

import numpy as np
import pytest

from posttrain.metrics import writers
from posttrain.report import curves, page, runs


def make_run(folder):
  """A run of two stages with answers, some of them hostile."""
  writer = writers.Writer(str(folder / 'metrics.jsonl'), 0)
  for stage, first in (('sft', 0), ('grpo', 0.6)):
    for step in range(first != 0, 121):
      share = step / 120
      values = {
        'loss/total': np.nan if step == 7 else 2.5,
        'time/data': 0.01,
        'time/update': 0.2 + 3.0 * (step == 1),
        'time/compile': 3.0 * (step == 1),
        'time/tokens_per_second': 20_000 + step,
        'compiles': 1,
      }
      if step == 0:
        values = {}
      if step % 60 == 0:
        values['eval/pass_rate/arithmetic'] = first + 0.4 * share
      writer.write(stage, step, values)
  (folder / 'rollouts').mkdir()
  for stage, step, right in (('sft', 0, False), ('grpo', 120, True)):
    rows = [
      {
        'env': 'arithmetic',
        'id': str(i),
        'answer': 3 + i,
        'prompt': f'What is 1 + {i + 2}?',
        'text': f'\\boxed{{{3 + i}}}' if right else '<script>x</script>',
        'correct': right,
      }
      for i in range(15)
    ]
    save(folder, f'{stage}_eval_{step:06d}', rows)
  (folder / 'config.json').write_text('{"seed": 0}')


def save(folder, name, rows):
  path = folder / 'rollouts' / f'{name}.jsonl'
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))


@pytest.fixture
def run(tmp_path):
  folder = tmp_path / 'arithmetic_sft'
  folder.mkdir()
  make_run(folder)
  return folder


def text_of(folder):
  page.write_all([str(folder)], page.path_of(str(folder)))
  return (folder / 'report.html').read_bytes().decode()  # is UTF-8


def test_the_report_has_every_section_and_its_numbers(run):
  text = text_of(run)
  for part in (
    '<title>arithmetic_sft</title>',
    'Held-out evaluation',
    'Learning curves',
    'The same prompts',
    'Where the seconds went',
    'Resolved config',
    'sft: 28.2 s</p>',  # 120 * .21 + 3
  ):
    assert part in text
  # The run's first pass rate, and the last of every stage.
  heads = ('start', 'after sft', 'after grpo')
  assert ''.join(f'<th class="n">{head}</th>' for head in heads) in text
  rates = ('0.0%', '40.0%', '100.0%')
  assert ''.join(f'<td class="n">{rate}</td>' for rate in rates) in text
  about = '120 steps, 20,060 tokens/s (median), update compiled 1 time'
  assert f'sft: {about}; grpo: {about}</p>' in text
  rows = re.findall(r'<tr><td class="text">What is 1 \+ .*?</tr>', text)
  assert len(rows) == 12
  assert all('"text bad"' in row and '"text good"' in row for row in rows)
  assert text_of(run) == text  # deterministic


@pytest.mark.parametrize(
  ('metric', 'env', 'title', 'text'),
  [
    ('sampled_reward/short/a', 'a', 'reward short, sampled', '0.500'),
    (
      'pairs/rewards/accuracies',
      'pairs',
      'accuracy on held-out pairs',
      '50.0%',
    ),
  ],
)
def test_a_main_number_has_a_headline_a_row_and_a_panel(
  tmp_path, metric, env, title, text
):
  row = {'stage': 's', 'step': 1, 'loss/total': 1.0, f'eval/{metric}': 0.5}
  (tmp_path / 'metrics.jsonl').write_text(json.dumps(row) + '\n')
  run = runs.read(str(tmp_path), '')
  (line,) = runs.headlines(run)
  assert (line['env'], line['title']) == (env, title)
  assert line['last'].text == text
  assert runs.columns(run)['start'] == {(env, title): runs.Value(text)}
  assert any(runs.shows(key, f'eval/{metric}') for _, key, _ in runs.PANELS)


def test_a_stage_that_selects_is_shown_at_its_best_step(run):
  path = run / 'metrics.jsonl'
  rows = writers.read(str(path))
  for row in rows:
    if row['stage'] == 'grpo' and row['step'] in (60, 120):
      row['select/best_step'] = 60
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  for step in (60, 120):
    answer = {'prompt': 'Why?', 'text': f'at {step}'}
    save(run, f'grpo_suite_{step:06d}', [answer])
  text = text_of(run)
  table = text[text.index('Held-out evaluation') :]
  assert '<th class="n">after grpo, at its best step 60</th>' in table
  # 0.6 + 0.4 / 2 at step 60, and 1.0 at step 120.
  line = re.search('<tr><td>arithmetic</td><td>pass rate.*?</tr>', table)[0]
  assert re.findall('[0-9.]+%', line) == ['0.0%', '40.0%', '80.0%']
  assert 'at 60' in text and 'at 120' not in text


@pytest.mark.parametrize(
  ('row', 'expected'),
  [
    (  # more than the update: the rest is the evaluation's
      {'update': 1.0, 'eval': 5.0, 'compile': 3.0},
      {'update': 0.0, 'eval': 3.0, 'compile': 3.0},
    ),
    (  # within the rollouts
      {'data': None, 'rollout': 5.0, 'scoring': 3.0, 'compile': 4.0, 'cpu': 9},
      {'rollout': 0.0, 'scoring': 1.0, 'compile': 4.0},
    ),
  ],
)
def test_compiling_is_subtracted_from_the_other_times(row, expected):
  parts = curves.slices({f'time/{k}': value for k, value in row.items()})
  assert parts == expected


HOSTILE = '</script><!--<script>\u2028\0\x1b[0m\ud800\r<img onerror=x> {{ 1 }}'


def test_texts_from_outside_stay_texts(tmp_path):
  row = {'stage': f'a{HOSTILE}', 'step': 1, f'mine/{HOSTILE}': 1.5}
  (tmp_path / 'metrics.jsonl').write_text(json.dumps(row) + '\n')
  (tmp_path / 'config.json').write_text(json.dumps({HOSTILE: HOSTILE}))
  (tmp_path / 'rollouts').mkdir()
  message = {'role': HOSTILE, 'content': HOSTILE}
  rollout = {'env': HOSTILE, 'group': 0, 'reward': 1.0}
  rollout |= {'prompt': [message], 'completion': [message] * 2}
  rollout |= {'rewards': {HOSTILE: 0.5}, 'stop_reason': HOSTILE}
  answer = dict.fromkeys(('env', 'id', 'question', 'answer', 'text'), HOSTILE)
  suite = {'prompt': HOSTILE, 'text': HOSTILE, 'grades': {HOSTILE: 1.0}}
  save(tmp_path, 'a_train_000001', [rollout])
  save(tmp_path, 'a_suite_000001', [suite])
  episode = {'messages': [message | {'role': 'assistant'}] * 2}
  save(tmp_path, 'a_eval_000001', [answer, answer | episode | {'env': 'e'}])
  text = text_of(tmp_path)
  assert text.count('<script') == text.count('</script>') == 3
  assert '<img' not in text and '<!--' not in text
  data = re.search('id="data">(.*?)</script>', text)[1]
  assert not re.search('[<>&\u2028]', data)
  keys = {x['key'] for x in json.loads(data)['panels']}
  assert keys == {f'mine/{HOSTILE}'}


def test_an_empty_folder_has_a_report(tmp_path):
  assert 'No metrics yet.' in text_of(tmp_path)
