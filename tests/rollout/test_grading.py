"""Weighted sums of rewards, their faults, and judges."""

import concurrent.futures
import dataclasses
import threading
import time
import types as std

import jax.numpy as jnp
import numpy as np
import pytest

from posttrain import schema, types
from posttrain.rollout import endpoints, grading
from tests import fixtures, toys
from tests.algorithms import two_turns
from tests.rollout import judged

PATH = 'tests.rollout.judged'
TWO = two_turns.group(1.0, 0.0)


def functions(**named):
  """Returns the options of rewards: of `judged`, or of the environment."""
  cfg = {}
  for name, options in named.items():
    if name != 'env':
      path = f'{PATH}:{options.get("fn", name)}'
      options = {'isolate': False, **options, 'fn': path}
    cfg[name] = schema.RewardFn(**options)
  return cfg


def run(rollouts, cfg, judge=None, total=None):
  """Returns rewards, and metrics without those of time."""
  total = total or grading.Rewards('e', cfg, judge=judge)
  scored, metrics, _ = total(rollouts)
  timed = [f'rewards/{name}/seconds' for name, entry in cfg.items() if entry.fn]
  assert all(metrics.pop(name) >= 0 for name in timed)
  return [r.score.reward for r in scored], metrics


def test_summands_have_weights_and_none_is_left_out():
  cfg = functions(
    env={'weight': 2.0}, slow={'weight': 0.25}, some={'weight': 10.0}
  )
  rewards, metrics = run(TWO, cfg)
  # Four sampled tokens each; `some` scores the first rollout alone.
  assert rewards == [2 + 1 + 10, 0 + 1]
  names = ('env', 'slow', 'some', 'slow/faults', 'some/faults')
  assert metrics == {
    f'rewards/{name}': value
    for name, value in zip(names, (0.5, 4, 1, 0, 0), strict=True)
  }


def test_reward_is_none_if_all_summands_are_none():
  rewards, metrics = run(TWO, functions(none={}))
  assert rewards == [None, None] and metrics == {'rewards/none/faults': 0.0}


@pytest.mark.parametrize(
  ('name', 'message'),
  [
    ('one', 'must return a reward per rollout: got 1, expected 2'),
    ('words', "got 'good' for rollout 0, of task 't'"),
    ('broken', "it raised KeyError: 'no' (judged.py:"),
    ('hangs', 'must return within its timeout of 0.05 s: it did not'),
  ],
)
def test_faults_leave_their_rollouts_without_a_reward(name, message):
  timeout = 0.05 if name == 'hangs' else 5.0
  cfg = functions(env={}, takes={}, **{name: {'timeout': timeout}})
  total = grading.Rewards('e', cfg)
  scored, metrics, (error,) = total(TWO)
  judged.ended.set()
  judged.ended.clear()
  assert error.startswith(f'envs.e.rewards.{name}: {PATH}:{name} must return ')
  assert message in error
  # Neither 0 nor the sum of the other terms, which is on another scale.
  assert [(r.score.reward, r.error) for r in scored] == [(None, error)] * 2
  assert metrics[f'rewards/{name}/faults'] == metrics['rewards/takes'] == 1.0
  assert f'rewards/{name}' not in metrics


def test_reward_whose_square_overflows_float32_is_a_fault_of_its_rollout():
  cfg = functions(says={'kwargs': {'values': [1e17, 1.0]}, 'weight': 20.0})
  scored, _, errors = grading.Rewards('e', cfg)(TWO)
  assert [r.score.reward for r in scored] == [None, 20.0]
  assert [r.error for r in scored] == [*errors, None]


def test_function_that_edits_its_arguments_edits_copies():
  """Neither the next function, the next call nor the transcript sees it."""
  options = []
  entry = {'fn': 'edits', 'kwargs': {'options': options}}
  cfg = functions(a=dict(entry), b=entry)
  before, total = repr(TWO), grading.Rewards('e', cfg)
  for _ in range(2):
    assert run(TWO, cfg, total=total)[0] == [2.0, 2.0]
  assert repr(TWO) == before and not options


def test_arguments_are_checked_before_a_run(monkeypatch):
  def graded(completions, level, *, scale, judge, extra=1, **columns):
    return [0.0 for _ in completions]

  def check(columns, **changes):
    cfg = schema.RewardFn('mine:x', **changes)
    grading.Function('envs.e.rewards.x', cfg, lambda: columns).check(['other'])

  monkeypatch.setattr(grading.imports, 'function', lambda *_: graded)
  given = {'kwargs': {'scale': 2}, 'judge': 'init'}
  check(['level'], **given)
  with pytest.raises(
    ValueError,
    match=r"envs.e.rewards.x.fn must take arguments that exist: got \['level'",
  ):
    check(['lever'], **given)
  with pytest.raises(ValueError, match=r"got \['scale', 'judge'\]"):
    check(['level'])


