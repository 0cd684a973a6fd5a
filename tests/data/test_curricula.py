"""Curricula: who is drawn how often, and states that resume exactly."""

import collections
import itertools
import json

import numpy as np
import pytest

from posttrain import schema, types
from posttrain.data import curricula, sources

KEY = 'envs.a.curriculum'


def make(sizes, pool='size', seed=3, **options):
  """Returns a curriculum; `sizes`: of each task, its pool."""
  tasks = [
    types.Task(f't{i}', 'a', (), info={'size': size})
    for i, size in enumerate(sizes)
  ]
  cfg = schema.Curriculum(pool=pool, **options)
  return curricula.Curriculum(sources.Shuffled(tasks, 0, 'x'), cfg, seed, KEY)


def shares(source, count=2000):
  """Returns the share of each pool in so many draws."""
  counts = collections.Counter(
    task.info['size'] for task in itertools.islice(source, count)
  )
  return {size: n / count for size, n in counts.items()}


def observe(source, *results):
  """Observes groups of tasks, drawn or not."""
  ids = dict(results)
  while not ids.keys() <= source._drawn.keys():
    next(source)
  return source.observe(results)


def test_pools_are_drawn_by_their_distance_to_the_band():
  # w = min(1, p / .2, (1 - p) / .4):           .5    1     .25      0    new: 1
  rates = {0: 0.1, 1: 0.3, 2: 0.9, 3: 0.0}
  source = make([0, 1, 1, 1, 2, 3, 4], low=0.2, high=0.6, floor=0.0)
  observe(source, ('t0', 0.1), ('t1', 0.3), ('t4', 0.9), ('t5', 0.0))
  weights = {0: 0.5, 1: 1.0, 2: 0.25, 4: 1.0}
  drawn = shares(source)
  assert drawn.keys() == weights.keys() and 3 in rates
  for size, weight in weights.items():
    np.testing.assert_allclose(drawn[size], weight / 2.75, atol=0.03)


def test_the_floor_is_uniform_over_tasks():
  source = make([0, 1, 1, 1], floor=1.0)
  observe(source, ('t0', 0.0), ('t1', 0.5))
  assert shares(source)[0] == pytest.approx(0.25, abs=0.03)


def test_where_no_pool_has_a_weight_all_tasks_are_drawn():
  source = make([0, 1, 1, 1], floor=0.0)
  observe(source, ('t0', 0.0), ('t1', 1.0))
  assert shares(source)[0] == pytest.approx(0.25, abs=0.03)


def test_a_rare_task_was_solved_by_itself_below_the_band():
  source = make([0, 0, 0, 1], floor=0.0, rare=1.0, memory=2)
  observe(source, ('t0', 0.0), ('t1', 0.1), ('t2', 0.3), ('t3', 0.5))
  assert {next(source).id for _ in range(30)} == {'t1'}
  observe(source, ('t1', 0.5))  # p is 0.3
  assert {next(source).id for _ in range(60)} == {'t0', 't1', 't2', 't3'}


def test_a_pass_rate_is_the_mean_of_about_the_latest_groups():
  source = make([0], memory=2)
  for rate, mean in ((0.0, 0.0), (1.0, 0.5), (1.0, 0.75), (0.0, 0.375)):
    metrics = observe(source, ('t0', rate))
    assert metrics == {'draws/0': 1.0, 'pass_rate/0': mean}


def test_without_pools_the_metrics_are_those_of_the_band():
  source = make(range(5), pool=None, memory=1)
  rates = 0.0, 0.1, 0.2, 0.9
  first = observe(source, *((f't{i}', p) for i, p in enumerate(rates)))
  assert first['draws/new'] == 1
  again = observe(source, *((f't{i}', 1.0) for i in range(5)))
  assert again == {
    f'draws/{x}': 0.2 for x in ('new', 'unsolved', 'below', 'band', 'above')
  }


@pytest.mark.parametrize('pool', [None, 'size'])
def test_resume_continues_exactly(pool):
  whole, resumed = (make(range(9), pool, rare=0.3, memory=3) for _ in range(2))

  def step(source):
    tasks = [next(source).id for _ in range(4)]
    groups = [(x, sum(map(ord, x)) % 5 / 8) for x in tasks]
    return tasks, source.observe(groups)

  for _ in range(7):
    step(whole)
  step(resumed)
  resumed.set_state(json.loads(json.dumps(whole.get_state())))
  for _ in range(7):
    assert step(whole) == step(resumed)
  assert whole.get_state() == resumed.get_state()


def test_the_draws_of_a_seed_are_a_literal():
  """A run resumed under another numpy must draw the same tasks."""
  source = make([0, 0, 1, 1, 1], seed=0)
  drawn = ''.join(next(source).id[1:] for _ in range(8))
  assert drawn == '04320313'


def test_mistakes_are_one_line():
  with pytest.raises(ValueError, match=f'{KEY}.pool must .*size.*: got .digi'):
    make([1], 'digits')
  for options in ({'low': 0.9}, {'floor': 0.6, 'rare': 0.5}):
    with pytest.raises(schema.FieldError, match=r'^(low|rare) must be '):
      schema.Curriculum(**options)
