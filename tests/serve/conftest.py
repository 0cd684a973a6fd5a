"""Fixtures of a served policy: a tiny random model, exported and loaded."""

import contextlib
import pathlib
import threading
import types

import httpx
import jax
import pytest

from posttrain.chat import rendering
from posttrain.checkpoints import policies
from posttrain.models import hf
from tests import fixtures
from tests.decode import helpers

pytest.importorskip('starlette')
pytest.importorskip('uvicorn')

SLOTS, CAPACITY, MAX_JOBS = 4, 96, 72
NAME = 'tiny'


@pytest.fixture(scope='session')
def folder(tmp_path_factory):
  path = pathlib.Path(tmp_path_factory.mktemp('served')) / NAME
  params = jax.tree.map(lambda x: x, helpers.params(fixtures.MODEL))
  hf.save(params, fixtures.MODEL, path, dtype='float32')
  rendering.write(fixtures.RENDERER, path)
  return path


@pytest.fixture(scope='session')
def policy(folder):
  return policies.load(str(folder))


@pytest.fixture(scope='session')
def start(policy):
  """Returns a context manager that runs a server in a thread."""
  from posttrain.serve import app, worker

  @contextlib.contextmanager
  def run(model=policy, max_jobs=MAX_JOBS, api_key=None, max_body_bytes=2**16):
    owner = worker.Worker(
      model, NAME, slots=SLOTS, capacity=CAPACITY, chunk=4, max_jobs=max_jobs
    )
    owner.start()
    listening = app.bind('127.0.0.1', 0)
    application = app.make(
      owner,
      api_key=api_key,
      hosts=app.own_hosts(listening),
      max_body_bytes=max_body_bytes,
    )
    server = app.Server(application, owner)
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    url = app.address(listening)
    with httpx.Client(base_url=url, timeout=120) as client:
      yield types.SimpleNamespace(
        url=url, worker=owner, client=client, server=server
      )
    server.leave()
    thread.join()
    listening.close()
    assert owner.stop(60)

  return run


@pytest.fixture(scope='session')
def served(start):
  with start() as server:
    yield server


@pytest.fixture
def post(served):
  """Returns a function that posts a request and returns the JSON object."""

  def send(path='completions', status=200, **body):
    body = {'model': NAME, **body}
    response = served.client.post(f'/v1/{path}', json=body)
    assert response.status_code == status, response.text
    return response.json()

  return send
