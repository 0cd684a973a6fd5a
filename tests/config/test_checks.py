"""Impossible options, of a node and of several: an error that names the key."""

import dataclasses
import json

import pytest

from configs import machinery
from posttrain import config, schema
from posttrain.config import checks

GRPO = schema.EnvEntry(
  algorithm=schema.Grpo(),
  sampler=schema.Policy(),
  group_size=4,
  rewards={'learned': schema.RewardFn(model='stage:rm')},
)
ALGORITHM = 'grpo.envs.a.algorithm'
REWARDS = 'grpo.envs.a.rewards'
TAKES = 'tests.rollout.judged:takes'


def _resolve(*overrides):
  """`sft`, then `dpo`, `rm`, and `grpo`, which asks `rm`."""
  envs = {'a': schema.EnvEntry()}
  node = machinery.config_dict(
    schema.Run(
      stages={
        'sft': schema.Stage(envs=envs),
        'dpo': schema.Stage(kind='preference', init='stage:sft', envs=envs),
        'rm': schema.Stage(kind='ranking', init='stage:sft', envs=envs),
        'grpo': schema.Stage(init='stage:sft', envs={'a': GRPO}),
      }
    )
  )
  for key, value in overrides:
    text = value if isinstance(value, str) else json.dumps(value)
    config.override(node, key, text)
  run = config.build(node)
  checks.check(run)
  return run


def test_valid_combinations_pass():
  run = _resolve(
    (ALGORITHM, {'type': 'grpo', 'kl_beta': 0.1, 'reference': 'stage:sft'}),
    ('grpo.loss.ref_kl', {'estimator': 'k3'}),
    ('grpo.loss.rl', {'type': 'clip', 'high': 0.3}),
    # Warmup is counted in updates, of which there are two a step.
    ('grpo.updates_per_rollout', '2'),
    ('grpo.optim.warmup_steps', '1500'),
    ('grpo.batch.max_draws', '100'),
    ('dpo.loss.preference', {'type': 'kto', 'reference': 'stage:sft'}),
    ('dpo.lora.rank', '4'),
    ('rm.pairs', {'type': 'file', 'path': 'p', 'eval_path': 'q'}),
    ('rm.envs', '{}'),
    (REWARDS, {'env': {'weight': 2.0}, 'learned': {'model': 'stage:rm'}}),
  )
  assert run.stages['grpo'].envs['a'].algorithm.kl_beta == 0.1


@pytest.mark.parametrize(
  ('key', 'value'),
  [
    *(('sft.init', x) for x in ('stage:x', 'stage:grpo', 'stage:sft')),
    ('grpo.init', 'stage:rm'),
    ('sft.lora', {'rank': 2}),
    ('dpo.envs', '{}'),
    ('sft.envs.a.group_size', '2'),
    # Who learns from whose rollouts.
    ('grpo.envs.a.sampler', 'dataset'),
    ('grpo.envs.a.sampler', {'type': 'frozen', 'model': 'stage:sft'}),
    ('sft.envs.a.sampler', 'policy'),
    ('sft.envs.a.sampler', {'type': 'frozen', 'model': 'ema:0.9'}),
    ('grpo.envs.a.sampler.max_tokens', '256'),
    # Algorithms.
    *(
      (ALGORITHM, x)
      for x in (
        'opd',
        {'type': 'opd', 'reference': 'policy'},
        {'type': 'opd', 'reference': 'ema:0.0'},
        {'type': 'opd', 'reference': 'http://127.0.0.1:8000/v1'},
        {'type': 'opd', 'reference': {'type': 'endpoint', 'name': 'teacher'}},
        {'type': 'grpo', 'kl_beta': 0.1, 'reference': 'stage:x'},
        {'type': 'echo', 'roles': {}},
        {'type': 'echo', 'filter': {'import_path': 'json:nothing'}},
        {'type': 'opsd', 'demonstration': 'no:f'},
        {'type': 'gpro'},
        {'type': 'custom', 'import_path': 'no:f'},
        {
          'type': 'custom',
          'import_path': 'tests.algorithms.credits:one',
          'kwargs': {'scale': 2},
        },
      )
    ),
    (f'{ALGORITHM}.length_penalty', {'type': 'linear', 'output_weight': -1.0}),
    # Losses.
    ('grpo.loss.rl', {'type': 'custom', 'import_path': 'no.such:loss'}),
    ('grpo.loss.rl', {'type': 'clip', 'aggregation': 'constant'}),
    ('dpo.loss.preference.reference', 'stage:rm'),
    ('dpo.loss.preference.label_smoothing', '0.5'),
    # Rewards.
    *(
      (REWARDS, {'x': x})
      for x in (
        {'model': 'stage:x'},
        {'model': 'stage:sft'},
        {'model': 'stage:rm', 'fn': 'json:loads'},
        {'fn': 'json:loads', 'judge': 'stage:y'},
        {'fn': TAKES, 'judge': 'stage:sft'},
        {'fn': TAKES, 'kwargs': {'scael': 1}},
      )
    ),
    (REWARDS, {'env': {'weight': 0.0}}),
    (REWARDS, {'a/b': {'fn': 'json:loads'}}),
    # Names of environments that metrics cannot have.
    ('sft.envs', {'a/b': {}}),
    # Pairs.
    ('dpo.pairs.samples', '1'),
    ('dpo.pairs', {'type': 'file'}),
  ],
)
def test_what_is_impossible_is_refused_by_key(key, value):
  with pytest.raises(ValueError, match=rf'^config\.{key}') as error:
    _resolve((key, value))
  assert '\n' not in str(error.value)


