"""Config: overrides, one-line errors, round trips, resume."""

import ast
import dataclasses
import json
import pathlib

import pytest

from configs import machinery
from posttrain import schema
from posttrain.config import checks
from posttrain import config


def _node(**stage):
  entry = schema.EnvEntry()
  sft = schema.Stage(envs={'a': entry}, **stage)
  return machinery.config_dict(schema.Run(stages={'sft': sft}))


def _resolve(*overrides, node=None):
  node = node or _node()
  for key, text in overrides:
    config.override(node, key, text)
  run = config.build(node)
  checks.check(run)
  return run


def test_build_inverts_get_config():
  run = schema.Run(
    seed=3,
    model=schema.PRESETS['qwen3_0p6b'],
    stages={
      'a': schema.Stage(envs={'x': schema.EnvEntry()}),
      'b': schema.Stage(
        init='stage:a',
        model=schema.Model(layers=2),
        envs={'y': schema.EnvEntry(env=schema.Rows(path='f.jsonl'))},
      ),
    },
  )
  assert config.build(machinery.config_dict(run)) == run
  assert list(config.build(machinery.config_dict(run)).stages) == ['a', 'b']


def test_kwargs_of_a_custom_loss_may_be_any_json():
  kwargs = {'low': 0.1, 'names': ['a', 'b'], 'deep': {'flag': True, 'n': None}}
  rl = schema.CustomRl(import_path='a.b:loss', kwargs=kwargs)
  node = _node(loss=schema.Loss(rl=rl))
  run = config.build(node)
  assert run.stages['sft'].loss.rl == rl
  again = config.build(config.from_dict(config.to_dict(run)))
  assert again.stages['sft'].loss.rl == rl
  config.override(node, 'sft.loss.rl.kwargs.low', '0.2')
  config.override(node, 'sft.loss.rl.kwargs.deep', '{"n": [1]}')
  changed = config.build(node).stages['sft'].loss.rl.kwargs
  assert changed == {**kwargs, 'low': 0.2, 'deep': {'n': [1]}}
  config.override(node, 'sft.loss.rl', '{"type": "clip", "delta": 4.0}')
  assert config.build(node).stages['sft'].loss.rl == schema.Clip(delta=4.0)


@pytest.mark.parametrize(
  ('key', 'text', 'read'),
  [
    ('sft.optim.lr', '1e-4', lambda r: r.stages['sft'].optim.lr == 1e-4),
    ('sft.optim.lr', '1', lambda r: r.stages['sft'].optim.lr == 1.0),
    ('sft.init', '123', lambda r: r.stages['sft'].init == '123'),
    (
      'sft.optim.average',
      '0.9',
      lambda r: r.stages['sft'].optim.average == 0.9,
    ),
    ('compilation_cache', 'None', lambda r: r.compilation_cache is None),
    (
      'sft.envs.a.env.ops',
      '("+", "x")',
      lambda r: r.stages['sft'].envs['a'].env.ops == ('+', 'x'),
    ),
    (
      'sft.envs.a.env.ops',
      '["-"]',
      lambda r: r.stages['sft'].envs['a'].env.ops == ('-',),
    ),
    ('metrics.progress', 'false', lambda r: not r.metrics.progress),
    ('metrics.progress', 'False', lambda r: not r.metrics.progress),
    ('model', 'qwen3_1p7b', lambda r: r.model == schema.PRESETS['qwen3_1p7b']),
    (
      'sft.model',
      'tiny',
      lambda r: r.stages['sft'].model == schema.PRESETS['tiny'],
    ),
    ('model', '{"layers": 2}', lambda r: r.model == schema.Model(layers=2)),
    (
      'sft.envs.a.env',
      '{"type": "rows", "path": "f"}',
      lambda r: r.stages['sft'].envs['a'].env == schema.Rows(path='f'),
    ),
    (
      'sft.envs.a.algorithm',
      'sft',
      lambda r: r.stages['sft'].envs['a'].algorithm == schema.Sft(),
    ),
  ],
)
def test_override_sets_the_parsed_value(key, text, read):
  assert read(_resolve((key, text)))


