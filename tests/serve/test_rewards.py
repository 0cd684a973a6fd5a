"""A reward model is served as scores."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from posttrain.models import transformer

from . import conftest

MESSAGES = [
  {'role': 'user', 'content': '2+2'},
  {'role': 'assistant', 'content': '4'},
]


def test_an_answer_has_the_reward_of_its_last_token(start, policy):
  cfg = policy.model
  kernel = jax.random.normal(jax.random.key(0), (cfg.embed_dim,))
  params = {
    **transformer.add_reward(policy.params),
    'reward': {'kernel': kernel},
  }
  (part,) = policy.renderer.demonstrate(MESSAGES)
  ids = part.ids[None]
  positions = jnp.arange(ids.size, dtype=jnp.int32)[None]
  hidden, _ = transformer.trunk(params, cfg, ids, positions, np.ones_like(ids))
  expected = transformer.rewards(params, hidden)[0, -1]
  with start(dataclasses.replace(policy, params=params)) as server:

    def post(path, messages):
      body = {'model': conftest.NAME, 'messages': messages}
      return server.client.post(path, json=body)

    result = post('/pooling', MESSAGES).json()
    (value,) = result['data'][0]['data']
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for bad in (MESSAGES[:1], [], None, 5, [5], [*MESSAGES, MESSAGES[0]]):
      error = post('/pooling', bad)
      assert (error.status_code, error.json()['error']['param']) == (
        400,
        'messages',
      )
    assert post('/v1/chat/completions', MESSAGES).status_code == 404