def test_sampler_is_mode_requires_one_update_per_rollout():
  mode = ('grpo.loss.rl.sampler_is_mode', 'token_truncate')
  assert _resolve(mode).stages['grpo'].loss.rl.sampler_is_mode == mode[1]
  with pytest.raises(ValueError, match=mode[0]):
    _resolve(mode, ('grpo.updates_per_rollout', '2'))


def test_a_group_of_one_rollout_may_train_without_its_reward():
  size = ('grpo.envs.a.group_size', '1')
  for algorithm in ({'type': 'reward'}, {'type': 'max_rl', 'baseline': False}):
    _resolve((ALGORITHM, algorithm), size)
  for algorithm in ({'type': 'echo'}, {'type': 'grpo', 'kl_beta': 0.1}):
    with pytest.warns(UserWarning, match='group_size'):
      _resolve((ALGORITHM, algorithm), size)


# --- eval.best ---------------------------------------------------------------

UNGRADED = schema.Trl(factory='m:f')


def _stage(best, env=None, rewards=None, **options):
  entry = schema.EnvEntry(env=env or schema.Arithmetic(), rewards=rewards or {})
  return schema.Stage(
    envs={'a': entry}, eval=schema.Eval(best=f'eval/{best}/a', **options)
  )


def _assert_selects(stage, selecting, refused, **options):
  """Asserts which measures a stage, made by a function, may select by."""
  for best in selecting.split():
    checks._check_best(stage(best, **options), 'config.grpo')
  for best in refused.split():
    with pytest.raises(ValueError, match=r'^config\.grpo\.eval\.best'):
      checks._check_best(stage(best, **options), 'config.grpo')


@pytest.mark.parametrize(
  ('env', 'selecting', 'refused'),
  [
    (
      None,
      'pass_rate sampled_format_rate sampled_reward pass@8 maj@4',
      'passrate nll pass@3 pass@x kl errors entropy length',
    ),
    (schema.AlphabetSort(), 'pass@8', 'maj@8'),
    (schema.Rows(path='p', eval_fraction=0.5), 'nll token_accuracy', 'nlll'),
    (UNGRADED, 'reward sampled_reward own', 'pass_rate pass@8'),
    (dataclasses.replace(UNGRADED, correct_at=1.0), 'pass_rate', ''),
    (schema.CustomEnv(import_path='m:f'), 'own nll maj@8', 'stop/eos kl'),
    (
      schema.Sql(difficulties=('easy',)),
      'progress pass_rate_easy',
      'pass_rate_hard steps',
    ),
  ],
)
def test_weights_are_selected_by_a_measure_that_can_be_best(
  env, selecting, refused
):
  _assert_selects(_stage, selecting, refused, env=env, ks=(4,))


@pytest.mark.parametrize(
  ('samples', 'selecting', 'refused'),
  [
    (0, '', 'sampled_pass_rate pass@1'),
    (2, 'sampled_pass_rate pass@2', 'maj@3'),
  ],
)
def test_measures_of_samples_need_samples(samples, selecting, refused):
  _assert_selects(_stage, selecting, refused, samples=samples)


@pytest.mark.parametrize(
  ('function', 'selecting', 'refused'),
  [
    ({'fn': 'm:f'}, 'reward/short sampled_reward/short', 'reward/long'),
    ({'fn': 'm:f', 'judge': 'stage:sft'}, '', 'reward/short'),
    ({'model': 'stage:sft'}, '', 'sampled_reward/short'),
  ],
)
def test_reward_functions_select_where_evaluations_call_them(
  function, selecting, refused
):
  rewards = {'short': schema.RewardFn(**function)}
  _assert_selects(_stage, selecting, refused, rewards=rewards)


def test_metrics_of_pairs_that_select():
  def stage(best):
    return schema.Stage(
      kind='preference',
      pairs=schema.MadePairs(eval_fraction=0.2),
      eval=schema.Eval(best=f'eval/pairs/{best}'),
    )

  selecting = 'rewards/accuracies rewards/margins'
  _assert_selects(stage, selecting, 'logps/chosen loss/sigmoid')


def _apart(first=100, second=500, **other):
  """`sft` selects on the tasks of `a` after the first; `grpo` reports."""
  entry = schema.EnvEntry(env=schema.Arithmetic(**other))
  return {
    'sft': _stage('pass_rate', prompts=first),
    'grpo': schema.Stage(envs={'b': entry}, eval=schema.Eval(prompts=second)),
  }


def test_later_stages_do_not_report_the_tasks_that_selected():
  with pytest.raises(ValueError, match=r'config\.grpo\.eval\.prompts'):
    checks._check_apart(_apart())
  for stages in (_apart(second=100), _apart(max_operand=9)):
    checks._check_apart(stages)