@pytest.mark.parametrize(
  ('key', 'text', 'message'),
  [
    ('sft.optim.lrr', '1', 'config.sft.optim has no .* config.sft.optim.lr?'),
    ('sft.optm.lr', '1', r'did you mean config\.sft\.optim'),
    ('sed', '1', r'did you mean config\.seed'),
    ('sft.lr', '1', r'did you mean config\.sft\.optim\.lr\?'),
    ('seed.x', '1', r'config\.seed must be a node'),
    ('sft.optim.lr', 'fast', r'config\.sft\.optim\.lr must be of type fl'),
    ('sft.optim.lr', '-1.0', r'config\.sft\.optim\.lr must be > 0: got -1'),
    ('sft.optim.lr', '1e999', r'optim\.lr must be finite: got inf'),
    ('sft.optim.weight_decay', '1e999', 'weight_decay must be finite'),
    ('sft.optim.beta1', '1.0', r'beta1 must be in \[0, 1\): got 1.0'),
    ('sft.optim.beta2', '1.0', r'beta2 must be in \[0, 1\): got 1.0'),
    ('sft.optim.no_decay', '(scale', r'no_decay must be a regex: got'),
    ('sft.envs.a.ratio', '1e999', 'ratio must be finite'),
    ('model.rope_theta', '1e999', r'rope_theta must be in \[1, 1e'),
    ('seed', '1.5', r'config\.seed must be of type int'),
    ('seed', 'true', r'config\.seed must be of type int: got True'),
    ('seed', 'None', r'config\.seed must be of type int: got None'),
    ('metrics.progress', '1', r'config\.metrics\.progress must be of type'),
    ('model', 'qwen', r"config\.model must be one of \('tiny'"),
    ('model', '{"layer": 1}', r'did you mean config\.model\.layers'),
    ('sft.envs.a.algorithm', 'ppo', r'algorithm\.type must be one of'),
    ('sft.envs.a.env', '{"typ": "rows"}', r'env\.type must be one of'),
    ('sft.envs.a.env.ops', '3', r'env\.ops must be a tuple'),
    ('sft.envs.a.env.ops', '("/",)', r'config\.sft\.envs\.a\.env\.ops'),
    ('sft.envs.a.env.ops', '(1,)', r'env\.ops\[0\] must be of type str'),
    ('sft.envs.a.env.max_operand', '1000', r'max_operand must be in'),
    ('sft.envs.a.env.mistakes', '1.5', r'mistakes must be in \[0, 1\]'),
    ('sft.envs', '{}', r'config\.sft\.envs must hold an environment'),
    (
      'sft.batch.micro_batch_tokens',
      '100',
      'must be a multiple of row_tokens=256: got 100; 256 is one row',
    ),
    ('sft.kind', 'tokenz', r'config\.sft\.kind must be one of'),
    ('stages', '("a",)', r"got 'a', expected some of \('sft',\)"),
    ('stages', '()', r"""got \(\); write --config.stages='\("sft",\)'"""),
    ('stages', 'sft', r"""got 'sft'; write --config.stages='\("sft",\)'"""),
    ('stages', '3', r"""got 3; write --config.stages='\("sft",\)'"""),
    ('mesh.fsdp', '0', r'config\.mesh\.fsdp must be -1 or > 0'),
    ('model.kv_heads', '3', r'config\.model\.kv_heads must divide heads=4'),
    ('model.local_layers', '(3,)', r'local_layers must be in \[0, la'),
    ('model.local_layers', '(0,)', r'window must be set if and only if'),
    ('model.window', '8', 'window must be set if and only if local'),
    (
      'model.logit_softcap',
      '0.0',
      r'logit_softcap must be None or in \[0.001, 1e\+06',
    ),
    ('model.activation', 'relu', r'model\.activation must be one of'),
    ('model.rope_scaling.kind', 'yarn', r'rope_scaling\.kind must be one'),
    (
      'model.rope_scaling',
      '{"kind": "llama3", "high_frequency": 1.0}',
      r'rope_scaling\.high_frequency must exceed low_frequency=1\.0',
    ),
  ],
)
def test_mistakes_are_one_clear_line(key, text, message):
  with pytest.raises(ValueError, match=message) as error:
    _resolve((key, text))
  assert '\n' not in str(error.value)


