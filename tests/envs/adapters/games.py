"""Classes of the form that TRL's `environment_factory` takes."""

from typing import Literal


class Guess:
  """Guess a number; `low` and `secret` come from the row."""

  def __init__(self):
    self.tries, self.secret = 0, None

  def reset(self, secret: int = 5, **row) -> str | None:
    self.tries, self.secret = 0, secret
    return row.get('says')

  def guess(self, number: int, mood: Literal['good', 'bad'] = 'good') -> str:
    """Says whether the number is too small or too large.

    Args:
      number: what you think it is.
      mood: of the answer.
    """
    self.tries += 1
    if number == self.secret:
      return 'right'
    return f'too {"small" if number < self.secret else "large"}, {mood}'

  async def wait(self) -> int:
    """Waits."""
    return self.tries

  @property
  def broken(self):
    raise AssertionError('nobody asks a property')

  def _private(self):
    """No tool."""

  def get_reward(self) -> float:
    return 1 / self.tries if self.tries else 0


class Judged:
  """Has no tools, and no reward for this episode."""

  def reset(self, **row):
    return None

  async def get_reward(self):
    return None


def no_environment():
  return 3
