"""Pairs as tokens, and the pipeline that draws from them."""

import dataclasses
import json

import numpy as np
import pytest

import posttrain.pipeline
from posttrain import schema
from posttrain.data import preferences
from posttrain.envs import registry
from posttrain.pipeline import pair_data
from tests import fixtures
from tests.pipeline.test_tokens import _equal

ROWS = [
  {'prompt': f'q{i}', 'chosen': f'{i} ' * (1 + i % 3), 'rejected': f'no {i}'}
  for i in range(12)
]
ALONE = [
  {'prompt': f'q{i}', 'completion': f'{i}', 'label': i % 2 == 0}
  for i in range(6)
]


def write(path, rows):
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  return str(path)


def stage(path, kind, loss=None, **options):
  return schema.Stage(
    kind=kind,
    pairs=schema.PairFile(path=path, **options),
    batch=schema.Batch(
      prompts_per_step=4, row_tokens=64, micro_batch_tokens=128
    ),
    loss=schema.Loss(preference=loss or schema.Sigmoid()),
  )


def data(path, kind='preference', **options):
  cfg = stage(path, kind, **options)
  return posttrain.pipeline.DATA[kind](
    cfg, registry.make_all(cfg.envs), fixtures.RENDERER, 0
  )


def splits(path, **options):
  return data(path, **options).splits


def pipeline(path, **options):
  pairs = data(path, **options)
  return pair_data.PairPipeline(pairs, pairs.splits)


@pytest.fixture
def file(tmp_path):
  return write(tmp_path / 'pairs.jsonl', ROWS)


def answers(batch):
  """Yields the place of each answer in a batch, and its ids."""
  for m, b, k, a in np.argwhere(batch.present):
    here = (batch.segment_ids[m, b] == 2 * k + a + 1) & batch.mask[m, b]
    yield (m, b, k, a), batch.ids[m, b][here]


def texts(batch):
  """The answers of a batch, as (chosen, rejected) by their place in it."""
  found = []
  for (*_, a), ids in answers(batch):
    found.append((a, fixtures.RENDERER.tokenizer.decode(ids[:-1].tolist())))
  return found


def test_an_epoch_has_every_pair_once(file):
  made = pipeline(file, eval_fraction=0.0)
  items = [next(made) for _ in range(3)]
  assert items[-1].metrics['epoch/pairs'] == 1
  seen = [x for item in items for x in texts(item.batch)]
  wanted = [(0, row['chosen']) for row in ROWS]
  wanted += [(1, row['rejected']) for row in ROWS]
  assert sorted(seen) == sorted(wanted)
  assert made.held_out is None


def test_rows_of_pairs_fit_and_resume_with_their_length(file):
  def fitted():
    cfg = stage(file, 'preference')
    batch = schema.Batch(
      prompts_per_step=4, row_tokens=512, micro_batch_tokens=512, fit=True
    )
    pairs = pair_data.PairData(
      dataclasses.replace(cfg, batch=batch), {}, fixtures.RENDERER, 0
    )
    return pair_data.PairPipeline(pairs, pairs.splits)

  one, two = fitted(), fitted()
  item = next(one)
  assert item.batch.ids.shape[-1] < 512 and item.metrics['batch/fill'] > 0.7
  assert one.held_out.pairs == one.held_out.present.all(-1).sum() > 0
  two.set_state(item.state)
  for _ in range(3):
    _equal(next(one).batch, next(two).batch)


def test_held_out_pairs_are_not_trained_on(file, tmp_path, caplog):
  made = splits(file, eval_fraction=0.4)
  held = {x.row for x in made.held_out.samples}
  seen = {x.row for x in made.train.samples}
  assert held and seen and not held & seen and len(held | seen) == 12
  assert not caplog.text
  other = write(tmp_path / 'eval.jsonl', ROWS[:2])
  made = splits(file, eval_path=other)
  assert len(made.held_out.pairs) == 2 and len(made.train.pairs) == 12
  # A separate file may repeat prompts, with a warning.
  assert 'pairs.eval_path' in caplog.text


def test_one_prompt_cannot_be_split(tmp_path):
  rows = [{**ROWS[0], 'rejected': f'no {i}'} for i in range(3)]
  same = write(tmp_path / 'same.jsonl', rows)
  with pytest.raises(
    ValueError, match='must have rows of two prompts at least'
  ):
    data(same)
  assert len(splits(same, eval_fraction=0.0).train.pairs) == 3


def test_a_resumed_pipeline_yields_the_same_batches(file):
  made = pipeline(file)
  next(made)
  state = json.loads(json.dumps(made.get_state()))
  truth = [next(made) for _ in range(5)]
  again = pipeline(file)
  again.set_state(state)
  for item in truth:
    other = next(again)
    assert item.metrics == other.metrics and item.state == other.state
    _equal(item.batch, other.batch)


def test_ref_logprobs_are_those_of_their_answers(file):
  pairs = data(file)
  scored = pairs.splits.with_ref_logprobs(
    float(s.ids[s.mask].sum()) for s in pairs.splits.samples
  )
  assert scored.fingerprint == pairs.splits.fingerprint  # without logprobs
  batch = next(pair_data.PairPipeline(pairs, scored)).batch
  for place, ids in answers(batch):
    assert batch.ref_logprobs[place] == ids.sum()


def test_kto_takes_answers_alone_and_mismatched_ones(tmp_path):
  file = write(tmp_path / 'alone.jsonl', ALONE)
  with pytest.raises(ValueError, match="alone.jsonl:1.*preference='kto'"):
    pipeline(file)
  made = pipeline(file, loss=schema.Kto(), eval_fraction=0.0)
  batch = next(made).batch
  assert (batch.pairs, batch.answers) == (0, 4)
  found = splits(file, loss=schema.Kto(), eval_fraction=0.0).train.mismatched
  assert len(found) == 6


@pytest.mark.parametrize(
  ('prompts', 'others'), [('aab', '220'), ('abcc', '1200'), ('aa', '--')]
)
def test_the_next_answer_is_to_another_prompt(prompts, others, caplog):
  rows = [
    preferences.parse({**ALONE[0], 'prompt': p, 'completion': f'is {i}'}, 'a:1')
    for i, p in enumerate(prompts)
  ]
  made = preferences.tokenize(rows, fixtures.RENDERER, 64, 'error')
  for i, other in enumerate(preferences.mismatched(made, 64)):
    if others[i] == '-':
      assert other is None and '2 of 2 prompts have no mism' in caplog.text
      continue
    text = fixtures.RENDERER.tokenizer.decode(other.chosen.ids.tolist())
    assert f'is {others[i]}' in text and prompts[i] in text.split('is')[0]


def test_too_long_is_an_error_or_left_out(tmp_path, caplog):
  rows = [*ROWS, {'prompt': 'q', 'chosen': 'x' * 99, 'rejected': 'y'}]
  file = write(tmp_path / 'long.jsonl', rows)
  with pytest.raises(
    ValueError, match='too_long.*row_tokens=64: got 1 of 12 .*long.jsonl:13'
  ):
    pipeline(file)
  made = splits(file, too_long='drop', eval_fraction=0.0)
  assert len(made.train.pairs) == 12
  assert 'got 1 of 13 pairs that do not' in caplog.text
