"""The endpoint client: logprobs per token, and refused responses."""

import httpx
import numpy as np
import pytest

from posttrain.rollout import endpoints
from tests.rollout.endpoint.servers import Server, connect, truth
from tests.rollout.fakes import EOS, RENDERER

FORMS = ('prompt_logprobs', 'echo')
IDS = np.array([5, 301, 7, 7, 500, 0, 88, 301], np.int32)


def score(server, temperature=1.0):
  (logprobs,) = connect(server).score([(IDS, temperature)])
  return logprobs


@pytest.mark.parametrize('form', FORMS)
def test_logprobs_equal_the_log_softmax_of_the_tokens(form):
  server, ids = Server(forms=(form,)), [IDS, IDS[:5], IDS[:1], IDS[:0]]
  scored = connect(server, concurrency=3).score([(x, 1.0) for x in ids])
  for sequence, logprobs in zip(ids, scored, strict=True):
    np.testing.assert_allclose(logprobs, truth(sequence), rtol=1e-6)
    assert logprobs.dtype == np.float32 and not logprobs[:1].any()


@pytest.mark.parametrize('strict', [False, True])
@pytest.mark.parametrize(
  'form, least, tries',
  [
    ('prompt_logprobs', 0, 'p0 p0'),
    ('prompt_logprobs', 1, 'p0 p1 p1'),  # vLLM
    ('echo', 0, 'p0 p1 e1 e1'),
  ],
)
def test_supported_form_is_tried_first_from_then_on(form, least, tries, strict):
  server = Server(forms=(form,), least=least, strict=strict)
  connected = connect(server)
  for _ in range(2):
    (logprobs,) = connected.score([(IDS, 1.0)])
    np.testing.assert_allclose(logprobs, truth(IDS), rtol=1e-6)
  assert tries.split() == [
    f'{"e" if "echo" in body else "p"}{body["max_tokens"]}'
    for body in server.bodies
  ]


@pytest.mark.parametrize(
  'options', [{'forms': ()}, {'forms': (), 'strict': True}, {'tempered': False}]
)
def test_servers_that_cannot_score_are_refused(options):
  with pytest.raises(endpoints.EndpointError, match='teacher at .* score'):
    score(Server(**options), 0.5)


@pytest.mark.parametrize('form', FORMS)
def test_every_sequence_is_scored_at_its_own_temperature(form):
  temperatures = [1.0, 0.7, 0.7]
  server = Server(forms=(form,))
  scored = connect(server).score([(IDS, t) for t in temperatures])
  for temperature, logprobs in zip(temperatures, scored, strict=True):
    expected = truth(IDS, temperature)
    np.testing.assert_allclose(logprobs, expected, rtol=1e-5)
  # Two probes of sixteen tokens for the temperature other than 1.
  long = [b for b in server.bodies if len(b['prompt']) == 16 and form in b]
  assert len(long) == 2


@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize('value', [None, float('nan'), 0.5, 'x'])
def test_invalid_logprob_is_refused(form, value):
  def spoil(choice):
    if form == 'prompt_logprobs':
      choice[form][3]['7'] = {'logprob': value}
    elif choice['logprobs']:
      choice['logprobs']['token_logprobs'][3] = value
    return choice

  with pytest.raises(
    endpoints.EndpointError, match=r'teacher at .*token 3 \(id 7\)'
  ):
    score(Server(forms=(form,), spoil=spoil))


def echo_another(choice):
  if choice['logprobs']:
    choice['logprobs']['tokens'][2] = 'token_id:9'
  return choice


@pytest.mark.parametrize(
  ('form', 'spoil', 'message'),
  [
    (
      'prompt_logprobs',
      lambda choice: choice['prompt_logprobs'][4].pop('500') and choice,
      r'token 4 \(id 500\)',
    ),
    ('echo', echo_another, r'\[5, 301, 9, 7, 500'),
    (
      'echo',
      lambda choice: choice | {'prompt_token_ids': [1, *IDS.tolist()]},
      r'got \[1, 5, 301, 7',
    ),
    (
      'prompt_logprobs',
      lambda choice: choice['prompt_logprobs'].pop() and choice,
      'expected 8',
    ),
  ],
)
def test_logprobs_of_other_tokens_are_refused(form, spoil, message):
  with pytest.raises(endpoints.EndpointError, match=message):
    score(Server(forms=(form,), spoil=spoil))


def test_chat_returns_the_replies_in_order():
  def chat(body):
    text = body['messages'][-1]['content']
    content = None if text == 'think' else f'{text}!'
    return {'choices': [{'message': {'role': 'assistant', 'content': content}}]}

  server = Server(chat=chat)
  conversations = [
    ({'role': 'user', 'content': text},) for text in ('a', 'think', 'b')
  ]
  replies = connect(server).chat(conversations, max_tokens=9, temperature=0.3)
  assert replies == ['a!', '', 'b!']
  body = server.bodies[0]
  assert (body['max_tokens'], body['temperature']) == (9, 0.3)


def test_check_compares_fingerprints():
  ours = RENDERER.fingerprint
  server = Server(models=({'id': 'teacher', 'tokenizer': ours},))
  connect(server).check(RENDERER)
  server.models = ({'id': 'teacher', 'tokenizer': 'other'},)
  with pytest.raises(ValueError, match=f'other.*expected .{ours}'):
    connect(server).check(RENDERER)


def test_without_a_name_the_only_model_of_the_server_is_meant():
  own = {'id': 'teacher', 'tokenizer': RENDERER.fingerprint}
  server = Server(models=(own,))
  client = connect(server, name='')
  client.check(RENDERER)
  assert str(client).startswith('teacher at ')
  server.models = (own, {'id': 'other'})
  with pytest.raises(ValueError, match="got '', expected one of .*other"):
    connect(server, name='').check(RENDERER)


def tokenize(body, eos=EOS):
  assert body['add_special_tokens'] is False
  if body['prompt'] == RENDERER.tokenizer.eos:
    return {'tokens': [eos]}
  return {'tokens': list(body['prompt'].encode())}


def test_check_compares_the_tokens_of_a_probe(caplog):
  connect(Server(tokenize=tokenize)).check(RENDERER)
  assert not caplog.records
  answer = httpx.Response(200, json={'data': ['teacher']})
  with pytest.raises(endpoints.EndpointError, match='form of the OpenAI API'):
    connect(Server(troubles=[answer])).check(RENDERER)


@pytest.mark.parametrize(
  'other',
  [
    lambda body: {'tokens': [1, *body['prompt'].encode()]},  # a bos
    lambda body: tokenize(body, eos=EOS + 1),
  ],
)
def test_check_refuses_other_tokens(other):
  with pytest.raises(ValueError, match='template of teacher at'):
    connect(Server(tokenize=other)).check(RENDERER)


@pytest.mark.parametrize(
  'other', [None, lambda body: {'tokens': []}, lambda body: httpx.Response(501)]
)
def test_check_warns_if_the_tokens_cannot_be_compared(other, caplog):
  connect(Server(tokenize=other)).check(RENDERER)
  assert 'NOT CHECKED' in caplog.text


@pytest.mark.parametrize(
  'message', [{'content': 3}, {'content': None, 'tool_calls': [{'id': 'x'}]}]
)
def test_reply_that_is_no_text_is_refused(message):
  server = Server(chat=lambda _: {'choices': [{'message': message}]})
  with pytest.raises(endpoints.EndpointError, match='a text in .*content: got'):
    connect(server).chat([({'role': 'user', 'content': 'x'},)])
