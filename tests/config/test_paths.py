"""Paths in config.json are absolute, whichever field of the schema has them."""

import ast
import dataclasses
import json
import pathlib
import re
import typing

import pytest

from configs import machinery
from posttrain import schema
from posttrain import config
from posttrain.config import paths

FILES = ('rows.jsonl', 'held_out.jsonl', 'template.jinja', 'db', 'weights')


def _resolved(stage, **shared):
  run = schema.Run(stages={'main': stage}, **shared)
  return config.to_dict(config.build(machinery.config_dict(run)))


@pytest.fixture
def folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for name in FILES:
    (tmp_path / name).mkdir()
  return tmp_path


def _stages():
  pair = schema.PairFile(path='rows.jsonl', eval_path='held_out.jsonl')
  sql = schema.SqlFiles(questions='rows.jsonl', databases='db')
  envs = (
    schema.Rows(path='rows.jsonl', eval_path='held_out.jsonl'),
    schema.Gsm8k(path='rows.jsonl', eval_path='held_out.jsonl'),
    schema.Trl(factory='a:B', path='rows.jsonl', eval_path='held_out.jsonl'),
    schema.Sql(data=sql),
  )
  for env in envs:
    yield schema.Stage(envs={'a': schema.EnvEntry(env=env)})
  entry = schema.EnvEntry(
    algorithm=schema.Opd(reference='weights'),
    sampler=schema.Frozen(model='weights'),
    judge='weights',
    rewards={
      'learned': schema.RewardFn(model='weights'),
      'judged': schema.RewardFn('a:b', judge='weights'),
    },
  )
  yield schema.Stage(envs={'a': entry}, init='weights')
  loss = schema.Loss(preference=schema.Sigmoid(reference='weights'))
  yield schema.Stage(kind='preference', pairs=pair, loss=loss)


def test_paths_are_absolute(folder):
  tokenizer = schema.Tokenizer(path='weights', chat_template='template.jinja')
  for stage in _stages():
    values = _resolved(stage, tokenizer=tokenizer, compilation_cache='new')
    text = json.dumps(values)
    for name in (*FILES, 'new'):
      assert f'"{name}"' not in text
    used = set(re.findall(rf'"{folder}/(\w+(?:\.\w+)?)"', text))
    assert {'weights', 'template.jinja', 'new'} <= used <= {*FILES, 'new'}


def test_a_resume_from_another_folder_is_the_same_run(folder, monkeypatch):
  *_, stage = _stages()
  old = _resolved(stage)
  monkeypatch.chdir(folder.parent)
  again = config.to_dict(config.build(config.from_dict(old)))
  assert again == old
  config.check_resume(old, again)


def _relative(values, folder):
  """Returns options with the paths of an older version."""
  return json.loads(json.dumps(values).replace(f'{folder}/', ''))


def test_a_resume_of_an_older_version_from_another_folder(folder, monkeypatch):
  tokenizer = schema.Tokenizer(path='weights', chat_template='template.jinja')
  for stage in _stages():
    new = _resolved(stage, tokenizer=tokenizer, seed=3)
    old = _relative(new, folder)
    assert old != new
    monkeypatch.chdir(folder.parent)
    config.check_resume(old, new)
    with pytest.raises(ValueError, match=r'changed config\.seed \(3 -> 4\);'):
      config.check_resume(old, {**new, 'seed': 4})
    with pytest.raises(ValueError, match=r'config\.tokenizer\.path \(.*/b/w'):
      moved = {**new['tokenizer'], 'path': f'{folder}/b/weights'}
      config.check_resume(old, {**new, 'tokenizer': moved})
    monkeypatch.chdir(folder)
    config.check_resume(old, new)


def test_a_relative_path_is_first_one_of_this_folder(folder, monkeypatch):
  *_, stage = _stages()
  new = _resolved(stage)
  (folder / 'b' / 'rows.jsonl').mkdir(parents=True)
  monkeypatch.chdir(folder / 'b')
  with pytest.raises(ValueError, match=r'pairs.path \(.*/b/rows.jsonl. -> '):
    config.check_resume(_relative(new, folder), new)


@pytest.mark.parametrize(
  'old, new, same',
  [
    (('a/b', 'c'), ('/x/a/b', '/x/c'), True),
    (('./a', '../b', '../../c/d'), ('/x/y/a', '/x/b', '/c/d'), True),
    (('a',), ('/a',), True),
    (('a', 'b'), ('/x/a', '/y/b'), False),  # in no folder
    (('a', '../b'), ('/x/y/a', '/z/b'), False),
    (('a',), ('/x/ba',), False),
    (('/a',), ('/x/a',), False),
    (('a',), ('b/a',), False),  # not there: the run refuses it
    ((None,), ('/a',), False),
    (('',), ('/a',), False),
  ],
)
def test_relative_paths_that_may_be_absolute_ones(old, new, same):
  keys = dict(enumerate(old)), dict(enumerate(new))
  assert paths.resolved(*keys) == (set(keys[0]) if same else set())


def test_a_reference_that_is_no_path_is_not_one_of_a_folder(folder):
  (folder / 'init').mkdir()

  def values(reference):
    algorithm = schema.Grpo(kl_beta=0.1, reference=reference)
    entry = schema.EnvEntry(algorithm=algorithm)
    return _resolved(schema.Stage(envs={'a': entry}))

  with pytest.raises(ValueError, match=r"reference \('init' -> "):
    config.check_resume(values('init'), values(f'{folder}/init'))


def test_what_is_no_path_stays(folder, monkeypatch):
  for name in ('init', 'policy', 'random', 'stage:sft', 'ema:0.9'):
    (folder / name).mkdir()
  monkeypatch.setenv('SOMEWHERE', str(folder))
  monkeypatch.setenv('HERE', '.')
  for reference in ('init', 'policy', 'ema:0.9', 'stage:sft', 'gs://a/b'):
    algorithm = schema.Grpo(kl_beta=0.1, reference=reference)
    env = schema.Rows(path='$SOMEWHERE/rows.jsonl', eval_path='no/such.jsonl')
    entry = schema.EnvEntry(algorithm=algorithm, env=env)
    values = _resolved(schema.Stage(envs={'a': entry}))
    entry = values['main']['envs']['a']
    assert entry['algorithm']['reference'] == reference
    assert entry['env']['path'] == '$SOMEWHERE/rows.jsonl'
    assert entry['env']['eval_path'] == 'no/such.jsonl'
    assert values['main']['init'] == 'random'
    assert values['compilation_cache'] == '~/.cache/posttrain/compiled'
  entry = schema.EnvEntry(env=schema.Rows(path='$HERE/rows.jsonl'))
  values = _resolved(schema.Stage(envs={'a': entry}), compilation_cache=None)
  path = values['main']['envs']['a']['env']['path']
  assert path == str(folder / 'rows.jsonl')
  assert values['compilation_cache'] is None


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
