"""On-policy self-distillation: the teacher's prompt has the solution."""

import warnings
from collections.abc import Sequence

import numpy as np

from posttrain import schema, types
from posttrain.algorithms import base
from posttrain.util import imports


class Opsd(base.Algorithm):
  """As `opd`; the teacher is the policy with a demonstration in its prompt.

      loss = w sum_t KL(pi(. | <t) || q(. | hint, <t)) / N

  The hint is one message, `template` with the demonstration, in the sample's
  prompt as the chat template renders it: before the text of its system message,
  or of the first user message with `role='user'`, and where the template has no
  system messages (Gemma, Mistral). By default q is the stage's initial policy;
  with the present policy as the teacher, both may collapse.

  Streams: as `opd`. A hint without information on the answer teaches nothing; a
  hint with the bare answer teaches guessing, and gives a warning. Answers grow
  if demonstrations are longer than `sampler.max_tokens`, because truncated
  tokens have no loss; raise max_tokens, or use a slower teacher ('ema:0.99').

  References:
    Zhao et al., "Self-Distilled Reasoner: On-Policy Self-Distillation for
    Large Language Models", arXiv 2601.18734.
  """

  component = 'ref_kl'

  def __init__(self, cfg: schema.Opsd):
    """Imports the function, if `demonstration` names one."""
    super().__init__(cfg)
    self._fn, self._warned = None, False
    if ':' in cfg.demonstration:
      self._fn = imports.function(cfg.demonstration, 'algorithm.demonstration')

  def score(
    self, samples: Sequence[types.Sample], scorer: base.Scorer
  ) -> Sequence[np.ndarray]:
    """Returns log q of each token, f32[T] per sample, with the hint."""
    head, tail = self.cfg.template.split('{demonstration}')
    hints = []
    for sample in samples:
      assert sample.task is not None, 'task'
      content = head + self._demonstration(sample.task) + tail
      hints.append(({'role': self.cfg.role, 'content': content},))
    return scorer(self.reference, samples, hints)

  def check(self, task: types.Task) -> None:
    """Raises ValueError without a demonstration; warns of a bare answer."""
    bare = self._demonstration(task) == str(task.answer).strip()
    if bare and not self._warned:
      self._warned = True
      warnings.warn(
        f'environment {task.env}: the demonstration of task {task.id} is its '
        f'bare answer, {task.answer!r}, without a derivation; let '
        f'envs.{task.env}.algorithm.demonstration name a column with one, as '
        'info.KEY, or a function of the task',
        stacklevel=2,
      )

  def _demonstration(self, task: types.Task) -> str:
    """Returns the text of the demonstration; ValueError if there is none."""
    source = self.cfg.demonstration
    if self._fn is not None:
      text = self._fn(task)
    elif source == 'answer':
      text = None if task.answer is None else str(task.answer)
    elif source == 'demonstration':
      turns = task.demonstration or ()
      text = '\n'.join(f'{m["role"]}: {m["content"]}' for m in turns)
      if len(turns) == 1:
        text = turns[0]['content']
    else:
      text = task.info.get(source.removeprefix('info.'))
    if not isinstance(text, str) or not text.strip():
      raise ValueError(
        f'row {task.id} of environment {task.env} must have a demonstration '
        f'for algorithm opsd: got {text!r} from {source!r}'
      )
    return text.strip()
