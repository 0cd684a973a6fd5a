"""A training service, as Tinker's SDK drives it. Needs the extra `tinker`."""

import concurrent.futures
import gc
import pathlib
import re
import signal
import socket
import subprocess
import sys

import httpx
import numpy as np
import pytest
import safetensors.numpy

pytest.importorskip('tinker')
import tinker
from tinker import types

# The SDK closes its connections with the process.
pytestmark = [
  pytest.mark.slow,
  pytest.mark.filterwarnings(
    'ignore::ResourceWarning', 'ignore::pytest.PytestUnraisableExceptionWarning'
  ),
]
NAME = 'Org/tiny'
IDS = [72, 117, 109, 97, 110, 58, 32, 49, 43, 49, 10, 65]
ADAM = types.AdamParams(learning_rate=1e-2)


class Server:
  """The service in a process of its own, always at one address."""

  def __init__(self, checkpoint, workdir):
    with socket.create_server(('127.0.0.1', 0)) as free:
      port = free.getsockname()[1]
    self.url = f'http://127.0.0.1:{port}'
    self.command = [
      sys.executable,
      '-m',
      'posttrain.serve',
      '--train',
      f'--checkpoint={checkpoint}',
      f'--workdir={workdir}',
      f'--served_name={NAME}',
      f'--port={port}',
      '--max_model_len=64',
      '--slots=4',
    ]
    self.start()

  def start(self):
    self.process = subprocess.Popen(
      self.command, stdout=subprocess.PIPE, text=True
    )
    assert self.process.stdout.readline().startswith('training ')

  def kill(self):
    """Kills the process; the next one goes on where it was."""
    self.process.send_signal(signal.SIGKILL)
    self.process.wait()
    self.process.stdout.close()
    self.start()

  def stop(self):
    self.process.terminate()
    self.process.wait()
    self.process.stdout.close()


@pytest.fixture
def start(folder, tmp_path, monkeypatch):
  monkeypatch.setenv('TINKER_API_KEY', 'tml-any')
  monkeypatch.setenv('TINKER_TELEMETRY', '0')
  servers = []

  def run(name='service'):
    servers.append(Server(folder, tmp_path / name))
    return servers[-1]

  yield run
  for server in servers:
    server.stop()
  gc.collect()  # the SDK's connections, while their warnings are ignored


def datum(ids=IDS, **arrays):
  arrays = arrays or {'weights': [1.0] * (len(ids) - 1)}
  return types.Datum(
    model_input=types.ModelInput.from_ints(ids[:-1]),
    loss_fn_inputs={'target_tokens': ids[1:], **arrays},
  )


def prompt(ids=IDS):
  return types.ModelInput.from_ints(ids)


def logprobs(output):
  return [x['logprobs'].to_numpy() for x in output.loss_fn_outputs]


def train(server, disturb=lambda: None, seed=None):
  """Trains and samples; returns all numbers. `disturb` is called 4 times."""
  service = tinker.ServiceClient(base_url=server.url)
  client = service.create_lora_training_client(NAME, rank=4, seed=seed).result()
  numbers = []

  def step(between=lambda: None):
    gradient = client.forward_backward(
      [datum(), datum(IDS[3:])], 'cross_entropy'
    )
    numbers.extend(logprobs(gradient.result()))
    between()
    numbers.append(sorted(client.optim_step(ADAM).result().metrics.items()))

  step()
  step(disturb)
  saved = client.save_state('two').result().path
  step(disturb)
  sampler = client.save_weights_and_get_sampling_client().result()
  params = types.SamplingParams(max_tokens=40, seed=seed)
  futures = [sampler.sample(prompt(IDS[: 5 + i]), 2, params) for i in range(6)]
  disturb()
  for future in futures:
    for sequence in future.result().sequences:
      numbers += [sequence.tokens_np, sequence.logprobs_np]
  step()
  again = service.create_training_client_from_state_with_optimizer(saved)
  again = again.result()
  tinker.RestClient(base_url=server.url).delete_checkpoint_from_tinker_path(
    saved
  ).result()
  step()
  client.save_state('five').result()
  disturb()
  forward = again.forward([datum()], 'cross_entropy').result()
  numbers.extend(logprobs(forward))
  service.close('success').result()
  return numbers


def test_killed(start):
  """Between gradient and update, and while it samples: the same bits."""
  whole = train(start('whole'))
  server = start('killed')
  killed = train(server, server.kill)
  check_equal(whole, killed)


