"""Values of other libraries' options, with ours: for hints about unknown types.

`hint` answers names of algorithms, losses and tasks, such as `dapo`, that are
several options here, or options of another node.
"""

import re
from collections.abc import Iterable

from posttrain.util import spelling

_DR_GRPO = (
  'Dr. GRPO is the algorithm grpo, whose scale_rewards is none by default, '
  'with --{stage}.loss.rl.aggregation=constant and '
  '--{stage}.loss.rl.constant_tokens=N'
)
_DAPO = (
  'DAPO is the algorithm grpo with scale_rewards=group and '
  'length_penalty=overlong, --{stage}.loss.rl=clip (high is 0.28 and '
  'aggregation token by default), and --{stage}.batch.max_draws=N above '
  'prompts_per_step'
)
_PPO = (
  'there is no critic; PPO clips the ratio, as --{stage}.loss.rl=clip does '
  'with the algorithms grpo and rloo'
)
_PAIRS = (
  'a loss of pairs has a recipe of its own, --config=dpo:DIR,pairs.jsonl; '
  '--config.dpo.loss.preference is its type'
)
_REWARD_MODEL = (
  'a reward model has a recipe of its own, '
  '--config=reward_model:DIR,pairs.jsonl'
)
_GRPO = (
  'GRPO is an algorithm, and the loss of its paper '
  '--{stage}.loss.rl=\'{{"type": "clip", "high": 0.2, '
  '"aggregation": "sequence"}}\''
)
_RATIO = 'it is a loss: --{stage}.loss.rl={name}, with the algorithm grpo'
_OPD = (
  'on-policy distillation is the algorithm opd, with reference=DIR, a server, '
  'or stage:NAME; from the policy itself with a hint, opsd'
)
_OWN = (
  'own data is the type rows, as {{"type": "rows", "path": "FILE.jsonl"}}; an '
  'own class custom, as {{"type": "custom", "import_path": "MODULE:CLASS"}}; '
  'the recipe --config=grpo:DIR,FILE.jsonl,MODULE:REWARD sets it all'
)
_PREFERENCE = dict.fromkeys(('dpo', 'kto', 'simpo'), _PAIRS)
# Per node, the names of other libraries and the advice on each of them.
_VALUES = {
  'algorithm': {
    'drgrpo': _DR_GRPO,
    'dapo': _DAPO,
    'ppo': _PPO,
    'gae': _PPO,
    'gspo': _RATIO,
    'cispo': _RATIO,
    'dppo': _RATIO,
    'ipo': _RATIO,
    'reinforce': 'REINFORCE is the algorithm reward',
    'reinforceplusplus': (
      'REINFORCE++ with a baseline is '
      '--{path}=\'{{"type": "grpo", "scale_rewards": "batch"}}\'; none is '
      'without groups'
    ),
    'gkd': _OPD,
    'distillation': _OPD,
    'onpolicydistillation': _OPD,
    'sdft': 'SDFT is the algorithm opsd',
    'rm': _REWARD_MODEL,
    'rewardmodel': _REWARD_MODEL,
    **_PREFERENCE,
  },
  'rl': {
    'grpo': _GRPO,
    'ppo': _PPO,
    'drgrpo': _DR_GRPO,
    'dapo': _DAPO,
    **_PREFERENCE,
  },
}


def hint(path: str, name: str, types: Iterable[str]) -> str:
  """Returns what an unknown type may mean, '; did you mean ...?', or ''.

  Args:
    path: dotted key of the node, such as 'config.grpo.envs.sums.algorithm'.
    name: the type that the node does not have.
    types: the names of the types that exist.
  """
  stage, leaf = '.'.join(path.split('.')[:2]), path.rpartition('.')[2]
  plain = re.sub(r'[^a-z0-9]', '', name.lower().replace('++', 'plusplus'))
  text = _VALUES.get(leaf, {}).get(plain)
  if text is None and (near := spelling.near(name, types)):
    return f'; did you mean {near[0]}?'
  text = text or (_OWN if leaf == 'env' else '')
  return text and '; ' + text.format(path=path, stage=stage, name=plain)
