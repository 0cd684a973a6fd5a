"""The commands as functions: the same checks, callables as rewards."""

import functools
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from posttrain import api, evaluate, schema
from posttrain.metrics import writers
from posttrain.util import imports
from tests.envs import echoes

SMALL = {
  'stages': ('grpo',),
  'grpo.init': 'random',
  'grpo.steps': 1,
  'grpo.optim.warmup_steps': 0,
  'grpo.eval.prompts': 2,
  'grpo.eval.samples': 0,
  'grpo.eval.max_tokens': 8,
  'grpo.envs.arithmetic.sampler.max_tokens': 8,
  'compilation_cache': None,
}


def test_load_has_the_checks_of_the_command():
  options = {'seed': 3, 'config.grpo.steps': 17}
  options['grpo.loss.rl'] = {'type': 'ipo', 'threshold': 0.3}
  run = api.load('configs/arithmetic.py:tiny', options)
  assert (run.seed, run.stages['grpo'].steps) == (3, 17)
  assert run.stages['grpo'].loss.rl == schema.Ipo(threshold=0.3)
  with pytest.raises(ValueError, match='config.grpo.steps'):
    api.load('configs/arithmetic.py:tiny', {'grpo.steps': 'many'})
  with pytest.raises(ValueError, match=r"rows.jsonl.*got \['train_dataset'\]"):
    api.load('sft:small', train_dataset=[{'prompt': 'a', 'completion': 'b'}])


@pytest.fixture
def file(tmp_path):
  path = tmp_path / 'rows.jsonl'
  path.write_text('{"prompt": "a", "completion": "b"}')
  return path


def test_options_may_be_paths_and_scalars_of_arrays(file):
  options = {'sft.envs': {'mine': {'env': {'type': 'rows', 'path': file}}}}
  options |= {'sft.optim.lr': np.array(0.5), 'sft.eval.ks': (np.int32(2),)}
  run = api.load(pathlib.Path('configs/arithmetic_sft.py'), options)
  stage = run.stages['sft']
  assert stage.envs['mine'].env.path == str(file)
  assert (stage.optim.lr, stage.eval.ks) == (0.5, (2,))


def constant(value):
  def short(completions, **columns):
    return [value for _ in completions]

  return short


# Two of one name, as in a cell that is run again.
FIRST, SHORT = constant(0.0), constant(1.0)


def test_options_may_be_functions_and_classes():
  entry = {
    'env': {'type': 'custom', 'import_path': echoes.Echo},
    'algorithm': {'type': 'grpo'},
    'sampler': {'type': 'policy'},
    'group_size': 4,
    'rewards': {'a': {'fn': FIRST}},
  }
  options = {'grpo.envs': {'e': entry}}
  run = api.load('grpo:small', options)
  assert run.stages['grpo'].envs['e'].env.import_path == (
    'tests.envs.echoes:Echo'
  )
  # In a dict and as a value; two of one name, as in `options` and `rewards`.
  value = {'config.grpo.envs.e.rewards.a.fn': SHORT}
  for kwargs in ({'options': options | value}, {'rewards': [SHORT]}):
    run = api.load('grpo:small', **({'options': options} | kwargs))
    for reward in run.stages['grpo'].envs['e'].rewards.values():
      assert imports.function(reward.fn, 'fn') is SHORT
  with pytest.raises(ValueError, match='config.sft.init'):
    api.load('sft:tiny', {'sft.init': {'x': object()}})


def test_rewards_may_be_a_function_a_list_or_a_dict(file, tmp_path):
  """The recipe needs none then."""
  spec = f'grpo:small,{file}'
  for rewards in (SHORT, [SHORT, imports.load], {'short': SHORT}):
    run = api.load(spec, rewards=rewards)
    loaded = run.stages['grpo'].envs['data'].rewards
    assert imports.function(loaded['short'].fn, 'fn') is SHORT
    assert ('load' in loaded) == isinstance(rewards, list)
  for wrong in ([SHORT, SHORT], [lambda x: x], 'rewards:short'):
    with pytest.raises(ValueError, match='rewards must|callable'):
      api.load(spec, rewards=wrong)
    with pytest.raises(ValueError, match='rewards must|callable'):
      api.train(run, str(tmp_path / 'run'), rewards=wrong)
  for recipe, rewards in ((spec, None), ('sft:small,tiny', SHORT)):
    with pytest.raises(ValueError, match='rewards'):
      api.load(recipe, rewards=rewards)


