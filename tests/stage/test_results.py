"""The last lines of a run: the table, and the commands that fit."""

import json
import shlex

import pytest

from posttrain import schema
from posttrain.metrics import estimates
from posttrain.stage import results
from posttrain.util import imports

SFT = schema.Stage(envs={'sums': schema.EnvEntry()})
RM = schema.Stage(kind='ranking', pairs=schema.PairFile(path='x'))


def row(stage, step, **values):
  values = {k.replace('__', '/'): x for k, x in values.items()}
  return {'stage': stage, 'step': step, 'loss/total': 1.0, **values}


def rated(low, value, high):
  return {
    'eval__pass_rate__sums': value,
    'eval__pass_rate_low__sums': low,
    'eval__pass_rate_high__sums': high,
  }


def test_the_table_has_the_start_and_the_end_of_each_stage():
  run = schema.Run(stages={'sft': SFT, 'grpo': SFT, 'rm': RM})
  rows = [
    row('sft', 0, **rated(0.0, 0.125, 0.25)),
    row('sft', 2, **rated(0.25, 0.5, 0.75), select__best_step=2),
    row('sft', 4, **rated(0.125, 0.375, 0.75), select__best_step=2),
    row('grpo', 4, **rated(0.5, 0.75, 1.0)),
    row('rm', 4, eval__pairs__rewards__accuracies=0.625),
  ]
  head, *lines, _ = (x.split() for x in results.evaluated(run, rows))
  assert head == 'held-out evaluation start sft (step 2) grpo rm'.split()
  assert lines == [
    'pass_rate/sums 0.125 [0.000, 0.250] 0.500 [0.250, 0.750] '
    '0.750 [0.500, 1.000] -'.split(),
    'pairs/rewards/accuracies - - - 0.625'.split(),
  ]


# Newcombe 1998, table II: 56 of 70 and 48 of 80, method 10: 0.0524 to 0.3339.
@pytest.mark.parametrize(
  ('before', 'after', 'sentence'),
  [
    (
      (0.4904, 48 / 80, 0.7004),
      (0.6917, 56 / 70, 0.8769),
      '[+0.052, +0.334], for the better, and more than chance explains',
    ),
    (
      (0.6917, 56 / 70, 0.8769),
      (0.4904, 48 / 80, 0.7004),
      '[-0.334, -0.052], for the worse, and more than chance explains',
    ),
    (
      (0.2, 0.5, 0.8),
      (0.2, 0.5, 0.8),
      'changed by +0.000 [-0.424, +0.424], no more than chance explains',
    ),
  ],
)
def test_a_sentence_says_whether_the_gain_is_outside_chance(
  before, after, sentence
):
  rows = [
    row('start', i * 2, **rated(*x)) for i, x in enumerate((before, after))
  ]
  # A stage may have the name of the first column.
  head, *_, last = results.evaluated(schema.Run(stages={'start': SFT}), rows)
  assert head.split() == ['held-out', 'evaluation', 'start', 'start']
  assert last.startswith('start: pass_rate/sums changed by ')
  assert last.endswith(sentence)


def test_answers_that_are_all_cut_are_named():
  for share in (0.5, 1.0):
    end = row('sft', 2, **rated(0, 0, 1), eval__truncated__sums=share)
    text = '\n'.join(results.evaluated(schema.Run(stages={'sft': SFT}), [end]))
    assert ('config.sft.eval.max_tokens' in text) == (share == 1)


def test_the_same_tasks_are_compared_pair_by_pair(tmp_path):
  """10 of 20 are right before, and 4 others besides after."""
  (tmp_path / 'rollouts').mkdir()
  run, rows = schema.Run(stages={'sft': SFT}), []
  for step, right in ((0, 10), (2, 14)):
    rows.append(row('sft', step, **rated(0.3, right / 20, 0.8)))
    answers = (
      {'env': 'sums', 'id': i, 'measures': {'pass_rate': i < right}}
      for i in range(20)
    )
    path = tmp_path / f'rollouts/sft_eval_{step:06d}.jsonl'
    path.write_text(''.join(json.dumps(x) + '\n' for x in answers))
  ends = estimates.paired([1] * 14 + [0] * 6, [1] * 10 + [0] * 10)[1:]
  text = 'changed by +0.200 [{:+.3f}, {:+.3f}]'.format(*ends)
  assert text in results.evaluated(run, rows, str(tmp_path))[-1]
  path.write_text('')
  assert text not in results.evaluated(run, rows, str(tmp_path))[-1]


