"""The commands as functions: the same checks, callables as rewards."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from posttrain import api, evaluate, schema
from posttrain.config import python_options
from posttrain.metrics import writers
from posttrain.util import imports
from tests import qwen3

SMALL = {
  'grpo.init': 'random',
  'grpo.steps': 1,
  'grpo.optim.warmup_steps': 0,
  'grpo.eval.prompts': 2,
  'grpo.eval.samples': 0,
  'grpo.eval.max_tokens': 8,
  'grpo.envs.arithmetic.sampler.max_tokens': 8,
  'compilation_cache': None,
  'metrics.progress': False,
}

KEPT = 'posttrain.util.imports:KEPT'


def test_load_has_the_checks_of_the_command():
  run = api.load('configs/arithmetic.py:tiny', {'seed': 3, 'grpo.steps': 17})
  assert (run.seed, run.stages['grpo'].steps) == (3, 17)
  options = {'grpo.loss.rl': {'type': 'ipo', 'threshold': 0.3}, 'mesh.data': 1}
  run = api.load('configs/arithmetic.py:tiny', options)
  assert run.stages['grpo'].loss.rl == schema.Ipo(threshold=0.3)
  with pytest.raises(ValueError, match=r'mean config.grpo.steps'):
    api.load('configs/arithmetic.py:tiny', {'grpo.stepz': 7})
  with pytest.raises(ValueError, match='config.grpo.steps must be'):
    api.load('configs/arithmetic.py:tiny', {'grpo.steps': 'many'})


@pytest.mark.parametrize('value', [np.float32(0.5), np.array(0.5), 0.5])
def test_options_may_be_scalars_of_arrays(value):
  options = {'grpo.optim.lr': value, 'grpo.steps': np.int64(17)}
  options['grpo.loss.rl'] = {'type': 'ipo', 'threshold': value}
  options['grpo.eval.ks'] = (np.int32(2),)
  stage = api.load('configs/arithmetic.py:tiny', options).stages['grpo']
  assert (stage.optim.lr, stage.steps, stage.eval.ks) == (0.5, 17, (2,))
  assert stage.loss.rl == schema.Ipo(threshold=0.5)


def test_options_may_be_paths(tmp_path):
  file = tmp_path / 'rows.jsonl'
  file.write_text('{"prompt": "a", "completion": "b"}')
  options = {'sft.envs': {'mine': {'env': {'type': 'rows', 'path': file}}}}
  run = api.load(pathlib.Path('configs/arithmetic_sft.py'), options)
  assert run.stages['sft'].envs['mine'].env.path == str(file)


def test_load_takes_reward_functions(tmp_path):
  """The recipe needs none then."""
  file = tmp_path / 'rows.jsonl'
  file.write_text('{"prompt": "a"}')

  def short(completions, **columns):
    return [-float(len(text)) for text in completions]

  spec = f'grpo:small,{file}'
  rewards = api.load(spec, rewards={'brief': short}).stages['grpo'].envs['data']
  (name, reward), *_ = rewards.rewards.items()
  assert name == 'brief' and imports.function(reward.fn, 'fn') is short
  with pytest.raises(ValueError, match='in Python by `rewards` of api.load'):
    api.load(spec)
  with pytest.raises(ValueError, match=r"one of \['grpo.data'\]"):
    api.load(spec, rewards={'grpo.x.brief': short})


def test_functions_of_one_name_stay_two_within_a_call():
  def factory(value):
    def constant(completions, **columns):
      return [value for _ in completions]

    return constant

  functions = [factory(float(i)) for i in range(3)]
  run = api.load(
    'configs/arithmetic.py:tiny',
    {'stages': ('grpo',), 'grpo.init': 'random'},
    rewards=dict(zip('abcd', (*functions, functions[1]), strict=True)),
  )
  rewards = run.stages['grpo'].envs['arithmetic'].rewards
  values = [imports.function(x.fn, 'fn')([''])[0] for x in rewards.values()]
  assert values == [0.0, 1.0, 2.0, 1.0]
  assert rewards['b'].fn == rewards['d'].fn == f'{KEPT}.constant_2'
  assert api.import_path(functions[2]) == f'{KEPT}.constant'


class Env:
  """A custom environment, as far as checks read it."""

  name, max_turns = 'env', 1

  def __init__(self, name):
    self.name = name

  def source(self, split, seed):
    raise NotImplementedError

  def make(self, task):
    raise NotImplementedError


@pytest.fixture
def grpo(tmp_path):
  """Returns the recipe grpo with prompts."""
  file = tmp_path / 'rows.jsonl'
  file.write_text('{"prompt": "a"}')
  return f'grpo:small,{file}'


def test_options_may_be_functions_and_classes():
  def short(completions, **columns):
    return [0.0 for _ in completions]

  first = short

  def short(completions, **columns):
    return [1.0 for _ in completions]

  entry = {
    'env': {'type': 'custom', 'import_path': Env},
    'algorithm': {'type': 'grpo'},
    'sampler': {'type': 'policy', 'max_tokens': 8},
    'group_size': 4,
    'rewards': {'a': {'fn': first}},
  }
  key = 'config.grpo.envs.e.rewards.a.fn'
  options = {'grpo.envs': {'e': entry}}
  run = api.load('grpo:small', options)
  assert run.stages['grpo'].envs['e'].env.import_path == f'{__name__}:Env'
  # In a dict and as a value; two of one name, as in `options` and `rewards`.
  for kwargs in ({'options': options | {key: short}}, {'rewards': [short]}):
    run = api.load('grpo:small', **({'options': options} | kwargs))
    for reward in run.stages['grpo'].envs['e'].rewards.values():
      assert imports.function(reward.fn, 'fn') is short is not first
  assert python_options.overrides({'a': (first, [short, {'b': Env}])}, {}) == [
    ('a', f"('{KEPT}.short', ['{KEPT}.short_2', {{'b': '{__name__}:Env'}}])")
  ]
  with pytest.raises(ValueError, match='config.grpo.init: a function must be'):
    api.load('grpo:small', {'grpo.init': lambda x: x})
  with pytest.raises(ValueError, match='config.grpo.optim must hold plain'):
    api.load('grpo:small', {'grpo.optim': {'lr': {1, 2}}})


def test_rewards_may_be_a_function_or_a_list(grpo, tmp_path):
  def short(completions, **columns):
    return [0.0 for _ in completions]

  def polite(completions, **columns):
    return [1.0 for _ in completions]

  for rewards in (short, [short, polite], (polite, short)):
    loaded = api.load(grpo, rewards=rewards).stages['grpo'].envs['data'].rewards
    assert imports.function(loaded['short'].fn, 'fn') is short
    assert ('polite' in loaded) == (rewards is not short)
  run = api.load(grpo, rewards=short)
  for wrong, text in (
    ([short, short], "got two of 'short'; use a dict"),
    ([lambda x: x], 'lambda.*; use a dict'),
    ('rewards:short', "got 'rewards:short'; write {'NAME': FUNCTION}"),
    ({1: short}, 'texts as names: got 1; write'),
  ):
    with pytest.raises(ValueError, match=text):
      api.load(grpo, rewards=wrong)
    with pytest.raises(ValueError, match=text):
      api.train(run, str(tmp_path / 'run'), rewards=wrong)
  with pytest.raises(ValueError, match='samples no answers; use grpo'):
    api.load('sft:small,tiny', rewards={'r': short})


@pytest.mark.parametrize(
  'call, text',
  [
    (
      lambda: api.load('sft:tiny', ['grpo.steps=3']),
      r"options must be .*: got \['grpo.steps=3'\]; write {'grpo.steps': 3}",
    ),
    (lambda: api.load('sft:tiny', {3: 4}), 'must have keys .*: got 3; write'),
    (lambda: api.load(123), 'recipe must be a name or a path: got 123; write'),
    (
      lambda: api.train('sft', 'run'),
      r"run must be .*: got 'sft'; write train\(load\('sft'\), ...\)",
    ),
    (lambda: api.train(3, 'run'), r"got 3; write train\(load\('RECIPE'\)"),
    (lambda: api.evaluate('run', options='x'), "options must be .*: got 'x'"),
  ],
)
def test_arguments_of_another_type(call, text):
  with pytest.raises(ValueError, match=text):
    call()


def test_keys_of_errors_and_dicts_of_stages():
  run = api.load('sft:tiny', {'config.sft.steps': 3})
  assert run.stages['sft'].steps == 3
  for value, option in (
    ({'steps': 3}, "'sft.steps': 3"),
    ({'optim': {'lr': 0.1}}, "'sft.optim.lr': 0.1"),
    ({}, "'sft.OPTION': VALUE"),
  ):
    text = f'whole stage: to change one option write {{{option}}}'
    with pytest.raises(ValueError, match=f'config.sft.envs must .*; .*{text}'):
      api.load('sft:tiny', {'sft': value})
  for options in ({'sft.optim': {'lr': -1.0}}, {'model': {'layers': 0}}):
    with pytest.raises(ValueError, match='must be') as caught:
      api.load('sft:tiny', options)
    assert 'stage' not in str(caught.value)


def test_errors_of_evaluate_name_its_arguments(tmp_path):
  (tmp_path / 'config.json').write_text(json.dumps(qwen3.CONFIG))
  (tmp_path / 'model.safetensors').touch()
  with pytest.raises(ValueError, match='^config=FILE must be given'):
    api.evaluate(str(tmp_path))


def test_the_import_has_no_jax():
  code = 'import sys, posttrain.api; sys.exit("jax" in sys.modules)'
  assert subprocess.run([sys.executable, '-c', code]).returncode == 0


def test_paths_of_callables():
  def short(completions, **kwargs):
    return [0.0 for _ in completions]

  assert api.import_path(evaluate.measure) == 'posttrain.evaluate:measure'
  path = api.import_path(short)
  assert path == f'{KEPT}.short'
  assert imports.function(path, 'fn') is short
  first = short

  def short(completions, **kwargs):  # as in a cell that is run again
    return [1.0 for _ in completions]

  assert imports.function(api.import_path(short), 'fn') is short is not first
  for wrong in (lambda x: x, 3):
    with pytest.raises(ValueError, match='must be callable and have a name'):
      api.import_path(wrong)


@pytest.mark.parametrize('key', ['sft.arithmetic.mine', 'grpo.x.mine', 'a.b'])
def test_rewards_are_for_sampled_environments(key, tmp_path):
  run = api.load('configs/arithmetic.py:tiny')
  with pytest.raises(ValueError, match=r"one of \['grpo.arithmetic'\]"):
    api.train(run, str(tmp_path), rewards={key: evaluate.measure})


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """Returns (workdir, final evaluation, what the reward function was given)."""
  workdir = str(tmp_path_factory.mktemp('api') / 'run')
  given = []

  def letters(completions, **kwargs):
    texts = [messages[-1]['content'] for messages in completions]
    given.extend(texts)
    return [float(len(text)) for text in texts]

  run = api.load('configs/arithmetic.py:tiny', SMALL)
  run = dataclasses.replace(run, stages={'grpo': run.stages['grpo']})
  final = api.train(run, workdir, rewards={'letters': letters})
  return workdir, final, given


def test_train_calls_the_reward_function(trained):
  workdir, final, given = trained
  assert final['stage'] == 'grpo' and final['step'] == 1
  row = writers.read(f'{workdir}/metrics.jsonl')[-1]
  lengths = [len(text) for text in given]
  assert len(lengths) == 2 + 16 + 2  # evaluations have two questions
  assert row['optim/grad_norm'] > 0  # groups differ in their rewards
  assert row['rollout/reward/arithmetic'] == pytest.approx(
    np.mean(lengths[2:18])
  )
  assert final['eval/reward/letters/arithmetic'] == np.mean(lengths[18:])


def test_answers_evaluation_and_export(trained, tmp_path):
  workdir, final, _ = trained
  loaded = api.policy(workdir)
  prompts = ['What is 1 + 2?', [{'role': 'user', 'content': 'What is 3 + 4?'}]]
  both = api.generate(loaded, prompts, max_tokens=4, temperature=1.0, seed=5)
  assert len(both) == 2
  for answer in both:
    assert answer.ids.shape == answer.logprobs.shape and len(answer.ids) <= 4
    assert answer.stop_reason in ('eos', 'max_tokens')
    assert (answer.logprobs < 0).all()
  alone = api.generate(
    loaded, prompts[:1], max_tokens=4, temperature=1.0, seed=5
  )
  np.testing.assert_array_equal(alone[0].ids, both[0].ids)
  with pytest.raises(ValueError, match='prompts must be a list'):
    api.generate(loaded, 'What is 1 + 2?')

  measured = api.evaluate(workdir)
  key = 'eval/pass_rate/arithmetic'
  assert measured.values[key] == final[key]
  assert 'pass_rate' in str(measured)

  with pytest.raises(ValueError, match='format must be one of'):
    api.export(workdir, str(tmp_path / 'x'), format='gguf')
  api.export(workdir, str(tmp_path / 'out'), dtype='float32')
  assert (tmp_path / 'out' / 'model.safetensors').exists()