def test_load_names_what_is_missing(tmp_path):
  with pytest.raises(ValueError, match='--config must name a file'):
    config.load('configs/no_such.py')
  empty = tmp_path / 'empty.py'
  empty.write_text('x = 1\n')
  with pytest.raises(ValueError, match='must define get_config'):
    config.load(str(empty))


def test_resume_allows_only_declared_keys():
  old = config.to_dict(_resolve())
  allowed = config.to_dict(
    _resolve(
      ('sft.steps', '2000'),
      ('sft.eval.every', '7'),
      ('metrics.progress', 'false'),
      ('checkpoint.every', '9'),
      ('model.attention', 'xla'),
      ('sft.rollout.workers', 'ray'),
      ('sft.rollout.num_workers', '2'),
    )
  )
  config.check_resume(old, allowed)
  with pytest.raises(ValueError, match=r'config\.sft\.optim\.lr \(0\.0003 ->'):
    config.check_resume(old, config.to_dict(_resolve(('sft.optim.lr', '1.0'))))
  with pytest.raises(ValueError, match='moments_dtype .*32.* -> .*bfloat16'):
    new = _resolve(('sft.optim.moments_dtype', 'bfloat16'))
    config.check_resume(old, config.to_dict(new))
  with pytest.raises(ValueError, match=r'config\.seed \(0 -> 1\)'):
    config.check_resume(old, config.to_dict(_resolve(('seed', '1'))))


def test_stages_may_be_added_at_the_end():
  """Of a run whose stages are over; they stay as they are."""
  new = config.to_dict(config.build(config.load('configs/arithmetic.py')))
  first, *later = new['stages']
  old = {k: v for k, v in new.items() if k not in later}
  old['stages'] = [first]
  config.check_resume(old, new)
  with pytest.raises(ValueError, match='must keep its config') as error:
    config.check_resume(new, old)
  assert str(error.value).endswith(
    "changed config.stages (('sft', 'grpo') -> ('sft',)), as the workdir holds "
    'a run with other stages; use another --workdir'
  )
  changed = {**old, first: {**old[first], 'init': 'x'}}
  with pytest.raises(ValueError, match=rf"{first}.init \('x' ->"):
    config.check_resume(changed, new)
  with pytest.raises(ValueError, match='must keep its config'):
    config.check_resume(old, {**new, 'stages': [*later, first]})


def test_how_reward_functions_may_fail_may_change():
  def resolved(**changes):
    reward = schema.RewardFn('json:loads', **changes)
    entry = schema.EnvEntry(rewards={'x': reward})
    stage = schema.Stage(envs={'a': entry})
    return config.to_dict(schema.Run(stages={'main': stage}))

  config.check_resume(resolved(), resolved(timeout=5.0, max_faults=9))
  with pytest.raises(ValueError, match=r'rewards\.x\.weight \(1\.0 -> 2'):
    config.check_resume(resolved(), resolved(weight=2.0))


def test_every_field_of_the_schema_has_a_comment():
  # Each names the field above it in the same breath.
  shared = {'Arithmetic.max_factor', 'Arithmetic.eval_tasks'}
  fields = 0
  for path in pathlib.Path('posttrain/schema').glob('*.py'):
    text = path.read_text()
    lines = text.splitlines()
    for owner in ast.walk(ast.parse(text)):
      if not isinstance(owner, ast.ClassDef):
        continue
      for node in owner.body:
        if isinstance(node, ast.AnnAssign) and node.target.id != 'type':
          fields += 1
          name = f'{owner.name}.{node.target.id}'
          above = lines[node.lineno - 2].strip()
          assert above.startswith('# ') or name in shared, (
            f'{path}:{node.lineno}: {name} needs a comment above it'
          )
  assert fields > 50


def test_a_model_comes_back_from_json():
  model = schema.Model(
    local_layers=(0, 2),
    window=4,
    rope_scaling=schema.RopeScaling('linear', 2.0),
  )
  values = json.loads(json.dumps(dataclasses.asdict(model)))
  assert schema.Model.from_json(values) == model
  for name in ('rope_scaling', 'local_layers', 'window'):  # none of an old one
    del values[name]
  assert schema.Model.from_json(values) == schema.Model()


