"""A multi-turn environment and an engine with scripted completions."""

import dataclasses
import time

import numpy as np

from posttrain import types
from posttrain.chat import rendering, tokenizers
from posttrain.decode import requests
from posttrain.rollout import episodes

RENDERER = rendering.Renderer(tokenizers.Bytes())
EOS = RENDERER.tokenizer.eos_id


@dataclasses.dataclass
class Recall:
  """The policy must repeat its first turn; the environment replies `1?`, `2?`.

  The task's answer is the number of turns after which the episode is done; the
  rewards of turns are 1/2, 1, 3/2, ... A hook in `fails` calls its function
  instead.
  """

  max_turns: int = 2
  name: str = 'recall'
  blocking: bool = False
  prompt: types.Messages = ({'role': 'user', 'content': 'name'},)
  fails: dict = dataclasses.field(default_factory=dict)
  closed: list = dataclasses.field(default_factory=list)

  def hook(self, name, value=None):
    return self.fails[name]() if name in self.fails else value

  def make(self, task):
    self.hook('make')
    return RecallEpisode(self, task)


class RecallEpisode:
  def __init__(self, env, task):
    self._env, self._task = env, task
    self.turns = []

  def reset(self):
    return self._env.hook('reset', self._env.prompt)

  def step(self, text, truncated):
    self.turns.append((text, truncated))
    reply = {'role': 'user', 'content': f'{len(self.turns)}?'}
    return self._env.hook(
      'step',
      types.StepOut(
        messages=(reply,),
        reward=len(self.turns) / 2,
        done=len(self.turns) == self._task.answer,
      ),
    )

  def grade(self):
    texts = [text for text, _ in self.turns]
    right = len(set(texts)) == 1
    return self._env.hook(
      'grade',
      types.Score(
        float(right), correct=right, metrics={'cut': self.turns[-1][1]}
      ),
    )

  def close(self):
    self._env.closed.append(self._task.id)
    self._env.hook('close')


def spec(
  uid, env=None, turns=2, temperature=1.0, max_tokens=8, task='t', **budgets
):
  task = types.Task(f'{task}{uid}', 'recall', (), answer=turns)
  return episodes.EpisodeSpec(
    uid, env or Recall(), task, temperature, max_tokens, **budgets
  )


def wait_for(condition):
  end = time.monotonic() + 20
  while not condition():
    assert time.monotonic() < end
    time.sleep(0.005)


def raises(error):
  def fail():
    raise error

  return fail


class Engine:
  """An engine that completes by the script of each uid, one text per turn.

  A text ends with eos, unless max_tokens or the capacity cuts it. Token t of
  a sequence has the logprob -t / 8; `pick` selects from the uids in flight,
  oldest first, the ones that stop next.
  """

  def __init__(self, scripts, pick=lambda uids: uids[:1], capacity=10**6):
    self.scripts = {uid: list(texts) for uid, texts in scripts.items()}
    self.pick, self.capacity = pick, capacity
    self.requests, self.released = [], []
    self.ids = {}  # all tokens of each slot
    self.running, self.held, self.version = {}, set(), 3

  def submit(self, request):
    self.requests.append(request)
    self.ids[request.id] = np.zeros(0, np.int32)
    self._start(request, request.ids, request.max_tokens)

  def extend(self, id, ids, max_tokens):
    self.held.remove(id)
    self._start(self._request(id), ids, max_tokens)

  def _start(self, request, ids, max_tokens):
    self.ids[request.id] = np.concatenate([self.ids[request.id], ids])
    self.running[request.id] = max_tokens

  def _request(self, id):
    (request,) = (r for r in self.requests if r.id == id)
    return request

  def poll(self):
    return [self._stop(uid) for uid in self.pick(list(self.running))]

  def _stop(self, uid):
    max_tokens, held = self.running.pop(uid), self.ids[uid]
    ids = np.array([*self.scripts[uid].pop(0).encode(), EOS], np.int32)
    space = min(max_tokens, self.capacity - len(held))
    reason = 'max_tokens' if space == max_tokens else 'overflow'
    if len(ids) <= space:
      reason = 'eos'
    ids = ids[: max(space, 0)]
    self.ids[uid] = np.concatenate([held, ids])
    if self._request(uid).hold:
      self.held.add(uid)
    self.version += 1
    return requests.Completion(
      uid,
      ids,
      -np.arange(len(held), len(self.ids[uid])) / np.float32(8),
      reason,
      self.version,
    )

  def release(self, id):
    self.held.remove(id)
    self.released.append(id)


class Restarting(Engine):
  """An engine whose scripts are per episode, whatever the request ids are."""

  def submit(self, request):
    uid = episodes.uid_of(request.id)
    self.scripts[request.id] = self.scripts[uid]
    super().submit(request)


def assert_same(rollouts, others, atol=0.0):
  """Compares rollouts, but not their versions: the engine counts completions.

  Args:
    rollouts: some rollouts.
    others: as many.
    atol: nats by which logprobs may differ.
  """
  for a, b in zip(rollouts, others, strict=True):
    for name in ('uid', 'messages', 'stop_reason', 'turns', 'score', 'error'):
      assert getattr(a, name) == getattr(b, name)
    for x, y in zip(a.samples, b.samples, strict=True):
      for field in dataclasses.fields(x):
        left, right = getattr(x, field.name), getattr(y, field.name)
        if field.name == 'sampler_logprobs':
          np.testing.assert_allclose(left, right, rtol=0, atol=atol)
        elif field.name not in ('versions', 'task'):
          np.testing.assert_array_equal(left, right, err_msg=field.name)
