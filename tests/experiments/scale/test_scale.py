"""Predictions for devices that are not here; nothing is compiled."""

import dataclasses
import json
import math

import numpy as np
import pytest

from experiments import programs
from experiments.scale import __main__ as scale
from experiments.scale import (
  ceilings,
  choices,
  estimates,
  fleets,
  links,
  plans,
  roofline,
)
from experiments.scale import page as scale_page
from posttrain import schema

H100 = ceilings.values(ceilings.CHIPS['h100'])
MODEL = schema.PRESETS['qwen3_8b']
SMALL = 'qwen3_0p6b'
# Per layer: q and o 4,096 x 4,096, k and v 4,096 x 1,024, three MLP matrices of
# 4,096 x 12,288; norms of 2 x 4,096 and 2 x 128. Then the head and a last norm.
LAYER = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288 + 2 * 4096 + 256
WEIGHTS = 36 * LAYER + 151_936 * 4096 + 4096


def exchange(kind, size, devices, times=1):
  return links.Exchange(kind, size, times, tuple(devices))


def hosts_of(target):
  return fleets.layout(target, (target.devices, 1, 1))


def report(*argv):
  return scale.run(scale.parse([*argv, '--compiled=']))


@pytest.mark.parametrize(
  ('kind', 'sent'),
  [
    ('all-gather', 700),
    ('reduce-scatter', 700),
    ('all-to-all', 700),
    ('all-reduce', 1400),
    ('collective-permute', 800),
  ],
)
def test_a_device_of_eight_sends(kind, sent):
  assert links.wire(kind, 800, 8) == sent
  assert links.wire(kind, 800, 1) == 0


def test_a_ring_over_hosts_shares_their_links():
  layout = hosts_of(fleets.Target('h100', 64))
  # 64 devices in 8 hosts: 63 / 64 of the array over NVLink, an eighth of that
  # by each adapter.
  assert layout.route(exchange('all-gather', 6400, range(64))) == (
    6300,
    787.5,
    1,
  )
  # One device of each host: nothing over NVLink.
  assert layout.route(exchange('all-reduce', 800, range(0, 64, 8))) == (
    0,
    1400,
    1,
  )
  # Of 63 parts of 100, 7 stay in the host.
  assert layout.route(exchange('all-to-all', 6400, range(64))) == (700, 5600, 1)
  assert layout.route(exchange('all-gather', 800, range(8))) == (700, 0, 1)


