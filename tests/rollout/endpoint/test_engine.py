"""Episodes of a model on a server: token ids, turn after turn."""

import collections
import concurrent.futures
import types

import httpx
import numpy as np
import pytest

from posttrain.decode import requests
from posttrain.rollout import endpoints, episodes
from tests.rollout.endpoint.servers import Server, connect
from tests.rollout.fakes import EOS, RENDERER, Recall, spec
from tests.rollout.test_episodes import PROMPT, REPLY, WHOLE

RED = (*b'red', EOS)


def choice_of(ids, reason='stop', **fields):
  """Returns a choice in vLLM's form."""
  return {
    'text': 'never read',
    'finish_reason': reason,
    'token_ids': list(ids),
    'logprobs': {'token_logprobs': [-i / 8 for i in range(len(ids))]},
    **fields,
  }


def complete(choice, stop_ids=(EOS,)):
  """Returns the completion of a request of three tokens."""
  engine = endpoints.Engine(connect(Server(replies={(): choice})))
  engine.submit(requests.Request(2**40 + 5, np.array([1, 2, 3]), 8, stop_ids))
  (completion,) = engine.poll()
  assert completion.ids.dtype == np.int32
  assert completion.logprobs.dtype == np.float32
  assert completion.version == -1 and completion.id == 2**40 + 5
  return completion


def test_ids_after_an_empty_piece_are_integers():
  server = Server(replies={(1, 2, 3): choice_of(RED)})
  engine = endpoints.Engine(connect(server))
  ids = np.array([1, 2, 3], np.int32)
  request = requests.Request(4, ids, 8, (EOS,), hold=True)
  engine.submit(request)
  engine.poll()
  engine.extend(4, [], 5)
  assert engine._requests[4].ids.dtype == np.int32
  engine.drop()


def test_driver_runs_an_episode_of_two_turns():
  server = Server(
    replies={tuple(PROMPT): choice_of(RED), tuple(REPLY): choice_of(RED)}
  )
  engine = endpoints.Engine(connect(server))
  driver = episodes.Driver(engine, RENDERER, 64)
  (rollout,) = driver.run([spec(7, temperature=0.5)])
  assert engine.poll() == []
  (sample,) = rollout.samples
  assert sample.ids.tolist() == WHOLE and rollout.stop_reason == 'env_done'
  assert rollout.score.reward == 1
  np.testing.assert_array_equal(
    sample.sampler_logprobs[sample.mask], [0, -1 / 8, -2 / 8, -3 / 8] * 2
  )
  assert (sample.versions == -1).all()
  first, second = server.bodies
  # The whole sequence, in the server's own tokens.
  assert first['prompt'] == PROMPT and second['prompt'] == WHOLE[:-4]
  for body in server.bodies:
    expected = {'temperature': 0.5, 'max_tokens': 8, 'stop_token_ids': [EOS]}
    # The defaults of a model's files must not apply.
    expected |= {'top_k': 0, 'top_p': 1, 'min_p': 0, 'repetition_penalty': 1}
    assert expected.items() <= body.items()


def test_poll_returns_completions_in_the_order_of_submission():
  futures = collections.defaultdict(concurrent.futures.Future)

  def finish(id):
    logprobs = np.zeros(4, np.float32)
    futures.pop(id).set_result(
      requests.Completion(id, np.array(RED), logprobs, 'eos', -1)
    )

  endpoint = types.SimpleNamespace(
    sample=lambda request, *args, **kwargs: futures[request.id]
  )
  engine = endpoints.Engine(endpoint)
  for id in (5, 1, 4, 2):
    engine.submit(requests.Request(id, np.array([9]), 8, (EOS,), hold=id == 4))
  for id in (2, 4, 5):
    finish(id)
  assert [c.id for c in engine.poll()] == [5, 4, 2]  # 1 is still running
  engine.extend(4, np.array([9]), 8)
  engine.submit(requests.Request(3, np.array([9]), 8, (EOS,)))
  for id in (3, 4, 1):
    finish(id)
  assert [c.id for c in engine.poll()] == [1, 4, 3]
  engine.release(4)
  assert engine.poll() == []


@pytest.mark.parametrize(
  'text, end, ids, reason',
  [
    (RED, 'stop', RED, 'eos'),
    (b'red', 'stop', RED, 'eos'),  # the only stop id
    (b'red', 'length', b'red', 'overflow'),  # of eight
    (b'reddened', 'length', b'reddened', 'max_tokens'),
  ],
)
def test_stop_reasons_of_completions(text, end, ids, reason):
  completion = complete(choice_of(text, end))
  assert completion.ids.tolist() == list(ids)
  assert completion.stop_reason == reason
  assert len(completion.logprobs) == len(ids)


def test_a_missing_stop_token_is_named_or_the_only_one():
  completion = complete(choice_of(b'red', stop_reason=9), stop_ids=(EOS, 9))
  assert completion.ids.tolist() == [*b'red', 9]
  np.testing.assert_allclose(completion.logprobs, [0, -1 / 8, -2 / 8, 0])
  with pytest.raises(
    endpoints.EndpointError, match='stop_reason|one of the ids'
  ):
    complete(choice_of(b'red'), stop_ids=(EOS, 9))


def test_missing_logprobs_are_zeros():
  assert complete(choice_of(RED, logprobs=None)).logprobs.tolist() == [0] * 4


def test_marked_tokens_are_read_as_ids():
  tokens = [f'token_id:{i}' for i in RED]
  logprobs = {'tokens': tokens, 'token_logprobs': [-1.0] * 4}
  completion = complete(choice_of((), token_ids=None, logprobs=logprobs))
  assert completion.ids.tolist() == list(RED)


@pytest.mark.parametrize(
  'choice',
  [
    choice_of(RED, token_ids=None),
    choice_of(b'red', stop_reason=8),
    choice_of(RED, 'tool_calls'),
    choice_of(b'reddening', 'length'),
    choice_of(RED, logprobs={'token_logprobs': [-1.0]}),
    choice_of(RED, prompt_token_ids=[1, 2]),
    choice_of([1, 512], 'length'),
  ],
)
def test_invalid_completions_are_refused(choice):
  with pytest.raises(endpoints.EndpointError, match='teacher at .*: got '):
    complete(choice)


def test_seeds_differ_by_run_request_and_turn():
  """They do not depend on other requests of the run."""

  def seeds(seed, *ids):
    server = Server(replies={(): choice_of(RED)})
    engine = endpoints.Engine(connect(server, concurrency=1), seed=seed)
    for id in ids:
      engine.submit(requests.Request(id, np.array([9]), 8, (EOS,), hold=True))
      engine.poll()
      engine.extend(id, np.array([9]), 8)
      engine.poll()
    return [body['seed'] for body in server.bodies]

  first = seeds(0, 6, 2**50 + 6)
  assert len({*first, *seeds(1, 6)}) == 6
  assert seeds(0, 6) == first[:2]


def test_failure_leaves_no_request_in_flight():
  server = Server(
    replies={(): choice_of(RED)},
    troubles=[httpx.Response(400, json={'message': 'too long'})],
  )
  engine = endpoints.Engine(connect(server, concurrency=1))
  specs = [spec(uid, Recall(max_turns=1)) for uid in range(5)]
  run_all = episodes.Driver(engine, RENDERER, 64).run
  with pytest.raises(endpoints.EndpointError, match='status 400: too long'):
    run_all(specs)
  assert [r.uid for r in run_all(specs)] == list(range(5))
