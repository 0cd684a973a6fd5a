"""Hints about unknown keys: other libraries' names, near spellings."""

import pytest

from posttrain import config
from posttrain.config import names


@pytest.mark.parametrize(
  ('key', 'meant'),
  [
    ('learning_rate', 'config.grpo.optim.lr or config.sft.optim.lr'),
    ('grpo.learning_rate', 'config.grpo.optim.lr'),
    ('actor_rollout_ref.rollout.n', 'envs.arithmetic.group_size'),
    ('grpo.beta', 'config.grpo.envs.arithmetic.algorithm.kl_beta'),
    ('output_dir', '--workdir'),
    ('grpo.optim.wieght_decay', 'config.grpo.optim.weight_decay?'),
    ('grpo.envs.arithmetic.rewards.x.fn', "'x'"),
    ('grpo.envs.arithmetic.env.nosuch', 'its options are'),
  ],
)
def test_an_unknown_key_names_what_it_may_mean(key, meant):
  node = config.load('configs/arithmetic.py')
  with pytest.raises(ValueError, match='has no option') as error:
    config.override(node, key, '1')
  assert meant in str(error.value)


@pytest.mark.parametrize(
  ('name', 'flags', 'meant'),
  [
    ('num_train_epochs', 'config', '--config=RECIPE:DIR,data.jsonl,epochs=3'),
    ('max_new_tokens', 'config', '--config.STAGE.envs.ENV.sampler.max_tokens'),
    ('data', 'config', '--config=RECIPE:DIR,data.jsonl,module:function'),
    ('output_dir', 'config workdir', '--workdir'),
    ('output-dir', 'checkpoint folder', '--folder'),
    ('model', 'checkpoint port', '--checkpoint'),
    ('learning_rate', 'checkpoint folder', ''),
  ],
)
def test_flags_that_are_keys(name, flags, meant):
  assert names.flag(name, flags.split()) == meant
