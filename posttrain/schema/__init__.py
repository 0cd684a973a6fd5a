"""Every option of the program, as frozen dataclasses. Numpy-free, jax-free.

Each field has a comment, its default, and its own check in `__post_init__`;
checks that span nodes are in `posttrain.config.checks`. A node with a `type`
is a union of the option classes of its registry, such as `schema.Algorithm`;
the implementations are the dict `TYPES` of another package, by the same types.
"""

from posttrain.schema.adapters import OpenEnv as OpenEnv
from posttrain.schema.adapters import Trl as Trl
from posttrain.schema.adapters import Verifiers as Verifiers
from posttrain.schema.algorithms import Algorithm as Algorithm
from posttrain.schema.algorithms import Custom as Custom
from posttrain.schema.algorithms import Echo as Echo
from posttrain.schema.algorithms import EchoFilter as EchoFilter
from posttrain.schema.algorithms import EchoRole as EchoRole
from posttrain.schema.algorithms import Efficiency as Efficiency
from posttrain.schema.algorithms import Grpo as Grpo
from posttrain.schema.algorithms import LengthPenalty as LengthPenalty
from posttrain.schema.algorithms import Linear as Linear
from posttrain.schema.algorithms import MaxRl as MaxRl
from posttrain.schema.algorithms import Opd as Opd
from posttrain.schema.algorithms import Opsd as Opsd
from posttrain.schema.algorithms import Overlong as Overlong
from posttrain.schema.algorithms import Reward as Reward
from posttrain.schema.algorithms import Rloo as Rloo
from posttrain.schema.algorithms import Sft as Sft
from posttrain.schema.base import FieldError as FieldError
from posttrain.schema.envs import AlphabetSort as AlphabetSort
from posttrain.schema.envs import Arithmetic as Arithmetic
from posttrain.schema.envs import CustomEnv as CustomEnv
from posttrain.schema.envs import Env as Env
from posttrain.schema.envs import Gsm8k as Gsm8k
from posttrain.schema.envs import ReverseText as ReverseText
from posttrain.schema.envs import Rows as Rows
from posttrain.schema.lora import Lora as Lora
from posttrain.schema.losses import Cispo as Cispo
from posttrain.schema.losses import Clip as Clip
from posttrain.schema.losses import CustomRl as CustomRl
from posttrain.schema.losses import Dppo as Dppo
from posttrain.schema.losses import Gspo as Gspo
from posttrain.schema.losses import Ipo as Ipo
from posttrain.schema.losses import Loss as Loss
from posttrain.schema.losses import RefKl as RefKl
from posttrain.schema.losses import RlLoss as RlLoss
from posttrain.schema.model import ATTENTION as ATTENTION
from posttrain.schema.model import PRESETS as PRESETS
from posttrain.schema.model import Model as Model
from posttrain.schema.model import RopeScaling as RopeScaling
from posttrain.schema.model import Tokenizer as Tokenizer
from posttrain.schema.optim import Optim as Optim
from posttrain.schema.pairs import MadePairs as MadePairs
from posttrain.schema.pairs import PairFile as PairFile
from posttrain.schema.pairs import Pairs as Pairs
from posttrain.schema.preferences import IpoNorm as IpoNorm
from posttrain.schema.preferences import IpoPairs as IpoPairs
from posttrain.schema.preferences import Kto as Kto
from posttrain.schema.preferences import PreferenceLoss as PreferenceLoss
from posttrain.schema.preferences import Ranking as Ranking
from posttrain.schema.preferences import Sigmoid as Sigmoid
from posttrain.schema.preferences import SigmoidNorm as SigmoidNorm
from posttrain.schema.preferences import SimPo as SimPo
from posttrain.schema.references import Endpoint as Endpoint
from posttrain.schema.references import Reference as Reference
from posttrain.schema.references import ema_or_snapshot as ema_or_snapshot
from posttrain.schema.references import is_path as is_path
from posttrain.schema.rewards import RewardFn as RewardFn
from posttrain.schema.run import Checkpoint as Checkpoint
from posttrain.schema.run import Mesh as Mesh
from posttrain.schema.run import Metrics as Metrics
from posttrain.schema.run import Run as Run
from posttrain.schema.run import Watchdog as Watchdog
from posttrain.schema.samplers import Dataset as Dataset
from posttrain.schema.samplers import Frozen as Frozen
from posttrain.schema.samplers import Policy as Policy
from posttrain.schema.samplers import Sampler as Sampler
from posttrain.schema.sql import Sql as Sql
from posttrain.schema.sql import SqlData as SqlData
from posttrain.schema.sql import SqlFiles as SqlFiles
from posttrain.schema.sql import SqlReward as SqlReward
from posttrain.schema.sql import SqlSynth as SqlSynth
from posttrain.schema.sql import SqlTeacher as SqlTeacher
from posttrain.schema.stage import KINDS as KINDS
from posttrain.schema.stage import Batch as Batch
from posttrain.schema.stage import EnvEntry as EnvEntry
from posttrain.schema.stage import Eval as Eval
from posttrain.schema.stage import Rollout as Rollout
from posttrain.schema.stage import Stage as Stage
