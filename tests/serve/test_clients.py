"""OpenAI's client against the server, and the command as a process."""

import pathlib
import signal
import subprocess
import sys

import httpx
import pytest

from posttrain.serve import __main__ as program
from tests.serve import conftest, test_tools

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


def test_openai_client_calls_tools(client, served, monkeypatch):
  text = f'Two: {test_tools.WRITTEN["plain"]}'
  scripted = test_tools.Scripted(texts=[text, 'Done.', text, text], chunk=3)
  monkeypatch.setattr(served.worker, 'accept', scripted.accept)
  monkeypatch.setattr(served.worker, 'capacity', 999)
  body = {'model': conftest.NAME, 'tools': test_tools.TOOLS, 'max_tokens': 40}
  whole = client.chat.completions.create(**body, messages=MESSAGES)
  (choice,) = whole.choices
  (made,) = choice.message.tool_calls
  assert choice.finish_reason == 'tool_calls'
  assert (choice.message.content, made.function.name) == ('Two: ', 'divide')
  result = {'role': 'tool', 'tool_call_id': made.id, 'content': '0.5'}
  messages = [*MESSAGES, choice.message, result]
  last = client.chat.completions.create(**body, messages=messages)
  assert last.choices[0].message.content == 'Done.'
  deltas = [
    x.choices[0].delta
    for x in client.chat.completions.create(
      **body, messages=MESSAGES, stream=True
    )
  ]
  assert ''.join(x.content or '' for x in deltas) == 'Two: '
  calls = [call for x in deltas for call in x.tool_calls or ()]
  functions = [x.function.model_dump() for x in calls]
  assert functions == [made.function.model_dump()]
  with client.chat.completions.stream(**body, messages=MESSAGES) as stream:
    events = [x.type for x in stream]
  assert 'tool_calls.function.arguments.done' in events
  assert 'content.done' in events


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
    (['--sampler'], 'got both'),
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
