"""Options of the adapters to third-party environments."""

import dataclasses
import math
from typing import Any

from posttrain.schema import base

MAX_SEEDS = 1_000_000  # tasks of one split of `OpenEnv`
TOOL_FORMATS = ('auto', 'hermes', 'llama3', 'plain')


@dataclasses.dataclass(frozen=True)
class OpenEnv:
  """An environment on an OpenEnv server, over its WebSocket."""

  # Which environment this is; fixed.
  type: str = 'openenv'
  # The server's URL: ws://HOST:PORT/ws, or wss://.
  url: base.Server = 'ws://localhost:8000/ws'
  # System message before the first observation; '' = none.
  prompt: str = ''
  # Field of an observation that becomes the message: a string unchanged, other
  # values as JSON; None = the whole observation as JSON, without reward and
  # done.
  observation_field: str | None = None
  # Field of an action that gets the text of a turn; None = a turn must itself
  # be an action, as a JSON object.
  action_field: str | None = None
  # Largest number of turns in an episode.
  max_turns: int = 10
  # Smallest reward of a correct episode; None = correctness is unknown, and
  # there is no pass rate.
  correct_at: float | None = None
  # Reward of an episode whose every action the server refused; None = such an
  # episode has no reward and is left out of its group. Set it below the worst
  # return of an episode with legal actions, or refused actions pay.
  refused_reward: float | None = None
  # Number of training tasks, at most a million; task i is reset(seed=i).
  train_tasks: int = 1000
  # Number of evaluation tasks; task i is reset(seed=1000000 + i).
  eval_tasks: int = 100
  # Time limit for connecting, in seconds.
  connect_timeout: float = 10.0
  # Time limit for the answer to one message, in seconds.
  message_timeout: float = 60.0

  def __post_init__(self):
    base.require(
      not self.url.startswith(('http://', 'https://')),
      'url',
      'be a WebSocket',
      self.url,
      'over HTTP every reset and step has a new environment, so no episode '
      'has a second step; try ws://HOST:PORT/ws',
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
    base.require_positive(self, 'max_turns', 'train_tasks', 'eval_tasks')
    base.require_seconds(self, 'connect_timeout', 'message_timeout')
    for field in ('train_tasks', 'eval_tasks'):
      count = getattr(self, field)
      base.require(count <= MAX_SEEDS, field, f'be <= {MAX_SEEDS}', count)
    self._check_refused_reward()

  def _check_refused_reward(self) -> None:
    base.require(
      self.refused_reward is None or math.isfinite(self.refused_reward),
      'refused_reward',
      'be None or a finite number',
      self.refused_reward,
    )
    if self.refused_reward is not None and self.correct_at is not None:
      base.require(
        self.refused_reward < self.correct_at,
        'refused_reward',
        f'be below correct_at={self.correct_at}',
        self.refused_reward,
      )


@dataclasses.dataclass(frozen=True)
class Trl:
  """A class for TRL's `environment_factory`; its methods are the tools."""

  # Which environment this is; fixed.
  type: str = 'trl'
  # Import path of the class, or of a function that returns an instance.
  factory: base.Function = ''
  # JSONL file of rows: `prompt` (a string or messages; missing = ''), and
  # columns that are passed to `reset`; None = empty rows.
  path: base.FileOrNone = None
  # JSONL file of the evaluation rows; None = no evaluation on this
  # environment, unless the rows are empty.
  eval_path: base.FileOrNone = None
  # Number of empty rows in the training split.
  train_tasks: int = 1000
  # Number of empty rows in the evaluation split.
  eval_tasks: int = 100
  # Largest number of turns in an episode.
  max_turns: int = 10
  # Smallest reward of a correct episode; None = correctness is unknown, and
  # there is no pass rate.
  correct_at: float | None = None
  # Runs episodes in a thread pool: for thread-safe tools that wait for I/O.
  blocking: bool = False
  # How the policy writes calls: 'hermes' (also Qwen), 'llama3' or 'plain';
  # 'auto' = as the chat template does, 'plain' if it tells of no tools.
  tool_format: str = 'auto'

  def __post_init__(self):
    base.require_import_path(self, 'factory')
    base.require_choice(self, 'tool_format', TOOL_FORMATS)
    for field in ('path', 'eval_path'):
      base.require(
        getattr(self, field) != '', field, 'be None or name a file', ''
      )
    base.require(
      self.path is not None or self.eval_path is None,
      'eval_path',
      'be None if path is None: the rows are empty',
      self.eval_path,
    )
    base.require_positive(self, 'max_turns', 'train_tasks', 'eval_tasks')


@dataclasses.dataclass(frozen=True)
class Verifiers:
  """A single-turn taskset of `verifiers` (v1), scored in this process."""

  # Which environment this is; fixed.
  type: str = 'verifiers'
  # Import path of the taskset's class.
  taskset: base.Function = ''
  # Options of the class's config.
  options: dict[str, Any] = dataclasses.field(default_factory=dict)
  # Further options for the evaluation split; {} = the first tasks of the
  # training split are held out for evaluation.
  eval_options: dict[str, Any] = dataclasses.field(default_factory=dict)
  # Largest number of training tasks.
  train_tasks: int = 10_000
  # Largest number of evaluation tasks.
  eval_tasks: int = 100
  # Smallest reward of a correct episode; None = correctness is unknown, and
  # there is no pass rate.
  correct_at: float | None = None
  # Scores in a thread pool: for thread-safe rewards that wait for I/O.
  blocking: bool = False

  def __post_init__(self):
    base.require_import_path(self, 'taskset')
    base.require_positive(self, 'train_tasks', 'eval_tasks')
