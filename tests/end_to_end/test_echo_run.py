"""Echo, read off what the step trained on: which tokens, at which weight."""

import json
import re

import numpy as np

from posttrain import main, schema
from posttrain.chat import rendering

SAYS = re.compile(r'(Yes|No): [A-Z][a-z]+, [A-Z][a-z]+\. Add: [A-Z][a-z]+')


def test_ce_weights_are_alpha_on_observations_and_0_elsewhere(tmp_path):
  env = schema.AlphabetSort(
    first=2, more=1, role='tool', train_tasks=50, eval_tasks=4
  )
  entry = schema.EnvEntry(
    env=env,
    sampler=schema.Policy(temperature=0.7, max_tokens=8),
    group_size=2,
    algorithm=schema.Echo(prune_zero_advantage=False),
  )
  stage = schema.Stage(
    steps=1,
    envs={'names': entry},
    batch=schema.Batch(
      prompts_per_step=4, row_tokens=128, micro_batch_tokens=512
    ),
    rollout=schema.Rollout(slots=8, prefill_rows=4),
    eval=schema.Eval(prompts=1, samples=0, max_tokens=8),
  )
  run = schema.Run(
    model=schema.PRESETS['tiny'],
    compilation_cache=None,
    metrics=schema.Metrics(progress=False, export_tokens=1),
    stages={'main': stage},
  )
  main.launch(run, str(tmp_path), dry_run=False)
  (file,) = (tmp_path / 'token_exports').iterdir()
  records = [json.loads(line) for line in file.read_text().splitlines()]
  tokenizer = rendering.load(schema.Tokenizer()).tokenizer
  assert len(records) == 8
  for record in records:
    ids, weights, mask, heat = (
      np.array(record[key])
      for key in ('ids', 'ce_weights', 'mask', 'temperatures')
    )
    chosen = weights != 0
    assert set(np.float32(weights[chosen]).tolist()) == {float(np.float32(0.1))}
    assert SAYS.fullmatch(tokenizer.decode(ids[chosen].tolist()))
    assert not (chosen & mask).any()
    np.testing.assert_array_equal(np.array(record['rl_weights']) != 0, mask)
    np.testing.assert_allclose(heat, np.where(mask, 0.7, 1.0), rtol=1e-6)
  assert len({tuple(record['ids']) for record in records}) == 8
