"""How far a workdir is, whatever became of its steps; options of a resume."""

import dataclasses
import json
import shutil
import sys
import types

import jax.numpy as jnp
import pytest

from posttrain import config, main, schema
from posttrain.checkpoints import store
from posttrain.stage import preflight, resume
from tests.checkpoints import test_store

pytestmark = pytest.mark.filterwarnings(
  'ignore::pytest.PytestUnraisableExceptionWarning'
)
STEPS = {'a': 4, 'b': 2}


def run_of(**steps):
  stages = {
    name: schema.Stage(envs={'x': schema.EnvEntry()}, steps=number)
    for name, number in (STEPS | steps).items()
  }
  return schema.Run(stages=stages)


def save(workdir, name, *steps):
  folder = workdir / 'checkpoints' / name
  saver = store.Checkpointer(str(folder), schema.Checkpoint(keep_last=9))
  for step in steps:
    host = {
      'step': step,
      'stage': name,
      'config': config.to_dict(run_of()),
      'metrics_position': 100 * step,
    }
    saver.save(step, {'x': jnp.sin(jnp.arange(2000.0) * step)}, host)
  saver.close()
  return folder


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """Workdirs whose stage a has ended, before and after b began."""
  folder = tmp_path_factory.mktemp('saved')
  for name in ('a', 'b'):
    save(folder / name, 'a', 2, 4)
  save(folder / 'b', 'b', 1)
  return folder


@pytest.fixture
def only_a(saved, tmp_path):
  return shutil.copytree(saved / 'a', tmp_path / 'only_a')


@pytest.fixture
def both(saved, tmp_path):
  return shutil.copytree(saved / 'b', tmp_path / 'both')


def claim(workdir, run):
  main.claim(str(workdir), config.to_dict(run), {})


def end_of(workdir, stage='a', **steps):
  return resume.end_of(run_of(**steps), stage, str(workdir))


@pytest.mark.filterwarnings('error')
def test_the_end_of_sound_stages(only_a, both, tmp_path):
  for workdir in (only_a, both):
    assert end_of(workdir) == 400
    assert end_of(workdir, 'b') is None
  assert end_of(tmp_path) is None
  assert end_of(only_a, a=6) is None
  with pytest.raises(ValueError, match='at least the 4 steps'):
    end_of(only_a, a=3)


# Damage that leaves no sound last step, to the item that `end_of` reads or not.
@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('kind', test_store.DAMAGE)
def test_a_damaged_last_step_trains_on_from_an_older_one(only_a, kind):
  test_store.DAMAGE[kind](only_a / 'checkpoints/a/4')
  assert end_of(only_a) is None


@pytest.mark.parametrize(
  'kind', [x for x in test_store.DAMAGE if 'host' in x or x[:3] == 'eve']
)
def test_a_stage_that_another_was_built_on_stays_finished(both, kind):
  test_store.DAMAGE[kind](both / 'checkpoints/a/4')
  with pytest.warns(UserWarning, match="'a' stays finished, because stage 'b'"):
    assert end_of(both) is not None
  shutil.rmtree(both / 'checkpoints/a')
  with pytest.warns(UserWarning, match='should hold step 4'):
    assert end_of(both) is not None


def test_a_workdir_of_other_stages_is_refused(only_a):
  """Also without the config.json that names them."""
  other = schema.Run(stages={'mine': run_of().stages['a']})
  with pytest.raises(ValueError, match='must keep its config: changed config.'):
    preflight.check_resume(config.to_dict(other), str(only_a), {})
  preflight.check_resume(config.to_dict(run_of()), str(only_a), {})


def test_a_run_is_not_the_model_of_its_own_workdir(only_a):
  stages = run_of().stages
  stages['a'] = dataclasses.replace(stages['a'], init=str(only_a))
  with pytest.raises(
    ValueError, match=r'config\.a\.init.*--workdir=\S*only_a_2'
  ):
    claim(only_a, schema.Run(stages=stages))


def test_the_end_of_a_stage_is_not_an_older_step(both):
  resume.check_end(run_of(), 'a', str(both))
  (both / 'checkpoints/a/4').rename(both / 'moved')
  with pytest.raises(
    ValueError, match="'stage:a' must be the end of the stage"
  ):
    resume.check_end(run_of(), 'a', str(both))


@pytest.mark.parametrize('gone', ['config.json', 'metrics.jsonl'])
def test_options_are_compared_with_those_of_the_checkpoints(only_a, gone):
  (only_a / 'metrics.jsonl').touch()
  claim(only_a, run_of())
  (only_a / gone).unlink()
  claim(only_a, run_of(b=7))
  stages = run_of().stages
  stages['b'] = dataclasses.replace(stages['b'], optim=schema.Optim(lr=9.0))
  with pytest.raises(ValueError, match=r'config\.b\.optim\.lr \(.* -> 9\.0\)'):
    claim(only_a, schema.Run(stages=stages))


