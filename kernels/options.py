"""The static options of a kernel."""

from typing import NamedTuple


class Options(NamedTuple):
  """The options that a kernel is compiled for; hashable."""

  scale: float
  softcap: float | None
  backend: str
  interpret: bool
