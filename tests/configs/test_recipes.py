"""Recipes: they build, `:tiny` is smaller, and the full size never reads it."""

import dataclasses
import glob
import json

import pytest

from configs import arguments, common
from posttrain import config, main, schema, types
from posttrain.chat import rendering, tokenizers
from posttrain.config import checks
from posttrain.stage import preflight
from tests import qwen3

PUBLISHED = ['countdown', 'reasoning_gym', 'reverse', 'wordle']
SHARED = ('__init__.py', 'arguments.py', 'common.py', 'machinery.py')
RECIPES = sorted(
  path
  for path in glob.glob('configs/**/*.py', recursive=True)
  if not path.endswith(SHARED)
)
# Recipes of a HuggingFace directory.
PRETRAINED = ('configs/gsm8k_sft.py', 'configs/gsm8k_grpo.py')
PRETRAINED += ('configs/sql_llm.py',)
# Recipes for own data: of pairs, and of rows.
PAIRED = ('configs/dpo.py', 'configs/reward_model.py')
OWN = (*PAIRED, 'configs/sft.py', 'configs/grpo.py', 'configs/opd.py')
FROM_SCRATCH = [x for x in RECIPES if x not in (*PRETRAINED, *OWN)]
# Keys that make a stage larger.
SIZES = ('steps', 'batch.prompts_per_step', 'rollout.slots', 'eval.prompts')


@pytest.fixture
def folder(tmp_path):
  """A HuggingFace directory and data as far as recipes read them."""
  (tmp_path / 'config.json').write_text(json.dumps(qwen3.CONFIG))
  (tmp_path / 'data.jsonl').touch()
  return tmp_path


def _argument(path, folder):
  """The paths after a recipe's name."""
  if path not in OWN:
    return str(folder)
  further = {
    'configs/grpo.py': ',configs.grpo:short',
    'configs/opd.py': f',teacher={folder}',
  }
  return f'{folder},{folder}/data.jsonl{further.get(path, "")}'


def _build(spec):
  run = config.build(config.load(spec))
  checks.check(run)
  json.dumps(config.to_dict(run))
  return run


def _assert_smaller(tiny, full):
  assert list(tiny.stages) == list(full.stages)
  for name, stage in full.stages.items():
    small, large = (
      dataclasses.asdict(preflight.resolve_sizes(run.stages[name], 1, 1))
      for run in (tiny, full)
    )
    for key in SIZES:
      parent, _, leaf = key.rpartition('.')
      values = [node[parent] if parent else node for node in (small, large)]
      assert values[0][leaf] <= values[1][leaf], f'{name}.{key}'
    assert small['steps'] < large['steps'], name
    assert list(tiny.stages[name].envs) == list(stage.envs)
    # Every stage that writes text answers a suite.
    for suite in (tiny.stages[name].eval.suite, stage.eval.suite):
      assert 3 <= len(suite) <= 5 if stage.kind != 'ranking' else not suite


@pytest.mark.parametrize('path', FROM_SCRATCH)
def test_tiny_is_smaller(path):
  tiny, full = _build(f'{path}:tiny'), _build(path)
  _assert_smaller(tiny, full)
  assert full.model == schema.PRESETS['small']
  assert tiny.model == schema.PRESETS['tiny']
  # The suite needs no larger slots, and SQL's no piece of a word.
  renderer = rendering.load(tiny.tokenizer)
  for stage in tiny.stages.values():
    for prompt in stage.eval.suite:
      messages = [{'role': 'user', 'content': prompt}]
      ids = renderer.render(messages, add_generation_prompt=True).ids
      assert len(ids) + stage.eval.max_tokens <= stage.batch.row_tokens
      if 'sql_tokenizer' in (tiny.tokenizer.path or ''):
        assert len(ids) < len(prompt) / 2


@pytest.mark.parametrize('path', (*PRETRAINED, *OWN))
def test_tiny_with_a_directory_is_smaller_and_keeps_its_model(path, folder):
  argument = _argument(path, folder)
  tiny, full = _build(f'{path}:{argument},tiny'), _build(f'{path}:{argument}')
  _assert_smaller(tiny, full)
  assert tiny.model == full.model
  assert tiny.tokenizer == full.tokenizer
  assert _build(f'{path}:tiny').model == schema.PRESETS['tiny']


