"""Config: overrides, one-line errors, round trips, resume."""

import ast
import dataclasses
import json
import pathlib
import re
import typing

import pytest

from configs import machinery
from posttrain import config, schema
from posttrain.config import checks


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
  ('key', 'text', 'named'),
  [
    ('seed.x', '1', 'config.seed'),
    *(('sft.optim.lr', x, '') for x in ('fast', '-1.0', '1e999')),
    ('sft.optim.weight_decay', '1e999', ''),
    ('sft.optim.beta1', '1.0', ''),
    ('sft.optim.no_decay', '(scale', ''),
    ('sft.envs.a.ratio', '1e999', ''),
    ('model.rope_theta', '1e999', ''),
    *(('seed', x, '') for x in ('1.5', 'true', 'None', '-1')),
    ('metrics.progress', '1', ''),
    ('model', 'qwen', ''),
    ('model', '{"layer": 1}', 'config.model.layers'),
    ('sft.envs.a.algorithm', 'ppo', 'algorithm.type'),
    ('sft.envs.a.env', '{"typ": "rows"}', 'env.type'),
    ('sft.envs.a.env.ops', '3', ''),
    ('sft.envs.a.env.ops', '("/",)', ''),
    ('sft.envs.a.env.ops', '(1,)', 'ops[0]'),
    ('sft.envs.a.env.max_operand', '1000', ''),
    ('sft.envs.a.env.mistakes', '1.5', ''),
    ('sft.envs', '{}', ''),
    ('sft.batch.micro_batch_tokens', '100', 'row_tokens=256'),
    ('sft.kind', 'tokenz', ''),
    *(('stages', x, '"sft"') for x in ('("a",)', '()', 'sft', '3')),
    ('mesh.fsdp', '0', ''),
    ('model.kv_heads', '3', 'heads=4'),
    ('model.local_layers', '(3,)', ''),
    ('model.local_layers', '(0,)', 'window'),
    ('model.logit_softcap', '0.0', ''),
    ('model.activation', 'relu', ''),
    ('model.rope_scaling.kind', 'yarn', ''),
    ('model', '{"a": 1', ''),
    ('model', '[' * 100_000, ''),
    ('model', '{"a": 1, "a": 2}', "'a'"),
    ('sft.loss.rl', '{"a.b": 1}', ''),
  ],
)
def test_mistakes_are_one_line_with_the_key(key, text, named):
  with pytest.raises(ValueError, match='must|has no option') as error:
    _resolve((key, text))
  line = str(error.value)
  assert line.startswith(f'config.{key.partition(".")[0]}')
  assert (named or key) in line and '\n' not in line and len(line) < 1000


FILES = {
  'syntax': ('x.py', b'def get_config(:\n', 'SyntaxError'),
  'raises': ('x.py', b'\n1 / 0\n', 'x.py:2'),
  'import': ('x.py', b'import no_such_thing', 'ModuleNotFoundError'),
  'exit': ('x.py', b'raise SystemExit(3)', 'SystemExit: 3'),
  'binary': ('x.py', b'\x00\x01\xff\xfe' * 50, ''),
  'no get_config': ('x.py', b'x = 1', 'get_config'),
  'argument': ('x.py:big', b'def get_config(): return 1', 'TypeError'),
  'no config': ('x.py', b'def get_config(): return 7', '7'),
  'yaml': ('x.yaml', b'model: tiny\n', ''),
  'empty': ('x.json', b'', ''),
  'list': ('x.json', b'[1]', '[1]'),
  'deep': ('x.json', b'[' * 100_000, ''),
  'no stages': ('x.json', b'{"seed": 1}', 'stages'),
  'stages': ('x.json', b'{"stages": 3}', ''),
  'dotted': ('x.json', b'{"stages": ["a"], "a.b": 1}', ''),
}


@pytest.mark.parametrize('name', FILES)
def test_any_file_is_one_line(name, tmp_path):
  spec, data, words = FILES[name]
  file = spec.partition(':')[0]
  (tmp_path / file).write_bytes(data)
  with pytest.raises(ValueError, match=file) as error:
    config.build(config.load(str(tmp_path / spec)))
  line = str(error.value)
  assert words in line and '\n' not in line and len(line) < 1000


def test_a_recipe_is_found_by_name_and_a_near_one_is_named(tmp_path):
  assert config.build(config.load('arithmetic')) == config.build(
    config.load('configs/arithmetic.py')
  )
  with pytest.raises(ValueError, match='did you mean arithmetic'):
    config.load('arithmetc')
  folder = tmp_path / 'a:b'  # a path may have colons
  folder.mkdir()
  (folder / 'x.py').write_text('def get_config(): return 1')
  with pytest.raises(ValueError, match=r'x\.py: get_config must return'):
    config.load(str(folder / 'x.py'))


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
  for key, text in (
    ('sft.optim.lr', '1.0'),
    ('sft.optim.moments_dtype', 'bfloat16'),
    ('seed', '1'),
  ):
    with pytest.raises(ValueError, match=rf'config\.{key} \(.* -> .*{text}'):
      config.check_resume(old, config.to_dict(_resolve((key, text))))


