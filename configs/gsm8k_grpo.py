r"""GRPO of a HuggingFace model on GSM8K, by the number that it boxes.

    python -m posttrain.main --config=configs/gsm8k_grpo.py:DIR --workdir=WORK

DIR is a HuggingFace directory (Llama 3, Qwen 2, 2.5 or 3, Gemma 2 or 3 text),
best of a model that boxes an answer now and then: an instruct model, or what
`posttrain.export` made of configs/gsm8k_sft.py. Model, weights, tokenizer, chat
template and stop tokens are its own. The data are those of gsm8k_sft.py
(`--config.grpo.envs.gsm8k.env.path=...`, and `eval_path`, name others). A right
number is worth 1, all else 0; `...env.lenient=False` wants the box.

`:DIR,lora` trains a rank-32 LoRA at a learning rate that suits one, with the
frozen weights as the reference of a KL leash, if one is set, at no memory.
A model that thinks first wants longer answers (`sampler.max_tokens`,
`batch.row_tokens`), or to be told not to:
`--config.tokenizer.template_variables='{"enable_thinking": false}'`.

200 steps of 64 x 8 answers, in bfloat16 with float32 master weights. Device
memory, estimated by `--dry_run`: 33.8 GiB for Qwen3-0.6B (LoRA: 26.4), 53.8 GiB
for 1.7B (LoRA: 31.9); a chip of 40 or 80 GiB will do, and fewer `rollout.slots`
or smaller micro-batches fit less. Time has not been measured on an accelerator:
some 40 million tokens are decoded and trained on, hours on one such chip.

`:tiny` runs every part on bytes and random weights and learns nothing;
`:DIR,tiny` does so with the directory's model and tokenizer.
"""

from configs import common
from posttrain import schema


def get_config(argument: str = ''):
  folder, words = common.words(argument, ('tiny', 'lora'))
  tiny, lora = 'tiny' in words, 'lora' in words
  model, tokenizer = common.pretrained(folder)

  # What is asked, and what an answer is worth.
  answer = 8 if tiny else 512
  gsm8k = schema.EnvEntry(
    env=schema.Gsm8k(
      path='$POSTTRAIN_DATA/gsm8k/train.jsonl',
      eval_path='$POSTTRAIN_DATA/gsm8k/test.jsonl',
    ),
    # No answer of the tiny one is right: pruned, nothing would be left.
    algorithm=schema.Grpo(prune_zero_advantage=not tiny),
    sampler=schema.Policy(temperature=1.0, max_tokens=answer),
    group_size=2 if tiny else 8,
  )
  # How much of it at a time. The longest question has 245 tokens of GPT-NeoX,
  # 1,050 bytes.
  row_tokens = 768 if folder else 1536
  batch = schema.Batch(
    prompts_per_step=2 if tiny else 64,
    row_tokens=row_tokens,
    micro_batch_tokens=row_tokens if tiny else 16 * row_tokens,
  )
  # How it is learned. A LoRA wants ten times the rate of full training.
  grpo = schema.Stage(
    init=folder or 'random',
    lora=schema.Lora(rank=32) if lora else schema.Lora(),
    steps=2 if tiny else 200,
    envs={'gsm8k': gsm8k},
    batch=batch,
    loss=schema.Loss(rl=schema.Clip(low=0.2, high=0.28)),
    optim=schema.Optim(
      lr=1e-5 if lora else 1e-6,
      schedule='constant',
      warmup_steps=0 if tiny else 5,
      weight_decay=0.0,
      beta2=0.99,
    ),
    # How answers are decoded, and how many are asked for.
    rollout=schema.Rollout(
      slots=4 if tiny else 256,
      prefill_rows=4 if tiny else 16,
      prefill_tokens=64,
    ),
    eval=schema.Eval(
      every=None if tiny else 50,
      prompts=2 if tiny else 500,
      samples=1 if tiny else 4,
      max_tokens=answer,
    ),
  )
  return common.get_config(
    schema.Run(
      model=model,
      tokenizer=tokenizer,
      stages={'grpo': grpo},
      checkpoint=schema.Checkpoint(every=50, keep_last=1),
    )
  )
