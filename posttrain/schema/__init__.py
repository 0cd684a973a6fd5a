"""Every option of the program, as frozen dataclasses. Numpy-free, jax-free.

Each field has a comment, its default, and its bounds in its annotation, see
`bounds`; what relates several fields is checked in `__post_init__`, and what
spans nodes in `posttrain.config.checks`. A node with a `type` is a union of the
option classes of its registry, such as `schema.Algorithm`; the implementations
are the dict `TYPES` of another package, by the same types.
"""

from posttrain.schema.architecture import ATTENTION as ATTENTION
from posttrain.schema.architecture import PRESETS as PRESETS
from posttrain.schema.architecture import Lora as Lora
from posttrain.schema.architecture import Model as Model
from posttrain.schema.architecture import RopeScaling as RopeScaling
from posttrain.schema.architecture import Tokenizer as Tokenizer
from posttrain.schema.bounds import FieldError as FieldError
from posttrain.schema.objective import Cispo as Cispo
from posttrain.schema.objective import Clip as Clip
from posttrain.schema.objective import CustomRl as CustomRl
from posttrain.schema.objective import Dppo as Dppo
from posttrain.schema.objective import Gspo as Gspo
from posttrain.schema.objective import Ipo as Ipo
from posttrain.schema.objective import IpoNorm as IpoNorm
from posttrain.schema.objective import IpoPairs as IpoPairs
from posttrain.schema.objective import Kto as Kto
from posttrain.schema.objective import Loss as Loss
from posttrain.schema.objective import PreferenceLoss as PreferenceLoss
from posttrain.schema.objective import Ranking as Ranking
from posttrain.schema.objective import RefKl as RefKl
from posttrain.schema.objective import RlLoss as RlLoss
from posttrain.schema.objective import Sigmoid as Sigmoid
from posttrain.schema.objective import SigmoidNorm as SigmoidNorm
from posttrain.schema.objective import SimPo as SimPo
from posttrain.schema.run import KINDS as KINDS
from posttrain.schema.run import Batch as Batch
from posttrain.schema.run import Checkpoint as Checkpoint
from posttrain.schema.run import EnvEntry as EnvEntry
from posttrain.schema.run import Eval as Eval
from posttrain.schema.run import MadePairs as MadePairs
from posttrain.schema.run import Mesh as Mesh
from posttrain.schema.run import Metrics as Metrics
from posttrain.schema.run import Optim as Optim
from posttrain.schema.run import PairFile as PairFile
from posttrain.schema.run import Pairs as Pairs
from posttrain.schema.run import Rollout as Rollout
from posttrain.schema.run import Run as Run
from posttrain.schema.run import Stage as Stage
from posttrain.schema.run import Watchdog as Watchdog
from posttrain.schema.signals import Algorithm as Algorithm
from posttrain.schema.signals import Custom as Custom
from posttrain.schema.signals import Dataset as Dataset
from posttrain.schema.signals import Echo as Echo
from posttrain.schema.signals import EchoFilter as EchoFilter
from posttrain.schema.signals import EchoRole as EchoRole
from posttrain.schema.signals import Efficiency as Efficiency
from posttrain.schema.signals import Endpoint as Endpoint
from posttrain.schema.signals import Frozen as Frozen
from posttrain.schema.signals import Grpo as Grpo
from posttrain.schema.signals import LengthPenalty as LengthPenalty
from posttrain.schema.signals import Linear as Linear
from posttrain.schema.signals import MaxRl as MaxRl
from posttrain.schema.signals import Opd as Opd
from posttrain.schema.signals import Opsd as Opsd
from posttrain.schema.signals import Overlong as Overlong
from posttrain.schema.signals import Policy as Policy
from posttrain.schema.signals import Reference as Reference
from posttrain.schema.signals import Reward as Reward
from posttrain.schema.signals import RewardFn as RewardFn
from posttrain.schema.signals import Rloo as Rloo
from posttrain.schema.signals import Sampler as Sampler
from posttrain.schema.signals import Sft as Sft
from posttrain.schema.signals import ema_or_snapshot as ema_or_snapshot
from posttrain.schema.signals import is_path as is_path
from posttrain.schema.tasks import DIFFICULTIES as DIFFICULTIES
from posttrain.schema.tasks import MAX_SEEDS as MAX_SEEDS
from posttrain.schema.tasks import AlphabetSort as AlphabetSort
from posttrain.schema.tasks import Arithmetic as Arithmetic
from posttrain.schema.tasks import CustomEnv as CustomEnv
from posttrain.schema.tasks import Env as Env
from posttrain.schema.tasks import Gsm8k as Gsm8k
from posttrain.schema.tasks import OpenEnv as OpenEnv
from posttrain.schema.tasks import ReverseText as ReverseText
from posttrain.schema.tasks import Rows as Rows
from posttrain.schema.tasks import Sql as Sql
from posttrain.schema.tasks import SqlData as SqlData
from posttrain.schema.tasks import SqlFiles as SqlFiles
from posttrain.schema.tasks import SqlReward as SqlReward
from posttrain.schema.tasks import SqlSynth as SqlSynth
from posttrain.schema.tasks import SqlTeacher as SqlTeacher
from posttrain.schema.tasks import Trl as Trl
from posttrain.schema.tasks import Verifiers as Verifiers
