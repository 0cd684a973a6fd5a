"""The Dockerfile: lint, and what setup.py also says."""

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[3]
FILE = ROOT / 'experiments' / 'launch' / 'Dockerfile'


def test_each_device_has_the_jax_that_setup_py_asks_for():
  (spec,) = re.findall(r"'jax(>=[^']+)'", (ROOT / 'setup.py').read_text())
  stages = re.split(r'^FROM ', FILE.read_text(), flags=re.M)
  extras = {'cpu': '', 'cuda': '[cuda12]', 'tpu': '[tpu]'}
  for name, extra in extras.items():
    (stage,) = (text for text in stages if text.startswith(f'base AS {name}\n'))
    assert f"'jax{extra}{spec}'" in stage
