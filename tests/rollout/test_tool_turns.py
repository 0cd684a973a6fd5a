"""Turns that call tools: their results, errors and counts."""

import dataclasses

import pytest

from posttrain import schema, types
from posttrain.chat import rendering, tokenizers, tool_calls
from posttrain.data import sources
from posttrain.envs import base, tools
from posttrain.metrics import statistics
from posttrain.rollout import env_calls, episodes, pairing, samplers
from tests.chat import test_real_templates as real
from tests.rollout import fakes

folders = real.folders
HERMES = tool_calls.Style('hermes', 'tool')


def divide(a: int, b: int = 1) -> float:
  """Divides."""
  return a / b


TOOLS = tools.of([divide], 'hermes')
PROMPT = ({'role': 'user', 'content': 'q'},)
TASK = types.Task('t', 'calculator', PROMPT, tools=TOOLS)
BARE = types.Task('t', 'calculator', PROMPT)


class Calculator(base.Env):
  name, max_turns = 'calculator', 4

  def __init__(self, call=divide):
    self.call, self.texts = call, []

  def source(self, split, seed):
    return sources.Shuffled([TASK], seed)

  def make(self, task):
    return Episode(self)


class Episode:
  def __init__(self, env, prompt=PROMPT):
    self._env, self._prompt = env, prompt

  def reset(self):
    return self._prompt

  def call(self, name, arguments):
    assert name == 'divide'
    return self._env.call(**arguments)

  def step(self, text, truncated):
    self._env.texts.append((text, truncated))
    return types.StepOut(reward=1.0)

  def grade(self):
    return types.Score(1.0, metrics={'own': 3.0})

  def close(self):
    pass


def test_a_tool_gets_the_integers_of_its_schema():
  got = []
  episode = Episode(Calculator(lambda **arguments: got.append(arguments)))
  played = env_calls.ToolTurns(TOOLS).play(
    episode, call('{"a": 6.0, "b": 2}'), False, HERMES
  )
  assert repr(got) == "[{'a': 6, 'b': 2}]" and len(played) == 1


def call(arguments, name='divide'):
  return (
    f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'
  )


def run(texts, env=None, task=TASK, renderer=fakes.RENDERER):
  """Returns the rollout of a scripted policy, and the engine's requests."""
  engine, env = fakes.Engine({1: texts}), env or Calculator()
  spec = episodes.EpisodeSpec(1, env, task, 1.0, 200)
  (rollout,) = episodes.Driver(engine, renderer, 9000).run([spec])
  return rollout, engine


def replies(rollout):
  return [m['content'] for m in rollout.messages if m['role'] == 'tool']


def test_an_episode_of_calls_and_an_answer():
  env = Calculator()
  texts = [
    'Two: ' + call('{"a": 1, "b": 2}') + call('{"a": 8}'),
    call('{"a": 1, "b": "2"}'),
    'It is 0.5.',
  ]
  rollout, engine = run(texts, env)
  assert replies(rollout) == [
    '0.5',
    '8.0',
    "error: b of divide must be integer: got '2'",
  ]
  assert env.texts == [('It is 0.5.', False)]
  assert rollout.stop_reason == 'env_done' and rollout.score.reward == 1
  assert rollout.score.metrics == {
    'own': 3,
    'calls': 3,
    'failures': 1,
    'malformed': 1 / 3,
  }
  # The policy was told, and its turns are the tokens that it has sampled.
  (sample,) = rollout.samples
  prompt = bytes(x for x in engine.requests[0].ids if x < 256).decode()
  assert '- divide(a: integer, b?: integer): Divides.' in prompt
  sampled = fakes.RENDERER.tokenizer.decode(sample.ids[sample.mask].tolist())
  assert sampled == ''.join(texts)


def test_the_result_of_an_asynchronous_tool_is_awaited():
  async def later(a, b=1):
    return divide(a, b)

  texts = [call('{"a": 1, "b": 2}'), call('{"a": 1, "b": 0}'), 'done']
  rollout, _ = run(texts, Calculator(later))
  first, second = replies(rollout)
  assert first == '0.5' and second.startswith('error: ZeroDivisionError')


def test_an_episode_under_a_models_template(folders, monkeypatch):
  """One sample, in which the sampled ids are as they were."""
  chat = real.load(folders, 'qwen3')
  eos = chat.tokenizer.eos_id
  monkeypatch.setattr(fakes, 'EOS', eos)
  task = dataclasses.replace(TASK, tools=tools.of([divide]))
  texts = ['<think>\nhm\n</think>\n\n' + call('{"a": 1, "b": 2}'), 'Done.']
  rollout, _ = run(texts, task=task, renderer=chat)
  (sample,) = rollout.samples
  sampled = [x for text in texts for x in (*text.encode(), eos)]
  assert sample.ids[sample.mask].tolist() == sampled
  first, last = rollout.turns
  between = sample.ids[first.start + first.length : last.start]
  assert real.text(chat, between).strip() == (
    '<|im_start|>user\n<tool_response>\n0.5\n</tool_response><|im_end|>\n'
    '<|im_start|>assistant'
  )
  assert 'Divides.' in real.text(chat, sample.ids[: first.start])


