"""Exported tokens: every stream against the batch, and what is null."""

import dataclasses
import json
import types

import jax
import numpy as np
import pytest

from posttrain import compilation, schema, scoring, sharding
from posttrain import types as host
from posttrain.stage import job
from posttrain.training import token_export
from posttrain.util import watchdog
from tests import fixtures

MESH = sharding.make_mesh(schema.Mesh())
SAME = [*host.TOKEN_FIELDS, 'positions']  # as the batch has them


def _exporter(workdir, every=2):
  return token_export.Exporter(
    every, str(workdir), 'grpo', fixtures.MODEL, ('arithmetic',), MESH
  )


def _batch():
  """Three rows of two sequences each, in two micro-batches.

  The first sequence trains nothing but ce; one token of the others leaves rl.
  """
  (batch,) = fixtures.batches(
    1, prompts=6, row_tokens=128, micro_batch_tokens=256
  )
  batch = fixtures.sampled(batch)
  first = (batch.segment_ids == 1) & (np.indices(batch.ids.shape)[:2] == 0).all(
    axis=0
  )
  rl, kl = (
    np.where(first, np.float32(0), getattr(batch, f'{name}_weights'))
    for name in ('rl', 'ref_kl')
  )
  rl[kl != 0] *= np.arange((kl != 0).sum()) % 5 != 0
  temperatures = np.where(first, 1, np.float32(0.7)).astype(np.float32)
  return dataclasses.replace(
    batch, rl_weights=rl, ref_kl_weights=kl, temperatures=temperatures
  )


@pytest.fixture(scope='module')
def params():
  return fixtures.params()


@pytest.fixture(scope='module')
def exported(tmp_path_factory, params):
  """(workdir, batch, lines), and how many programs it took."""
  workdir, batch = tmp_path_factory.mktemp('run'), _batch()
  exporter = _exporter(workdir)
  with compilation.CompileCounter() as compiling:
    exporter(4, params, batch)
    exporter(6, params, batch)
  assert compiling.count == 1
  text = (workdir / 'token_exports' / 'grpo_000004.jsonl').read_text()
  lines = [
    json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()
  ]
  return workdir, batch, lines


def _places(batch, lines):
  """Yields (line, where its tokens are in the batch)."""
  for line in lines:
    row = line['micro_batch'], line['row']
    (at,) = np.nonzero(batch.segment_ids[row] == line['segment'])
    yield line, (*row, slice(at[0], at[-1] + 1))


def test_every_sequence_is_there_once_in_order(exported):
  _, batch, lines = exported
  ids = [(x['micro_batch'], x['row'], x['segment']) for x in lines]
  assert ids == sorted(set(ids)) and len(ids) == 6
  assert {micro for micro, _, _ in ids} == {0, 1}
  assert max(segment for _, _, segment in ids) == 2
  tokens = sum(len(line['ids']) for line in lines)
  assert tokens == (batch.segment_ids > 0).sum()
  for line in lines:
    assert (line['schema_version'], line['stage'], line['step']) == (
      1,
      'grpo',
      4,
    )
    assert line['env'] == 'arithmetic'


@pytest.mark.parametrize('name', SAME)
def test_streams_are_the_batchs_to_the_bit(exported, name):
  _, batch, lines = exported
  stream = getattr(batch, name)
  for line, place in _places(batch, lines):
    read = np.array(line[name], stream.dtype)
    np.testing.assert_array_equal(read, stream[place])
    assert read.tobytes() == stream[place].tobytes()


def test_logprobs_are_those_of_scoring(exported, params):
  """Sequence by sequence, unpacked, at the tokens' temperatures."""
  _, batch, lines = exported
  score = jax.jit(
    lambda params, *rows: scoring.score(params, fixtures.MODEL, *rows)
  )
  for line, place in _places(batch, lines):
    ids, heat = (
      getattr(batch, x)[place][None] for x in ('ids', 'temperatures')
    )
    n = ids.shape[1]
    room = [(0, 0), (0, 64 - n)]
    scored = score(
      params,
      np.pad(ids, room),
      np.pad(np.arange(n, dtype=np.int32)[None], room),
      np.pad(np.ones((1, n), np.int32), room),
      np.pad(heat, room, constant_values=1),
    )
    for name, values in zip(
      ('policy_logprobs', 'entropy'), scored, strict=True
    ):
      np.testing.assert_allclose(
        np.array(line[name]), values[0, :n], rtol=1e-4, atol=1e-5
      )
    assert line['policy_logprobs'][0] == line['entropy'][0] == 0


