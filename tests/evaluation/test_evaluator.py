"""Evaluation: answers, rates, errors, and answers that are not graded."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain import schema
from posttrain.envs import registry, rows
from posttrain.evaluation import answers as answers_lib
from posttrain.evaluation import evaluator as evaluation
from posttrain.evaluation import measures as measures_lib
from posttrain.metrics import estimates, statistics
from posttrain.models import transformer
from posttrain.rewards import texts
from tests import fixtures, toys
from tests.pipeline.test_tokens import _equal

WIDTH = 32  # of every forward, and the engine's capacity
RENDERER = fixtures.RENDERER
TOY = toys.Letters('toy', schema.Arithmetic())
NONE = measures_lib.Measures(
  {}, lambda ids: [np.zeros((len(x), 2)) for x in ids], RENDERER
)


@jax.jit
def _token_logprobs(params, row):
  """f32[WIDTH, V]: log softmax of what follows each of WIDTH tokens."""
  hidden, _ = transformer.trunk(
    params,
    fixtures.MODEL,
    row[None],
    jnp.arange(WIDTH)[None],
    jnp.ones((1, WIDTH), jnp.int32),
  )
  weight, _ = transformer.head(params, fixtures.MODEL)
  return jax.nn.log_softmax(hidden[0] @ weight)


def _logprobs(params, ids):
  row = np.pad(np.array(ids, np.int32), (0, WIDTH - len(ids)))
  return np.asarray(_token_logprobs(params, row))


def _greedy(params, prompt, max_tokens):
  """Greedy ids, one forward per token."""
  ids = list(prompt)
  while len(ids) - len(prompt) < max_tokens:
    ids.append(int(_logprobs(params, ids)[len(ids) - 1].argmax()))
    if ids[-1] in RENDERER.stop_ids:
      break
  return ids[len(prompt) :]


def _sharp():
  """Weights whose greedy answers differ in length."""
  params = toys.params(seed=6)
  return {**params, 'embed': {'table': 2.0 * params['embed']['table']}}


def _stage(**options):
  return schema.Stage(
    envs={'toy': schema.EnvEntry()},
    rollout=schema.Rollout(max_error_share=1.0),
    eval=schema.Eval(**options),
  )


def _tasks(env=TOY, **options):
  options = {'prompts': 4, 'samples': 3, 'max_tokens': 8, **options}
  tasks = evaluation.EvalTasks({'toy': env}, RENDERER, _stage(**options), 0)
  assert tasks.max_length <= WIDTH
  return tasks


def _evaluator(
  env=TOY, params=None, scorer=None, measures=NONE, teachers=None, **options
):
  """An evaluator of one environment, and its driver."""
  tasks = _tasks(env, **options)
  engine = toys.engine()
  engine.set_params(toys.params() if params is None else params, 0)
  driver = Recorder(engine, RENDERER, WIDTH)
  made = evaluation.Evaluator(tasks, driver, measures, scorer, teachers)
  return made, driver


class Recorder(toys.Driver):
  """Keeps the rollouts of every call."""

  all_rollouts = ()

  def run(self, specs):
    rollouts = super().run(specs)
    self.all_rollouts = (*self.all_rollouts, *rollouts)
    return rollouts


def test_greedy_answers_are_one_argmax_after_another():
  params = _sharp()
  evaluator, _ = _evaluator(params=params, samples=0)
  values, answers, *_ = evaluator.measure()
  lengths = set()
  for task, answer in zip(TOY.source('eval', 0).take(4), answers, strict=True):
    prompt = RENDERER.render(task.prompt, add_generation_prompt=True).ids
    ids = _greedy(params, prompt, 8)
    ended = ids[-1] in RENDERER.stop_ids
    text = RENDERER.tokenizer.decode(ids[:-1] if ended else ids)
    assert (answer.id, answer.text, answer.tokens) == (task.id, text, len(ids))
    assert answer.stop_reason == ('eos' if ended else 'max_tokens')
    assert answer.correct == TOY.grade(task, text).correct
    lengths.add(len(ids))
  assert len(lengths) > 1
  assert values['eval/pass_rate/toy'] == np.mean([x.correct for x in answers])
  assert values['eval/length/toy'] == np.mean([x.tokens for x in answers])
  share = np.mean([x.stop_reason == 'eos' for x in answers])
  assert values['eval/stop/eos/toy'] == share


# 18 bytes of 'yes, and more of it' and one, 3 of the template, the answer.
@pytest.mark.parametrize(
  'turns, budget, suite, length',
  [
    (3, None, (), 19 + 3 + 3 * 8),
    (1, 5, (), 19 + 3 + 5),
    (1, 2, ('b' * 40,), 40 + 3 + 8),
  ],
)
def test_max_length_is_that_of_the_longest_episode(
  turns, budget, suite, length
):
  env = toys.Letters('toy', schema.Arithmetic())
  env.max_turns = turns
  stage = _stage(max_tokens=8, max_episode_tokens=budget, suite=suite)
  tasks = evaluation.EvalTasks({'toy': env}, RENDERER, stage, seed=0)
  assert tasks.max_length == length


def test_prompts_that_do_not_fit_are_dropped_as_in_training(tmp_path, caplog):
  path = tmp_path / 'rows.jsonl'
  path.write_text(
    ''.join(f'{{"prompt": "{x * "a"}"}}\n' for x in (1, 60, 2, 80))
  )
  env = registry.make('toy', schema.Rows(path=str(path), eval_path=str(path)))
  for too_long, count in (('drop', 2), ('error', 4)):
    entry = schema.EnvEntry(
      env=schema.Rows(path='x'), sampler=schema.Policy(too_long=too_long)
    )
    stage = schema.Stage(envs={'toy': entry}, batch=schema.Batch(row_tokens=40))
    tasks = evaluation.EvalTasks({'toy': env}, RENDERER, stage, 0)
    assert len(tasks.by_env['toy'][1]) == count
  assert caplog.text.count('2 of 4 held-out prompts do not fit') == 1


def test_tasks_that_chose_something_are_left_out():
  """`toy` has four tasks; one is skipped, and selection has its own."""
  all_tasks = TOY.source('eval', 0).take(4)
  tasks = _tasks(skip=1, prompts=2, best='eval/pass_rate/toy', best_prompts=9)
  assert tasks.by_env['toy'][1] == all_tasks[1:3]
  assert tasks.selection == all_tasks[3:]
  assert _tasks(skip=3, prompts=2).by_env['toy'][1] == all_tasks[3:]


def test_kl_is_the_drift_from_the_initial_parameters_and_to_a_teacher():
  now, start = _sharp(), toys.params()
  references = []

  def scorer(reference, samples):
    references.append(reference)
    return [_scored(start, sample) for sample in samples]

  evaluator, driver = _evaluator(
    params=now, scorer=scorer, kl=True, teachers={'toy': 'stage:teacher'}
  )
  values, *_ = evaluator.measure()
  firsts = driver.all_rollouts[4::3]  # a sampled one of three, after 4 greedy
  drift = [
    (_scored(now, s) - _scored(start, s))[s.mask]
    for rollout in firsts
    for s in rollout.samples
  ]
  expected = np.concatenate(drift).mean()
  np.testing.assert_allclose(values['eval/kl/toy'], expected, atol=1e-5)
  for name in ('kl', 'kl_low', 'kl_high'):
    assert values[f'eval/teacher_{name}/toy'] == values[f'eval/{name}/toy']
  assert values['eval/kl_low/toy'] < expected < values['eval/kl_high/toy']
  assert references == ['init', 'stage:teacher'] and expected > 0.01


def _scored(params, sample):
  """f32[T]: log probability of each token, 0 for the first."""
  table = _logprobs(params, sample.ids)
  at = np.arange(len(sample.ids) - 1)
  return np.concatenate([[0.0], table[at, sample.ids[1:]]])


def test_sampled_rates_by_hand():
  params = toys.params()
  evaluator, driver = _evaluator(params=params)
  values, answers, *_ = evaluator.measure()
  sampled = driver.all_rollouts[4:]
  right = np.array([rollout.score.correct for rollout in sampled])
  assert 0 < right.mean() < 1
  assert values['eval/sampled_pass_rate/toy'] == right.mean()
  assert values['eval/pass@3/toy'] == right.reshape(4, 3).any(1).mean()
  assert [y for x in answers for y in x.sampled] == right.tolist()
  # The environment's own rewards have bounds, and values per task.
  shares = right.reshape(4, 3).mean(1)
  measured = [x.measures['sampled_reward'] for x in answers]
  np.testing.assert_allclose(measured, shares)
  assert values['eval/sampled_reward_low/toy'] < right.mean()
  assert not any('maj@' in name for name in values)  # toys extract no answer
  samples = [sample for rollout in sampled for sample in rollout.samples]
  surprise = [-x for s in samples for x in _scored(params, s)[s.mask]]
  np.testing.assert_allclose(
    values['eval/entropy/toy'], np.mean(surprise), rtol=1e-5
  )
  # No two answers to a task are drawn with the same numbers.
  assert min(r.uid for r in driver.all_rollouts) >= evaluation.FIRST_UID
  assert len({sample.ids.tobytes() for sample in samples}) == 12


class Initials(toys.Letters):
  """Its answer is whether the text begins with an ASCII character."""

  votes = True

  def grade(self, task, text):
    score = super().grade(task, text)
    answer = None if text.endswith(' ') else str(text[:1].isascii())
    return dataclasses.replace(score, answer=answer)


def test_pass_at_k_is_the_mean_over_all_subsets_of_k_answers():
  values, answers, *_ = _evaluator(
    Initials('toy', schema.Arithmetic()), samples=5, ks=(2, 4, 4)
  )[0].measure()
  plain, _, *_ = _evaluator(samples=5)[0].measure()
  assert {k: v for k, v in values.items() if k in plain} == plain
  assert values.keys() - plain.keys() == {
    f'eval/{name}{side}/toy'
    for side in ('', *estimates.BOUNDS)
    for name in ('pass@2', 'pass@4', 'maj@2', 'maj@4', 'maj@5')
  }
  pairs = [itertools.combinations(answer.sampled, 2) for answer in answers]
  solved = [any(pair) for pair in itertools.chain(*pairs)]
  assert values['eval/pass@2/toy'] == pytest.approx(np.mean(solved))


SUITE = ('Hello.', 'yes', 'What is 1 + 2?')


def test_a_brief_evaluation_plays_what_is_graded_alone(tmp_path):
  path = tmp_path / 'rows.jsonl'
  row = {'prompt': 'a', 'completion': 'b'}
  path.write_text(f'{json.dumps(row)}\n')
  shown = rows.Rows('toy', schema.Rows(path=str(path), eval_path=str(path)))
  for env, count in ((TOY, 4), (shown, 0)):
    evaluator, driver = _evaluator(env, suite=SUITE)
    values, answers, suite, _ = evaluator.measure(brief=True)
    assert len(driver.all_rollouts) == len(answers) == count and not suite
    assert ('eval/pass_rate/toy' in values) == bool(count)
    length, tasks = evaluator.tasks.cfg.max_tokens, evaluator.tasks.by_env
    times = 1 + evaluator.tasks.cfg.samples
    assert evaluator.most_tokens(brief=True) == count * length
    assert evaluator.most_tokens() == (
      (len(tasks['toy'][1]) * times + 3) * length
    )


def test_the_suite_is_answered_greedily_in_one_turn():
  params = _sharp()
  evaluator, _ = _evaluator(params=params, suite=SUITE, max_episode_tokens=5)
  values, _, answers, _ = evaluator.measure()
  assert [answer.prompt for answer in answers] == list(SUITE)
  for answer in answers:
    prompt = RENDERER.render(
      [{'role': 'user', 'content': answer.prompt}], add_generation_prompt=True
    ).ids
    # With eval.max_tokens, not max_episode_tokens.
    assert answer.tokens == len(_greedy(params, prompt, 8))
    assert answer.grades == texts.grade(answer.text)
  assert max(answer.tokens for answer in answers) == 8
  metrics = answers_lib.suite_metrics(answers)
  assert metrics['eval/suite/length'] == np.mean([x.tokens for x in answers])
  # The suite changes no other metric, and no environment's draws.
  alone = _evaluator(params=params, max_episode_tokens=5)[0].measure()
  assert values == alone.metrics | metrics and not alone.suite


def test_a_suite_may_be_a_file_that_says_whether_refusals_are_right(tmp_path):
  messages = [{'role': x, 'content': x} for x in ('system', 'user')]
  path, bad = tmp_path / 'suite.jsonl', tmp_path / 'bad.jsonl'
  path.write_text(
    '{"prompt": "a", "refusal": false}\n'
    f'{{"prompt": {json.dumps(messages)}}}\n'
    '{"prompt": "d", "refusal": "true"}\n'
  )
  evaluator, _ = _evaluator(suite=('z',), suite_path=str(path))
  answers = evaluator.measure().suite
  assert [x.prompt for x in answers] == ['z', 'a', 'system\nuser', 'd']
  right = [x.grades.get('right_refusal') for x in answers]
  assert right == [None, 1.0, None, 0.0]  # letters refuse nothing
  bad.write_text('{"prompt": "a", "refusal": "maybe"}')
  with pytest.raises(ValueError, match='bad.jsonl:1: refusal must be true'):
    _tasks(suite_path=str(bad))


def test_the_suite_is_measured_by_means_over_the_answers_that_have_a_value():
  answers = [
    answers_lib.SuiteAnswer('', text, stop, tokens, texts.grade(text))
    for text, stop, tokens in (
      ('I cannot help.', 'eos', 5),
      ('```json\n[1]\n```', 'eos', 9),
      ('```json\n[1\n```', 'max_tokens', 16),
      ('a\0', 'overflow', 2),
    )
  ]
  metrics = answers_lib.suite_metrics(answers)
  del metrics['eval/suite/repetition']
  assert {k.removeprefix('eval/suite/'): x for k, x in metrics.items()} == {
    'length': 8,
    'truncated': 1 / 2,
    'broken_characters': 1 / 8,
    'refusal': 1 / 4,
    'code_syntax': 1 / 2,  # of two answers
  }
  # Without code, there is no metric of code.
  assert 'eval/suite/code_syntax' not in answers_lib.suite_metrics(answers[:1])


@pytest.mark.parametrize(
  'options, message',
  [
    ({'ks': (1,)}, 'ks must'),
    ({'ks': (2, 9)}, 'ks must .* samples=8'),
    ({'suite': ('a', 'a')}, 'suite must'),
  ],
)
def test_options_of_ks_and_suite_are_checked(options, message):
  with pytest.raises(ValueError, match=message):
    schema.Eval(**options)


def test_tasks_that_are_not_graded_are_played_greedily_only(tmp_path):
  path = tmp_path / 'rows.jsonl'
  row = '{"prompt": "Say %d.", "completion": "%d"}\n'
  path.write_text(''.join(row % (i, i) for i in range(3)))
  cfg = schema.Rows(path=str(path), eval_path=str(path))
  evaluator, driver = _evaluator(registry.make('toy', cfg))
  values, answers, *_ = evaluator.measure()
  assert len(driver.all_rollouts) == 3
  assert [(x.answer, x.correct) for x in answers] == [(i, None) for i in '012']
  assert 'eval/pass_rate/toy' not in values
  assert not _tasks(registry.make('toy', schema.Rows(path=str(path)))).any


def letters(completions, **columns):
  """The number of bytes of each answer; multiples of 3 are not scorable."""
  counts = [len(text.encode()) for text in completions]
  return [float(x) if x % 3 else None for x in counts]


def test_a_reward_function_grades_sampled_answers(tmp_path):
  """Each task's mean is kept with its answer, and their texts."""
  path = tmp_path / 'rows.jsonl'
  path.write_text(''.join(f'{{"prompt": "Say {i}."}}\n' for i in range(5)))
  entry = schema.EnvEntry(
    env=schema.Rows(path=str(path), eval_path=str(path)),
    algorithm=schema.Grpo(),
    sampler=schema.Policy(),
    rewards={'letters': schema.RewardFn(fn=f'{__name__}:letters', weight=2.0)},
  )
  best = 'eval/sampled_reward/letters/toy'
  functions = measures_lib.functions({'toy': entry})
  evaluator, driver = _evaluator(
    registry.make('toy', entry.env),
    measures=measures_lib.Measures(functions, lambda _: [], RENDERER),
    best=best,
    prompts=3,
  )
  values, answers, _, errors = evaluator.measure()
  assert not errors
  # The driver plays greedy answers first; answers of eval.best end each queue.
  texts = [
    x.completion_messages[-1]['content'] for x in driver.all_rollouts[3 + 2 :]
  ]
  assert [x for y in answers for x in y.sampled_texts] == texts[:9]
  assert None in letters(texts[:9])

  def mean(texts):
    known = [x for x in letters(texts) if x is not None]
    return pytest.approx(np.mean(known)) if known else None

  key = 'sampled_reward/letters'
  assert values[f'eval/{key}/toy'] == mean(texts[:9])
  assert values[f'select/{key}/toy'] == mean(texts[9:])
  for answer in answers:
    assert answer.measures.get(key) == mean(answer.sampled_texts)


