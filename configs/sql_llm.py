r"""SFT, then GRPO, of a HuggingFace model on real databases.

    python -m posttrain.main --config=configs/sql_llm.py:DIR --workdir=WORK

DIR is a HuggingFace directory (Llama 3, Qwen 2, 2.5 or 3, Gemma 2 or 3 text),
best an instruct model: model, weights, tokenizer, chat template and stop tokens
come from it. The data are questions about SQLite databases: a JSON list and a
folder, `$POSTTRAIN_DATA/spider_mini/questions.json` and `database`;
`--config.sft.envs.sql.env.data='{"type": "files", ...}'` (and the same for
`grpo`) names others, in the format of `python -m posttrain.envs.sql DIR`. Whole
databases are kept for evaluation. Prompts state the rules (`style='verbose'`);
observations are user turns, for templates without tools;
`--config.sft.envs.sql.env.role=tool` (and the same for `grpo`) is for others.

`:DIR,lora` trains a rank-32 LoRA at ten times the learning rate. A model that
thinks first needs longer turns (`max_tokens`, `row_tokens`), or
`--config.tokenizer.template_variables='{"enable_thinking": false}'`.
Long episodes: `--config.grpo.envs.sql.sampler.keep_exchanges=3` drops older
exchanges in training, and `--config.grpo.eval.keep_exchanges=3` in evaluation:
set both, or evaluation differs from training.

configs/sql.py has a table of the options' names elsewhere; `model_name` is DIR.

`:tiny` runs every part on bytes and random weights and learns nothing;
`:DIR,tiny` does so with the directory's model and tokenizer.
"""

import dataclasses

import ml_collections

from configs import arguments, common
from posttrain import schema

# What is learned: questions about real databases.
ENV = schema.Sql(
  data=schema.SqlFiles(
    questions='$POSTTRAIN_DATA/spider_mini/questions.json',
    databases='$POSTTRAIN_DATA/spider_mini/database',
  ),
  difficulties=('easy', 'medium'),
  style='verbose',
  role='user',
  budget=10,
)

# How episodes are decoded, and the shape of a step, in both stages. The longest
# demonstration has 3,300 bytes.
ROLLOUT = schema.Rollout(slots=128, prefill_rows=16, prefill_tokens=128)
BATCH = schema.Batch(prompts_per_step=32, row_tokens=4096)

# How it is measured, in both stages.
EVAL = schema.Eval(
  prompts=200,
  samples=4,
  max_tokens=256,
  max_episode_tokens=3072,
  suite=common.ENGLISH_SUITE,
)

# Stage 1: SFT, on whole episodes of a teacher that looks up names first.
SFT = schema.Stage(
  envs={
    'sql': schema.EnvEntry(
      env=ENV,
      algorithm=schema.Sft(),
      sampler=schema.Dataset(too_long='truncate'),
    )
  },
  rollout=ROLLOUT,
  steps=40,
  batch=BATCH,
  optim=schema.Optim(
    lr=1e-5, schedule='cosine', warmup_steps=5, weight_decay=0.0, beta2=0.99
  ),
  eval=EVAL,
)

# Stage 2: GRPO, with a KL penalty to the policy after SFT.
GRPO = schema.Stage(
  init='stage:sft',
  envs={
    'sql': schema.EnvEntry(
      env=ENV,
      algorithm=schema.Grpo(kl_beta=0.04),
      sampler=schema.Policy(
        temperature=1.0, max_tokens=256, max_episode_tokens=3072
      ),
      group_size=8,
    )
  },
  rollout=ROLLOUT,
  steps=200,
  batch=BATCH,
  loss=schema.Loss(rl=schema.Clip(low=0.2, high=0.28)),
  optim=schema.Optim(
    lr=1e-6, schedule='constant', warmup_steps=5, weight_decay=0.0, beta2=0.99
  ),
  eval=dataclasses.replace(EVAL, every=50),
)


def get_config(argument: str = ''):
  folder, words = arguments.parse_folder(argument, ('tiny', 'lora'))
  config = common.run_from(folder, {'sft': SFT, 'grpo': GRPO})
  if 'lora' in words:
    common.use_lora(config.sft, lr=1e-4)
    common.use_lora(config.grpo, lr=1e-5)
  if 'tiny' in words:
    shrink(config)
  return config


def shrink(config: ml_collections.ConfigDict) -> None:
  """Sets sizes that run in seconds."""
  for stage in (config.sft, config.grpo):
    common.shrink_training(stage, steps=2, prompts=2)
    common.shrink_slots(stage)
    stage.envs.sql.env.budget = 4
    stage.eval.prompts = 2
    stage.eval.samples = 1
    stage.eval.max_tokens = 16
    stage.eval.max_episode_tokens = 64
  entry = config.grpo.envs.sql
  # No answer is right: with pruning, no token would train.
  entry.algorithm.prune_zero_advantage = False
  entry.sampler.max_tokens = 16
  entry.sampler.max_episode_tokens = 64
  entry.group_size = 2
