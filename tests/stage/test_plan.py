"""The figures of a plan, by hand; `test_program_bytes` has the programs."""

import dataclasses
import math
import re

import jax
import pytest

from posttrain import schema, sharding
from posttrain.stage import plan

# 3200 embedding + 3072 attention + 6144 MLP + 96 norm scales.
PARAMETERS = 12_512
MODEL = dataclasses.replace(schema.PRESETS['tiny'], vocab_size=100)
STAGE = schema.Stage(
  envs={'a': schema.EnvEntry()},
  batch=schema.Batch(prompts_per_step=8, row_tokens=16, micro_batch_tokens=64),
  rollout=schema.Rollout(slots=8),
)
SCALARS = 8 * 4  # steps, counts, the learning rate
SLOT_TOKENS = 16


def _make(data=1, fsdp=1, tensor=1, stage=STAGE, platform='cpu', **model):
  sizes = data, fsdp, tensor
  mesh = sharding.abstract_mesh(schema.Mesh(*sizes), math.prod(sizes))
  model = dataclasses.replace(MODEL, **model)
  return plan.make('sft', stage, model, mesh, platform, SLOT_TOKENS)


def _stage(**options):
  return dataclasses.replace(STAGE, **options)


def test_plan_on_one_device_has_its_bytes_and_sizes():
  made = _make()
  assert made.parameters == made.trained == PARAMETERS
  assert made.state_bytes == 3 * 4 * PARAMETERS + SCALARS
  assert (made.rows_per_micro_batch, made.row_tokens) == (4, 16)
  assert (made.prompts_per_step, made.samples_per_step) == (8, 8)
  assert made.programs['train_step'].arguments == made.state_bytes + 64 * 49
  held = made.state_bytes + made.decode_bytes
  assert made.total_bytes == held + max(made.update_bytes, made.rollout_bytes)
  text = '\n'.join(made.lines())
  assert '4 x 16' in text and '12,512' in text and '147 KiB' in text
  assert 'mesh                 data 1, fsdp 1, tensor 1' in text
  for line in ('rollout.slots        8', 'tokens each        16'):
    assert line in text


def test_the_head_names_devices_host_versions_and_seed():
  here = plan.head(7)
  keys = [line.split()[0] for line in here]
  assert keys == ['run', 'device', 'host', 'versions', 'seed']
  assert here[1].split()[1:] == ['1', 'x', 'cpu'] and here[-1].endswith(' 7')
  assert f'jax {jax.__version__}, python 3.' in here[3]
  planned = plan.head(7, ('gpu', 16, 2))[1]
  assert planned == '  device               16 x gpu on 2 hosts (planned)'
  assert '8 x cpu (planned)' in plan.head(7, (None, 8, 1))[1]


@pytest.mark.parametrize(
  ('sizes', 'matrices'),
  [
    ({'data': 4}, 1),  # the batch alone is split
    ({'fsdp': 4}, 4),
    ({'tensor': 2}, 2),
    ({'data': 2, 'fsdp': 2, 'tensor': 2}, 4),
  ],
)
def test_matrices_are_split_and_norms_are_not(sizes, matrices):
  norms = 3 * 32
  numbers = (PARAMETERS - norms) // matrices + norms
  assert _make(**sizes).state_bytes == 12 * numbers + SCALARS


def test_copies_of_the_weights_count_as_state():
  plain = _make().state_bytes
  average = _make(stage=_stage(optim=schema.Optim(average=0.9)))
  assert average.state_bytes == plain + 4 * PARAMETERS
  narrow = _make(stage=_stage(optim=schema.Optim(moments_dtype='bfloat16')))
  assert narrow.state_bytes == plain - 4 * PARAMETERS
  entry = schema.EnvEntry(
    algorithm=schema.Opd(reference='ema:0.9'), sampler=schema.Policy()
  )
  held = _make(stage=_stage(envs={'a': entry}))
  assert held.state_bytes == plain + 4 * PARAMETERS


