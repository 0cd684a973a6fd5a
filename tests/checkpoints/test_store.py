"""Saving and restoring checkpoints: bits, damage, keep rules, errors."""

import contextlib
import dataclasses
import gc
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import warnings
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from posttrain import schema
from posttrain.checkpoints import store
from posttrain.training import arrays
from tests import fixtures

# A failed read leaves futures of Orbax with unfetched errors.
pytestmark = pytest.mark.filterwarnings(
  'ignore::pytest.PytestUnraisableExceptionWarning'
)


@pytest.fixture(autouse=True, scope='module')
def frozen():
  """Spares each collection below what other modules left, a second's work."""
  gc.collect()
  gc.freeze()
  yield
  gc.unfreeze()


@pytest.fixture(autouse=True)
def collect_garbage():
  """Ends those futures within the test that made them."""
  yield
  gc.collect()


def make_state(seed):
  key = jax.random.key(seed)
  params = {
    'block': {
      'kernel': jax.random.normal(key, (3, 16, 40)),
      'scale': jnp.array([jnp.nan, -0.0, jnp.inf, 1e-40]),
    },
    'embed': jax.random.normal(key, (64, 16)).astype(jnp.bfloat16),
  }
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
  return arrays.TrainState(
    step=jnp.int32(seed),
    params=params,
    opt_state=optimizer.init(params),
    average=None,
    skipped=jnp.int32(0),
    skipped_in_row=jnp.int32(0),
  )


def make_host(step):
  return {
    'step': step,
    'stage': 'sft',
    'model': {'layers': 1},
    'pipeline': {'rng': 2**100 + step, 'mean': 0.1},
    'metrics_position': 7,
  }


def abstract(state):
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
  )


def open_at(folder, **keep):
  return store.Checkpointer(str(folder), schema.Checkpoint(**keep))


def assert_same_bits(got, want):
  assert jax.tree.structure(got) == jax.tree.structure(want)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert (a.dtype, a.sharding) == (b.dtype, b.sharding)
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """A folder with steps 10 and 20; tests copy it."""
  folder = tmp_path_factory.mktemp('saved')
  saver = open_at(folder)
  for step in (10, 20):
    saver.save(step, make_state(step), make_host(step))
  saver.close()
  return folder


@pytest.fixture
def folder(saved, tmp_path):
  return pathlib.Path(shutil.copytree(saved, tmp_path / 'sft'))


def test_restores_every_bit_into_the_shardings_of_like(folder):
  like = abstract(make_state(0))
  for step, number in ((None, 20), (10, 10)):
    state, host = open_at(folder).restore(like, step=step)
    assert_same_bits(state, make_state(number))
    assert host == make_host(number)


def test_a_saved_state_may_be_donated_at_once(tmp_path):
  update = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
  state = update({f'a{i}': jnp.zeros((256, 1024)) for i in range(4)})
  with contextlib.closing(open_at(tmp_path)) as saver:
    saver.save(1, state, {})
    state, _ = saver.restore(update(update(state)))
  for x in state.values():
    np.testing.assert_array_equal(x, 1.0)


def test_keep_rules_delete_old_steps(tmp_path):
  saver = open_at(tmp_path, keep_last=2, keep_every=4)
  for step in range(1, 8):
    saver.save(step, {'x': jnp.float32(step)}, {'step': step})
  saver.close()
  assert saver.steps() == [4, 6, 7]
  assert saver.latest() == 7


def test_a_half_written_step_is_ignored_and_deleted(folder):
  shutil.copytree(folder / '20', folder / '30.orbax-checkpoint-tmp')
  (folder / '30.orbax-checkpoint-tmp' / 'host' / 'metadata').unlink()
  saver = open_at(folder)
  assert saver.latest() == 20
  saver.save(30, make_state(30), make_host(30))
  saver.close()
  assert sorted(os.listdir(folder)) == ['20', '30']
  assert_same_bits(saver.restore(make_state(0))[0], make_state(30))


def largest(step):
  files = [path for path in (step / 'state').rglob('*') if path.is_file()]
  return max(files, key=lambda path: path.stat().st_size)


def flip(path, fraction):
  data = bytearray(path.read_bytes())
  data[int(fraction * (len(data) - 1))] ^= 4
  path.write_bytes(data)


