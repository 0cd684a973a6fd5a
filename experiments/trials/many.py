"""Many commands in one process, each of which ends before it compiles.

`run` starts one process, which imports jax once; each command has its own exit
code and messages, as if it ran alone. Warnings are shown each time.
"""

import contextlib
import importlib
import io
import json
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Sequence

from experiments.trials import base


def run(
  commands: Sequence[Sequence[str]],
  module: str = 'posttrain.main',
  timeout: float = 180,
  **options,
) -> list[base.Done]:
  """Runs `module` once per list of arguments; options as in `base.start`."""
  process = base.start(
    'experiments.trials.many', module, stdin=subprocess.PIPE, **options
  )
  try:
    text, log = process.communicate(
      json.dumps(list(map(list, commands))), timeout
    )
  except subprocess.TimeoutExpired:
    process.kill()
    raise AssertionError(f'no end within {timeout} s') from None
  assert process.returncode == 0, log[-900:]
  return [base.Done(*json.loads(line)) for line in text.splitlines()]


def main() -> None:
  """Runs the commands on stdin; prints a line of JSON for each."""
  command = importlib.import_module(sys.argv[1]).main
  for argv in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    begin = time.monotonic()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
      with warnings.catch_warnings():
        warnings.simplefilter('always')
        warnings.showwarning = lambda message, *_: print(
          f'warning: {message}', file=sys.stderr
        )
        try:
          code = command(argv)
        except SystemExit as error:
          code = error.code
        except BaseException:
          code = 1
          traceback.print_exc()
    seconds = time.monotonic() - begin
    print(json.dumps([code, out.getvalue(), err.getvalue(), seconds]))


if __name__ == '__main__':
  main()
