"""Recipes: they build, `:tiny` is smaller, and the full size never reads it."""

import ast
import glob
import json
import pathlib

import pytest

from configs import machinery
from posttrain import schema
from posttrain.config import checks
from posttrain.config import load as config

SHARED = ('__init__.py', 'common.py', 'machinery.py')
RECIPES = sorted(
  path
  for path in glob.glob('configs/**/*.py', recursive=True)
  if not path.endswith(SHARED)
)
# Recipes of a HuggingFace directory.
PRETRAINED = ('configs/gsm8k_sft.py', 'configs/gsm8k_grpo.py')
PRETRAINED += ('configs/sql_llm.py',)
FROM_SCRATCH = [path for path in RECIPES if path not in PRETRAINED]
# Keys that make a stage larger.
SIZES = ('steps', 'batch.prompts_per_step', 'rollout.slots', 'eval.prompts')


@pytest.fixture
def folder(tmp_path):
  """A HuggingFace directory as far as recipes read it."""
  values = {
    'model_type': 'qwen3',
    'vocab_size': 300,
    'hidden_size': 64,
    'intermediate_size': 128,
    'num_hidden_layers': 2,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'head_dim': 16,
    'hidden_act': 'silu',
    'rms_norm_eps': 1e-6,
    'rope_theta': 1e6,
    'tie_word_embeddings': True,
    'attention_bias': False,
  }
  (tmp_path / 'config.json').write_text(json.dumps(values))
  return tmp_path


def _build(spec):
  run = config.build(config.load(spec))
  checks.check(run)
  json.dumps(config.to_dict(run))
  return run


def _assert_smaller(tiny, full):
  assert list(tiny.stages) == list(full.stages)
  for name, stage in full.stages.items():
    small = config.to_dict(tiny)[name]
    large = config.to_dict(full)[name]
    for key in SIZES:
      parent, _, leaf = key.rpartition('.')
      values = [node[parent] if parent else node for node in (small, large)]
      assert values[0][leaf] <= values[1][leaf], f'{name}.{key}'
    assert small['steps'] < large['steps'], name
    assert list(tiny.stages[name].envs) == list(stage.envs)


@pytest.mark.parametrize('path', FROM_SCRATCH)
def test_tiny_is_smaller(path):
  tiny, full = _build(f'{path}:tiny'), _build(path)
  _assert_smaller(tiny, full)
  assert full.model == schema.PRESETS['small']
  assert tiny.model == schema.PRESETS['tiny']


@pytest.mark.parametrize('path', PRETRAINED)
def test_tiny_with_a_directory_is_smaller_and_keeps_its_model(path, folder):
  tiny, full = _build(f'{path}:{folder},tiny'), _build(f'{path}:{folder}')
  _assert_smaller(tiny, full)
  assert tiny.model == full.model
  assert tiny.tokenizer == full.tokenizer
  assert _build(f'{path}:tiny').model == schema.PRESETS['tiny']


@pytest.mark.parametrize('path', PRETRAINED)
def test_lora_changes_rank_and_learning_rate_alone(path, folder):
  full = config.to_dict(_build(f'{path}:{folder}'))
  lora = config.to_dict(_build(f'{path}:{folder},lora'))
  for name in full['stages']:
    assert full[name]['lora'].pop('rank') == 0
    assert lora[name]['lora'].pop('rank') == 32
    rate = 10 * full[name]['optim'].pop('lr')
    assert lora[name]['optim'].pop('lr') == pytest.approx(rate)
  assert lora == full


@pytest.mark.parametrize('path', PRETRAINED)
@pytest.mark.parametrize('argument', ['', ':lora', ':/no/such', ':tiny,lora'])
def test_a_pretrained_recipe_needs_a_directory(path, argument):
  with pytest.raises(ValueError, match='must be a HuggingFace direct'):
    config.load(path + argument)


@pytest.mark.parametrize('path', FROM_SCRATCH)
def test_an_unknown_argument_is_refused(path):
  with pytest.raises(ValueError, match="ARGUMENT must be ''.*: got 'small'"):
    config.load(f'{path}:small')


@pytest.mark.parametrize('path', RECIPES)
def test_tiny_is_read_by_the_last_statement_alone(path):
  """The full size is written without `x if tiny else y`."""
  tree = ast.parse(pathlib.Path(path).read_text())
  names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
  assert 'tiny' not in names
  (get_config,) = (
    node
    for node in tree.body
    if isinstance(node, ast.FunctionDef) and node.name == 'get_config'
  )
  if path == 'configs/sql_echo.py':  # sql.py reads its argument
    return
  last, end = get_config.body[-2:]
  assert ast.unparse(last.test) in ("argument == 'tiny'", "'tiny' in words")
  assert ast.unparse(end) == 'return config'
  reads = [
    node
    for node in ast.walk(get_config)
    if isinstance(node, ast.Constant) and node.value == 'tiny'
  ]
  assert len(reads) == 2  # the check of the argument, and the last statement


def test_arguments_are_read_as_words():
  machinery.check_argument('', 'tiny')
  machinery.check_argument('tiny', 'sums', 'tiny')
  with pytest.raises(ValueError, match="be '', 'sums' or 'tiny': got 'x'"):
    machinery.check_argument('x', 'sums', 'tiny')
  assert machinery.parse_argument('tiny', ('tiny', 'lora')) == (None, {'tiny'})
  assert machinery.parse_argument('/,lora', ('tiny', 'lora')) == ('/', {'lora'})


def test_unset_keeps_the_type_of_a_key():
  node = machinery.node(schema.Eval(every=5))
  machinery.unset(node, 'every')
  assert node.every is None
  with pytest.raises(TypeError):
    node.every = 'often'
  node.every = 7
