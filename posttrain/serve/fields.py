"""The fields of a request's body, checked one by one."""

import itertools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from posttrain.util import foreign, json_files, spelling

MAX_MESSAGE = 600  # characters of an error's text
MAX_NAME = 80  # characters of a quoted name
# Commas, colons and opening brackets of a body: each value in memory takes up
# to 100 times its text, and the parser holds up all other requests.
MAX_VALUES = 2**20


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
      message: the error's text; shortened to `MAX_MESSAGE` characters.
      param: the field's name.
      code: OpenAI's error code.
    """
    super().__init__(foreign.text(message, MAX_MESSAGE))
    self.status, self.code = status, code
    self.param = None if param is None else foreign.text(param, MAX_NAME)

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
  return Refused(400, f'{name} must {must}: got {quote(got)}', name, code)


def quote(value: Any) -> str:
  """Returns a JSON value as a part of a message, whatever its size."""
  return foreign.quote(_beginning(value, 3), MAX_NAME)


def _beginning(value: Any, depth: int) -> Any:
  """Returns a small value with a similar beginning: repr takes time."""
  if isinstance(value, str):
    return value[: 2 * MAX_NAME]
  if not isinstance(value, list | dict) or not value:
    return value
  if not depth:
    return type(value)()
  if isinstance(value, list):
    return [_beginning(x, depth - 1) for x in value[:MAX_NAME]]
  items = itertools.islice(value.items(), MAX_NAME)
  return {_beginning(k, depth - 1): _beginning(v, depth - 1) for k, v in items}


def parse(content: bytes) -> dict[str, Any]:
  """Reads a body; raises Refused unless it is a JSON object."""
  if sum(map(content.count, (b',', b':', b'[', b'{'))) > MAX_VALUES:
    raise Refused(
      413,
      f'the body must have at most {MAX_VALUES} commas, colons and opening '
      'brackets: got more',
      code='request_too_large',
    )
  try:
    body = json_files.parse(content, 'the body')
  except ValueError as error:
    raise Refused(400, f'{error}') from error
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
        shown = foreign.text(name, MAX_NAME)
        near = spelling.near(shown, known)
        hint = f'; did you mean {near[0]!r}?' if near else ''
        raise Refused(
          400,
          f'{shown} must be left out: there is no such field{hint}',
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
