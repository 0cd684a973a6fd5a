"""Responses of the server against the engine and the scorer in process."""

import concurrent.futures
import json
import time

import numpy as np
import pytest

from experiments.trials import base
from posttrain import compilation, generate, scoring
from tests import fixtures
from tests.serve import conftest

MESSAGES = [{'role': 'user', 'content': 'What is 1 + 2?'}]
IDS = [72, 101, 108, 108, 111, 257, 0, 255]
SAMPLED = {'temperature': 1.3, 'return_token_ids': True}
GREEDY = SAMPLED | {'temperature': 0}


def scored(policy, ids, temperature):
  scorer = scoring.Scorer(policy.model, 1, 96)
  return scorer(policy.params, [np.array(ids)], [[temperature] * len(ids)])[0]


def token_ids(response):
  return [choice['token_ids'] for choice in response['choices']]


# --- logprobs -----------------------------------------------------------------


@pytest.mark.parametrize('temperature', [0.7, 0])
def test_prompt_logprobs_equal_the_scorer_at_the_temperature(
  post, policy, temperature
):
  expected = scored(policy, IDS, temperature or 1.0)[1:]
  body = {'prompt': IDS, 'temperature': temperature, 'max_tokens': 0}
  (choice,) = post(**body, echo=True, logprobs=3)['choices']
  first, *rest = choice['logprobs']['token_logprobs']
  assert first is None and choice['finish_reason'] == 'length'
  np.testing.assert_allclose(rest, expected, rtol=0, atol=1e-5)
  (choice,) = post(**body, prompt_logprobs=0)['choices']
  rest = choice['prompt_logprobs'][1:]
  logprobs = [
    entry[str(i)]['logprob'] for i, entry in zip(IDS[1:], rest, strict=True)
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
  expected = np.array([logprobs[-1] for logprobs in each])
  order = np.argsort(-expected)
  shown = order[[0, 1, 2, 3, 4, 20]]
  prompt = [*IDS, int(order[20])]
  (choice,) = post(prompt=prompt, max_tokens=0, prompt_logprobs=5)['choices']
  last = choice['prompt_logprobs'][-1]
  assert [int(i) for i in last] == [*shown]
  assert [entry['rank'] for entry in last.values()] == [1, 2, 3, 4, 5, 21]
  logprobs = [entry['logprob'] for entry in last.values()]
  np.testing.assert_allclose(logprobs, expected[shown], rtol=0, atol=1e-5)


def test_sampled_tokens_have_logprobs_and_alternatives(post, policy):
  body = {'prompt': IDS, 'max_tokens': 10, 'logprobs': 2, **SAMPLED}
  (choice,) = post(**body, return_tokens_as_token_ids=True)['choices']
  ids, logprobs = choice['token_ids'], choice['logprobs']
  expected = scored(policy, IDS + ids, 1.3)[len(IDS) :]
  own = logprobs['token_logprobs']
  np.testing.assert_allclose(own, expected, rtol=0, atol=1e-4)
  assert logprobs['tokens'] == [f'token_id:{i}' for i in ids]
  tops = logprobs['top_logprobs']
  for name, value, top in zip(logprobs['tokens'], own, tops, strict=True):
    assert top[name] == value <= max(top.values()) and len(top) in (2, 3)


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
  body = {'max_tokens': 9, **GREEDY}
  chat = post('chat/completions', messages=MESSAGES, **body)['choices'][0]
  plain = post(prompt=IDS, **body)['choices'][0]
  assert [chat['token_ids'], plain['token_ids']] == [x['ids'] for x in lines]
  assert chat['message']['content'] == lines[0]['text']
  assert plain['text'] == lines[1]['text']


@pytest.mark.parametrize('stop', [[], ['\0']])  # with one, as in streams
def test_cached_tokens_of_prompts_are_counted(served, post, stop):
  def counts():
    health = served.client.get('/health').json()
    return np.array([health['prompt_tokens'], health['cached_tokens']])

  before, ids, usages = counts(), [len(stop), *range(80)], []
  for n in (1, 2):
    body = {'prompt': [ids, ids[:70]], 'max_tokens': 2, 'stop': stop, 'n': n}
    details = post(**body, ignore_eos=True)['usage']['prompt_tokens_details']
    usages.append(details['cached_tokens'])
  assert usages == [64, 128]
  assert (counts() - before).tolist() == [3 * 151, 64 + 2 * 128]


def test_prompt_as_text_ids_and_parts(post):
  body = {'max_tokens': 4, **GREEDY}
  text, other = 'ab<|end|>', [7, 8, 9]
  ids = [97, 98, fixtures.RENDERER.tokenizer.eos_id]
  single = post(prompt=text, **body)
  assert single['choices'][0]['prompt_token_ids'] == ids
  usage = single['usage']
  assert (usage['prompt_tokens'], usage['completion_tokens']) == (3, 4)
  both = token_ids(single) + token_ids(post(prompt=other, **body))
  assert token_ids(post(prompt=[text, 'cd'], **body))[0] == both[0]
  two = post(prompt=[ids, other], n=2, **body)
  assert token_ids(two) == [both[0]] * 2 + [both[1]] * 2
  assert two['usage']['prompt_tokens'] == 6
  parts = [{'type': 'text', 'text': x} for x in ('Be ', 'brief.')]
  chats = [
    post('chat/completions', messages=[{'role': role, 'content': x}], **body)
    for role, x in (('developer', parts), ('system', 'Be brief.'))
  ]
  assert chats[0]['prompt_token_ids'] == chats[1]['prompt_token_ids']


def test_seeds_fix_the_tokens_alone_and_next_to_other_requests(post):
  body = {'prompt': IDS, 'max_tokens': 12, **SAMPLED}
  alone = token_ids(post(**body, seed=5, n=3))
  assert len({tuple(ids) for ids in alone}) == 3
  assert token_ids(post(**body, seed=6, n=3)) != alone
  assert token_ids(post(**body)) != token_ids(post(**body))  # no seed
  with concurrent.futures.ThreadPoolExecutor(9) as pool:
    for i in range(6):
      pool.submit(post, prompt=[i, 1], max_tokens=20, n=2, **SAMPLED)
    for future in [pool.submit(post, **body, seed=5, n=k) for k in (3, 1, 2)]:
      ids = token_ids(future.result())
      assert ids == alone[: len(ids)]


def test_stop_strings_and_stop_tokens_end_a_choice(post):
  body = {'prompt': IDS, 'max_tokens': 40, 'ignore_eos': True, **GREEDY}
  (whole,) = post(**body)['choices']
  ids = whole['token_ids']
  assert len(ids) == 40 and whole['finish_reason'] == 'length'
  stop, token = whole['text'][7:9], ids[9]
  (cut,) = post(**body, stop=['never!', stop])['choices']
  assert cut['text'] == whole['text'].partition(stop)[0]
  assert (cut['finish_reason'], cut['stop_reason']) == ('stop', stop)
  count = len(cut['token_ids'])
  assert cut['token_ids'] == ids[:count] and count < 40
  (cut,) = post(**body, stop_token_ids=[token])['choices']
  assert cut['token_ids'] == ids[: ids.index(token) + 1]
  assert (cut['finish_reason'], cut['stop_reason']) == ('stop', token)


# --- streams, and clients that disconnect -------------------------------------


def test_stream_equals_the_whole_response(served, post):
  body = {'prompt': 'é', 'max_tokens': 30, 'seed': 2, 'n': 2, 'logprobs': 0}
  body |= {'model': conftest.NAME, **SAMPLED}
  streamed = {'stream': True, 'stream_options': {'include_usage': True}}
  with served.client.stream(
    'POST', '/v1/completions', json=body | streamed
  ) as response:
    assert response.headers['content-type'].startswith('text/event-stream')
    *lines, end = (line for line in response.iter_lines() if line)
  assert end == 'data: [DONE]'
  *chunks, last = (json.loads(line.removeprefix('data: ')) for line in lines)
  whole = post(**body)
  assert last['choices'] == [] and last['usage'] == whole['usage']
  assert len(chunks) > 7
  for choice in whole['choices']:
    parts = (chunk['choices'][0] for chunk in chunks)
    own = [x for x in parts if x['index'] == choice['index']]
    assert ''.join(part['text'] for part in own) == choice['text']
    ids = sum((part.get('token_ids', []) for part in own), [])
    assert ids == choice['token_ids']
    ends = [part['finish_reason'] for part in own]
    assert ends == [None] * (len(own) - 1) + [choice['finish_reason']]
    values = [x['logprobs']['token_logprobs'] for x in own if x['logprobs']]
    assert sum(values, []) == choice['logprobs']['token_logprobs']


@pytest.mark.parametrize('stream', [False, True])
def test_disconnected_clients_free_their_slots(served, monkeypatch, stream):
  """The engine is slowed down, so that the client disconnects first."""
  client, engine = served.client, served.worker._engine
  step = engine.step
  monkeypatch.setattr(engine, 'step', lambda: (time.sleep(0.1), step())[1])
  before = client.get('/health').json()
  body = {'model': conftest.NAME, 'prompt': IDS, 'max_tokens': 80, 'n': 4}
  body |= {'ignore_eos': True, 'stream': stream}
  if stream:
    with client.stream('POST', '/v1/completions', json=body) as response:
      next(response.iter_lines())
  else:
    with pytest.raises(Exception, match='timed out'):
      client.post('/v1/completions', json=body, timeout=0.3)
  wanted = {'under_way': 0, 'drawing': 0, 'dropped': before['dropped'] + 4}
  base.wait_for(lambda: client.get('/health').json().items() >= wanted.items())


# --- failures -----------------------------------------------------------------


def test_failed_engine_fails_its_requests_and_is_replaced(
  served, post, monkeypatch, caplog
):
  body = {'prompt': IDS, 'max_tokens': 5, 'temperature': 0}
  expected = post(**body)['choices']
  monkeypatch.setattr(served.worker._engine, 'step', lambda: 1 / 0)
  response = post(status=500, **body)
  assert response['error']['type'] == 'server_error'
  assert 'by zero' in caplog.text and 'zero' not in str(response)
  assert post(**body)['choices'] == expected
  assert served.client.get('/health').json()['under_way'] == 0
