"""The figures of a plan: arrays and transfers by hand, work by the compiler."""

import dataclasses
import math

import pytest

from posttrain import schema, sharding
from posttrain.stage import learner, plan

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


def _make(
  *sizes, stage=STAGE, references=0, base=MODEL, sampler=None, load=(), **model
):
  mesh = sharding.abstract_mesh(schema.Mesh(*sizes or (1,)), math.prod(sizes))
  model = dataclasses.replace(base, **model)
  sizes = {name: entry.group_size for name, entry in stage.envs.items()}
  spec = learner.make_spec('sft', stage, model, mesh)
  return plan.make(
    spec,
    model,
    SLOT_TOKENS,
    plan.Load(
      sizes,
      references=references,
      sampler=sampler
      and sharding.abstract_mesh(
        schema.SamplerMesh(*sampler), math.prod(sampler)
      ),
      **dict(load),
    ),
  )


def _stage(**options):
  return dataclasses.replace(STAGE, **options)


def test_plan_on_one_device_has_its_bytes_and_sizes():
  made = _make()
  assert made.parameters == made.trained == PARAMETERS
  assert made.state_bytes == 3 * 4 * PARAMETERS + SCALARS
  batch = made.cfg.batch
  assert (batch.packed_rows, batch.packed_tokens) == (4, 16)
  held = made.state_bytes + made.decode_bytes
  assert made.total_bytes == held + max(made.update_bytes, made.rollout_bytes)


def test_prompts_that_are_stored_once_are_planned():
  stage = _stage(envs={'a': schema.EnvEntry(group_size=4)})
  token = plan.cached_token_bytes(
    MODEL, sharding.abstract_mesh(schema.Mesh(1), 1)
  )
  each = MODEL.layers * token
  own, shared = (
    _make(stage=stage, load={'prompt_tokens': tokens}).decode_bytes
    for tokens in (0, 12)
  )
  # Four prompts of 12 tokens instead of eight slots' 12.
  assert own - shared == (8 - 4) * 12 * each


def test_recurrent_states_are_planned():
  """Two of three layers keep f32[4, 32, 32] and the last three inputs."""
  delta = dataclasses.replace(MODEL, layers=3, delta_layers=(0, 1))
  mesh = sharding.abstract_mesh(schema.Mesh(1), 1)
  made, width = _make(base=delta), 2 * 2 * 32 + 4 * 32
  token = plan.cached_token_bytes(delta, mesh)
  states = 2 * 4 * (4 * 32 * 32 + 3 * width)
  assert made.slot_bytes == made.slot_tokens * token + states


def test_the_plan_names_the_learning_rate():
  optim = schema.Optim(lr=1e-5, warmup_steps=20)
  lines = [line.split() for line in _make(stage=_stage(optim=optim)).lines()]
  start = lines.index(['learning', 'rate', '1e-05,', 'cosine'])
  assert lines[start + 1] == ['warmup_steps', '20']
  assert lines[start + 2][0] == 'mesh'  # no final rate: 0


def test_the_head_names_devices_host_versions_and_seed():
  keys = [line.split()[0] for line in plan.head(7)]
  assert keys == ['run', 'device', 'host', 'versions', 'seed']
  assert '16 x gpu on 2 hosts' in plan.head(7, ('gpu', 16, 2))[1]


@pytest.mark.parametrize(
  ('sizes', 'matrices'),
  [
    ((4,), 1),  # the batch alone is split
    ((2, 2, 2), 4),
  ],
)
def test_matrices_are_split_and_norms_are_not(sizes, matrices):
  norms = 3 * 32
  numbers = (PARAMETERS - norms) // matrices + norms
  assert _make(*sizes).state_bytes == 12 * numbers + SCALARS


EMA = schema.EnvEntry(
  algorithm=schema.Opd(reference='ema:0.9'), sampler=schema.Policy()
)


