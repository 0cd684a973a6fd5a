"""Weighted sums of rewards, their faults, and judges."""

import concurrent.futures
import dataclasses
import time
import types as std

import jax.numpy as jnp
import numpy as np
import pytest

from posttrain import schema, types
from posttrain.envs import registry
from posttrain.pipeline import tokens as token_pipeline
from posttrain.rollout import grading
from posttrain.rollout.endpoint import client
from tests import fixtures, toys
from tests.algorithms import two_turns
from tests.rollout import judged

PATH = 'tests.rollout.judged'


def functions(**named):
  return {
    name: schema.RewardFn(
      **{
        **({} if name == 'env' else {'isolate': False}),
        'fn': None if name == 'env' else (f'{PATH}:{options.pop("fn", name)}'),
        **options,
      }
    )
    for name, options in named.items()
  }


def run(rollouts, cfg, judge=None, total=None):
  """Returns rewards, and metrics without those of time."""
  total = total or grading.Rewards('e', cfg, judge=judge)
  scored, metrics, _ = total(rollouts)
  timed = {f'rewards/{k}/seconds' for k, entry in cfg.items() if entry.fn}
  assert timed <= metrics.keys()
  return [r.score.reward for r in scored], {
    k: v for k, v in metrics.items() if k not in timed
  }


def test_environment_grade_is_the_default_reward():
  rollouts = two_turns.group(1.0, 0.0)
  assert run(rollouts, {}) == ([1.0, 0.0], {})


def test_summands_have_weights_and_none_is_left_out():
  cfg = functions(
    env={'weight': 2.0}, slow={'weight': 0.25}, some={'weight': 10.0}
  )
  rewards, metrics = run(two_turns.group(1.0, 0.0), cfg)
  # Four sampled tokens each; `some` scores the first rollout alone.
  assert rewards == [2 + 1 + 10, 0 + 1]
  assert metrics == {
    'rewards/env': 0.5,
    'rewards/slow': 4.0,
    'rewards/some': 1.0,
    'rewards/slow/faults': 0.0,
    'rewards/some/faults': 0.0,
  }


def test_reward_is_none_if_all_summands_are_none():
  rewards, metrics = run(two_turns.group(1.0, 0.0), functions(none={}))
  assert rewards == [None, None] and metrics == {'rewards/none/faults': 0.0}


@pytest.mark.parametrize(
  ('name', 'message'),
  [
    ('one', 'must return a reward per rollout: got 1, expected 2'),
    ('words', "well: got 'good' for rollout 0, of task 't'; None marks"),
    ('infinite', 'finite rewards, of at most 1e+18 with the weight of 1 as'),
    ('huge', 'with the weight of 1 as well: got 1000'),
    ('broken', "it raised KeyError: 'no' (judged.py:82); None marks a roll"),
    ('exits', 'must return rewards: it raised SystemExit: 3 (judged.py'),
    ('raises_unprintable', 'Unprintable: <Unprintable, whose str raises Run'),
    ('hangs', 'must return within its timeout of 0.05 s: it did not'),
    ('hangs_on', 'must return within its timeout of 0.05 s: it did not'),
  ],
)
def test_faults_leave_their_rollouts_without_a_reward(name, message, caplog):
  hangs = name.startswith(('hangs', 'endless', 'raises_endless'))
  timeout = 0.05 if hangs else 5.0
  cfg = functions(env={}, fine={}, **{name: {'timeout': timeout}})
  total = grading.Rewards('e', cfg)
  scored, metrics, (error,) = total(two_turns.group(1.0, 0.0))
  judged.ended.set()
  judged.ended.clear()
  assert error.startswith(f'envs.e.rewards.{name}: {PATH}:{name} must return ')
  assert message in error and error.endswith('; rollouts left out: 2 of 2')
  assert error in caplog.text
  # Neither 0 nor the sum of the other terms, which is on another scale.
  assert [r.score.reward for r in scored] == [None, None]
  seconds = metrics.pop(f'rewards/{name}/seconds')
  assert seconds >= 0.05 or not hangs
  assert len(error) < 1000 and len(caplog.text) < 5000
  del metrics['rewards/fine/seconds']
  assert metrics == {
    'rewards/env': 0.5,
    'rewards/fine': 1.0,
    'rewards/fine/faults': 0.0,
    f'rewards/{name}/faults': 1.0,
  }


