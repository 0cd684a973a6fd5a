"""Greedy answers to held-out tasks, graded by their environments.

No cache is kept: answers come from full forwards over prompt and answer.

Axes: B prompts answered at a time, T tokens of the longest prompt and answer.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from posttrain import envs, schema, scoring, types
from posttrain.chat import renderer as chat
from posttrain.models import transformer

STRIDE = 10  # tokens by which the forward of `greedy` widens


@dataclasses.dataclass(frozen=True)
class Answer:
  """One greedy attempt at a held-out task."""

  env: str
  id: str
  prompt: str
  text: str
  answer: Any
  correct: bool | None
  formatted: bool | None
  reward: float | None
  stop_reason: str
  tokens: int


class Evaluator:
  """Answers the evaluation tasks of every environment of a stage."""

  def __init__(
      self,
      env_by_name: dict[str, envs.base.Env],
      renderer: chat.Renderer,
      model: schema.Model,
      cfg: schema.Eval,
      seed: int,
  ):
    self._renderer = renderer
    self._cfg = cfg
    self._envs = {
        name: (env, [
            (task, self._prompt(task))
            for task in env.source('eval', seed).take(cfg.prompts)
        ])
        for name, env in env_by_name.items()
    }  # fmt: skip
    self._greedy = jax.jit(
        functools.partial(
            greedy, cfg=model, max_tokens=cfg.max_tokens,
            stop_ids=tuple(sorted(renderer.stop_ids)),
        )
    )  # fmt: skip

  def __call__(self, params) -> tuple[dict[str, float], list[Answer]]:
    """Returns metrics `eval/<name>/<env>` and every answer."""
    metrics, answers = {}, []
    for name, (env, tasks) in self._envs.items():
      if not tasks:
        continue
      done = self._answer(params, env, tasks)
      metrics.update(
          {f'eval/{key}/{name}': v for key, v in summarize(done).items()}
      )
      answers.extend(done)
    return metrics, answers

  def _prompt(self, task: types.Task) -> np.ndarray:
    """The ids that an answer follows; errors name the row."""
    try:
      return self._renderer.render(task.prompt, add_generation_prompt=True).ids
    except ValueError as error:
      raise ValueError(
          f'row {task.id} of environment {task.env}: {error}'
      ) from None

  def _answer(self, params, env, tasks) -> list[Answer]:
    width = max(len(ids) for _, ids in tasks)
    answers = []
    for start in range(0, len(tasks), self._cfg.batch):
      chunk = tasks[start : start + self._cfg.batch]
      ids, lengths = _pad([ids for _, ids in chunk], self._cfg.batch, width)
      tokens, counts = jax.device_get(self._greedy(params, ids, lengths))
      answers.extend(
          self._grade(task, env.make(task), row[:n])
          for (task, _), row, n in zip(chunk, tokens, counts, strict=False)
      )
    return answers

  def _grade(self, task: types.Task, episode, ids: np.ndarray) -> Answer:
    stopped = ids.size and int(ids[-1]) in self._renderer.stop_ids
    text = self._renderer.tokenizer.decode(ids.tolist())
    episode.reset()
    episode.step(text, truncated=not stopped)
    score = episode.grade()
    episode.close()
    return Answer(
        env=task.env,
        id=task.id,
        prompt='\n'.join(turn['content'] for turn in task.prompt),
        text=text,
        answer=task.answer,
        correct=score.correct,
        formatted=score.formatted,
        reward=score.reward,
        stop_reason='eos' if stopped else 'max_tokens',
        tokens=len(ids),
    )


def summarize(answers: list[Answer]) -> dict[str, float]:
  """Means over what is scorable; a name is absent where nothing is."""
  lengths = [answer.tokens for answer in answers]
  cut = [answer.stop_reason == 'max_tokens' for answer in answers]
  metrics = {'length': lengths, 'truncated': cut}
  for name, field in (
      ('pass_rate', 'correct'), ('format_rate', 'formatted'),
      ('reward', 'reward'),
  ):  # fmt: skip
    values = [getattr(answer, field) for answer in answers]
    metrics[name] = [value for value in values if value is not None]
  return {k: float(np.mean(v)) for k, v in metrics.items() if v}


def _pad(prompts, rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
  """Right-pads to [rows, width]; missing rows repeat the first prompt."""
  prompts = [*prompts, *[prompts[0]] * (rows - len(prompts))]
  ids = np.zeros((rows, width), np.int32)
  for row, prompt in zip(ids, prompts, strict=True):
    row[: len(prompt)] = prompt
  return ids, np.array([len(prompt) for prompt in prompts], np.int32)


def greedy(params, prompts, lengths, *, cfg, max_tokens, stop_ids):
  """Greedy completions, one full forward per token.

  The forward covers what can have been written so far, in strides.

  Args:
    params: the model's parameters.
    prompts: i32[B, P], right-padded.
    lengths: i32[B], tokens of each prompt.
    cfg: model options.
    max_tokens: longest completion.
    stop_ids: ids that end one.

  Returns:
    (tokens i32[B, max_tokens], counts i32[B]): the completions, with their
    stop token where one came; what lies behind `counts` means nothing.
  """
  carry = (
      0, jnp.pad(prompts, ((0, 0), (0, max_tokens))),
      jnp.zeros_like(lengths), jnp.zeros(lengths.shape, bool),
  )  # fmt: skip
  for end in (*range(STRIDE, max_tokens, STRIDE), max_tokens):
    carry = jax.lax.while_loop(
        lambda carry, end=end: (carry[0] < end) & ~carry[3].all(),
        functools.partial(
            _next, params=params, lengths=lengths, cfg=cfg,
            width=prompts.shape[1] + end, stop_ids=stop_ids,
        ),
        carry,
    )  # fmt: skip
  _, ids, counts, _ = carry
  places = jnp.arange(max_tokens)[None] + lengths[:, None]
  return jnp.take_along_axis(ids, places, axis=1), counts


def _next(carry, *, params, lengths, cfg, width, stop_ids):
  """Adds a token to every answer that has not ended."""
  step, ids, counts, done = carry
  rows, place = jnp.arange(len(ids)), lengths + counts
  seen = ids[:, :width]
  positions = jnp.broadcast_to(jnp.arange(width), seen.shape)
  hidden, _ = transformer.trunk(
      params, cfg, seen, positions, jnp.ones_like(seen)
  )
  logits = scoring.next_logits(params, cfg, hidden[rows, place - 1])
  token = jnp.argmax(logits, axis=-1).astype(ids.dtype)
  ids = ids.at[rows, place].set(jnp.where(done, ids[rows, place], token))
  stopped = jnp.isin(token, jnp.array(stop_ids))
  return step + 1, ids, counts + ~done, done | stopped
