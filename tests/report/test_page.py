"""The report: self-contained, escaped, complete without some of the files."""

import base64
import hashlib
import html
import json
import re

import numpy as np
import pytest

from posttrain.evaluation import answers as answers_lib
from posttrain.metrics import held_out, writers
from posttrain.report import answers, page, results, runs, seconds, series
from posttrain.rewards import texts

ENDS = {name: (f'after {name}', None) for name in ('sft', 'grpo')}


def make_run(folder):
  """A run of two stages with answers, some of them hostile."""
  rng = np.random.default_rng(0)
  writer = writers.Writer(str(folder / 'metrics.jsonl'), 0)
  for stage, first in (('sft', 0), ('grpo', 0.6)):
    for step in range(first != 0, 121):
      share = step / 120
      values = {
        'loss/total': 2.5 * np.exp(-4 * share) + 0.1 * rng.random(),
        'optim/grad_norm': np.nan if step == 7 else 1 + rng.random(),
        'optim/lr': 3e-3 * (1 - share),
        'batch/tokens': 4096,
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
        values['eval/format_rate/arithmetic'] = min(1.0, first + share)
      writer.write(stage, step, values)
  writer.close()
  (folder / 'rollouts').mkdir()
  for stage, step, right in (('sft', 0, False), ('grpo', 120, True)):
    with open(folder / 'rollouts' / f'{stage}_eval_{step:06d}.jsonl', 'w') as f:
      for i in range(15):
        f.write(
          json.dumps(
            {
              'env': 'arithmetic',
              'id': str(i),
              'answer': 3 + i,
              'prompt': f'What is 1 + {i + 2}?',
              'formatted': right,
              'text': f'\\boxed{{{3 + i}}}' if right else '<script>x</script>',
              'correct': right,
              'stop_reason': 'eos',
              'tokens': 4,
            }
          )
          + '\n'
        )
  (folder / 'config.json').write_text('{"seed": 0, "note": "</pre><b>"}')


@pytest.fixture
def run(tmp_path):
  folder = tmp_path / 'arithmetic_sft'
  folder.mkdir()
  make_run(folder)
  return folder


def test_the_report_has_every_section_and_its_numbers(run):
  path = page.write(str(run))
  assert path == str(run / 'report.html')
  text = (run / 'report.html').read_text()
  assert '<title>arithmetic_sft</title>' in text
  for head in (
    'Held-out evaluation',
    'Learning curves',
    'The same prompts',
    'Where the seconds went',
    'Resolved config',
  ):
    assert head in text
  # The run's first pass rate, and the last of every stage.
  heads = ('start', 'after sft', 'after grpo')
  assert ''.join(f'<th class="n">{head}</th>' for head in heads) in text
  rates = ('0.0%', '40.0%', '100.0%')
  assert ''.join(f'<td class="n">{rate}</td>' for rate in rates) in text
  about = '120 steps, 20,060 tokens/s (median), update compiled 1 time'
  assert f'sft: {about}; grpo: {about}</p>' in text
  assert 'sft: 28.2 s</p>' in text  # 120 * .21 + 3


def test_intervals_follow_their_rates(tmp_path):
  row = {'stage': 'sft', 'step': 0, 'eval/pass_rate_hard/a': 0.125}
  for name, value in (('pass_rate', 0.5), ('maj@8', 0.25), ('pass@8', 1.0)):
    row[f'eval/{name}/a'] = value
    row[f'eval/{name}_low/a'] = value / 2
    row[f'eval/{name}_high/a'] = 1.0
  (tmp_path / 'metrics.jsonl').write_text(json.dumps(row) + '\n')
  page.write(str(tmp_path))
  text = (tmp_path / 'report.html').read_text()
  cells = re.findall(r'<tr><td>a</td><td>(.*?)</td><td class="n">(.*?)</', text)
  assert cells == [
    ('pass rate, greedy', '50.0% <small>[25.0%, 100.0%]'),
    ('pass_rate_hard, greedy', '12.5%'),
    ('pass@8', '100.0% <small>[50.0%, 100.0%]'),
    ('maj@8, majority vote', '25.0% <small>[12.5%, 100.0%]'),
  ]
  assert '95 % intervals, over tasks' in text


@pytest.mark.parametrize(
  'metric, env, title, text',
  [
    ('pass_rate/a', 'a', 'pass rate, greedy', '50.0%'),
    ('sampled_pass_rate/a', 'a', 'pass rate, sampled', '50.0%'),
    ('reward/short/a', 'a', 'reward short, greedy', '0.500'),
    ('sampled_reward/short/a', 'a', 'reward short, sampled', '0.500'),
    ('nll/a', 'a', 'NLL of demonstrations, nats per token', '0.5000'),
    ('token_accuracy/a', 'a', 'token accuracy on demonstrations', '50.0%'),
    (
      'pairs/rewards/accuracies',
      'pairs',
      'accuracy on held-out pairs',
      '50.0%',
    ),
    ('reward/a', 'a', 'reward, greedy', '0.500'),
    ('sampled_reward/a', 'a', 'reward, sampled', '0.500'),
  ],
)
def test_a_main_number_has_a_headline_a_row_and_a_panel(
  tmp_path, metric, env, title, text
):
  row = {'stage': 's', 'step': 1, 'loss/total': 1.0, f'eval/{metric}': 0.5}
  (tmp_path / 'metrics.jsonl').write_text(json.dumps(row) + '\n')
  run = runs.read(str(tmp_path))
  (line,) = results.headlines(run)
  assert (line['env'], line['title']) == (env, title)
  assert line['last'].text == text
  table = results.columns(run)
  assert table['start'] == {(env, title): results.Value(text)}
  assert results.keys([run], table) == [(env, title)]
  assert series.is_listed(f'eval/{metric}')
  assert [x.removeprefix('eval/') for x in held_out.metrics(row)] == [metric]


def test_bounds_of_intervals_are_no_series():
  rows = [
    {
      'stage': 'a',
      'step': step,
      'eval/pass@8/e': 0.5,
      'eval/pass@8_low/e': 0.4,
      'eval/pass@8_high/e': 0.6,
    }
    for step in (0, 1)
  ]
  assert list(series.arrays(rows)) == ['eval/pass@8/e']


def save_suite(run, stage, step, answers, **more):
  path = run / 'rollouts' / f'{stage}_suite_{step:06d}.jsonl'
  path.write_text(
    ''.join(
      json.dumps(
        {'prompt': prompt, 'text': text, 'stop_reason': 'eos', 'tokens': 3}
        | more
      )
      + '\n'
      for prompt, text in answers.items()
    )
  )


def test_the_suite_is_shown_before_and_after(run):
  save_suite(run, 'sft', 0, {'Hello <b>.': 'nothing', 'Why?': ''})
  save_suite(run, 'sft', 60, {'Hello <b>.': 'in between', 'Why?': 'no'})
  save_suite(run, 'sft', 120, {'Hello <b>.': 'Hi & bye', 'Why?': 'Because'})
  save_suite(run, 'grpo', 120, {'Hello <b>.': 'Hello', 'New?': 'Yes'})
  page.write(str(run))
  text = (run / 'report.html').read_text()
  _, part = text.split('<h2>The suite of prompts, before and after</h2>')
  part = part[: part.index('</table>')]
  table = [
    re.findall(r'<t[hd](?: class="[a-z ]*")?>(.*?)</t', row)
    for row in part.split('<tr>')[1:]
  ]
  assert table == [
    ['prompt', 'start', 'after sft', 'after grpo'],
    ['Hello &lt;b&gt;.', 'nothing', 'Hi &amp; bye', 'Hello'],
    ['Why?', '(empty)', 'Because', 'n/a'],
    ['New?', 'n/a', 'n/a', 'Yes'],
  ]
  # The answers to tasks are the same as without a suite.
  assert 'The first 12 of 15 evaluation prompts' in text


def test_a_stage_that_selects_is_shown_at_its_best_step(run):
  path = run / 'metrics.jsonl'
  rows = writers.read(str(path))
  for row in rows:
    if row['stage'] == 'grpo' and row['step'] in (60, 120):
      row['select/best_step'] = 60
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  save_suite(run, 'grpo', 60, {'Why?': 'at 60'})
  save_suite(run, 'grpo', 120, {'Why?': 'at 120'})
  page.write(str(run))
  text = (run / 'report.html').read_text()
  head = 'after grpo, at its best step 60'
  table = text[text.index('Held-out evaluation') :]
  heads = re.findall('<th class="n">(.*?)</th>', table)[:3]
  assert heads == ['start', 'after sft', head]
  # 0.6 + 0.4 / 2 at step 60, and 1.0 at step 120.
  line = re.search('<tr><td>arithmetic</td><td>pass rate.*?</tr>', table)[0]
  assert re.findall('[0-9.]+%', line) == ['0.0%', '40.0%', '80.0%']
  assert 'at 60' in text and 'at 120' not in text
  assert f'<th>{head}</th>' in text
  assert writers.last(str(path))['step'] == 60


def test_the_values_of_the_suite_are_shown_before_and_after(run):
  rows = [
    {'stage': 'sft', 'step': 0, 'eval/suite/refusal': 0.25},
    {'stage': 'sft', 'step': 9, 'eval/suite/refusal': 0.0}
    | {'eval/suite/code_syntax': 0.5, 'eval/suite/length': 7.25},
  ]
  (run / 'metrics.jsonl').write_text(
    ''.join(json.dumps(x) + '\n' for x in rows)
  )
  grades = {'refusal': 0.25, 'code_syntax': 1, '<b>': 0.0, 'no number': 'x'}
  save_suite(run, 'sft', 0, {'Why?': 'a'}, grades=grades)
  save_suite(run, 'sft', 9, {'Why?': 'b'}, grades=None)
  page.write(str(run))
  text = (run / 'report.html').read_text()
  cells = re.findall(
    r'<tr><td>suite</td><td>(.*?)</td><td class="n">(.*?)</td>'
    r'<td class="n">(.*?)</td>',
    text,
  )
  assert cells == [
    ('refusals in English', '25.0%', '0.0%'),
    ('blocks of code that parse', 'n/a', '50.0%'),
    ('length, tokens', 'n/a', '7.2'),
  ]
  note = '<small>\nrefusal 0.25, code_syntax 1.00, &lt;b&gt; 0.00</small></td>'
  assert f'>a{note}' in text and '>b</td>' in text
  shown = {f'eval/suite/{name}' for name, _, _ in results.SUITE}
  answer = answers_lib.SuiteAnswer('', '', 'eos', 0, texts.grade('```py\n```'))
  assert shown == answers_lib.suite_metrics([answer]).keys()


def test_the_first_suite_of_a_later_stage_is_titled_before_it(run):
  save_suite(run, 'grpo', 0, {'Why?': 'a'})
  save_suite(run, 'grpo', 120, {'Why?': 'b'})
  text = answers.suite(str(run), ENDS)
  heads = re.findall('<th>(.*?)</th>', text)
  assert heads == ['prompt', 'before grpo', 'after grpo']
  assert answers.suite(str(run / 'none'), ENDS) == ''


@pytest.mark.parametrize(
  'row, expected',
  [
    ({'update': 5.0, 'compile': 3.0}, {'update': 2.0, 'compile': 3.0}),
    ({'eval': 5.0, 'compile': 3.0}, {'eval': 2.0, 'compile': 3.0}),
    (  # more than the update: the rest is the evaluation's
      {'update': 1.0, 'eval': 5.0, 'compile': 3.0},
      {'update': 0.0, 'eval': 3.0, 'compile': 3.0},
    ),
    ({'setup': 4.0, 'save': 1.0, 'compile': 9.0}, {'setup': 4.0, 'save': 1.0}),
    (
      {'data': 1.0, 'update': None, 'tokens_per_second': 7.0, 'programs': 9},
      {'data': 1.0},
    ),
    (  # compiling of the first evaluation and of the first rollouts
      {'rollout': 4.0, 'eval': 2.0, 'compile': 5.0},
      {'rollout': 1.0, 'eval': 0.0, 'compile': 5.0},
    ),
    (  # within the rollouts
      {'rollout': 5.0, 'scoring': 3.0, 'compile': 4.0, 'cpu': 50.0},
      {'rollout': 0.0, 'scoring': 1.0, 'compile': 4.0},
    ),
  ],
)
def test_compiling_is_subtracted_from_the_other_times(row, expected):
  parts = seconds.slices({f'time/{k}': value for k, value in row.items()})
  assert parts == expected


def test_a_long_answer_is_cut_before_it_is_escaped():
  cell = answers._answer({'text': '<' * 700})
  assert cell.count('&lt;') == 600
  assert '&lt; ...</td>' in cell


def test_the_page_has_only_its_own_scripts_and_no_links(run):
  page.write(str(run))
  text = (run / 'report.html').read_text()
  assert '</pre><b>' not in text
  assert '&lt;script&gt;' in text
  parts = re.findall(r'<script([^>]*)>(.*?)</script>', text, re.DOTALL)
  kinds, bodies = zip(*parts, strict=True)
  assert kinds == (' type="application/json" id="data"', '', '')
  assert text.count('<script') == 3
  body = text.replace(bodies[1], '').replace(bodies[2], '')
  assert not re.search(r'(src|href)="(?!#)|\son\w+=|style="', body)
  assert '@import' not in body and 'url(' not in body
  # The policy has the hashes of the scripts and the style, and no more.
  policy = html.unescape(re.search('Policy" content="(.*?)"', text)[1])
  styles = re.findall('<style[^>]*>(.*?)</style>', text, re.DOTALL)
  assert policy == (
    f"default-src 'none'; script-src {sha256(bodies[1])} {sha256(bodies[2])}; "
    f'style-src {sha256(styles[0])} {sha256("")}; img-src data: blob:; '
    "base-uri 'none'; form-action 'none'"
  )
  assert styles[1:] == ['']


def sha256(text):
  digest = hashlib.sha256(text.encode()).digest()
  return f"'sha256-{base64.b64encode(digest).decode()}'"


HOSTILE = '</script><!--<script>\u2028\0\x1b[0m\ud800\r<img onerror=x> {{ 1 }}'


def test_texts_from_outside_stay_texts(tmp_path):
  row = {'stage': f'a{HOSTILE}', 'step': 1, f'mine/{HOSTILE}': 1.5}
  row |= {f'eval/pass_rate/{HOSTILE}': 0.5}
  (tmp_path / 'metrics.jsonl').write_text(json.dumps(row) + '\n')
  (tmp_path / 'config.json').write_text(json.dumps({HOSTILE: HOSTILE}))
  (tmp_path / 'about.json').write_text(
    json.dumps({'starts': [{'devices': HOSTILE}]})
  )
  (tmp_path / 'rollouts').mkdir()
  rollout = {'env': HOSTILE, 'group': 0, 'task': HOSTILE, 'reward': 1.0}
  rollout |= {
    'prompt': [{'role': 'user', 'content': HOSTILE}],
    'completion': [{'role': HOSTILE, 'content': HOSTILE}] * 2,
    'rewards': {HOSTILE: 0.5},
    'stop_reason': HOSTILE,
  }
  for name, one in (
    ('train', rollout),
    ('eval', attempt(HOSTILE, HOSTILE, sampled_texts=[HOSTILE])),
    ('suite', {'prompt': HOSTILE, 'text': HOSTILE, 'grades': {HOSTILE: 1.0}}),
  ):
    path = tmp_path / 'rollouts' / f'a_{name}_000001.jsonl'
    path.write_text(json.dumps(one) + '\n')
  page.write(str(tmp_path))
  text = (tmp_path / 'report.html').read_bytes().decode()  # is UTF-8
  assert text.count('<script') == text.count('</script>') == 3
  assert '<img' not in text and '<!--' not in text
  assert not re.search('[\x00-\x08\x0b-\x1f\x7f]', text)
  data = re.search('id="data">(.*?)</script>', text)[1]
  assert not re.search('[<>&\u2028]', data)
  data = json.loads(data)
  assert {x['key'] for x in data['panels']} > {f'mine/{HOSTILE}'}


def test_numbers_of_long_runs_fit_into_two_megabytes(tmp_path):
  rng = np.random.default_rng(0)
  names = [f'{prefix}/{i}' for prefix in 'abcdefgh' for i in range(30)]
  with open(tmp_path / 'metrics.jsonl', 'w') as f:
    for step in range(600):
      row = dict(zip(names, rng.random(len(names)).tolist(), strict=True))
      f.write(json.dumps({'stage': 's', 'step': step} | row) + '\n')
  page.write(str(tmp_path))
  size = (tmp_path / 'report.html').stat().st_size
  assert 1_600_000 < size <= page.MAX_BYTES == 2_000_000


def test_long_texts_fit_into_two_megabytes(tmp_path):
  text = '<\u4e00' * 400
  (tmp_path / 'rollouts').mkdir()
  turns = [text] * 21
  for step in (0, 9):
    for env in range(12):
      rows = [
        attempt(f'e{env}', f't{i}', *turns, sampled_texts=[text] * 8)
        for i in range(8)
      ]
      save(tmp_path, 's', step, rows)
  (tmp_path / 'metrics.jsonl').write_text('{"stage": "s", "step": 9, "x": 1}\n')
  (tmp_path / 'config.json').write_text(json.dumps({'x': text * 500}))
  page.write(str(tmp_path))
  path = tmp_path / 'report.html'
  assert 1_400_000 < path.stat().st_size <= page.MAX_BYTES
  page_text = path.read_text()
  assert 'The first 1 of 8 evaluation tasks, played' in page_text
  assert 'The page has no space for tasks of ' in page_text


def test_long_prompts_and_expected_answers_fit_into_two_megabytes(tmp_path):
  long = '<\u4e00' * 50_000
  (tmp_path / 'rollouts').mkdir()
  rows = [attempt('e', f't{i}', prompt=long, answer=long) for i in range(20)]
  (tmp_path / 'metrics.jsonl').write_text('{"stage": "s", "step": 9, "x": 1}\n')
  for step in (0, 9):
    save(tmp_path, 's', step, rows)
    prompts = {f'{i}{long}': long for i in range(500)}
    save_suite(tmp_path, 's', step, prompts)
  page.write(str(tmp_path))
  path = tmp_path / 'report.html'
  assert 1_400_000 < path.stat().st_size <= page.MAX_BYTES
  text = path.read_text()
  assert 'The first 12 of 20 evaluation prompts' in text
  (count,) = re.findall('space for the first (.+) of 500 prompts', text)
  assert 5 < int(count) < 400


def test_answers_before_and_after_share_a_row_and_have_colors(run):
  page.write(str(run))
  text = (run / 'report.html').read_text()
  rows = re.findall(r'<tr><td class="text">What is 1 \+ .*?</tr>', text)
  assert len(rows) == 12
  assert all('class="text bad"' in row for row in rows)
  assert all('class="text good"' in row for row in rows)
  assert 'The first 12 of 15 evaluation prompts' in text


def attempt(env, id, *texts, rewards=(), correct=False, **fields):
  """An attempt whose messages alternate between policy and environment."""
  roles = ('assistant', 'tool')
  return {
    'env': env,
    'id': id,
    'prompt': f'rules\nq {id}',
    'question': f'q {id}',
    'answer': 3,
    'text': '',
    'correct': correct,
    'reward': sum(rewards),
    'stop_reason': 'env_done',
    'tokens': 4,
    'error': None,
    'messages': [
      {'role': roles[i % 2], 'content': text} for i, text in enumerate(texts)
    ],
    'turn_rewards': list(rewards),
    **fields,
  }


def save(run, stage, step, rows):
  path = run / 'rollouts' / f'{stage}_eval_{step:06d}.jsonl'
  with open(path, 'a') as f:
    f.writelines(json.dumps(row) + '\n' for row in rows)


def test_attempts_of_several_turns_are_shown_side_by_side(run):
  save(run, 'sft', 0, [attempt('sql', f't{i}', 'ANSWER x') for i in range(8)])
  save(
    run,
    'grpo',
    120,
    [
      attempt(
        'sql',
        f't{i}',
        'QUERY: SELECT 1',
        'one',
        'ANSWER: 3',
        rewards=(0.01, 1.0),
        correct=True,
      )
      for i in range(8)
    ],
  )
  page.write(str(run))
  text = (run / 'report.html').read_text()
  _, part = text.split('<h2>The same tasks of sql, before and after</h2>')
  part, _ = part.split('<h2>Where the seconds went')
  assert 'The first 6 of 8 evaluation tasks' in part
  tasks = part.split('<section class="task"')[1:]
  assert [re.search('q t(.)', task)[1] for task in tasks] == list('012345')
  for task in tasks:
    heads = re.findall('<h4>(.*?)</h4>', task)
    assert heads == ['start', 'after grpo']  # sft has no evaluation at its end
    assert task.count('wrong') == 1
    assert task.count('correct') == 1
    assert 'rules' not in task
  # The table of tasks of one turn is the same as without them.
  assert 'The first 12 of 15 evaluation prompts' in text
  table = text[text.index('>prompt<') : text.index('of sql, before')]
  assert 'SELECT' not in table and table.count('<tr><td') == 12


@pytest.mark.parametrize(
  'steps, heads',
  [
    ((0,), ['start']),
    ((50,), ['after sft']),
    ((50, 90), ['after sft']),
    ((0, 50, 90), ['start', 'after sft']),
  ],
)
def test_the_attempt_at_step_0_is_titled_start(tmp_path, steps, heads):
  (tmp_path / 'rollouts').mkdir()
  for step in steps:
    save(
      tmp_path,
      'sft',
      step,
      [attempt('sql', 't', f'QUERY {step}', 'no', 'ANSWER 3')],
    )
  text = answers.write(str(tmp_path), ENDS)
  assert re.findall('<h4>(.*?)</h4>', text) == heads
  assert f'</b> {steps[-1]}</p>' in text


def test_a_run_with_only_multi_turn_tasks_has_no_table(tmp_path):
  (tmp_path / 'rollouts').mkdir()
  row = attempt('a&b', 't', 'SAMPLE x', 'no', 'ANSWER 3')
  save(tmp_path, 'main', 0, [row])
  (tmp_path / 'metrics.jsonl').write_text('{"stage": "main", "step": 0}\n')
  page.write(str(tmp_path))
  text = (tmp_path / 'report.html').read_text()
  assert 'The same tasks of a&amp;b, before' in text
  assert 'The same prompts' not in text


def test_a_stage_without_an_environments_tasks_has_no_column(run):
  row = attempt('sql', 't', 'SAMPLE x', 'no', 'ANSWER 3')
  save(run, 'grpo', 120, [row])
  page.write(str(run))
  text = (run / 'report.html').read_text()
  assert re.findall('<h4>(.*?)</h4>', text) == ['after grpo']


def test_the_page_is_deterministic(run):
  page.write(str(run))
  before = (run / 'report.html').read_bytes()
  page.write(str(run))
  assert (run / 'report.html').read_bytes() == before


def test_an_empty_folder_has_a_report_but_no_figure(tmp_path):
  page.write(str(tmp_path))
  assert 'No metrics yet.' in (tmp_path / 'report.html').read_text()
  with pytest.raises(ValueError, match='must hold a metrics.jsonl'):
    page.figure(str(tmp_path), str(tmp_path / 'curves.png'))


@pytest.mark.parametrize(
  'row',
  [
    {},
    {'loss/total': None},
    {'eval/pass_rate/a': 0.5},
    {'time/update': 1.0},
    {'optim/lr': 0.0, 'batch/tokens': 3},
  ],
)
def test_rows_with_few_metrics_and_an_unfinished_line_have_a_report(
  tmp_path, row
):
  line = json.dumps({'stage': 'sft', 'step': 0} | row) + '\n'
  (tmp_path / 'metrics.jsonl').write_text(line + '{"stage": "sft", "st')
  page.write(str(tmp_path))
  assert 'sft: 0 steps' in (tmp_path / 'report.html').read_text()


def test_the_figure_is_a_png(run):
  page.figure(str(run), str(run / 'curves.png'))
  assert (run / 'curves.png').read_bytes()[:4] == b'\x89PNG'


@pytest.mark.parametrize('line', ['garbage', '[1]', '{"text": 3}', '[' * 9999])
def test_answers_that_are_none_are_left_out_with_a_warning(run, line):
  save_suite(run, 'sft', 0, {'Why?': 'no'})
  for name in ('eval', 'suite'):
    file = run / 'rollouts' / f'sft_{name}_000120.jsonl'
    file.write_text(line + '\n')
  (run / 'config.json').unlink(missing_ok=True)
  with pytest.warns(UserWarning, match='the report leaves'):
    page.write(str(run))
  assert 'Learning curves' in (run / 'report.html').read_text()
