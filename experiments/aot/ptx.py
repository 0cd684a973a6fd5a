"""GPU kernels as the compiler dumps them: what `ptxas` makes of their PTX."""

import dataclasses
import importlib.util
import pathlib
import re
import subprocess
import tempfile

_ENTRY = re.compile(r'\.entry (\w+)\(')
_TARGET = re.compile(r'^\.target (\w+)', re.MULTILINE)
_SPILLS = re.compile(
  r'(\d+) bytes stack frame, (\d+) bytes spill stores, '
  r'(\d+) bytes spill loads'
)
_REGISTERS = re.compile(r'Used (\d+) registers')


@dataclasses.dataclass(frozen=True)
class Kernel:
  """The machine code of a kernel, for one multiprocessor."""

  name: str
  registers: int  # of a thread, at most 255
  stack: int  # bytes of a thread in local memory, spills included
  spill_stores: int  # bytes
  spill_loads: int  # bytes
  wgmma: int  # matrix instructions of a warp group, in the text
  mma: int  # matrix instructions of a warp, in the text


def assemble(
  folder: str | pathlib.Path, names: tuple[str, ...]
) -> list[Kernel]:
  """Assembles the kernels of a dump folder.

  Args:
    folder: the compiler's `xla_dump_to`.
    names: the kernels' names.

  Raises:
    ValueError: the folder has no kernel of a name.
  """
  texts = {}
  for path in sorted(pathlib.Path(folder).glob('*.ptx')):
    text = path.read_text()
    texts |= {name: text for name in _ENTRY.findall(text)}
  for name in names:
    if name not in texts:
      raise ValueError(
        f'{folder} must have the kernel {name}: got {sorted(texts)}'
      )
  return [read(name, texts[name], _assemble(texts[name])) for name in names]


def read(name: str, text: str, report: str) -> Kernel:
  """Reads a kernel's figures from its PTX and the report of `ptxas -v`."""
  spills = _SPILLS.search(report)
  registers = _REGISTERS.search(report)
  assert spills and registers, report
  return Kernel(
    name,
    int(registers[1]),
    *map(int, spills.groups()),
    wgmma=text.count('wgmma.mma_async'),
    mma=text.count('mma.sync'),
  )


def _assemble(text: str) -> str:
  """Returns the report of `ptxas -v` on a PTX file of one kernel."""
  target = _TARGET.search(text)
  assert target, 'PTX names its target'
  with tempfile.TemporaryDirectory() as folder:
    source = pathlib.Path(folder) / 'kernel.ptx'
    source.write_text(text)
    command = [_ptxas(), f'-arch={target[1]}', '-v', str(source)]
    done = subprocess.run(
      [*command, '-o', f'{folder}/kernel.cubin'],
      capture_output=True,
      text=True,
      check=True,
    )
  return done.stdout + done.stderr


def _ptxas() -> str:
  """Returns the path of the assembler in the compiler's wheels."""
  spec = importlib.util.find_spec('nvidia')
  assert spec and spec.submodule_search_locations, 'no nvidia wheels'
  for folder in spec.submodule_search_locations:
    for path in sorted(pathlib.Path(folder).glob('cu*/bin/ptxas')):
      return str(path)
  raise FileNotFoundError('ptxas: experiments/aot/run.sh fetches it')
