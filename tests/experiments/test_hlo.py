"""The reader of optimized HLO, on programs of a few lines."""

import pytest

from experiments.planner import hlo

ADD = """
%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}
"""
GROUPS = 'replica_groups={{0,1,2,3}}'


def parse(entry: str, computations: str = '') -> hlo.Module:
  """Reads a module of the entry's lines, which begin with a parameter."""
  lines = '\n  '.join(entry.strip().splitlines())
  return hlo.parse(
    'HloModule jit_f, is_scheduled=true\n'
    f'{ADD}{computations}\n'
    'ENTRY %main (p: f32[8,16]) -> f32[8,16] {\n'
    '  %p = f32[8,16]{1,0} parameter(0)\n'
    f'  {lines}\n'
    '}\n'
  )


def only(module: hlo.Module) -> hlo.Collective:
  (collective,) = module.collectives
  return collective


@pytest.mark.parametrize(
  'line, expected',
  [
    # The larger of operand and result, in the dtype that travels.
    (f'bf16[32,16]{{1,0}} all-gather(%h), {GROUPS}, dimensions={{0}}', 1024),
    (f'(f32[8,16], bf16[8,16]) all-reduce(%p, %h), {GROUPS}', 512 + 256),
    # Operands with types, layouts with brackets.
    (
      'bf16[32,16]{1,0:T(8,128)(2,1)S(1)} all-gather(bf16[8,16]{1,0:T(8,128)} '
      f'%h), {GROUPS}',
      1024,
    ),
  ],
)
def test_bytes_are_those_of_the_larger_side(line, expected):
  module = parse(f'%h = bf16[8,16]{{1,0}} convert(%p)\nROOT %r = {line}')
  assert only(module).bytes == expected


@pytest.mark.parametrize(
  'start, done, kind, expected',
  [
    (
      '(f32[8,16]{1,0}, f32[32,16]{1,0}) all-gather-start(%p)',
      'all-gather-done',
      'all-gather',
      2048,
    ),
    (
      '((f32[8,16]), f32[2,16], u32[]) reduce-scatter-start(%p)',
      'reduce-scatter-done',
      'reduce-scatter',
      512,
    ),
  ],
)
def test_an_async_pair_counts_once(start, done, kind, expected):
  module = parse(
    f'%s = {start}, {GROUPS}, to_apply=%add\nROOT %r = f32[8,16] {done}(%s)'
  )
  assert (only(module).kind, only(module).bytes) == (kind, expected)


LOOPS = f"""
%inner (i: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {{
  %i = (s32[], /*index=1*/f32[8,16]{{1,0}}) parameter(0)
  %x = f32[8,16]{{1,0}} get-tuple-element(%i), index=1
  %r = f32[8,16]{{1,0}} all-reduce(%x), {GROUPS}, to_apply=%add
  ROOT %o = (s32[], f32[8,16]{{1,0}}) tuple(%i, %r)
}}

%outer (j: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {{
  %j = (s32[], f32[8,16]{{1,0}}) parameter(0)
  %y = f32[8,16]{{1,0}} get-tuple-element(%j), index=1
  %g = f32[32,16]{{1,0}} all-gather(%y), {GROUPS}, dimensions={{0}}
  ROOT %w = (s32[], f32[8,16]{{1,0}}) while(%j), condition=%test, body=%inner\
, metadata={{op_name="jit(f)/while/body/while" stack_frame_id=2}}\
, backend_config={{"known_trip_count":{{"n":"5"}}}}
}}

%test (k: (s32[], f32[8,16])) -> pred[] {{
  %k = (s32[], f32[8,16]{{1,0}}) parameter(0)
  ROOT %t = pred[] constant(true)
}}
"""


@pytest.mark.parametrize(
  'config, trips',
  [(', backend_config={"known_trip_count":{"n":"3"},"a":"b"}', 3), ('', 1)],
)
def test_loops_multiply_and_unknown_trips_count_once(config, trips):
  module = parse(
    '%t = (s32[], f32[8,16]{1,0}) tuple(%p, %p)\n'
    'ROOT %w = (s32[], f32[8,16]{1,0}) while(%t), condition=%test, '
    f'body=%outer{config}',
    LOOPS,
  )
  times = {x.kind: x.times for x in module.collectives}
  assert times == {'all-gather': trips, 'all-reduce': 5 * trips}


# TPUs' compiler notes no trip counts.
@pytest.mark.parametrize(
  'condition, trips', [('compare(%i, %n), direction=LT', 7), ('and(%n, %n)', 1)]
)
def test_the_bound_of_a_condition_is_a_trip_count(condition, trips):
  test = f"""
%bound (k: (s32[], f32[8,16])) -> pred[] {{
  %n = s32[]{{:T(128)}} constant(7)
  %k = (s32[], f32[8,16]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%k), index=0
  ROOT %t = pred[]{{:T(512)}} {condition}
}}
"""
  module = parse(
    '%t = (s32[], f32[8,16]{1,0}) tuple(%p, %p)\n'
    'ROOT %w = (s32[], f32[8,16]{1,0}) while(%t), condition=%bound, '
    'body=%inner',
    LOOPS + test,
  )
  assert only(module).times == trips


@pytest.mark.parametrize(
  'groups, counts',
  [
    ('replica_groups={{0,1},{2,3}}', True),
    ('replica_groups=[4,2]<=[2,4]T(1,0)', True),
    ("replica_groups=mesh['a'=1,'b'=8] {'a'}", False),
  ],
)
def test_groups_of_one_device_exchange_nothing(groups, counts):
  module = parse(f'ROOT %r = f32[8,16] all-reduce(%p), {groups}, to_apply=%add')
  assert len(module.collectives) == counts
