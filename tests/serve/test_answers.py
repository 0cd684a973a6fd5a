"""What is answered, against the engine and the scoring forward in process."""

import concurrent.futures
import json
import time

import numpy as np
import pytest

from posttrain import compilation, generate, scoring
from posttrain.decode import engine as engines
from posttrain.decode import requests
from tests import fixtures
from tests.serve import conftest

MESSAGES = [{'role': 'user', 'content': 'What is 1 + 2?'}]
IDS = [72, 101, 108, 108, 111, 257, 0, 255]
HOT = {'temperature': 1.3, 'return_token_ids': True}


def scored(policy, ids, temperature):
  scorer = scoring.Scorer(policy.model, 1, 96)
  (logprobs,) = scorer(
    policy.params, [np.array(ids)], [np.full(len(ids), temperature)]
  )
  return logprobs


def drawn(answer):
  return [choice['token_ids'] for choice in answer['choices']]


# --- logprobs -----------------------------------------------------------------


@pytest.mark.parametrize('temperature', [1.0, 0.7, 0])
def test_prompts_are_scored_as_in_process_at_the_temperature(
  post, policy, temperature
):
  expected = scored(policy, IDS, temperature or 1.0)[1:]
  ask = {'prompt': IDS, 'temperature': temperature, 'max_tokens': 0}
  for logprobs in (0, 3):
    (choice,) = post(**ask, echo=True, logprobs=logprobs)['choices']
    first, *rest = choice['logprobs']['token_logprobs']
    assert first is None and choice['finish_reason'] == 'length'
    np.testing.assert_allclose(rest, expected, rtol=0, atol=1e-5)
  (choice,) = post(**ask, prompt_logprobs=0)['choices']
  first, *rest = choice['prompt_logprobs']
  assert first is None and [list(entry) for entry in rest] == [
    [str(i)] for i in IDS[1:]
  ]
  found = [
    entry[str(i)]['logprob'] for entry, i in zip(rest, IDS[1:], strict=True)
  ]
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_ranks_and_alternatives_are_those_of_the_whole_law(post, policy):
  """Each token of the vocabulary in turn, behind the same prompt."""
  size = policy.model.vocab_size
  scorer = scoring.Scorer(policy.model, 8, 96)
  each = scorer(
    policy.params,
    [np.array([*IDS, i]) for i in range(size)],
    [np.ones(len(IDS) + 1)] * size,
  )
  law = np.array([logprobs[-1] for logprobs in each])
  order = np.argsort(-law)
  token = int(order[20])
  (choice,) = post(prompt=[*IDS, token], max_tokens=0, prompt_logprobs=5)[
    'choices'
  ]
  last = choice['prompt_logprobs'][-1]
  assert [int(i) for i in last] == [*order[:5], token]
  assert [entry['rank'] for entry in last.values()] == [1, 2, 3, 4, 5, 21]
  np.testing.assert_allclose(
    [entry['logprob'] for entry in last.values()],
    law[[*order[:5], token]],
    rtol=0,
    atol=1e-5,
  )
  decode = fixtures.RENDERER.tokenizer.decode
  assert last[str(token)]['decoded_token'] in (
    decode([token]),
    fixtures.RENDERER.tokenizer.text(256),
  )


def test_drawn_tokens_have_their_logprobs_and_what_was_likelier(post, policy):
  ask = {'prompt': IDS, 'max_tokens': 10, 'seed': 3, **HOT}
  (choice,) = post(**ask, logprobs=2, return_tokens_as_token_ids=True)[
    'choices'
  ]
  ids = choice['token_ids']
  law = scored(policy, IDS + ids, 1.3)[len(IDS) :]
  told = choice['logprobs']
  np.testing.assert_allclose(told['token_logprobs'], law, rtol=0, atol=1e-4)
  assert told['tokens'] == [f'token_id:{i}' for i in ids]
  for name, own, beside in zip(
    told['tokens'], told['token_logprobs'], told['top_logprobs'], strict=True
  ):
    assert beside[name] == own and len(beside) in (2, 3)
    assert max(beside.values()) >= own
  (plain,) = post(**ask)['choices']
  assert plain['token_ids'] == ids and plain['logprobs'] is None
  chat = post(
    'chat/completions',
    messages=MESSAGES,
    max_tokens=5,
    seed=1,
    logprobs=True,
    top_logprobs=2,
    **HOT,
  )
  (choice,) = chat['choices']
  prompt = chat['prompt_token_ids']
  assert (
    prompt
    == fixtures.RENDERER.render(
      MESSAGES, add_generation_prompt=True
    ).ids.tolist()
  )
  law = scored(policy, prompt + choice['token_ids'], 1.3)[len(prompt) :]
  content = choice['logprobs']['content']
  found = [entry['logprob'] for entry in content]
  np.testing.assert_allclose(found, law, rtol=0, atol=1e-4)
  assert all(len(entry['top_logprobs']) == 2 for entry in content)