def rewrite_host(step, change):
  path = step / 'host' / 'metadata'
  record = json.loads(path.read_text())
  change(record)
  path.write_text(json.dumps(record))


DAMAGE = {
  'data zeroed': lambda step: largest(step).write_bytes(
    bytes(largest(step).stat().st_size)
  ),
  'bit flipped': lambda step: flip(largest(step), 0.7),
  'state deleted': lambda step: shutil.rmtree(step / 'state'),
  'tree metadata cut': lambda step: os.truncate(
    step / 'state' / '_METADATA', 50
  ),
  'host digit changed': lambda step: rewrite_host(
    step, lambda record: record['host'].update(metrics_position=8)
  ),
}


@pytest.mark.parametrize('kind', DAMAGE)
def test_a_damaged_step_falls_back_and_can_be_saved_again(folder, kind):
  assert store.is_sound(str(folder / '20'))
  DAMAGE[kind](folder / '20')
  assert not store.is_sound(str(folder / '20'))
  assert store.newest_host(str(folder))['step'] in (10, 20)
  saver = open_at(folder)
  assert saver.latest() == 20
  with pytest.warns(UserWarning, match=f'{folder / "20"} is damaged'):
    state, host = saver.restore(make_state(0))
  assert_same_bits(state, make_state(10))
  assert host == make_host(10)
  assert saver.steps() == [10]
  assert sorted(os.listdir(folder)) == ['10', '20.damaged']
  saver.save(20, make_state(21), make_host(20))
  saver.wait()
  assert_same_bits(saver.restore(make_state(0))[0], make_state(21))
  saver.close()
  assert open_at(folder).steps() == [10, 20]


def test_without_a_sound_step_restore_fails_and_keeps_all(folder):
  for step in (10, 20):
    DAMAGE['data zeroed'](folder / str(step))
  message = rf'{folder} must hold a sound.*got steps \[20, 10\].*delete'
  with pytest.warns(UserWarning, match='is damaged'):
    with pytest.raises(ValueError, match=message):
      open_at(folder).restore(make_state(0))
  assert sorted(os.listdir(folder)) == ['10', '20']


def test_saving_an_old_step_deletes_the_newer_ones(folder):
  saver = open_at(folder)
  saver.save(10, make_state(5), make_host(10))
  assert saver.restore(make_state(0))[1]['step'] == 10
  assert saver.steps() == [10]
  saver.close()


def test_a_step_restored_by_number_must_exist_and_be_sound(folder):
  saver = open_at(folder)
  DAMAGE['data zeroed'](folder / '10')
  for step in (10, 15):
    with pytest.raises(ValueError, match=f'{step} must be a sound'):
      saver.restore(make_state(0), step=step)
  assert saver.steps() == [10, 20]


@pytest.mark.parametrize(
  'change, message',
  [
    (
      {'embed': jnp.zeros((65, 16))},
      r"bfloat16\[64, 16\] at 'params/embed', expected float32\[65, 16\]",
    ),
    (
      {'more': jnp.zeros(2)},
      r"got nothing at 'params/more', expected float32\[2\]",
    ),
  ],
  ids=['shape', 'missing'],
)
def test_arrays_of_another_model_are_an_error_that_deletes_nothing(
  folder, change, message
):
  state = make_state(0)
  params = state.params | change
  saver = open_at(folder)
  with pytest.raises(ValueError, match=message):
    saver.restore(dataclasses.replace(state, params=params))
  assert saver.steps() == [10, 20]
  with pytest.raises(ValueError, match=message):
    store.restore_params(str(folder), params)


@pytest.mark.parametrize(
  'error', [ValueError('UNAVAILABLE: Error reading "state/d/0"'), OSError(24)]
)
def test_storage_and_memory_errors_are_not_damage(folder, monkeypatch, error):
  fail = mock.Mock(side_effect=error)
  monkeypatch.setattr(store.tree, 'checksums', fail)
  with pytest.raises(type(error)):
    open_at(folder).restore(make_state(0))
  assert sorted(os.listdir(folder)) == ['10', '20']


