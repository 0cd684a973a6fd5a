"""The client of a server: whose logprob is whose, and what it refuses."""

import logging
import threading

import httpx
import numpy as np
import pytest

from tests.rollout.endpoint import servers
from tests.rollout.endpoint.servers import Server, connect, truth
from tests.rollout.fakes import EOS, RENDERER

FORMS = ('prompt_logprobs', 'echo')
IDS = np.array([5, 301, 7, 7, 500, 0, 88, 301], np.int32)
ONES = np.ones(8, np.float32)


def score(server, ids=IDS, temperatures=ONES):
  (logprobs,) = connect(server).score([ids], [temperatures])
  return logprobs


def spoiled(form, change):
  """A server whose list of logprobs a function changes."""

  def spoil(choice):
    if form == 'echo' and choice['logprobs'] is not None:
      change(choice['logprobs']['token_logprobs'])
    if form == 'prompt_logprobs':
      change(choice['prompt_logprobs'])
    return choice

  return Server(forms=(form,), spoil=spoil)


@pytest.mark.parametrize('form', FORMS)
def test_scores_are_those_of_the_tokens(form):
  logprobs = score(Server(forms=(form,)))
  assert logprobs.dtype == np.float32 and logprobs.shape == (8,)
  assert logprobs[0] == 0
  np.testing.assert_allclose(logprobs, truth(IDS, ONES), rtol=1e-6)


def test_many_sequences_come_back_in_order():
  rng = np.random.default_rng(1)
  ids = [rng.integers(0, servers.VOCAB, n) for n in (9, 1, 2, 30, 0, 5)]
  ones = [np.ones(len(i), np.float32) for i in ids]
  scored = connect(Server(), concurrency=3).score(ids, ones)
  for sequence, heat, logprobs in zip(ids, ones, scored, strict=True):
    want = truth(sequence, heat)[: len(sequence)]
    np.testing.assert_allclose(logprobs, want, rtol=1e-6)


def test_what_predicts_nothing_is_not_asked_for():
  server = Server()
  (one, none) = connect(server).score([IDS[:1], IDS[:0]], [ONES[:1], ONES[:0]])
  assert one.tolist() == [0] and none.tolist() == []
  assert not server.bodies


def test_the_request_of_a_score():
  server = Server()
  score(server)
  (body,) = server.bodies
  assert body['prompt'] == IDS.tolist() and body['model'] == 'teacher'
  assert body['prompt_logprobs'] == 0 and body['max_tokens'] == 0
  assert body['temperature'] == 1 and body['return_token_ids'] is True
  assert server.requests[0].url == 'http://there:8000/v1/completions'
  assert 'Authorization' not in server.requests[0].headers


@pytest.mark.parametrize('strict', [False, True])
@pytest.mark.parametrize(
  'form, least, asked',
  [
    ('prompt_logprobs', 0, [('prompt_logprobs', 0)] * 2),
    # As vLLM.
    (
      'prompt_logprobs',
      1,
      [('prompt_logprobs', 0), ('prompt_logprobs', 1), ('prompt_logprobs', 1)],
    ),
    (
      'echo',
      0,
      [
        ('prompt_logprobs', 0),
        ('prompt_logprobs', 1),
        ('echo', 1),
        ('echo', 1),
      ],
    ),
  ],
)
def test_the_form_that_works_is_remembered(form, least, asked, strict):
  server = Server(forms=(form,), least=least, strict=strict)
  connected = connect(server)
  for _ in range(2):
    (logprobs,) = connected.score([IDS], [ONES])
    np.testing.assert_allclose(logprobs, truth(IDS, ONES), rtol=1e-6)
  assert asked == [
    ('echo' if 'echo' in body else 'prompt_logprobs', body['max_tokens'])
    for body in server.bodies
  ]


def test_another_thread_may_find_out_the_form_meanwhile():
  began, found = threading.Event(), threading.Event()

  class Slow(Server):
    def __call__(self, request):
      response = super().__call__(request)
      if not began.is_set():
        began.set()
        assert found.wait(20)
      return response

  connected, scored = connect(Slow(forms=('echo',), strict=True)), []
  thread = threading.Thread(
    target=lambda: scored.extend(connected.score([IDS], [ONES]))
  )
  thread.start()
  assert began.wait(20)
  scored += connected.score([IDS], [ONES])
  found.set()
  thread.join()
  for logprobs in scored:
    np.testing.assert_allclose(logprobs, truth(IDS, ONES), rtol=1e-6)
  assert len(scored) == 2


@pytest.mark.parametrize('strict, words', [(False, ''), (True, 'unknown')])
def test_a_server_that_scores_no_prompt_is_refused(strict, words):
  with pytest.raises(ValueError, match=f'teacher at .* score .*{words}.*vLLM'):
    score(Server(forms=(), strict=strict))


