r"""An expression of given numbers that equals a target: `\boxed{(44-8)/3+7}`.

1. A task is a multiset of 3 or 4 numbers from 1 to 99, at most once per split.
   Sizes are equally frequent. A fifth of all multisets is for evaluation, by a
   hash that depends on no option and no seed (`text_games.Space`).
2. Its target is the value of an expression, which is the demonstration: two
   random parts are joined by a random operation until one part is left. Every
   part is a positive integer, and the target is at most `max_target`.
3. An answer is the last `<answer>...</answer>` or `\boxed{...}` outside of
   thoughts. It is correct if its value is the target, exactly, and it has each
   number once, as in the published rule; parts may be any fractions.

References: Gandhi et al., Stream of Search, arXiv 2404.03683; Pan et al.,
TinyZero, whose rule this is.
"""

import ast
import fractions
import functools
import math
import operator
import random
import re
from collections.abc import Callable, Sequence

from posttrain import schema, types
from posttrain.chat import tool_calls
from posttrain.envs import base, text_games

MAX_NUMBER = 99
OPERATIONS = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.Div: operator.truediv,
}
_ANSWER = re.compile(
  r'<answer>((?:(?!\\boxed)[^<])*)</answer>|\\boxed\{([^{}]*)\}'
)
_EXPRESSION = re.compile('[0-9+*/() -]{1,100}')
_SIGNS = {'\\times': '*', '\\div': '/', '×': '*', '÷': '/'}


def evaluate(text: str) -> tuple[fractions.Fraction, list[int]] | None:
  """Returns an expression's value and its numbers, sorted.

  None if it is longer than 100 characters, divides by zero, or has anything but
  non-negative integers, + - * / between two parts, and parentheses.
  """
  numbers = []

  def value(node: ast.expr) -> fractions.Fraction:
    match node:
      case ast.Constant(value=int(number)):
        numbers.append(number)
        return fractions.Fraction(number)
      case ast.BinOp(left, op, right) if type(op) in OPERATIONS:
        return OPERATIONS[type(op)](value(left), value(right))
    raise ValueError(node)

  if not _EXPRESSION.fullmatch(text):
    return None
  try:
    return value(ast.parse(text, mode='eval').body), sorted(numbers)
  except (SyntaxError, ValueError, ZeroDivisionError, MemoryError):
    return None


def grade(text: str, numbers: Sequence[int], target: int) -> types.Score:
  """Grades an assistant turn: reward 1 if its last answer is correct.

  Args:
    text: the assistant turn.
    numbers: the numbers to use.
    target: the value to reach.
  """
  answers = _ANSWER.findall(tool_calls.outside_thoughts(text))
  answer = ''.join(['', *answers][-1])
  for sign, plain in _SIGNS.items():
    answer = answer.replace(sign, plain)
  parsed = evaluate(answer.strip())
  correct = parsed == (target, sorted(numbers))
  return types.Score(
    reward=float(correct), correct=correct, formatted=parsed is not None
  )


def draw(
  numbers: Sequence[int], pick: Callable[[int], int]
) -> tuple[int, str, list[str]] | None:
  """Draws an expression of all numbers, without needless parentheses.

  Args:
    numbers: the numbers.
    pick: draws an integer below another.

  Returns:
    Its value, its text and its steps, `44-8=36`; None if a part of the draw is
    not a positive integer.
  """
  # (value, text, the last operation's rank: + -, * /, none)
  parts, steps = [(x, str(x), 2) for x in numbers], []
  while len(parts) > 1:
    (a, left, p), (b, right, q) = (parts.pop(pick(len(parts))) for _ in 'ab')
    op = '+-*/'[pick(4)]
    if (op == '-' and a <= b) or (op == '/' and a % b):
      return None
    value = {'+': a + b, '-': a - b, '*': a * b, '/': a // b}[op]
    rank = int(op in '*/')
    left = f'({left})' if p < rank else left
    right = f'({right})' if q < rank + (op in '-/') else right
    parts.append((value, left + op + right, rank))
    steps.append(f'{a}{op}{b}={value}')
  value, text, _ = parts[0]
  return value, text, steps


class Countdown(base.Env):
  """`schema.Countdown`, single turn."""

  max_turns = 1

  def __init__(self, name: str, cfg: schema.Countdown):
    """Counts the multisets of both splits.

    Raises:
      ValueError: an option sets more tasks than the split has multisets.
    """

    def key(size: int, index: int) -> str:
      """Returns the multiset with a number: ascending, joined by commas."""
      chosen = text_games.subset(index, size, MAX_NUMBER + size - 1)
      return ','.join(str(x - i + 1) for i, x in enumerate(chosen))

    self.name, self._cfg = name, cfg
    spaces = [
      text_games.Space(
        math.comb(MAX_NUMBER + size - 1, size), functools.partial(key, size)
      )
      for size in cfg.sizes
    ]
    self._draws = text_games.Draws(name, cfg, spaces)

  def source(self, split: str, seed: int) -> base.Source:
    """Returns the tasks of a split; those of evaluation ignore the seed."""
    return self._draws.source(split, seed, self.task)

  def make(self, task: types.Task) -> base.OneTurn:
    numbers = task.info['numbers']
    return base.OneTurn(task, lambda text, _: grade(text, numbers, task.answer))

  def task(self, key: str) -> types.Task:
    """Returns the task of a multiset; its prompt has the numbers shuffled."""
    rng = random.Random(key)

    def pick(below: int) -> int:
      return int(rng.random() * below)

    rest = [int(x) for x in key.split(',')]
    numbers = [rest.pop(pick(len(rest))) for _ in range(len(rest))]
    drawn = None
    while drawn is None or drawn[0] > self._cfg.max_target:
      drawn = draw(numbers, pick)
    target, text, steps = drawn
    prompt = self._cfg.prompt.replace('{target}', str(target))
    prompt = prompt.replace('{numbers}', ' '.join(map(str, numbers)))
    steps = steps if self._cfg.worked else []
    shown = ', '.join([*steps, f'\\boxed{{{text}}}'])
    return types.Task(
      id=key,
      env=self.name,
      prompt=({'role': 'user', 'content': prompt},),
      answer=target,
      demonstration=({'role': 'assistant', 'content': shown},),
      info={'numbers': numbers, 'size': len(numbers)},
    )
