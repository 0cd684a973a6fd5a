"""Tinker's messages: what is refused by name, and what the SDK reads back."""

import numpy as np
import pytest

pytest.importorskip('tinker')
from tinker import types
from tinker.proto import request_conv, response_conv

from posttrain.serve import call, wire, worker


@pytest.fixture
def served(policy):
  """Returns a worker that accepts 16 tokens."""
  return worker.Worker(
    policy, 'tiny', slots=1, capacity=16, chunk=1, max_jobs=1, exact=True
  )


def gradient(loss='cross_entropy', config=None, ids=(5, 6, 7), **arrays):
  arrays = {'target_tokens': [6, 7, 8], 'weights': [1.0, -0.5, 0.0]} | arrays
  datum = types.Datum(
    model_input=types.ModelInput.from_ints(list(ids)),
    loss_fn_inputs={k: x for k, x in arrays.items() if x is not None},
  )
  request = types.ForwardBackwardRequest(
    forward_backward_input=types.ForwardBackwardInput(
      data=[datum], loss_fn=loss, loss_fn_config=config
    ),
    model_id='a',
    seq_id=3,
  )
  proto = request_conv.forward_backward_request_to_proto(request)
  return wire.read('forward_backward', proto.SerializeToString())


def test_data(served):
  request = gradient()
  assert wire.place(request) == ('a', 3)
  [datum], options = wire.data(request, served)
  np.testing.assert_array_equal(datum.ids, [5, 6, 7])
  np.testing.assert_array_equal(datum.targets, [6, 7, 8])
  np.testing.assert_array_equal(datum.weights, np.float32([1, -0.5, 0]))
  assert datum.ids.dtype == np.int32
  arrays = {'weights': None, 'logprobs': [0.0] * 3, 'advantages': [1.0] * 3}
  request = gradient('ppo', {'clip_low_threshold': 0.9}, **arrays)
  [datum], options = wire.data(request, served)
  assert datum.weights == 1 and options.low == pytest.approx(0.1)


@pytest.mark.parametrize(
  'field, changes',
  [
    ('loss', {'loss': 'gspo'}),
    ('numbers', {'config': {'beta': 1.0}}),
    ('loss_fn_inputs', {'target_tokens': None}),
    ('weights', {'weights': [1.0, 2.0]}),
    ('weights', {'weights': [1.0, 2.0, float('nan')]}),
    ('next ids', {'target_tokens': [7, 8, 9]}),
    ('data.0. must have', {'ids': (5, 6, 10**6)}),
    ('targets', {'ids': range(9)}),
    (
      'fit',
      {
        'ids': range(17),
        'target_tokens': [*range(1, 18)],
        'weights': [1.0] * 17,
      },
    ),
  ],
)
def test_refuses_data(served, field, changes):
  with pytest.raises(ValueError, match=field):
    wire.data(gradient(**changes), served)


def sample(**changes):
  fields = {
    'prompt': types.ModelInput.from_ints([5, 6, 7]),
    'sampling_params': types.SamplingParams(max_tokens=4),
    'sampling_session_id': 's',
    'seq_id': 0,
  }
  request = types.SampleRequest(**(fields | changes))
  return wire.read('asample', request.model_dump_json().encode())


def test_sampling(served):
  one, _ = wire.sampling(sample(num_samples=2), served)
  keys = [x.key for x in one]
  assert len(set(keys)) == 2
  other, _ = wire.sampling(sample(seq_id=1, num_samples=2), served)
  assert not {*keys} & {x.key for x in other}
  assert one[0].stop_ids == tuple(served.policy.stop_ids)
  for stop, ids in (([], ()), ([9], (*served.policy.stop_ids, 9))):
    params = types.SamplingParams(max_tokens=99, stop=stop, seed=1)
    [request], _ = wire.sampling(sample(sampling_params=params), served)
    assert request.stop_ids == ids and request.max_tokens == 13


@pytest.mark.parametrize(
  'field, changes',
  [
    ('topk_sample_logprobs', {'topk_sample_logprobs': 2}),
    ('topk_prompt_logprobs', {'topk_prompt_logprobs': 99}),
    ('prompt_logprobs_last_n', {'prompt_logprobs_last_n': 1}),
    ('num_samples', {'num_samples': 0}),
    ('top_p', {'sampling_params': types.SamplingParams(top_p=2.0)}),
  ],
)
def test_refuses_sampling(served, field, changes):
  with pytest.raises(ValueError, match=field):
    request = sample(**changes)
    wire.check_served(request)
    wire.sampling(request, served)


def test_results_are_read_by_the_sdk():
  rows = [np.float32([-1.5, -2.5]), np.float32([-0.25])]
  output = response_conv.deserialize_forward_backward_output(
    wire.gradient_result(rows, {'loss:sum': 4.25})
  )
  assert output.metrics == {'loss:sum': 4.25}
  for row, expected in zip(output.loss_fn_outputs, rows, strict=True):
    np.testing.assert_array_equal(row['logprobs'].to_numpy(), expected)
  scores = worker.TokenLogprobs(
    np.float32([9, -1, -2]),
    np.ones(3, np.int32),
    np.arange(6, dtype=np.int32).reshape(3, 2),
    np.float32([[9, 9], [-1, -2], [-3, -4]]),
  )
  last = {'prompt_logprobs': True, 'topk_prompt_logprobs': 2}
  expected = [None, -1.0, -2.0]
  text = call.Detokenizer(lambda _: '')
  text.append([1, 2], [-1.0, -2.0], 'eos')
  result = response_conv.deserialize_sample_response(
    wire.sample_result([text], sample(**last), scores)
  )
  assert result.prompt_logprobs == expected
  top = result.topk_prompt_logprobs
  assert [x is None for x in top] == [x is None for x in expected]
  assert top[2] == [(4, -3.0), (5, -4.0)]
  [sequence] = result.sequences
  assert (sequence.tokens, sequence.stop_reason) == ([1, 2], 'stop')
