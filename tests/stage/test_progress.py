"""How far a workdir is, whatever became of its steps; options of a resume."""

import dataclasses
import json
import os
import shutil
import warnings

import jax.numpy as jnp
import pytest

from posttrain import config, main, schema
from posttrain.checkpoints import reading, store
from posttrain.stage import progress
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


def save(workdir, name, *steps, run=None):
  folder = workdir / 'checkpoints' / name
  saver = store.Checkpointer(str(folder), schema.Checkpoint(keep_last=9))
  for step in steps:
    host = {
      'step': step,
      'stage': name,
      'config': config.to_dict(run or run_of()),
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


def test_the_end_of_sound_stages(only_a, both, tmp_path):
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    for workdir in (only_a, both):
      assert progress.end_of(run_of(), 'a', str(workdir)) == 400
    assert progress.end_of(run_of(), 'b', str(only_a)) is None
    assert progress.end_of(run_of(), 'b', str(both)) is None
    assert progress.end_of(run_of(), 'a', str(tmp_path)) is None
    assert progress.end_of(run_of(a=6), 'a', str(only_a)) is None
  with pytest.raises(ValueError, match='at least the 4 steps'):
    progress.end_of(run_of(a=3), 'a', str(only_a))


def test_a_relative_workdir_is_the_same(both, only_a, monkeypatch):
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    for workdir in (only_a, both):
      monkeypatch.chdir(workdir.parent)
      name = workdir.name
      assert progress.end_of(run_of(), 'a', name) == 400
      assert progress.end_of(run_of(), 'b', name) is None
      assert reading.is_sound(f'{name}/checkpoints/a/4')
      assert reading.newest_host(f'{name}/checkpoints/a')['step'] == 4
      assert reading.has_steps(f'{name}/checkpoints/a')
      assert reading.find(name).is_absolute()


def test_steps_of_another_stage_or_number_are_damaged(both, only_a):
  stages = both / 'checkpoints'
  (stages / 'a').rename(stages / 'c')
  (stages / 'b').rename(stages / 'a')
  (stages / 'c').rename(stages / 'b')
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    assert progress.end_of(run_of(), 'a', str(both)) is None
  lines = [str(x.message) for x in caught]
  assert any(
    "a/1 is not used: its host item is of stage 'b'" in x for x in lines
  )
  assert any(
    "b/4 is not used: its host item is of stage 'a'" in x for x in lines
  )
  with pytest.raises(ValueError, match='move that folder away'):
    progress.check_order(run_of(), 'a', str(both))
  saver = store.Checkpointer(str(stages / 'b'), schema.Checkpoint(), 'b')
  with pytest.warns(UserWarning, match="is of stage 'a', not 'b'"):
    with pytest.raises(ValueError, match='must hold a sound checkpoint'):
      saver.restore({'x': jnp.zeros(2000)})
  saver.close()
  stage = only_a / 'checkpoints/a'
  shutil.rmtree(stage / '4')
  (stage / '2').rename(stage / '4')
  with pytest.warns(UserWarning, match='a/4 is not used: .* of step 2, not 4'):
    assert progress.end_of(run_of(), 'a', str(only_a)) is None
  assert not reading.is_sound(str(stage / '4'), 'a')


@pytest.mark.parametrize('path', ['/gs/bucket/run', '/s3/bucket'])
def test_no_path_is_one_of_a_remote_host(path):
  with pytest.raises(ValueError, match='must be of a local folder'):
    reading.find(path)


@pytest.mark.parametrize('path', ['gs://bucket/run', 'x://y', 'a/../gs://b'])
def test_addresses_are_names_of_local_folders(path):
  with pytest.raises(ValueError, match='which has no saved step'):
    reading.find(path)


# Damage that leaves no sound last step, to the item that `end_of` reads or not.
@pytest.mark.parametrize('kind', test_store.DAMAGE)
def test_a_damaged_last_step_trains_on_from_an_older_one(only_a, kind):
  test_store.DAMAGE[kind](only_a / 'checkpoints/a/4')
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    assert progress.end_of(run_of(), 'a', str(only_a)) is None


@pytest.mark.parametrize(
  'kind', [x for x in test_store.DAMAGE if 'host' in x or x[:3] == 'eve']
)
def test_a_stage_that_another_was_built_on_stays_finished(both, kind):
  test_store.DAMAGE[kind](both / 'checkpoints/a/4')
  with pytest.warns(UserWarning, match="'a' stays finished, because stage 'b'"):
    assert progress.end_of(run_of(), 'a', str(both)) is not None
  shutil.rmtree(both / 'checkpoints/a')
  with pytest.warns(UserWarning, match='should hold step 4'):
    assert progress.end_of(run_of(), 'a', str(both)) is not None
  # More steps of it would not be what the later stage was built on.
  with pytest.warns(UserWarning, match='should hold step 4'):
    assert progress.end_of(run_of(a=6), 'a', str(both)) is None
  with pytest.raises(ValueError, match='move that folder away'):
    progress.check_order(run_of(a=6), 'a', str(both))


@pytest.mark.parametrize('name', ['99', '9²', '007', 'notes', '99.damaged'])
@pytest.mark.parametrize('kind', ['file', 'folder', 'link'])
def test_strays_among_the_steps_are_no_steps(only_a, name, kind):
  stray = only_a / 'checkpoints/a' / name
  if kind == 'file':
    stray.write_text('x')
  elif kind == 'folder':
    stray.mkdir()
  else:
    stray.symlink_to('nowhere')
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    assert progress.end_of(run_of(), 'a', str(only_a)) == 400
    assert reading.find(str(only_a)).name == '4'
    folder = str(stray.parent)
    saver = store.Checkpointer(folder, schema.Checkpoint(keep_last=9))
    state, host = saver.restore({'x': jnp.zeros(2000)})
    assert host['step'] == 4 and state['x'][1] == jnp.sin(4.0)
    saver.save(99, state, {**host, 'step': 99})
    saver.close()
  assert reading.newest_host(folder)['step'] == 99
  kept = {f'{name}{end}' for end in ('', '.stray', '.damaged')}
  assert kept & set(os.listdir(folder))


def test_a_second_stray_of_a_name_gets_another_one(only_a):
  stage = only_a / 'checkpoints/a'
  for name in ('99', '99.stray'):
    (stage / name).write_text(name)
  (stage / '99.stray2').mkdir()
  with pytest.warns(UserWarning, match='renamed to 99.stray3'):
    store.Checkpointer(str(stage), schema.Checkpoint()).close()
  assert (stage / '99.stray3').read_text() == '99'
  assert (stage / '99.stray').read_text() == '99.stray'


def test_a_workdir_of_other_stages_is_refused(only_a):
  """Also without the config.json that names them."""
  run = run_of()
  other = schema.Run(stages={'mine': run.stages['a']})
  with pytest.raises(ValueError, match='must keep its config: changed config.'):
    progress.check_resume(other, str(only_a))
  progress.check_resume(run, str(only_a))


def test_the_end_of_a_stage_is_not_an_older_step(both):
  progress.check_end(run_of(), 'a', str(both))
  (both / 'checkpoints/a/4').rename(both / 'moved')
  with pytest.raises(
    ValueError, match="'stage:a' must be the end of the stage"
  ):
    progress.check_end(run_of(), 'a', str(both))


def changed():
  run = run_of()
  stage = run.stages['b']
  stage = dataclasses.replace(
    stage, optim=dataclasses.replace(stage.optim, lr=9.0)
  )
  return dataclasses.replace(run, stages={**run.stages, 'b': stage})


@pytest.mark.parametrize('gone', [(), ('config.json',), ('metrics.jsonl',)])
def test_options_are_compared_with_those_of_the_checkpoints(only_a, gone):
  (only_a / 'metrics.jsonl').touch()
  main.claim(str(only_a), run_of())
  for name in gone:
    (only_a / name).unlink()
  main.claim(str(only_a), run_of(b=7))
  before = (only_a / 'config.json').read_bytes()
  with pytest.raises(ValueError, match=r'config\.b\.optim\.lr \(.* -> 9\.0\)'):
    main.claim(str(only_a), changed())
  assert (only_a / 'config.json').read_bytes() == before


def test_checkpoints_without_options_resume(tmp_path):
  folder = save(tmp_path, 'a', 2)
  metadata = folder / '2' / 'host' / 'metadata'
  record = json.loads(metadata.read_text())
  del record['crc'], record['host']['config']
  record['crc'] = reading.crc(record)
  metadata.write_text(json.dumps(record))
  main.claim(str(tmp_path), changed())
  stored = json.loads((tmp_path / 'config.json').read_text())
  assert stored['b']['optim']['lr'] == 9.0


@pytest.mark.parametrize(
  'data', [b'', b'{"stages"', b'[1]', b'[' * 10_000, b'\xff', b'{"seed": 1}']
)
def test_a_broken_config_json_is_written_anew_or_refused(
  only_a, tmp_path, data
):
  (only_a / 'config.json').write_bytes(data)
  with pytest.warns(UserWarning, match='it is written anew'):
    main.claim(str(only_a), run_of())
  assert json.loads((only_a / 'config.json').read_text())['stages'] == [
    'a',
    'b',
  ]
  (only_a / 'config.json').write_bytes(data)
  with pytest.raises(ValueError, match=r'config\.b\.optim\.lr'):
    with warnings.catch_warnings():
      warnings.simplefilter('ignore')
      main.claim(str(only_a), changed())
  # Without a checkpoint the file may be anybody's, such as a model's.
  other = tmp_path / 'other'
  other.mkdir()
  (other / 'config.json').write_bytes(data)
  with pytest.raises(
    ValueError, match='--workdir must be a new folder'
  ) as error:
    main.claim(str(other), run_of())
  assert '\n' not in str(error.value)
  assert (other / 'config.json').read_bytes() == data
