"""Tools of chats: prompts, calls and results, as in tool environments."""

import asyncio
import dataclasses
import json
import types as std

import pytest

from posttrain import types
from posttrain.chat import rendering, tokenizers
from posttrain.checkpoints import policies
from posttrain.rollout import episodes
from posttrain.serve import __main__ as program
from posttrain.serve import call, protocol, worker
from tests import fixtures
from tests.chat import test_real_templates as real
from tests.rollout import fakes
from tests.rollout import test_tool_turns as turns

folders = real.folders
TOOLS = list(turns.TOOLS.schemas)
USER = {'role': 'user', 'content': 'q'}
ARGUMENTS = {'a': 1, 'b': 2}
WRITTEN = {
  'plain': 'divide({"a": 1, "b": 2})',
  'hermes': '<tool_call>\n{"name": "divide", "arguments": {"a": 1, "b": 2}}\n'
  '</tool_call>',
  'llama3': '{"name": "divide", "parameters": {"a": 1, "b": 2}}',
}


class Scripted:
  """A worker whose policy writes given texts, some tokens at a time."""

  name, capacity, max_jobs, tool_format = 'tiny', 4096, 8, 'auto'

  def __init__(self, renderer=fixtures.RENDERER, texts=(), chunk=999):
    self._texts, self._chunk = list(texts), chunk
    model = dataclasses.replace(fixtures.MODEL, vocab_size=600)
    self.policy = policies.Policy(None, model, renderer, renderer.stop_ids, 9)

  def accept(self, jobs):
    for job in jobs:
      ids = [*self._texts.pop(0).encode(), self.policy.stop_ids[0]]
      ids = ids[: job.request.max_tokens]
      reason = 'eos' if ids[-1] == self.policy.stop_ids[0] else 'max_tokens'
      for i in range(0, len(ids), self._chunk if job.streamed else len(ids)):
        new = ids[i : i + self._chunk] if job.streamed else ids
        end = reason if i + len(new) == len(ids) else None
        job.notify(job, worker.NewTokens(new, [0.0] * len(new), end))

  def drop(self, jobs):
    pass


def chat(served, messages=(USER,), **body):
  """Returns the parsed request, and the response or its chunks."""
  body = {'model': 'tiny', 'messages': list(messages), **body}
  request = protocol.read(json.dumps(body).encode(), served, chat=True)

  async def respond():
    job = call.Call(request, served)
    if request.stream:
      return [chunk async for chunk in job.chunks()]
    return await job.finished()

  return request, asyncio.run(respond())


def message(response):
  (choice,) = response['choices']
  return choice['message'], choice['finish_reason']


@pytest.mark.parametrize(
  'name', ['built-in', 'gemma2', 'qwen2_5', 'qwen3', 'llama3_2']
)
def test_prompts_and_results_are_those_of_a_tool_environment(
  folders, name, monkeypatch
):
  renderer = fixtures.RENDERER
  if name != 'built-in':
    renderer = real.load(folders, name)
  eos = renderer.stop_ids[0]
  monkeypatch.setattr(fakes, 'EOS', eos)
  task = dataclasses.replace(
    turns.TASK, tools=dataclasses.replace(turns.TOOLS, format='auto')
  )
  style = renderer.with_tools(task.tools).style
  texts = [WRITTEN[style.format], 'Done.']
  # 1. The environment's episode.
  engine, env = fakes.Engine({1: texts}), turns.Calculator()
  spec = episodes.EpisodeSpec(1, env, task, 1.0, 200)
  (rollout,) = episodes.Driver(engine, renderer, 9000).run([spec])
  (sample,) = rollout.samples
  # 2. The client's turns.
  served = Scripted(renderer, texts)
  request, response = chat(served, tools=TOOLS)
  first, last = rollout.turns
  assert request.prompts[0].ids.tolist() == sample.ids[: first.start].tolist()
  answer, finish = message(response)
  (made,) = answer['tool_calls']
  assert (answer['content'], finish) == (None, 'tool_calls')
  assert json.loads(made['function']['arguments']) == ARGUMENTS
  result = {'role': 'tool', 'tool_call_id': made['id'], 'content': '0.5'}
  request, response = chat(served, (USER, answer, result), tools=TOOLS)
  assert request.prompts[0].ids.tolist() == sample.ids[: last.start].tolist()
  assert message(response)[0]['content'] == 'Done.'
  assert message(response)[1] == 'stop'


TEXTS = {
  'So it is 4, f(x) < 2 {x}': None,
  'Two: divide({"a": 1, "b": 2})': 'Two: ',
  'divide({"a": 1}) and {"name": "divide", "arguments": {"a": 2}}': '',
  '<think>divide({"a": 1})</think>It is 4.': None,
  'divide({"a": ': None,
  'dividend <tool_call>{"name": "divide"}</tool_call>': 'dividend ',
  # Names that the request has not are text, and so is the turn.
  'dividend <tool_call>{"name": "no", "arguments": {}}</tool_call>': None,
  'Use console.log({"a": 1}) here.': None,
  'log({"a": 1}) or divide({"a": 2})': None,
  # What was sent stays sent, whatever follows.
  'Say {"x": "</think>"} {1}': None,
  'A set {1, 2} or {"a": tru} {"b": 1}: divide({"a": 1})': (
    'A set {1, 2} or {"a": tru} {"b": 1}: '
  ),
  '<think>{"x": "b</think>So: divide({"a": 1})': '<think>{"x": "b</think>So: ',
  # Tags within JSON are text.
  'divide({"a": "<tool_call>divide()</tool_call>"})': '',
  'divide({"a": "see <tool_call> here"})': '',
}


