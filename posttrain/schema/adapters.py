"""Options of the environments that others wrote."""

import dataclasses
from typing import Any

from posttrain.schema import base

MAX_SEEDS = 1_000_000  # of a split of `OpenEnv`


@dataclasses.dataclass(frozen=True)
class OpenEnv:
  """An environment behind an OpenEnv server, over its WebSocket."""

  # Which environment this is; fixed.
  type: str = 'openenv'
  # Where the server listens: ws://HOST:PORT/ws, or wss://.
  url: str = 'ws://localhost:8000/ws'
  # A system message in front of the first observation; '' = none.
  prompt: str = ''
  # What of an observation is shown: the value of one field, a text as it is
  # and anything else as JSON; None = all of it but reward and done, as JSON.
  observation_field: str | None = None
  # The field of an action that a turn is the text of; None = a turn must
  # itself be an action, as a JSON object.
  action_field: str | None = None
  # Turns of an episode, at most.
  max_turns: int = 10
  # The least reward of a correct episode; None = nobody says which are, and
  # there is no pass rate.
  correct_at: float | None = None
  # Training tasks: task i is what reset(seed=i) gives. At most a million.
  train_tasks: int = 1000
  # Evaluation tasks: task i is what reset(seed=1000000 + i) gives.
  eval_tasks: int = 100
  # Seconds until a connection must stand.
  connect_timeout: float = 10.0
  # Seconds until the server must have answered a message.
  message_timeout: float = 60.0

  def __post_init__(self):
    base.require(
      not self.url.startswith(('http://', 'https://')),
      'url',
      'be a WebSocket',
      self.url,
      'over HTTP every reset and step makes an environment of its own, so '
      'that no episode has a second step; try ws://HOST:PORT/ws',
    )
    base.require(
      self.url.startswith(('ws://', 'wss://')),
      'url',
      'be ws://HOST:PORT/ws or wss://',
      self.url,
    )
    for field in ('observation_field', 'action_field'):
      base.require(
        getattr(self, field) != '', field, 'be None or name a field', ''
      )
    base.require_positive(
      self,
      'max_turns',
      'train_tasks',
      'eval_tasks',
      'connect_timeout',
      'message_timeout',
    )
    for field in ('train_tasks', 'eval_tasks'):
      count = getattr(self, field)
      base.require(count <= MAX_SEEDS, field, f'be <= {MAX_SEEDS}', count)


@dataclasses.dataclass(frozen=True)
class Trl:
  """A class such as TRL's `environment_factory` takes; methods are tools."""

  # Which environment this is; fixed.
  type: str = 'trl'
  # Import path of the class, or of anything that makes one when called.
  factory: str = ''
  # A JSONL file of rows: `prompt` (a text or messages; none = an empty text),
  # and columns that `reset` is told; None = empty rows.
  path: str | None = None
  # The same for evaluation; None = no evaluation on this environment, but
  # where the rows are empty.
  eval_path: str | None = None
  # Empty rows of the training split.
  train_tasks: int = 1000
  # Empty rows of the evaluation split.
  eval_tasks: int = 100
  # Turns of an episode, at most.
  max_turns: int = 10
  # The least reward of a correct episode; None = nobody says which are, and
  # there is no pass rate.
  correct_at: float | None = None
  # Play in a thread pool: for tools that wait, and may run beside others.
  blocking: bool = False

  def __post_init__(self):
    base.require_import_path(self, 'factory')
    for field in ('path', 'eval_path'):
      base.require(
        getattr(self, field) != '', field, 'be None or name a file', ''
      )
    base.require(
      self.path is not None or self.eval_path is None,
      'eval_path',
      'be None where path is None: the rows are empty',
      self.eval_path,
    )
    base.require_positive(self, 'max_turns', 'train_tasks', 'eval_tasks')


@dataclasses.dataclass(frozen=True)
class Verifiers:
  """A taskset of `verifiers` (v1), of one turn, scored in process."""

  # Which environment this is; fixed.
  type: str = 'verifiers'
  # Import path of the taskset's class.
  taskset: str = ''
  # Options of the class's config.
  options: dict[str, Any] = dataclasses.field(default_factory=dict)
  # More of them, for the evaluation split; {} = none, and evaluation holds
  # back the first tasks of the training split's.
  eval_options: dict[str, Any] = dataclasses.field(default_factory=dict)
  # Tasks of the training split, at most.
  train_tasks: int = 10_000
  # Tasks of the evaluation split, at most.
  eval_tasks: int = 100
  # The least reward of a correct episode; None = nobody says which are, and
  # there is no pass rate.
  correct_at: float | None = None
  # Score in a thread pool: for rewards that wait, and may run beside others.
  blocking: bool = False

  def __post_init__(self):
    base.require_import_path(self, 'taskset')
    base.require_positive(self, 'train_tasks', 'eval_tasks')
