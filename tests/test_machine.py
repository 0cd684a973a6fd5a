"""Devices, host and versions as texts."""

import platform
import re

import jax
import numpy as np

import posttrain
from posttrain import machine, processes


def test_devices_are_those_here_or_planned_ones(monkeypatch):
  assert machine.devices() == f'{jax.device_count()} x cpu'
  assert machine.devices('TPU v5', 16, 2) == '16 x TPU v5 on 2 hosts'
  assert machine.devices(count=8, hosts=1) == '8 x cpu'
  monkeypatch.setattr(processes, 'count', lambda: 3)
  assert machine.devices(count=6) == '6 x cpu on 3 hosts'
  assert machine.devices('gpu', 6, 1) == '6 x gpu'


def test_a_host_has_cores_and_a_system_but_no_name():
  text = machine.host()
  assert re.fullmatch(r'[1-9]\d* CPU cores, \S+ \S+', text)
  assert platform.node() not in text


def test_versions_are_in_the_given_order():
  names = ('posttrain', 'python', 'numpy', 'no-such-package')
  assert list(machine.versions(*names).items()) == [
    ('posttrain', posttrain.__version__),
    ('python', platform.python_version()),
    ('numpy', np.__version__),
    ('no-such-package', 'unknown'),
  ]