@pytest.mark.parametrize('name', PUBLISHED)
def test_tasks_that_others_publish_take_a_directory(name, folder):
  """Their start is the first evaluation with a pass rate that is given."""
  run, tiny = _build(f'{name}:{folder}'), _build(f'{name}:{folder},tiny')
  _assert_smaller(tiny, run)
  assert run.stages['sft'].init == run.tokenizer.path == str(folder)
  assert run.stages['grpo'].init == 'stage:sft'
  for stage, lr in zip(run.stages.values(), (1e-5, 1e-6), strict=True):
    assert stage.optim.lr == lr and stage.eval.max_tokens >= 64
  rule = run.stages['sft'].eval
  assert rule.best == f'eval/sampled_pass_rate/{name}'
  assert rule.stop_at == (0.05 if name == 'wordle' else 0.2)


@pytest.mark.parametrize('name', PUBLISHED)
def test_controls_share_the_start_of_grpo(name):
  run = _build(f'configs/{name}.py')
  types = []
  for arm in common.ARMS:
    control = _build(f'configs/{name}.py:{arm}')
    (entry,) = control.stages['grpo'].envs.values()
    types.append((entry.algorithm.type, entry.sampler.type, *entry.rewards))
    assert control.stages['grpo'].init == 'stage:sft'
    assert control.stages['grpo'].eval == run.stages['grpo'].eval
    stages = {**control.stages, 'grpo': run.stages['grpo']}
    assert dataclasses.replace(control, stages=stages) == run
  assert types == [
    ('grpo', 'policy', 'random'),
    ('reward', 'policy', 'rejection'),
    ('sft', 'dataset'),
  ]
  with pytest.raises(ValueError, match="must have one of .*: got 'sft,random'"):
    config.load(f'configs/{name}.py:sft,random')
  both = _build(f'configs/{name}.py:retention,sft').stages
  ratios = [x.envs['sums'].ratio for x in both.values()]
  assert ratios == [1, 0]  # taught, and measured alone
  assert both['grpo'].envs[name] == control.stages['grpo'].envs[name]


def test_a_marked_letter_of_wordle_is_one_id():
  tokenizer = tokenizers.load(_build('wordle').tokenizer)
  text = 'cXrYaGnXeX'
  ids = tokenizer.encode(text)
  assert len(ids) == 5 and tokenizer.decode(ids) == text
  assert len(tokenizer.encode('crane')) == 5
  assert not set(ids) & set(tokenizer.encode('crane'))