PROBED = dataclasses.replace(
  TWO[0],
  samples=(),
  messages=(*TWO[0].prompt, {'role': 'assistant', 'content': 'x'}),
)


@pytest.mark.parametrize(
  ('name', 'message'),
  [
    ('one', 'must return a reward per rollout: got 1, expected 2'),
    ('scalar', 'must return a list of 2, one per completion: got 0.5'),
    ('words', "must return numbers, or None: got 'good'"),
    ('hangs', 'must return within its timeout of 0.05 s'),
  ],
)
def test_a_probe_refuses_what_is_no_reward(name, message):
  entry = functions(x={'fn': name, 'timeout': 0.05})['x']
  with pytest.raises(ValueError, match=f'^envs.e.rewards.x: .*{message}'):
    grading.Function('envs.e.rewards.x', entry).probe([PROBED] * 2)
  judged.ended.set()
  judged.ended.clear()


@pytest.mark.parametrize(
  'name', ['takes', 'slow', 'nan_first', 'none', 'apart']
)
def test_a_probe_takes_rewards_even_if_not_finite(name, caplog):
  grading.Function('key', functions(x={'fn': name})['x']).probe([PROBED] * 2)
  assert not caplog.records


@pytest.mark.parametrize(
  ('name', 'message'),
  [('broken', "KeyError: 'no'"), ('typed', "'list' object has no attribute")],
)
def test_a_probe_warns_of_an_exception_and_shows_a_completion(
  name, message, caplog
):
  function = grading.Function('key', functions(x={'fn': name})['x'])
  function.probe([PROBED] * 2)
  (record,) = caplog.records
  text = record.getMessage()
  assert message in text
  assert text.endswith("is [{'role': 'assistant', 'content': 'x'}]")


@pytest.mark.parametrize('name', ['doubles_level', 'doubles_column'])
def test_rows_without_metadata_have_no_reward_and_the_call_goes_on(
  name, caplog
):
  infos = {'level': 2.0}, {'level': None}, {}, {'level': 3.0}
  group = two_turns.group(0.0, 0.0, 0.0, 0.0)
  rollouts = [
    dataclasses.replace(x, task=dataclasses.replace(x.task, info=info))
    for x, info in zip(group, infos, strict=True)
  ]
  total = grading.Rewards('e', functions(**{name: {}}), lambda: ['level'])
  scored, metrics, errors = total(rollouts)
  assert [r.score.reward for r in scored] == [4.0, None, None, 6.0]
  assert [r.error for r in scored] == [None] * 4 and not errors
  assert metrics[f'rewards/{name}/faults'] == 0
  for part in (rollouts[1:3], rollouts[2:3]):
    scored, metrics, errors = total(part)
    assert {r.score.reward for r in scored} == {None} and not errors
  (record,) = caplog.records  # the first time only
  assert 'Error: ' in record.getMessage()
  assert "without its columns, ['level'], have" in record.getMessage()
  # With another cause the call has failed.
  task = dataclasses.replace(group[0].task, info={'level': 'a'})
  bad = [dataclasses.replace(x, task=task) for x in group]
  _, metrics, errors = total(bad)
  assert metrics[f'rewards/{name}/faults'] == 1 and errors


def test_column_of_other_tasks_only_is_none():
  task = dataclasses.replace(TWO[0].task, info={'level': 2.0})
  mixed = [dataclasses.replace(TWO[0], task=task), TWO[1]]
  cfg = functions(wants_level={})
  total = grading.Rewards('e', cfg, lambda: ['level'])
  assert run(mixed, cfg, total=total)[0] == [2.0, 0.0]
  assert run(TWO, cfg, total=total)[0] == [0.0, 0.0]


def test_endpoint_error_of_a_judge_propagates():
  def away(conversations):
    raise endpoints.EndpointError('away')

  with pytest.raises(endpoints.EndpointError, match='away'):
    run(two_turns.group(1.0), functions(asks={'judge': 'x'}), lambda _: away)


