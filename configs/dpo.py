r"""DPO of a model of yours on pairs of yours.

    python -m posttrain.main --config=configs/dpo.py:DIR,PAIRS.jsonl \
        --workdir=WORK

DIR is a HuggingFace directory (Llama 3, Qwen 2, 2.5 or 3, Gemma 2 or 3 text),
OWNER/NAME in the hub's cache, of an instruct model, or the workdir of another
run: model, weights, tokenizer, chat template and stop tokens come from it. A
line of PAIRS.jsonl is `{"prompt": ..., "chosen": ..., "rejected": ...}`, each a
string or a list of messages (`posttrain/data/preferences.py`); .parquet, .arrow
and .csv files and TFDS data sets (`tfds:NAME`) have these columns, or others
that `--config.dpo.pairs.columns` renames.

A tenth of the prompts is held out, or `:DIR,PAIRS.jsonl,HELD_OUT.jsonl` names
the held-out pairs: `eval/pairs/rewards/accuracies` is the share of them whose
chosen answer the policy prefers. The prompts of `eval.suite` are answered
before, every 50 steps and after: `eval/suite/*` are repetition, broken
characters, refusals, whether code parses, and the length.
Where preferences are about something else, so should the prompts be:
`--config.dpo.eval.suite='("Why is the sky blue?", "Write a haiku.")'`.

200 steps see 6,400 pairs; `epochs=3` in the argument counts the steps of three
passes over the pairs. A pair that has more than 2,048 tokens, with the
prompt before each answer, is dropped, and the number of them logged.
`:DIR,PAIRS.jsonl,lora` trains a rank-32 LoRA at ten times the learning rate,
with the frozen weights as the reference.

`:tiny` runs every part on the pairs of pairs_example.jsonl, on bytes and
random weights, and learns nothing; `:DIR,PAIRS.jsonl,tiny` does so with the
directory's model and tokenizer, and its own pairs.
"""

import pathlib

import ml_collections

from configs import arguments, common
from posttrain import schema

EXAMPLE = pathlib.Path(__file__).with_name('pairs_example.jsonl')

DPO = schema.Stage(
  kind='preference',
  # What is learned: which of two answers is preferred.
  pairs=schema.PairFile(path=str(EXAMPLE), too_long='drop'),
  # How the answers to the suite are decoded.
  rollout=schema.Rollout(slots=None, prefill_rows=16, prefill_tokens=64),
  # How it trains.
  steps=200,
  batch=schema.Batch(prompts_per_step=32, row_tokens=2048),
  loss=schema.Loss(preference=schema.Sigmoid(beta=0.1)),
  optim=schema.Optim(
    lr=5e-7, schedule='linear', warmup_steps=20, weight_decay=0.0, beta2=0.99
  ),
  # Evaluation.
  eval=schema.Eval(every=50, max_tokens=512, suite=common.ENGLISH_SUITE),
)


def get_config(argument: str = ''):
  own = arguments.parse_own(argument)
  config = common.run_from(own.folder, {'dpo': DPO}, own.preset)
  common.name_pairs(config.dpo.pairs, own)
  if 'lora' in own.words:
    common.use_lora(config.dpo, lr=5e-6)
  if 'tiny' in own.words:
    shrink(config)
  common.count_epochs(config.dpo, config.dpo.pairs, own)
  return config


def shrink(config: ml_collections.ConfigDict) -> None:
  """Sets sizes that run in seconds."""
  common.shrink_training(config.dpo, steps=4, prompts=4, row_tokens=512)
  common.shrink_slots(config.dpo)
  config.dpo.eval.max_tokens = 16