@pytest.mark.parametrize(
  ('devices', 'mesh', 'ways'),
  [
    (256, (1, 256, 1), 4),  # two closed dimensions of 16, both directions
    (256, (16, 16, 1), 2),
    (8, (1, 8, 1), 2),  # a line of 2 and a line of 4
    (4, (1, 1, 4), 2),
    (4, (1, 1, 1), 1),
  ],
)
def test_links_of_a_torus(devices, mesh, ways):
  target = fleets.Target('v5e', devices)
  sizes = (devices // math.prod(mesh) * mesh[0], *mesh[1:])
  layout = fleets.layout(target, sizes)
  members = range(math.prod(mesh[1:])) if mesh[0] > 1 else range(devices)
  group = [0] if math.prod(mesh) == 1 else members
  assert layout.route(exchange('all-gather', 1, group))[2] == ways


def test_rings_of_every_fourth_chip_share_links():
  coords = np.array([(x, 0) for x in range(16)])
  zero = np.zeros(16, int)
  layout = links.Layout(zero, zero, coords)
  group = (0, 4, 8, 12)
  assert layout.route(exchange('all-gather', 1, group))[2] == 2 / 4
  assert layout.route(exchange('all-gather', 1, (0, 1, 2, 3)))[2] == 1


def test_seconds_of_a_collective():
  layout = hosts_of(fleets.Target('h100', 16))
  limits = {
    'inner_bandwidth': 100.0,
    'outer_bandwidth': 10.0,
    'start_latency': 1.0,
    'inner_latency': 0.1,
    'outer_latency': 0.5,
  }
  x = exchange('all-reduce', 1600.0, range(16), times=2)
  traffic = links.traffic(layout, [x], limits)
  # Twice 15 / 16 of the array, an eighth of it by each adapter.
  assert (traffic.inner, traffic.outer, traffic.hosts) == (3000, 375, 3000)
  assert traffic.kinds == {'all-reduce': 3000}
  # Twice: a start, and up and down a tree of 3 levels in a host, 1 above.
  assert traffic.seconds == pytest.approx(37.5 + 2 * (1 + 0.6 + 1.0))
  # A ring has 14 steps within hosts and one between them.
  ring = links.traffic(layout, [exchange('all-gather', 0.0, range(16))], limits)
  assert ring.seconds == pytest.approx(1 + 1.4 + 0.5)


def test_weights_and_flops_of_8b():
  assert roofline.product_weights(MODEL) == WEIGHTS
  per_token = 6 * WEIGHTS + 12 * 36 * 32 * 128 * 4096
  assert roofline.model_flops(MODEL, 10, 4096) == 10 * per_token


def test_work_and_seconds_of_a_train_step():
  sizes = programs.Sizes(rows=8, row_tokens=4096)
  work = roofline.work('train_step', MODEL, (1, 8, 1), sizes, 0)
  assert work.products == 8 * 4096 * WEIGHTS
  # Forward and again, of half the scores; backward 2.5 times one pass.
  scores = 4096 * 2 * 36 * 32 * 128 * 4096
  assert (work.forward, work.backward) == (2 * scores, 2.5 * scores)
  limits = {
    'peak_flops': 1e15,
    'hbm_bandwidth': 1e12,
    'matmul_share': 0.5,
    'attention_forward_share': 0.25,
    'attention_backward_share': 0.2,
    'hbm_share': 0.8,
  }
  numbers = WEIGHTS + 151_936 * 4096  # and the embedding
  expected = 8 * 4096 * WEIGHTS / 0.5e15 + 2 * scores / 0.25e15
  expected += 2.5 * scores / 0.2e15 + 32 * numbers / 8 / 0.8e12
  seconds = roofline.seconds('train_step', work, limits)
  assert seconds == pytest.approx(expected)
  mfu = roofline.mfu(work, seconds, 8, 1e15)
  assert mfu == pytest.approx(work.model_flops / (8e15 * seconds))


def test_work_and_seconds_of_decoding():
  sizes = programs.Sizes(slots=128, capacity=4096)
  work = roofline.work('decode', MODEL, (4, 1, 2), sizes, 1000)
  # 32 slots of 1,000 tokens: keys and values of 4 of 8 heads of 128 in bfloat16
  # and 36 layers.
  assert work.cache == 32 * 1000 * 36 * 2 * 4 * 128 * 2
  # Norms are whole on both devices, and all else in halves, in bfloat16.
  assert work.weights == pytest.approx(2 * (WEIGHTS + 622e6) / 2, rel=1e-2)
  limits = dict.fromkeys(H100, 1.0) | {'peak_flops': 1e30}
  seconds = roofline.seconds('decode', work, limits)
  assert seconds == pytest.approx(work.weights + work.cache)


def test_meshes_keep_tensor_within_a_host():
  meshes = list(fleets.candidates(fleets.Target('h100', 16), 8))
  assert all(math.prod(x) == 16 and x[2] <= 8 for x in meshes)
  assert len(meshes) == len(set(meshes)) == 14
  assert meshes[0] == (16, 1, 1)


def choice(preset, target, seconds=lambda mesh, sizes: 1.0, **options):
  target = fleets.parse(target)
  limits = ceilings.values(ceilings.CHIPS[target.chip])
  slots = int(min(limits['devices_per_host'], target.devices)) * 16
  sizes = programs.Sizes(rows=target.devices, slots=slots)
  return choices.choose(
    schema.PRESETS[preset], target, sizes, limits, seconds, **options
  )


def test_plans_are_those_of_a_stage():
  sizes = programs.Sizes(rows=16, slots=64, capacity=2048, prefill_rows=16)
  model, mesh = schema.PRESETS[SMALL], (2, 2, 2)
  expected = programs.planned(model, fleets.abstract(mesh), sizes, 'gpu')
  for name in scale.PROGRAMS:
    assert plans.plan(name, model, mesh, sizes, 'gpu') == expected[name]


def test_of_equal_meshes_that_fit_the_smallest_axes_are_taken():
  assert choice(SMALL, 'h100:8').mesh == (8, 1, 1)
  # The float32 weights, moments and gradients of 8.2e9 take 123 GiB.
  assert choice('qwen3_8b', 'h100:8').mesh == (2, 4, 1)


def test_tpus_keep_whole_vectors():
  def seconds(mesh, sizes):
    return 1 / mesh[1]

  # 4,096 columns are 32 vectors.
  assert choice('qwen3_8b', 'v6e:256', seconds).mesh[1] == 32
  assert choice('qwen3_8b', 'h100:256', seconds).mesh[1] == 256


def test_a_faster_mesh_is_taken():
  def seconds(mesh, sizes):
    return 1.0 if mesh == (1, 8, 1) else 1.06

  assert choice(SMALL, 'h100:8', seconds).mesh == (1, 8, 1)
  assert choice(SMALL, 'h100:8', lambda *x: seconds(*x) ** 0.5).mesh == (
    8,
    1,
    1,
  )


def test_a_host_decodes_with_tensor_where_a_model_needs_it():
  made = choice('llama3_70b', 'h100:512')
  assert made.mesh[2] >= 2 and made.local == (
    8 // made.mesh[2],
    1,
    made.mesh[2],
  )
  assert made.held <= made.limit
  assert fleets.local_mesh((4, 8, 16), 8) == (1, 1, 8)


def test_without_room_to_decode_only_training_is_planned():
  made = choice('llama3_70b', 'v6e:256')
  assert made.local is None and made.held <= made.limit
  rows = report('--models=llama3_70b', '--targets=v6e:256')
  assert [x['program'] for x in rows['rows']] == ['train_step']
  assert 'prefill and decoding must fit' in rows['refused'][0]['reason']


def test_a_model_that_fits_nowhere_is_refused(capsys):
  with pytest.raises(SystemExit) as stop:
    scale.main(['--models=llama3_70b', '--targets=h100:8'])
  assert stop.value.code == 1
  (line,) = (x for x in capsys.readouterr().out.splitlines() if 'must fit' in x)
  assert 'the train step must fit h100:8: got 1' in line
  assert 'expected at most 71.2; use more devices' in line


@pytest.mark.parametrize(
  ('text', 'words'),
  [
    ('h100', 'CHIP:DEVICES'),
    ('a100:8', 'a chip of h100'),
    ('h100:12', 'use 8 or 16'),
    ('v5e:100', 'expected one of 4, 8'),
  ],
)
def test_targets_are_checked(text, words):
  with pytest.raises(ValueError, match=words):
    fleets.parse(text)


def test_more_devices_and_slower_links():
  argv = ('--models=qwen3_8b', '--programs=train_step')
  rows = report(*argv, '--targets=h100:8,h100:64,h100:512')['rows']
  speeds = [x['tokens_per_s'] for x in rows]
  assert all(low < high for low, high in zip(speeds, speeds[1:], strict=False))
  mesh = ('--mesh=1,64,1', '--targets=h100:64')
  (fast,) = report(*argv, *mesh)['rows']
  slower = '--assume=h100.outer_bandwidth=1e9'
  (slow,) = report(*argv, *mesh, slower)['rows']
  assert slow['communication_s'] > 5 * fast['communication_s']
  assert slow['compute_s'] == fast['compute_s']
  assert slow['step_s'][1] == pytest.approx(
    slow['compute_s'] + slow['communication_s']
  )
  assert slow['mfu'][1] < fast['mfu'][1] < fast['mfu'][0] < 1


def test_bytes_over_hosts_depend_on_the_mesh():
  argv = ('--models=qwen3_8b', '--targets=h100:64', '--programs=train_step')
  inside, across = report(*argv, '--mesh=8,8,1', '--mesh=1,64,1')['rows']
  # Within hosts only the sum over data leaves a host: 7 / 8 twice.
  assert inside['outer_gib'] == pytest.approx(inside['sent_gib']['all-reduce'])
  assert across['hosts_gib'] == pytest.approx(sum(across['sent_gib'].values()))
  assert inside['inner_gib'] < across['inner_gib']


def test_a_given_mesh_must_be_the_targets():
  (line,) = report('--targets=h100:8', '--mesh=2,8,1')['refused']
  assert '--mesh must multiply to h100:8: got 2,8,1' in line['reason']


@pytest.mark.parametrize('text', ['h100.speed=1', 'x.hbm_share=1', 'h100=2'])
def test_assumptions_are_checked(text):
  with pytest.raises(ValueError, match='--assume must be CHIP.NAME=NUMBER'):
    ceilings.override(ceilings.CHIPS, [text])


def program(layers=28, target='h100:8', name='decode', mesh=(4, 1, 2)):
  sizes = programs.Sizes(rows=fleets.parse(target).devices)
  place = fleets.parse(target)
  return estimates.Program(name, SMALL, place, mesh, sizes, layers)


def measured(program, arguments, temporaries, size, times):
  sums = [exchange('all-reduce', size, (0, 1), times)]
  return estimates.Measurement(program, arguments, temporaries, sums, 1.0)


def test_two_depths_are_a_line():
  points = [
    measured(program(2), 100.0, 10.0, 40.0, 5),
    measured(program(4), 140.0, 10.0, 60.0, 9),
  ]
  found = estimates.estimate(
    program(28), {x.program.key: x for x in points}, (2, 4)
  )
  # 20 bytes per layer above 60, and 2 collectives per layer and one more.
  assert (found.kind, found.arguments, found.temporaries) == ('depth', 620, 10)
  assert found.exchanges == [exchange('all-reduce', 300.0, (0, 1), 57)]


def grown(program, factors):
  """Returns a measurement of what is planned times a factor per axis."""
  arguments, temporaries = program.plan()
  axes = {8: 'fsdp', 4: 'data'}
  exchanges = [
    dataclasses.replace(x, bytes=x.bytes * factors[axes[len(x.group)]])
    for x in program.exchanges()
  ]
  return estimates.Measurement(
    program, arguments, 0.5 * temporaries, exchanges, 1.0
  )


def test_scaled_is_the_plan_times_what_the_compiler_needs_of_it():
  factors = {'fsdp': 1.25, 'data': 2.0}
  base = program(name='train_step', mesh=(4, 8, 1), target='h100:32')
  other = program(name='train_step', mesh=(8, 8, 1), target='h100:64')
  found = estimates.estimate(other, {base.key: grown(base, factors)}, (2, 4))
  arguments, temporaries = other.plan()
  assert found.kind == 'scaled' and 'h100:32, mesh 4,8,1' in found.source
  assert found.arguments == pytest.approx(arguments)
  assert found.temporaries == pytest.approx(0.5 * temporaries)
  for x, planned in zip(found.exchanges, other.exchanges(), strict=True):
    data = x.kind == 'all-reduce'
    ratio = factors['data' if data else 'fsdp']
    assert x.bytes == pytest.approx(ratio * planned.bytes)
    assert x.group == planned.group and x.times == planned.times


def test_programs_of_the_same_split_axes_are_nearest():
  factors = {'fsdp': 1.0, 'data': 1.0}
  near = program(name='train_step', mesh=(4, 8, 1), target='h100:32')
  apart = dataclasses.replace(near, preset='qwen3_8b', layers=36)
  other = program(name='train_step', mesh=(1, 8, 2), target='h100:16')
  tensor = dataclasses.replace(other, preset='qwen3_8b', layers=36)
  found = {x.key: grown(x, factors) for x in (near, apart)}
  assert SMALL in estimates.estimate(other, found, (2, 4)).source
  arguments, temporaries = tensor.plan()
  found[tensor.key] = estimates.Measurement(
    tensor, arguments, temporaries, tensor.exchanges(), 1.0
  )
  assert '8b on h100:16' in estimates.estimate(other, found, (2, 4)).source


def test_shallow_programs_are_scaled_at_all_layers():
  points = [
    measured(program(2), 100.0, 10.0, 40.0, 5),
    measured(program(4), 140.0, 10.0, 60.0, 9),
  ]
  wanted = dataclasses.replace(program(36), preset='qwen3_8b')
  found = estimates.estimate(wanted, {x.program.key: x for x in points}, (2, 4))
  planned = program(28).plan()[0]
  assert found.kind == 'scaled'
  assert found.arguments == pytest.approx(620 * wanted.plan()[0] / planned)


def test_errors_compare_with_programs_left_out():
  found = {}
  for target, mesh, factor in (
    ('h100:8', (1, 8, 1), 1.0),
    ('h100:32', (4, 8, 1), 1.25),
  ):
    x = program(name='train_step', mesh=mesh, target=target)
    found[x.key] = grown(x, {'fsdp': factor, 'data': 1.0})
  rows = estimates.errors(found, (2, 4))
  assert len(rows) == 2
  low, high = (x['sent_gib'] for x in rows)
  assert low[0] / low[1] == pytest.approx(1.25)
  # Of the larger one the sum over data is right.
  assert 0.8 < high[0] / high[1] < 1
  assert all(x['peak_gib'][0] == pytest.approx(x['peak_gib'][1]) for x in rows)


def test_measurements_are_read_as_written(tmp_path):
  x = measured(program(), 1.0, 2.0, 3.0, 4)
  file = tmp_path / 'compiled.jsonl'
  file.write_text(json.dumps(x.to_json()) + '\n')
  (found,) = estimates.read(str(file)).values()
  assert found.program == x.program and found.arguments == 1.0
  assert tuple(found.exchanges[0].group) == (0, 1)
  assert estimates.read(str(tmp_path / 'none')) == {}


def test_the_page_has_a_line_per_program():
  made = report('--models=qwen3_0p6b', '--targets=h100:8,v5e:256')
  assert [x['kind'] for x in made['rows']] == ['planned'] * 6
  text = '\n'.join(scale_page.lines(made))
  assert text.count('| qwen3_0p6b | h100:8 |') == 4
  assert 'h100.peak_flops' in text and 'v5e.peak_flops' in text
  json.dumps(made)
