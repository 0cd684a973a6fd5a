"""Hints about unknown keys: other libraries' names, near spellings, lists."""

import random
import re

import pytest
from ml_collections import config_dict

from configs import machinery
from posttrain import main, schema
from posttrain.config import aliases, hints
from posttrain import config
from posttrain.config.aliases import values
from tests.util import test_spelling

FLAGS = {f'--{name}' for name in main.Flags.__dataclass_fields__}


def _full():
  """Returns a config in which each key of the table exists."""
  rows = schema.Rows(path='rows.jsonl')
  overlong = schema.Overlong()
  entry = schema.EnvEntry(
    env=rows,
    algorithm=schema.Echo(kl_beta=0.1, length_penalty=overlong),
    sampler=schema.Policy(),
    rewards={'NAME': schema.RewardFn('a:b')},
    group_size=2,
  )
  pair = schema.PairFile(path='pairs.jsonl')
  simpo = schema.Loss(preference=schema.SimPo())
  stages = {
    'rl': schema.Stage(envs={'ENV': entry}, loss=schema.Loss(schema.Clip())),
    'dpo': schema.Stage(kind='preference', pairs=pair),
    'simpo': schema.Stage(kind='preference', pairs=pair, loss=simpo),
    'rm': schema.Stage(kind='ranking', pairs=pair),
  }
  return machinery.config_dict(schema.Run(stages=stages))


def _has(node, key):
  for part in key.split('.'):
    if not isinstance(node, config_dict.ConfigDict) or part not in node:
      return False
    node = node[part]
  return True


def _error(node, key, value='1'):
  with pytest.raises(ValueError) as error:
    config.override(node, key, value)
  return str(error.value)


@pytest.mark.parametrize('row', aliases.ROWS, ids=lambda row: row.key)
def test_each_alias_leads_to_a_key(row):
  node = _full()
  if row.key.startswith('--'):
    assert row.key in FLAGS
  elif row.key.startswith('STAGE.'):
    stages = [x for x in node.stages if node[x].kind in row.kinds]
    key = row.key.removeprefix('STAGE.')
    assert any(_has(node[name], key) for name in stages)
  else:
    assert _has(node, row.key)
  assert row.equal or row.note


def test_each_alias_is_in_the_error_of_its_name():
  """In the root and in a stage; never where the name is a key of ours."""
  node = _full()
  for name, entries in aliases.by_name().items():
    for _, row in entries:
      kind = row.kinds[0]
      stage = next(x for x in node.stages if node[x].kind == kind)
      assert not _has(node[stage], name)
      text = _error(node, f'{stage}.{name}')
      key = row.key.replace('STAGE', f'config.{stage}').partition('.NAME')[0]
      shown = key if '.' in key else f'config.{key}'
      if key in FLAGS:
        shown = key
      elif not row.key.startswith('STAGE'):
        shown = f'config.{key}'
      assert shown in text or '{}' not in row.note and not row.equal, text
      assert name in text and '\n' not in text and len(text) < 700


def test_every_library_of_the_issue_has_its_names():
  for library, names in {
    'TRL': 'learning_rate num_train_epochs per_device_train_batch_size '
    'num_generations beta max_completion_length',
    'prime-rl': 'algo teacher training_mode advantage observations group_norm',
    'verl': 'rollout.n train_batch_size adv_estimator ppo_mini_batch_size',
    'other libraries': 'epochs batch_size',
  }.items():
    for name in names.split():
      assert library in [x for x, _ in aliases.by_name()[name]]


