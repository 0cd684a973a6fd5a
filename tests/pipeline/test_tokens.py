"""The pipeline: shapes, streams in the batch, exact resume."""

import dataclasses
import json
import re
import types
import typing

import numpy as np
import pytest

from posttrain import schema
from posttrain.algorithms import sft
from posttrain.chat import rendering, tokenizers
from posttrain.data import packing
from posttrain.envs import registry
from posttrain.metrics import statistics
from posttrain.pipeline import batches, environments
from posttrain.pipeline import tokens as token_pipeline
from posttrain.schema import objective
from tests import fixtures
from tests.data import test_packing


def _pipeline(
  seed=3, workers=None, stage=None, renderer=fixtures.RENDERER, **options
):
  stage = stage or fixtures.stage(**options)
  data = token_pipeline.TokenData(
    stage, registry.make_all(stage.envs), renderer, seed
  )
  return token_pipeline.TokenPipeline(data, workers=workers)


def _equal(a, b):
  for field in dataclasses.fields(a):
    np.testing.assert_array_equal(
      getattr(a, field.name), getattr(b, field.name)
    )


def test_a_batch_holds_every_completion_token_once():
  item = next(_pipeline(prompts=8, row_tokens=128, micro_batch_tokens=256))
  batch = item.batch
  assert batch.ids.shape == (4, 2, 128)  # room for 8 samples, a row each
  assert item.metrics['batch/samples'] == 8
  (epochs,) = (x for k, x in item.metrics.items() if k.startswith('epoch/'))
  assert epochs == 8 / 100
  np.testing.assert_array_equal(batch.ce_weights, batch.mask)
  assert batch.ce_count == batch.mask.sum()
  assert item.metrics['batch/completion_tokens'] == batch.mask.sum()
  assert not batch.rl_weights.any()
  assert (batch.versions == -1).all()  # nobody sampled it
  starts = (batch.positions == 0) & (batch.segment_ids > 0)
  assert starts.sum() == 8


# Whether a token's loss depends on no other one of its sample, by type and by
# option: so it may be computed once for all samples that have it.
PER_TOKEN = {
  'dppo': True,
  'ipo': True,
  'clip': True,
  'gspo': False,
  'cispo': True,
  'dro': True,
  'custom': False,
}
OPTIONS = [
  ('off_policy_mask', 0.1, False),
  *(('aggregation', x, x != 'sequence') for x in objective.AGGREGATIONS),
  *(('sampler_is_mode', x, x == 'none') for x in objective.SAMPLER_IS_MODES),
]


@pytest.mark.parametrize('kind', typing.get_args(objective.RlLoss))
@pytest.mark.parametrize('option, value, is_per_token', OPTIONS)
def test_which_losses_share_tokens_that_train(
  kind, option, value, is_per_token
):
  options = {'aggregation': 'token', 'constant_tokens': 9, option: value}
  if kind is schema.CustomRl:
    options['import_path'] = 'some.module:function'
  rl = kind(**options)
  stage = fixtures.stage(loss=schema.Loss(rl=rl))
  batch = dataclasses.replace(stage.batch, trees=True)
  pack = token_pipeline.Packer(dataclasses.replace(stage, batch=batch), 0)
  sample = test_packing.make(8, env='arithmetic', start=3)
  copies = pack([sample, sample]).copies
  # All tokens but the last one, or those before the first that trains.
  shared = 7 if is_per_token and PER_TOKEN[rl.type] else 3
  assert (copies == 2).sum() == shared


LONG = 'It is. ' * 40


def _rows(tmp_path, monkeypatch, sampler, *rows):
  """Returns the data of a stage on rows, of which two are read at a time."""
  monkeypatch.setattr(environments, 'CHECKED', 2)
  path = tmp_path / 'rows.jsonl'
  path.write_text('\n'.join(map(json.dumps, rows)))
  algorithm = schema.Sft() if sampler.type == 'dataset' else schema.Grpo()
  entry = schema.EnvEntry(
    env=schema.Rows(path=str(path), eval_fraction=0.0),
    algorithm=algorithm,
    sampler=sampler,
  )
  stage = fixtures.stage(row_tokens=64, micro_batch_tokens=64, prompts=3)
  stage = dataclasses.replace(stage, envs={'data': entry})
  envs = registry.make_all(stage.envs)
  return token_pipeline.TokenData(stage, envs, fixtures.RENDERER, 3)