@pytest.mark.parametrize('kind', ['tokens', 'preference'])
@pytest.mark.parametrize('held_out', [False, True])
def test_changed_data_are_refused_by_name_and_moved_ones_are_not(
  kind, held_out, tmp_path, monkeypatch, caplog
):
  code = tmp_path / 'own_grades.py'
  code.write_text(
    'def grade(completions):\n  return [0.0] * len(completions)\n'
  )
  monkeypatch.syspath_prepend(str(tmp_path))
  monkeypatch.delitem(sys.modules, 'own_grades', raising=False)
  paths = [tmp_path / f'{x}.jsonl' for x in ('train', 'eval', 'moved')]
  answers = ('chosen', 'rejected') if kind == 'preference' else ('completion',)
  for path in paths:
    rows = [
      {'prompt': f'{i}?'} | dict(zip(answers, 'xy', strict=False))
      for i in range(9)
    ]
    path.write_text('\n'.join(map(json.dumps, rows)))

  def components(path):
    file = {'path': str(path), 'eval_path': str(paths[1])}
    entry = schema.EnvEntry(
      env=schema.Rows(**file, eval_fraction=0.0),
      rewards={'own': schema.RewardFn(fn='own_grades:grade')},
    )
    stage = schema.Stage(
      kind=kind,
      envs={'x': entry} if kind == 'tokens' else {},
      pairs=schema.PairFile(**file),
      eval=schema.Eval(suite_path=str(path)),
      steps=4,
    )
    run = schema.Run(stages={'a': stage})
    return config.to_dict(run), preflight.check(preflight.resolve(run))

  options, stages = components(paths[0])
  host = {'step': 2, 'stage': 'a', 'config': options}
  host['data'] = stages['a'].data.fingerprints()
  folder = str(tmp_path / 'run' / 'checkpoints' / 'a')
  saver = store.Checkpointer(folder, schema.Checkpoint())
  saver.save(2, {'x': jnp.zeros(3)}, host)
  saver.close()
  workdir = str(tmp_path / 'run')
  main.claim(workdir, *components(paths[0]))
  main.claim(workdir, *components(paths[2]))
  assert 'own_grades' not in caplog.text
  code.write_text(code.read_text().replace('0.0', '1.0'))
  main.claim(workdir, *components(paths[0]))
  text = (
    'own_grades.py, of config.a.envs.x.rewards.own.fn=own_grades:grade, has '
  )
  assert (f'{text}changed since step 2 of' in caplog.text) == (kind == 'tokens')
  changed = paths[held_out]
  changed.write_text(changed.read_text().replace('3?', '4?'))
  before = (tmp_path / 'run' / 'config.json').read_bytes()
  with pytest.raises(ValueError, match=rf'a\..*{changed.name}.* has'):
    main.claim(workdir, *components(paths[0]))
  assert (tmp_path / 'run' / 'config.json').read_bytes() == before


@pytest.mark.parametrize('data', [b'', b'{"seed": 1}'])
def test_a_broken_config_json_is_written_anew_or_refused(
  only_a, tmp_path, data
):
  (only_a / 'config.json').write_bytes(data)
  claim(only_a, run_of())
  written = json.loads((only_a / 'config.json').read_text())
  assert written['stages'] == ['a', 'b']
  # Without a checkpoint the file may be anybody's, such as a model's.
  (tmp_path / 'config.json').write_bytes(data)
  with pytest.raises(ValueError, match='--workdir must be a new folder'):
    claim(tmp_path, run_of())
  assert (tmp_path / 'config.json').read_bytes() == data


@pytest.mark.parametrize('path', [None, 'rows.jsonl'])
def test_data_that_changed_are_refused_by_name(tmp_path, monkeypatch, path):
  (tmp_path / 'checkpoints' / 'a').mkdir(parents=True)
  node = {'type': 'tasks:Own', 'path': path}
  stage = {'steps': 2, 'init': 'random', 'envs': {'x': {'env': node}}}
  new = {'stages': ['a'], 'a': stage}
  host = {'config': new, 'step': 1, 'data': {'envs.x.env': '6'}}
  monkeypatch.setattr(store, 'newest_host', lambda folder: host)
  monkeypatch.setattr(config, 'check_resume', lambda *arguments: None)

  def check(fingerprint):
    data = types.SimpleNamespace(
      fingerprints=lambda: {'envs.x.env': fingerprint}
    )
    stages = {'a': types.SimpleNamespace(data=data)}
    preflight.check_resume(new, str(tmp_path), stages)

  check('6')
  with pytest.raises(ValueError, match=f'{path or "tasks:Own"}.* has changed'):
    check('7')
  host['data'] = {'envs.x.env': ''}  # of an older run
  check('7')
