"""OpenAI's client against the server, and the command as a process."""

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


def test_openai_client_chats_and_streams(client):
  body = {'model': conftest.NAME, 'messages': MESSAGES, 'seed': 1}
  body['max_completion_tokens'] = 12
  whole = client.chat.completions.create(**body, logprobs=True, top_logprobs=2)
  (choice,) = whole.choices
  assert choice.message.role == 'assistant'
  assert len(choice.logprobs.content) == whole.usage.completion_tokens
  assert {len(x.top_logprobs) for x in choice.logprobs.content} == {2}
  *chunks, last = client.chat.completions.create(
    **body, stream=True, stream_options={'include_usage': True}
  )
  assert chunks[0].choices[0].delta.role == 'assistant'
  text = ''.join(c.choices[0].delta.content or '' for c in chunks)
  assert text == choice.message.content
  assert last.usage == whole.usage and not last.choices


def test_openai_client_lists_models_and_raises(client, policy):
  import openai

  (model,) = client.models.list().data
  metadata = model.model_dump()
  assert model.id == conftest.NAME
  assert metadata['tokenizer'] == policy.renderer.fingerprint
  assert (metadata['max_model_len'], metadata['vocab_size']) == (96, 264)
  with pytest.raises(openai.BadRequestError, match='temperature'):
    client.completions.create(model=conftest.NAME, prompt='x', temperature=-1)


@pytest.mark.parametrize(
  ('argv', 'message'),
  [
    ([], '--checkpoint'),
    (['--prot=1'], "got '--prot=1'"),
    (['--api_key_env=NO_SUCH'], "got 'NO_SUCH'"),
    (['--host=0.0.0.0', '--port=0'], '--host'),
    (['--port=0'], "got 'x'"),
  ],
)
def test_flag_errors_are_one_line_with_exit_code_2(
  capsys, monkeypatch, argv, message
):
  monkeypatch.setattr(signal, 'signal', lambda *_: None)
  assert program.main(argv and ['--checkpoint=x', *argv]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith('error: ') and message in line


def test_missing_packages_are_named_with_the_pip_command(capsys, monkeypatch):
  import posttrain.serve

  monkeypatch.setattr(signal, 'signal', lambda *_: None)
  monkeypatch.delattr(posttrain.serve, 'app', raising=False)
  monkeypatch.delitem(sys.modules, 'posttrain.serve.app', raising=False)
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
  words = [f'--checkpoint={folder}', '--port=0', '--max_model_len=4096']
  with subprocess.Popen(
    [sys.executable, '-m', 'posttrain.serve', *words],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    text=True,
  ) as process:
    try:
      url = process.stdout.readline().split()[-1]
      body = {'model': conftest.NAME, 'prompt': [1, 2], 'max_tokens': 4000}
      body |= {'ignore_eos': True, 'stream': True}
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
