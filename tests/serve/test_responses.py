"""Responses of the server against the engine and the scorer in process."""

import concurrent.futures
import json
import time

import numpy as np
import pytest

from experiments.trials import base
from posttrain import compilation, generate, scoring
from posttrain.decode import engine as engines
from posttrain.decode import requests
from tests import fixtures
from tests.serve import conftest

MESSAGES = [{'role': 'user', 'content': 'What is 1 + 2?'}]
IDS = [72, 101, 108, 108, 111, 257, 0, 255]
SAMPLED = {'temperature': 1.3, 'return_token_ids': True}


def scored(policy, ids, temperature):
  scorer = scoring.Scorer(policy.model, 1, 96)
  (logprobs,) = scorer(
    policy.params, [np.array(ids)], [np.full(len(ids), temperature)]
  )
  return logprobs


def token_ids(response):
  return [choice['token_ids'] for choice in response['choices']]


# --- logprobs -----------------------------------------------------------------


@pytest.mark.parametrize('temperature', [1.0, 0.7, 0])
def test_prompt_logprobs_equal_the_scorer_at_the_temperature(
  post, policy, temperature
):
  expected = scored(policy, IDS, temperature or 1.0)[1:]
  body = {'prompt': IDS, 'temperature': temperature, 'max_tokens': 0}
  for logprobs in (0, 3):
    (choice,) = post(**body, echo=True, logprobs=logprobs)['choices']
    first, *rest = choice['logprobs']['token_logprobs']
    assert first is None and choice['finish_reason'] == 'length'
    np.testing.assert_allclose(rest, expected, rtol=0, atol=1e-5)
  (choice,) = post(**body, prompt_logprobs=0)['choices']
  first, *rest = choice['prompt_logprobs']
  assert first is None and [list(entry) for entry in rest] == [
    [str(i)] for i in IDS[1:]
  ]
  logprobs = [
    entry[str(i)]['logprob'] for entry, i in zip(rest, IDS[1:], strict=True)
  ]
  np.testing.assert_allclose(logprobs, expected, rtol=0, atol=1e-5)


def test_ranks_and_alternatives_match_the_full_distribution(post, policy):
  """Scores each token of the vocabulary after the same prompt."""
  size = policy.model.vocab_size
  scorer = scoring.Scorer(policy.model, 8, 96)
  each = scorer(
    policy.params,
    [np.array([*IDS, i]) for i in range(size)],
    [np.ones(len(IDS) + 1)] * size,
  )
  last_logprobs = np.array([logprobs[-1] for logprobs in each])
  order = np.argsort(-last_logprobs)
  token = int(order[20])
  (choice,) = post(prompt=[*IDS, token], max_tokens=0, prompt_logprobs=5)[
    'choices'
  ]
  last = choice['prompt_logprobs'][-1]
  assert [int(i) for i in last] == [*order[:5], token]
  assert [entry['rank'] for entry in last.values()] == [1, 2, 3, 4, 5, 21]
  np.testing.assert_allclose(
    [entry['logprob'] for entry in last.values()],
    last_logprobs[[*order[:5], token]],
    rtol=0,
    atol=1e-5,
  )
  decode = fixtures.RENDERER.tokenizer.decode
  assert last[str(token)]['decoded_token'] in (
    decode([token]),
    fixtures.RENDERER.tokenizer.text(256),
  )


