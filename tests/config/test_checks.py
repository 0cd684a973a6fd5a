"""Impossible options, of a node and of several: an error that names the key."""

import dataclasses
import json

import pytest

from configs import machinery
from posttrain import config, main, schema
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
  _resolve(
    (ALGORITHM, {'type': 'grpo', 'kl_beta': 0.1, 'reference': 'stage:sft'}),
    ('dpo.loss.preference', {'type': 'kto', 'reference': 'stage:sft'}),
    ('dpo.lora.rank', '4'),
    ('rm.pairs', {'type': 'file', 'path': 'p', 'eval_path': 'q'}),
    ('rm.envs', '{}'),
    (REWARDS, {'env': {'weight': 2.0}, 'learned': {'model': 'stage:rm'}}),
  )


@pytest.mark.parametrize(
  ('key', 'value'),
  [
    *(('sft.init', x) for x in ('stage:x', 'stage:grpo')),
    ('grpo.init', 'stage:rm'),
    ('sft.lora', {'rank': 2}),
    ('dpo.envs', '{}'),
    ('sft.envs.a.group_size', '2'),
    # Options of `rollout.in_flight` without it.
    *(
      (f'grpo.rollout.{key}', value)
      for key, value in (
        ('hold_tokens', '8'),
        ('max_hold', '3'),
        ('keep_cache', 'true'),
      )
    ),
    # Who learns from whose rollouts.
    ('grpo.envs.a.sampler', 'dataset'),
    ('grpo.envs.a.sampler', {'type': 'frozen', 'model': 'stage:sft'}),
    ('sft.envs.a.sampler', {'type': 'frozen', 'model': 'ema:0.9'}),
    ('grpo.envs.a.sampler.max_tokens', '256'),
    # Algorithms.
    *(
      (ALGORITHM, x)
      for x in (
        'opd',
        {'type': 'opd', 'reference': 'ema:0.0'},
        {'type': 'opd', 'reference': {'type': 'endpoint', 'name': 'teacher'}},
        {'type': 'echo', 'roles': {}},
        {'type': 'echo', 'filter': {'import_path': 'json:nothing'}},
        {
          'type': 'custom',
          'import_path': 'tests.algorithms.credits:one',
          'kwargs': {'scale': 2},
        },
      )
    ),
    # Critics.
    ('grpo.critic.kind', 'head'),
    ('dpo.critic.kind', 'model'),
    # Losses.
    ('grpo.loss.rl', {'type': 'custom', 'import_path': 'no.such:loss'}),
    ('grpo.loss.rl', {'type': 'clip', 'aggregation': 'constant'}),
    ('dpo.loss.preference.reference', 'stage:rm'),
    # Rewards.
    *(
      (REWARDS, {'x': x})
      for x in (
        {'model': 'stage:sft'},
        {'model': 'stage:rm', 'fn': 'json:loads'},
        {'fn': TAKES, 'judge': 'stage:sft'},
        {'fn': TAKES, 'kwargs': {'scael': 1}},
      )
    ),
    (REWARDS, {'env': {'weight': 0.0}}),
    (REWARDS, {'a/b': {'fn': 'json:loads'}}),
    # Names of environments that metrics cannot have.
    ('sft.envs', {'a/b': {}}),
    # Pairs.
    ('dpo.pairs', {'type': 'file'}),
  ],
)
def test_what_is_impossible_is_refused_by_key(key, value):
  with pytest.raises(ValueError, match=rf'^config\.{key}') as error:
    _resolve((key, value))
  assert '\n' not in str(error.value)


def test_a_critic_needs_ppo_and_ppo_a_critic():
  ppo, kind = (ALGORITHM, {'type': 'ppo'}), 'grpo.critic.kind'
  for more in ([], [(kind, 'model'), ('grpo.lora.rank', '2')]):
    with pytest.raises(ValueError, match=rf'^config\.{kind} must be .head'):
      _resolve(ppo, *more)
  with pytest.raises(ValueError, match=r'^config\.grpo\.critic\.warmup_steps'):
    _resolve(ppo, (kind, 'head'), ('grpo.critic.warmup_steps', '1000'))
  _resolve(ppo, (kind, 'head'), ('grpo.lora.rank', '2'))


def test_a_group_of_one_rollout_may_train_without_its_reward():
  size = ('grpo.envs.a.group_size', '1')
  for algorithm in (
    {'type': 'max_rl', 'baseline': False},
    {'type': 'echo'},
    {'type': 'grpo', 'kl_beta': 0.1},
  ):
    _resolve((ALGORITHM, algorithm), size)


# --- eval.best ---------------------------------------------------------------


def _stage(best, env=None, **options):
  entry = schema.EnvEntry(env=env or schema.Arithmetic())
  return schema.Stage(envs={'a': entry}, eval=schema.Eval(best=best, **options))


def _is_refused(stage):
  problems = checks.problems(schema.Run(stages={'x': stage}))
  return any(key == 'x.eval.best' for key, *_ in problems)