def test_a_single_temperature_other_than_one():
  heat = np.full(8, 0.5, np.float32)
  server = Server()
  np.testing.assert_allclose(
    score(server, IDS, heat), truth(IDS, heat), rtol=1e-6
  )
  # The probe at both, and the sequence: its first token has no say.
  assert [b['temperature'] for b in server.bodies[2:]] == [0.5]
  assert sorted(b['temperature'] for b in server.bodies[:2]) == [0.5, 1]


@pytest.mark.parametrize('form', FORMS)
def test_every_token_is_scored_at_its_own_temperature(form):
  heat = np.array([9, 1, 1, 0.7, 0.7, 2, 1, 0.7], np.float32)
  server = Server(forms=(form,))
  connected = connect(server)
  for _ in range(2):
    (logprobs,) = connected.score([IDS], [heat])
    np.testing.assert_allclose(logprobs, truth(IDS, heat), rtol=1e-5)
  asked = [b['temperature'] for b in server.bodies if len(b['prompt']) == 8]
  assert sorted(asked[-3:]) == pytest.approx([0.7, 1, 2])  # never 9
  # One probe of sixteen tokens per temperature, beside that of 1.
  long = [b for b in server.bodies if len(b['prompt']) == 16 and form in b]
  assert len(long) == 4


@pytest.mark.parametrize('temperature', [0.5, 0.9, 1.1, 2.0])
@pytest.mark.parametrize('noise', [0.0, 0.01])
@pytest.mark.parametrize('tempered', [False, True])
def test_a_server_deaf_to_temperatures_is_refused(temperature, noise, tempered):
  rng = np.random.default_rng(0)

  def change(entries):
    for entry in entries[1:]:
      for value in entry.values():
        value['logprob'] -= abs(noise * rng.normal())

  server = spoiled('prompt_logprobs', change)
  server.tempered = tempered
  heat = np.full(8, temperature, np.float32)
  if tempered:
    np.testing.assert_allclose(
      score(server, IDS, heat), truth(IDS, heat), atol=0.05
    )
  else:
    with pytest.raises(ValueError, match='temperature to 1'):
      score(server, IDS, heat)
    assert len(server.bodies) == 2


def test_a_deaf_server_will_do_at_temperature_one():
  np.testing.assert_allclose(
    score(Server(tempered=False)), truth(IDS, ONES), rtol=1e-6
  )


def test_a_law_that_shows_no_temperature_is_let_through():
  def change(entries):
    for entry in entries[1:]:
      for value in entry.values():
        value['logprob'] = -np.log(512)

  heat = np.full(8, 0.5, np.float32)
  server = spoiled('prompt_logprobs', change)
  np.testing.assert_allclose(
    score(server, IDS, heat)[1:], -np.log(512), rtol=1e-6
  )


@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize(
  'value', [None, float('nan'), float('-inf'), -9999.0, 0.5, 'x', True]
)
def test_a_value_that_is_no_logprob_is_refused(form, value):
  def change(entries):
    if form == 'echo':
      entries[3] = value
    else:
      entries[3]['7'] = {'logprob': value}

  with pytest.raises(ValueError, match=r'teacher at .*token 3 \(id 7\)'):
    score(spoiled(form, change))


def test_a_missing_id_is_refused():
  def change(entries):
    del entries[4]['500']

  with pytest.raises(ValueError, match=r"token 4 .* id 500: got ids \['501'\]"):
    score(spoiled('prompt_logprobs', change))


@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize(
  'change',
  [
    lambda entries: entries.pop(),
    lambda entries: entries.pop(0),
    lambda entries: entries.insert(0, None),
    lambda entries: entries.append(-1),
  ],
)
def test_lists_of_another_length_are_refused(form, change):
  with pytest.raises(ValueError, match='teacher at .* expected 8'):
    score(spoiled(form, change))


def test_an_echo_of_other_tokens_is_refused():
  def spoil(choice):
    choice['logprobs'] and choice['logprobs']['tokens'].__setitem__(
      2, 'token_id:9'
    )
    return choice

  with pytest.raises(ValueError, match=r'\[9, 7, 500, 0\] from token 2 on'):
    score(Server(forms=('echo',), spoil=spoil))


def test_an_echo_without_ids_is_trusted_for_its_length():
  def spoil(choice):
    if choice['logprobs']:
      choice['logprobs']['tokens'] = ['a', 'token_id:x', *'cdefgh']
    return choice

  np.testing.assert_allclose(
    score(Server(forms=('echo',), spoil=spoil)), truth(IDS, ONES), rtol=1e-6
  )


@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize(
  'shown, words',
  [
    ([1, *IDS.tolist()], r'got \[1, 5, 301, 7\] from token 0'),
    (IDS[:-1].tolist(), r'got \[\] from token 7'),
    (8, 'from token 0'),
  ],
)
def test_an_answer_to_another_prompt_is_refused(form, shown, words):
  def spoil(choice):
    return choice | {'prompt_token_ids': shown}

  with pytest.raises(ValueError, match=words):
    score(Server(forms=(form,), spoil=spoil))