def test_sampled_tokens_have_logprobs_and_alternatives(post, policy):
  body = {'prompt': IDS, 'max_tokens': 10, 'seed': 3, **SAMPLED}
  (choice,) = post(**body, logprobs=2, return_tokens_as_token_ids=True)[
    'choices'
  ]
  ids = choice['token_ids']
  expected = scored(policy, IDS + ids, 1.3)[len(IDS) :]
  logprobs = choice['logprobs']
  np.testing.assert_allclose(
    logprobs['token_logprobs'], expected, rtol=0, atol=1e-4
  )
  assert logprobs['tokens'] == [f'token_id:{i}' for i in ids]
  for name, own, top in zip(
    logprobs['tokens'],
    logprobs['token_logprobs'],
    logprobs['top_logprobs'],
    strict=True,
  ):
    assert top[name] == own and len(top) in (2, 3)
    assert max(top.values()) >= own
  (plain,) = post(**body)['choices']
  assert plain['token_ids'] == ids and plain['logprobs'] is None
  chat = post(
    'chat/completions',
    messages=MESSAGES,
    max_tokens=5,
    seed=1,
    logprobs=True,
    top_logprobs=2,
    **SAMPLED,
  )
  (choice,) = chat['choices']
  prompt = chat['prompt_token_ids']
  assert (
    prompt
    == fixtures.RENDERER.render(
      MESSAGES, add_generation_prompt=True
    ).ids.tolist()
  )
  ids = prompt + choice['token_ids']
  expected = scored(policy, ids, 1.3)[len(prompt) :]
  content = choice['logprobs']['content']
  logprobs = [entry['logprob'] for entry in content]
  np.testing.assert_allclose(logprobs, expected, rtol=0, atol=1e-4)
  assert all(len(entry['top_logprobs']) == 2 for entry in content)


def test_lengths_of_a_bucket_share_a_program(post):
  for body in ({'prompt_logprobs': 0}, {'echo': True, 'logprobs': 0}):
    post(prompt=[1] * 17, max_tokens=2, **body)
    with compilation.CompileCounter() as compiles:
      for size in (2, 20, 32):
        post(prompt=[1] * size, max_tokens=size, **body)
    assert compiles.count == 0


# --- tokens -------------------------------------------------------------------


def test_greedy_tokens_equal_those_of_generate(post, folder, capsys):
  argv = [f'--checkpoint={folder}', '--json', '--max_tokens=9']
  lines = []
  for prompt in ('--prompt=What is 1 + 2?', f'--prompt_ids={str(IDS)[1:-1]}'):
    assert generate.main([*argv, prompt]) == 0
    lines.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
  body = {'temperature': 0, 'max_tokens': 9, 'return_token_ids': True}
  chat = post('chat/completions', messages=MESSAGES, **body)['choices'][0]
  plain = post(prompt=IDS, **body)['choices'][0]
  assert chat['token_ids'] == lines[0]['ids']
  assert chat['message']['content'] == lines[0]['text']
  assert (plain['token_ids'], plain['text']) == (
    lines[1]['ids'],
    lines[1]['text'],
  )


def test_prompt_as_text_ids_and_parts(post):
  body = {'temperature': 0, 'max_tokens': 4, 'return_token_ids': True}
  text, other = 'ab<|end|>', [7, 8, 9]
  ids = [97, 98, fixtures.RENDERER.tokenizer.eos_id]
  single = post(prompt=text, **body)
  assert single['choices'][0]['prompt_token_ids'] == ids
  assert single['usage'] == {
    'prompt_tokens': 3,
    'completion_tokens': 4,
    'total_tokens': 7,
  }
  both = [token_ids(single)[0], token_ids(post(prompt=other, **body))[0]]
  assert token_ids(post(prompt=[ids, other], **body)) == both
  assert token_ids(post(prompt=[text, 'cd'], **body))[0] == both[0]
  two = post(prompt=[ids, other], n=2, **body)
  assert token_ids(two) == [both[0]] * 2 + [both[1]] * 2
  assert [choice['index'] for choice in two['choices']] == [0, 1, 2, 3]
  assert two['usage']['prompt_tokens'] == 6
  parts = [{'type': 'text', 'text': 'What is '}, {'type': 'text', 'text': '1?'}]
  chats = [
    post('chat/completions', messages=[{'role': 'user', 'content': x}], **body)
    for x in (parts, 'What is 1?')
  ]
  assert token_ids(chats[0]) == token_ids(chats[1])


