"""Figures of the assembler, checks and the table, without a compiler."""

import types

from experiments.planner import aot, hlo, programs
from posttrain import schema


def module(body):
  """Reads a program whose loop of three layers calls a kernel."""
  return hlo.parse(f"""HloModule m

%body (p: bf16[8,4]) -> bf16[8,4] {{
  %p = bf16[8,4] parameter(0)
  {body}
  ROOT %k = bf16[8,4] custom-call(%p), custom_call_target="tpu_custom_call", \
metadata={{op_name="jit(f)/decode/pallas_call"}}
}}

%test (q: bf16[8,4]) -> pred[] {{
  ROOT %q = pred[] constant(true)
}}

ENTRY %main (x: bf16[8,4]) -> bf16[8,4] {{
  %x = bf16[8,4] parameter(0)
  ROOT %w = bf16[8,4] while(%x), condition=%test, body=%body, \
backend_config={{"known_trip_count":{{"n":"3"}}}}
}}
""")


def test_a_cache_must_be_aliased_and_not_copied():
  model = schema.Model(
    layers=2, kv_heads=2, heads=2, head_dim=2, dtype='bfloat16'
  )
  sizes = programs.Sizes(slots=4, capacity=8)
  mesh = (1, 2, 2)
  # 2 slots of 8 tokens, one head of 2 numbers of 2 bytes.
  assert aot.layer_cache_bytes(model, mesh, sizes) == 64
  # Two heads do not divide over four devices: each has both.
  assert aot.layer_cache_bytes(model, (1, 2, 4), sizes) == 128

  def lines(body, aliased):
    memory = types.SimpleNamespace(alias_size_in_bytes=aliased)
    program = types.SimpleNamespace(memory_analysis=lambda: memory)
    return aot.cache_faults(module(body), program, model, mesh, sizes)

  assert lines('', 256) == []
  given, copied = lines('%c = bf16[4,8]{0,1} copy(%p)', 255)
  assert '255 bytes do' in given and copied.startswith('1 copies of a layer')


def test_a_tpu_decodes_only_the_blocks_in_use():
  first, *_, last = aot.decode_steps()
  assert (first['all'], first['steps']) == (128 * 16, 128 * 2)
  assert last['all'] == last['steps'] and last['ms'] == 0


def test_the_table_has_a_row_per_kernel():
  row = {'call': 'training', 'kernel': 'decode', 'calls': 1, 'CPU s': 1.25}
  assert '| training | decode | 1 | 1.25 |' in aot.markdown([row])
