"""Models in the hub's cache, by id; nothing is downloaded."""

import json
import os
import pathlib
import shutil

import pytest
from huggingface_hub import constants

from posttrain import api, config, main
from posttrain.checkpoints import weights
from posttrain.util import hub
from tests import qwen3


@pytest.fixture
def snapshot(tmp_path, monkeypatch):
  """Returns the snapshot of mine/model, in a cache as the hub's library has."""
  monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path / 'hub'))
  model = tmp_path / 'hub' / 'models--mine--model'
  folder = model / 'snapshots' / 'abc123'
  folder.mkdir(parents=True)
  (model / 'refs').mkdir()
  (model / 'refs' / 'main').write_text('abc123')
  (model / 'blobs').mkdir()
  (model / 'blobs' / 'f00').write_text(json.dumps(qwen3.CONFIG))
  os.symlink(model / 'blobs' / 'f00', folder / 'config.json')
  return str(folder)


def test_an_id_is_the_folder_of_its_commit(snapshot, tmp_path):
  assert hub.folder('mine/model') == snapshot
  assert hub.folder('mine/other') is None
  assert weights.find('mine/model') == snapshot
  with pytest.raises(ValueError, match=f'{tmp_path}/hub .*download mine/a'):
    weights.find('mine/a')
  (tmp_path / 'adapter_config.json').write_text(
    '{"peft_type": "LORA", "base_model_name_or_path": "mine/model"}'
  )
  assert weights.read(str(tmp_path)).start() == snapshot
  node = config.load('configs/gsm8k_sft.py:tiny')
  for key in ('model', 'sft.init', 'tokenizer.path'):
    config.override(node, key, 'mine/model')
  run = config.build(node)
  assert run.stages['sft'].init == run.tokenizer.path == snapshot
  assert run.model.embed_dim == 64


@pytest.fixture
def begun(snapshot, tmp_path, monkeypatch):
  """Returns the command of a run that began with the snapshot, its workdir.

  The cache has got a newer snapshot since, of another size.
  """
  data, workdir = tmp_path / 'rows.jsonl', tmp_path / 'run'
  data.write_text('{"prompt": "a", "completion": "b"}')
  workdir.mkdir()
  spec = f'sft:mine/model,{data}'
  stored = config.to_dict(main.load(spec))
  (workdir / 'config.json').write_text(json.dumps(stored))
  newer = pathlib.Path(snapshot).with_name('def456')
  newer.mkdir()
  changed = {**qwen3.CONFIG, 'hidden_size': 32}
  (newer / 'config.json').write_text(json.dumps(changed))
  (newer.parents[1] / 'refs' / 'main').write_text('def456')
  return [f'--config={spec}', f'--workdir={workdir}']


def test_a_run_continues_with_the_commit_that_it_began_with(
  begun, snapshot, monkeypatch
):
  runs = []
  monkeypatch.setattr(main, 'train', lambda run, *rest: runs.append(run))
  assert main.main(begun) == 0
  assert main.main([begun[0], f'{begun[1]}_new']) == 0
  old, new = runs
  assert old.stages['sft'].init == old.tokenizer.path == snapshot
  assert old.model.embed_dim == 64 and new.model.embed_dim == 32
  assert new.stages['sft'].init.endswith('def456')
  with pytest.raises(ValueError, match='config.sft.init .*abc123.*def456'):
    config.check_resume(config.to_dict(old), config.to_dict(new))


def test_a_run_in_python_continues_with_its_commit(
  begun, snapshot, monkeypatch
):
  spec, workdir = (x.partition('=')[2] for x in begun)
  monkeypatch.setattr(main, 'train', lambda run, *rest: {'init': run})
  old, new = api.load(spec, workdir=workdir), api.load(spec)
  assert old.stages['sft'].init == old.tokenizer.path == snapshot
  assert new.stages['sft'].init.endswith('def456')


def test_a_commit_that_is_not_there_any_more_is_named(
  begun, snapshot, tmp_path, capsys
):
  shutil.rmtree(snapshot)
  assert main.main(begun) == 2
  message = capsys.readouterr().err
  assert snapshot in message and '--revision abc123' in message


@pytest.mark.parametrize('name', ['random', '/a/b', 'runs/my--model'])
def test_what_is_no_id(name):
  assert hub.is_id('Qwen/Qwen3-0.6B')
  assert not hub.is_id(name) and hub.folder(name) is None