def test_rewards_of_controls():
  rollouts = []
  for i in range(400):
    prompt = ({'role': 'user', 'content': 'q'},)
    task = types.Task(id=str(i // 8), env='e', prompt=prompt)
    messages = (*prompt, {'role': 'assistant', 'content': str(i % 8)})
    score = types.Score(0.5, correct=i % 3 == 0)
    rollouts.append(types.Rollout(i, task, messages, (), score, 'eos'))
  drawn = common.drawn(rollouts)
  assert drawn == common.drawn(rollouts[::-1])[::-1]
  assert {sum(drawn[i : i + 8]) for i in range(0, 400, 8)} > {3, 4, 5}
  assert 170 < sum(drawn) < 230
  assert common.correct(rollouts) == [i % 3 == 0 for i in range(400)]


def test_gsm8k_is_asked_in_the_words_of_verl(folder):
  run = _build(f'configs/gsm8k_grpo.py:{folder},verl')
  instruction = run.stages['grpo'].envs['gsm8k'].env.instruction
  assert instruction.endswith('output the final answer after "####".')


@pytest.mark.parametrize(
  'path', [x for x in (*PRETRAINED, *OWN) if x != 'configs/reward_model.py']
)
def test_lora_changes_rank_and_learning_rate_alone(path, folder):
  argument = _argument(path, folder)
  full = config.to_dict(_build(f'{path}:{argument}'))
  lora = config.to_dict(_build(f'{path}:{argument},lora'))
  for name in full['stages']:
    assert full[name]['lora'].pop('rank') == 0
    assert lora[name]['lora'].pop('rank') == 32
    rate = 10 * full[name]['optim'].pop('lr')
    assert lora[name]['optim'].pop('lr') == pytest.approx(rate)
  assert lora == full


@pytest.mark.parametrize('path', (*PRETRAINED, *OWN))
@pytest.mark.parametrize('argument', ['', ':/no/such', ':tiny,lora'])
def test_a_pretrained_recipe_needs_a_directory(path, argument):
  with pytest.raises(
    ValueError,
    match='the recipe.s name must .* HuggingFace|directory must exist',
  ):
    config.load(path + argument)


@pytest.mark.parametrize('path', PAIRED)
def test_recipes_take_a_directory_and_files_in_any_order(path, folder):
  _, pairs = _argument(path, folder).split(',')
  held_out = folder / 'held_out.parquet'
  held_out.touch()
  for model, data in ((folder, pairs), (pairs, folder)):
    run = _build(f'{path}:{model},{data},{held_out}')
    (stage,) = run.stages.values()
    assert stage.pairs.path == pairs
    assert stage.pairs.eval_path == str(held_out)
    assert stage.init == run.tokenizer.path == str(folder)
  (stage,) = _build(f'{path}:{pairs},tiny').stages.values()
  assert stage.pairs.path == pairs and stage.init == 'random'


@pytest.mark.parametrize('path', ['configs/sft.py', 'configs/grpo.py'])
def test_own_rows_hold_out_a_tenth_or_a_file(path, folder):
  argument = _argument(path, folder)
  (stage,) = _build(f'{path}:{argument}').stages.values()
  env = stage.envs['data'].env
  assert (env.path, env.eval_path) == (f'{folder}/data.jsonl', None)
  assert env.eval_fraction == 0.1
  other = folder / 'b.csv'
  other.touch()
  (stage,) = _build(f'{path}:{argument},{other}').stages.values()
  env = stage.envs['data'].env
  assert (env.eval_path, env.eval_fraction) == (str(other), 0.0)


@pytest.mark.parametrize(
  ('files', 'argument', 'data', 'held_out'),
  [
    # Shards are one data set, none of which is held out.
    ('x-0-of-2 x-1-of-2', '{}/x-0-of-2,{}/x-1-of-2', 'x-0-of-2,x-1-of-2', None),
    (
      'x-0-of-2 x-1-of-2 y',
      '{}/x-0-of-2,{}/x-1-of-2,{}/y',
      'x-0-of-2,x-1-of-2',
      'y',
    ),
    ('x-0-of-2 x-1-of-2', '{}/x-0-of-2', 'x-0-of-2', None),
    ('x y z', '{}/*', '*', None),
    ('x y z', '{}', '', None),
    ('train-0 test-0', '{}', '', ''),
    ('train-0 test-0', '{}/train-0', 'train-0', None),
  ],
)
@pytest.mark.parametrize('path', ['configs/sft.py', 'configs/dpo.py'])
def test_several_files_are_one_data_set(
  tmp_path, path, files, argument, data, held_out
):
  def place(name: str | None) -> str | None:
    ending = '.jsonl' if name else ''
    if name is None:
      return None
    return ','.join(f'{tmp_path / x}{ending}' for x in name.split(','))

  for name in files.split():
    (tmp_path / f'{name}.jsonl').touch()
  parts = [
    part.format(tmp_path) + '.jsonl' * (part != '{}')
    for part in argument.split(',')
  ]
  run = _build(f'{path}:{",".join(parts)},tiny')
  (stage,) = run.stages.values()
  node = stage.pairs if path == 'configs/dpo.py' else stage.envs['data'].env
  assert (node.path, node.eval_path) == (place(data), place(held_out))


@pytest.mark.parametrize('path', ['configs/sft.py', 'configs/dpo.py'])
def test_data_may_be_the_name_of_a_tfds_data_set(path, folder, monkeypatch):
  """Its version is kept, so that newer ones change nothing."""
  monkeypatch.setenv('TFDS_DATA_DIR', str(folder))
  data_set = folder / 'chats' / '1.0.0'
  data_set.mkdir(parents=True)
  (data_set / 'dataset_info.json').touch()
  run = _build(f'{path}:tfds:chats:test[:9],{folder},tfds:chats')
  (stage,) = run.stages.values()
  node = stage.pairs if path == 'configs/dpo.py' else stage.envs['data'].env
  assert node.path == 'tfds:chats:1.0.0:test[:9]'
  assert node.eval_path == 'tfds:chats:1.0.0'
  with pytest.raises(
    ValueError, match='tfds:x must name one TFDS data set in '
  ):
    config.load(f'{path}:{folder},tfds:x')


def test_a_preset_and_several_reward_functions(folder, monkeypatch):
  monkeypatch.chdir(folder)
  run = _build('configs/sft.py:small,data.jsonl')
  assert run.model == schema.PRESETS['small'] and run.tokenizer.path is None
  assert run.stages['sft'].init == 'random'
  assert run.stages['sft'].envs['data'].env.path == f'{folder}/data.jsonl'
  # A recipe may name any function.
  functions = 'configs.grpo:short,os.path:isabs'
  rewards = _rewards(f'{functions},data.jsonl,{folder}')
  assert {k: x.fn for k, x in rewards.items()} == {
    'short': 'configs.grpo:short',
    'isabs': 'os.path:isabs',
  }


def test_reward_functions_of_one_name_are_told_apart(folder):
  """By their modules, so that both are in the sum."""
  argument = _argument('configs/sft.py', folder)
  node = config.load(f'grpo:{argument},a:score,os.path:isabs,b:score')
  rewards = config.build(node).stages['grpo'].envs['data'].rewards
  assert rewards.keys() == {'a_score', 'isabs', 'b_score'}
  with pytest.raises(ValueError, match="'a:score' beside another .* 'a_score'"):
    config.load(f'grpo:{argument},a:score,a:score')


def test_a_reward_model_is_a_part(folder):
  argument = _argument('configs/sft.py', folder)
  for name in ('a', 'b'):
    (folder / name / 'rm').mkdir(parents=True)
  (reward,) = _rewards(f'{argument},reward={folder}/a/rm').items()
  assert reward == ('learned', schema.RewardFn(model=f'{folder}/a/rm'))
  both = f'reward={folder}/a/rm,reward={folder}/b'
  rewards = _rewards(f'{argument},{both},configs.grpo:short')
  assert rewards.keys() == {'short', 'rm_learned', 'b_learned'}
  with pytest.raises(ValueError, match=f"'reward={folder}/c'"):
    config.load(f'grpo:{argument},reward={folder}/c')


def _rewards(argument):
  run = main.load(f'grpo:{argument}')
  return run.stages['grpo'].envs['data'].rewards


def test_rewards_may_be_in_the_config_alone(folder):
  """Without any, answers to rows have no reward."""
  argument = _argument('configs/sft.py', folder)
  with pytest.raises(ValueError, match='config.grpo.envs.data.rewards must'):
    main.load(f'grpo:{argument}')
  rewards = '{"short": {"fn": "configs.grpo:short"}}'
  main.load(f'grpo:{argument}', [('grpo.envs.data.rewards', rewards)])


@pytest.mark.parametrize(
  ('recipe', 'argument', 'named'),
  [
    ('dpo', '{folder}', 'data'),
    ('dpo', '{file}', 'a model'),
    ('dpo', '{folder},{file},smal', "'smal'; did you mean small?"),
    ('dpo', '{folder},,{file}', 'empty part'),
    ('dpo', '{folder},small,{file}', 'one model'),
    ('opd', '{folder},{file}', 'one teacher'),
    ('opd', '{folder},{file},teacher={folder}2', "teacher={folder}2'"),
    ('sft', '{folder},{file},epochs=', "'epochs='"),
    ('grpo', '{folder},epochs=2', 'epochs= once'),
    ('dpo', '{folder},{file},epochs=0', 'epochs= above 0'),
    ('grpo', '{file},small,a:', "'a:'"),
    ('sft', '{file},{file},{file},tiny', 'two data sets'),
    ('sft', '{folder}/dat.jsonl', 'did you mean {folder}/data.jsonl?'),
    ('sft', 'mine/rows,small', 'hf download mine/rows'),
  ],
)
def test_what_is_missing_in_an_argument_is_named(
  recipe, argument, named, folder
):
  names = {'folder': folder, 'file': folder / 'data.jsonl'}
  with pytest.raises(ValueError, match=arguments.NAME) as error:
    config.load(f'{recipe}:{argument.format(**names)}')
  assert named.format(**names) in str(error.value)


@pytest.mark.parametrize(
  ('overrides', 'steps'), [((), 9), ((('batch.prompts_per_step', '10'),), 27)]
)
def test_epochs_are_counted_in_steps(overrides, steps, folder):
  file, other = folder / 'data.jsonl', folder / 'other.jsonl'
  for path in (file, other):
    path.write_text('{"prompt": "a", "completion": "b"}\n' * 100)
  for recipe in ('sft', 'dpo', 'reward_model'):
    spec = f'{recipe}:{folder},{file},epochs=3'
    (stage,) = main.load(spec, overrides).stages.values()
    assert stage.steps == steps
    assert stage.optim.warmup_steps < steps
  (stage,) = main.load(f'sft:{folder},{file},{other},epochs=.5').stages.values()
  assert stage.steps == 2
  (stage,) = main.load(f'sft:{file},epochs=3,tiny', overrides).stages.values()
  assert stage.steps > 2


@pytest.mark.parametrize(
  ('overrides', 'warmup_steps'),
  [
    ({'steps': '20'}, 10),
    ({'steps': '5'}, 0),
    ({'sft.steps': '10', 'updates_per_rollout': '1'}, 1),
    ({'steps': '8', 'optim.warmup_steps': '7'}, 7),
  ],
)
def test_a_short_stage_has_a_short_warm_up(overrides, warmup_steps):
  run = main.load('arithmetic_sft', [*overrides.items()])
  assert run.stages['sft'].optim.warmup_steps == warmup_steps


@pytest.mark.parametrize(
  ('teacher', 'reference'),
  [
    ('{folder}', '{folder}'),
    ('http://h:1/v1', schema.Endpoint(base_url='http://h:1/v1')),
    ('http://h/v1#a', schema.Endpoint(name='a', base_url='http://h/v1')),
  ],
)
def test_a_teacher_is_a_model_or_a_server(teacher, reference, folder):
  teacher = teacher.format(folder=folder)
  run = main.load(f'opd:{folder},{folder}/data.jsonl,teacher={teacher}')
  if isinstance(reference, str):
    reference = reference.format(folder=folder)
  assert run.stages['opd'].envs['data'].algorithm.reference == reference


def test_held_out_rows_are_others(folder):
  file = folder / 'data.jsonl'
  for path in ('dpo', 'sft'):
    with pytest.raises(ValueError, match='another than the first: got .* tw'):
      config.load(f'{path}:{folder},{file},{file}')


def test_an_environment_takes_the_place_of_grpos_data(folder):
  with pytest.raises(ValueError, match='config.grpo.envs.data.env.path must'):
    main.load(f'grpo:{folder}')
  env = (
    '{"own": {"env": {"type": "reverse_text"}, "algorithm": {"type": "grpo"}, '
    '"sampler": {"type": "policy"}, "group_size": 2}}'
  )
  run = main.load(f'grpo:{folder}', [('grpo.envs', env)])
  assert list(run.stages['grpo'].envs) == ['own']
  assert run.stages['grpo'].init == str(folder)


@pytest.mark.parametrize('name', ['sft:tiny', 'configs/algorithms/opd.py:tiny'])
def test_recipes_are_found_from_any_folder(name, tmp_path, monkeypatch):
  expected = config.to_dict(_build(name))
  monkeypatch.chdir(tmp_path)
  assert config.to_dict(_build(name)) == expected
  for wrong in ('nothing', 'configs/../../x'):
    with pytest.raises(ValueError, match='--config'):
      config.load(wrong)