def test_bad_value_leaves_only_its_own_rollout_without_a_reward():
  cfg = functions(env={}, nan_first={})
  rewards, metrics = run(two_turns.group(1.0, 0.0, 1.0), cfg)
  assert rewards == [None, 1.0, 2.0]
  assert metrics == {
    'rewards/env': 2 / 3,
    'rewards/nan_first': 1.0,
    'rewards/nan_first/faults': 1.0,
  }
  # None is no fault, also next to a fault.
  cfg = functions(env={}, words_last={})
  assert run(two_turns.group(1.0, 0.0, 1.0), cfg)[0] == [1.0, 0.0, None]


@pytest.mark.parametrize(
  'values',
  [
    np.array([True, False]),
    [np.bool_(1), np.bool_(0)],
    [np.array(1.0, np.float32), np.array(0)],
    np.array([1, 0]),
    jnp.array([1.0, 0.0]),
    [jnp.array(True), jnp.bfloat16(0)],
  ],
)
def test_scalars_of_arrays_are_rewards(values):
  cfg = functions(says={'kwargs': {'values': values}})
  rewards, metrics = run(two_turns.group(0.0, 0.0), cfg)
  assert rewards == [1.0, 0.0] and metrics['rewards/says/faults'] == 0


@pytest.mark.parametrize(
  ('value', 'weight'), [(1e39, 1.0), (-2e18, -1.0), (1e308, 10.0), (1e17, 20)]
)
def test_reward_whose_square_overflows_float32_is_a_fault(value, weight):
  cfg = functions(says={'kwargs': {'values': [value, 1.0]}, 'weight': weight})
  total, rollouts = grading.Rewards('e', cfg), two_turns.group(0.0, 0.0)
  scored, _, (error,) = total(rollouts)
  assert [r.score.reward for r in scored] == [None, weight]
  assert (
    'must return finite rewards, of at most 1e+18 with the weight of '
    f'{weight:g} as well: got {value!r} for rollout 0, of task'
  ) in error
  cfg = functions(says={'kwargs': {'values': [1e18, -1e18]}, 'weight': 0.1})
  assert run(rollouts, cfg)[0] == [1e17, -1e17]


def test_function_that_edits_its_arguments_edits_copies():
  """Neither the next function, the next call nor the transcript sees it."""
  options = {'nested': []}
  cfg = functions(
    edits={'kwargs': {'options': options}},
    again={'fn': 'edits', 'kwargs': {'options': options}},
  )
  task = dataclasses.replace(two_turns.TASK, answer=['7'])
  rollouts = [two_turns.rollout(1.0, i, task=task) for i in range(3)]
  before = repr(rollouts)
  total = grading.Rewards('e', cfg)
  for _ in range(2):
    assert run(rollouts, cfg, total=total)[0] == [2.0, 2.0, 2.0]
  assert repr(rollouts) == before and options == {'nested': []}


def test_too_many_faults_in_a_row_stop_the_run():
  turns = ['broken', 'one', 'nan_first', 'broken', 'one', 'none']
  turns += ['broken', 'words', 'broken']
  cfg = functions(nothing={'max_faults': 9}, by_turns={'max_faults': 2})
  judged.turns[:] = turns
  total, rollouts = grading.Rewards('e', cfg), two_turns.group(1.0, 0.0)
  # One bad value of two rollouts is a fault, but not most of them.
  for faults in (1, 1, 1, 1, 1, 0, 1, 1):
    _, metrics, errors = total(rollouts)
    assert metrics['rewards/by_turns/faults'] == faults
    assert len(errors) == 1 + faults
  with pytest.raises(grading.TooManyFaults) as stopped:
    total(rollouts)
  assert str(stopped.value).startswith(
    f'envs.e.rewards.by_turns: {PATH}:by_turns must fail at most max_faults='
    '2 times in a row: got 3, the last: envs.e.rewards.by_turns: '
  )
  assert str(stopped.value).endswith(
    'fix it, or raise envs.e.rewards.by_turns.max_faults'
  )
  assert len(stopped.value.errors) == 2  # of the step, one of each function