@pytest.mark.parametrize(
  ('options', 'copies'),
  [
    ({'optim': schema.Optim(average=0.9)}, 4),
    ({'optim': schema.Optim(moments_dtype='bfloat16')}, 2),
    ({'envs': {'a': EMA}}, 4),
  ],
)
def test_copies_of_the_weights_count_as_state(options, copies):
  made = _make(stage=_stage(**options))
  assert made.state_bytes == 4 * copies * PARAMETERS + SCALARS


def test_an_adapter_trains_and_the_weights_lie_in_the_compute_dtype():
  made = _make(stage=_stage(lora=schema.Lora(rank=2)), dtype='bfloat16')
  norms = 3 * 32
  frozen = 2 * (PARAMETERS - norms) + 4 * norms
  assert 0 < made.trained < PARAMETERS // 4
  assert made.state_bytes == frozen + 12 * made.trained + SCALARS


def test_a_weight_that_does_not_divide_is_named():
  with pytest.raises(
    ValueError, match=r'head/kernel|embed/table must divide .*tensor=8'
  ):
    _make(1, 1, 8)


def test_remat_keeps_less():
  kept = {
    remat: _make(layers=9, remat=remat).update_bytes
    for remat in ('attention', 'block')
  }
  # Attention's output and the log of its sums.
  assert kept['attention'] - kept['block'] == 9 * 64 * 2 * (16 * 4 + 4)


