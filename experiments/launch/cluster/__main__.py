"""A run of several processes on a Ray cluster, restarted where one fails.

    python -m experiments.launch.cluster --config=configs/arithmetic.py \\
        --workdir=runs/arithmetic --hosts=2 --restarts=3

Starts a trainer per host, each on a node of its own where there are enough,
and waits for them. If one fails, or its node is lost, all are started again
from the newest checkpoint. SIGTERM is passed on: they save and stop. All nodes
must see --workdir; what trainers print is in its folder `logs`. Prints one line
per event to stderr, and the final evaluation to stdout.

Exit codes: those of posttrain.main; 1 also if no restart is left.
"""

import dataclasses
import functools
import json
import sys
import time
from collections.abc import Sequence

from experiments.launch.cluster import attempts
from posttrain import main as posttrain_main
from posttrain.rollout import remote
from posttrain.util import commands, preemption


@dataclasses.dataclass
class Flags:
  """The command line."""

  config: str = commands.required(
    'FILE', 'The recipe, as posttrain.main takes it; on every node.'
  )
  workdir: str = commands.required(
    'DIR', 'The folder of the run, which every node must see.'
  )
  overrides: list[tuple[str, str]] = commands.overrides()
  hosts: int = commands.flag(1, 'The number of trainers.', least=1)
  restarts: int = commands.flag(
    3, 'How often the trainers are started again after a failure.', least=0
  )
  address: str | None = commands.flag(
    None,
    "The cluster's address; auto = the one that `ray start` started here.",
    value='HOST:PORT',
    if_absent='RAY_ADDRESS; else a new one on this machine',
  )
  cpus: float = commands.flag(1.0, 'Cores that a trainer reserves.', least=0)
  gpus: float = commands.flag(0.0, 'GPUs of each trainer.', least=0)
  resources: str = commands.flag(
    '{}',
    'Further resources of each trainer, as the nodes name them: {"TPU": 4}.',
    value='JSON',
  )
  time_limit: str | None = commands.flag(
    None,
    'As posttrain.main takes it; counts anew after a restart.',
    value='DURATION',
    if_absent='none',
  )
  trust_config: bool = commands.flag(False, commands.TRUST_CONFIG)

  @property
  def bundle(self) -> dict[str, float]:
    """Returns the resources of a trainer, as Ray names them."""
    try:
      others = json.loads(self.resources)
      others = {str(key): float(x) for key, x in others.items()}
    except (AttributeError, TypeError, ValueError):
      raise ValueError(
        '--resources must be a JSON object of numbers: got '
        f'{self.resources!r}, expected a text like {{"TPU": 4}}'
      ) from None
    return {
      'CPU': self.cpus,
      **({'GPU': self.gpus} if self.gpus else {}),
      **others,
    }

  @property
  def words(self) -> list[str]:
    """Returns the arguments of posttrain.main."""
    return [
      f'--config={self.config}',
      f'--workdir={self.workdir}',
      *(f'--config.{key}={text}' for key, text in self.overrides),
      *([f'--time_limit={self.time_limit}'] if self.time_limit else []),
      *(['--trust_config'] if self.trust_config else []),
    ]


def run(flags: Flags) -> int:
  """Runs the trainers to their end; returns the exit code."""
  bundle, begin = flags.bundle, time.monotonic()
  if not remote.is_installed():
    raise ValueError(
      'experiments.launch.cluster must have Ray: this installation lacks it; '
      "run pip install 'posttrain[cluster]'"
    )
  from experiments.launch.cluster import trainers

  posttrain_main.load(flags.config, flags.overrides, flags.trust_config)
  with preemption.on_sigterm() as stop:
    remote.connect(flags.address, max(1, round(flags.hosts * flags.cpus)))
    say(f'connected to Ray in {time.monotonic() - begin:.1f} s')
    start = functools.partial(
      trainers.Group, flags.words, flags.hosts, bundle, flags.workdir, say
    )
    return attempts.run(start, flags.restarts, stop, say)


def say(text: str) -> None:
  """Prints an event."""
  print(f'cluster {time.strftime("%X")}: {text}', file=sys.stderr, flush=True)


PARSER = commands.Parser(Flags, __doc__)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns the exit code. `argv=None`: the process's."""
  return PARSER.run(run, argv, 'experiments.')


if __name__ == '__main__':
  sys.exit(main())
