"""A launch script for XManager: one work unit per run, on this machine.

    xmanager launch experiments/launch/xm_launch.py -- \\
        --config=configs/arithmetic.py --sweep=grpo.optim.lr=1e-4,3e-4 \\
        --jobs=2 --workdir=runs/lr

Takes the flags of `python -m experiments.launch` (its --help lists them), of
which --on is xmanager; flags that begin with --xm_ are XManager's own. Needs
`pip install 'posttrain[launch]'`.
"""

import dataclasses
import importlib
import sys
from collections.abc import Sequence

from absl import app
from absl import flags as absl_flags

from experiments.launch import __main__ as launch
from experiments.launch import options


def words(argv: Sequence[str]) -> list[str]:
  """Returns the arguments of the launch in those of the process.

  Args:
    argv: of `xmanager launch FILE -- ...`, or of this file.
  """
  rest = list(argv[1:])
  if rest[:1] == ['launch']:
    rest = rest[2:]
  return [word for word in rest if word != '--' and word[:5] != '--xm_']


def define(argv: Sequence[str]) -> None:
  """Defines the launch's flags for absl, which refuses others.

  absl only has to let them pass: the launch's own parser reads them.
  """
  for field in dataclasses.fields(options.Options):
    bare = field.type is bool
    kind = absl_flags.DEFINE_boolean if bare else absl_flags.DEFINE_string
    if field.name != 'overrides':
      kind(field.name, None, 'see python -m experiments.launch --help')
  keys = {word.partition('=')[0] for word in argv if word[:9] == '--config.'}
  for key in sorted(keys):
    absl_flags.DEFINE_string(key[2:], None, 'sets a key of the config')


def main(_: Sequence[str]) -> None:
  """Runs the launch; absl has parsed XManager's flags."""
  sys.exit(launch.main([*words(sys.argv), '--on=xmanager']))


importlib.import_module('xmanager.xm')  # defines --xm_launch_script
define(sys.argv)
if __name__ == '__main__':
  app.run(main)
