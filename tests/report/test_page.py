"""The report: self-contained, escaped, complete without some of the files."""

import json
import re

import pytest

from posttrain.metrics import estimates, writers
from posttrain.report import curves, page, runs
from tests.report import example


@pytest.fixture
def run(tmp_path):
  folder = example.make_run(tmp_path / 'two_stages')
  (folder / 'config.json').write_text('{"seed": 0}')
  return folder


def text_of(folder):
  page.write_all([str(folder)], page.path_of(str(folder)))
  return (folder / 'report.html').read_bytes().decode()  # is UTF-8


def test_the_report_has_every_section_and_its_numbers(run):
  for stage, step in ('sft', 0), ('grpo', 30):
    answer = {'env': 'sums', 'prompt': 'Why?', 'correct': step > 0}
    rows = [answer | {'id': i} for i in range(15)]
    example.save(run, f'{stage}_eval_{step:06d}', rows)
  text = text_of(run)
  for part in (
    '<title>two_stages</title>',
    'Held-out evaluation',
    'Learning curves',
    'The same prompts',
    'Where the seconds went',
    'Resolved config',
    'sft: 9.0 s</p>',  # 30 * .2 + 3
  ):
    assert part in text
  # The run's first pass rate, and the last of every stage.
  heads = ('start', 'after sft', 'after grpo')
  assert ''.join(f'<th class="n">{head}</th>' for head in heads) in text
  rates = ('0.0%', '37.5%', '37.5%')
  assert ''.join(f'<td class="n">{rate}</td>' for rate in rates) in text
  about = '30 steps, 20,016 tokens/s (median), update compiled 1 time'
  assert f'sft: {about}; grpo: {about}</p>' in text
  rows = re.findall('<tr><td class="text">Why.*?</tr>', text)
  assert len(rows) == 12
  assert all('"text bad"' in row and '"text good"' in row for row in rows)
  assert text_of(run) == text  # deterministic


@pytest.mark.parametrize(
  ('metric', 'key', 'text'),
  [
    ('sampled_reward/short/a', ('a', 'reward short, sampled'), '0.500'),
    (
      'pairs/rewards/accuracies',
      ('pairs', 'accuracy on held-out pairs'),
      '50.0%',
    ),
  ],
)
def test_a_main_number_has_a_headline_a_row_and_a_panel(
  tmp_path, metric, key, text
):
  row = {'stage': 's', 'step': 1, 'loss/total': 1.0, f'eval/{metric}': 0.5}
  (tmp_path / 'metrics.jsonl').write_text(json.dumps(row) + '\n')
  run = runs.read(str(tmp_path), '')
  (line,) = runs.headlines(run)
  assert (line['env'], line['title'], line['last'].text) == (*key, text)
  assert runs.columns(run)['start'] == {key: estimates.Value(text)}
  assert any(runs.shows(x, f'eval/{metric}') for _, x, _ in runs.PANELS)


def test_a_stage_that_selects_is_shown_at_its_best_step(run):
  path = run / 'metrics.jsonl'
  rows = writers.read(str(path))
  for row in rows:
    if row['stage'] == 'grpo' and row['step'] in (20, 30):
      row['select/best_step'] = 20
  path.write_text(example.lines(rows))
  for step in (20, 30):
    answer = {'prompt': 'Why?', 'text': f'at {step}'}
    example.save(run, f'grpo_suite_{step:06d}', [answer])
  text = text_of(run)
  table = text[text.index('Held-out evaluation') :]
  assert '<th class="n">after grpo, at its best step 20</th>' in table
  line = re.search('<tr><td>&lt;b&gt;x</td><td>pass rate.*?</tr>', table)[0]
  assert re.findall('[0-9.]+%', line) == ['0.0%', '37.5%', '25.0%']
  assert 'at 20' in text and 'at 30' not in text


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


