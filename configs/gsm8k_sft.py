r"""SFT of a HuggingFace model on GSM8K's worked solutions.

    python -m posttrain.main --config=configs/gsm8k_sft.py:DIR --workdir=WORK

DIR is a HuggingFace directory (Llama 3, Qwen 2, 2.5 or 3, Gemma 2 or 3 text);
model, weights, tokenizer, chat template and stop tokens come from it. The data
are `train.jsonl` and `test.jsonl` of GSM8K (7,473 and 1,319 problems) in
$POSTTRAIN_DATA/gsm8k; `--config.sft.envs.gsm8k.env.path=...` (and `eval_path`)
names others. Solutions lose their calculator marks and end in `\boxed{N}`.

`:DIR,lora` trains a rank-32 LoRA at ten times the learning rate;
`--config.sft.lora.rank=32` alone keeps the rate of full training.

Two epochs, in bfloat16 with float32 master weights. Device memory, by
`--dry_run --devices=gpu:1`: 21.5 GiB for Qwen3-0.6B (LoRA: 10.9), 47.0 GiB for
1.7B (LoRA: 16.7); a chip of 24 or 48 GiB is enough; fewer `rollout.slots` need
less. Time, estimated: 2.5 million tokens are 9 PFLOP for 0.6B, a minute or two
at 100 TFLOP/s, besides compilation and evaluations.

`:tiny` runs every part on bytes and random weights and learns nothing;
`:DIR,tiny` does so with the directory's model and tokenizer.
"""

import ml_collections

from configs import arguments, common
from posttrain import schema

SFT = schema.Stage(
  # What is learned: the questions and their worked solutions.
  envs={
    'gsm8k': schema.EnvEntry(
      env=schema.Gsm8k(
        path='$POSTTRAIN_DATA/gsm8k/train.jsonl',
        eval_path='$POSTTRAIN_DATA/gsm8k/test.jsonl',
      ),
      algorithm=schema.Sft(),
      sampler=schema.Dataset(),
    )
  },
  # How answers are decoded.
  rollout=schema.Rollout(slots=128, prefill_rows=16, prefill_tokens=64),
  # How it trains. The longest example has 445 tokens of GPT-NeoX.
  steps=234,
  batch=schema.Batch(
    prompts_per_step=64, row_tokens=512, micro_batch_tokens=16 * 512
  ),
  optim=schema.Optim(
    lr=1e-5, schedule='cosine', warmup_steps=10, weight_decay=0.0
  ),
  # Evaluation.
  eval=schema.Eval(
    every=117,
    prompts=500,
    samples=4,
    max_tokens=320,
    suite=common.ENGLISH_SUITE,
  ),
)


def get_config(argument: str = ''):
  folder, words = arguments.parse_folder(argument, ('tiny', 'lora'))
  config = common.run_from(folder, {'sft': SFT}, save_every=100)
  if 'lora' in words:
    common.use_lora(config.sft, lr=1e-4)
  if 'tiny' in words:
    shrink(config)
  return config


def shrink(config: ml_collections.ConfigDict) -> None:
  """Sets sizes that run in seconds."""
  # The longest example has 1,700 bytes.
  row_tokens = 2048 if config.tokenizer.path is None else None
  common.shrink_training(config.sft, steps=2, prompts=4, row_tokens=row_tokens)
  common.shrink_slots(config.sft)
  config.sft.eval.prompts = 2
  config.sft.eval.samples = 1
  config.sft.eval.max_tokens = 8
