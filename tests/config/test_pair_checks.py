"""Cross-checks of stages on pairs, and of reward models as rewards."""

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


def _resolve(*overrides):
  """`sft`, then `dpo`, `rm` and `grpo`, which asks `rm`."""
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
    ('dpo.loss.preference', 'simpo'),
    ('dpo.lora.rank', '4'),
    ('rm.pairs', {'type': 'file', 'path': 'p', 'too_long': 'drop'}),
    ('rm.envs', '{}'),
    ('rm.loss.ranking.center_coef', '0.01'),
    (
      'grpo.envs.a.rewards',
      {'env': {'weight': 2.0}, 'learned': {'model': 'stage:rm'}},
    ),
  )
  assert run.stages['dpo'].loss.preference == schema.SimPo()
  assert run.stages['grpo'].envs['a'].rewards['learned'].model == 'stage:rm'
  _resolve(('dpo.loss.preference', {'type': 'kto', 'reference': 'stage:sft'}))
  _resolve(
    ('dpo.pairs', {'type': 'made', 'eval_prompts': 5, 'eval_fraction': 0.1}),
    ('rm.pairs', {'type': 'file', 'path': 'p', 'eval_path': 'q'}),
  )


@pytest.mark.parametrize(
  ('key', 'value', 'message'),
  [
    # What a stage of another kind would read.
    ('sft.pairs.prompts', '7', "sft.pairs.prompts must .* kind is 'tokens'"),
    ('sft.loss.preference.beta', '0.3', 'sft.loss.preference.beta must be le'),
    ('dpo.loss.ranking.center_coef', '0.1', "where kind is 'preference'"),
    ('rm.loss.preference.beta', '0.3', "where kind is 'ranking'"),
    ('dpo.loss.rl', 'clip', 'config.dpo.loss.rl'),
    ('dpo.envs.a.group_size', '2', 'dpo.envs.a.group_size must be left at 1'),
    ('dpo.envs.a.sampler', 'policy', 'dpo.envs.a.sampler must be left at'),
    (
      'dpo.envs.a.rewards',
      {'x': {'fn': 'json:loads'}},
      'config.dpo.envs.a.rewards must be left at {}',
    ),
    ('rm.eval.samples', '3', 'rm.eval.samples .*ranking.*generates no text'),
    ('rm.lora.rank', '2', r"rm\.lora\.rank must be 0 where kind is 'ranking'"),
    # Which stage may stand for which model.
    ('dpo.loss.preference.reference', 'stage:rm', 'reference must name an ear'),
    (
      'grpo.init',
      'stage:rm',
      "a stage that trains a policy: got 'stage:rm', of",
    ),
    (
      'grpo.envs.a.rewards.learned.model',
      'stage:sft',
      "learned.model must name a stage of kind 'ranking': got 'stage:sft', of",
    ),
    ('grpo.envs.a.rewards.learned.model', 'stage:grpo', 'name an earlier stag'),
    ('grpo.envs.a.rewards.learned.model', 'policy', 'model must be frozen'),
    ('grpo.envs.a.rewards.learned.model', 'init', "model must be 'stage:NAME'"),
    (
      'grpo.envs.a.rewards.learned.fn',
      'json:loads',
      'fn must be None if model is set',
    ),
    ('grpo.envs.a.rewards.learned.judge', 'stage:sft', 'judge must be left ou'),
    # Nodes' own.
    ('dpo.loss.preference.reference', 'policy', 'reference must be frozen'),
    ('dpo.loss.preference.label_smoothing', '0.5', r'must be in \[0, 0.5\)'),
    ('dpo.pairs.samples', '1', r'dpo.pairs.samples must be in \[2, 1000\]'),
    ('dpo.pairs.eval_fraction', '1.0', r'eval_fraction must be in \[0, 1\)'),
    ('dpo.pairs', {'type': 'file'}, 'dpo.pairs.path must name a file'),
    (
      'dpo.pairs',
      {'type': 'made', 'eval_prompts': 5, 'eval_fraction': 0.5},
      'dpo.pairs.eval_fraction must be left at 0.1: got 0.5; nothing reads it '
      'where eval_prompts is set',
    ),
    (
      'rm.pairs',
      {'type': 'file', 'path': 'p', 'eval_path': 'q', 'eval_fraction': 0.0},
      'rm.pairs.eval_fraction must be left at 0.1: .* where eval_path is set',
    ),
    ('dpo.envs', '{}', 'dpo.envs must hold an environment'),
    ('dpo.kind', 'dpo', 'config.dpo.kind must be one of'),
  ],
)
def test_mistakes_are_one_clear_line(key, value, message):
  with pytest.raises(ValueError, match=message) as error:
    _resolve((key, value))
  assert '\n' not in str(error.value)