def test_lengths_of_a_bucket_share_a_program(post):
  for ask in ({'prompt_logprobs': 0}, {'echo': True, 'logprobs': 0}):
    post(prompt=[1] * 17, max_tokens=2, **ask)
    with compilation.CompileCounter() as compiles:
      for size in (2, 20, 32):
        post(prompt=[1] * size, max_tokens=size, **ask)
    assert compiles.count == 0


# --- tokens -------------------------------------------------------------------


def test_greedy_is_what_generate_says(post, folder, capsys):
  argv = [f'--checkpoint={folder}', '--json', '--max_tokens=9']
  said = []
  for prompt in ('--prompt=What is 1 + 2?', f'--prompt_ids={str(IDS)[1:-1]}'):
    assert generate.main([*argv, prompt]) == 0
    said.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
  ask = {'temperature': 0, 'max_tokens': 9, 'return_token_ids': True}
  chat = post('chat/completions', messages=MESSAGES, **ask)['choices'][0]
  plain = post(prompt=IDS, **ask)['choices'][0]
  assert chat['token_ids'] == said[0]['ids']
  assert chat['message']['content'] == said[0]['text']
  assert (plain['token_ids'], plain['text']) == (
    said[1]['ids'],
    said[1]['text'],
  )


def test_forms_of_a_prompt(post):
  ask = {'temperature': 0, 'max_tokens': 4, 'return_token_ids': True}
  text, other = 'ab<|end|>', [7, 8, 9]
  ids = [97, 98, fixtures.RENDERER.tokenizer.eos_id]
  one = post(prompt=text, **ask)
  assert one['choices'][0]['prompt_token_ids'] == ids
  assert one['usage'] == {
    'prompt_tokens': 3,
    'completion_tokens': 4,
    'total_tokens': 7,
  }
  both = [drawn(one)[0], drawn(post(prompt=other, **ask))[0]]
  assert drawn(post(prompt=[ids, other], **ask)) == both
  assert drawn(post(prompt=[text, 'cd'], **ask))[0] == both[0]
  two = post(prompt=[ids, other], n=2, **ask)
  assert drawn(two) == [both[0]] * 2 + [both[1]] * 2
  assert [choice['index'] for choice in two['choices']] == [0, 1, 2, 3]
  assert two['usage']['prompt_tokens'] == 6
  parts = [{'type': 'text', 'text': 'What is '}, {'type': 'text', 'text': '1?'}]
  said = [
    post('chat/completions', messages=[{'role': 'user', 'content': x}], **ask)
    for x in (parts, 'What is 1?')
  ]
  assert drawn(said[0]) == drawn(said[1])


def test_seeds_decide_alone_and_in_company(post):
  ask = {'prompt': IDS, 'max_tokens': 12, **HOT}
  alone = drawn(post(**ask, seed=5, n=3))
  assert len({tuple(ids) for ids in alone}) == 3
  assert drawn(post(**ask, seed=6, n=3)) != alone
  assert drawn(post(**ask)) != drawn(post(**ask))  # no seed
  with concurrent.futures.ThreadPoolExecutor(12) as pool:
    noise = [
      pool.submit(post, prompt=[i, 1], max_tokens=20, n=2, **HOT)
      for i in range(6)
    ]
    again = [pool.submit(post, **ask, seed=5, n=k) for k in (3, 3, 1, 2)]
    for one in again:
      got = drawn(one.result())
      assert got == alone[: len(got)]
    assert all(len(drawn(one.result())) == 2 for one in noise)
  # What the engine itself says with these numbers is tests/decode's.


def test_stop_strings_and_stop_tokens(post, served):
  ask = {
    'prompt': IDS,
    'max_tokens': 40,
    'temperature': 0,
    'ignore_eos': True,
    'return_token_ids': True,
  }
  (whole,) = post(**ask)['choices']
  assert len(whole['token_ids']) == 40 and whole['finish_reason'] == 'length'
  stop = whole['text'][7:9]
  at = whole['text'].index(stop)
  (cut,) = post(**ask, stop=['never!', stop])['choices']
  assert (cut['text'], cut['finish_reason']) == (whole['text'][:at], 'stop')
  assert cut['stop_reason'] == stop
  count = len(cut['token_ids'])
  assert cut['token_ids'] == whole['token_ids'][:count] and count < 40
  token = whole['token_ids'][9]
  (cut,) = post(**ask, stop_token_ids=[token])['choices']
  assert cut['token_ids'][-1] == token == cut['stop_reason']
  assert cut['token_ids'] == whole['token_ids'][: len(cut['token_ids'])]
  assert cut['finish_reason'] == 'stop'
  assert served.client.get('/health').json()['under_way'] == 0