def test_every_reward_has_a_sentence():
  ends = [
    row(
      'sft',
      step,
      **{
        f'eval/{kind}reward/{name}{side}/sums': x
        for kind in ('', 'sampled_')
        for name in ('a', 'b')
        for side, x in zip(('', '_low', '_high'), (0.5, 0.4, 0.6), strict=True)
      },
    )
    for step in (0, 2)
  ]
  lines = results.evaluated(schema.Run(stages={'sft': SFT}), ends)
  said = [x.split()[1] for x in lines if 'changed by' in x]
  assert said == ['reward/a/sums', 'reward/b/sums']


@pytest.mark.parametrize('prompt', ['1 + 1?', 'two\nlines'])
def test_a_short_question_of_the_evaluation_is_asked(prompt, tmp_path):
  (tmp_path / 'rollouts').mkdir()
  for step, text in ((4, 'old'), (12, prompt)):
    path = tmp_path / f'rollouts/sft_eval_{step:06d}.jsonl'
    path.write_text(json.dumps({'prompt': 'system', 'question': text}) + '\n')
  run = schema.Run(stages={'sft': SFT})
  generate, *_ = results.commands(run, str(tmp_path), [])
  asked = prompt if prompt == '1 + 1?' else 'Hello'
  assert shlex.split(generate)[-1] == f'--prompt={asked}'


def test_a_policy_with_tools_is_served(tmp_path):
  (tmp_path / 'rollouts').mkdir()
  path = tmp_path / 'rollouts/sft_eval_000004.jsonl'
  path.write_text(json.dumps({'question': '1 + 1?', 'tools': True}) + '\n')
  serve, *_ = results.commands(
    schema.Run(stages={'sft': SFT}), str(tmp_path), []
  )
  assert serve == f'python -m posttrain.serve --checkpoint={tmp_path}'


def test_commands_fit_what_was_trained():
  stages = {'sft': SFT, 'grpo': schema.Stage(init='stage:sft', envs=SFT.envs)}
  ends = [row(name, 4, eval__pass_rate__sums=0.5) for name in ('sft', 'grpo')]
  generate, evaluate, export = results.commands(
    schema.Run(stages=stages), 'my runs/a', ends
  )
  start = "python -m posttrain.generate --checkpoint='my runs/a'"
  assert generate == f'{start} --prompt=Hello'
  assert evaluate.endswith("--against='my runs/a/checkpoints/sft'")
  assert export.endswith("--folder='my runs/a/exported'")
  stages = {'sft': SFT, 'rm': RM}
  (train,) = results.commands(schema.Run(stages=stages), '/a', ends)
  assert 'reward=/a ' in train


@pytest.mark.parametrize(
  ('fn', 'words'),
  [
    ('mine:short', 'evaluate --checkpoint=a --trust_config'),
    (
      'posttrain.util.imports:KEPT.short',
      "in Python: posttrain.api.evaluate('a')",
    ),
  ],
)
def test_commands_name_no_function_that_they_cannot_import(
  fn, words, monkeypatch
):
  monkeypatch.setattr(imports, 'HANDED_OVER', {fn})
  entry = schema.EnvEntry(rewards={'short': schema.RewardFn(fn=fn)})
  stages = {'grpo': schema.Stage(envs={'sums': entry})}
  ends = [row('grpo', 4, eval__reward__short__sums=0.5)]
  _, evaluate, _ = results.commands(schema.Run(stages=stages), 'a', ends)
  assert evaluate.endswith(words)


def test_evaluate_is_named_where_it_measures_held_out_tasks():
  run = schema.Run(stages={'sft': SFT})
  for name, is_named in (('suite__length', False), ('nll__sums', True)):
    ends = [row('sft', 4, **{f'eval__{name}': 0.5})]
    commands = '\n'.join(results.commands(run, 'a', ends))
    assert ('evaluate' in commands) == is_named
    assert 'against' not in commands  # the start was random
