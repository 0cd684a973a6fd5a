r"""A reward model of yours, from a model of yours and pairs of yours.

    python -m posttrain.main --config=configs/reward_model.py:DIR,PAIRS.jsonl \
        --workdir=WORK

DIR is a HuggingFace directory (Llama 3, Qwen 2, 2.5 or 3, Gemma 2 or 3 text),
OWNER/NAME in the hub's cache, or the workdir of another run: model, weights,
tokenizer and chat template come from it; a scalar head is added. A line of
PAIRS.jsonl is `{"prompt": ..., "chosen": ..., "rejected": ...}`, each a string
or a list of messages (`posttrain/data/preferences.py`).

A tenth of the prompts is held out, or `:DIR,PAIRS.jsonl,HELD_OUT.jsonl` names
the held-out pairs: `eval/pairs/rewards/accuracies` is the share of them whose
chosen answer has the larger value. GRPO reads the model by
`--config=grpo:DIR,PROMPTS.jsonl,reward=WORK`.

200 steps see 6,400 pairs; `epochs=3` in the argument counts the steps of three
passes. A pair that has more than 2,048 tokens, with the prompt before each
answer, is dropped, and the number of them logged. There is no LoRA: the head of
a reward model trains with the rest. It writes no text, so there is no
`eval.suite`.

`:tiny` runs every part on the pairs of pairs_example.jsonl, on bytes and random
weights, and learns nothing; `:DIR,PAIRS.jsonl,tiny` does so with the
directory's model and tokenizer, and its own pairs.
"""

import pathlib

import ml_collections

from configs import arguments, common
from posttrain import schema

EXAMPLE = pathlib.Path(__file__).with_name('pairs_example.jsonl')

REWARD_MODEL = schema.Stage(
  kind='ranking',
  # What is learned: a value that is larger for the preferred answer.
  pairs=schema.PairFile(path=str(EXAMPLE), too_long='drop'),
  # How it trains.
  steps=200,
  batch=schema.Batch(prompts_per_step=32, row_tokens=2048),
  loss=schema.Loss(ranking=schema.Ranking(center_coef=0.01)),
  optim=schema.Optim(
    lr=1e-5, schedule='linear', warmup_steps=20, weight_decay=0.0, beta2=0.99
  ),
  # Evaluation.
  eval=schema.Eval(every=50),
)


def get_config(argument: str = ''):
  own = arguments.parse_own(argument, lora=False)
  config = common.run_from(own.folder, {'rm': REWARD_MODEL}, own.preset)
  common.name_pairs(config.rm.pairs, own)
  if 'tiny' in own.words:
    shrink(config)
  common.count_epochs(config.rm, config.rm.pairs, own)
  return config


def shrink(config: ml_collections.ConfigDict) -> None:
  """Sets sizes that run in seconds."""
  common.shrink_training(config.rm, steps=4, prompts=4, row_tokens=512)