@pytest.mark.parametrize(
  ('values', 'shown'),
  [
    (
      {
        'rollout/reward/a': 0.5,
        'rollout/mixed_groups/a': 0.5,
        'rollout/entropy/a': 0.5,
        'mismatch/max': 1e-6,
        'rollout/length/a': 3.0,
        'eval/nll/a': 1.0,
      },
      'Reward of rollouts|Groups with credit|rollout/entropy|'
      'Sampler against trainer, |nats||rollout/length',
    ),
    (
      {'eval/nll/a': 1.0, 'loss/total': 1.0, 'optim/grad_norm': 1.0},
      'Held-out NLL, nats per token|Gradient norm',
    ),
    ({'mine': 1.0}, ''),
  ],
)
def test_the_first_panels_tell_whether_it_learns(tmp_path, values, shown):
  example.save(tmp_path, '../metrics', [{'stage': 's', 'step': 1} | values])
  (tmp_path / 'config.json').write_text(
    '{"stages": ["s"], "s": {"envs": {"a": {}}}}'
  )
  text = text_of(tmp_path)
  learning, _, others = text.partition('<h2>Learning curves</h2>')
  learning = learning.partition('<h2>Is it learning?</h2>')[2]
  titles = re.findall('<figcaption><b>(.*?)</b>', learning)
  assert '|'.join(titles) == shown
  assert learning.count('<b>Should:</b>') == len(titles)
  assert learning.count('<li>') == 3 * len(titles)
  for title in titles:  # once
    assert f'<figcaption><b>{title}</b>' not in others


def test_several_runs_have_a_table(tmp_path):
  workdirs = [
    str(example.make_run(tmp_path / x, i)) for i, x in enumerate('ab')
  ]
  for seed, workdir in enumerate(workdirs):
    with open(f'{workdir}/config.json', 'w') as f:
      json.dump({'seed': seed}, f)
  page.write_all(workdirs, f'{tmp_path}/both.html')
  text = (tmp_path / 'both.html').read_text()
  table = text.partition('<h2>Runs</h2>')[2].partition('</section>')[0]
  cells = [
    re.findall(r'<td[^>]*>(.*?)</td>', line)
    for line in re.findall('<tr><td>.*?</tr>', table, re.DOTALL)
  ]
  assert [line[:2] for line in cells] == [
    ['a', 'unfinished'],
    ['b', 'unfinished'],
  ]
  assert cells[0][2:4] == [
    '75.0% <small>[65.0%, 85.0%]</small>',
    '+75.0 points',
  ]
  assert 'id="mean" type="checkbox" checked' in text  # seeds alone differ


def test_texts_from_outside_stay_texts(tmp_path):
  row = {'stage': f'a{HOSTILE}', 'step': 1, f'mine/{HOSTILE}': 1.5}
  (tmp_path / 'metrics.jsonl').write_text(json.dumps(row) + '\n')
  (tmp_path / 'config.json').write_text(json.dumps({HOSTILE: HOSTILE}))
  message = {'role': HOSTILE, 'content': HOSTILE}
  texts = ('env', 'id', 'question', 'answer', 'text', 'prompt', 'stop_reason')
  row = dict.fromkeys(texts, HOSTILE)
  rollout = row | {'group': 0, 'reward': 1.0, 'rewards': {HOSTILE: 0.5}}
  rollout |= {'prompt': [message], 'completion': [message] * 2}
  example.save(tmp_path, 'a_train_000001', [rollout])
  example.save(tmp_path, 'a_suite_000001', [row | {'grades': {HOSTILE: 1.0}}])
  episode = {'messages': [message | {'role': 'assistant'}] * 2, 'env': 'e'}
  example.save(tmp_path, 'a_eval_000001', [row, row | episode])
  text = text_of(tmp_path)
  assert text.count('<script') == text.count('</script>') == 3
  assert '<img' not in text and '<!--' not in text
  data = re.search('id="data">(.*?)</script>', text)[1]
  assert not re.search('[<>&\u2028]', data)
  keys = {x['key'] for x in json.loads(data)['panels']}
  assert keys == {f'mine/{HOSTILE}'}


def test_an_empty_folder_has_a_report(tmp_path):
  assert 'No metrics yet.' in text_of(tmp_path)
