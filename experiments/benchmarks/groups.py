"""Seconds of a batch whose groups are judged as they end, or all at the end.

    python -m experiments.benchmarks.groups [--judge=0.2] [--wait=0.05]
        [--turns=8] [--groups=8] [--group=4] [--slots=32] [--repeats=5]

The tiny model of configs/arithmetic.py plays episodes of 1 to `--turns` turns,
equal within a group, in an environment that waits `--wait` seconds a turn. A
judge behind HTTP on this machine takes `--judge` seconds for a reply, and
answers 8 requests at a time. Alternately

    step    one call of the reward function, after the last episode
    group   a call per group, as soon as its last episode has ended
    flight  the same, with `rollout.in_flight`: the batch does not wait for the
            longest episodes, which go on in the next one

the first two with the same tokens and rewards, which is checked. Prints a row
for each: means per batch, and the ratio to `step`; the least and most of the
same repeat.
"""

import dataclasses
import http.server
import json
import statistics
import threading
import time

import jax
import numpy as np

from experiments.benchmarks import timing
from posttrain import main as program
from posttrain import schema, types
from posttrain.data import sources
from posttrain.envs import base
from posttrain.models import transformer
from posttrain.pipeline import tokens
from posttrain.rollout import endpoints
from posttrain.stage import models, preflight

CONCURRENCY = 8  # requests that the judge answers at a time


class Waits(base.Env):
  """Episodes of 1 to `turns` turns, each of which waits."""

  blocking = True

  def __init__(self, name: str, turns: int, wait: float):
    self.name, self.max_turns, self._wait = name, turns, wait

  def source(self, split, seed):
    tasks = [
      types.Task(str(n), self.name, ({'role': 'user', 'content': f'{n}'},), n)
      for n in range(1, self.max_turns + 1)
    ]
    return sources.Shuffled(tasks, seed)

  def make(self, task):
    return Episode(task, self._wait)


class Episode(base.Episode):
  """Ends after as many turns as its task says."""

  def __init__(self, task: types.Task, wait: float):
    self._task, self._wait, self._turns = task, wait, 0

  def reset(self):
    return self._task.prompt

  def step(self, text, truncated):
    time.sleep(self._wait)
    self._turns += 1
    message = {'role': 'user', 'content': 'Go on.'}
    return types.StepOut((message,), done=self._turns == self._task.answer)

  def grade(self):
    return types.Score(0.0)


def judged(completions, judge):
  """Returns the number that the judge replies."""
  return [float(x) for x in judge([list(x) for x in completions])]


class Judge(http.server.BaseHTTPRequestHandler):
  """Replies with the length of a conversation, after a while."""

  protocol_version = 'HTTP/1.1'
  seconds = 0.0

  def do_POST(self):
    size = int(self.headers['Content-Length'])
    messages = json.loads(self.rfile.read(size))['messages']
    time.sleep(self.seconds)
    length = sum(len(x['content']) for x in messages)
    message = {'role': 'assistant', 'content': f'{length % 7}'}
    body = json.dumps({'choices': [{'index': 0, 'message': message}]}).encode()
    self.send_response(200)
    self.send_header('Content-Length', f'{len(body)}')
    self.end_headers()
    self.wfile.write(body)

  def log_message(self, *args):
    pass


def main() -> None:
  """Prints the rows of both designs."""
  args = timing.parser(
    __doc__,
    judge=0.2,
    wait=0.05,
    turns=8,
    groups=8,
    group=4,
    slots=32,
    repeats=5,
  ).parse_args()
  Judge.seconds = args.judge
  server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Judge)
  threading.Thread(target=server.serve_forever, daemon=True).start()
  address = schema.Endpoint(
    name='judge',
    base_url=f'http://127.0.0.1:{server.server_port}/v1',
    concurrency=CONCURRENCY,
  )
  chat = endpoints.Endpoint(address, 'the benchmark').chat
  entry = schema.EnvEntry(
    env=schema.CustomEnv(
      import_path='experiments.benchmarks.groups:Waits',
      kwargs={'turns': args.turns, 'wait': args.wait},
    ),
    algorithm=schema.Grpo(),
    group_size=args.group,
    sampler=schema.Policy(max_tokens=8),
  )
  run = program.load('configs/arithmetic.py:tiny')
  stage = dataclasses.replace(
    run.stages['grpo'],
    batch=schema.Batch(
      prompts_per_step=args.groups, row_tokens=512, micro_batch_tokens=2048
    ),
    rollout=schema.Rollout(slots=args.slots, prefill_rows=8, env_threads=64),
  )

  def pipeline(per_group: bool, in_flight: bool = False):
    reward = schema.RewardFn(
      'experiments.benchmarks.groups:judged', judge=address, per_group=per_group
    )
    own = dataclasses.replace(
      stage,
      envs={'waits': dataclasses.replace(entry, rewards={'x': reward})},
      rollout=dataclasses.replace(stage.rollout, in_flight=in_flight),
    )
    stages = {**run.stages, 'grpo': own}
    components = preflight.make(
      preflight.resolve(dataclasses.replace(run, stages=stages)), 'grpo'
    )
    engine = models.make_engine(components)
    params = transformer.init(jax.random.key(0), components.model)
    engine.set_params(params, 0)
    engine.warm_up()  # histories of all lengths
    assert isinstance(components.data, tokens.TokenData)
    return tokens.TokenPipeline(
      components.data,
      {'policy': models.make_driver(components, engine)},
      judge=lambda _: chat,
    )

  made = {
    'step': pipeline(False),
    'group': pipeline(True),
    'flight': pipeline(True, in_flight=True),
  }
  batches: dict[str, list[np.ndarray]] = {name: [] for name in made}

  def work(name: str):
    return lambda: batches[name].append(next(made[name]).batch.advantages)

  clocks = {name: timing.Clock(work(name)) for name in made}
  timing.alternate(clocks, args.repeats)
  for a, b in zip(batches['step'], batches['group'], strict=True):
    np.testing.assert_array_equal(a, b)
    assert a.any()
  whole = clocks['step'].wall
  for name, clock in clocks.items():
    ratios = [a / b for a, b in zip(clock.wall, whole, strict=True)]
    timing.emit(
      bench='groups',
      impl=name,
      seconds=timing.rounded(statistics.mean(clock.wall)),
      cpu_seconds=timing.rounded(statistics.mean(clock.cpu)),
      ratio=timing.rounded(sum(clock.wall) / sum(whole)),
      least=timing.rounded(min(ratios)),
      most=timing.rounded(max(ratios)),
    )


if __name__ == '__main__':
  main()
