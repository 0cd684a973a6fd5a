r"""SFT of a model of yours on data of yours.

    python -m posttrain.main --config=configs/sft.py:DIR,DATA.jsonl \
        --workdir=WORK

DIR is a HuggingFace directory (Llama 3, Qwen 2, 2.5 or 3, Gemma 2 or 3 text),
OWNER/NAME in the hub's cache, or the workdir of another run: model, weights,
tokenizer, chat template and stop tokens come from it. A preset's name instead
(`small`) trains random weights on bytes. A line of DATA.jsonl is `{"messages":
[...]}`, or `{"prompt": ..., "completion": ...}`, each a string or a list of
messages; .parquet, .arrow and .csv files and TFDS data sets (`tfds:NAME`) have
these columns, or others that `--config.sft.envs.data.env.columns` renames.

A tenth of the prompts is held out, or `:DIR,DATA.jsonl,HELD_OUT.jsonl` names
the held-out rows: `eval/nll/data` is the loss on them, in nats per token. The
best weights by it are kept with `--config.sft.eval.best=eval/nll/data
--config.sft.eval.best_prompts=100`, which needs so many held-out rows beside
the `eval.prompts` that are reported. The prompts of `eval.suite` are answered
before and after.

200 steps see 6,400 rows; `epochs=3` in the argument counts the steps of three
passes over the rows. A row that has more than 2,048 tokens is cut.
`:DIR,DATA.jsonl,lora` trains a rank-32 LoRA at ten times the learning rate.

`:tiny` runs every part on rows_example.jsonl, on bytes and random weights, and
learns nothing; `:DIR,DATA.jsonl,tiny` does so with the directory's model and
tokenizer, and its own rows.
"""

import pathlib

import ml_collections

from configs import arguments, common
from posttrain import schema

EXAMPLE = pathlib.Path(__file__).with_name('rows_example.jsonl')

SFT = schema.Stage(
  # What is learned: the completions of the rows.
  envs={
    'data': schema.EnvEntry(
      env=schema.Rows(path=str(EXAMPLE), eval_fraction=0.1),
      algorithm=schema.Sft(),
      sampler=schema.Dataset(too_long='truncate'),
    )
  },
  # How answers are decoded.
  rollout=schema.Rollout(slots=None, prefill_rows=16, prefill_tokens=64),
  # How it trains.
  steps=200,
  batch=schema.Batch(prompts_per_step=32, row_tokens=2048),
  optim=schema.Optim(
    lr=1e-5, schedule='cosine', warmup_steps=10, weight_decay=0.0
  ),
  # Evaluation: answers to held-out prompts, which nothing grades, are few.
  eval=schema.Eval(
    every=50, prompts=100, samples=0, max_tokens=256, suite=common.ENGLISH_SUITE
  ),
)


def get_config(argument: str = ''):
  own = arguments.parse_own(argument)
  config = common.run_from(own.folder, {'sft': SFT}, own.preset)
  common.name_rows(config.sft.envs.data.env, own)
  if own.folder is None:  # random weights need larger steps
    config.sft.optim.lr = 1e-3
  if 'lora' in own.words:
    common.use_lora(config.sft, lr=1e-4)
  if 'tiny' in own.words:
    shrink(config)
  common.count_epochs(config.sft, config.sft.envs.data.env, own)
  return config


def shrink(config: ml_collections.ConfigDict) -> None:
  """Sets sizes that run in seconds."""
  common.shrink_training(config.sft, steps=2, prompts=4, row_tokens=512)
  common.shrink_slots(config.sft)
  config.sft.eval.prompts = 2
  config.sft.eval.max_tokens = 8