def test_an_adapter_trains_and_the_weights_lie_in_the_compute_dtype():
  made = _make(stage=_stage(lora=schema.Lora(rank=2)), dtype='bfloat16')
  norms = 3 * 32
  frozen = 2 * (PARAMETERS - norms) + 4 * norms
  assert 0 < made.trained < PARAMETERS // 4
  assert made.state_bytes == frozen + 12 * made.trained + SCALARS
  paths = [x.path for x in made.weights]
  assert 'layers/attention/q/kernel/a' in paths and 'embed/table' in paths
  full = _make(dtype='bfloat16')
  assert made.update_bytes < full.update_bytes


def test_a_weight_that_does_not_divide_is_named():
  with pytest.raises(
    ValueError, match=r'head/kernel|embed/table must divide .*tensor=8'
  ):
    _make(tensor=8)


def test_remat_keeps_less():
  kept = {
    remat: _make(layers=9, remat=remat, platform='gpu').update_bytes
    for remat in ('none', 'attention', 'block')
  }
  assert kept['none'] > kept['attention'] > kept['block']
  # Attention's output and the log of its sums, in eight further layers.
  more = kept['attention'] - kept['block']
  assert more == pytest.approx(9 * 64 * 2 * (16 * 4 + 4) * 1.05, abs=2)


def test_scores_of_a_block_are_stored_on_a_cpu():
  def scores(row_tokens):
    batch = schema.Batch(
      prompts_per_step=8, row_tokens=row_tokens, micro_batch_tokens=4096
    )
    cpu, gpu = (
      _make(stage=_stage(batch=batch), platform=platform).update_bytes
      for platform in ('cpu', 'gpu')
    )
    return cpu - gpu

  # Rows of one block, and of several, of 64 queries and keys.
  assert scores(128) == pytest.approx(1.05 * 8 * 4096 * 128 * 2, abs=1)
  expected = 1.05 * 8 * 4096 * 64 * 64 / 1024 * 2
  assert scores(1024) == pytest.approx(expected, abs=1)


def test_logits_are_counted_by_the_block():
  # 64 tokens x 1M columns are 256 MB, made in blocks of 64 MiB. What grows
  # with the vocabulary is the table, transposed.
  small, few, many = (
    _make(vocab_size=size, platform='gpu').programs['score'].temporaries
    for size in (2**17, 2**19, 2**20)
  )
  assert few - small > 1.05 * 4 * (2**19 - 2**17) * 32 + 2**24
  assert many - few == pytest.approx(1.05 * 4 * 2**19 * 32, rel=0.01)


