"""Names of `errors`, for modules that do not import it yet."""

import traceback

from posttrain.util import errors

text, quote, error, place = (
  errors.text,
  errors.quote,
  errors.describe,
  errors.place,
)


def kind(value: object) -> str:
  """Returns the name of a value's type."""
  return type(value).__name__


def stack(value: BaseException, limit: int = 12) -> str:
  """Returns the last frames of an exception, a line each; for a log."""
  return ''.join(traceback.format_tb(value.__traceback__, -limit)).rstrip()


def mask(secret: str) -> None:
  """Does nothing: keys are never put into messages."""
  del secret
