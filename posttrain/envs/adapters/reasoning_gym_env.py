"""Tasks of reasoning-gym, generated and scored in process.

1. The data set of evaluation has a seed of its own, that of training the seed
   of the source. Questions that repeat, or are those of evaluation, are left
   out of training.
2. An answer is the last `<answer>...</answer>` outside of thoughts, or the
   whole turn. Its reward is `score_answer`; it is correct if that is 1.
3. The demonstration is the entry's answer in tags; there is none where any
   answer of a kind is right (`rush_hour`, `graph_color`).
"""

import functools
import re
from collections.abc import Mapping
from typing import Any

from posttrain import schema, types
from posttrain.chat import tool_calls
from posttrain.data import sources
from posttrain.envs import adapters, base

EVAL_SEED = 2**31 - 1
_ANSWER = re.compile(r'<answer>(.*?)</answer>', re.DOTALL)


class ReasoningGym(base.Env):
  """`schema.ReasoningGym`, single turn."""

  max_turns = 1

  def __init__(self, name: str, cfg: schema.ReasoningGym):
    """Generates the tasks of evaluation.

    Raises:
      ValueError: `reasoning-gym` is not installed, or it has no such task or
        option.
    """
    gym = adapters.load('reasoning_gym', 'reasoning-gym', name)
    self.name, self._cfg = name, cfg

    def generate(seed: int) -> Any:
      size = cfg.eval_tasks if seed == EVAL_SEED else cfg.train_tasks
      return base.build(
        f'envs.{name}.env.dataset',
        lambda: gym.create_dataset(
          cfg.dataset, seed=seed, size=size, **cfg.options
        ),
      )

    self._data = functools.cache(generate)  # by seed
    self._held_out = {x['question'] for x in self._data(EVAL_SEED)}

  def source(self, split: str, seed: int) -> base.Source:
    """Returns the tasks of a split; those of evaluation ignore the seed."""
    key = EVAL_SEED if split == 'eval' else seed
    tasks = {
      entry['question']: self._task(f'{key}:{i}', entry)
      for i, entry in enumerate(self._data(key))
      if split == 'eval' or entry['question'] not in self._held_out
    }
    fingerprint = sources.fingerprint(*map(str.encode, tasks))
    return sources.Shuffled([*tasks.values()], seed, fingerprint)

  def make(self, task: types.Task) -> base.OneTurn:
    key, index = map(int, task.id.split(':'))
    data = self._data(key)

    def grade(text: str, truncated: bool) -> types.Score:
      text = tool_calls.outside_thoughts(text)
      tagged = _ANSWER.findall(text)
      answer = [text, *tagged][-1].strip()
      reward = float(data.score_answer(answer, data[index]))
      return types.Score(reward, reward == 1, formatted=bool(tagged))

    return base.OneTurn(task, grade)

  def _task(self, id: str, entry: Mapping[str, Any]) -> types.Task:
    answer = entry['answer']
    prompt = f'{entry["question"]}\n\n{self._cfg.instruction}'.strip()
    shown = {'role': 'assistant', 'content': f'<answer>{answer}</answer>'}
    return types.Task(
      id=id,
      env=self.name,
      prompt=({'role': 'user', 'content': prompt},),
      answer=answer,
      demonstration=None if answer is None else (shown,),
    )
