"""On-policy self-distillation: who has seen the answer teaches who has not."""

import warnings

from posttrain import types
from posttrain.algorithms import base
from posttrain.util import imports


class Opsd(base.Algorithm):
  """As `opd`, with the policy itself for a teacher, shown a demonstration.

      loss = sum_t KL(pi(. | <t) || q(. | hint, <t)) / N_ref_kl

  The hint is one message, `template` with the demonstration in it, rendered in
  front of the sample's own tokens, which stay as they are. So a conversation
  with a system prompt has two, and the teacher reads hint + sample tokens. By
  default q is the live policy, as of this step; its gradient is not taken.

  Streams: as `opd`. A hint that says nothing of the answer teaches nothing; one
  that is the bare answer teaches to guess it, and is warned about. Answers grow
  where the demonstrations are longer than `sampler.max_tokens`: what is cut off
  is never contradicted; leave room, or take a slower teacher ('ema:0.99').

  References:
    Zhao et al., "Self-Distilled Reasoner: On-Policy Self-Distillation for
    Large Language Models", arXiv 2601.18734.
  """

  component = 'ref_kl'

  def __init__(self, cfg):
    super().__init__(cfg)
    self._fn, self._warned = None, False
    if ':' in cfg.demonstration:
      self._fn = imports.function(cfg.demonstration, 'algorithm.demonstration')

  def score(self, samples, scorer):
    hints = [self._hint(sample.task) for sample in samples]
    return scorer(self.reference, samples, hints)

  def check(self, task: types.Task) -> None:
    bare = self._demonstration(task) == str(task.answer).strip()
    if bare and not self._warned:
      self._warned = True
      warnings.warn(
        f'environment {task.env}: the demonstration of task {task.id} is its '
        f'answer, {task.answer!r}: the teacher is told what to say, and not '
        'how to find it; set algorithm.demonstration to what shows the way',
        stacklevel=2,
      )

  def _hint(self, task: types.Task) -> types.Messages:
    head, tail = self.cfg.template.split('{demonstration}')
    content = head + self._demonstration(task) + tail
    return ({'role': self.cfg.role, 'content': content},)

  def _demonstration(self, task: types.Task) -> str:
    """The text that is shown; ValueError where there is none."""
    source = self.cfg.demonstration
    if self._fn is not None:
      found = self._fn(task)
    elif source == 'answer':
      found = None if task.answer is None else str(task.answer)
    elif source == 'demonstration':
      found = _spoken(task.demonstration or ())
    else:
      found = task.info.get(source.removeprefix('info.'))
    if not isinstance(found, str) or not found.strip():
      raise ValueError(
        f'row {task.id} of environment {task.env} must have a demonstration '
        f'for algorithm opsd: got {found!r} from {source!r}; name another '
        'source in algorithm.demonstration'
      )
    return found.strip()


def _spoken(messages: types.Messages) -> str:
  """A demonstration as text; of several turns, with who says what."""
  if len(messages) == 1:
    return messages[0]['content']
  return '\n'.join(f'{m["role"]}: {m["content"]}' for m in messages)
