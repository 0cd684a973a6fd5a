"""A finished group is graded and scored while other groups still play."""

import dataclasses
import threading

import numpy as np
import pytest

from posttrain import schema
from posttrain.rollout import endpoints
from tests import toys
from tests.pipeline.test_tokens import _equal
from tests.rollout.endpoint import servers

TIMEOUT = 30  # seconds; reached only by a failure
TEACHER = schema.Endpoint(name='teacher', base_url='http://a/v1')
asked = threading.Event()  # of the judge, the reference or the function
sizes: list[int] = []  # of the calls of `spread`


def replies(completions, judge):
  return [len(text) / 4 for text in judge(completions)]


def spread(completion_ids, log_metric):
  """Needs the whole group, so its calls must not be split further."""
  asked.set()
  sizes.append(len(completion_ids))
  lengths = [len(ids) for ids in completion_ids]
  for length in lengths:
    log_metric('length', length)
  return [float(n > np.mean(lengths)) for n in lengths]


def judge(conversations):
  asked.set()
  return [str(x) for x in conversations]


class Server(servers.Server):
  """A teacher that says when it is asked."""

  def _completions(self, body):
    asked.set()
    return super()._completions(body)


class LastWaits(toys.Letters):
  """Letters, whose last episode of a step ends once something was asked."""

  graded = 0

  def grade(self, task, text):
    self.graded += 1
    if self.graded == 16:
      assert asked.wait(TIMEOUT), 'all groups ended first'
    return super().grade(task, text)


def rewards(fn, **options):
  entry = schema.RewardFn(f'{__name__}:{fn}', isolate=False, **options)
  return dataclasses.replace(toys.entry(), rewards={'x': entry})


ENTRIES = {
  'judge': rewards('replies', judge=TEACHER),
  'reference': dataclasses.replace(
    toys.entry(), algorithm=schema.Opd(reference=TEACHER)
  ),
  'function': rewards('spread', per_group=True),
}


def item(monkeypatch, entry, env=toys.Letters):
  """Returns the first item of a pipeline with one environment."""
  toys.install(monkeypatch, env)
  transport, make = servers.transport(Server()), endpoints.Endpoint
  with monkeypatch.context() as patch:
    patch.setattr(
      endpoints,
      'Endpoint',
      lambda cfg, caller, vocab_size: make(
        cfg, caller, vocab_size=vocab_size, transport=transport
      ),
    )
    source, _ = toys.pipeline_and_driver(
      toys.stage(envs={'toy': entry}), judge=lambda _: judge
    )
    made = next(source)
  assert made.metrics['rollout/errors/toy'] == 0
  made.metrics.pop('rewards/x/seconds/toy', None)
  return made


@pytest.mark.parametrize('name', ENTRIES)
def test_the_first_groups_are_graded_while_the_last_one_plays(
  name, monkeypatch
):
  asked.clear()
  early = item(monkeypatch, ENTRIES[name], LastWaits)
  late = item(monkeypatch, ENTRIES[name])
  _equal(early.batch, late.batch)
  assert early.metrics == late.metrics


def test_a_judge_gives_the_same_rewards_by_group_and_by_step(monkeypatch):
  by_step = rewards('replies', judge=TEACHER, per_group=False)
  a, b = (item(monkeypatch, x) for x in (ENTRIES['judge'], by_step))
  _equal(a.batch, b.batch)
  assert a.metrics == b.metrics and a.batch.advantages.any()


def test_a_function_gets_a_step_or_a_group(monkeypatch):
  sizes.clear()
  lengths = [
    item(monkeypatch, rewards('spread', per_group=x)).metrics
    for x in (None, True)
  ]
  assert sizes == [16] + [4] * 4
  name = 'rewards/x/length/toy'
  assert lengths[0][name] == lengths[1][name] > 0


def test_options_that_cannot_be_called_per_group_are_refused():
  for options in ({'model': 'stage:rm'}, {'fn': 'a:b', 'judge': 'init'}, {}):
    with pytest.raises(schema.FieldError) as error:
      schema.RewardFn(**options, per_group=True)
    assert error.value.field == 'per_group'