class Failing(toys.Letters):
  """Cannot grade answers of an odd length, or any."""

  even = True

  def grade(self, task, text):
    if len(text) % 2 or not self.even:
      raise RuntimeError('odd')
    return super().grade(task, text)


def test_errors_are_counted_and_left_out_of_the_means():
  params = _sharp()
  evaluator, driver = _evaluator(
    Failing('toy', schema.Arithmetic()), params, samples=8
  )
  values, answers, *_ = evaluator.measure()
  failed = [r for r in driver.all_rollouts if r.stop_reason == 'error']
  assert values['eval/errors/toy'] == len(failed)
  alive = [r for r in driver.all_rollouts if r not in failed]
  rewards = [r.score.reward for r in alive if r.uid % 2**12]
  assert values['eval/sampled_pass_rate/toy'] == np.mean(rewards)
  known = [a.correct for a in answers if a.error is None]
  assert 0 < len(known) < len(answers)
  assert values['eval/pass_rate/toy'] == np.mean(known)


def test_too_many_errors_stop_the_run():
  env = Failing('toy', schema.Arithmetic())
  env.even = False
  evaluator, _ = _evaluator(env)
  values, answers, *_ = evaluator.measure()
  assert values == {'eval/errors/toy': 4, 'eval/stop/error/toy': 1.0}
  assert all('odd' in answer.error for answer in answers)
  evaluator.tasks.max_error_share = 0.9
  with pytest.raises(statistics.TooManyErrors, match='got 4 of 4'):
    evaluator.measure()


def test_evaluation_does_not_change_the_batches_of_training(monkeypatch):
  """Bit by bit: the engine is shared, and so is its cache."""
  toys.install(monkeypatch)
  alone, _ = toys.pipeline_and_driver(toys.stage())
  expected = [next(alone) for _ in range(3)]
  source, driver = toys.pipeline_and_driver(toys.stage())
  evaluator = evaluation.Evaluator(_tasks(), driver, NONE)
  for item in expected:
    driver._engine.set_params(toys.params(seed=1), 9)
    evaluator.measure()
    driver._engine.set_params(toys.params(), 5)
    again = next(source)
    _equal(item.batch, again.batch)
    assert (item.state, item.metrics) == (again.state, again.metrics)
