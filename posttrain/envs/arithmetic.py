"""`What is A op B?`, answered with `\\boxed{N}`; graded by `grade`.

1. The key space: every (a, op, b) of the options, a and b in their range.
2. A fixed hash of the key assigns a fifth of the keys to evaluation. It depends
   on no option and no seed, so no stage trains on an evaluation question;
   `a + b` and `b + a` are in the same split.
3. The operator is drawn first, so that operators are balanced, then its
   operands, each key at most once. If an operator has fewer keys than its
   share (`x` with small factors), the other operators fill the difference.

The evaluation tasks depend on the options alone. The training tasks also depend
on the seed of the source, which shuffles their order too.
"""

import operator
import re

import numpy as np

from posttrain import schema, types
from posttrain.chat import tool_calls
from posttrain.data import sources
from posttrain.envs import base

# Index = the hash's; never reorder.
SOLVE = {'+': operator.add, '-': operator.sub, 'x': operator.mul}
OPS = tuple(SOLVE)
EVAL_SHARE = 5  # one key in 5 is an evaluation key
_BOX = re.compile(r'\\boxed\{(?: *([+-]?[0-9]{1,18}) *\})?')


def parse_answer(text: str) -> int | None:
  r"""Returns the integer of the last `\boxed{...}`; None if there is none.

  A box holds an optional sign, at most 18 ASCII digits, and spaces around them.
  A box begins with `\boxed{`; the word without a brace does not count, so
  `\boxed{5}, the \boxed answer` gives 5. `\boxed{1,234}`, `\boxed{3.0}` and an
  unclosed brace are boxes without an answer, and an earlier box is not read
  then: the last box is the answer, so that several guesses are worth no more
  than one.
  """
  numbers = _BOX.findall(text)
  return int(numbers[-1]) if any(numbers[-1:]) else None


def grade(text: str, answer: int) -> types.Score:
  """Grades an assistant turn: reward 1 if its last box holds the answer.

  A box in a thought, `<think>...</think>`, is none.
  """
  parsed = parse_answer(tool_calls.outside_thoughts(text))
  return types.Score(
    reward=float(parsed == answer),
    correct=parsed == answer,
    formatted=parsed is not None,
    answer=None if parsed is None else str(parsed),
  )


def demonstrate(
  a: int, op: str, b: int, *, worked: bool, mistake: int = 0
) -> str:
  r"""Writes an answer: a correct one, or one with a wrong step.

  The worked form of + and - adds place by place, always tens at least, and
  borrows only in the sums: `47-85` is `40-80=-40, 7-5=2, -40+2=\boxed{-38}`.
  Products are those of the nonzero places, summed one by one. Each step reads
  few digits, all from the question or the previous step, and the form of the
  next step never depends on a comparison of whole numbers, so that a small
  byte-level model learns it. The length does not depend on options: at most 37
  bytes for two digits, 68 for three, 90 for `99x99`; a mistake may add two.

  Args:
    a, op, b: the key.
    worked: whether to show the steps; otherwise the answer is the only step.
    mistake: 0 = none; +-n = step n (modulo the number of steps) is too large or
      too small: by ten where it is a multiple of ten but not 0, else by one.
      Later steps continue correctly from the wrong number.
  """
  terms = [(a, b)]
  if worked and op == 'x':
    terms = [(p, q) for p in _places(a) for q in _places(b) if p and q] or terms
  elif worked:
    width = max(2, len(str(max(a, b))))
    terms = list(zip(_places(a, width), _places(b, width), strict=True))
  wrong = (abs(mistake) - 1) % (2 * len(terms) - 1) if mistake else None
  steps, values = [], []

  def result(value: int) -> int:
    """Returns the result of the next step, wrong if it is the mistake's."""
    if len(steps) != wrong:
      return value
    by = 10 if value and value % 10 == 0 else 1
    return value + by if mistake > 0 else value - by

  for p, q in terms:
    values.append(result(SOLVE[op](p, q)))
    steps.append(f'{p}{op}{q}={values[-1]}')
  if not worked:
    return f'\\boxed{{{values[0]}}}'
  total = values[0]
  for value in values[1:]:
    before, total = total, result(total + value)
    # A zero takes the sign before it. Equal signs then always join digits, and
    # unequal signs always borrow: given `-50+0`, small models borrowed and
    # answered -40.
    sign = '-' if value < 0 or (value == 0 and before < 0) else '+'
    steps.append(f'{before}{sign}{abs(value)}={total}')
  *shown, last = steps
  left, _, answer = last.rpartition('=')
  return ', '.join([*shown, f'{left}=\\boxed{{{answer}}}'])