def test_seeds_fix_the_tokens_alone_and_next_to_other_requests(post):
  body = {'prompt': IDS, 'max_tokens': 12, **SAMPLED}
  alone = token_ids(post(**body, seed=5, n=3))
  assert len({tuple(ids) for ids in alone}) == 3
  assert token_ids(post(**body, seed=6, n=3)) != alone
  assert token_ids(post(**body)) != token_ids(post(**body))  # no seed
  with concurrent.futures.ThreadPoolExecutor(12) as pool:
    noise = [
      pool.submit(post, prompt=[i, 1], max_tokens=20, n=2, **SAMPLED)
      for i in range(6)
    ]
    again = [pool.submit(post, **body, seed=5, n=k) for k in (3, 3, 1, 2)]
    for future in again:
      ids = token_ids(future.result())
      assert ids == alone[: len(ids)]
    assert all(len(token_ids(future.result())) == 2 for future in noise)
  # tests/decode checks the engine's draws themselves.


def test_stop_strings_and_stop_tokens_end_a_choice(post, served):
  body = {
    'prompt': IDS,
    'max_tokens': 40,
    'temperature': 0,
    'ignore_eos': True,
    'return_token_ids': True,
  }
  (whole,) = post(**body)['choices']
  assert len(whole['token_ids']) == 40 and whole['finish_reason'] == 'length'
  stop = whole['text'][7:9]
  index = whole['text'].index(stop)
  (cut,) = post(**body, stop=['never!', stop])['choices']
  assert (cut['text'], cut['finish_reason']) == (whole['text'][:index], 'stop')
  assert cut['stop_reason'] == stop
  count = len(cut['token_ids'])
  assert cut['token_ids'] == whole['token_ids'][:count] and count < 40
  token = whole['token_ids'][9]
  (cut,) = post(**body, stop_token_ids=[token])['choices']
  assert cut['token_ids'][-1] == token == cut['stop_reason']
  assert cut['token_ids'] == whole['token_ids'][: len(cut['token_ids'])]
  assert cut['finish_reason'] == 'stop'
  assert served.client.get('/health').json()['under_way'] == 0


def test_64_concurrent_requests_match_sequential_ones(post):
  rng = np.random.default_rng(0)
  bodies = [
    {
      'prompt': rng.integers(0, 256, rng.integers(1, 40)).tolist(),
      'max_tokens': int(rng.integers(1, 30)),
      'seed': i,
      'temperature': float(rng.choice([0.0, 1.0, 1.5])),
      'top_k': int(rng.choice([0, 5])),
      'return_token_ids': True,
    }
    for i in range(64)
  ]
  with concurrent.futures.ThreadPoolExecutor(64) as pool:
    together = list(pool.map(lambda body: post(**body), bodies))
  for body, response in zip(bodies, together, strict=True):
    (choice,) = response['choices']
    assert choice['prompt_token_ids'] == body['prompt']
    assert response['choices'] == post(**body)['choices']


# --- streams, and clients that disconnect -------------------------------------


def events(served, path, body):
  body = {'model': conftest.NAME, 'stream': True, **body}
  with served.client.stream('POST', f'/v1/{path}', json=body) as response:
    assert response.headers['content-type'].startswith('text/event-stream')
    lines = [line for line in response.iter_lines() if line]
  assert lines[-1] == 'data: [DONE]'
  return [json.loads(line.removeprefix('data: ')) for line in lines[:-1]]


def test_stream_equals_the_whole_response(served, post):
  body = {
    'prompt': 'é',
    'max_tokens': 30,
    'seed': 2,
    'n': 2,
    'logprobs': 0,
    'echo': False,
    **SAMPLED,
  }
  chunks = events(
    served, 'completions', {**body, 'stream_options': {'include_usage': True}}
  )
  whole = post(**body)
  assert chunks[-1]['choices'] == [] and chunks[-1]['usage'] == whole['usage']
  assert len(chunks) > 8
  for choice in whole['choices']:
    own = [
      chunk['choices'][0]
      for chunk in chunks[:-1]
      if chunk['choices'][0]['index'] == choice['index']
    ]
    assert ''.join(part['text'] for part in own) == choice['text']
    ids = sum((part.get('token_ids', []) for part in own), [])
    assert ids == choice['token_ids']
    assert [part['finish_reason'] for part in own[:-1]] == [None] * (
      len(own) - 1
    )
    assert own[-1]['finish_reason'] == choice['finish_reason']
    logprobs = sum(
      (part['logprobs']['token_logprobs'] for part in own if part['logprobs']),
      [],
    )
    assert logprobs == choice['logprobs']['token_logprobs']


