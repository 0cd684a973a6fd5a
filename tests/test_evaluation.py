"""Evaluation: greedy answers, what is counted, what is not scorable."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain import envs, evaluation, schema
from posttrain.models import transformer
from tests import fixtures

STOPS = (3, 7)


@jax.jit
def _next(params, row, length):
  """The greedy successor of the first `length` of 16 tokens."""
  hidden, _ = transformer.trunk(
      params, fixtures.MODEL, row[None], jnp.arange(16)[None],
      jnp.ones((1, 16), jnp.int32),
  )  # fmt: skip
  weight, _ = transformer.head(params, fixtures.MODEL)
  return jnp.argmax(hidden[0, length - 1] @ weight)


def _naive(params, prompt, max_tokens):
  """One token at a time, each from a forward of its own."""
  ids = list(prompt)
  while len(ids) - len(prompt) < max_tokens:
    row = np.pad(np.array(ids, np.int32), (0, 16 - len(ids)))
    ids.append(int(_next(params, row, len(ids))))
    if ids[-1] in STOPS:
      break
  return ids[len(prompt) :]


@pytest.mark.parametrize('max_tokens', [1, 6])
def test_greedy_is_one_argmax_after_another(max_tokens, monkeypatch):
  monkeypatch.setattr(evaluation, 'STRIDE', 4)  # two strides of six
  rng = np.random.default_rng(0)
  params = transformer.init(jax.random.key(1), fixtures.MODEL)
  # A sharp law over few tokens, so that stop tokens come, early and late.
  table = 3.0 * params['embed']['table']
  params['embed']['table'] = table.at[10:].multiply(0.1)
  prompts = [rng.integers(0, 10, n).tolist() for n in (1, 5, 3, 5, 2, 4)]
  ids = np.zeros((6, 5), np.int32)
  for row, prompt in zip(ids, prompts, strict=True):
    row[: len(prompt)] = prompt
  tokens, counts = jax.jit(
      lambda p, i, n: evaluation.greedy(
          p, i, n, cfg=fixtures.MODEL, max_tokens=max_tokens, stop_ids=STOPS
      )
  )(params, ids, np.array([len(p) for p in prompts], np.int32))
  expected = [_naive(params, prompt, max_tokens) for prompt in prompts]
  got = [row[:n].tolist() for row, n in zip(tokens, counts, strict=True)]
  assert got == expected
  if max_tokens > 1:
    assert len({len(answer) for answer in expected}) > 1


def _answer(**fields):
  return evaluation.Answer(**{
      'env': 'e', 'id': '1', 'prompt': '', 'text': '', 'answer': 1,
      'correct': None, 'formatted': None, 'reward': None,
      'stop_reason': 'eos', 'tokens': 4, **fields,
  })  # fmt: skip


def test_what_is_not_scorable_is_left_out_of_the_mean():
  answers = [
      _answer(correct=True, formatted=True, reward=1.0),
      _answer(correct=False, formatted=True, reward=0.0, tokens=8,
              stop_reason='max_tokens'),
      _answer(),
  ]  # fmt: skip
  assert evaluation.summarize(answers) == {
      'pass_rate': 0.5, 'format_rate': 1.0, 'reward': 0.5,
      'length': pytest.approx(16 / 3), 'truncated': pytest.approx(1 / 3),
  }  # fmt: skip
  assert set(evaluation.summarize([_answer()])) == {'length', 'truncated'}


def test_an_evaluator_that_always_knows_scores_one(monkeypatch):
  """The whole way from task to rate, with the model's word replaced."""
  env = envs.make('sums', schema.Arithmetic(train_tasks=10, eval_tasks=7))
  renderer, eos = fixtures.RENDERER, fixtures.RENDERER.tokenizer.eos_id
  evaluator = evaluation.Evaluator(
      {'sums': env}, renderer, fixtures.MODEL,
      schema.Eval(prompts=7, batch=3, max_tokens=48), seed=0,
  )  # fmt: skip
  said = []

  def knows(params, ids, lengths):
    tokens = np.zeros((len(ids), 48), np.int32)
    counts = np.zeros(len(ids), np.int32)
    for row, prompt in enumerate(ids):
      question = renderer.tokenizer.decode(prompt[: lengths[row]].tolist())
      a, op, b = question.removeprefix('What is ').rstrip('?').split()
      task = env.task(int(a), op, int(b))
      text = task.demonstration[0]['content']
      said.append(text)
      answer = [*renderer.tokenizer.encode(text), eos]
      tokens[row, : len(answer)], counts[row] = answer, len(answer)
    return tokens, counts

  monkeypatch.setattr(evaluator, '_greedy', knows)
  values, answers = evaluator({})
  assert len(answers) == 7 and len(said) == 9  # 3 batches of 3
  assert values['eval/pass_rate/sums'] == values['eval/format_rate/sums'] == 1
  assert values['eval/truncated/sums'] == 0
  assert answers[0].text == said[0] and answers[0].stop_reason == 'eos'
