"""The fields of a request's body, taken one by one and checked."""

import difflib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any


class Refused(Exception):
  """A request that is not answered, with what the client is told."""

  def __init__(
    self,
    status: int,
    message: str,
    param: str | None = None,
    code: str | None = None,
  ):
    """Args: status: of HTTP; param: the field; code: as OpenAI calls it."""
    super().__init__(message)
    self.status, self.param, self.code = status, param, code

  @property
  def body(self) -> dict[str, Any]:
    """The object that says so, in OpenAI's form."""
    kinds = {
      401: 'authentication_error',
      404: 'not_found_error',
      429: 'rate_limit_error',
      500: 'server_error',
      503: 'server_error',
    }
    return {
      'error': {
        'message': str(self),
        'param': self.param,
        'code': self.code,
        'type': kinds.get(self.status, 'invalid_request_error'),
      }
    }


def wrong(name: str, must: str, got: Any, code: str | None = None) -> Refused:
  """A field that must be something else."""
  text = repr(got)
  text = text if len(text) <= 80 else f'{text[:77]}...'
  return Refused(400, f'{name} must {must}: got {text}', name, code)


def parse(content: bytes) -> dict[str, Any]:
  """Reads a body; refuses what is no JSON object."""
  try:
    body = json.loads(content)
  except (ValueError, RecursionError) as error:
    raise Refused(400, f'the body must be JSON: {error}') from error
  if not isinstance(body, dict):
    raise Refused(
      400, f'the body must be a JSON object: got a {type(body).__name__}'
    )
  return body


class Fields:
  """A body; null is as good as absent."""

  def __init__(self, body: Mapping[str, Any]):
    self._left = {k: v for k, v in body.items() if v is not None}
    self._asked: set[str] = set()

  def take(self, name: str) -> Any:
    """Returns a field's value; None where there is none."""
    self._asked.add(name)
    return self._left.pop(name, None)

  def whole(
    self, name: str, default: int | None, low: int, high: int
  ) -> int | None:
    """Returns a whole number between two, both included."""
    value = self.take(name)
    if value is None:
      return default
    if type(value) is not int or not low <= value <= high:
      raise wrong(name, f'be a whole number in [{low}, {high}]', value)
    return value

  def number(
    self, name: str, default: float, ok: Callable[[float], bool], must: str
  ) -> float:
    """Returns a finite number for which `ok`; `must` says which are."""
    value = self.take(name)
    if value is None:
      return default
    # A whole number may be too large to be a float.
    if type(value) not in (int, float) or not -1e9 <= value <= 1e9:
      raise wrong(name, must, value)
    if not math.isfinite(value) or not ok(value):
      raise wrong(name, must, value)
    return float(value)

  def flag(self, name: str, default: bool = False) -> bool:
    """Returns true or false."""
    value = self.take(name)
    if value is None:
      return default
    if type(value) is not bool:
      raise wrong(name, 'be true or false', value)
    return value

  def object(self, name: str) -> dict[str, Any]:
    """Returns an object; {} where there is none."""
    value = self.take(name)
    if value is None:
      return {}
    if not isinstance(value, dict):
      raise wrong(name, 'be an object', value)
    return value

  def finish(self, ignored: set[str], neutral: Mapping[str, tuple]) -> None:
    """Refuses what is left.

    Args:
      ignored: fields that change nothing, whatever they say.
      neutral: fields that are refused, but for these values.
    """
    for name, value in self._left.items():
      if name in ignored:
        continue
      if name not in neutral:
        known = [*self._asked, *ignored, *neutral]
        near = difflib.get_close_matches(name, known, 1)
        hint = f'; did you mean {near[0]!r}?' if near else ''
        raise Refused(
          400,
          f'{name} must be left out: there is no such field{hint}',
          name,
          'unknown_field',
        )
      allowed = neutral[name]
      if not any(type(value) is type(x) and value == x for x in allowed):
        but = f', or be {json.dumps(allowed[0])}' if allowed else ''
        raise wrong(
          name,
          f'be left out{but}: this server does not support it',
          value,
          'unsupported_field',
        )