def test_another_name_is_refused(start):
  """Not all models of the folder would be found."""
  server = start()
  service = tinker.ServiceClient(base_url=server.url)
  service.create_lora_training_client(NAME, rank=4).result()
  server.process.kill()
  server.process.wait()
  process = subprocess.run(
    [*server.command, '--served_name=Org/other'],
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert process.returncode == 2 and '--workdir' in process.stderr


def test_clients_do_not_mix(start):
  server = start()
  alone = train(server, seed=7)
  with concurrent.futures.ThreadPoolExecutor() as pool:
    together = [*pool.map(lambda x: train(server, seed=x), (7, 8, 9))]
  check_equal(alone, together[0])
  assert not np.array_equal(alone[-1], together[1][-1])


def test_all_weights_and_exports(start):
  url = start().url
  service = tinker.ServiceClient(base_url=url)
  rest = tinker.RestClient(base_url=url)
  full = service.create_lora_training_client(f'{NAME}:full', rank=4).result()
  assert not full.get_info().is_lora
  with pytest.raises(tinker.UnprocessableEntityError, match='LoRA'):
    full.save_weights_external('adapter').result()
  client = service.create_lora_training_client(NAME, rank=4).result()
  base = service.create_sampling_client(base_model=NAME).result()
  for model in (full, client):
    before = base.compute_logprobs(prompt()).result()
    [forward] = logprobs(model.forward([datum()], 'cross_entropy').result())
    np.testing.assert_allclose(forward, before[1:], rtol=1e-5)
    model.forward_backward([datum()], 'cross_entropy').result()
    model.optim_step(ADAM).result()
    saved = model.save_weights_for_sampler('one').result().path
    sampler = service.create_sampling_client(model_path=saved).result()
    [forward] = logprobs(model.forward([datum()], 'cross_entropy').result())
    after = sampler.compute_logprobs(prompt()).result()
    np.testing.assert_allclose(forward, after[1:], rtol=1e-5)
    assert not np.allclose(after[1:], before[1:], rtol=1e-2)
    drawn = sampler.sample(prompt(), 1, types.SamplingParams(max_tokens=9))
    [drawn] = drawn.result().sequences
    whole = sampler.compute_logprobs(prompt(IDS + drawn.tokens)).result()
    np.testing.assert_allclose(drawn.logprobs, whole[len(IDS) :], rtol=1e-5)
  path = client.save_weights_external('adapter').result().path
  urls = rest.get_external_weights_urls(path).result().urls
  assert set(urls) == {'adapter_config.json', 'adapter_model.safetensors'}
  arrays = safetensors.numpy.load(
    httpx.get(urls['adapter_model.safetensors']).content
  )
  assert all(4 in x.shape for x in arrays.values())
  names = rest.list_checkpoints(client.model_id).result().checkpoints
  assert [x.checkpoint_id for x in names] == [
    'sampler_weights/one',
    'external_weights/adapter',
  ]
  rest.delete_checkpoint_from_tinker_path(saved).result()
  with pytest.raises(tinker.NotFoundError):
    service.create_sampling_client(model_path=saved).result()
  client.forward_backward([datum()], 'cross_entropy').result()
  client.optim_step(ADAM).result()
  assert client.save_weights_for_sampler('one').result().path == saved
  sampler = service.create_sampling_client(model_path=saved).result()
  drawn = sampler.sample(prompt(), 1, types.SamplingParams(max_tokens=9))
  [drawn] = drawn.result().sequences
  whole = sampler.compute_logprobs(prompt(IDS + drawn.tokens)).result()
  np.testing.assert_allclose(drawn.logprobs, whole[len(IDS) :], rtol=1e-5)


def test_refusals(start):
  """A malformed request holds no later one up; a late error is a future's."""
  url = start().url
  service = tinker.ServiceClient(base_url=url)
  client = service.create_lora_training_client(NAME, rank=4).result()
  with pytest.raises(tinker.UnprocessableEntityError, match='loss must be'):
    client.forward_backward([datum()], 'gspo').result()
  client.save_state('one').result()
  with pytest.raises(tinker.RequestFailedError, match='exists') as failed:
    client.save_state('one').result()
  assert failed.value.category == types.RequestErrorCategory.User
  with pytest.raises(tinker.NotFoundError):
    service.create_training_client_from_state('tinker://a/weights/b').result()
  for base, optimizer in (
    ('Org/other', None),
    (NAME, types.DimuonOptimizerConfig()),
  ):
    with pytest.raises(tinker.UnprocessableEntityError):
      service.create_lora_training_client(base, optimizer=optimizer).result()
  client.optim_step(ADAM).result()
  service.close('success').result()
  reply = httpx.post(
    f'{url}/api/v1/optim_step',
    json={'model_id': client.model_id, 'adam_params': {}, 'seq_id': 9},
  )
  assert reply.status_code == 410


def test_the_loop_of_the_page_and_losses_at_the_client(
  start, folder, tmp_path, monkeypatch, capsys
):
  pytest.importorskip('torch')
  (tmp_path / NAME).parent.mkdir()
  (tmp_path / NAME).symlink_to(folder)  # where the SDK finds the tokenizer
  monkeypatch.chdir(tmp_path)
  page = pathlib.Path(__file__).parents[2] / 'docs' / 'training_service.md'
  (block,) = re.findall(r'```python\n(.*?)```', page.read_text(), re.S)
  block = block.replace('http://127.0.0.1:8000', start().url)
  loop = {}
  exec(block.replace('Qwen/Qwen3-8B-Base', NAME), loop)
  losses = [float(x) for x in capsys.readouterr().out.splitlines()[:10]]
  assert losses[-1] < losses[0]
  client, values = loop['client'], []

  def minus_logprobs(data, rows):
    return sum(-x.sum() for x in rows), {}

  for call, loss in (
    (client.forward_backward, 'cross_entropy'),
    (client.forward_backward_custom, minus_logprobs),
  ):
    gradient = call([datum(), datum(IDS[3:])], loss).result()
    update = client.optim_step(types.AdamParams(learning_rate=0.0)).result()
    norm = update.metrics['optim/grad_norm']
    values.append([gradient.metrics['loss:sum'], norm])
  np.testing.assert_allclose(*values, rtol=1e-5)


def check_equal(numbers, others):
  assert len(numbers) == len(others)
  for x, y in zip(numbers, others, strict=True):
    np.testing.assert_array_equal(x, y)