@pytest.mark.parametrize(
  ('env', 'selecting', 'refused'),
  [
    (
      None,
      'pass_rate sampled_format_rate sampled_reward pass@8 maj@4 reward/short',
      'passrate pass@x kl errors entropy length',
    ),
    (schema.Rows(path='p', eval_fraction=0.5), 'nll token_accuracy', 'nlll'),
    (schema.Trl(factory='m:f'), 'reward own', ''),
    (schema.Sql(), 'progress pass_rate_easy', 'steps'),
  ],
)
def test_weights_are_selected_by_a_measure_that_can_be_best(
  env, selecting, refused
):
  for names, ok in ((selecting, True), (refused, False)):
    for name in names.split():
      assert _is_refused(_stage(f'eval/{name}/a', env)) != ok, name
  assert _is_refused(_stage('eval/pass_rate/b'))


def test_metrics_of_pairs_that_select():
  for best, ok in (('rewards/accuracies', True), ('logps/chosen', False)):
    selection = schema.Eval(best=f'eval/pairs/{best}')
    stage = schema.Stage(kind='preference', eval=selection)
    assert _is_refused(stage) != ok


@pytest.mark.parametrize(
  ('skip', 'reported', 'other', 'ok'),
  [
    (0, 500, {}, False),
    (0, 100, {}, True),
    (0, 500, {'max_operand': 9}, True),
    (299, 500, {}, False),
    (300, 500, {}, True),
  ],
)
def test_later_stages_do_not_report_the_tasks_that_selected(
  skip, reported, other, ok
):
  """`sft` selects on the tasks of `a` from 100 to 299."""
  entry = schema.EnvEntry(env=schema.Arithmetic(**other))
  stages = {
    'sft': _stage('eval/pass_rate/a', prompts=100),
    'grpo': schema.Stage(
      envs={'b': entry}, eval=schema.Eval(skip=skip, prompts=reported)
    ),
  }
  keys = [key for key, *_ in checks.problems(schema.Run(stages=stages))]
  assert keys == ([] if ok else ['grpo.eval.prompts'])


# --- trust --------------------------------------------------------------------

FOREIGN = 'subprocess:getoutput'


def run_of(**reward):
  entry = dataclasses.replace(GRPO, rewards={'x': schema.RewardFn(**reward)})
  return schema.Run(stages={'s': schema.Stage(envs={'a': entry})})


@pytest.mark.parametrize(
  'path',
  [
    FOREIGN,
    'posttrain.util.imports:importlib.import_module',
    'posttrain.rewards.numeric:_finite',
  ],
)
def test_functions_from_elsewhere_need_trust(path):
  with pytest.raises(ValueError, match='--trust_config') as error:
    checks.check_trust(run_of(fn=path), 'config.json')
  assert f'config.s.envs.a.rewards.x.fn {path!r}' in str(error.value)


def test_functions_made_for_configs_need_none():
  for path in (
    'posttrain.envs.sql.functions:reward_correctness',
    'configs.algorithms.custom:centered',
  ):
    assert checks.untrusted(run_of(fn=path)) == {}


def test_nothing_is_imported_before_the_refusal(tmp_path, monkeypatch):
  (tmp_path / 'bomb.py').write_text(
    "import pathlib\npathlib.Path('exploded').touch()\ndef f(): pass\n"
  )
  path = tmp_path / 'config.json'
  path.write_text(json.dumps(config.to_dict(run_of(fn='bomb:f'))))
  monkeypatch.syspath_prepend(str(tmp_path))
  monkeypatch.chdir(tmp_path)
  with pytest.raises(ValueError, match="rewards.x.fn 'bomb:f'"):
    main.load(str(path))
  assert not (tmp_path / 'exploded').exists()
  main.load(str(path), [], True)
  assert (tmp_path / 'exploded').exists()


def test_overrides_and_trust_config_are_the_users_own_word(capsys):
  run = run_of(fn=FOREIGN)
  checks.check_trust(run, 'config.json', [('s.envs.a.rewards.x.fn', FOREIGN)])
  node = json.dumps({'x': {'fn': FOREIGN}})
  checks.check_trust(run, 'config.json', [('s.envs.a.rewards', node)])
  assert not capsys.readouterr().err
  with pytest.raises(ValueError, match='--trust_config'):
    checks.check_trust(
      run, 'config.json', [('s.envs.a.rewards.x.weight', '2.0')]
    )
  checks.check_trust(run, 'config.json', trust=True)
  assert FOREIGN in capsys.readouterr().err


def test_servers_variables_programs_and_addresses_need_trust():
  endpoint = schema.Endpoint(
    name='m', base_url='http://h.example/v1', api_key_env='AWS_SECRET'
  )
  stage = schema.Stage(
    envs={
      'a': schema.EnvEntry(
        algorithm=schema.Opd(reference=endpoint), sampler=schema.Policy()
      ),
      'b': schema.EnvEntry(env=schema.OpenEnv(url='ws://h.example:1/ws')),
    },
    init='gs://evil/x',
  )
  run = schema.Run(
    stages={'s': stage},
    compilation_cache='/shared/compiled',
    tokenizer=schema.Tokenizer(path='x-y+z://evil'),
  )
  assert checks.untrusted(run) == {
    'config.compilation_cache': '/shared/compiled',
    'config.tokenizer.path': 'x-y+z://evil',
    'config.s.init': 'gs://evil/x',
    'config.s.envs.a.algorithm.reference.base_url': 'http://h.example/v1',
    'config.s.envs.a.algorithm.reference.api_key_env': 'AWS_SECRET',
    'config.s.envs.b.env.url': 'ws://h.example:1/ws',
  }
