"""One server for all: a tiny random model, published, loaded, and served."""

import contextlib
import pathlib
import threading
import types

import httpx
import jax
import pytest

from posttrain.chat import pretrained
from posttrain.checkpoints import policies
from posttrain.models import hf
from tests import fixtures
from tests.decode import helpers

pytest.importorskip('starlette')
pytest.importorskip('uvicorn')

SLOTS, CAPACITY, ROOM = 4, 96, 72
NAME = 'tiny'


@pytest.fixture(scope='session')
def folder(tmp_path_factory):
  path = pathlib.Path(tmp_path_factory.mktemp('served')) / NAME
  params = jax.tree.map(lambda x: x, helpers.params(fixtures.MODEL))
  hf.save(params, fixtures.MODEL, path, dtype='float32')
  pretrained.write(fixtures.RENDERER, path)
  return path


@pytest.fixture(scope='session')
def policy(folder):
  return policies.load(str(folder))


@pytest.fixture(scope='session')
def start(policy):
  """Starts a server in a thread; a context."""
  from posttrain.serve import app, server, texts, worker

  @contextlib.contextmanager
  def run(*, room=ROOM, api_key=None, max_body_bytes=2**16):
    owner = worker.Worker(
      policy, slots=SLOTS, capacity=CAPACITY, chunk=4, room=room
    )
    owner.start()
    made = app.make(
      texts.Served(policy, NAME, CAPACITY, room),
      owner,
      api_key=api_key,
      max_body_bytes=max_body_bytes,
    )
    listening = server.bind('127.0.0.1', 0)
    serving = server.Server(made, owner)
    thread = threading.Thread(target=serving.serve_on, args=(listening,))
    thread.start()
    url = server.address(listening)
    with httpx.Client(base_url=url, timeout=120) as client:
      yield types.SimpleNamespace(url=url, worker=owner, client=client)
    serving.leave()
    thread.join()
    listening.close()
    assert owner.stop(60)

  return run


@pytest.fixture(scope='session')
def served(start):
  with start() as one:
    yield one


@pytest.fixture
def post(served):
  """Sends a request; returns the answer's object."""

  def send(path='completions', status=200, **body):
    body = {'model': NAME, **body}
    answer = served.client.post(f'/v1/{path}', json=body)
    assert answer.status_code == status, answer.text
    return answer.json()

  return send
