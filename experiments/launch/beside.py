"""A run on this machine with samplers beside it: one command for all processes.

    python -m experiments.launch.beside --samplers=2 -- \\
        --config=configs/arithmetic.py --workdir=DIR \\
        --config.grpo.rollout.max_lag=1

What follows `--` are the arguments of `posttrain.main`. A sampler that ends is
started again at the same address, and the run waits for it. SIGTERM and SIGINT
go to the run, whose exit code is the command's; the samplers end with it.

On a machine with several GPUs, --devices gives each process its own: those of
the run, then of each sampler, with slashes between them, as in 0,1/2/3.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

MOST_RESTARTS = 100  # of all samplers
_GRACE = 10.0  # seconds for samplers to end


def free_port() -> int:
  """Returns a port of this machine that is free now."""
  with socket.socket() as sock:
    sock.bind(('127.0.0.1', 0))
    return sock.getsockname()[1]


def start_sampler(port: int, devices: str | None = None) -> subprocess.Popen:
  """Starts a sampler; its line is printed to stderr."""
  command = [sys.executable, '-m', 'posttrain.serve', '--sampler']
  return subprocess.Popen(
    [*command, f'--port={port}'], stdout=sys.stderr, env=_environ(devices)
  )


def _environ(devices: str | None) -> dict[str, str]:
  if devices is None:
    return dict(os.environ)
  return {**os.environ, 'CUDA_VISIBLE_DEVICES': devices}


def run(arguments: Sequence[str], devices: Sequence[str | None]) -> int:
  """Runs a learner with samplers to its end; returns its exit code.

  Args:
    arguments: those of `posttrain.main`.
    devices: those of the run, and of each sampler; None = all.
  """
  own, *others = devices
  ports = [free_port() for _ in others]
  samplers = list(map(start_sampler, ports, others))
  urls = ','.join(f'http://127.0.0.1:{port}' for port in ports)
  learner = subprocess.Popen(
    [sys.executable, '-m', 'posttrain.main', *arguments, f'--samplers={urls}'],
    env=_environ(own),
  )
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda x, _: learner.send_signal(x))
  restarts = 0
  try:
    while learner.poll() is None:
      for i, sampler in enumerate(samplers):
        if sampler.poll() is not None and restarts < MOST_RESTARTS:
          restarts += 1
          print(
            f'the sampler at port {ports[i]} ended with {sampler.returncode}, '
            f'and starts again ({restarts} of {MOST_RESTARTS})',
            file=sys.stderr,
          )
          samplers[i] = start_sampler(ports[i], others[i])
      time.sleep(0.2)
  finally:
    for sampler in samplers:
      sampler.terminate()
    for sampler in samplers:
      try:
        sampler.wait(_GRACE)
      except subprocess.TimeoutExpired:
        sampler.kill()
  code = learner.returncode
  return code if code >= 0 else 128 - code  # a signal, as shells have it


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns the exit code. `argv=None`: the process's."""
  parser = argparse.ArgumentParser(
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    usage='%(prog)s [--samplers=N] [--devices=IDS/IDS] -- ARGUMENT ...',
  )
  parser.add_argument(
    '--samplers', type=int, default=1, metavar='N', help='their number (1)'
  )
  parser.add_argument(
    '--devices',
    metavar='IDS/IDS',
    help='CUDA_VISIBLE_DEVICES of the run, then of each sampler (all devices)',
  )
  parser.add_argument(
    'arguments',
    nargs='+',
    metavar='ARGUMENT after --',
    help='those of posttrain.main',
  )
  args = parser.parse_args(argv)
  devices = args.devices.split('/') if args.devices else [None]
  if args.devices is None:
    devices *= 1 + args.samplers
  if args.samplers < 1:
    parser.error(f'--samplers must be at least 1: got {args.samplers}')
  if len(devices) != 1 + args.samplers:
    parser.error(
      f'--devices must be {1 + args.samplers} lists with slashes between them, '
      f'of the run and of each sampler: got {args.devices}'
    )
  for argument in args.arguments:
    if argument.partition('=')[0] == '--samplers':
      parser.error(
        f'--samplers must be given before -- alone, as a number: got {argument}'
      )
  return run(args.arguments, devices)


if __name__ == '__main__':
  sys.exit(main())