def test_64_at_once_are_answered_as_one_by_one(post):
  rng = np.random.default_rng(0)
  asks = [
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
    together = list(pool.map(lambda ask: post(**ask), asks))
  for ask, said in zip(asks, together, strict=True):
    assert said['choices'][0]['prompt_token_ids'] == ask['prompt']
    assert said['choices'] == post(**ask)['choices']


# --- streams, and who hangs up ------------------------------------------------


def events(served, path, body):
  body = {'model': conftest.NAME, 'stream': True, **body}
  with served.client.stream('POST', f'/v1/{path}', json=body) as answer:
    assert answer.headers['content-type'].startswith('text/event-stream')
    lines = [line for line in answer.iter_lines() if line]
  assert lines[-1] == 'data: [DONE]'
  return [json.loads(line.removeprefix('data: ')) for line in lines[:-1]]


def test_a_stream_says_what_a_whole_answer_says(served, post):
  ask = {
    'prompt': 'é',
    'max_tokens': 30,
    'seed': 2,
    'n': 2,
    'logprobs': 0,
    'echo': False,
    **HOT,
  }
  chunks = events(
    served, 'completions', {**ask, 'stream_options': {'include_usage': True}}
  )
  whole = post(**ask)
  assert chunks[-1]['choices'] == [] and chunks[-1]['usage'] == whole['usage']
  assert len(chunks) > 8  # in pieces
  for choice in whole['choices']:
    mine = [
      chunk['choices'][0]
      for chunk in chunks[:-1]
      if chunk['choices'][0]['index'] == choice['index']
    ]
    assert ''.join(one['text'] for one in mine) == choice['text']
    ids = sum((one.get('token_ids', []) for one in mine), [])
    assert ids == choice['token_ids']
    assert [one['finish_reason'] for one in mine[:-1]] == [None] * (
      len(mine) - 1
    )
    assert mine[-1]['finish_reason'] == choice['finish_reason']
    told = sum(
      (one['logprobs']['token_logprobs'] for one in mine if one['logprobs']), []
    )
    assert told == choice['logprobs']['token_logprobs']


def test_a_stream_stops_before_the_stop_string(served, post):
  ask = {'prompt': IDS, 'max_tokens': 40, 'temperature': 0, 'ignore_eos': True}
  stop = post(**ask)['choices'][0]['text'][10:12]
  (whole,) = post(**ask, stop=stop)['choices']
  chunks = events(served, 'completions', {**ask, 'stop': stop})
  said = ''.join(chunk['choices'][0]['text'] for chunk in chunks)
  assert said == whole['text'] and stop not in said
  assert chunks[-1]['choices'][0]['finish_reason'] == 'stop'


def until(check):
  for _ in range(1000):
    if check():
      return
    time.sleep(0.02)
  raise AssertionError('waited in vain')


@pytest.mark.parametrize('stream', [False, True])
def test_who_hangs_up_frees_the_slots(served, monkeypatch, stream):
  """The engine is slowed down, so that it is not done before."""
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
    with client.stream('POST', '/v1/completions', json=body) as answer:
      next(answer.iter_lines())
  else:
    with pytest.raises(Exception, match='timed out'):
      client.post('/v1/completions', json=body, timeout=0.3)
  until(lambda: client.get('/health').json()['under_way'] == 0)
  until(lambda: client.get('/health').json()['drawing'] == 0)
  after = client.get('/health').json()
  assert after['dropped'] == before['dropped'] + 4
  assert not len(engine._schedule)


# --- what may fail ------------------------------------------------------------


def test_an_engine_that_fails_fails_its_requests_and_is_made_anew(
  served, post, monkeypatch, caplog
):
  ask = {'prompt': IDS, 'max_tokens': 5, 'temperature': 0}
  good = post(**ask)['choices']

  def broken():
    raise RuntimeError('out of luck')

  monkeypatch.setattr(served.worker._engine, 'step', broken)
  answer = post(status=500, **ask)
  assert answer['error']['type'] == 'server_error'
  assert 'out of luck' in caplog.text and 'luck' not in str(answer)
  assert post(**ask)['choices'] == good
  assert served.client.get('/health').json()['under_way'] == 0


def test_keys_of_seeds_are_those_of_the_engine(post, policy):
  """A choice is a request whose key is made of seed, place and prompt."""
  from posttrain.serve import call

  said = drawn(post(prompt=IDS, max_tokens=6, seed=11, n=2, **HOT))
  engine = engines.Engine(
    policy.model, slots=conftest.SLOTS, capacity=conftest.CAPACITY
  )
  engine.set_params(policy.params, 0)
  ids = np.array(IDS, np.int32)
  done = engine.generate(
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
  assert [one.ids.tolist() for one in done] == said
