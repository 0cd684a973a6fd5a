"""Which measures may select weights, and on which tasks."""

import contextlib
import dataclasses

import pytest

from posttrain import schema
from posttrain.config import selection_checks

SQL = schema.Sql(difficulties=('easy',))
UNGRADED = schema.Trl(factory='m:f')
CUSTOM = schema.CustomEnv(import_path='m:f')
ROWS = schema.Rows(path='p', eval_fraction=0.5)


def _stage(best, env=None, rewards=None, **options):
  entry = schema.EnvEntry(env=env or schema.Arithmetic(), rewards=rewards or {})
  return schema.Stage(
    envs={'a': entry}, eval=schema.Eval(best=f'eval/{best}/a', **options)
  )


def _refuses(message):
  if not message:
    return contextlib.nullcontext()
  return pytest.raises(ValueError, match=message)


@pytest.mark.parametrize(
  ('best', 'env', 'message'),
  [
    ('pass_rate', None, ''),
    ('sampled_pass_rate', None, ''),
    ('sampled_format_rate', None, ''),
    ('reward', None, ''),
    ('pass@8', None, ''),
    ('maj@4', None, ''),
    ('passrate', None, "'eval/passrate/a', expected eval/pass_rate/a"),
    ('sampled_pas_rate', None, 'expected eval/sampled_pass_rate/a'),
    ('accuracy', None, r"expected one of \('pass_rate', .* 'a'"),
    ('nll', None, 'expected one of'),
    ('token_accuracy', None, 'expected one of'),
    ('pass@3', None, r'eval.ks is \(4,\) and eval.samples 8'),
    ('pass@x', None, r'eval.ks is \(4,\) and eval.samples 8'),
    ('maj@8', schema.AlphabetSort(), 'expected one of'),
    # Measures without a best value.
    ('kl', None, 'smallest at the start'),
    ('errors', None, 'are those of the environment'),
    ('truncated', None, 'smallest where answers are empty'),
    ('entropy', None, 'no value of which is the best'),
    ('length', None, 'no value of which is the best'),
    ('failures', CUSTOM, 'smallest where no tool is called'),
    ('stop/eos', CUSTOM, 'no value of which is the best'),
    # Environments that measure others.
    ('nll', ROWS, ''),
    ('token_accuracy', ROWS, ''),
    ('nlll', ROWS, 'expected eval/nll/a'),
    ('pass_rate', ROWS, r"expected one of \('nll', 'token_accuracy'\)"),
    ('reward', UNGRADED, ''),
    ('sampled_reward', UNGRADED, ''),
    ('sampled_reward', None, ''),
    ('pass_rate', UNGRADED, r"expected one of \('reward', 'sampled_reward'\)"),
    ('pass@8', UNGRADED, r"expected one of \('reward', 'sampled_reward'\)"),
    ('pass_rate', dataclasses.replace(UNGRADED, correct_at=1.0), ''),
    ('own', UNGRADED, ''),  # its scores may add any metric
    ('own', CUSTOM, ''),
    ('nll', CUSTOM, ''),
    ('maj@8', CUSTOM, ''),
    ('sampledpassrate', CUSTOM, 'expected eval/sampled_pass_rate/a'),
    ('progress', SQL, ''),
    ('pass_rate_easy', SQL, ''),
    ('pass_rate_hard', SQL, 'expected'),
    ('steps', SQL, 'expected one of'),
  ],
)
def test_weights_are_selected_by_a_measure_that_can_be_best(best, env, message):
  with _refuses(message) as error:
    selection_checks.check(_stage(best, env, ks=(4,)), 'config.grpo')
  if message:
    text = str(error.value)
    assert text.startswith('config.grpo.eval.best must be a measure')
    assert '\n' not in text


@pytest.mark.parametrize(
  ('samples', 'best', 'message'),
  [
    (0, 'sampled_pass_rate', 'eval.samples is 0'),
    (0, 'sampled_reward', 'eval.samples is 0'),
    (0, 'pass@1', 'eval.samples is 0; set it to 2 or more'),
    (1, 'pass@1', 'eval.samples is 1; set it to 2 or more'),
    (1, 'maj@1', 'eval.samples is 1; set it to 2 or more'),
    (1, 'sampled_pass_rate', ''),
    (2, 'pass@2', ''),
  ],
)
def test_measures_of_samples_need_samples(samples, best, message):
  with _refuses(message):
    selection_checks.check(_stage(best, samples=samples), 'config.grpo')


@pytest.mark.parametrize(
  ('function', 'best', 'message'),
  [
    ({'fn': 'm:f'}, 'short', ''),
    ({'fn': 'm:f'}, 'long', r"environment's rewards are \('short',\)"),
    ({'fn': 'm:f', 'judge': 'stage:sft'}, 'short', 'without a model alone'),
    ({'model': 'stage:sft'}, 'short', 'without a model alone'),
  ],
)
def test_reward_functions_select_where_evaluations_call_them(
  function, best, message
):
  rewards = {'short': schema.RewardFn(**function)}
  for kind in ('reward', 'sampled_reward'):
    with _refuses(message):
      stage = _stage(f'{kind}/{best}', rewards=rewards)
      selection_checks.check(stage, 'config.grpo')


def test_sampled_rewards_need_samples():
  rewards = {'short': schema.RewardFn(fn='m:f')}
  stage = _stage('sampled_reward/short', rewards=rewards, samples=0)
  with pytest.raises(ValueError, match='eval.samples is 0'):
    selection_checks.check(stage, 'config.grpo')


@pytest.mark.parametrize(
  ('best', 'message'),
  [
    ('rewards/accuracies', ''),
    ('rewards/margins', ''),
    ('rewards/accuracy', "one of .'eval/pairs/rewards/accuracies'"),
    ('logps/chosen', "one of .'eval/pairs/rewards/accuracies'"),
    ('loss/sigmoid', 'largest value is the worst'),
  ],
)
def test_metrics_of_pairs_that_select(best, message):
  stage = schema.Stage(
    kind='preference',
    pairs=schema.MadePairs(eval_fraction=0.2),
    eval=schema.Eval(best=f'eval/pairs/{best}'),
  )
  with _refuses(message):
    selection_checks.check(stage, 'config.dpo')


def _stages(first=100, second=500, **other):
  """`sft` selects on the tasks of `a` after the first; `grpo` reports."""
  sft = _stage('pass_rate', prompts=first)
  entry = schema.EnvEntry(env=schema.Arithmetic(**other))
  return {
    'sft': sft,
    'grpo': schema.Stage(envs={'b': entry}, eval=schema.Eval(prompts=second)),
  }


def test_later_stages_do_not_report_the_tasks_that_selected():
  with pytest.raises(
    ValueError,
    match='config.grpo.eval.prompts must be at most config.sft.eval.prompts='
    "100: got 500, but config.sft.eval.best .* environment 'b' .* set both to",
  ):
    selection_checks.check_apart(_stages())


@pytest.mark.parametrize(
  'stages',
  [
    _stages(second=100),
    _stages(first=300, second=100),
    _stages(ops=('x',)),  # other tasks
    dict(reversed(_stages().items())),  # no weights were selected before
  ],
)
def test_stages_may_report_what_selected_nothing(stages):
  selection_checks.check_apart(stages)
