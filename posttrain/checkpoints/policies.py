"""Policies by path, for those who ask them: weights, model, tokens, stops.

A path is any that `weights` knows. Importing this is cheap, so that a mistake
in a command line is answered at once.
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

from posttrain import schema
from posttrain.chat import pretrained
from posttrain.chat import renderer as chat

DEFAULT_MAX_TOKENS = 256  # of an answer, where no evaluation says how many


@dataclasses.dataclass(frozen=True)
class Policy:
  """What a checkpoint holds of a policy."""

  params: Any
  model: schema.Model  # with its vocabulary
  renderer: chat.Renderer | None  # None = there is no tokenizer
  stop_ids: tuple[int, ...]
  max_tokens: int  # of an answer, in the evaluation of its stage

  def text(self, ids: Sequence[int]) -> str:
    """Ids as text; as numbers, where there is no tokenizer."""
    if self.renderer is None:
      return ','.join(map(str, ids))
    return self.renderer.tokenizer.decode(ids)


def load(path: str, *, text: bool = True, variables: str = '{}') -> Policy:
  """Loads a policy onto one device, whatever mesh it was trained on.

  Args:
    path: of a workdir, a stage's folder or a step's, or of a HuggingFace or
      PEFT directory.
    text: whether there is any to be read: a directory whose tokenizer cannot
      be used is refused only then.
    variables: of a directory's template; a run has its own.

  Raises:
    ValueError: nothing is there, it is damaged, or its tokenizer is gone or
      another one by now.
  """
  from posttrain import compilation
  from posttrain.checkpoints import store, weights
  from posttrain.models import transformer

  folder = weights.find(path)
  max_tokens, cache = DEFAULT_MAX_TOKENS, schema.Run.compilation_cache
  if weights.is_run(folder):
    host = store.read_host(folder)
    config = host['config']
    max_tokens = config[host['stage']]['eval']['max_tokens']
    cache = config['compilation_cache']
  # It was trained on another machine, maybe: the cache only saves time.
  with contextlib.suppress(OSError):
    compilation.enable_compilation_cache(cache)
  try:
    renderer = weights.renderer(folder, variables)
  except ValueError:
    if text or weights.is_run(folder):
      raise
    renderer = None
  model = weights.model(folder)
  if renderer is None:
    stops = pretrained.stop_ids(folder)
  else:
    renderer.fit(model.vocab_size)
    stops = renderer.stop_ids
  params = weights.load(folder, transformer.shapes(model), average=True)
  return Policy(params, model, renderer, stops, max_tokens)