@pytest.mark.parametrize(
  ('key', 'words'),
  [
    ('learning_rate', "TRL's learning_rate is config.sft.optim.lr or config.g"),
    ('grpo.learning_rate', "TRL's learning_rate is config.grpo.optim.lr"),
    ('actor_rollout_ref.rollout.n', "verl's rollout.n is config.sft.envs.ar"),
    ('grpo.beta', "TRL's beta is config.grpo.envs.arithmetic.algorithm.kl_b"),
    ('lr', 'did you mean config.sft.optim.lr or config.grpo.optim.lr? The st'),
    ('optim.lr', 'config.sft.optim.lr or config.grpo.optim.lr? The stages are'),
    ('gpro.optim.lr', 'did you mean config.grpo.optim.lr? The stages are sft'),
    ('rl.optim.lr', "config has no stage 'rl': the stages are sft, grpo"),
    ('trainer.lr', 'sft.optim.lr or config.grpo.optim.lr? The stages are sft'),
    ('nothing', 'the stages are sft, grpo, the shared options are checkpoin'),
    ('grpo.nothing', 'its options are batch, envs, eval, init, kind, lora'),
    ('grpo.every', 'did you mean config.grpo.eval.every?'),
    ('grpo.seed', 'did you mean config.seed?'),
    ('grpo.optim.wieght_decay', 'did you mean config.grpo.optim.weight_decay?'),
    ('grpo.wieght_decay', 'did you mean config.grpo.optim.weight_decay?'),
    ('grpo.learning_rte', "did you mean learning_rate? TRL's learning_rate is"),
    ('grpo.envs.gsm8k', "no environment 'gsm8k': it has arithmetic; a JSON"),
    ('grpo.envs.arithmetic.rewards.x.fn', "no reward 'x': it has none yet"),
    (
      'grpo.envs.arithmetic.algorithm.kwargs.temperature',
      "no argument 'temperature': it has scale; a JSON object replaces them",
    ),
    ('model.nothing', 'its options are activation, attention, attention_sof'),
  ],
)
def test_examples(key, words):
  node = config.load('configs/arithmetic.py')
  if 'kwargs' in key:
    custom = schema.Custom(import_path='a:b', kwargs={'scale': 1.0})
    with node.unlocked():
      node.grpo.envs.arithmetic.algorithm = machinery.node(custom)
  text = _error(node, key)
  assert words in text
  assert text.startswith('config')


@pytest.mark.parametrize(
  ('name', 'words'),
  [
    ('num_train_epochs', 'counterpart: --config.STAGE.steps counts batches'),
    ('output_dir', "TRL's output_dir is --workdir"),
    ('lr', 'did you mean --config.STAGE.optim.lr? (STAGE: such as'),
    ('max_new_tokens', '--config.STAGE.envs.ENV.sampler.max_tokens'),
    ('seed', 'did you mean --config.seed?'),
    ('loss_type', '--config.STAGE.loss.preference (kind of stage: preferen'),
    ('loss_type', '--config.STAGE.loss.rl.aggregation (kind of stage: tokens'),
    ('simpo_gamma', '--config.STAGE.loss.preference.gamma'),
    ('center_rewards_coefficient', '--config.STAGE.loss.ranking.center_coef'),
    ('model', '--config=grpo:DIR,data.jsonl,module:function'),
    ('data', '--config=grpo:DIR,data.jsonl,module:function'),
    ('train', '--config=grpo:DIR,data.jsonl,module:function'),
  ],
)
def test_flags_that_are_keys(name, words):
  assert words in hints.flag(name)


@pytest.mark.parametrize(
  'name', ['foo', 'path', 'type', 'lrr', 'checkpoint', 'optim']
)
def test_flags_that_may_be_anything_have_no_hint(name):
  assert hints.flag(name) == ''


@pytest.mark.parametrize(
  ('key', 'value', 'words'),
  [
    ('grpo.envs.arithmetic.algorithm', 'DrGRPO', 'rl.aggregation=constant'),
    ('grpo.envs.arithmetic.algorithm', 'dapo', 'grpo.batch.max_draws=N'),
    ('grpo.envs.arithmetic.algorithm', 'kto', '--config=dpo:DIR,pairs.jsonl'),
    ('grpo.envs.arithmetic.algorithm', 'gspo', '--config.grpo.loss.rl=gspo'),
    (
      'grpo.envs.arithmetic.algorithm',
      'REINFORCE++',
      '"scale_rewards": "batch"',
    ),
    ('grpo.loss.rl', 'dapo', '--config.grpo.loss.rl=clip'),
    ('grpo.loss.rl', 'clp', 'did you mean clip?'),
    ('grpo.envs.arithmetic.env', 'squad', '"type": "rows", "path": "FILE'),
    ('grpo.envs.arithmetic.env', 'gms8k', 'did you mean gsm8k?'),
  ],
)
def test_values_of_other_libraries(key, value, words):
  node = config.load('configs/arithmetic.py')
  with pytest.raises(ValueError, match=re.escape(words)):
    config.override(node, key, value)
    config.build(node)


