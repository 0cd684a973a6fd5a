"""Models of several environments score and play at once, with equal results."""

import dataclasses
import threading
import time

import numpy as np
import pytest

from posttrain import schema, scoring
from posttrain.rollout import endpoints, episodes
from tests import fixtures, toys
from tests.pipeline.test_tokens import _equal
from tests.rollout import fakes
from tests.rollout.endpoint import servers
from tests.rollout.endpoint.test_engine import RED, choice_of

TIMEOUT = 60  # seconds; reached only by a failure
NAMES = ('a', 'b')
Endpoint = endpoints.Endpoint  # the tests put another one in its place


class Meeting(servers.Server):
  """A server that answers once the other one has a request as well.

  `others` is None: it answers at once.
  """

  def __init__(self, **options):
    super().__init__(**options)
    self.arrived, self.others = threading.Event(), None

  def _completions(self, body):
    self.arrived.set()
    if self.others is not None:
      assert self.others.arrived.wait(TIMEOUT), 'one after another'
    return super()._completions(body)


def meet(first, second):
  first.others, second.others = second, first
  return dict(zip(NAMES, (first, second), strict=True))


@pytest.fixture
def connect(monkeypatch):
  """Returns a function that puts servers behind their addresses."""

  def put(by_name):
    def make(cfg, caller, vocab_size):
      name = cfg.base_url.split('/')[2]
      transport = servers.transport(by_name[name])
      # The servers know the tokens of `servers.VOCAB`.
      return Endpoint(cfg, caller, vocab_size=512, transport=transport)

    monkeypatch.setattr(endpoints, 'Endpoint', make)

  toys.install(monkeypatch)
  return put


def endpoint(name):
  return schema.Endpoint(
    name='teacher', base_url=f'http://{name}/v1', concurrency=2
  )


def pipeline(serial=False):
  """Two environments with a server each, and one with a model here."""
  envs = {
    k: dataclasses.replace(
      toys.entry(), algorithm=schema.Opd(reference=endpoint(k))
    )
    for k in NAMES
  }
  envs['c'] = toys.entry(kl_beta=0.1, reference='init')
  source, _ = toys.pipeline_and_driver(
    toys.stage(prompts=9, envs=envs), init=toys.params(1)
  )
  if serial:
    source._scorer = source._scorer.__self__
  return source


def test_two_servers_score_at_once_and_the_batch_is_the_same(connect):
  connect({name: Meeting() for name in NAMES})
  serial = next(pipeline(serial=True))
  connect(meet(Meeting(), Meeting()))
  item = next(pipeline())
  assert item.batch.ref_logprobs.any()
  _equal(serial.batch, item.batch)
  assert serial.metrics == item.metrics
  end = time.monotonic() + TIMEOUT
  while any(x.name == 'side by side' for x in threading.enumerate()):
    assert time.monotonic() < end
    time.sleep(0.01)


def play(servers_by_name):
  """Returns drivers of two servers and a local engine, and their specs."""
  engines = [
    endpoints.Engine(servers.connect(server, concurrency=2))
    for server in servers_by_name.values()
  ]
  local = fakes.Engine({uid: ['red', 'red'] for uid in (7, 8)})
  return [
    (episodes.Driver(engine, fakes.RENDERER, 64), list(map(fakes.spec, uids)))
    for engine, uids in zip(
      [*engines, local], ((1, 2), (3, 4), (7, 8)), strict=True
    )
  ]


REPLIES = {(): choice_of(RED)}


def test_two_servers_play_at_once_with_the_same_rollouts():
  plays = play({k: Meeting(replies=REPLIES) for k in NAMES})
  serial = [driver.run(own) for driver, own in plays]
  both = meet(Meeting(replies=REPLIES), Meeting(replies=REPLIES))
  together = episodes.run_all(play(both))
  for before, after in zip(serial, together, strict=True):
    for a, b in zip(before, after, strict=True):
      assert (a.uid, a.messages, a.score) == (b.uid, b.messages, b.score)
      _equal(*a.samples, *b.samples)


def test_programs_in_flight_change_no_bit():
  rng, weights = np.random.default_rng(0), toys.params()
  scorer = scoring.Scorer(fixtures.MODEL, 2, 32)
  ids = [rng.integers(0, 256, n).astype(np.int32) for n in (20, 31, 9, 32) * 3]
  temperatures = [np.ones(len(x), np.float32) for x in ids]
  expected = scorer(weights, ids, temperatures)
  scorer.ahead = 0
  first, second = (scorer.start(weights, ids, temperatures) for _ in range(2))
  for results in (first(), second()):
    for a, b in zip(results, expected, strict=True):
      np.testing.assert_array_equal(a, b)
