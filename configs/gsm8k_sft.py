r"""SFT of a HuggingFace model on GSM8K's worked solutions.

    python -m posttrain.main --config=configs/gsm8k_sft.py:DIR --workdir=WORK

DIR is a HuggingFace directory (Llama 3, Qwen 2, 2.5 or 3, Gemma 2 or 3 text):
model, weights, tokenizer, chat template and stop tokens are its own. The data
are `train.jsonl` and `test.jsonl` of GSM8K (7,473 and 1,319 problems) in
$POSTTRAIN_DATA/gsm8k; `--config.sft.envs.gsm8k.env.path=...` (and `eval_path`)
names others. Solutions lose their calculator marks and end in `\boxed{N}`.

`:DIR,lora` trains a rank-32 LoRA at a learning rate that suits one;
`--config.sft.lora.rank=32` alone keeps the one below.

Two epochs, in bfloat16 with float32 master weights. Device memory, estimated by
`--dry_run`: 18.5 GiB for Qwen3-0.6B (LoRA: 11.0), 38.2 GiB for 1.7B (LoRA:
16.3); a chip of 24 or 48 GiB will do, and fewer `rollout.slots` fit less. Time
has not been measured on an accelerator: 2.5 million tokens are 9 PFLOP for
0.6B, a minute or two at 100 TFLOP/s, besides compilation and evaluations.

`:tiny` runs every part on bytes and random weights and learns nothing;
`:DIR,tiny` does so with the directory's model and tokenizer.
"""

from configs import common
from posttrain import schema


def get_config(argument: str = ''):
  folder, words = common.words(argument, ('tiny', 'lora'))
  tiny, lora = 'tiny' in words, 'lora' in words
  model, tokenizer = common.pretrained(folder)

  # What is learned: the questions, and how their answers are worked out.
  gsm8k = schema.EnvEntry(
    env=schema.Gsm8k(
      path='$POSTTRAIN_DATA/gsm8k/train.jsonl',
      eval_path='$POSTTRAIN_DATA/gsm8k/test.jsonl',
    ),
    algorithm=schema.Sft(),
    sampler=schema.Dataset(),
  )
  # How much of it at a time. The longest has 445 tokens of GPT-NeoX, 1,450
  # bytes.
  row_tokens = 512 if folder else 1536
  batch = schema.Batch(
    prompts_per_step=4 if tiny else 64,
    row_tokens=row_tokens,
    micro_batch_tokens=row_tokens if tiny else 16 * row_tokens,
  )
  # How it is learned. A LoRA wants ten times the rate of full training.
  sft = schema.Stage(
    init=folder or 'random',
    lora=schema.Lora(rank=32) if lora else schema.Lora(),
    steps=2 if tiny else 234,
    envs={'gsm8k': gsm8k},
    batch=batch,
    optim=schema.Optim(
      lr=1e-4 if lora else 1e-5,
      schedule='cosine',
      warmup_steps=0 if tiny else 10,
      weight_decay=0.0,
    ),
    # How answers are decoded, and how many are asked for.
    rollout=schema.Rollout(
      slots=4 if tiny else 128,
      prefill_rows=4 if tiny else 16,
      prefill_tokens=64,
    ),
    eval=schema.Eval(
      every=None if tiny else 117,
      prompts=2 if tiny else 500,
      samples=1 if tiny else 4,
      max_tokens=8 if tiny else 320,
    ),
  )
  return common.get_config(
    schema.Run(
      model=model,
      tokenizer=tokenizer,
      stages={'sft': sft},
      checkpoint=schema.Checkpoint(every=100, keep_last=1),
    )
  )