def test_arguments_are_checked_before_a_run(monkeypatch):
  def graded(completions, level, *, scale, judge, extra=1, **columns):
    return [0.0 for _ in completions]

  def check(columns, **changes):
    cfg = {'env': schema.RewardFn(), 'x': schema.RewardFn('mine:x', **changes)}
    grading.check('e', cfg, ['other'], lambda: columns)

  monkeypatch.setattr(grading.imports, 'function', lambda *_: graded)
  given = {'kwargs': {'scale': 2}, 'judge': 'init'}
  check(['level'], **given)
  with pytest.raises(
    ValueError,
    match=r"envs.e.rewards.x.fn must take arguments that exist: got \['level'",
  ):
    check(['lever'], **given)
  with pytest.raises(ValueError, match='did you mean levels?'):
    check(['levels'], **given)
  with pytest.raises(ValueError, match=r"got \['scale', 'judge'\]"):
    check(['level'])


class Leveled(toys.Letters):
  """Tasks of which only the last has a level."""

  def source(self, split, seed):
    source = super().source(split, seed)
    *others, last = source.take(len(source))
    last = dataclasses.replace(last, info={'level': 2.0})
    return type(source)([*others, last], seed)


def test_column_of_other_tasks_only_is_none(monkeypatch):
  toys.install(monkeypatch, Leveled)
  rollouts = two_turns.group(1.0, 0.0)
  task = dataclasses.replace(rollouts[0].task, info={'level': 2.0})
  mixed = [dataclasses.replace(rollouts[0], task=task), rollouts[1]]

  def env_run(name):
    entry = dataclasses.replace(toys.entry(), rewards=functions(**{name: {}}))
    return toys.environment(entry, 32)

  rewards = env_run('wants_level').rewards(None, None)
  assert run(mixed, {}, total=rewards)[0] == [2.0, 0.0]
  assert run(rollouts, {}, total=rewards)[0] == [0.0, 0.0]
  with pytest.raises(
    ValueError, match=r"got \['trainer_state'\], expected .*'level', 'log"
  ):
    env_run('wants').rewards(None, None)(rollouts)


def test_endpoint_error_of_a_judge_propagates():
  def away(conversations):
    raise client.EndpointError('away')

  with pytest.raises(client.EndpointError, match='away'):
    run(two_turns.group(1.0), functions(asks={'judge': 'x'}), lambda _: away)


def test_means_of_logged_numbers_are_metrics():
  _, metrics = run(two_turns.group(1.0, 0.0), functions(logs={}))
  assert metrics == {
    'rewards/logs': 0.0,
    'rewards/logs/count': 2.0,
    'rewards/logs/length': 3.0,
    'rewards/logs/faults': 0.0,
  }


@pytest.mark.parametrize(
  'value', [np.float32(0.5), np.array(0.5), jnp.array(0.5), 0.5]
)
def test_loggers_take_scalars_and_trls_names(value):
  cfg = functions(logs_one={'kwargs': {'value': value}})
  _, metrics = run(two_turns.group(1.0, 0.0), cfg)
  assert metrics == {
    'rewards/logs_one': 0.0,
    'rewards/logs_one/metric': 0.5,
    'rewards/logs_one/extra': 0.5,
    'rewards/logs_one/faults': 0.0,
  }


@pytest.mark.parametrize('value', [10**400, float('nan'), -float('inf'), 1e308])
def test_metric_that_is_not_finite_is_dropped_alone(value):
  cfg = functions(logs_one={'kwargs': {'value': value}})
  total = grading.Rewards('e', cfg)
  for _ in range(2):
    rewards, metrics = run(two_turns.group(1.0, 0.0), cfg, total=total)
    assert rewards == [0.0, 0.0]
    assert metrics == {'rewards/logs_one': 0.0, 'rewards/logs_one/faults': 0.0}


def test_columns_match_those_of_trl():
  columns = grading.columns(two_turns.group(1.0, 0.0))
  assert columns['prompts'] == [[two_turns.MESSAGES[0]]] * 2
  # The rollout's prompt counts, which may differ from its task's.
  (rollout,) = two_turns.group(1.0)
  task = dataclasses.replace(rollout.task, prompt=(two_turns.MESSAGES[1],))
  single = grading.columns([dataclasses.replace(rollout, task=task)])
  assert single['prompts'] == columns['prompts'][:1]
  assert columns['completions'] == [list(two_turns.MESSAGES[1:])] * 2
  assert columns['completion_ids'] == [[3, 4, 8, 9]] * 2
  assert columns['answer'] == ['7', '7'] and columns['hint'] == ['add', 'add']


