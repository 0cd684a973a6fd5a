"""about.json: what a run ran on."""

import json
import types

import jax

import posttrain
from posttrain.stage import about


def component(parameters, trained):
  plan = types.SimpleNamespace(parameters=parameters, trained=trained)
  return types.SimpleNamespace(plan=plan)


def read(folder):
  return json.loads((folder / 'about.json').read_text())


def test_starts_are_kept_and_the_end_is_noted(tmp_path):
  stages = {'sft': component(10, 10), 'grpo': component(10, 2)}
  about.begin(str(tmp_path), stages)
  first = read(tmp_path)
  assert first['ended'] is None
  assert first['stages']['grpo'] == {'parameters': 10, 'trained': 2}
  (start,) = first['starts']
  devices = jax.devices()
  assert start['devices'] == f'{len(devices)} x {devices[0].device_kind}'
  assert start['versions']['posttrain'] == posttrain.__version__
  assert start['versions']['jax'] == jax.__version__
  about.end(str(tmp_path))
  ended = read(tmp_path)
  assert ended['ended'].endswith(' UTC')
  assert ended['starts'] == first['starts']
  # The run may go on with more steps.
  about.begin(str(tmp_path), stages)
  again = read(tmp_path)
  assert again['ended'] is None and len(again['starts']) == 2


def test_a_damaged_file_is_written_anew(tmp_path):
  (tmp_path / 'about.json').write_text('garbage')
  about.begin(str(tmp_path), {})
  assert len(read(tmp_path)['starts']) == 1