def test_another_type_is_another_node():
  for key, text in (('sft.loss.rl', 'clip'), ('sft.envs.a.algorithm', 'rloo')):
    with pytest.raises(ValueError, match=f'--config.{key}={text}, or --config'):
      _resolve((f'{key}.type', text))
  _resolve(('sft.loss.rl.type', 'dppo'))  # what it is already
  with pytest.raises(
    ValueError, match=r"must be one of \('dppo', .* got 'ppo'"
  ):
    _resolve(('sft.loss.rl.type', 'ppo'))
  node = _node()
  config.override(node, 'sft.loss.rl', 'clip')
  assert config.build(node).stages['sft'].loss.rl == schema.Clip()


def test_a_workdirs_config_is_a_recipe(tmp_path):
  run = _resolve(('sft.optim.average', '0.9'))
  path = tmp_path / 'config.json'
  path.write_text(json.dumps(config.to_dict(run)))
  assert config.build(config.load(str(path))) == run


def test_a_server_may_move_and_not_change():
  def resolved(**changes):
    teacher = schema.Endpoint(
      **{'name': 'a', 'base_url': 'http://h/v1', **changes}
    )
    entry = schema.EnvEntry(
      algorithm=schema.Opd(reference=teacher), sampler=schema.Policy()
    )
    stage = schema.Stage(envs={'x': entry})
    return config.to_dict(schema.Run(stages={'main': stage}))

  config.check_resume(
    resolved(), resolved(base_url='http://i/v1', tries=3, timeout=5.0)
  )
  with pytest.raises(ValueError, match=r"algorithm\.reference\.name \('a' ->"):
    config.check_resume(resolved(), resolved(name='b'))


def test_a_key_with_a_dot_is_refused_by_the_node():
  node = config.load('configs/sft.py:tiny')
  with pytest.raises(ValueError, match='^config.sft.envs.data.env.columns'):
    config.override(node, 'sft.envs.data.env.columns', '{"a.b": "prompt"}')


@pytest.mark.parametrize(
  ('text', 'words'),
  [
    ('{"a": 1', 'must be JSON: '),
    ('[' * 100_000, 'must be JSON: nested deeper'),
    ('[' * 120 + ']' * 120, 'must be JSON: nested deeper'),
    ('{"a": 1, "a": 2}', "must be JSON: the key 'a' is there twice"),
  ],
)
def test_an_override_that_is_no_json_is_refused_by_key(text, words):
  node = config.load('configs/arithmetic.py:tiny')
  with pytest.raises(ValueError, match=f'^config.model {words}'):
    config.override(node, 'model', text)


@pytest.mark.parametrize(
  ('overrides', 'expected'),
  [
    ((('loss.rl', 'clip'), ('loss.rl.high', '0.3')), schema.Clip(high=0.3)),
    (
      (('loss.rl', '{"type": "clip", "low": 0.1}'), ('loss.rl.high', '0.3')),
      schema.Clip(low=0.1, high=0.3),
    ),
    ((('loss.rl.high', '0.3'), ('loss.rl', 'gspo')), schema.Gspo()),
  ],
)
def test_a_node_of_another_type_has_all_its_options(overrides, expected):
  node = config.load('configs/arithmetic.py')
  for key, text in overrides:
    config.override(node, f'grpo.{key}', text)
  assert config.build(node).stages['grpo'].loss.rl == expected


def test_nodes_in_dicts_have_all_options_of_their_type_too():
  node = config.load('configs/arithmetic.py')
  key = 'grpo.envs.arithmetic.algorithm'
  config.override(node, key, '{"type": "grpo", "kl_beta": 0.1}')
  config.override(node, f'{key}.scale_rewards', 'batch')
  config.override(node, f'{key}.length_penalty', 'overlong')
  config.override(node, f'{key}.length_penalty.buffer', '8')
  entry = config.build(node).stages['grpo'].envs['arithmetic']
  assert entry.algorithm == schema.Grpo(
    kl_beta=0.1, scale_rewards='batch', length_penalty=schema.Overlong(buffer=8)
  )