@pytest.mark.parametrize('type', ['dataset', 'policy'])
@pytest.mark.parametrize('too_long', ['error', 'truncate', 'drop'])
def test_all_rows_are_checked_and_counted(
  tmp_path, monkeypatch, caplog, type, too_long
):
  rows = [{'prompt': f'{i}?', 'completion': 'Yes.'} for i in range(4)]
  rows += [{'prompt': '4?', 'completion': LONG + 'x'}] * (type == 'dataset')
  if too_long != 'truncate':
    rows += [{'prompt': LONG, 'completion': 'y'}]
  elif type == 'policy':
    return  # no such option
  count, long = len(rows), len(rows) - 4
  kind = {'dataset': schema.Dataset, 'policy': schema.Policy}[type]
  data = _rows(tmp_path, monkeypatch, kind(too_long=too_long), *rows)
  text = (
    rf"sampler.too_long='{too_long}': rows must fit into batch.row_tokens=64: "
    rf'got {long} of {count} that do not; the longest, \S*rows.jsonl:\d, '
    r'needs (2\d\d) tokens; row_tokens=\1 holds all of them'
  )
  if too_long == 'error':
    with pytest.raises(ValueError, match=text):
      data.check()
    return
  data.check()
  assert re.search(text, caplog.text)
  assert ('end of turn' in caplog.text) == (too_long == 'truncate')
  (line, *shown) = data.shown(color=False)
  assert f'{long} of {count} have more than 64' in line
  answer = '[[Yes.<|end|>]]' if type == 'dataset' else ''
  assert shown == [
    f'    <|user|>{i}?<|end|><|assistant|>{answer}' for i in '01'
  ]
  (_, *shown) = data.shown(color=True)
  assert ('\033' in shown[0]) == (type == 'dataset')
  drawn = [data.environments['data'].draw() for _ in range(8)]
  fits = {'0?', '1?', '2?', '3?'} | (
    {'4?'} if too_long == 'truncate' else set()
  )
  assert {task.prompt[0]['content'] for task in drawn} == fits


def test_rows_none_of_which_fit_are_refused(tmp_path, monkeypatch):
  row = {'prompt': LONG, 'completion': 'y'}
  sampler = schema.Dataset(too_long='drop')
  with pytest.raises(ValueError, match='got 1 of 1 that do not'):
    _rows(tmp_path, monkeypatch, sampler, row).check()


def test_replayed_demonstrations_are_rollouts_to_be_read():
  item = next(_pipeline(prompts=2, row_tokens=128, micro_batch_tokens=256))
  first, _ = batches.rows(item.played)
  assert first['rendered'].startswith('<|user|>What is')
  assert first['completion'][0]['role'] == 'assistant'
  assert (first['reward'], first['version']) == (None, -1)


def test_lost_workers_are_counted_where_there_are_workers():
  assert 'rollout/worker_restarts' not in next(_pipeline()).metrics
  pipeline = _pipeline(workers=types.SimpleNamespace(losses=3))
  assert next(pipeline).metrics['rollout/worker_restarts'] == 3


def test_joined_rows_hold_the_same_samples_with_less_padding():
  stage = fixtures.stage(10, row_tokens=80, micro_batch_tokens=320)
  joined = dataclasses.replace(stage.batch, joined_rows=4)
  joined = dataclasses.replace(stage, batch=joined)
  one, four = (next(_pipeline(stage=x)).batch for x in (stage, joined))
  assert one.ids.shape == (3, 4, 80) and four.ids.shape == (3, 1, 320)
  assert four.num_micro_batches < one.num_micro_batches

  def samples(batch):
    live = batch.segment_ids > 0
    ids, first = batch.ids[live], batch.positions[live] == 0
    return sorted(map(tuple, np.split(ids, np.flatnonzero(first)[1:])))

  assert samples(one) == samples(four) and len(samples(one)) == 10
  assert one.ce_count == four.ce_count


