"""What spans nodes: impossible combinations, and keys that nothing reads."""

import json

import pytest

from configs import machinery
from posttrain import config, schema
from posttrain.config import checks

GRPO = schema.EnvEntry(
  algorithm=schema.Grpo(), sampler=schema.Policy(), group_size=4
)


def _resolve(*overrides):
  """Two stages, each with an environment `a`: `sft`, then `grpo`."""
  node = machinery.config_dict(
    schema.Run(
      stages={
        'sft': schema.Stage(envs={'a': schema.EnvEntry()}),
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
  leash = {'type': 'grpo', 'kl_beta': 0.1, 'reference': 'stage:sft'}
  run = _resolve(
    ('grpo.envs.a.algorithm', leash),
    ('grpo.loss.ref_kl', {'estimator': 'k3'}),
    ('grpo.loss.rl', {'type': 'clip', 'high': 0.3}),
    ('grpo.rollout.max_errors', '3'),
    ('sft.rollout.slots', '3'),
    # Warmup is counted in updates, of which there are two a step.
    ('grpo.updates_per_rollout', '2'),
    ('grpo.optim.warmup_steps', '1500'),
  )
  assert run.stages['grpo'].envs['a'].algorithm.kl_beta == 0.1


@pytest.mark.parametrize(
  ('key', 'value', 'message'),
  [
    ('sft.init', 'stage:x', r'config\.sft\.init must name an earlier'),
    ('sft.init', 'stage:grpo', r'earlier stage: .*has none before'),
    ('grpo.init', 'stage:grpo', r"grpo\.init must .* one of \('sft',\)"),
    (
      'grpo.init',
      'stage:x',
      r'--config\.grpo\.init=DIR, with its config\.model',
    ),
    (
      'grpo.envs.a.rewards',
      {'x': {'model': 'stage:x'}},
      r'has none that trains a reward model before it; .*model=RUN$',
    ),
    ('sft.envs', {'a/b': {}}, 'must be named with letters'),
    ('sft.envs', {'pairs': {}}, r'envs\.pairs must have another name: eval/p'),
    (
      'sft.optim.warmup_steps',
      '1000',
      "warmup_steps must be < the stage's 1000 updates: got 1000",
    ),
    ('sft.envs.a.env.max_factor', '5', 'nothing reads it where ops has'),
    ('sft.envs.a.ratio', '2.0', 'where there is one environment'),
    ('sft.envs.a.group_size', '2', 'group_size must be 1 with a dataset'),
    # Who learns from whose rollouts.
    (
      'grpo.envs.a.sampler',
      'dataset',
      "config.grpo.envs.a.sampler.type must be 'policy' for algorithm 'gr",
    ),
    (
      'grpo.envs.a.sampler',
      {'type': 'frozen', 'model': 'stage:sft'},
      "sampler.type must be 'policy' for .*'frozen'.* 'sft' imitates them",
    ),
    (
      'sft.envs.a.sampler',
      'policy',
      "sft.envs.a.sampler.type must be 'dataset' or 'frozen' for algorithm",
    ),
    (
      'grpo.envs.a.sampler.max_tokens',
      '256',
      'sampler.max_tokens must be below batch.row_tokens=256',
    ),
    # What nothing reads.
    (
      'sft.loss.rl',
      {'type': 'clip', 'high': 0.3},
      'config.sft.loss.rl must be left at .* no algorithm trains rl',
    ),
    (  # An environment that replaces those of a recipe of rl.
      'grpo',
      {'envs': {'mine': {}}, 'loss': {'rl': {'type': 'clip'}}},
      "config.grpo.envs.mine.algorithm must .*'clip': got 'sft', the default; ",
    ),
    ('sft.loss.rl.low', '0.3', 'sft.loss.rl.low must be left at 0.2: got'),
    (
      'grpo.loss.ref_kl',
      {'estimator': 'k3'},
      'config.grpo.loss.ref_kl.estimator must be .* no algorithm has a kl',
    ),
    (
      'grpo.loss.rl',
      {'type': 'custom', 'import_path': 'no.such:loss'},
      r'config.grpo.loss.rl.import_path must be importable: got .no.such',
    ),
    (
      'grpo.loss.rl',
      {'type': 'custom', 'import_path': 'math:pi'},
      'config.grpo.loss.rl.import_path must name a function',
    ),
    (
      'grpo.loss.rl',
      {'type': 'clip', 'aggregation': 'constant'},
      'config.grpo.loss.rl.constant_tokens must be > 0 where aggregation',
    ),
    # Whose references.
    (
      'grpo.envs.a.algorithm',
      {'type': 'grpo', 'kl_beta': 0.1, 'reference': 'stage:grpo'},
      r'a\.algorithm\.reference must name an earlier stage: got '
      r"'stage:grpo', expected one of \('sft',\)",
    ),
    (
      'grpo.envs.a.algorithm',
      {'type': 'grpo', 'kl_beta': 0.1, 'reference': 'stage:x'},
      "got 'stage:x'",
    ),
    (
      'grpo.envs.a.algorithm',
      {'type': 'opd', 'reference': 'stage:grpo'},
      r'config.grpo.envs.a.algorithm.reference must name an earlier stage',
    ),
    (
      'sft.envs.a.sampler',
      {'type': 'frozen', 'model': 'stage:grpo'},
      r'config.sft.envs.a.sampler.model must name an earlier .*has none before',
    ),
    (
      'grpo.envs.a.rewards',
      {'x': {'fn': 'json:loads', 'judge': 'stage:y'}},
      'config.grpo.envs.a.rewards.x.judge must name an earlier stage',
    ),
    # What no algorithm can be.
    (
      'grpo.envs.a.algorithm',
      {'type': 'opd'},
      'config.grpo.envs.a.algorithm.reference must name a teacher',
    ),
    (
      'grpo.envs.a.algorithm',
      'opd',
      'config.grpo.envs.a.algorithm.reference must name a teacher',
    ),
    (
      'grpo.envs.a.algorithm',
      {'type': 'opd', 'reference': 'policy'},
      'config.grpo.envs.a.algorithm.reference must be another model',
    ),
    (
      'grpo.envs.a.algorithm',
      {'type': 'opd', 'reference': {'type': 'endpoint', 'name': 'teacher'}},
      'config.grpo.envs.a.algorithm.reference.base_url must begin with',
    ),
    (
      'grpo.envs.a.algorithm.reference',
      {'type': 'endpoint', 'name': 'x', 'base_url': 'http://h/v1'},
      'config.grpo.envs.a.algorithm.reference must be left at',
    ),
    (
      'grpo.envs.a.algorithm',
      {'type': 'opd', 'reference': {'type': 'x'}},
      r"algorithm.reference.type must be one of \('endpoint',\): got 'x'",
    ),
    (
      'grpo.envs.a.algorithm',
      {'type': 'echo', 'roles': {}},
      'config.grpo.envs.a.algorithm.roles must enable one of',
    ),
    (
      'grpo.envs.a.algorithm',
      {'type': 'echo', 'roles': {'user': {'alpha': 0.0}}},
      'config.grpo.envs.a.algorithm.roles.user.alpha must be > 0: got 0.0',
    ),
    (
      'grpo.envs.a.algorithm.length_penalty',
      {'type': 'linear', 'output_weight': -1.0},
      'algorithm.length_penalty.output_weight must be >= 0: got -1.0',
    ),
    (
      'grpo.envs.a.algorithm',
      {'type': 'gpro'},
      r"algorithm.type must be one of \('sft', 'grpo', .*: got 'gpro'",
    ),
    (
      'grpo.envs.a.algorithm',
      {'type': 'custom', 'import_path': 'x'},
      "algorithm.import_path must be an import path 'package.module:f",
    ),
    (
      'sft.envs.a.sampler',
      {'type': 'frozen', 'model': 'policy'},
      'config.sft.envs.a.sampler.model must be frozen',
    ),
    (
      'sft.envs.a.sampler',
      {'type': 'frozen', 'model': 'ema:0.9'},
      'config.sft.envs.a.sampler.model must be frozen',
    ),
    (
      'grpo.envs.a.algorithm',
      {'type': 'grpo', 'kl_beta': 0.1, 'reference': 'ema:2'},
      "algorithm.reference must be 'init', 'policy', 'ema:0.99', .*'ema:2'",
    ),
    (
      'grpo.envs.a.algorithm',
      '["grpo"]',
      r"algorithm.type must be one of .*: got \['grpo'\]",
    ),
    (
      'grpo.envs.a.algorithm',
      {'type': 'opd', 'reference': 'ema:0.0'},
      'algorithm.reference must be',
    ),
    (
      'grpo.envs.a.algorithm',
      {'type': 'opd', 'reference': 'snapshot:1'},
      'algorithm.reference must be',
    ),
    (
      'grpo.envs.a.algorithm',
      {'type': 'opd', 'reference': 'http://127.0.0.1:8000/v1'},
      'algorithm.reference must be a node for a model on a server',
    ),
    (
      'grpo.envs.a.rewards',
      {'env': {'weight': 0.0}},
      'config.grpo.envs.a.rewards.env.weight must be finite and not 0',
    ),
    (
      'grpo.envs.a.rewards',
      {'a/b': {'fn': 'json:loads'}},
      'config.grpo.envs.a.rewards.a/b must be named with letters',
    ),
    (
      'grpo.envs.a.rewards',
      {'x': {'fn': 'tests.rollout.judged:takes', 'judge': 'stage:sft'}},
      r"rewards.x.fn must take its kwargs: got \['judge'\]",
    ),
    # Functions that are not there, or take other things.
    (
      'grpo.envs.a.algorithm',
      {'type': 'custom', 'import_path': 'no:f'},
      'config.grpo.envs.a.algorithm.import_path must be importable',
    ),
    (
      'grpo.envs.a.algorithm',
      {
        'type': 'custom',
        'import_path': 'tests.algorithms.credits:one',
        'kwargs': {'scale': 2},
      },
      r"must be a function of \(inputs, \*\*kwargs\): got .*'scale'",
    ),
    (
      'grpo.envs.a.algorithm',
      {'type': 'echo', 'filter': {'import_path': 'json:nothing'}},
      'config.grpo.envs.a.algorithm.filter.import_path must',
    ),
    (
      'grpo.envs.a.algorithm',
      {'type': 'opsd', 'demonstration': 'no:f'},
      'config.grpo.envs.a.algorithm.demonstration must be importable',
    ),
    (
      'grpo.envs.a.rewards',
      {'x': {'fn': 'tests.rollout.judged:takes', 'kwargs': {'scael': 1}}},
      r"config.grpo.envs.a.rewards.x.fn must take its kwargs: got \['scael",
    ),
    # Who grades.
    (
      'sft.envs.a.rewards',
      {'x': {'fn': 'json:loads'}},
      'config.sft.envs.a.rewards must be left empty: .* replays a data set',
    ),
    (
      'grpo.envs.a.judge',
      'stage:sft',
      "config.grpo.envs.a.judge must be left out: .*'arithmetic' grades",
    ),
  ],
)
def test_mistakes_are_one_clear_line(key, value, message):
  with pytest.raises(ValueError, match=message) as error:
    _resolve((key, value))
  assert '\n' not in str(error.value)


def test_a_key_that_no_schedule_reads_is_refused():
  with pytest.raises(ValueError, match='nothing reads it where schedule is'):
    _resolve(
      ('sft.optim.schedule', 'constant'), ('sft.optim.final_lr_fraction', '0.5')
    )


def test_a_number_of_workers_without_workers_is_refused():
  run = _resolve(
    ('grpo.rollout.workers', 'ray'), ('grpo.rollout.num_workers', '2')
  )
  assert run.stages['grpo'].rollout.num_workers == 2
  with pytest.raises(ValueError, match="num_workers .* workers is 'threads'"):
    _resolve(('grpo.rollout.num_workers', '2'))


def test_sampler_is_mode_requires_one_update_per_rollout():
  mode = ('grpo.loss.rl.sampler_is_mode', 'token_truncate')
  assert _resolve(mode).stages['grpo'].loss.rl.sampler_is_mode == mode[1]
  with pytest.raises(
    ValueError,
    match=r"config.grpo.loss.rl.sampler_is_mode must be 'none' "
    'where updates_per_rollout is 2: got .token_truncate',
  ):
    _resolve(mode, ('grpo.updates_per_rollout', '2'))


@pytest.mark.parametrize('name', ['grpo', 'rloo', 'max_rl'])
def test_a_group_of_one_rollout_cannot_train(name):
  size = ('grpo.envs.a.group_size', '1')
  with pytest.raises(ValueError, match='group_size must be at least 2 for alg'):
    _resolve(('grpo.envs.a.algorithm', {'type': name}), size)
  with pytest.warns(UserWarning, match='group_size should be at least 2'):
    _resolve(('grpo.envs.a.algorithm', {'type': name, 'kl_beta': 0.1}), size)


def test_a_group_of_one_rollout_may_train():
  size = ('grpo.envs.a.group_size', '1')
  for algorithm in ({'type': 'reward'}, {'type': 'max_rl', 'baseline': False}):
    _resolve(('grpo.envs.a.algorithm', algorithm), size)
  with pytest.warns(UserWarning, match='group_size should be at least 2'):
    _resolve(('grpo.envs.a.algorithm', {'type': 'echo'}), size)


@pytest.mark.parametrize('name', ['grpo', 'reward', 'echo'])
def test_groups_without_credit_are_drawn_again_where_there_is_credit(name):
  draws = ('grpo.batch.max_draws', '100')
  run = _resolve(('grpo.envs.a.algorithm', {'type': name}), draws)
  assert run.stages['grpo'].batch.max_draws == 100


@pytest.mark.parametrize(
  'overrides',
  [
    [('sft.batch.max_draws', '100')],
    [
      ('grpo.envs.a.algorithm', {'type': 'opd', 'reference': 'stage:sft'}),
      ('grpo.batch.max_draws', '100'),
    ],
  ],
)
def test_draws_that_nothing_reads_are_refused(overrides):
  with pytest.raises(
    ValueError, match=r'batch.max_draws must be .* no algorithm trains rl'
  ):
    _resolve(*overrides)