def test_the_count_of_the_prompt_is_checked():
  # A bos in front, and no sampled token behind: as long as an echo may be.
  count = {'prompt_tokens': 9}
  logprobs = {'token_logprobs': [None, *[-1.0] * 8], 'tokens': ['a'] * 9}
  answer = {'choices': [{'logprobs': logprobs}], 'usage': count}
  trouble = [httpx.Response(200, json=answer) for _ in range(3)]
  with pytest.raises(ValueError, match='got 9 of them, expected 8'):
    score(Server(troubles=trouble))


@pytest.mark.parametrize(
  'answer',
  [
    {},
    {'choices': []},
    {'choices': None},
    {'choices': ['x']},
    {'choices': [{}, {}]},
  ],
)
def test_an_answer_without_a_choice_is_refused(answer):
  with pytest.raises(ValueError, match='teacher at .* one choice'):
    score(Server(troubles=[httpx.Response(200, json=answer)]))


def test_as_many_requests_as_allowed_are_under_way():
  meet, lock, inside, most = threading.Barrier(3), threading.Lock(), 0, 0

  def chat(body):
    nonlocal inside, most
    with lock:
      inside += 1
      most = max(most, inside)
    meet.wait(timeout=20)  # passes only three at once
    with lock:
      inside -= 1
    meet.wait(timeout=20)
    return {'choices': [{'message': {'content': body['messages'][0]['x']}}]}

  connected = connect(Server(chat=chat), concurrency=3)
  results = {}

  def talk(name):
    results[name] = connected.chat(
      [({'x': f'{name}{i}'},) for i in range(6)], max_tokens=1, temperature=0
    )

  threads = [threading.Thread(target=talk, args=(name,)) for name in 'ab']
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert results == {n: [f'{n}{i}' for i in range(6)] for n in 'ab'}
  assert most == 3


def test_chat():
  def chat(body):
    said = body['messages'][-1]['content']
    content = None if said == 'think' else f'{said}!'
    return {'choices': [{'message': {'role': 'assistant', 'content': content}}]}

  server = Server(chat=chat)
  talks = [
    ({'role': 'system', 'content': 's'}, {'role': 'user', 'content': text})
    for text in ('a', 'think', 'b')
  ]
  replies = connect(server).chat(talks, max_tokens=9, temperature=0.3)
  assert replies == ['a!', '', 'b!']
  assert all(
    body['max_tokens'] == 9
    and body['temperature'] == 0.3
    and body['model'] == 'teacher'
    for body in server.bodies
  )
  assert sorted(b['messages'][-1]['content'] for b in server.bodies) == [
    'a',
    'b',
    'think',
  ]
  assert server.bodies[0]['messages'][0] == talks[0][0]
  with pytest.raises(ValueError, match='chat with a message'):
    connect(Server(chat=lambda _: {'choices': [{}]})).chat(
      talks, max_tokens=9, temperature=0
    )


def test_check_wants_the_model():
  server = Server(models=({'id': 'a'}, {'id': 'b'}))
  with pytest.raises(ValueError, match=r"'teacher', .* \['a', 'b'\]"):
    connect(server).check(RENDERER)


def test_check_compares_fingerprints():
  ours = RENDERER.fingerprint
  server = Server(models=({'id': 'teacher', 'tokenizer': ours},))
  connect(server).check(RENDERER)
  assert [r.url.path for r in server.requests] == ['/v1/models']
  server.models = ({'id': 'teacher', 'tokenizer': 'other'},)
  with pytest.raises(ValueError, match=f'got .* other, expected {ours[:12]}'):
    connect(server).check(RENDERER)


def tokenize(body, eos=EOS):
  assert body['add_special_tokens'] is False and body['model'] == 'teacher'
  if body['prompt'] == RENDERER.tokenizer.eos:
    return {'tokens': [eos]}
  return {'tokens': list(body['prompt'].encode())}


def test_check_compares_the_tokens_of_a_probe(caplog):
  server = Server(tokenize=tokenize)
  connect(server).check(RENDERER)
  assert not caplog.records
  assert [r.url.path for r in server.requests] == [
    '/v1/models',
    '/tokenize',
    '/tokenize',
  ]


@pytest.mark.parametrize(
  'other',
  [
    lambda body: {'tokens': [1, *body['prompt'].encode()]},  # a bos
    lambda body: {'tokens': list(body['prompt'].lower().encode())},
    lambda body: tokenize(body, eos=EOS + 1),
  ],
)
def test_check_refuses_other_tokens(other):
  with pytest.raises(ValueError, match='tokenizer of teacher at'):
    connect(Server(tokenize=other)).check(RENDERER)


@pytest.mark.parametrize(
  'other', [None, lambda body: {'tokens': []}, lambda body: httpx.Response(501)]
)
def test_check_warns_where_nobody_can(other, caplog):
  with caplog.at_level(logging.WARNING, 'absl'):
    connect(Server(tokenize=other)).check(RENDERER)
  assert 'NOBODY COULD CHECK' in caplog.text and 'teacher' in caplog.text
