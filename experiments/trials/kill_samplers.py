"""Kills of a learner and its sampler, against an undisturbed run without one.

    python -m experiments.trials.kill_samplers --kills=20 --max_lag=2 --seed=0

1. A run goes to its end in one process, undisturbed.
2. The same run has a sampler in another process. Again and again one of the two
   is killed (SIGKILL), a few milliseconds after the n-th entry into a phase of
   `LEARNER` or `SAMPLER`, and started again, until the run reaches its end;
   then from the beginning, until there were enough kills.
3. Parameters, optimizer state and metrics (except times) of every run that
   reached its end must equal the truth bit by bit, in both stages.

Prints one JSON object per line; exits non-zero where something differs.
"""

import collections
import json
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

from experiments.benchmarks import timing
from experiments.launch import beside
from experiments.trials import base, doomed, kill_resume
from posttrain.checkpoints import store
from posttrain.evaluation import evaluator
from posttrain.rollout import engine_client
from posttrain.serve import __main__ as serve
from posttrain.serve import sampler
from posttrain.training import step

# Phase -> the function that an entry into it calls; the most entries before a
# kill, and the largest delay after it, in seconds.
LEARNER = {
  'push': ((engine_client._Sampler, '_send_weights'), 8, 0.02),
  'rollout': ((engine_client.EngineClient, 'poll'), 30, 0.02),
  'update': ((step.TrainStep, '__call__'), 8, 0.005),
  'save': ((store.Checkpointer, 'save'), 4, 0.08),
  'eval': ((evaluator.Evaluator, 'measure'), 2, 0.02),
}
SAMPLER = {
  'load': ((sampler.Sampler, '_update'), 8, 0.005),
  'commit': ((sampler.Sampler, '_finish_update'), 8, 0.02),
  'decode': ((sampler.Sampler, '_run'), 30, 0.02),
}
MODULE = 'experiments.trials.kill_samplers'


def run_doomed(side: str, options: str, *argv: str) -> int:
  """Runs a side with a fault; returns its exit code."""
  fault = doomed.Fault(**json.loads(options))
  for phase, (place, *_) in (LEARNER | SAMPLER).items():
    fault.wrap(phase, *place)
  command = serve.main if side == 'sampler' else doomed.main.main
  return command(argv)


def plan(rng: random.Random, phases: dict) -> dict:
  """Returns the options of a fault in one of the phases."""
  phase = rng.choice(sorted(phases))
  _, most, delay = phases[phase]
  entry = rng.randint(1, most)
  return {'phase': phase, 'entry': entry, 'delay': rng.uniform(0.0, delay)}


def main() -> None:
  """Runs the command; exits non-zero if a killed run differs."""
  parser = timing.parser(__doc__, kills=20, seed=0, max_lag=2)
  args = parser.parse_args()
  args.stage, args.set = 'grpo', [f'grpo.rollout.max_lag={args.max_lag}']
  args.set += ['grpo.eval.every=5']
  rng, counts = random.Random(args.seed), collections.Counter()
  wrong, trial = [], 0
  port = beside.free_port()
  with tempfile.TemporaryDirectory() as folder:
    scratch = pathlib.Path(folder)
    kill_resume.finish(kill_resume.start(args, scratch, 'whole'))
    truth = kill_resume.outcome(scratch / 'whole')
    options = [f'{k}={x}' for k, x in kill_resume.setting('grpo').items()]
    words = [f'--config.{option}' for option in [*options, *args.set]]
    words += [f'--config.compilation_cache={scratch / "compiled"}']
    words += ['--config=configs/arithmetic.py:tiny']
    words += [f'--samplers=http://127.0.0.1:{port}']
    log = open(scratch / 'log', 'w')

    def start(side: str, fault: dict, *argv: str) -> subprocess.Popen:
      quiet = {'stdout': log, 'stderr': log}
      return base.start(MODULE, side, json.dumps(fault), *argv, **quiet)

    def start_sampler(fault: dict) -> subprocess.Popen:
      flags = ['--sampler', f'--port={port}']
      return start('sampler', fault, *flags)

    decoder = start_sampler({})
    while counts.total() < args.kills:
      name, trial = f'trial_{trial}', trial + 1
      workdir, learner = scratch / name, None
      while learner is None or learner.poll() != 0:
        goes_on = counts.total() < args.kills
        if learner is None or learner.poll() is not None:
          code = learner and learner.returncode
          if code not in (None, -signal.SIGKILL):
            sys.exit(f'failed with {code}:\n{(scratch / "log").read_text()}')
          fault = plan(rng, LEARNER) if goes_on and rng.random() < 0.8 else {}
          learner = start('learner', fault, f'--workdir={workdir}', *words)
          mine = fault.get('phase')
        if decoder.poll() is not None or (goes_on and not mine):
          fault = {} if mine or not goes_on else plan(rng, SAMPLER)
          if decoder.poll() is None:  # without a fault: take its place
            decoder.kill()
            decoder.wait()
          decoder = start_sampler(fault)
          theirs = fault.get('phase')
        while learner.poll() is None and decoder.poll() is None:
          time.sleep(0.05)
        killed = mine if decoder.poll() is None else theirs
        side = 'learner' if decoder.poll() is None else 'sampler'
        if learner.poll() != 0:
          counts[f'{side} {killed}'] += 1
          rows = len(base.rows(workdir))
          timing.emit(trial=name, killed=side, phase=killed, rows=rows)
      differs = kill_resume.differences(truth, kill_resume.outcome(workdir))
      timing.emit(trial=name, differs=differs)
      wrong += differs
    decoder.kill()
    log.close()
  timing.emit(kills=counts.total(), by_phase=counts, wrong=len(wrong))
  if wrong:
    sys.exit('a killed run differs from the undisturbed one')


if __name__ == '__main__':
  if sys.argv[1:2] in (['learner'], ['sampler']):
    sys.exit(run_doomed(*sys.argv[1:]))
  main()