def test_judge_is_resolved_once_and_replies_are_reproducible():
  engine = toys.engine(capacity=64)
  engine.set_params(toys.params(), -1)
  judge = grading.LocalJudge(engine, fixtures.RENDERER)
  names = []

  def resolve(name):
    names.append(name)
    return judge

  cfg = functions(length={'judge': 'stage:sft'})
  total = grading.Rewards('e', cfg, judge=resolve)
  assert names == ['stage:sft']
  rollouts = two_turns.group(1.0, 0.0)
  first, metrics = run(rollouts, cfg, total=total)
  again, _ = run(rollouts, cfg, total=total)
  assert names == ['stage:sft']
  assert first == again and first[0] == first[1]  # equal completions
  np.testing.assert_allclose(
    metrics['rewards/length/letters'], 4 * first[0], rtol=1e-6
  )


def test_judge_calls_from_many_threads_do_not_overlap():
  class Engine:
    running = 0

    def generate(self, batch):
      self.running += 1
      time.sleep(0.01)
      assert self.running == 1, 'generate must find no request in flight'
      self.running -= 1
      return [std.SimpleNamespace(id=r.id, ids=r.ids[:1]) for r in batch]

  judge = grading.LocalJudge(Engine(), fixtures.RENDERER)
  batches = [[[{'role': 'user', 'content': x}]] for x in 'abcd']
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    assert len(list(pool.map(judge, batches))) == 4


def test_rewards_replace_the_grade_in_the_advantages(monkeypatch):
  toys.install(monkeypatch)
  entry = dataclasses.replace(toys.entry(), rewards=functions(slow={}))
  source, driver = toys.pipeline_and_driver(toys.stage(envs={'toy': entry}))
  item = next(source)
  lengths = [r.samples[0].mask.sum() for r in driver.rollouts]
  np.testing.assert_allclose(
    item.metrics['reward/mean/toy'], np.mean(lengths), rtol=1e-6
  )
  assert item.metrics['rewards/slow/toy'] == item.metrics['reward/mean/toy']
  assert item.batch.advantages.any()


def test_fault_leaves_its_rollouts_out_of_baseline_and_batch(monkeypatch):
  toys.install(monkeypatch)
  rewards = functions(slow={}, nan_first={})
  entry = dataclasses.replace(toys.entry(), rewards=rewards)
  source, driver = toys.pipeline_and_driver(toys.stage(envs={'toy': entry}))
  item = next(source)
  first = driver.rollouts[:4]
  lengths = [r.samples[0].mask.sum() for r in first]
  assert item.metrics['rewards/nan_first/faults/toy'] == 1
  assert item.metrics['rollout/ungraded/toy'] == 1
  assert item.metrics['batch/samples'] == 15
  credit = {round(float(x), 4) for x in item.batch.advantages.flat if x}
  expected = np.array(lengths[1:]) - np.mean(lengths[1:])
  assert {round(float(x), 4) for x in expected if x} <= credit
  assert len(item.errors) == 1
  assert item.errors[0].startswith('envs.toy.rewards.nan_first: ')


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
  data = token_pipeline.TokenData(
    stage, registry.make_all(stage.envs), fixtures.RENDERER, 3, index=1
  )
  assert data.references == {'stage:sft': 'envs.toy.judge'}
  metrics = next(source).metrics
  lengths = [
    len(judge([[r.messages[-1] | {'role': 'user'}]], max_tokens=3)[0])
    for r in driver.rollouts
  ]
  assert metrics['reward/mean/toy'] == np.mean(lengths)


@pytest.mark.parametrize(
  ('options', 'field'),
  [
    ({'fn': 'json.loads'}, 'fn'),
    ({'fn': 'json:loads', 'timeout': 0.0}, 'timeout'),
    ({'fn': 'json:loads', 'weight': float('nan')}, 'weight'),
    ({'fn': 'json:loads', 'judge': 'policy'}, 'judge'),
  ],
)
def test_impossible_reward_options_are_refused(options, field):
  with pytest.raises(schema.FieldError) as error:
    schema.RewardFn(**options)
  assert error.value.field == field
  with pytest.raises(schema.FieldError, match='function, or a model, for each'):
    schema.EnvEntry(rewards={'x': schema.RewardFn()})
