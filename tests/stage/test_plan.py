"""The figures of a plan, by hand."""

import dataclasses

import pytest

from posttrain import schema
from posttrain.stage import plan

# 3200 embedding + 3072 attention + 6144 MLP + 96 norm scales.
PARAMETERS = 12_512
MODEL = dataclasses.replace(schema.PRESETS['tiny'], vocab_size=100)
STAGE = schema.Stage(
  envs={'a': schema.EnvEntry()},
  batch=schema.Batch(prompts_per_step=8, row_tokens=16, micro_batch_tokens=64),
  rollout=schema.Rollout(slots=8),
)
# Bytes per token of a layer in float32: the stream twice (2 x 32 x 4), q, k,
# v and output (96), weights (2 x 16), gate and up (128), all x 4; sums 2 x 4.
STREAM, INSIDE = 256, 4 * (96 + 32 + 128) + 8
WORK = 3 * 4 * 64  # more than 8 x 2 x 16 bytes of scores
LOGITS = 2 * 4 * 64 * 100
SLOT_TOKENS = 10


def _make(data=1, fsdp=1, tensor=1, stage=STAGE, **model):
  sizes = {'data': data, 'fsdp': fsdp, 'tensor': tensor}
  model = dataclasses.replace(MODEL, **model)
  return plan.make('sft', stage, model, sizes, SLOT_TOKENS)


def test_plan_on_one_device_has_its_bytes_and_sizes():
  made = _make()
  assert made.parameters == PARAMETERS
  assert made.state_bytes == 200_192 == 16 * PARAMETERS
  assert made.activation_bytes == 182_784
  assert made.activation_bytes == 64 * (STREAM + INSIDE + WORK) + LOGITS
  assert (made.rows_per_micro_batch, made.row_tokens) == (4, 16)
  assert (made.prompts_per_step, made.samples_per_step) == (8, 8)
  text = '\n'.join(made.lines())
  assert '4 x 16' in text and '12,512' in text and '445 KiB per dev' in text
  for line in ('rollout.slots        8', 'tokens each        10'):
    assert line in text


@pytest.mark.parametrize(
  ('sizes', 'state', 'activations'),
  [
    ({'data': 4}, 200_192, 45_696),  # the batch alone is split
    ({'fsdp': 4}, 50_048, 45_696),
    # The stream (16,384) and the logits (51,200) are not split.
    ({'tensor': 2}, 100_096, 125_184),
    ({'data': 2, 'fsdp': 2, 'tensor': 2}, 50_048, 31_296),
  ],
)
def test_bytes_per_device(sizes, state, activations):
  made = _make(**sizes)
  assert (made.state_bytes, made.activation_bytes) == (state, activations)


def test_an_average_is_a_fifth_copy():
  optim = schema.Optim(average=0.9)
  made = _make(stage=dataclasses.replace(STAGE, optim=optim))
  assert made.state_bytes == 20 * PARAMETERS


def test_remat_keeps_the_stream_of_all_layers_and_the_inside_of_one():
  kept = {
    remat: _make(layers=5, remat=remat).activation_bytes - LOGITS
    for remat in ('none', 'block')
  }
  # Of the stream, half is kept before a layer and half inside it.
  assert kept['none'] == 64 * (5 * (STREAM + INSIDE) + WORK)
  assert kept['block'] == 64 * (5 * 128 + 128 + INSIDE + WORK)


def test_logits_are_counted_by_the_block():
  # 64 tokens x 1M columns are 256 MB, made in blocks of 64 MiB.
  few = _make(vocab_size=100).activation_bytes - LOGITS
  many = _make(vocab_size=1_000_000).activation_bytes
  assert many == few + 2 * 64 * 2**20


@pytest.mark.parametrize(
  ('sizes', 'options', 'decoding'),
  [
    # 8 slots of 10 tokens, each a key and a value of 16 numbers; a copy
    # of the weights, and the head apart from the embedding (3200).
    ({}, {}, 4 * (80 * 32 + PARAMETERS + 3200)),
    # The slots are split, the weights are not.
    (
      {'data': 2, 'fsdp': 2, 'tensor': 2},
      {},
      4 * (20 * 32 + PARAMETERS + 3200),
    ),
    ({}, {'dtype': 'bfloat16'}, 2 * (80 * 32 + PARAMETERS + 3200)),
    (
      {},
      {'layers': 3, 'kv_heads': 2, 'tied_head': False},
      4 * (80 * 6 * 32 + 6400 + 3 * (4096 + 6144 + 64) + 32),
    ),
  ],
)
def test_decode_bytes_count_cache_weights_and_head(sizes, options, decoding):
  assert _make(**sizes, **options).decode_bytes == decoding


def test_references_lie_beside_the_policy():
  def make(count, **sizes):
    sizes = {'data': 1, 'fsdp': 1, 'tensor': 1, **sizes}
    held = count * PARAMETERS
    return plan.make('sft', STAGE, MODEL, sizes, SLOT_TOKENS, held)

  assert make(0).reference_bytes == 0
  assert make(2).reference_bytes == 8 * PARAMETERS
  # As the weights of the policy: over fsdp and tensor.
  assert make(2, data=2, fsdp=2, tensor=2).reference_bytes == 2 * PARAMETERS
  more = 4 * 20 * PARAMETERS  # enough to see among the rest
  assert make(20).reference_bytes == more
  assert f'references         {more / 1024:.0f} KiB' in '\n'.join(
    make(20).lines()
  )


def test_ema_and_snapshot_weights_count_as_state():
  sizes = {'data': 1, 'fsdp': 1, 'tensor': 1}
  plain, averaged = (
    plan.make('sft', STAGE, MODEL, sizes, SLOT_TOKENS, ema_and_snapshots=names)
    for names in ((), ('ema:0.9', 'snapshot:5'))
  )
  assert averaged.state_bytes == plain.state_bytes + 8 * PARAMETERS


@pytest.mark.parametrize(
  ('longest', 'backend', 'tokens'),
  [
    (1, 'cpu', 16),
    (16, 'cpu', 16),
    (17, 'gpu', 32),
    (70, 'gpu', 80),
    (70, 'tpu', 128),
    (128, 'tpu', 128),
    (129, 'tpu', 256),
  ],
)
def test_slot_tokens_are_rounded_up_to_whole_tiles(longest, backend, tokens):
  assert plan.slot_tokens(longest, backend) == tokens
