"""Devices, host and versions as texts."""

import json
import platform

import jax
import numpy as np

from posttrain import machine, processes


def test_devices_are_those_here_or_planned_ones(monkeypatch):
  assert machine.devices() == f'{jax.device_count()} x cpu'
  assert machine.devices('TPU v5', 16, 2) == '16 x TPU v5 on 2 hosts'
  monkeypatch.setattr(processes, 'count', lambda: 3)
  assert machine.devices(count=6) == '6 x cpu on 3 hosts'


def test_versions_are_in_the_given_order():
  assert [*machine.versions('no-such-package', 'python', 'numpy').items()] == [
    ('no-such-package', 'unknown'),
    ('python', platform.python_version()),
    ('numpy', np.__version__),
  ]


def test_starts_are_kept_and_the_end_is_noted(tmp_path):
  def read():
    values = json.loads((tmp_path / machine.NAME).read_text())
    assert values['stages'] == sizes
    return values['starts'], values['ended']

  sizes = {'grpo': {'parameters': 10, 'trained': 2}}
  (tmp_path / machine.NAME).write_text('garbage')  # is written anew
  machine.begin(str(tmp_path), sizes)
  (start,), ended = read()
  assert ended is None and start['devices'] == machine.devices()
  machine.end(str(tmp_path))
  assert read()[1].endswith(' UTC')
  # The run may go on with more steps.
  machine.begin(str(tmp_path), sizes)
  starts, ended = read()
  assert ended is None and len(starts) == 2