@pytest.mark.parametrize(
  'value, logged', [(jnp.array(0.5), 0.5), (10**400, None)]
)
def test_means_of_logged_finite_numbers_are_metrics(value, logged):
  cfg = functions(logs_one={'kwargs': {'value': value}})
  rewards, metrics = run(TWO, cfg)
  assert rewards == [0.0, 0.0] and metrics['rewards/logs_one/faults'] == 0
  for name in ('metric', 'extra'):
    assert metrics.get(f'rewards/logs_one/{name}') == logged


def test_columns_match_those_of_trl():
  columns = grading.columns(TWO)
  assert columns['prompts'] == [[two_turns.MESSAGES[0]]] * 2
  # The rollout's prompt counts, which may differ from its task's.
  other = {'role': 'user', 'content': 'other'}
  task = dataclasses.replace(TWO[0].task, prompt=(other,))
  single = grading.columns([dataclasses.replace(TWO[0], task=task)])
  assert single['prompts'] == columns['prompts'][:1]
  assert columns['completions'] == [list(two_turns.MESSAGES[1:])] * 2
  assert columns['completion_ids'] == [[3, 4, 8, 9]] * 2
  assert columns['answer'] == ['7', '7'] and columns['hint'] == ['add', 'add']


def test_judge_is_resolved_once_and_replies_are_reproducible():
  engine = toys.engine(capacity=64)
  engine.set_params(toys.params(), -1)
  judge = grading.LocalJudge(engine, fixtures.RENDERER)
  names = []

  cfg = functions(length={'judge': 'stage:sft'})
  total = grading.Rewards(
    'e', cfg, judge=lambda name: names.append(name) or judge
  )
  first, again = (run(TWO, cfg, total=total)[0] for _ in range(2))
  assert names == ['stage:sft']
  assert first == again and first[0] == first[1]  # equal completions


def test_judge_calls_from_many_threads_do_not_overlap():
  busy = threading.Lock()

  def generate(batch):
    assert busy.acquire(blocking=False)
    time.sleep(0.01)
    busy.release()
    return [std.SimpleNamespace(id=r.id, ids=r.ids[:1]) for r in batch]

  engine = std.SimpleNamespace(generate=generate)
  judge = grading.LocalJudge(engine, fixtures.RENDERER)
  batches = [[[{'role': 'user', 'content': x}]] for x in 'abcd']
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    assert len(list(pool.map(judge, batches))) == 4


def test_fault_leaves_its_rollouts_out_of_baseline_and_batch(monkeypatch):
  toys.install(monkeypatch)
  rewards = functions(slow={}, nan_first={})
  entry = dataclasses.replace(toys.entry(), rewards=rewards)
  source, driver = toys.pipeline_and_driver(toys.stage(envs={'toy': entry}))
  item = next(source)
  first = driver.rollouts[:4]
  lengths = [r.samples[0].mask.sum() for r in first[1:]]
  assert item.metrics['rewards/nan_first/faults/toy'] == 1
  assert item.metrics['rollout/ungraded/toy'] == 1
  assert item.metrics['batch/samples'] == 15
  credit = {round(float(x), 4) for x in item.batch.advantages.flat if x}
  expected = np.array(lengths) - np.mean(lengths)
  assert {round(float(x), 4) for x in expected if x} <= credit
  assert len(item.errors) == 1


class Judged(toys.Letters):
  """Letters, graded by the length of a judge's reply."""

  judge = None

  def grade(self, task, text):
    (reply,) = self.judge([[{'role': 'user', 'content': text}]], max_tokens=3)
    return types.Score(float(len(reply)))


def test_environment_grades_with_its_judge(monkeypatch):
  """The judge's engine runs while the policy's engine has open requests."""
  toys.install(monkeypatch, Judged)
  entry = dataclasses.replace(toys.entry(group_size=2), judge='stage:sft')
  engine = toys.engine(capacity=64)
  engine.set_params(toys.params(1), -1)
  judge = grading.LocalJudge(engine, fixtures.RENDERER)
  stage = toys.stage(prompts=2, envs={'toy': entry})
  source, driver = toys.pipeline_and_driver(stage, judge=lambda name: judge)
  metrics = next(source).metrics
  lengths = [
    len(judge([[r.messages[-1] | {'role': 'user'}]], max_tokens=3)[0])
    for r in driver.rollouts
  ]
  assert metrics['reward/mean/toy'] == np.mean(lengths)


def test_impossible_reward_options_are_refused():
  with pytest.raises(schema.FieldError, match='policy') as error:
    schema.RewardFn('json:loads', judge='policy')
  assert error.value.field == 'judge'
  with pytest.raises(schema.FieldError, match='function, or a model, for each'):
    schema.EnvEntry(rewards={'x': schema.RewardFn()})