def test_what_is_compared_and_where(exported):
  _, _, lines = exported
  some = 0
  for line in lines:
    pairs = zip(
      line['rl_weights'],
      line['ref_kl_weights'],
      line['policy_logprobs'],
      line['sampler_logprobs'],
      *(line[name] for name in token_export.COMPARED),
      strict=True,
    )
    for rl, kl, new, old, *compared in pairs:
      if not rl and not kl:
        assert compared == [None] * 4
        continue
      some += 1
      rho = np.exp(new - old)
      expected = new - old, rho, np.exp(new) - np.exp(old), rho - 1 - new + old
      np.testing.assert_allclose(compared, expected, rtol=1e-4, atol=1e-6)
  assert some > 20
  # A token that only the leash reads is compared, too; the first sequence has
  # no member.
  assert any(
    not rl and kl
    for line in lines
    for rl, kl in zip(line['rl_weights'], line['ref_kl_weights'], strict=True)
  )
  assert lines[0]['ratio'] == [None] * len(lines[0]['ids'])


def test_what_is_not_finite_is_null():
  batch = _batch()
  shape = batch.ids.shape[1:]
  row, at = 0, np.argmax(batch.rl_weights[1, 0] != 0)
  logprobs = np.full(shape, -1, np.float32)
  logprobs[row, at] = np.nan
  far = batch.sampler_logprobs.copy()
  far[1, row, at + 1] = -200.0  # its ratio is e^199: too large for f32
  batch = dataclasses.replace(
    batch, sampler_logprobs=far, rl_weights=np.ones_like(batch.rl_weights)
  )
  entropy = np.full(shape, np.inf, np.float32)
  found = token_export.records(batch, 1, logprobs, entropy, ('arithmetic',))
  line = next(found)
  json.dumps(line, allow_nan=False)
  assert set(line['entropy']) == {None}
  assert line['policy_logprobs'][at] is line['log_ratio'][at] is None
  assert line['ratio'][at] is line['probability_difference'][at] is None
  assert line['log_ratio'][at + 1] == 199 and line['ratio'][at + 1] is None
  assert line['k3'][at + 1] is None
  assert line['ratio'][at + 2] is not None


def test_a_file_is_whole_or_absent(tmp_path, params, monkeypatch):
  exporter, batch = _exporter(tmp_path), _batch()
  records = token_export.records

  def fail(*args):
    yield next(records(*args))
    raise RuntimeError('the disk is full')

  monkeypatch.setattr(token_export, 'records', fail)
  with pytest.raises(RuntimeError, match='disk'):
    exporter(2, params, batch)
  folder = tmp_path / 'token_exports'
  assert not list(folder.glob('*.jsonl'))
  monkeypatch.undo()
  exporter(2, params, batch)
  assert [path.name for path in folder.iterdir()] == ['grpo_000002.jsonl']
  assert len((folder / 'grpo_000002.jsonl').read_text().splitlines()) == 6


def test_a_batch_of_padding_has_no_line(tmp_path, params):
  blank = dataclasses.replace(
    _batch(), num_micro_batches=np.asarray(0, np.int32)
  )
  _exporter(tmp_path)(2, params, blank)
  path = tmp_path / 'token_exports' / 'grpo_000002.jsonl'
  assert path.read_text() == ''


@pytest.mark.parametrize(
  'every, steps', [(None, []), (1, [1, 2, 3, 4]), (3, [3])]
)
def test_every_nth_step_is_exported_with_the_whole_model(
  tmp_path, every, steps
):
  """Under the whole model's parameters; never, where the option is off."""
  exporter, calls = _exporter(tmp_path, every), []
  spy = types.SimpleNamespace(
    exporter=type(
      'Spy',
      (),
      {
        'due': staticmethod(exporter.due),
        '__call__': lambda self, *args: calls.append(args),
      },
    )(),
    logbook=types.SimpleNamespace(clock=watchdog.Timers()),
    learner=types.SimpleNamespace(
      base=types.SimpleNamespace(attach=lambda params: {'whole': params})
    ),
  )
  state = types.SimpleNamespace(params={'a': 1})
  item = types.SimpleNamespace(batch=_batch())
  for step in (1, 2, 3, 4):
    job.Job.export_tokens(spy, step, state, item)
  whole = {'whole': {'a': 1}}
  assert calls == [(step, whole, item.batch) for step in steps]
  assert not (tmp_path / 'token_exports').exists()


def test_the_option_must_be_positive():
  with pytest.raises(ValueError, match='export_tokens must be None or > 0'):
    schema.Metrics(export_tokens=0)