def test_stream_ends_before_the_stop_string(served, post):
  body = {'prompt': IDS, 'max_tokens': 40, 'temperature': 0, 'ignore_eos': True}
  stop = post(**body)['choices'][0]['text'][10:12]
  (whole,) = post(**body, stop=stop)['choices']
  chunks = events(served, 'completions', {**body, 'stop': stop})
  text = ''.join(chunk['choices'][0]['text'] for chunk in chunks)
  assert text == whole['text'] and stop not in text
  assert chunks[-1]['choices'][0]['finish_reason'] == 'stop'


@pytest.mark.parametrize('stream', [False, True])
def test_disconnected_clients_free_their_slots(served, monkeypatch, stream):
  """The engine is slowed down, so that the client disconnects first."""
  client, engine = served.client, served.worker._engine
  step = engine.step
  monkeypatch.setattr(engine, 'step', lambda: (time.sleep(0.1), step())[1])
  before = client.get('/health').json()
  body = {
    'model': conftest.NAME,
    'prompt': IDS,
    'max_tokens': 80,
    'n': 4,
    'ignore_eos': True,
    'stream': stream,
  }
  if stream:
    with client.stream('POST', '/v1/completions', json=body) as response:
      next(response.iter_lines())
  else:
    with pytest.raises(Exception, match='timed out'):
      client.post('/v1/completions', json=body, timeout=0.3)
  base.wait_for(lambda: client.get('/health').json()['under_way'] == 0)
  base.wait_for(lambda: client.get('/health').json()['drawing'] == 0)
  after = client.get('/health').json()
  assert after['dropped'] == before['dropped'] + 4
  assert not len(engine._schedule)


# --- failures -----------------------------------------------------------------


def test_failed_engine_fails_its_requests_and_is_replaced(
  served, post, monkeypatch, caplog
):
  body = {'prompt': IDS, 'max_tokens': 5, 'temperature': 0}
  expected = post(**body)['choices']

  def broken():
    raise RuntimeError('out of luck')

  monkeypatch.setattr(served.worker._engine, 'step', broken)
  response = post(status=500, **body)
  assert response['error']['type'] == 'server_error'
  assert 'out of luck' in caplog.text and 'luck' not in str(response)
  assert post(**body)['choices'] == expected
  assert served.client.get('/health').json()['under_way'] == 0


def test_seeded_choices_equal_engine_requests_with_keys(post, policy):
  """The key of a choice depends on seed, index and prompt."""
  from posttrain.serve import call

  response = post(prompt=IDS, max_tokens=6, seed=11, n=2, **SAMPLED)
  engine = engines.Engine(
    policy.model, slots=conftest.SLOTS, capacity=conftest.CAPACITY
  )
  engine.set_params(policy.params, 0)
  ids = np.array(IDS, np.int32)
  completions = engine.generate(
    [
      requests.Request(
        i,
        ids,
        6,
        policy.stop_ids,
        requests.Sampling(1.3),
        key=call._key(11, ids, i),
      )
      for i in range(2)
    ]
  )
  assert [x.ids.tolist() for x in completions] == token_ids(response)


def test_developer_messages_are_those_of_the_system(post):
  prompts = [
    post(
      'chat/completions',
      messages=[{'role': role, 'content': 'Be brief.'}, *MESSAGES],
      max_tokens=1,
      return_token_ids=True,
    )['prompt_token_ids']
    for role in ('developer', 'system')
  ]
  assert prompts[0] == prompts[1]


def test_chats_have_up_to_20_alternatives_in_order(post):
  (choice,) = post(
    'chat/completions',
    messages=MESSAGES,
    max_tokens=3,
    logprobs=True,
    top_logprobs=20,
  )['choices']
  for entry in choice['logprobs']['content']:
    tops = [x['logprob'] for x in entry['top_logprobs']]
    assert len(tops) == 20 and tops == sorted(tops, reverse=True)