def test_params_and_host_are_read_from_workdir_stage_or_step(folder, tmp_path):
  workdir = tmp_path / 'run'
  stage = workdir / 'checkpoints' / 'sft'
  shutil.copytree(folder, stage)
  # An earlier stage, with a larger step number.
  shutil.copytree(folder / '10', workdir / 'checkpoints' / 'a' / '900')
  like = make_state(0).params
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    for path, step in ((workdir, 20), (stage, 20), (stage / '10', 10)):
      params = store.restore_params(str(path), abstract(like))
      assert_same_bits(params, make_state(step).params)
      assert store.read_host(str(path)) == make_host(step)


def test_restore_params_restores_the_average_instead(tmp_path):
  state = make_state(1)
  average = jax.tree.map(lambda x: x + 1, state.params)
  with contextlib.closing(open_at(tmp_path)) as saver:
    saver.save(1, dataclasses.replace(state, average=average), {})
  like = abstract(state.params)
  got = store.restore_params(str(tmp_path), like, average=True)
  assert_same_bits(got, average)
  assert_same_bits(store.restore_params(str(tmp_path), like), state.params)


def test_a_path_without_a_checkpoint_is_an_error(tmp_path):
  assert open_at(tmp_path).restore(make_state(0)) is None
  for path in (tmp_path, tmp_path / 'absent'):
    with pytest.raises(ValueError, match='checkpoint: got none'):
      store.read_host(str(path))


KILLED = """
import os, signal, sys
import jax.numpy as jnp
from posttrain import schema
from posttrain.checkpoints import store
saver = store.Checkpointer(sys.argv[1], schema.Checkpoint())
saver.save(1, {'x': jnp.ones(2_000_000)}, {'step': 1})
saver.wait()
saver.save(2, {'x': jnp.full(2_000_000, 2.0)}, {'step': 2})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_during_a_save_leaves_a_sound_step(tmp_path):
  done = subprocess.run([sys.executable, '-c', KILLED, str(tmp_path)])
  assert done.returncode == -signal.SIGKILL
  state, host = open_at(tmp_path).restore({'x': jnp.zeros(2_000_000)})
  assert host['step'] in (1, 2)  # 2 if the writer won the race
  np.testing.assert_array_equal(state['x'], float(host['step']))


RESHARDED = """
import sys, warnings
warnings.simplefilter('error')
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from posttrain import schema
from posttrain.checkpoints import store
mesh = jax.make_mesh((4,), ('x',), axis_types=(jax.sharding.AxisType.Auto,))
x = np.random.default_rng(0).normal(size=(8, 12)).astype(np.float32)
split, whole = NamedSharding(mesh, P('x')), NamedSharding(mesh, P(None, 'x'))
saver = store.Checkpointer(sys.argv[1], schema.Checkpoint())
saver.save(1, {'x': jax.device_put(x, split)}, {})
saver.wait()
for to in (split, whole, jax.sharding.SingleDeviceSharding(jax.devices()[2])):
  like = {'x': jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to)}
  state, _ = saver.restore(like)
  assert state['x'].sharding == to
  np.testing.assert_array_equal(state['x'], x)
saver.close()
"""


def test_restores_into_another_sharding(tmp_path):
  fixtures.run_on_devices(4, '-c', RESHARDED, str(tmp_path))


def save_best(saver, *steps):
  for step, best in steps:
    host = {**make_host(step), 'best': {'step': best, 'value': 0.5}}
    saver.save(step, {'x': jnp.arange(3.0) + step}, host)
  saver.wait()


def test_the_best_steps_of_the_latest_ones_are_kept(tmp_path):
  with contextlib.closing(open_at(tmp_path, keep_last=2)) as saver:
    save_best(saver, (3, 3), (6, 3), (8, 3))
    assert saver.steps() == [3, 6, 8]
    save_best(saver, (12, 12))
    assert saver.steps() == [3, 8, 12]  # 8 names 3, should 12 be damaged
    save_best(saver, (15, 12))
    assert saver.steps() == [12, 15]
    assert store.find(str(tmp_path)).name == '12'


def test_a_missing_best_step_is_named(tmp_path):
  with contextlib.closing(open_at(tmp_path)) as saver:
    save_best(saver, (5, 5), (7, 5))
  shutil.rmtree(tmp_path / '5')
  with pytest.raises(ValueError, match='/5 must hold the best step'):
    store.find(str(tmp_path))
