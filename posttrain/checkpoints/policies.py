"""Policies by path, for generation and serving: weights, model, renderer.

A path is any that `weights` accepts. The import is cheap, so that a mistake in
a command line is reported at once.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from posttrain import schema, types
from posttrain.chat import rendering
from posttrain.util import errors

DEFAULT_MAX_TOKENS = 256  # of an answer, for weights that are not of a run


@dataclasses.dataclass(frozen=True)
class Policy:
  """A policy on one device, ready to generate."""

  params: Any
  model: schema.Model  # with its vocabulary
  renderer: rendering.Renderer | None  # None = no tokenizer
  stop_ids: tuple[int, ...]
  max_tokens: int  # of an answer in its stage's evaluation
  folder: str = 'random'  # of its weights
  tokenizer: schema.Tokenizer = schema.Tokenizer()  # the renderer's options

  def ids(self, messages: Sequence[types.Message]) -> np.ndarray:
    """Returns the ids of a prompt, i32[P]; needs a tokenizer."""
    assert self.renderer is not None, 'a policy of text has a tokenizer'
    return self.renderer.render(messages, add_generation_prompt=True).ids

  def text(self, ids: Sequence[int]) -> str:
    """Decodes ids; without a tokenizer, joins them as numbers."""
    if self.renderer is None:
      return ','.join(map(str, ids))
    return self.renderer.tokenizer.decode(ids)


def load(
  path: str,
  *,
  text: bool = True,
  reward: bool = False,
  variables: str = '{}',
  cache: str | None = None,
  initial: bool = False,
) -> Policy:
  """Loads a policy onto one device, whatever mesh it was trained on.

  Args:
    path: a workdir, a stage's or a step's folder, or a HuggingFace or PEFT
      directory.
    text: whether the caller needs text; if not, a directory's unusable or
      missing tokenizer is no error.
    reward: whether it may be a reward model, which has a reward head.
    variables: template variables (JSON) for a directory; a run has its own.
    cache: folder of the compilation cache; None = the default one, and none
      for a run without one. A checkpoint does not name it: its programs are
      run.
    initial: whether training starts from it: the moving average of a run is
      read only where a stage that starts from it reads that.

  Raises:
    ValueError: the checkpoint is missing or damaged, or its tokenizer is
      missing or has changed.
  """
  from posttrain import compilation
  from posttrain.checkpoints import weights

  folder = weights.find(path)
  checkpoint = weights.read(folder)
  if not reward:
    weights.check_kind(checkpoint, False)
  max_tokens, default = DEFAULT_MAX_TOKENS, schema.Run.compilation_cache
  if checkpoint.kind == 'run':
    max_tokens = checkpoint.stage['eval']['max_tokens']
    if checkpoint.host['config'].get('compilation_cache') is None:
      default = None
  compilation.enable_compilation_cache(cache or default)
  try:
    renderer = checkpoint.renderer(variables)
  except ValueError:
    if text or checkpoint.kind == 'run':
      raise
    renderer = None
  if text and renderer is None:
    raise ValueError(
      f'the policy must have a tokenizer.json to read and write text: got '
      f'{errors.quote(path)}, which has none; {rendering.NO_TOKENIZER}; '
      '--prompt_ids of generate needs none'
    )
  model = checkpoint.model
  if renderer is None:
    stops = rendering.stop_ids(folder)
  else:
    renderer = renderer.with_embedding_rows(model.vocab_size)
    stops = renderer.stop_ids
  average = checkpoint.selects or not initial
  params = weights.load(folder, weights.shapes(folder, model), average=average)
  tokenizer = checkpoint.tokenizer
  if checkpoint.kind != 'run':
    tokenizer = dataclasses.replace(tokenizer, template_variables=variables)
  return Policy(
    params, model, renderer, stops, max_tokens, str(folder), tokenizer
  )
