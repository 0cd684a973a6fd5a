r"""GRPO of a HuggingFace model on GSM8K, rewarded for the boxed number.

    python -m posttrain.main --config=configs/gsm8k_grpo.py:DIR --workdir=WORK

DIR is a HuggingFace directory (Llama 3, Qwen 2, 2.5 or 3, Gemma 2 or 3 text)
of a model that boxes an answer now and then: an instruct model, or the result
of `posttrain.export` after configs/gsm8k_sft.py. Model, weights, tokenizer,
chat template and stop tokens come from it. The data are those of gsm8k_sft.py
(`--config.grpo.envs.gsm8k.env.path=...`, and `eval_path`, name others). A right
number is worth 1, all else 0; `...env.lenient=False` requires the box.

`:DIR,lora` trains a rank-32 LoRA at ten times the learning rate; a KL leash
then has the frozen weights as its reference, at no memory. A model that thinks
first needs longer answers (`sampler.max_tokens`, `batch.row_tokens`), or
`--config.tokenizer.template_variables='{"enable_thinking": false}'`.

200 steps of 64 x 8 answers, in bfloat16 with float32 master weights. Device
memory, by `--dry_run --devices=gpu:1`: 36.0 GiB for Qwen3-0.6B (LoRA: 25.7),
61.8 GiB for 1.7B (LoRA: 31.4); a chip of 40 or 80 GiB is enough, and fewer
`rollout.slots` or smaller micro-batches need less. Time, estimated: some 40
million tokens are decoded and trained on, hours on one such chip.

`:DIR,verl` asks in the words in which verl publishes figures: the answer is
after `####`, which is read as well. Published, greedy, from pretrained instruct
models: Qwen2.5 0.5B 0.496, then 0.543 (LoRA) or 0.567 (PPO), in verl's
docs/algo/baseline.md; Qwen2.5 1.5B 0.796 after 140 steps, in SkyRL's recipes.
Aims on the 1,319 test questions, of models of that age or later, neither
measured here: 0.65 for 0.6B, 0.80 for 1.7B.

`:tiny` runs every part on bytes and random weights and learns nothing;
`:DIR,tiny` does so with the directory's model and tokenizer.
"""

import ml_collections

from configs import arguments, common
from posttrain import schema

VERL = 'Let\'s think step by step and output the final answer after "####".'

GRPO = schema.Stage(
  # What is learned: the questions, and the reward of an answer.
  envs={
    'gsm8k': schema.EnvEntry(
      env=schema.Gsm8k(
        path='$POSTTRAIN_DATA/gsm8k/train.jsonl',
        eval_path='$POSTTRAIN_DATA/gsm8k/test.jsonl',
      ),
      algorithm=schema.Grpo(),
      sampler=schema.Policy(temperature=1.0, max_tokens=512),
      group_size=8,
    )
  },
  # How answers are decoded.
  rollout=schema.Rollout(slots=256, prefill_rows=16, prefill_tokens=64),
  # How it trains. The longest question has 245 tokens of GPT-NeoX.
  steps=200,
  batch=schema.Batch(
    prompts_per_step=64, row_tokens=768, micro_batch_tokens=16 * 768
  ),
  loss=schema.Loss(rl=schema.Clip(low=0.2, high=0.28)),
  optim=schema.Optim(
    lr=1e-6, schedule='constant', warmup_steps=5, weight_decay=0.0, beta2=0.99
  ),
  # Evaluation.
  eval=schema.Eval(
    every=50, prompts=500, samples=4, max_tokens=512, suite=common.ENGLISH_SUITE
  ),
)


def get_config(argument: str = ''):
  folder, words = arguments.parse_folder(argument, ('tiny', 'lora', 'verl'))
  config = common.run_from(folder, {'grpo': GRPO})
  if 'verl' in words:
    config.grpo.envs.gsm8k.env.instruction = VERL
  if 'lora' in words:
    common.use_lora(config.grpo, lr=1e-5)
  if 'tiny' in words:
    shrink(config)
  return config


def shrink(config: ml_collections.ConfigDict) -> None:
  """Sets sizes that run in seconds."""
  # The longest question has 1,050 bytes.
  row_tokens = 1536 if config.tokenizer.path is None else None
  common.shrink_training(config.grpo, steps=2, prompts=2, row_tokens=row_tokens)
  common.shrink_slots(config.grpo)
  entry = config.grpo.envs.gsm8k
  # No answer is right: with pruning, no token would train.
  entry.algorithm.prune_zero_advantage = False
  entry.sampler.max_tokens = 8
  entry.group_size = 2
  config.grpo.eval.prompts = 2
  config.grpo.eval.samples = 1
  config.grpo.eval.max_tokens = 8