def test_rows_that_fit_hold_the_same_samples_and_resume_with_their_length():
  fixed = fixtures.stage(10, row_tokens=320, micro_batch_tokens=320)
  batch = dataclasses.replace(fixed.batch, fit=True)
  pipeline, other = (
    _pipeline(stage=dataclasses.replace(fixed, batch=batch)) for _ in range(2)
  )
  one, fitted = next(_pipeline(stage=fixed)), next(pipeline)
  assert fitted.metrics['batch/fill'] > max(one.metrics['batch/fill'], 0.8)
  assert fitted.batch.ids.shape[-1] < 320
  assert one.batch.ce_count == fitted.batch.ce_count
  other.set_state(json.loads(json.dumps(fitted.state)))
  for _ in range(3):
    _equal(next(pipeline).batch, next(other).batch)


@pytest.mark.parametrize('rewarded, code', [(0, 3), (1, 1)])
def test_exit_code_tells_whether_any_rollout_had_a_reward(
  monkeypatch, rewarded, code
):
  def grade(self, groups, *_):
    failed = [[dataclasses.replace(x, error='f') for x in y] for y in groups]
    return environments.Graded(failed, [], {}, ())
    yield

  monkeypatch.setattr(environments.Environment, 'grade', grade)
  pipeline = _pipeline()
  pipeline.tally = batches.Tally(('a',))
  pipeline.learns_by_trial = ('a',)
  pipeline.tally.add_env('a', 4, rewarded, ())
  with pytest.raises(statistics.TooManyErrors) as stopped:
    next(pipeline)
  assert stopped.value.exit_code == code


def test_rollouts_of_several_samples_get_more_micro_batches(
  tmp_path, monkeypatch
):
  """A template that forgets: a sample per assistant turn, all of them fit.

  The rows' length, whose choice has a state, is chosen once per step.
  """
  chosen, choose = [], packing.Widths.__call__
  monkeypatch.setattr(
    packing.Widths,
    '__call__',
    lambda *args: chosen.append(choose(*args)) or chosen[-1],
  )
  renderer = rendering.Renderer(
    tokenizers.Bytes(),
    (
      '{% for m in messages %}<|{{ m.role }}|>{{ m.content }}'
      '{{ "!" if loop.last and m.role == "assistant" }}<|end|>{% endfor %}'
      '{% if add_generation_prompt %}<|assistant|>{% endif %}'
    ),
  )
  turns = [
    {'role': role, 'content': 'x' * 5}
    for _ in range(3)
    for role in ('user', 'assistant')
  ]
  path = tmp_path / 'rows.jsonl'
  path.write_text(json.dumps({'messages': turns}) + '\n')
  stage = dataclasses.replace(
    fixtures.stage(prompts=2, row_tokens=48, micro_batch_tokens=96),
    envs={'mine': schema.EnvEntry(env=schema.Rows(path=str(path)))},
  )
  batch = next(_pipeline(stage=stage, renderer=renderer)).batch
  # 15, 29 and 43 tokens, twice: two rows hold 15 + 29, two hold 43.
  assert batch.ids.shape == (2, 2, 48) and batch.num_micro_batches == 2
  assert batch.mask.sum() == batch.ce_count == 2 * 3 * 7
  assert chosen == [48]


def test_a_resumed_pipeline_yields_the_same_batches():
  whole = _pipeline(prompts=30)  # 100 tasks: epochs end within batches
  items = [next(whole) for _ in range(8)]
  resumed = _pipeline(prompts=30)
  resumed.set_state(json.loads(json.dumps(items[3].state)))
  for item in items[4:]:
    again = next(resumed)
    _equal(item.batch, again.batch)
    assert again.state == item.state


def test_another_seed_draws_other_tasks():
  first = next(_pipeline()).batch
  _equal(first, next(_pipeline()).batch)
  other = _pipeline(seed=4)
  assert (next(other).batch.ids != first.ids).any()


def test_the_state_of_an_algorithm_is_resumed(monkeypatch):
  states = []
  monkeypatch.setattr(sft.Sft, 'get_state', lambda self: {'groups': 8})
  monkeypatch.setattr(
    sft.Sft, 'set_state', lambda self, state: states.append(state)
  )
  item = next(_pipeline())
  _pipeline().set_state(json.loads(json.dumps(item.state)))
  assert states == [{'groups': 8}]