def _places(number: int, width: int = 1) -> list[int]:
  """Returns the value of each digit, the highest first: 47 -> [40, 7]."""
  digits = str(number).zfill(width)
  return [
    int(digit) * 10 ** (len(digits) - 1 - i) for i, digit in enumerate(digits)
  ]


class Arithmetic(base.Env):
  """`schema.Arithmetic`, single turn."""

  max_turns, votes = 1, True

  def __init__(self, name: str, cfg: schema.Arithmetic):
    """Counts the keys of both splits.

    Raises:
      ValueError: an option sets more tasks than the split has keys (four
        fifths of all for training, one fifth for evaluation).
    """
    self.name, self._cfg = name, cfg
    for split in base.SPLITS:
      keys = np.concatenate(self._pools(split))
      base.check_count(name, split, getattr(cfg, f'{split}_tasks'), len(keys))

  def source(self, split: str, seed: int) -> base.Source:
    """Returns the tasks of a split; those of evaluation ignore the seed."""
    pools = self._pools(split)
    count, ops = getattr(self._cfg, f'{split}_tasks'), len(pools)
    # An even share of each operator, at most its keys; the first round up.
    for i in sorted(range(ops), key=lambda i: len(pools[i])):
      share = min(len(pools[i]), -(-count // ops))
      count, ops = count - share, ops - 1
      if split == 'train':
        op = OPS.index(self._cfg.ops[i])
        pools[i] = pools[i][sources.permutation(len(pools[i]), seed, op)]
      pools[i] = pools[i][:share]
    keys = np.concatenate(pools)
    # Sorted by hash, so that the first n hold all operators.
    keys = keys[np.argsort(_hash(keys), kind='stable')]
    fingerprint = sources.fingerprint(repr(self._cfg).encode(), keys.tobytes())

    def make(key: np.ndarray) -> types.Task:
      op, a, b = key.tolist()
      return self.task(a, OPS[op], b)

    return sources.Shuffled(base.Tasks(keys, make), seed, fingerprint)

  def make(self, task: types.Task) -> base.OneTurn:
    # The box is complete or missing, whether the text was cut off or not.
    return base.OneTurn(task, lambda text, _: grade(text, task.answer))

  def task(self, a: int, op: str, b: int) -> types.Task:
    """Returns the task of a key."""
    demonstration = demonstrate(
      a, op, b, worked=self._cfg.worked, mistake=self._mistake(a, op, b)
    )
    prompt = ({'role': 'user', 'content': f'What is {a} {op} {b}?'},)
    if self._cfg.hint:
      hint = self._cfg.hint.replace('{demonstration}', demonstration)
      prompt = ({'role': 'system', 'content': hint}, *prompt)
    return types.Task(
      id=f'{a}{op}{b}',
      env=self.name,
      prompt=prompt,
      answer=SOLVE[op](a, b),
      demonstration=({'role': 'assistant', 'content': demonstration},),
      info={'op': op},
    )

  def _mistake(self, a: int, op: str, b: int) -> int:
    """Draws the `mistake` of a key's demonstration; the same for every seed."""
    if not self._cfg.mistakes:
      return 0
    rng = np.random.default_rng([OPS.index(op), a, b])
    if rng.random() >= self._cfg.mistakes:
      return 0
    return int(rng.integers(1, 1000) * rng.choice([-1, 1]))

  def _pools(self, split: str) -> list[np.ndarray]:
    """Returns the keys of each operator in a split: i64[keys, 3]."""
    cfg, pools = self._cfg, []
    for op in cfg.ops:
      least, most = cfg.min_operand, cfg.max_operand
      if op == 'x':
        least, most = cfg.min_factor, cfg.max_factor
      size = most - least + 1
      operands = least + np.indices((size, size)).reshape(2, -1).T
      keys = np.insert(operands, 0, OPS.index(op), axis=1)
      # a + b and b + a share their split, hence the hash of sorted operands.
      paired = operands if op == '-' else np.sort(operands, axis=1)
      paired = np.insert(paired, 0, OPS.index(op), axis=1)
      held_out = _hash(paired) % np.uint64(EVAL_SHARE) == 0
      keys = keys[held_out == (split == 'eval')]
      pools.append(keys[np.argsort(_hash(keys), kind='stable')])
    return pools


def _hash(keys: np.ndarray) -> np.ndarray:
  """Hashes keys by the finalizer of splitmix64 (Steele et al.): u64[keys]."""
  op, a, b = keys.astype(np.uint64).T
  x = (op << np.uint64(40) | a << np.uint64(20) | b) + np.uint64(1)
  x *= np.uint64(0x9E3779B97F4A7C15)
  x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
  return x ^ x >> np.uint64(31)