@pytest.mark.parametrize('text', TEXTS)
@pytest.mark.parametrize('chunk', [1, 4, 999])
def test_a_stream_has_the_content_and_the_calls_of_the_response(text, chunk):
  served = Scripted(texts=[text] * 2, chunk=chunk)
  answer, finish = message(chat(served, tools=TOOLS)[1])
  content = text if TEXTS[text] is None else TEXTS[text]
  assert (answer['content'] or '') == content
  assert finish == ('stop' if TEXTS[text] is None else 'tool_calls')
  chunks = chat(served, tools=TOOLS, stream=True)[1]
  deltas = [x['choices'][0]['delta'] for x in chunks]
  assert ''.join(x.get('content', '') for x in deltas) == content
  calls = [call for x in deltas for call in x.get('tool_calls', ())]
  functions = [x['function'] for x in answer.get('tool_calls', ())]
  assert [x['function'] for x in calls] == functions
  assert [x['index'] for x in calls] == [*range(len(calls))]
  assert chunks[-1]['choices'][0]['finish_reason'] == finish


def test_calls_of_a_turn_that_is_cut_off_are_text():
  served = Scripted(texts=[WRITTEN['plain'] + ' so'])
  answer, finish = message(chat(served, tools=TOOLS, max_tokens=25)[1])
  assert finish == 'length' and 'tool_calls' not in answer
  assert answer['content'] == WRITTEN['plain'] + ' '


def test_options_of_tools():
  two = WRITTEN['plain'] * 2
  served = Scripted(texts=[two, two, two, 'x'])
  ids = {}
  for name, options, number in (
    ('auto', {'tools': TOOLS, 'tool_choice': 'auto'}, 2),
    ('one', {'tools': TOOLS, 'parallel_tool_calls': False}, 1),
    ('none', {'tools': TOOLS, 'tool_choice': 'none'}, 0),
    ('without', {'tools': []}, 0),
  ):
    request, response = chat(served, **options)
    ids[name] = request.prompts[0].ids.tolist()
    assert len(message(response)[0].get('tool_calls', ())) == number
  assert ids['auto'] == ids['none'] != ids['without']
  for options in (
    {'tool_choice': 'required'},
    {'tools': 'x'},
    {'tools': [{'type': 'function'}]},
    {'response_format': {'type': 'json_object'}},
    {'add_generation_prompt': False},
  ):
    with pytest.raises(protocol.Refused) as error:
      chat(served, **options)
    (field,) = options
    assert error.value.body['error']['param'] == field


def test_a_format_of_training_may_be_named():
  served = Scripted(texts=['So: ' + WRITTEN['hermes']])
  served.tool_format = 'hermes'
  answer, _ = message(chat(served, tools=TOOLS)[1])
  assert answer['content'] == 'So: ' and len(answer['tool_calls']) == 1
  result = {'role': 'tool', 'content': '0.5'}
  again, _ = chat(Scripted(texts=['x']), (USER, answer, result), tools=TOOLS)
  assert WRITTEN['plain'] in again.prompts[0].text
  served._texts = ['x']
  again, _ = chat(served, (USER, answer, result), tools=TOOLS)
  assert f'So: {WRITTEN["hermes"]}<|end|>' in again.prompts[0].text


def test_rows_with_tools_are_served_with_their_prompt(capsys):
  served = Scripted(texts=[WRITTEN['plain']])
  served.tool_format = 'text'
  request, response = chat(served, tools=TOOLS)
  described = types.Tools(tuple(TOOLS), 'text')
  renderer = fixtures.RENDERER.with_tools(described)
  expected = renderer.render((USER,), add_generation_prompt=True)
  assert request.prompts[0].text == expected.text
  assert message(response)[0]['content'] == WRITTEN['plain']
  called = {'tool_calls': [{'name': 'divide', 'arguments': ARGUMENTS}]}
  with pytest.raises(protocol.Refused, match='tool_calls must be'):
    chat(served, (USER, {'role': 'assistant', **called}, USER), tools=TOOLS)
  assert program.main(['--checkpoint=no', '--tool_format=xml']) == 2
  assert "invalid choice: 'xml'" in capsys.readouterr().err


def test_a_turn_at_the_end_is_continued():
  begun = {'role': 'assistant', 'content': 'Two: divide('}
  served = Scripted(texts=['{"a": 1})', 'x', 'x'])
  request, response = chat(served, (USER, begun), tools=TOOLS)
  assert request.prompts[0].text.endswith('<|assistant|>Two: divide(')
  answer, _ = message(response)
  assert answer['content'] is None and len(answer['tool_calls']) == 1
  options = {'continue_final_message': True, 'add_generation_prompt': False}
  request, _ = chat(served, (USER, begun), **options)
  assert request.prompts[0].text.endswith('<|assistant|>Two: divide(')
  request, _ = chat(served, (USER, begun), continue_final_message=False)
  assert request.prompts[0].text.endswith('<|end|><|assistant|>')