@pytest.mark.parametrize(
  ('text', 'words'),
  [
    (call('{"a": 1, "b": 0}'), 'error: ZeroDivisionError: '),
    (call('{"a": 1'), 'error: a call must be one that can be read'),
    (call('{}', 'look'), "error: the tool must be one of ['divide']"),
  ],
)
def test_an_error_goes_back_to_the_policy(text, words):
  rollout, _ = run([text, 'Done.'])
  (reply,) = replies(rollout)
  assert reply.startswith(words) and '\n' not in reply
  malformed = 0 if 'ZeroDivision' in words else 0.5
  expected = {'calls': 1, 'failures': 1, 'malformed': malformed}
  assert expected.items() <= rollout.score.metrics.items()


@pytest.mark.parametrize('format', ['hermes', 'llama3'])
def test_complete_calls_of_a_truncated_turn_are_not_made(format):
  written = {
    'hermes': call('{"a": 8}') + 'so',
    'llama3': '{"name": "divide", "parameters": {"a": 8}}; {"na',
  }
  made = []
  turns = env_calls.ToolTurns(TOOLS)
  episode = Episode(Calculator(lambda **arguments: made.append(arguments)))
  style = tool_calls.Style(format, 'tool')
  messages = turns.play(episode, written[format], True, style)
  assert messages[0]['content'].startswith('error: the turn was cut off')
  assert not made
  count = 1 + (format == 'llama3')
  assert turns.metrics()['failures'] == count
  # The same text, whole; and a truncated turn without a call is an answer.
  turns.play(episode, written[format], False, style)
  assert made == [{'a': 8}]
  assert turns.play(episode, 'So it is', True, style) == ()


def test_results_in_the_role_user_are_one_message():
  turns = env_calls.ToolTurns(TOOLS)
  text = call('{"a": 1}') + call('{}')
  style = tool_calls.Style('hermes', 'user')
  (message,) = turns.play(Episode(Calculator()), text, False, style)
  assert message['role'] == 'user'
  assert message['content'].startswith('1.0\nerror: divide must have the arg')


OPEN = """{% for m in messages %}<|{{ m.role }}|>
{%- if m.role == 'assistant' %}<think>{% endif %}{{ m.content }}<|end|>
{%- endfor %}{% if add_generation_prompt %}<|assistant|><think>{% endif %}"""


@pytest.mark.parametrize('begun', ['', 'So '])
def test_a_thought_that_the_prompt_opens_has_no_calls(begun):
  env, text = Calculator(), call('{"a": 1}')
  renderer = rendering.Renderer(tokenizers.Bytes(), OPEN)
  prompt = (*PROMPT, {'role': 'assistant', 'content': begun})[: 1 + bool(begun)]
  env.make = lambda task: Episode(env, prompt)
  task = dataclasses.replace(TASK, prompt=prompt)
  rollout, _ = run([text], env, task, renderer)
  assert env.texts == [(f'<think>{begun}{text}', False)]
  assert rollout.messages[-1]['content'] == begun + text
  rollout, _ = run([f'</think>{text}', 'Done.'], env, task, renderer)
  assert replies(rollout) == ['1.0']


def test_an_answer_that_the_prompt_begins_is_continued():
  """The environment gets the whole turn; its sampled tokens train."""
  begun = {'role': 'assistant', 'content': '<tool_call>{"name": '}
  prompt, env = (*PROMPT, begun), Calculator()
  env.make = lambda task: Episode(env, prompt)
  rest = '"divide", "arguments": {"a": 8}}</tool_call>'
  task = dataclasses.replace(TASK, prompt=prompt)
  rollout, engine = run([rest, 'Eight.'], env, task)
  whole = {**begun, 'content': begun['content'] + rest}
  assert replies(rollout) == ['8.0'] and rollout.prompt == PROMPT
  assert rollout.completion_messages[0] == whole
  (sample,) = rollout.samples
  assert fakes.RENDERER.tokenizer.decode(sample.ids[sample.mask]) == (
    f'{rest}Eight.'
  )
  assert fakes.RENDERER.tokenizer.decode(engine.requests[0].ids).endswith(
    begun['content']
  )
  # The same from rows of data.
  demonstration = ({**begun, 'content': rest}, *rollout.messages[2:])
  task = dataclasses.replace(task, tools=TOOLS, demonstration=demonstration)
  sampler = samplers.DatasetSampler(schema.Dataset(), env, fakes.RENDERER, 999)
  replayed = sampler.rollout(task, 0)
  assert replayed.messages == rollout.messages
  assert replayed.samples[0].mask.tolist() == sample.mask.tolist()
  assert replayed.samples[0].ids.tolist() == sample.ids.tolist()


def test_without_tools_a_turn_is_a_text_and_nothing_is_counted():
  env, text = Calculator(), call('{"a": 1}')
  rollout, _ = run([text], env, task=BARE)
  assert env.texts == [(text, False)] and rollout.score.metrics == {'own': 3}
  assert 'malformed' not in statistics.summarize([rollout])


def test_samplers_check_prompts_with_their_tools():
  """So a prompt is too long because of its tools."""
  env = Calculator()
  cfg = schema.Policy(max_tokens=8)
  own = samplers.ModelSampler(cfg, env, fakes.RENDERER, 30)
  assert own.measure(BARE).needed <= 30 < own.measure(TASK).needed


def test_pairs_need_tasks_without_tools():
  with pytest.raises(
    ValueError, match='calculator.env must have tasks without'
  ):
    pairing.first_tasks(Calculator(), schema.MadePairs(), 0, 9.0)
