"""Hosts and coordinates of devices: as the compilers' topologies have them."""

import numpy as np
import pytest

from experiments.aot import targets
from experiments.scale import fleets, links
from posttrain import schema, sharding

CASES = (
  ('h100:8', (2, 4, 1)),
  ('h100:64', (4, 16, 1)),
  ('h100:512', (64, 4, 2)),
  ('v5e:4', (2, 1, 2)),
  ('v5e:8', (1, 8, 1)),
  ('v5e:16', (4, 4, 1)),
  ('v5e:256', (4, 64, 1)),
  ('v6e:256', (1, 256, 1)),
  ('v6e:256', (4, 16, 4)),
)

pytestmark = pytest.mark.aot


@pytest.mark.parametrize(('name', 'mesh'), CASES)
def test_layouts_are_those_of_the_topology(name, mesh):
  target = fleets.parse(name)
  if reason := targets.missing(target.chip):
    pytest.skip(reason)
  devices = targets.devices(target.chip, fleets.topology(target))
  found = links.of_devices(
    sharding.make_mesh(schema.Mesh(*mesh), devices).devices
  )
  expected = fleets.layout(target, mesh)
  assert np.array_equal(found.hosts, expected.hosts)
  if target.tpu:
    assert np.array_equal(found.domains, expected.domains)
    assert np.array_equal(found.coords, expected.coords)
