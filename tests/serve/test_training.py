"""The training service without HTTP: order, turns, failures, restarts."""

import concurrent.futures
import json
import time

import numpy as np
import pytest

pytest.importorskip('tinker')
from tinker import types
from tinker.proto import request_conv

from posttrain.serve import training, worker
from tests.serve import conftest

DONE = types.OptimStepResponse()


@pytest.fixture
def start(policy, tmp_path):
  """Returns a function that starts a service in the same folder."""
  services = []

  def run(capacity=16, **verbs):
    served = worker.Worker(
      policy,
      conftest.NAME,
      slots=1,
      capacity=capacity,
      chunk=1,
      max_jobs=1,
      exact=True,
    )
    service = training.Service(served, tmp_path)
    service.verbs |= {'create_model': lambda model, job: DONE, **verbs}
    service.start()
    services.append(service)
    return service

  yield run
  for service in services:
    assert service.stop(10)


def create(service, session, number=0):
  """Creates a model; returns its id."""
  request = types.CreateModelRequest(
    session_id=session,
    model_seq_id=number,
    base_model=conftest.NAME,
    lora_config=types.LoraConfig(rank=2),
  )
  body = request.model_dump_json().encode()
  return service.accept('create_model', body).request_id.removesuffix(':0')


def update(service, model, number):
  """Requests an update; returns the id of its future."""
  request = types.OptimStepRequest(
    optim_params=types.AdamParams(), model_id=model, seq_id=number
  )
  body = request.model_dump_json().encode()
  return service.accept('optim_step', body).request_id


def gradient(service, model, number, ids):
  """Requests a gradient; returns the id of its future."""
  datum = types.Datum(
    model_input=types.ModelInput.from_ints(ids[:-1]),
    loss_fn_inputs={'target_tokens': ids[1:]},
  )
  request = types.ForwardBackwardRequest(
    forward_backward_input=types.ForwardBackwardInput(
      data=[datum], loss_fn='cross_entropy'
    ),
    model_id=model,
    seq_id=number,
  )
  proto = request_conv.forward_backward_request_to_proto(request)
  body = proto.SerializeToString()
  return service.accept('forward_backward', body).request_id


def result(service, id):
  """Waits for a result; returns its body."""
  end = time.monotonic() + 60
  while (content := service.result(id))[0] is None:
    assert time.monotonic() < end
    time.sleep(0.01)
  return content[1]


def test_requests_run_once_in_the_order_of_their_numbers(start):
  calls = []
  service = start(
    optim_step=lambda _, job: calls.append(job.row.number) or DONE
  )
  model = create(service, service.open_session())
  ids = [update(service, model, number) for number in (3, 2, 3, 1)]
  first = [result(service, id) for id in ids]
  update(service, model, 2)
  assert calls == [1, 2, 3]
  assert first == [result(service, id) for id in ids]


def test_sessions_and_their_models_take_turns(start):
  calls = []
  service = start(optim_step=lambda model, _: calls.append(model.id) or DONE)
  one, other = service.open_session(), service.open_session()
  models = []
  for args in ((one,), (one, 1), (other,)):
    models.append(create(service, *args))
    result(service, f'{models[-1]}:0')
  a, b, c = models
  for model in models:
    for number in (3, 2):
      update(service, model, number)
  with service._changed:  # all begin at once
    for model in (a, b, c):
      update(service, model, 1)
  for model in (a, b, c):
    result(service, f'{model}:3')
  assert calls == [a, c, b, c, a, c, b, a, b]


def test_a_failed_request_is_not_carried_out_again(start):
  """The client was told so; another time it might succeed."""
  calls = []

  def fail(model, job):
    calls.append('failed')
    raise MemoryError

  service = start(optim_step=fail)
  model = create(service, service.open_session())
  failed = result(service, update(service, model, 1))
  assert b'server' in failed
  service.stop(10)
  service = start(
    optim_step=lambda _, job: calls.append(job.row.number) or DONE
  )
  result(service, update(service, model, 2))
  assert calls == ['failed', 2] and service.result(f'{model}:1')[1] == failed


def test_data_that_no_longer_fit_are_no_gap(start):
  """Without their gradient the weights would differ; unless it is over."""
  service = start(forward_backward=lambda model, job: b'')
  session = service.open_session()
  result(service, gradient(service, create(service, session), 1, [*range(12)]))
  service.stop(10)
  with pytest.raises(ValueError, match='--max_model_len'):
    start(capacity=8)
  service = start(forward_backward=lambda model, job: b'')
  service.finish_session(session)
  service.finish_session(session)  # its answer was lost: the SDK asks again
  service.stop(10)
  start(capacity=8)


def test_a_model_of_a_finished_session_is_not_created(start, monkeypatch):
  """Its request was checked before the session was finished."""
  service = start(optim_step=lambda model, job: DONE)
  over, other = service.open_session(), service.open_session()
  model = create(service, other)
  result(service, f'{model}:0')
  service.finish_session(over)
  monkeypatch.setattr(service, 'session', lambda _: None)
  with service._changed:  # both are ready at a time
    create(service, over)
    last = update(service, model, 1)
  result(service, last)
  assert [*service.models] == [model]


def test_a_norm_that_is_no_number_reaches_the_client(start):
  metrics = {'optim/grad_norm': float('nan'), 'optim/skipped': 1.0}
  response = types.OptimStepResponse(metrics=metrics)
  service = start(optim_step=lambda model, job: response)
  model = create(service, service.open_session())
  body = json.loads(result(service, update(service, model, 1)))
  got = types.OptimStepResponse.model_validate(body).metrics
  assert got['optim/skipped'] == 1 and np.isnan(got['optim/grad_norm'])


def test_a_policy_is_opened_once(start, monkeypatch):
  service, opened = start(), []

  class Opened:
    def policy(self):
      return self

  def open_slowly(*args, **kwargs):
    opened.append(Opened())
    time.sleep(0.1)
    return opened[-1]

  monkeypatch.setattr(service, '_open', open_slowly)
  saved = training.Checkpoint('tinker://a/weights/b', None, None, None)
  with concurrent.futures.ThreadPoolExecutor() as pool:
    policies = {*pool.map(service._policy, [saved] * 2)}
  assert policies == {*opened} and len(opened) == 1