@pytest.mark.parametrize(
  ('sizes', 'options', 'decoding'),
  [
    # 8 slots of 16 tokens, each a key and a value of 16 numbers, an id and a
    # logprob; a copy of the weights, and the head apart from the embedding.
    ((), {}, 4 * 128 * 34 + 4 * (PARAMETERS + 3200)),
    # The slots are split over four, matrices over tensor; one kv head is not.
    ((2, 2, 2), {}, 4 * 32 * 34 + 4 * ((PARAMETERS + 3200 - 96) // 2 + 96)),
    (
      (),
      {'dtype': 'bfloat16'},
      128 * (64 + 8) + 2 * (PARAMETERS + 3200 - 96) + 4 * 96,
    ),
  ],
)
def test_decode_bytes_count_cache_weights_and_head(sizes, options, decoding):
  assert _make(*sizes, **options).decode_bytes == decoding


def test_references_lie_beside_the_policy():
  def make(count, *sizes):
    return _make(*sizes, references=count * PARAMETERS)

  assert make(0).reference_bytes == 0
  assert make(2).reference_bytes == 8 * PARAMETERS
  # As the weights of the policy: over fsdp and tensor.
  norms = 3 * 32
  each = (PARAMETERS - norms) // 4 + norms
  assert make(2, 2, 2, 2).reference_bytes == 2 * 4 * each


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


def test_a_sampler_holds_the_policy_the_slots_and_the_references():
  shared = _make(1, 2, 1, references=PARAMETERS)
  own = _make(1, 2, 1, references=PARAMETERS, sampler=(1, 1, 2))
  assert own.total_bytes == own.state_bytes + own.update_bytes
  assert (own.state_bytes, own.update_bytes) == (
    shared.state_bytes,
    shared.update_bytes,
  )
  assert (shared.past_bytes, shared.sampler_bytes) == (0, 0)
  norms = 3 * 32
  policy = 4 * ((PARAMETERS - norms) // 2 + norms)
  assert own.past_bytes == 2 * own.transfers[-1].device_bytes == 2 * policy
  assert own.decode_bytes == _make(1, 1, 2).decode_bytes
  assert own.reference_bytes == policy
  assert own.sampler_bytes == (
    2 * policy + own.decode_bytes + own.reference_bytes + own.rollout_bytes
  )


def test_frozen_weights_and_averages_lie_on_the_samplers_devices_too():
  norms, lora = 3 * 32, schema.Lora(rank=2)
  adapter = _make(stage=_stage(lora=lora), sampler=(1,), dtype='bfloat16')
  handed = 4 * adapter.trained
  frozen = 2 * (PARAMETERS - norms) + 4 * norms
  assert adapter.past_bytes == frozen + 2 * handed
  assert adapter.transfers[-1].device_bytes == handed
  average = _make(stage=_stage(envs={'a': EMA}), sampler=(1,))
  assert average.past_bytes == 4 * 4 * PARAMETERS


def test_past_versions_lie_in_the_compute_dtype():
  norms = 3 * 32
  version = 2 * (PARAMETERS - norms) + 4 * norms
  stage = _stage(rollout=schema.Rollout(slots=8, max_lag=2))
  shared = _make(stage=stage, dtype='bfloat16')
  assert shared.past_bytes == 3 * version
  own = _make(stage=stage, dtype='bfloat16', sampler=(1,))
  # And the newest one, while the oldest one is still there.
  assert own.past_bytes == 4 * own.transfers[-1].device_bytes == 4 * version
  others = {'uses_policy': False}
  assert _make(stage=stage, load=others).past_bytes == 0
  unused = _make(stage=stage, sampler=(1,), load=others)
  assert (unused.past_bytes, unused.transfers) == (4 * PARAMETERS, [])


@pytest.mark.parametrize(
  ('options', 'sizes', 'adds'),
  [
    ({}, (1,), True),
    ({'in_turns': True}, (1,), False),
    ({'max_lag': 0}, (1,), False),
    ({}, (2,), False),  # devices that both use: in turns
  ],
)
def test_work_of_a_thread_lies_beside_that_of_an_update(options, sizes, adds):
  rollout = schema.Rollout(**{'slots': 8, 'max_lag': 1, **options})
  made = _make(*sizes, stage=_stage(rollout=rollout))
  assert made.rollout_bytes and made.eval_bytes == made.rollout_bytes
  work = made.update_bytes + adds * made.rollout_bytes
  held = made.state_bytes + made.past_bytes + made.decode_bytes
  assert made.total_bytes == held + work


def test_an_evaluation_has_a_cache_beside_the_one_that_is_kept():
  rollout = schema.Rollout(slots=8, in_flight=True, keep_cache=True)
  stage, cache = _stage(rollout=rollout), 4 * 128 * 34
  made, own = _make(stage=stage), _make(stage=stage, sampler=(1,))
  assert made.eval_bytes == made.rollout_bytes + cache
  assert own.sampler_bytes == own.past_bytes + own.decode_bytes + own.eval_bytes


def test_samplers_decode_in_place_of_the_learner():
  made = _make(load={'has_samplers': True})
  assert made.decode_bytes == 0
  assert made.rollout_bytes == 4 * 64 * 64 * 4  # scoring, four copies
  players = _make(load={'has_samplers': True, 'players': 1})
  assert players.decode_bytes == _make().decode_bytes


def test_details_are_a_table_of_weights_and_one_of_transfers():
  alone = _make().details()
  row = ['embed/table', 'f32[100,', '32]', '(tensor,', 'fsdp)', '12', 'KiB']
  assert alone[1].split() == row
  assert alone[-1] == '  none: one device'
  assert _make(1, 2, 2).details()[-1].split()[0] == 'total'


@pytest.mark.parametrize(
  ('longest', 'backend', 'tokens'),
  [(16, 'cpu', 16), (17, 'gpu', 32), (129, 'tpu', 256)],
)
def test_slot_tokens_are_rounded_up_to_whole_tiles(longest, backend, tokens):
  assert plan.slot_tokens(longest, backend) == tokens


def test_a_reward_model_on_pairs_of_a_file_decodes_nothing():
  file = schema.PairFile(path='pairs.jsonl')
  alone = _make(stage=_stage(kind='ranking', pairs=file))
  assert (alone.slots, alone.decode_bytes, alone.rollout_bytes) == (0, 0, 0)
  assert alone.slot_tokens == SLOT_TOKENS  # the engine is built, without cache


# Bytes of a train step that jax 0.10.2 compiled for H100 without a device, on
# 2026-11-23, hybrids and experts on 2026-11-28: preset, mesh, rows x tokens,
# 1e9 bytes per device of arguments, temporaries and results together, options.
# The last of equal ones has trees.
H100 = """
  qwen3_0p6b 1x1x1 2x4096 20.953 remat=none
  qwen3_0p6b 1x1x1 8x4096 16.082
  qwen3_8b 1x1x1 8x4096 34.061 layers=2
  qwen3_8b 1x1x1 1x4096 31.284 layers=2
  llama3_8b 1x1x1 8x4096 32.186 layers=2
  qwen3_8b 1x1x1 8x4096 55.460 layers=4 remat=none
  qwen3_4b 1x1x1 4x8192 13.848 layers=4 vocab_size=8192
  qwen3_8b 1x8x1 8x4096 25.827
  qwen3_8b 1x2x4 8x4096 27.882
  qwen3_32b 1x8x1 8x4096 94.434
  qwen3_32b 1x1x8 8x4096 106.790
  qwen3_8b 2x2x2 8x4096 46.872
  qwen3_0p6b 8x1x1 16x4096 13.657
  qwen3_0p6b 1x8x1 8x4096 2.790
  qwen3_0p6b 1x8x1 8x4096 2.895
  qwen3_8b 1x8x1 8x4096 27.037 remat=attention
  qwen3_8b 1x8x1 8x4096 38.584 remat=none
  qwen3_0p6b 1x8x1 8x4096 6.237 reduce_gradients=update
  qwen3_8b 1x8x1 8x4096 37.808 layers=12 reduce_gradients=update
  qwen3_8b 1x8x1 8x4096 3.209 layers=12 rank=16
  qwen3_8b 1x8x1 8x4096 9.877 layers=12 rank=16 reduce_gradients=update
  qwen3_0p6b 2x4x1 8x4096 2.249 rank=16 reduce_gradients=update
  qwen3_5_4b 1x1x1 2x4096 26.912 layers=8 vocab_size=32768
  qwen3_5_4b 1x1x1 4x4096 33.089 layers=8 vocab_size=32768
  qwen3_5_4b 1x1x1 2x4096 32.245 layers=8 vocab_size=32768 remat=none
  qwen3_30b_a3b 1x1x1 4x4096 57.896 layers=4 vocab_size=8192
  qwen3_30b_a3b 1x1x1 4x4096 62.157 layers=4 vocab_size=8192 remat=none
  qwen3_30b_a3b 1x8x1 16x4096 12.582 layers=4 vocab_size=8192
  qwen3_30b_a3b 1x2x1x4 16x4096 16.356 layers=4 vocab_size=8192
  qwen3_30b_a3b 1x2x1x4 32x4096 23.642 layers=4 vocab_size=8192
  qwen3_8b 1x4x1x1x2 4x16384 48.825
  qwen3_5_4b 1x4x1x1x2 4x16384 15.233 layers=8 vocab_size=32768
"""


@pytest.mark.parametrize('row', H100.strip().splitlines())
def test_the_plan_is_close_to_the_compiler(row):
  preset, mesh, shape, total, *options = row.split()
  sizes = tuple(map(int, mesh.split('x')))
  rows, tokens = map(int, shape.split('x'))
  options = dict(x.split('=') for x in options)
  rank, reduce = options.pop('rank', 0), options.pop('reduce_gradients', None)
  batch = schema.Batch(row_tokens=tokens, micro_batch_tokens=rows * tokens)
  if reduce:
    batch = dataclasses.replace(batch, reduce_gradients=reduce)
  options = {k: int(x) if x.isdigit() else x for k, x in options.items()}
  base = schema.PRESETS[preset]
  depth = options.get('layers', base.layers)
  options['delta_layers'] = tuple(i for i in base.delta_layers if i < depth)
  made = _make(
    *sizes,
    stage=_stage(lora=schema.Lora(rank=int(rank)), batch=batch),
    base=base,
    **options,
  )
  low, high = plan.ERROR
  planned = made.state_bytes + made.update_bytes
  assert 1 - low <= planned / (1e9 * float(total)) <= 1 + high


WIDE = schema.Model(
  vocab_size=1000,
  layers=5,
  embed_dim=64,
  heads=8,
  kv_heads=4,
  head_dim=16,
  mlp_dim=96,
  tied_head=False,
  remat='block',
)
LAYER = 64 * (2 * (8 + 4) * 16 + 3 * 96)  # numbers of a layer's matrices
TABLE = 1000 * 64
ACTIVATIONS = 4 * 512 * 64  # bytes of 512 tokens
# Numbers of a layer's adapter of rank 4: A of q, k, v, gate and up and B of o
# and down, which fsdp splits, and the others.
SPLIT = 4 * 7 * 64
WHOLE = 4 * (128 + 64 + 64 + 96 + 96 + 128 + 96)


def _of(mesh, tokens=512, reduce='micro_batch', rank=0, **options):
  batch = schema.Batch(
    row_tokens=8, micro_batch_tokens=tokens, reduce_gradients=reduce
  )
  stage = _stage(lora=schema.Lora(rank=rank), batch=batch)
  made = _make(*mesh, stage=stage, base=WIDE, **options)
  return {(x.what, x.axis): (x.count, x.device_bytes) for x in made.transfers}


def test_one_device_exchanges_nothing():
  assert _of((1, 1, 1)) == {}


def test_fsdp_gathers_layers_twice_and_the_head_once():
  layers = 5 * 4 * LAYER
  assert _of((1, 4, 1), tokens=4 * 512) == {
    ('layers, forward', 'fsdp'): (5, layers),
    ('layers, backward', 'fsdp'): (5, layers),
    ('gradients', 'fsdp'): (5, layers),
    ('head', 'fsdp'): (1, 4 * TABLE),
    ('head, gradient', 'fsdp'): (1, 4 * TABLE),
    ('embedded tokens', 'fsdp'): (2, 2 * ACTIVATIONS),
  }


def test_tensor_divides_weights_and_adds_up_the_activations():
  found = _of((1, 2, 4), tokens=2 * 512)
  assert found['layers, forward', 'fsdp'] == (5, 5 * 4 * LAYER // 4)
  # Attention and MLP, and attention again.
  assert found['activations, forward', 'tensor'] == (15, 15 * ACTIVATIONS)
  assert found['activations, backward', 'tensor'] == (25, 25 * ACTIVATIONS)


def test_data_reduces_the_part_that_fsdp_leaves():
  part = (5 * LAYER + 2 * TABLE) * 4
  assert _of((2, 1, 1)) == {('gradients', 'data'): (7, part)}
  assert _of((2, 4, 1))['gradients', 'data'] == (7, part // 4)


def test_one_communication_per_update_does_not_depend_on_tokens():
  whole = 4 * (5 * LAYER + 2 * TABLE)
  assert _of((2, 4, 1), tokens=4096, reduce='update') == {
    ('weights, per update', 'fsdp'): (1, whole),
    ('gradients, per update', 'fsdp'): (1, whole),
    ('gradients, per update', 'data'): (1, whole // 4),
  }


def test_only_an_adapter_has_gradients():
  weights = 4 * 5 * (LAYER + SPLIT)
  assert _of((1, 4, 1), tokens=4 * 512, rank=4) == {
    ('layers, forward', 'fsdp'): (5, weights),
    ('layers, backward', 'fsdp'): (5, weights),
    ('head', 'fsdp'): (1, 4 * TABLE),
    ('embedded tokens', 'fsdp'): (1, ACTIVATIONS),
    ('adapter, gradient', 'fsdp'): (5, 4 * 5 * SPLIT),
    ('adapter, gradient, unsplit', 'fsdp'): (5, 4 * 5 * WHOLE),
  }


def test_tensor_splits_an_adapter_and_adds_up_its_products():
  found = _of((1, 1, 2), rank=4)
  # o and down, twice, and the gradients of q, k, v, gate and up.
  assert found['products with A', 'tensor'] == (5, 4 * 512 * 5 * 4 * 9)


def test_frozen_weights_are_gathered_once_per_update_in_the_compute_dtype():
  found = _of((2, 4, 1), rank=4, reduce='update', dtype='bfloat16')
  assert found == {
    ('weights, per update', 'fsdp'): (1, 2 * (5 * (LAYER + SPLIT) + 2 * TABLE)),
    ('adapter, gradient, per update', 'fsdp'): (1, 4 * 5 * SPLIT),
    ('adapter, gradient, unsplit, per update', 'data and fsdp'): (
      1,
      4 * 5 * WHOLE,
    ),
    ('adapter, gradient, per update', 'data'): (1, 5 * SPLIT),
  }


def test_an_expert_axis_moves_tokens_and_reduces_what_it_does_not_split():
  sizes = schema.Experts(count=4, per_token=2, mlp_dim=32)
  base = dataclasses.replace(WIDE, experts=sizes)
  batch = schema.Batch(row_tokens=8, micro_batch_tokens=4 * 512)
  stage = _stage(batch=batch)
  made = _make(1, 2, 1, 2, stage=stage, base=base)
  found = {(x.what, x.axis): (x.count, x.device_bytes) for x in made.transfers}
  # Each of 512 tokens goes to both devices of the axis, forward, again, and
  # back.
  tokens = 5 * 2 * ACTIVATIONS
  assert found['tokens of experts', 'expert'] == (15, 3 * tokens)
  assert found['results of experts', 'expert'] == (10, 2 * tokens)
  # All but the experts, of which the other device has its own.
  attention = 64 * 2 * (8 + 4) * 16
  router, experts = 64 * 4, 2 * 3 * 64 * 32
  part = 4 * (5 * (attention + router) + 2 * TABLE) // 2
  assert found['gradients', 'expert'] == (7, part)
  layers = 4 * 5 * (attention + router + experts)
  assert found['layers, forward', 'fsdp'] == (5, layers)


def test_a_sequence_axis_moves_the_keys_of_rows():
  base = dataclasses.replace(
    WIDE, delta_layers=(0,), delta=schema.Delta(2, 4, 8, 16)
  )
  batch = schema.Batch(row_tokens=256, micro_batch_tokens=4 * 512)
  made = _make(2, 1, 1, 1, 2, stage=_stage(batch=batch), base=base)
  found = {(x.what, x.axis): (x.count, x.device_bytes) for x in made.transfers}
  # 4 rows of 256 tokens on the two devices of an axis; forward, and again.
  keys, states = 4 * 1024 * 2 * 4 * 16, 4 * 2 * 4 * 4 * 8 * (8 + 16)
  assert found['keys, values', 'sequence'] == (16, 4 * 2 * keys)
  assert found['keys, values, gradient', 'sequence'] == (8, 4 * keys)
  assert found['states', 'sequence'] == (2, 2 * states)
  assert found['states, gradient', 'sequence'] == (1, states)
  assert ('gradients', 'data and sequence') in found


@pytest.mark.parametrize(
  ('options', 'numbers'),
  [
    ({}, 5 * (2 * (8 + 4) * 16 + 8 + 2 * 96)),
    # q, k and v of 2 heads of 8, z, and a, b; attention in the three others.
    (
      {'delta_layers': (0, 1), 'delta': schema.Delta(2, 2, 8, 8)},
      2 * (4 * 2 * 8 + 2 * 2) + 3 * (2 * (8 + 4) * 16 + 8) + 5 * 2 * 96,
    ),
    # Gate, up and down of two experts.
    (
      {'experts': schema.Experts(count=4, per_token=2, mlp_dim=32)},
      5 * (2 * (8 + 4) * 16 + 8 + 2 * (2 * 32 + 64)),
    ),
  ],
)
def test_remat_none_keeps_the_products_of_a_layer_s_own_parts(options, numbers):
  made = {
    remat: _make(base=dataclasses.replace(WIDE, remat=remat, **options))
    for remat in ('none', 'block')
  }
  kept = made['none'].update_bytes - made['block'].update_bytes
  assert kept == 4 * 64 * (numbers + 5 * 64)
