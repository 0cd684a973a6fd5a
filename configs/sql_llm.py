r"""SFT, then GRPO, of a HuggingFace model on real databases.

    python -m posttrain.main --config=configs/sql_llm.py:DIR --workdir=WORK

DIR is a HuggingFace directory (Llama 3, Qwen 2, 2.5 or 3, Gemma 2 or 3 text),
best an instruct model: model, weights, tokenizer, chat template and stop tokens
are its own. The data are questions about SQLite databases: a JSON list and a
folder, `$POSTTRAIN_DATA/spider_mini/questions.json` and `database`;
`--config.sft.envs.sql.env.data='{"type": "files", ...}'` (and the same for
`grpo`) names others, of the form that `python -m posttrain.envs.sql DIR`
writes. Whole databases are kept for evaluation. Prompts say the rules
(`style='verbose'`); observations are user turns, for templates that know no
tools. `--config.sft.envs.sql.env.role=tool` where they do.

`:DIR,lora` trains a rank-32 LoRA at a learning rate that suits one. A model
that thinks first wants longer turns (`max_tokens`, `row_tokens`), or to be told
not to: `--config.tokenizer.template_variables='{"enable_thinking": false}'`.
Long episodes: `--config.grpo.envs.sql.sampler.keep_exchanges=3` forgets older
ones in training, and `--config.grpo.eval.keep_exchanges=3` in evaluation: set
both, or it is asked to play as it never learned to.

What others call the options is in the table of configs/sql.py; their model_name
is the DIR.

`:tiny` runs every part on bytes and random weights and learns nothing;
`:DIR,tiny` does so with the directory's model and tokenizer. Nothing of it has
been measured on an accelerator.
"""

import dataclasses

from configs import common
from posttrain import schema


def get_config(argument: str = ''):
  folder, words = common.words(argument, ('tiny', 'lora'))
  tiny, lora = 'tiny' in words, 'lora' in words
  model, tokenizer = common.pretrained(folder)

  # What is asked about which databases, and how it is said.
  env = schema.Sql(
    data=schema.SqlFiles(
      questions='$POSTTRAIN_DATA/spider_mini/questions.json',
      databases='$POSTTRAIN_DATA/spider_mini/database',
    ),
    difficulties=('easy', 'medium'),
    style='verbose',
    role='user',
    budget=4 if tiny else 10,
  )
  # How long a turn and an episode may be. The longest demonstration has 3,300
  # bytes.
  turn, row_tokens = 16 if tiny else 256, 4096
  batch = schema.Batch(
    prompts_per_step=2 if tiny else 32,
    row_tokens=row_tokens,
    micro_batch_tokens=row_tokens if tiny else 8 * row_tokens,
  )
  rollout = schema.Rollout(
    slots=4 if tiny else 128, prefill_rows=4 if tiny else 16, prefill_tokens=128
  )
  evaluation = schema.Eval(
    prompts=2 if tiny else 200,
    samples=1 if tiny else 4,
    max_tokens=turn,
    max_episode_tokens=64 if tiny else 3072,
  )
  adapter = schema.Lora(rank=32) if lora else schema.Lora()
  optim = schema.Optim(
    lr=1e-4 if lora else 1e-5,
    schedule='cosine',
    warmup_steps=0 if tiny else 5,
    weight_decay=0.0,
    beta2=0.99,
  )
  # Whole episodes of a teacher who looks first: what the protocol is.
  sft = schema.Stage(
    init=folder or 'random',
    lora=adapter,
    steps=2 if tiny else 40,
    envs={
      'sql': schema.EnvEntry(
        env=env,
        algorithm=schema.Sft(),
        sampler=schema.Dataset(too_long='truncate'),
      )
    },
    batch=batch,
    optim=optim,
    rollout=rollout,
    eval=evaluation,
  )
  # Then by trial, near what it was.
  grpo = schema.Stage(
    init='stage:sft',
    lora=adapter,
    steps=2 if tiny else 200,
    envs={
      'sql': schema.EnvEntry(
        env=env,
        # No answer of the tiny one is right: pruned, nothing would be left.
        algorithm=schema.Grpo(kl_beta=0.04, prune_zero_advantage=not tiny),
        sampler=schema.Policy(
          temperature=1.0,
          max_tokens=turn,
          max_episode_tokens=64 if tiny else 3072,
        ),
        group_size=2 if tiny else 8,
      )
    },
    batch=batch,
    loss=schema.Loss(rl=schema.Clip(low=0.2, high=0.28)),
    optim=dataclasses.replace(
      optim, lr=1e-5 if lora else 1e-6, schedule='constant'
    ),
    rollout=rollout,
    eval=dataclasses.replace(evaluation, every=None if tiny else 50),
  )
  return common.get_config(
    schema.Run(
      model=model,
      tokenizer=tokenizer,
      stages={'sft': sft, 'grpo': grpo},
      checkpoint=schema.Checkpoint(every=50, keep_last=1),
    )
  )
