"""Retries, waits and failures with a server that is busy, slow, or away."""

import datetime
import email.utils
import re
import threading

import httpx
import numpy as np
import pytest

from posttrain import schema
from posttrain.rollout.endpoint import client
from tests.rollout.endpoint.servers import Server, Transport, connect, truth

IDS = np.array([5, 301, 7, 7], np.int32)
ONES = np.ones(4, np.float32)
REFUSED = httpx.ConnectError('Connection refused')


def score(server, sleeps=None, caller=None, **options):
  (logprobs,) = connect(server, sleeps, **options).score([IDS], [ONES], caller)
  return logprobs


@pytest.mark.parametrize(
  'trouble',
  [
    httpx.Response(500),
    httpx.Response(502),
    httpx.Response(503),
    httpx.Response(429),
    REFUSED,
    httpx.ReadTimeout(''),
    httpx.RemoteProtocolError('Server disconnected'),
    httpx.ReadError(''),
    httpx.Response(200, json={'choices': [{'finish_reason': 'abort'}]}),
  ],
)
def test_temporary_failures_are_retried(trouble):
  sleeps = []
  server = Server(troubles=[trouble] * 3)
  np.testing.assert_allclose(score(server, sleeps), truth(IDS, ONES), rtol=1e-6)
  assert len(sleeps) == 3 and len(server.bodies) == 4
  assert all(body == server.bodies[0] for body in server.bodies)


def test_waits_double_up_to_half_a_minute():
  many = np.array(
    [
      waits
      for _ in range(20)
      for waits in [[]]
      if score(Server(troubles=[REFUSED] * 9), waits) is not None
    ]
  )
  longest = np.array([2, 4, 8, 16, 30, 30, 30, 30, 30])
  assert many.shape == (20, 9)
  assert (many <= longest).all() and (many >= longest / 2).all()
  assert (many.std(axis=0) > 0.01 * longest).all()  # random


def test_waits_are_logged_with_the_callers_name(caplog):
  troubles = [
    REFUSED,
    httpx.ReadTimeout(''),
    httpx.Response(503, json={'error': {'message': 'loading', 'code': 503}}),
  ]
  score(Server(troubles=troubles), caller='reward tone', timeout=7.0)
  first, second, third = (record.getMessage() for record in caplog.records)
  start = 'reward tone waits for teacher at http://there:8000/v1: '
  # One to two seconds, in three digits.
  prefix = re.escape(f'{start}Connection refused; try 1 of 10, next in ')
  assert re.fullmatch(rf'{prefix}(1(\.\d+)?|2) s', first)
  assert second.startswith(f'{start}no answer within 7 s; try 2 of 10, next')
  assert third.startswith(f'{start}status 503: loading; try 3 of 10, next')


@pytest.mark.parametrize(
  'value, least, most',
  [
    ('7', 7, 7),
    ('2.5', 2.5, 2.5),
    ('45', 45, 45),
    ('0', 1, 2),
    ('-3', 1, 2),
    ('1e9', 600, 600),
    ('nan', 1, 2),
    ('soon', 1, 2),
    ('inf', 600, 600),
    ('1e400', 600, 600),
    ('9' * 5000, 600, 600),
    ('Fri, 31 Dec 9999 23:59:59 GMT', 600, 600),
    ('Fri, 31 Dec 9999 23:59:59 +' + '9' * 60, 1, 2),
    ('Mon, 99 Jan 0000 99:99:99 GMT', 1, 2),
    (None, 1, 2),
    ('Mon, 01 Jan 2001 00:00:00 GMT', 1, 2),
    (datetime.timedelta(seconds=200), 150, 200),
  ],
)
@pytest.mark.parametrize('status', [429, 503])
def test_retry_after_is_a_lower_bound_of_the_wait(status, value, least, most):
  if isinstance(value, datetime.timedelta):
    value = email.utils.format_datetime(
      datetime.datetime.now(datetime.UTC) + value
    )
  headers = {} if value is None else {'Retry-After': value}
  sleeps = []
  score(Server(troubles=[httpx.Response(status, headers=headers)]), sleeps)
  (seconds,) = sleeps
  assert least <= seconds <= most


