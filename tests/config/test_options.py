"""Config: overrides, one-line errors, round trips, resume."""

import dataclasses
import json
from typing import Any

import pytest
from ml_collections import config_dict

from configs import machinery
from posttrain import config, main, schema
from posttrain.checkpoints import store
from posttrain.config import checks, options


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


def test_build_inverts_get_config(tmp_path):
  """And a workdir's config.json is a recipe."""
  path = tmp_path / 'config.json'
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
  path.write_text(json.dumps(config.to_dict(run)))
  for node in (machinery.config_dict(run), config.load(str(path))):
    assert config.build(node) == run


def test_kwargs_of_a_custom_loss_may_be_any_json():
  kwargs = {'low': 0.1, 'names': ['a', 'b'], 'deep': {'flag': True, 'n': None}}
  rl = schema.CustomRl(import_path='a.b:loss', kwargs=kwargs)
  node = _node(loss=schema.Loss(rl=rl))
  run = config.build(node)
  assert run.stages['sft'].loss.rl == rl
  assert config.build(config.from_dict(config.to_dict(run))) == run
  config.override(node, 'sft.loss.rl.kwargs.deep', '{"n": [1]}')
  changed = config.build(node).stages['sft'].loss.rl.kwargs
  assert changed == {**kwargs, 'deep': {'n': [1]}}


@pytest.mark.parametrize(
  ('key', 'text', 'value'),
  [
    ('sft.optim.lr', '1', 1.0),
    ('sft.init', '123', '123'),
    ('compilation_cache', 'None', None),
    ('sft.envs.a.env.ops', '("+", "x")', ('+', 'x')),
    ('sft.model', 'tiny', schema.PRESETS['tiny']),
    ('sft.envs.a.algorithm', 'sft', schema.Sft()),
  ],
)
def test_override_sets_the_parsed_value(key, text, value):
  found = _resolve((key, text))
  for part in key.replace('sft.', 'stages.sft.', 1).split('.'):
    found = found[part] if isinstance(found, dict) else getattr(found, part)
  assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
  ('key', 'text', 'named'),
  [
    ('seed.x', '1', 'config.seed'),
    ('mesh.sampler.data', '2', '--config.mesh.sampler=\'{"data": ...}\''),
    *(('sft.optim.lr', x, '') for x in ('fast', '1e999')),
    ('sft.optim.no_decay', '(scale', ''),
    *(('seed', x, '') for x in ('1.5', 'true', 'None', '-1')),
    ('model', 'qwen', ''),
    ('model', '{"layer": 1}', 'config.model.layers'),
    ('sft.envs.a.algorithm', 'a2c', 'algorithm.type'),
    ('sft.envs.a.env.ops', '(1,)', ''),
    ('sft.envs', '{}', ''),
    ('sft.batch.micro_batch_tokens', '100', 'row_tokens=256'),
    *(('stages', x, "'sft'") for x in ('("a",)', '()', '3')),
    ('model.kv_heads', '3', 'heads=4'),
    ('model', '{"a": 1, "a": 2}', "'a'"),
  ],
)
def test_mistakes_are_one_line_with_the_key(key, text, named):
  with pytest.raises(ValueError, match='must|has no option') as error:
    _resolve((key, text))
  line = str(error.value)
  assert line.startswith(f'config.{key.partition(".")[0]}')
  assert (named or key) in line and '\n' not in line and len(line) < 1000