def test_options_of_another_type_are_named():
  with pytest.raises(ValueError, match='options must'):
    api.load('sft:tiny', ['grpo.steps=3'])


def test_the_import_has_no_jax():
  code = 'import sys, posttrain.api; sys.exit("jax" in sys.modules)'
  assert subprocess.run([sys.executable, '-c', code]).returncode == 0


def test_paths_of_callables():
  assert api.import_path(evaluate.measure) == 'posttrain.evaluate:measure'
  assert imports.function(api.import_path(SHORT), 'fn') is SHORT
  with pytest.raises(ValueError, match='must be callable and have a name'):
    api.import_path(3)


class Scaled:
  def __call__(self, completions, **columns):
    return [1.0 for _ in completions]


@pytest.mark.parametrize(
  'function',
  [lambda completions, **_: [1.0], functools.partial(Scaled()), Scaled()],
  ids=['lambda', 'partial', 'instance'],
)
def test_callables_without_a_name_have_that_of_their_key(function):
  run = api.load('configs/arithmetic.py:tiny', rewards={'short': function})
  (entry,) = run.stages['grpo'].envs['arithmetic'].rewards.values()
  assert entry.fn.endswith('KEPT.short')
  assert imports.function(entry.fn, 'fn') is function
  key = 'grpo.envs.arithmetic.rewards'
  run = api.load('configs/arithmetic.py:tiny', {key: {'x': {'fn': function}}})
  (entry,) = run.stages['grpo'].envs['arithmetic'].rewards.values()
  assert imports.function(entry.fn, 'fn') is function


def test_rewards_are_for_sampled_environments(tmp_path):
  run, key = api.load('configs/arithmetic.py:tiny'), 'sft.arithmetic.mine'
  with pytest.raises(ValueError, match=r"one of \['grpo.arithmetic'\]"):
    api.train(run, str(tmp_path), rewards={key: evaluate.measure})


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """Returns (workdir, final evaluation, lengths of the rewarded texts)."""
  workdir = str(tmp_path_factory.mktemp('api') / 'run')
  given = []

  def letters(completions, **kwargs):
    lengths = [float(len(x[-1]['content'])) for x in completions]
    given.extend(lengths)
    return lengths

  run = api.load('configs/arithmetic.py:tiny', SMALL)
  final = api.train(run, workdir, rewards={'letters': letters})
  return workdir, final, given


def test_train_calls_the_reward_function(trained):
  workdir, final, lengths = trained
  assert final['stage'] == 'grpo' and final['step'] == 1
  row = writers.read(f'{workdir}/metrics.jsonl')[-1]
  # After the four answers of the probe; evaluations have two questions.
  lengths = lengths[4:]
  assert len(lengths) == 2 + 16 + 2
  assert row['optim/grad_norm'] > 0  # groups differ in their rewards
  assert row['rollout/reward/arithmetic'] == pytest.approx(
    np.mean(lengths[2:18])
  )
  assert final['eval/reward/letters/arithmetic'] == np.mean(lengths[18:])


def test_answers_evaluation_and_export(trained, tmp_path):
  workdir, final, _ = trained
  loaded = api.policy(workdir)
  prompts = ['What is 1 + 2?', [{'role': 'user', 'content': 'What is 3 + 4?'}]]
  hot = {'max_tokens': 4, 'temperature': 1.0, 'seed': 5}
  first, second = api.generate(loaded, prompts, **hot)
  assert second.ids.shape == second.logprobs.shape and len(second.ids) <= 4
  (alone,) = api.generate(loaded, prompts[:1], **hot)
  np.testing.assert_array_equal(alone.ids, first.ids)
  with pytest.raises(ValueError, match='prompts must be a list'):
    api.generate(loaded, 'What is 1 + 2?')

  key = 'eval/pass_rate/arithmetic'
  assert api.evaluate(workdir).values[key] == final[key]
  with pytest.raises(ValueError, match='gguf.*convert_hf_to_gguf.py'):
    api.export(workdir, str(tmp_path / 'x'), format='gguf')
  api.export(workdir, str(tmp_path / 'out'), dtype='float32')
  assert (tmp_path / 'out' / 'model.safetensors').exists()
