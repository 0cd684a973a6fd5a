"""OpenAI's client against the server, and the command as a process."""

import os
import pathlib
import signal
import subprocess
import sys

import httpx
import pytest

from posttrain.serve import __main__ as program
from tests.serve import conftest

ROOT = pathlib.Path(__file__).resolve().parents[2]
MESSAGES = [{'role': 'user', 'content': 'hi'}]


@pytest.fixture(scope='module')
def client(served):
  openai = pytest.importorskip('openai')
  with openai.OpenAI(
    base_url=f'{served.url}/v1', api_key='none', max_retries=0
  ) as openai_client:
    yield openai_client


def test_openai_client_completes_and_streams(client):
  body = {'model': conftest.NAME, 'prompt': 'ab', 'max_tokens': 9, 'seed': 1}
  whole = client.completions.create(**body, logprobs=1, n=2)
  assert [choice.index for choice in whole.choices] == [0, 1]
  assert len(whole.choices[0].logprobs.token_logprobs) == 9
  assert whole.usage.completion_tokens == 18
  chunks = list(client.completions.create(**body, stream=True))
  text = ''.join(chunk.choices[0].text for chunk in chunks)
  assert text == whole.choices[0].text
  assert chunks[-1].choices[0].finish_reason == 'length'


def test_openai_client_chats_and_streams(client):
  body = {
    'model': conftest.NAME,
    'messages': MESSAGES,
    'seed': 1,
    'max_completion_tokens': 12,
  }
  whole = client.chat.completions.create(**body, logprobs=True, top_logprobs=2)
  (choice,) = whole.choices
  assert choice.message.role == 'assistant'
  assert len(choice.logprobs.content) == whole.usage.completion_tokens
  chunks = list(
    client.chat.completions.create(
      **body, stream=True, stream_options={'include_usage': True}
    )
  )
  assert chunks[0].choices[0].delta.role == 'assistant'
  text = ''.join(c.choices[0].delta.content or '' for c in chunks[:-1])
  assert text == choice.message.content
  assert chunks[-1].usage == whole.usage and not chunks[-1].choices


def test_openai_client_lists_models_and_raises(client, policy):
  import openai

  (model,) = client.models.list().data
  metadata = model.model_dump()
  assert model.id == conftest.NAME
  assert metadata['tokenizer'] == policy.renderer.fingerprint
  assert (metadata['max_model_len'], metadata['vocab_size']) == (96, 264)
  with pytest.raises(openai.BadRequestError, match='temperature must be 0'):
    client.completions.create(model=conftest.NAME, prompt='x', temperature=-1)
  with pytest.raises(openai.NotFoundError, match='must be one that is served'):
    client.chat.completions.create(model='other', messages=MESSAGES)


@pytest.mark.parametrize(
  ('argv', 'message'),
  [
    ([], '--checkpoint must be given'),
    (['--checkpoint=x', '--prot=1'], "got '--prot=1'"),
    (['--checkpoint=x', '--port=http'], '--port must be a whole number'),
    (['--checkpoint=x', '--port=70000'], 'at most 65535'),
    (['--checkpoint=x', '--slots=0'], '--slots must be at least 1: got 0'),
    (['--checkpoint=x', '--api_key_env=NO_SUCH'], "got 'NO_SUCH', which is"),
    (
      ['--checkpoint=x', '--host=0.0.0.0', '--port=0'],
      'where --host can be reached from other machines',
    ),
    (
      ['--checkpoint=x', '--no_auth', '--api_key_env=PATH'],
      '--no_auth must be left out',
    ),
    (['--checkpoint=/no/such', '--port=0'], "got '/no/such'"),
    (['--checkpoint=x', '--host=256.1.1.1'], '--host and --port must be free'),
  ],
)
def test_flag_errors_are_one_line_with_exit_code_2(
  capsys, monkeypatch, argv, message
):
  monkeypatch.setattr(signal, 'signal', lambda *_: None)
  assert program.main(argv) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith('error: ') and message in line


def test_missing_packages_are_named_with_the_pip_command(capsys, monkeypatch):
  monkeypatch.setattr(signal, 'signal', lambda *_: None)
  for name in ('app', 'starlette', 'uvicorn'):
    for module in [
      m for m in sys.modules if m in (f'posttrain.serve.{name}', name)
    ]:
      monkeypatch.delitem(sys.modules, module)
  import posttrain.serve

  monkeypatch.delattr(posttrain.serve, 'app', raising=False)
  monkeypatch.setitem(sys.modules, 'starlette', None)
  assert program.main(['--checkpoint=x', '--port=0']) == 2
  assert "pip install 'posttrain[serve]'" in capsys.readouterr().err


@pytest.mark.parametrize(
  ('kind', 'code'),
  [
    (signal.SIGTERM, 0),
    pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
  ],
)
def test_signal_ends_the_process_during_a_stream(folder, kind, code):
  with subprocess.Popen(
    [
      sys.executable,
      '-m',
      'posttrain.serve',
      f'--checkpoint={folder}',
      '--port=0',
      '--slots=2',
      '--max_model_len=4096',
      '--name=x',
    ],
    cwd=ROOT,
    env=os.environ,
    stdout=subprocess.PIPE,
    text=True,
  ) as process:
    try:
      url = process.stdout.readline().split()[-1]
      body = {
        'model': 'x',
        'prompt': [1, 2],
        'max_tokens': 4000,
        'ignore_eos': True,
        'stream': True,
      }
      with httpx.stream(
        'POST', f'{url}/completions', json=body, timeout=60
      ) as response:
        lines = response.iter_lines()
        assert next(lines).startswith('data: ')
        process.send_signal(kind)
        assert 'it shuts down' in ''.join(lines)
      assert process.wait(30) == code
    finally:
      process.kill()
