"""The dataset sampler: samples, and refused tasks."""

import numpy as np
import pytest

from posttrain import schema, types
from posttrain.chat import rendering
from posttrain.rollout import samplers

USER = {'role': 'user', 'content': 'What is 1 + 2?'}
REPLY = {'role': 'assistant', 'content': '\\boxed{3}'}


def _task(prompt=(USER,), demonstration=(REPLY,)):
  return types.Task('row-7', 'e', prompt, demonstration=demonstration)


def _rollout(task, max_tokens=64, **options):
  return samplers.DatasetSampler(
    schema.Dataset(**options),
    None,
    rendering.load(schema.Tokenizer()),
    max_tokens,
  ).rollout(task, uid=5)


FEW_SHOT = (USER, {'role': 'assistant', 'content': 'S'}, USER)


def test_the_demonstration_alone_and_its_eos_are_trained():
  rollout = _rollout(_task(FEW_SHOT))
  (sample,) = rollout.samples
  renderer = rendering.load(schema.Tokenizer())
  labels = sample.ids[sample.mask].tolist()
  assert labels == [*REPLY['content'].encode(), renderer.tokenizer.eos_id]
  assert rollout.messages == (*FEW_SHOT, REPLY)
  assert rollout.uid == 5 and rollout.stop_reason == 'eos'
  assert rollout.score.reward is None  # not graded, which is not zero
  assert not sample.sampler_logprobs.any() and (sample.versions == -1).all()
  whole = renderer.render(rollout.messages)
  np.testing.assert_array_equal(sample.ids, whole.ids)
  np.testing.assert_array_equal(sample.roles, whole.roles)


def test_too_long_raises_or_truncates():
  with pytest.raises(ValueError, match=r'row row-7 of environment e must fit'):
    _rollout(_task(), max_tokens=20)
  rollout = _rollout(_task(), max_tokens=20, too_long='truncate')
  assert len(rollout.samples[0]) == 20
  assert rollout.stop_reason == 'max_tokens'


@pytest.mark.parametrize('too_long', ['error', 'truncate'])
@pytest.mark.parametrize(
  'options, max_tokens, words',
  [
    ({'demonstration': None}, 64, '.* must have a demonstration'),
    ({'demonstration': (USER,)}, 64, '.* must have a trained label'),
    # 15 tokens of prompt and header: the prompt fits, but no label does.
    ({'prompt': FEW_SHOT}, 15, '.* must fit into batch.row_tokens=15'),
    ({'prompt': ({'role': 'robot', 'content': ''},)}, 64, 'of .* e: messages'),
  ],
)
def test_tasks_without_trained_labels_are_refused_by_row(
  options, max_tokens, words, too_long
):
  with pytest.raises(ValueError, match=f'row-7 {words}'):
    _rollout(_task(**options), max_tokens, too_long=too_long)