@pytest.mark.parametrize(
  ('sizes', 'options', 'decoding'),
  [
    # 8 slots of 16 tokens, each a key and a value of 16 numbers, an id and a
    # logprob; a copy of the weights, and the head apart from the embedding.
    ({}, {}, 4 * 128 * 34 + 4 * (PARAMETERS + 3200)),
    # The slots are split over four, matrices over tensor; one kv head is not.
    (
      {'data': 2, 'fsdp': 2, 'tensor': 2},
      {},
      4 * 32 * 34 + 4 * ((PARAMETERS + 3200 - 96) // 2 + 96),
    ),
    (
      {},
      {'dtype': 'bfloat16'},
      128 * (64 + 8) + 2 * (PARAMETERS + 3200 - 96) + 4 * 96,
    ),
    (
      {'tensor': 2},
      {'kv_heads': 2},
      4 * 128 * 34 + 4 * ((PARAMETERS + 1024 + 3200 - 96) // 2 + 96),
    ),
  ],
)
def test_decode_bytes_count_cache_weights_and_head(sizes, options, decoding):
  assert _make(**sizes, **options).decode_bytes == decoding


def test_references_lie_beside_the_policy():
  def make(count, *sizes):
    mesh = sharding.abstract_mesh(schema.Mesh(*sizes), math.prod(sizes))
    held = count * PARAMETERS
    return plan.make(
      'sft', STAGE, MODEL, mesh, 'cpu', SLOT_TOKENS, references=held
    )

  assert make(0, 1, 1, 1).reference_bytes == 0
  assert make(2, 1, 1, 1).reference_bytes == 8 * PARAMETERS
  # As the weights of the policy: over fsdp and tensor.
  assert make(2, 2, 2, 2).reference_bytes == 2 * PARAMETERS
  more = 4 * 20 * PARAMETERS  # enough to see among the rest
  assert make(20, 1, 1, 1).reference_bytes == more
  text = '\n'.join(make(20, 1, 1, 1).lines())
  assert f'references         {more / 1024:.0f} KiB' in text


def test_a_model_that_samples_has_a_cache_and_a_view_of_its_own():
  mesh = sharding.abstract_mesh(schema.Mesh(), 1)
  alone, two = (
    plan.make('sft', STAGE, MODEL, mesh, 'cpu', SLOT_TOKENS, players=players)
    for players in (0, 1)
  )
  assert two.decode_bytes == 2 * alone.decode_bytes


def test_a_cache_that_sleeps_does_not_lie_beside_the_update():
  batch = schema.Batch(row_tokens=512, micro_batch_tokens=8192)
  rollout = schema.Rollout(slots=64)
  awake, asleep = (
    _make(
      stage=_stage(
        batch=batch, rollout=dataclasses.replace(rollout, sleep=sleep)
      )
    )
    for sleep in (False, True)
  )
  cache = 4 * 64 * 16 * 34
  assert awake.sleep_bytes == 0 and asleep.sleep_bytes == cache
  assert awake.total_bytes - asleep.total_bytes == cache
  assert 'less' not in '\n'.join(awake.lines())
  (line,) = (x for x in asleep.lines() if x.split()[0] == 'update')
  assert line.endswith(', less 136 KiB of cache that rollout.sleep frees')


def test_details_are_a_table_of_weights_and_one_of_transfers():
  alone = _make().details()
  assert alone[0].startswith('weights of stage sft: ')
  row = ['embed/table', 'f32[100, 32]', '(tensor, fsdp)', '12 KiB']
  assert re.split(' {2,}| (?=12)', alone[1].strip()) == row
  assert alone[-1] == '  none: one device'
  assert sum('layers/mlp/gate/kernel' in line for line in alone) == 1
  split = _make(fsdp=2, tensor=2).details()
  assert any('all-reduce' in line and 'tensor' in line for line in split)
  assert split[-1].split()[0] == 'total'


def test_sizes_for_an_error_have_no_tables():
  sizes = _make().sizes()
  assert sizes['micro_batch_tokens'] == 64
  assert not {'weights', 'transfers', 'programs'} & sizes.keys()


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


def test_a_reward_model_on_pairs_of_a_file_decodes_nothing():
  file = schema.PairFile(path='pairs.jsonl')
  made = schema.MadePairs()
  alone = _make(stage=_stage(kind='ranking', pairs=file))
  assert (alone.slots, alone.decode_bytes, alone.rollout_bytes) == (0, 0, 0)
  assert alone.slot_tokens == SLOT_TOKENS  # the engine is built, without cache
  assert list(alone.programs) == ['train_step']
  assert alone.total_bytes == alone.state_bytes + alone.update_bytes
  names = [line.split()[0] for line in alone.lines()]
  assert not {'rollout.slots', 'tokens', 'decoding', 'rollout'} & {*names}
  (line,) = (x for x in alone.lines() if 'temporary arrays' in x)
  assert 'larger' not in line
  # Its pairs are sampled, or the stage answers prompts when it is evaluated.
  for kind, pairs in (('ranking', made), ('preference', file)):
    decoding = _make(stage=_stage(kind=kind, pairs=pairs))
    assert decoding.slots == 8 and decoding.decode_bytes > 0
    assert {'score', 'decode', 'prefill'} < decoding.programs.keys()


def test_several_hosts_of_a_stage_that_decodes_nothing_have_no_slots():
  stage = _stage(kind='ranking', pairs=schema.PairFile(path='pairs.jsonl'))
  mesh = sharding.abstract_mesh(schema.Mesh(data=2), 2)
  made = plan.make('rm', stage, MODEL, mesh, 'cpu', SLOT_TOKENS, hosts=2)
  assert '  processes            2' in made.lines()
  text = '\n'.join(made.lines())
  assert 'slots' not in text and 'sleep' not in text
