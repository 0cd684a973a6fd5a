"""Every option of the program, as frozen dataclasses. Numpy-free, jax-free.

Each field has a comment, its default, and its bounds in its annotation, see
`bounds`; what relates several fields is checked in `__post_init__`, and what
spans nodes in `posttrain.config.checks`. A node with a `type` is a union of the
option classes of its registry, such as `schema.Algorithm`; the implementations
are the dict `TYPES` of another package, by the same types.
"""

from posttrain.schema.architecture import (
  ATTENTION,
  PRESETS,
  Lora,
  Model,
  RopeScaling,
  Tokenizer,
)
from posttrain.schema.bounds import FieldError
from posttrain.schema.objective import (
  Cispo,
  Clip,
  CustomRl,
  Dppo,
  Gspo,
  Ipo,
  IpoNorm,
  IpoPairs,
  Kto,
  Loss,
  PreferenceLoss,
  Ranking,
  RefKl,
  RlLoss,
  Sigmoid,
  SigmoidNorm,
  SimPo,
)
from posttrain.schema.run import (
  KINDS,
  Batch,
  Checkpoint,
  EnvEntry,
  Eval,
  MadePairs,
  Mesh,
  Metrics,
  Optim,
  PairFile,
  Pairs,
  Rollout,
  Run,
  Stage,
  Watchdog,
)
from posttrain.schema.signals import (
  Algorithm,
  Custom,
  Dataset,
  Echo,
  EchoFilter,
  EchoRole,
  Efficiency,
  Endpoint,
  Frozen,
  Grpo,
  LengthPenalty,
  Linear,
  MaxRl,
  Opd,
  Opsd,
  Overlong,
  Policy,
  Reference,
  Reward,
  RewardFn,
  Rloo,
  Sampler,
  Sft,
  ema_or_snapshot,
  is_path,
)
from posttrain.schema.tasks import (
  DIFFICULTIES,
  MAX_SEEDS,
  AlphabetSort,
  Arithmetic,
  CustomEnv,
  Env,
  Gsm8k,
  OpenEnv,
  ReverseText,
  Rows,
  Sql,
  SqlData,
  SqlFiles,
  SqlReward,
  SqlSynth,
  SqlTeacher,
  Trl,
  Verifiers,
)
