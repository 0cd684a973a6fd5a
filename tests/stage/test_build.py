"""Assembly of a stage: what preflight builds is what the run uses."""

import contextlib
import json
from unittest import mock

from posttrain import config, main
from posttrain.chat import rendering
from posttrain.data import preferences
from posttrain.envs import registry
from posttrain.stage import build, plan, preflight
from posttrain.util import preemption


def test_pairs_are_read_once_and_components_of_all_stages_built_once(tmp_path):
  path = tmp_path / 'pairs.jsonl'
  rows = [{'prompt': x, 'chosen': 'a', 'rejected': 'b'} for x in 'pqrs']
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  pairs = {'type': 'file', 'path': str(path), 'eval_fraction': 0.0}
  run = main.load(
    'configs/arithmetic_dpo.py:tiny',
    [
      ('dpo.pairs', json.dumps(pairs)),
      ('dpo.init', 'random'),
      ('dpo.loss.preference', '{"type": "simpo"}'),
    ],
  )
  places = {
    (rendering, 'load'): 1,
    (preferences, 'read'): 1,
    (registry, 'make'): len(run.stages),
    (plan, 'make'): len(run.stages),
  }
  with contextlib.ExitStack() as stack:
    spies = [
      stack.enter_context(mock.patch.object(*x, wraps=getattr(*x)))
      for x in places
    ]
    stages = preflight.check(preflight.resolve(run))
    main.claim(str(tmp_path / 'run'), config.to_dict(run), stages)
    signal = preemption.Signal()
    build.make(stages['dpo'], str(tmp_path / 'run'), 0, signal).close()
  assert [x.call_count for x in spies] == list(places.values())