FILES = {
  'raises': ('x.py', b'\n1 / 0\n', 'x.py:2'),
  'no get_config': ('x.py', b'x = 1', 'get_config'),
  'yaml': ('x.yaml', b'model: tiny\n', ''),
  'list': ('x.json', b'[1]', '[1]'),
  'no stages': ('x.json', b'{"seed": 1}', 'stages'),
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


def test_a_recipe_is_found_by_name_and_a_near_one_is_named():
  assert config.build(config.load('arithmetic')) == config.build(
    config.load('configs/arithmetic.py')
  )
  with pytest.raises(ValueError, match='did you mean arithmetic'):
    config.load('arithmetc')


def test_resume_allows_only_declared_keys():
  old = config.to_dict(_resolve())
  allowed = config.to_dict(
    _resolve(
      ('sft.steps', '2000'),
      ('checkpoint.every', '9'),
      ('model.attention', 'xla'),
      ('sft.rollout.num_workers', '2'),
    )
  )
  config.check_resume(old, allowed)
  # Newer options take their defaults.
  config.check_resume({k: v for k, v in old.items() if k != 'seed'}, old)
  for key, text in (('sft.optim.moments_dtype', 'bfloat16'), ('seed', '1')):
    with pytest.raises(ValueError, match=rf'config\.{key} \(.* -> .*{text}'):
      config.check_resume(old, config.to_dict(_resolve((key, text))))


def test_a_run_goes_on_where_too_long_was_an_error():
  key = 'sft.envs.a.sampler.too_long'
  strict, others = (
    config.to_dict(_resolve((key, too_long))) for too_long in ('error', 'drop')
  )
  config.check_resume(strict, others)
  with pytest.raises(ValueError, match=key):
    config.check_resume(others, strict)


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


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  """A run on a HuggingFace tokenizer, as far as its options are read."""
  folder = tmp_path_factory.mktemp('run')
  model = dataclasses.replace(schema.PRESETS['tiny'], embed_dim=48)
  options = _resolve(('model.embed_dim', '48'), ('tokenizer.eos', '<|end|>'))
  host = {
    'stage': 'sft',
    'model': dataclasses.asdict(dataclasses.replace(model, vocab_size=264)),
    'config': config.to_dict(options),
  }
  record = json.loads(json.dumps({'host': host, 'time': 0}))
  step = folder / 'checkpoints' / 'sft' / '2'
  (step / 'state').mkdir(parents=True)
  (step / 'host').mkdir()
  record['crc'] = store.crc(record)
  (step / 'host' / 'metadata').write_text(json.dumps(record))
  return folder


@pytest.mark.parametrize('place', ['', 'checkpoints/sft', 'checkpoints/sft/2'])
@pytest.mark.parametrize(
  ('spec', 'overrides', 'changed'),
  [
    ('sft:{0},tiny', {}, {}),
    ('grpo:{0},tiny', {}, {}),
    ('dpo:{0},tiny,lora', {}, {}),
    ('reward_model:{0},tiny', {}, {}),
    ('gsm8k_grpo:{0},tiny', {}, {}),
    ('sft:tiny', {'init': '{0}'}, {}),
    ('arithmetic', {'sft.init': '{0}'}, {}),
    (
      'sft:tiny',
      {'model.dtype': 'bfloat16', 'init': '{0}'},
      {'dtype': 'bfloat16'},
    ),
    ('sft:tiny', {'model': '{0}', 'tokenizer.eos': '<|end|>'}, {}),
  ],
)
def test_a_run_is_a_model(spec, overrides, changed, place, workdir):
  """Its model options and its tokenizer come with its weights."""
  path = str(workdir / place)
  given = [(key, text.format(path)) for key, text in overrides.items()]
  run = main.load(spec.format(path), given, check=False)
  model = dataclasses.replace(schema.PRESETS['tiny'], embed_dim=48)
  expected = {'vocab_size': 264, **changed}
  assert run.model == dataclasses.replace(model, **expected)
  assert run.tokenizer == schema.Tokenizer(eos='<|end|>')
  first, *_ = run.stages.values()
  assert first.init in (path, 'random')
  assert (first.init == 'random') == ('model' in overrides)


@pytest.mark.parametrize('place', ['', 'checkpoints/sft/2'])
def test_a_run_is_a_tokenizer(place, workdir):
  path = ('tokenizer.path', str(workdir / place))
  assert _resolve(path).tokenizer == schema.Tokenizer(eos='<|end|>')
  pad = _resolve(path, ('tokenizer.pad', '<|tool|>')).tokenizer
  assert pad == schema.Tokenizer(eos='<|end|>', pad='<|tool|>')


def test_another_type_is_another_node():
  with pytest.raises(ValueError, match='--config.sft.loss.rl=clip'):
    _resolve(('sft.loss.rl.type', 'clip'))
  _resolve(('sft.loss.rl.type', 'dppo'))  # what it is already
  node = _node()
  config.override(node, 'sft.loss.rl', 'clip')
  assert config.build(node).stages['sft'].loss.rl == schema.Clip()


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


def test_the_name_of_the_only_stage_may_be_left_out():
  node = config.load('configs/arithmetic.py')
  config.override(node, 'stages', '("grpo",)')
  config.override(node, 'optim.lr', '0.25')
  assert node.grpo.optim.lr == 0.25


# --- paths -------------------------------------------------------------------


@pytest.mark.parametrize(
  ('key', 'path', 'stored'),
  [
    ('sft.init', 'here', '{folder}/here'),
    ('compilation_cache', 'new', '{folder}/new'),
    ('sft.envs.a.env', '$HERE/here', '{folder}/here'),
    ('sft.init', 'stage:sft', 'stage:sft'),
  ],
)
def test_paths_are_absolute(key, path, stored, tmp_path, monkeypatch):
  """config.json means the same files from any folder."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('HERE', '.')
  for name in ('here', 'stage:sft'):
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


# --- values by their annotations ----------------------------------------------


@pytest.mark.parametrize(
  ('value', 'kind', 'expected'),
  [
    (None, int | None, None),
    (3, float, 3.0),
    (config_dict.ConfigDict({'a': {'b': [1]}}), Any, {'a': {'b': [1]}}),
    ('gspo', schema.Clip | schema.Gspo, schema.Gspo()),
    (
      {'type': 'clip', 'low': 0.1},
      schema.Clip | schema.Gspo,
      schema.Clip(low=0.1),
    ),
  ],
)
def test_a_value_becomes_what_its_annotation_declares(value, kind, expected):
  converted = options.to_type(value, kind, 'config.x')
  assert converted == expected and type(converted) is type(expected)


@pytest.mark.parametrize(
  ('value', 'kind', 'message'),
  [
    ({'seed': True}, schema.Run, 'config.x.seed must be of type int: got True'),
    ({'lr': 2**1024}, schema.Optim, 'config.x.lr must be finite'),
    ({'ks': (1, 'b')}, schema.Eval, 'config.x.ks must be of type tuple'),
    ({'envs': {'a': 'b'}}, schema.Stage, 'config.x.envs.a must be a node'),
    ({'rate': 1.0}, schema.Optim, "config.x has no option 'rate'"),
    ('clipp', schema.Clip | schema.Gspo, 'config.x.type .* did you mean clip?'),
  ],
)
def test_another_value_is_refused_by_key(value, kind, message):
  with pytest.raises(ValueError, match=message):
    options.to_type(value, kind, 'config.x')


@pytest.mark.parametrize(
  ('text', 'value'), [('true', True), ("('a',)", ('a',)), ('a b', 'a b')]
)
def test_literals_are_json_or_python_or_the_text(text, value):
  assert options.literal(text, 'config.x') == value
