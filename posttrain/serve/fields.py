"""The fields of a request's body, checked one by one."""

import difflib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any


class Refused(Exception):
  """A refused request, with its HTTP status and error object."""

  def __init__(
    self,
    status: int,
    message: str,
    param: str | None = None,
    code: str | None = None,
  ):
    """Creates the error.

    Args:
      status: the HTTP status.
      message: the error's text.
      param: the field's name.
      code: OpenAI's error code.
    """
    super().__init__(message)
    self.status, self.param, self.code = status, param, code

  @property
  def body(self) -> dict[str, Any]:
    """The error object, in OpenAI's form."""
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
  """Returns the refusal of a field's value."""
  text = repr(got)
  text = text if len(text) <= 80 else f'{text[:77]}...'
  return Refused(400, f'{name} must {must}: got {text}', name, code)


def parse(content: bytes) -> dict[str, Any]:
  """Reads a body; raises Refused unless it is a JSON object."""
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
  """The fields of a body; null means absent."""

  def __init__(self, body: Mapping[str, Any]):
    self._left = {k: v for k, v in body.items() if v is not None}
    self._known: set[str] = set()

  def take(self, name: str) -> Any:
    """Returns a field's value; None if it is absent."""
    self._known.add(name)
    return self._left.pop(name, None)

  def whole(
    self, name: str, default: int | None, low: int, high: int
  ) -> int | None:
    """Returns a whole number in [low, high]."""
    value = self.take(name)
    if value is None:
      return default
    if type(value) is not int or not low <= value <= high:
      raise wrong(name, f'be a whole number in [{low}, {high}]', value)
    return value

  def number(
    self, name: str, default: float, ok: Callable[[float], bool], must: str
  ) -> float:
    """Returns a finite number with `ok`; `must`: the error's requirement."""
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
    """Returns a bool."""
    value = self.take(name)
    if value is None:
      return default
    if type(value) is not bool:
      raise wrong(name, 'be true or false', value)
    return value

  def object(self, name: str) -> dict[str, Any]:
    """Returns an object; {} if it is absent."""
    value = self.take(name)
    if value is None:
      return {}
    if not isinstance(value, dict):
      raise wrong(name, 'be an object', value)
    return value

  def finish(self, ignored: set[str], neutral: Mapping[str, tuple]) -> None:
    """Refuses fields that were not taken.

    Args:
      ignored: fields that have no effect, whatever their values.
      neutral: fields that are not supported, with the values that are allowed.
    """
    for name, value in self._left.items():
      if name in ignored:
        continue
      if name not in neutral:
        known = [*self._known, *ignored, *neutral]
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
        default = f', or be {json.dumps(allowed[0])}' if allowed else ''
        raise wrong(
          name,
          f'be left out{default}: this server does not support it',
          value,
          'unsupported_field',
        )