def test_what_the_advice_on_values_names_exists():
  """Sets each key of the advice; else it must name a type or a recipe."""
  words = 'algorithm (grpo|reward|opd|opsd)|--config=(dpo|reward_model):'
  for leaf, meant in values._VALUES.items():
    path = {'rl': 'loss.rl'}.get(leaf, f'envs.arithmetic.{leaf}')
    for name in meant:
      node = config.load('configs/arithmetic.py')
      text = values.hint(f'config.grpo.{path}', name, ())
      pattern = r"--config\.(grpo\.[\w.]+)=('[^']*'|\w[\w.]*)"
      keys = re.findall(pattern, text.replace('=N', '=512'))
      assert keys or re.search(words, text), text
      for key, value in sorted(keys):
        config.override(node, key, value.strip("'"))
      config.build(node)


def test_the_defaults_that_advice_names_are_the_defaults():
  clip, grpo = schema.Clip(), schema.Grpo()
  assert (clip.high, clip.aggregation) == (0.28, 'token')
  assert grpo.scale_rewards == 'none'


def test_the_wrong_key_itself_is_no_advice():
  node = config.load('configs/arithmetic.py')
  config.override(node, 'grpo.batch', '{"row_token": 8}')
  with pytest.raises(ValueError, match=r'mean config\.grpo\.batch\.row_tokens'):
    config.build(node)


def test_places_that_nothing_reads_are_no_advice():
  node = _full()
  assert 'config.rl.loss' not in _error(node, 'rl.label_smoothing')
  text = _error(node, 'dpo.num_generations')
  assert text.endswith("has a counterpart only in stages of kind 'tokens'")
  assert 'beta1' not in _error(node, 'rm.beta')
  assert 'config.dpo.loss.preference.label_smoothing' in _error(
    node, 'dpo.label_smoothing'
  )


@pytest.mark.parametrize('name', test_spelling.FAR)
def test_far_words_are_never_misunderstood(name):
  """Advice names the word itself: as an option, or as another library's."""
  node = config.load('configs/arithmetic.py')
  if name in node or _has(node.grpo, name):
    return
  text = _error(node, f'grpo.{name}')
  if 'did you mean' in text:
    (key,) = re.findall(r'did you mean (\S+?)[?,]', text)
    assert key.endswith(f'.{name}') or name in key


def test_hints_of_random_keys_name_keys_that_exist():
  node, draw = _full(), random.Random(1)
  keys = [x for x in hints._flat(node) if x != 'stages']
  for _ in range(60):
    key = draw.choice(keys).split('.')
    i = draw.randrange(len(key))
    key[i] = test_spelling._edited(key[i] + 'q', draw) or 'q'
    if _has(node, '.'.join(key)):
      continue
    text = _error(node, '.'.join(key))
    for named in re.findall(r'config\.[\w.]*\w', text.partition(': ')[2]):
      if 'JSON' not in text and '--' not in text:
        assert _has(node, named.removeprefix('config.')), text


@pytest.mark.parametrize(
  ('key', 'value'), [('optim.lr', '0.5'), ('steps', '7'), ('eval.every', '3')]
)
def test_the_name_of_the_only_stage_may_be_left_out(key, value):
  short, long = (config.load('configs/sft.py:tiny') for _ in range(2))
  config.override(short, key, value)
  config.override(long, f'sft.{key}', value)
  assert config.build(short) == config.build(long)
  assert config.build(short) != config.build(config.load('configs/sft.py:tiny'))


def test_a_shared_key_is_not_the_stages():
  node = config.load('configs/sft.py:tiny')
  config.override(node, 'model.layers', '2')
  assert node.model.layers == 2 and node.sft.model is None


def test_the_name_may_be_left_out_where_one_stage_is_left():
  node = config.load('configs/arithmetic.py')
  config.override(node, 'stages', '("grpo",)')
  config.override(node, 'optim.lr', '0.25')
  assert node.grpo.optim.lr == 0.25