@pytest.mark.parametrize(
  ('content', 'written'),
  [('', ''), (None, ''), ('x', 'x\n'), ('x: ', 'x: '), ('x.', 'x.')],
)
def test_a_call_at_the_end_is_not_continued(content, written):
  function = {'name': 'divide', 'arguments': '{"a": 1, "b": 2}'}
  begun = {'role': 'assistant', 'content': content}
  begun['tool_calls'] = [{'type': 'function', 'function': function}]
  served = Scripted(texts=['Done.'])
  request, response = chat(served, (USER, begun), tools=TOOLS)
  text = f'<|assistant|>{written}{WRITTEN["plain"]}<|end|><|assistant|>'
  assert request.prompts[0].text.endswith(text)
  assert message(response)[0]['content'] == 'Done.'


def test_a_thought_that_the_prompt_opens_has_no_calls():
  renderer = rendering.Renderer(tokenizers.Bytes(), turns.OPEN)
  texts = [WRITTEN['plain'], f'hm</think>{WRITTEN["plain"]}']
  served = Scripted(renderer, texts)
  assert message(chat(served, tools=TOOLS)[1])[1] == 'stop'
  answer, finish = message(chat(served, tools=TOOLS)[1])
  assert (answer['content'], finish) == ('hm</think>', 'tool_calls')


def test_variables_of_a_template_are_those_of_the_request(folders):
  renderer, empty = real.load(folders, 'qwen3'), '</think>\n\n'
  served = Scripted(renderer, ['x', 'x'])
  request, _ = chat(served, tools=TOOLS)
  assert not request.prompts[0].text.endswith(empty)
  options = {'tools': TOOLS, 'chat_template_kwargs': {'enable_thinking': False}}
  request, _ = chat(served, **options)
  assert request.prompts[0].text.endswith(empty)
  assert 'Divides.' in request.prompts[0].text
  for value in ({'enable_thinkin': False}, [1]):
    with pytest.raises(protocol.Refused) as error:
      chat(served, chat_template_kwargs=value)
    assert error.value.body['error']['param'] == 'chat_template_kwargs'


def test_bytes_of_tokens_join_to_the_text(folders):
  text = 'Fünf € ▁ 五\n\x00'
  for renderer in (fixtures.RENDERER, real.load(folders, 'qwen3')):
    served = Scripted(renderer)
    ids = [*renderer.tokenizer.encode(text), renderer.tokenizer.eos_id]
    served.accept = lambda jobs, ids=ids: [
      job.notify(job, worker.NewTokens(ids, [0.0] * len(ids), 'eos'))
      for job in jobs
    ]
    _, response = chat(served, logprobs=True)
    entries = response['choices'][0]['logprobs']['content']
    assert bytes(i for x in entries for i in x['bytes']).decode() == text
    assert message(response)[0]['content'] == text


def test_bytes_of_a_vocabulary_with_byte_tokens():
  words = {5: '▁Hi', 6: '<0xE2>', 7: '<0x82>', 8: '<0xAC>', 9: '<eos>'}
  decoded = {5: 'Hi', 6: '\ufffd', 7: '\ufffd', 8: '\ufffd', 9: ''}
  tokenizer = std.SimpleNamespace(
    text=words.get, decode=lambda ids: decoded[ids[0]]
  )
  joined = b''.join(tokenizers.token_bytes(tokenizer, i) for i in words)
  assert joined.decode() == ' Hi€'


def test_stop_lists_may_be_long(post):
  stops = [f'<{i}>' for i in range(64)]
  post('chat/completions', messages=[USER], max_tokens=2, stop=stops)
  refused = post(
    'chat/completions', 400, messages=[USER], max_tokens=2, stop=[*stops, 'x']
  )
  assert refused['error']['param'] == 'stop'


def test_calls_are_streamed_as_events(served, monkeypatch):
  scripted = Scripted(texts=[f'Two: {WRITTEN["plain"]}'], chunk=3)
  monkeypatch.setattr(served.worker, 'accept', scripted.accept)
  monkeypatch.setattr(served.worker, 'capacity', 999)
  body = {'model': 'tiny', 'messages': [USER], 'tools': TOOLS, 'stream': True}
  body['max_tokens'] = 40
  response = served.client.post('/v1/chat/completions', json=body)
  *events, done = [x[6:] for x in response.text.split('\n\n') if x]
  assert done == '[DONE]'
  deltas = [json.loads(x)['choices'][0]['delta'] for x in events]
  assert ''.join(x.get('content', '') for x in deltas) == 'Two: '
  ((made,),) = [x['tool_calls'] for x in deltas if 'tool_calls' in x]
  assert made.keys() == {'index', 'id', 'type', 'function'}
  assert json.loads(made['function']['arguments']) == ARGUMENTS