def test_retry_after_does_not_shorten_later_waits():
  sleeps = []
  trouble = httpx.Response(429, headers={'Retry-After': '3'})
  score(Server(troubles=[trouble] * 6), sleeps)
  assert sleeps[:2] == [3, pytest.approx(3.5, abs=0.5)] and min(sleeps[4:]) > 14


def test_last_try_raises_endpoint_error():
  sleeps = []
  server = Server(troubles=[REFUSED] * 99)
  with pytest.raises(
    client.EndpointError,
    match=(
      'teacher at http://there:8000/v1 must answer environment sums: got '
      'Connection refused at the last of 4 tries; start the server again'
    ),
  ) as error:
    score(server, sleeps, tries=4)
  assert len(server.bodies) == 4 and len(sleeps) == 3
  assert isinstance(error.value, RuntimeError) and error.value.status is None


@pytest.mark.parametrize(
  'status, body, message',
  [
    (413, {'error': {'message': 'too long'}}, 'status 413: too long'),
    (404, {'detail': 'no such model'}, 'no such model; check name, and'),
    (401, {'message': 'who?', 'object': 'error'}, 'who.; name the variable'),
    (418, None, 'status 418: I.m a teapot'),
    (301, None, 'Moved'),
  ],
)
def test_other_refusals_are_errors_at_once(status, body, message):
  sleeps = []
  options = {} if body is None else {'json': body}
  server = Server(troubles=[httpx.Response(status, **options)])
  with pytest.raises(client.EndpointError, match=message) as error:
    score(server, sleeps)
  assert error.value.status == status
  assert not sleeps and len(server.bodies) == 1


def test_refused_prompt_is_an_error_at_once_if_the_form_is_known():
  server = Server()
  connected = connect(server)
  connected.score([IDS], [ONES])
  server.troubles = [httpx.Response(400, json={'message': 'too long'})]
  with pytest.raises(client.EndpointError, match='status 400: too long'):
    connected.score([IDS], [ONES])
  assert len(server.bodies) == 2


@pytest.mark.parametrize('page', [b'<html>', b'[1]', b''])
def test_response_without_a_json_object_is_an_error_at_once(page):
  with pytest.raises(client.EndpointError, match='JSON object.*base_url'):
    score(Server(troubles=[httpx.Response(200, content=page)]))


def test_first_failure_drops_the_remaining_requests():
  server = Server(troubles=[httpx.Response(403)])
  with pytest.raises(client.EndpointError, match='status 403'):
    connect(server, concurrency=1).score([IDS] * 50, [ONES] * 50)
  assert len(server.bodies) < 50


def test_api_key_is_sent_and_never_in_errors(monkeypatch):
  server = Server()
  monkeypatch.setenv('TEACHER_KEY', 'sesame')
  score(server, api_key_env='TEACHER_KEY')
  assert server.requests[0].headers['Authorization'] == 'Bearer sesame'
  monkeypatch.setenv('TEACHER_KEY', 'se same\n')
  with pytest.raises(ValueError, match="characters in 'TEACHER_KEY'") as error:
    connect(server, api_key_env='TEACHER_KEY')
  assert 'same' not in str(error.value)
  monkeypatch.delenv('TEACHER_KEY')
  with pytest.raises(ValueError, match="api_key_env .* 'TEACHER_KEY'; export"):
    connect(server, api_key_env='TEACHER_KEY')


@pytest.mark.parametrize('url', ['http://', 'http:///v1', 'http://a:b/v1'])
def test_invalid_base_url_is_refused(url):
  with pytest.raises(ValueError, match='base_url must be'):
    cfg = schema.Endpoint(name='teacher', base_url=url)
    client.Endpoint(cfg, 'environment sums').check(None)


def test_close_ends_a_wait():
  requested = threading.Event()

  def server(request):
    requested.set()
    return httpx.Response(503, headers={'Retry-After': '500'})

  cfg = schema.Endpoint(name='teacher', base_url='http://there:8000/v1')
  connected = client.Endpoint(
    cfg, 'environment sums', transport=Transport(server)
  )
  errors = []

  def wait():
    try:
      connected.score([IDS], [ONES])
    except client.EndpointError as error:
      errors.append(str(error))

  thread = threading.Thread(target=wait)
  thread.start()
  assert requested.wait(20)
  connected.close()
  thread.join(20)
  assert not thread.is_alive() and 'closed' in errors[0]
