"""Retries, waits and failures with a server that is busy, slow, or away."""

import threading
import time
from concurrent import futures

import httpx
import numpy as np
import pytest

from posttrain import schema
from posttrain.rollout import endpoints
from tests.rollout.endpoint.servers import Server, connect, truth

IDS = np.array([5, 301, 7, 7], np.int32)
REFUSED = httpx.ConnectError('Connection refused')


def score(server, sleeps=None, **options):
  (logprobs,) = connect(server, sleeps, **options).score([(IDS, 1.0)])
  return logprobs


@pytest.mark.parametrize(
  'trouble',
  [
    httpx.Response(503),
    httpx.Response(429),
    REFUSED,
    httpx.Response(200, json={'choices': [{'finish_reason': 'abort'}]}),
  ],
)
def test_temporary_failures_are_retried(trouble):
  sleeps = []
  server = Server(troubles=[trouble] * 3)
  np.testing.assert_allclose(score(server, sleeps), truth(IDS), rtol=1e-6)
  assert len(sleeps) == 3 and len(server.bodies) == 4


@pytest.mark.parametrize(
  ('value', 'least', 'most'),
  [('45', 45, 45), ('inf', 600, 600), ('soon', 1, 2)],
)
def test_retry_after_is_a_lower_bound_of_the_wait(value, least, most):
  sleeps, headers = [], {'Retry-After': value}
  score(Server(troubles=[httpx.Response(503, headers=headers)]), sleeps)
  (seconds,) = sleeps
  assert least <= seconds <= most


def test_last_try_raises_endpoint_error():
  sleeps = []
  server = Server(troubles=[REFUSED] * 99)
  with pytest.raises(
    endpoints.EndpointError,
    match='teacher at http://there:8000/v1 .* environment sums: got Connection',
  ):
    score(server, sleeps, tries=4)
  assert len(server.bodies) == 4 and len(sleeps) == 3


@pytest.mark.parametrize(
  'body', [{'error': {'message': 'too long'}}, {'detail': 'too long'}]
)
def test_other_refusals_are_errors_at_once(body):
  sleeps, server = [], Server(troubles=[httpx.Response(413, json=body)])
  with pytest.raises(endpoints.EndpointError, match='413: too long') as error:
    score(server, sleeps)
  assert error.value.status == 413
  assert not sleeps and len(server.bodies) == 1


@pytest.mark.parametrize('page', [b'<html>', b'[1]'])
def test_response_without_a_json_object_is_an_error_at_once(page):
  with pytest.raises(endpoints.EndpointError, match='teacher at .* must '):
    score(Server(troubles=[httpx.Response(200, content=page)]))


def test_api_key_is_sent_and_never_in_errors(monkeypatch):
  server = Server()
  monkeypatch.setenv('TEACHER_KEY', 'sesame')
  score(server, api_key_env='TEACHER_KEY')
  assert server.requests[0].headers['Authorization'] == 'Bearer sesame'
  monkeypatch.setenv('TEACHER_KEY', 'se same\n')
  with pytest.raises(ValueError, match="'TEACHER_KEY'") as error:
    connect(server, api_key_env='TEACHER_KEY')
  assert 'same' not in str(error.value)


# --- Time and size ------------------------------------------------------------

ASKED = [({'role': 'user', 'content': 'x'},)]


def endpoint(respond, **options):
  return endpoints.Endpoint(
    schema.Endpoint(name='teacher', base_url='http://there/v1', **options),
    'a test',
    transport=httpx.MockTransport(respond),
  )


def test_a_drip_ends_at_the_deadline():
  def drip(_):
    pieces = (time.sleep(0.05) or b'H' for _ in range(60))
    return httpx.Response(200, content=pieces)

  begin = time.monotonic()
  with pytest.raises(endpoints.EndpointError, match=r'no answer within 0.2 s'):
    endpoint(drip, timeout=0.2, tries=1).chat(ASKED)
  assert time.monotonic() - begin < 2


def test_an_answer_over_the_size_is_refused(monkeypatch):
  monkeypatch.setattr(endpoints, 'LARGEST', 2**20)
  large = httpx.Response(200, content=bytes(2**20 + 1))
  with pytest.raises(endpoints.EndpointError, match=r'at most \d+ bytes'):
    endpoint(lambda _: large).chat(ASKED)


def test_close_ends_a_wait():
  begun = threading.Event()

  def respond(_):
    begun.set()
    return httpx.Response(503, headers={'Retry-After': '500'})

  client = endpoint(respond)
  with futures.ThreadPoolExecutor(1) as pool:
    call = pool.submit(client.chat, ASKED)
    assert begun.wait(10)
    client.close()
    with pytest.raises(endpoints.EndpointError, match='closed'):
      call.result(5)
