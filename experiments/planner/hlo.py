"""Optimized HLO text: the collectives of a program.

1. `parse` reads the text of a compiled program (`compiled.as_text()`) into
   computations and instructions.
2. A computation runs as often as all its callers together; the body of a while
   loop runs as often as `Module.trips` says, once if that is not known. Every
   branch of a conditional counts.
3. `Module.collectives` lists what travels between devices.

All sizes are per device. An asynchronous collective counts where it starts.
"""

import collections
import dataclasses
import functools
import math
import re

KINDS = (
  'all-reduce',
  'all-gather',
  'reduce-scatter',
  'all-to-all',
  'ragged-all-to-all',
  'collective-permute',
  'collective-broadcast',
)

_LISTS = re.compile(r'(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}')
_COUNTED = re.compile(r'replica_groups=\[\d+,(\d+)\]<=')
_MESH = re.compile(r'replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}')
_ARRAY = re.compile(r'\b([a-z]\w*)\[([\d,<=]*)\]')
_NAME = re.compile(r'%([\w.\-]+)')
_HEAD = re.compile(r'^(ENTRY )?%([\w.\-]+) \(.*\{$')
_CALLS = re.compile(
  r'\b(?:calls|to_apply|body|condition|true_computation|false_computation)='
  r'(%[\w.\-]+)|\b(?:branch_computations|called_computations)=\{([^}]*)\}'
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')


@dataclasses.dataclass(frozen=True)
class Array:
  """Dtype and shape of an array, or of one part of a tuple."""

  dtype: str
  shape: tuple[int, ...]

  @property
  def bytes(self) -> int:
    """Its size on one device; a token has none."""
    digits = re.search(r'\d+', self.dtype)  # 'pred' and 'token' have none
    bits = int(digits[0]) if digits else 8 * (self.dtype == 'pred')
    return math.prod(self.shape) * bits // 8

  def __str__(self):
    return f'{self.dtype}[{",".join(map(str, self.shape))}]'


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of a computation."""

  name: str
  opcode: str
  type: str  # of the result, as text
  operands: tuple[str, ...]  # names
  attributes: str  # the text after the operands
  literal: str = ''  # a constant's value, a parameter's number

  @functools.cached_property
  def arrays(self) -> tuple[Array, ...]:
    """The arrays of the result, in order."""
    return _arrays(self.type)

  @property
  def op_name(self) -> str:
    """The path of jax's operation, '' if unknown."""
    match = _OP_NAME.search(self.attributes)
    return match[1] if match else ''

  @property
  def callees(self) -> list[str]:
    """The computations that it runs; none for the end of an async pair."""
    if self.opcode.endswith(('-done', '-update')):
      return []
    calls = _CALLS.findall(self.attributes)
    return _NAME.findall(' '.join(one or many for one, many in calls))


@dataclasses.dataclass(frozen=True)
class Collective:
  """An exchange between devices."""

  kind: str  # one of KINDS
  computation: str
  arrays: tuple[Array, ...]  # the larger of operands and result
  times: int  # how often it runs
  op_name: str

  @property
  def bytes(self) -> int:
    """Bytes per device, of all runs."""
    return self.times * sum(x.bytes for x in self.arrays)

  def __str__(self):
    shapes = ', '.join(map(str, self.arrays[:3]))
    more = f', and {len(self.arrays) - 3} more' if len(self.arrays) > 3 else ''
    return f'{self.kind} {shapes}{more} x {self.times}'


@dataclasses.dataclass(frozen=True)
class Module:
  """A program: its computations by name."""

  computations: dict[str, tuple[Instruction, ...]]
  entry: str

  @functools.cached_property
  def times(self) -> dict[str, int]:
    """How often each computation runs."""
    callers = collections.defaultdict(list)
    for name, instructions in self.computations.items():
      for x in instructions:
        for callee in x.callees:
          callers[callee].append((name, self.trips(x)))

    @functools.cache
    def count(name: str) -> int:
      own = 1 if name == self.entry else 0
      return own + sum(count(x) * trips for x, trips in callers[name])

    return {name: count(name) for name in self.computations}

  def trips(self, x: Instruction) -> int:
    """Returns how often an instruction runs its computations.

    For a while loop that the compiler did not count, it is the bound of its
    condition, if that is a constant: jax's loops count from 0 by 1.
    """
    if x.opcode != 'while':
      return 1
    if match := _TRIPS.search(x.attributes):
      return int(match[1])
    lines = {y.name: y for y in self.computations[_called(x, 'condition')]}
    last = list(lines.values())[-1]
    bound = lines.get(last.operands[-1]) if last.opcode == 'compare' else None
    if bound and bound.literal.isdigit() and 'direction=LT' in last.attributes:
      return int(bound.literal)
    return 1

  @functools.cached_property
  def collectives(self) -> tuple[Collective, ...]:
    """All collectives between at least two devices, the largest first."""
    found = [
      Collective(
        # TPUs reduce and scatter in a fusion of an all-reduce and a slice.
        'reduce-scatter'
        if name.startswith('all-reduce-scatter')
        else x.opcode.removesuffix('-start'),
        name,
        _traffic(x, {y.name: y for y in instructions}),
        self.times[name],
        x.op_name,
      )
      for name, instructions in self.computations.items()
      if self.times[name] and not _continues(name, instructions)
      for x in instructions
      if x.opcode.removesuffix('-start') in KINDS and _group(x) != 1
    ]
    return tuple(sorted(found, key=lambda x: -x.bytes))

  def bytes(self) -> dict[str, int]:
    """Returns the bytes per device of the collectives, by kind."""
    sums = collections.Counter()
    for x in self.collectives:
      sums[x.kind] += x.bytes
    return dict(sums.most_common())

  def custom_calls(self) -> list[tuple[Instruction, int]]:
    """Returns the calls of kernels and libraries, and how often they run."""
    return [
      (x, self.times[name])
      for name, instructions in self.computations.items()
      for x in instructions
      if x.opcode == 'custom-call' and self.times[name]
    ]

  def copies(self, size: int) -> list[Instruction]:
    """Returns the copies within loops of arrays of so many bytes."""
    bodies = {
      y
      for name, instructions in self.computations.items()
      for x in instructions
      if x.opcode == 'while' and self.times[name]
      for y in self.within(_called(x, 'body'))
    }
    return [
      x
      for name in sorted(bodies)
      for x in self.computations[name]
      if x.opcode in ('copy', 'copy-start', 'transpose')
      if any(y.bytes == size for y in x.arrays)
    ]

  def within(self, computation: str) -> set[str]:
    """Returns the names of a computation and of all that it runs."""
    names, todo = set(), [computation]
    while todo:
      name = todo.pop()
      if name not in names:
        names.add(name)
        todo += [y for x in self.computations[name] for y in x.callees]
    return names


def parse(text: str) -> Module:
  """Reads the text of an optimized program.

  Raises:
    ValueError: the text has no entry computation.
  """
  computations: dict[str, list[Instruction]] = {}
  entry, current = None, None
  for line in text.split('\n'):
    if match := _HEAD.match(line):
      current = computations[match[2]] = []
      entry = match[2] if match[1] else entry
    elif current is not None and line.startswith('  ') and ' = ' in line:
      name, rest = line.strip().removeprefix('ROOT ').split(' = ', 1)
      end = _closing(rest) if rest.startswith('(') else rest.index(' ')
      opcode, tail = rest[end:].strip().split('(', 1)
      close = _closing('(' + tail) - 1
      current.append(
        Instruction(
          name.removeprefix('%'),
          opcode,
          rest[:end],
          tuple(_NAME.findall(tail[:close])),
          tail[close:],
          tail[: close - 1] if opcode in ('constant', 'parameter') else '',
        )
      )
  if entry is None:
    raise ValueError(
      'text must be a module with an ENTRY computation: got none'
    )
  return Module(
    {name: tuple(lines) for name, lines in computations.items()}, entry
  )


def _closing(text: str) -> int:
  """Returns the index after the bracket that closes the first one."""
  depth = 0
  for match in re.finditer(r'[()]', text):
    depth += 1 if match[0] == '(' else -1
    if not depth:
      return match.end()
  raise ValueError(f'brackets must close: got {text[:80]!r}')


def _elements(type: str) -> list[str]:
  """Returns the texts of a tuple's elements, or of the type itself."""
  if not type.startswith('('):
    return [type]
  parts, depth, start = [], 0, 1
  for match in re.finditer(r'[(){}\[\],]', type):
    if match[0] in '({[':
      depth += 1
    elif match[0] in ')}]':
      depth -= 1
    if (match[0] == ',' and depth == 1) or not depth:
      parts.append(type[start : match.start()].strip())
      start = match.end()
  return parts


def _arrays(type: str) -> tuple[Array, ...]:
  return tuple(
    Array(dtype, tuple(int(x.removeprefix('<=')) for x in dims.split(',') if x))
    for dtype, dims in _ARRAY.findall(type)
  )


def _continues(name: str, instructions: tuple[Instruction, ...]) -> bool:
  """Returns whether a computation continues an exchange that another starts.

  TPUs' compiler fuses parts of an asynchronous collective with other work: each
  fusion has its instruction, the one with AsyncCollectiveStart is the first.
  """
  done = 'custom_call_target="AsyncCollectiveDone"'
  return name.startswith('async_collective_fusion') or any(
    done in x.attributes for x in instructions if x.opcode == 'custom-call'
  )


def _traffic(
  x: Instruction, instructions: dict[str, Instruction]
) -> tuple[Array, ...]:
  """Returns the operands' arrays or the result's, which are larger."""
  # The second operand of a ragged one is what the result replaces.
  names = x.operands[:1] if x.opcode.startswith('ragged') else x.operands
  operands = [
    array
    for name in names
    if name in instructions
    for array in instructions[name].arrays
  ]
  result = x.arrays
  if x.opcode.endswith('-start') and x.opcode != 'all-reduce-start':
    # (operands, results, context...)
    parts = _elements(x.type)
    result = _arrays(parts[1]) if len(parts) > 1 else result
  size = sum(y.bytes for y in operands)
  larger = operands if size > sum(y.bytes for y in result) else result
  return tuple(larger)


def _group(x: Instruction) -> int | None:
  """Returns the number of devices in a replica group; None = not known.

  XLA writes the groups as lists, `{{0,1},{2,3}}`; counted, as `[4,2]<=[8]`, 4
  groups of 2; or along axes of a mesh, `mesh['a'=2,'b'=4] {'b'}`, where
  'b':(2)2 is a part of an axis.
  """
  if match := _LISTS.search(x.attributes):
    return len(match[1].split(','))
  if match := _COUNTED.search(x.attributes):
    return int(match[1])
  if match := _MESH.search(x.attributes):
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
    axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", match[2])
    return math.prod(int(part or sizes[name]) for name, part in axes)
  return None


def _called(x: Instruction, attribute: str) -> str:
  match = re.search(rf'\b{attribute}=%([\w.\-]+)', x.attributes)
  assert match, f'{x.name} has no {attribute}'
  return match[1]
