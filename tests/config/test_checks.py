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
    ('sft.optim.warmup_steps', '1000'),
    ('sft.lora', {'rank': 2}),
    ('rm.lora.rank', '2'),
    ('dpo.envs', '{}'),
    ('dpo.kind', 'dpo'),
    ('sft.envs.a.group_size', '2'),
    ('grpo.envs.a.group_size', '1'),
    # Who learns from whose rollouts.
    ('grpo.envs.a.sampler', 'dataset'),
    ('grpo.envs.a.sampler', {'type': 'frozen', 'model': 'stage:sft'}),
    ('sft.envs.a.sampler', 'policy'),
    ('sft.envs.a.sampler', {'type': 'frozen', 'model': 'policy'}),
    ('sft.envs.a.sampler', {'type': 'frozen', 'model': 'ema:0.9'}),
    ('sft.envs.a.sampler', {'type': 'frozen', 'model': 'stage:grpo'}),
    ('grpo.envs.a.sampler.max_tokens', '256'),
    # Algorithms.
    *(
      (ALGORITHM, x)
      for x in (
        'opd',
        {'type': 'opd', 'reference': 'policy'},
        {'type': 'opd', 'reference': 'stage:grpo'},
        {'type': 'opd', 'reference': 'ema:0.0'},
        {'type': 'opd', 'reference': 'snapshot:1'},
        {'type': 'opd', 'reference': 'http://127.0.0.1:8000/v1'},
        {'type': 'opd', 'reference': {'type': 'endpoint', 'name': 'teacher'}},
        {'type': 'opd', 'reference': {'type': 'x'}},
        {'type': 'grpo', 'kl_beta': 0.1, 'reference': 'stage:x'},
        {'type': 'grpo', 'kl_beta': 0.1, 'reference': 'ema:2'},
        {'type': 'echo', 'roles': {}},
        {'type': 'echo', 'roles': {'user': {'alpha': 0.0}}},
        {'type': 'echo', 'filter': {'import_path': 'json:nothing'}},
        {'type': 'opsd', 'demonstration': 'no:f'},
        {'type': 'gpro'},
        '["grpo"]',
        {'type': 'custom', 'import_path': 'x'},
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
    ('grpo.loss.rl', {'type': 'custom', 'import_path': 'math:pi'}),
    ('grpo.loss.rl', {'type': 'clip', 'aggregation': 'constant'}),
    ('dpo.loss.preference.reference', 'stage:rm'),
    ('dpo.loss.preference.reference', 'policy'),
    ('dpo.loss.preference.label_smoothing', '0.5'),
    # Rewards.
    *(
      (REWARDS, {'x': x})
      for x in (
        {'model': 'stage:x'},
        {'model': 'stage:sft'},
        {'model': 'stage:grpo'},
        {'model': 'policy'},
        {'model': 'init'},
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
    ('sft.envs', {'pairs': {}}),
    # Pairs.
    ('dpo.pairs.samples', '1'),
    ('dpo.pairs.eval_fraction', '1.0'),
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

SQL = schema.Sql(difficulties=('easy',))
UNGRADED = schema.Trl(factory='m:f')
CUSTOM = schema.CustomEnv(import_path='m:f')
ROWS = schema.Rows(path='p', eval_fraction=0.5)


def _stage(best, env=None, rewards=None, **options):
  entry = schema.EnvEntry(env=env or schema.Arithmetic(), rewards=rewards or {})
  return schema.Stage(
    envs={'a': entry}, eval=schema.Eval(best=f'eval/{best}/a', **options)
  )


@pytest.mark.parametrize(
  ('env', 'selecting', 'refused'),
  [
    (
      None,
      'pass_rate sampled_pass_rate sampled_format_rate reward sampled_reward '
      'pass@8 maj@4',
      'passrate accuracy nll pass@3 pass@x kl errors truncated entropy length',
    ),
    (schema.AlphabetSort(), 'pass@8', 'maj@8'),
    (ROWS, 'nll token_accuracy', 'nlll pass_rate'),
    (UNGRADED, 'reward sampled_reward own', 'pass_rate pass@8'),
    (dataclasses.replace(UNGRADED, correct_at=1.0), 'pass_rate', ''),
    (CUSTOM, 'own nll maj@8', 'stop/eos kl'),
    (SQL, 'progress pass_rate_easy', 'pass_rate_hard steps'),
  ],
)
def test_weights_are_selected_by_a_measure_that_can_be_best(
  env, selecting, refused
):
  for best in selecting.split():
    checks._check_best(_stage(best, env, ks=(4,)), 'config.grpo')
  for best in refused.split():
    with pytest.raises(ValueError, match=r'^config\.grpo\.eval\.best'):
      checks._check_best(_stage(best, env, ks=(4,)), 'config.grpo')


@pytest.mark.parametrize(
  ('samples', 'best', 'ok'),
  [
    (0, 'sampled_pass_rate', False),
    (0, 'pass@1', False),
    (1, 'maj@1', False),
    (1, 'sampled_pass_rate', True),
    (2, 'pass@2', True),
  ],
)
def test_measures_of_samples_need_samples(samples, best, ok):
  stage = _stage(best, samples=samples)
  if ok:
    checks._check_best(stage, 'config.grpo')
    return
  with pytest.raises(ValueError, match='eval.best'):
    checks._check_best(stage, 'config.grpo')


@pytest.mark.parametrize(
  ('function', 'best', 'ok'),
  [
    ({'fn': 'm:f'}, 'short', True),
    ({'fn': 'm:f'}, 'long', False),
    ({'fn': 'm:f', 'judge': 'stage:sft'}, 'short', False),
    ({'model': 'stage:sft'}, 'short', False),
  ],
)
def test_reward_functions_select_where_evaluations_call_them(
  function, best, ok
):
  rewards = {'short': schema.RewardFn(**function)}
  for kind in ('reward', 'sampled_reward'):
    stage = _stage(f'{kind}/{best}', rewards=rewards)
    if ok:
      checks._check_best(stage, 'config.grpo')
      continue
    with pytest.raises(ValueError, match='eval.best'):
      checks._check_best(stage, 'config.grpo')


@pytest.mark.parametrize(
  ('best', 'ok'),
  [
    ('rewards/accuracies', True),
    ('rewards/margins', True),
    ('logps/chosen', False),
    ('loss/sigmoid', False),
  ],
)
def test_metrics_of_pairs_that_select(best, ok):
  stage = schema.Stage(
    kind='preference',
    pairs=schema.MadePairs(eval_fraction=0.2),
    eval=schema.Eval(best=f'eval/pairs/{best}'),
  )
  if ok:
    checks._check_best(stage, 'config.dpo')
    return
  with pytest.raises(ValueError, match='eval.best'):
    checks._check_best(stage, 'config.dpo')


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
