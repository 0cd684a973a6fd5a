"""Shared parts of the adapters, and late imports of the extras."""

import asyncio
import pathlib
import subprocess
import sys

import pytest

from posttrain import types
from posttrain.envs.adapters import common

CODE = """
import sys
sys.modules.update(websockets=None, verifiers=None, trl=None)
import posttrain.envs.adapters.traces
from posttrain import schema
from posttrain.envs import registry
env = registry.make('a', schema.Trl('trl', 'tests.envs.adapters.games:Guess'))
assert len(env.source('eval', 0)) == 100
"""


def test_the_adapters_import_without_the_extras():
  done = subprocess.run(
    [sys.executable, '-c', CODE],
    capture_output=True,
    text=True,
    cwd=pathlib.Path(__file__).parents[3],
  )
  assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
  ('reward', 'at', 'correct'),
  [
    (1.0, 1.0, True),
    (0.5, 1.0, False),
    (1.0, None, None),
    (None, 1.0, None),
    (0.0, 0.0, True),
  ],
)
def test_correct_is_a_reward_of_at_least_correct_at(reward, at, correct):
  made = common.score(reward, at, {'calls': 2})
  assert made == types.Score(reward, correct, metrics={'calls': 2})


def test_settle_awaits_awaitables():
  async def three():
    await asyncio.sleep(0)
    return 3

  async def inside():
    return common.settle(three()), common.settle(4)

  assert common.settle(4) == 4 and common.settle(three()) == 3
  assert asyncio.run(inside()) == (3, 4)


def test_a_failing_import_inside_the_package_is_raised(tmp_path, monkeypatch):
  (tmp_path / 'lacking.py').write_text('import not_there\n')
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(ModuleNotFoundError, match='not_there'):
    common.load('lacking', 'x', 'a')
  with pytest.raises(ValueError, match='not_there must be installed for'):
    common.load('not_there.module', 'x', 'a')