def test_newer_options_take_their_defaults_on_resume():
  values = config.to_dict(_resolve())
  config.check_resume({k: v for k, v in values.items() if k != 'seed'}, values)


def test_stages_may_be_added_at_the_end():
  """Of a run whose stages are over; they stay as they are."""
  new = config.to_dict(config.build(config.load('configs/arithmetic.py')))
  first, *later = new['stages']
  old = {k: v for k, v in new.items() if k not in later}
  old['stages'] = [first]
  config.check_resume(old, new)
  with pytest.raises(ValueError, match=r'config\.stages'):
    config.check_resume(new, old)
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
  with pytest.raises(ValueError, match='--config.sft.loss.rl=clip'):
    _resolve(('sft.loss.rl.type', 'clip'))
  _resolve(('sft.loss.rl.type', 'dppo'))  # what it is already
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


@pytest.mark.parametrize(
  ('key', 'value'), [('optim.lr', '0.5'), ('steps', '7'), ('eval.every', '3')]
)
def test_the_name_of_the_only_stage_may_be_left_out(key, value):
  short, long = (config.load('configs/sft.py:tiny') for _ in range(2))
  config.override(short, key, value)
  config.override(long, f'sft.{key}', value)
  assert config.build(short) == config.build(long)


def test_the_name_may_be_left_out_where_one_stage_is_left():
  node = config.load('configs/arithmetic.py')
  config.override(node, 'stages', '("grpo",)')
  config.override(node, 'optim.lr', '0.25')
  assert node.grpo.optim.lr == 0.25


# --- paths -------------------------------------------------------------------


@pytest.mark.parametrize(
  ('key', 'path', 'stored'),
  [
    ('sft.init', 'here', '{folder}/here'),
    ('tokenizer.path', 'here', '{folder}/here'),
    ('compilation_cache', 'new', '{folder}/new'),
    ('sft.envs.a.env', 'here', '{folder}/here'),
    ('sft.envs.a.env', '$HERE/here', '{folder}/here'),
    ('sft.envs.a.env', '$SOMEWHERE/here', '$SOMEWHERE/here'),
    ('sft.envs.a.env', 'missing', 'missing'),
    ('sft.init', 'gs://a/b', 'gs://a/b'),
    ('sft.init', 'random', 'random'),
    ('sft.init', 'stage:sft', 'stage:sft'),
    ('compilation_cache', '~/x', '~/x'),
  ],
)
def test_paths_are_absolute(key, path, stored, tmp_path, monkeypatch):
  """config.json means the same files from any folder."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('SOMEWHERE', str(tmp_path))
  monkeypatch.setenv('HERE', '.')
  for name in ('here', 'random', 'stage:sft'):
    (tmp_path / name).mkdir()
  rows = json.dumps({'type': 'rows', 'path': path})
  node = _node()
  config.override(node, key, rows if key.endswith('.env') else path)
  values = config.to_dict(config.build(node))
  found = values
  for part in key.split('.'):
    found = found[part]
  found = found['path'] if isinstance(found, dict) else found
  assert found == stored.format(folder=tmp_path)
  monkeypatch.chdir(tmp_path.parent)
  again = config.to_dict(config.build(config.from_dict(values)))
  assert again == values


def test_every_field_with_a_path_is_marked():
  """Fields whose comment speaks of a file, a folder or a path."""
  words = re.compile(r'\b(paths? of|files?|folders?)\b', re.IGNORECASE)
  marked = {
    f'{owner.__name__}.{name}'
    for kind in vars(schema).values()
    if dataclasses.is_dataclass(kind)
    for owner in kind.__mro__
    for name, hint in typing.get_type_hints(kind, include_extras=True).items()
    if getattr(hint, '__metadata__', ('',))[0] in ('file', 'folder', 'compiled')
  }
  speaking = {
    name
    for path in pathlib.Path('posttrain/schema').glob('*.py')
    for name, comment in _texts(path.read_text())
    if words.search(comment)
  }
  assert speaking - marked == {'Lora.targets'}  # paths in a tree of weights
  assert len(marked) > 20


def _texts(text):
  """Yields (Class.field, comment) of the fields that hold a text."""
  lines = text.splitlines()
  for owner in ast.parse(text).body:
    for node in getattr(owner, 'body', ()):
      if isinstance(node, ast.AnnAssign) and isinstance(owner, ast.ClassDef):
        row, comment = node.lineno - 2, ''
        while lines[row].strip().startswith('#'):
          row, comment = row - 1, lines[row] + comment
        kind = ast.unparse(node.annotation)
        if re.search(r'\bstr\b|File|Folder|Reference|Compiled', kind):
          yield f'{owner.name}.{node.target.id}', comment
