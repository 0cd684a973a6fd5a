r"""GRPO of a model of yours, on prompts and a reward of yours.

    python -m posttrain.main --workdir=WORK \
        --config=configs/grpo.py:DIR,PROMPTS.jsonl,rewards:short

DIR is a HuggingFace directory (Llama 3, Qwen 2, 2.5 or 3, Gemma 2 or 3 text),
OWNER/NAME in the hub's cache, of an instruct model, or the workdir of another
run, such as one of sft: model, weights, tokenizer, chat template and stop
tokens come from it. A line of PROMPTS.jsonl has `prompt`, a string or a list of
messages, and any other columns; .parquet, .arrow and .csv files and TFDS data
sets (`tfds:NAME`) as well. `rewards:short` is the function `short` in
rewards.py of the current folder, as TRL calls it:

    def short(completions, **columns):  # one value per completion, None = none
      return [-len(text) / 100 for text in completions]

Where prompts are lists of messages, so is each completion, and its text is
`completion[-1]['content']`. A column is an argument by its name. `reward=RUN`
is the reward model of another run, see configs/reward_model.py. Several
(`,rewards:short,rewards:polite`) are summed;
`--config.grpo.envs.data.rewards.NAME.weight=W` weighs one. The name is the
function's, with its module before it (`rewards_short`) where another has the
same one; that of a model is `learned`.

A tenth of the prompts is held out, or `:DIR,PROMPTS.jsonl,HELD_OUT.jsonl,...`
names the held-out ones: `eval/reward/NAME/data` is the mean of each function
over greedy answers to them, `eval/sampled_reward/NAME/data` over an answer at
temperature 1, and `rollout/reward/data` the mean of the sum over the step's
answers. `eval.suite` is answered before and after. `eval.max_tokens` follows
`sampler.max_tokens`, unless it is set or the whole sampler replaced.

`epochs=3` counts the steps of three passes over the prompts. `lora` trains a
rank-32 LoRA at ten times the learning rate; a KL penalty
(`--config.grpo.envs.data.algorithm.kl_beta=0.01`) then has the frozen weights
as its reference, at no memory.

An environment of yours, with rewards of its own, takes the place of the data:
`:DIR` alone, and `--config.grpo.envs='{"NAME": {...}}'`, see
docs/environments.md. Beside data or rewards in the argument it is refused.

`:tiny` runs every part on rows_example.jsonl with a reward for short answers,
on bytes and random weights, and learns nothing; with `DIR,PROMPTS.jsonl,...`
before it, on those.
"""

import pathlib

import ml_collections

from configs import arguments, common, machinery
from posttrain import schema

EXAMPLE = pathlib.Path(__file__).with_name('rows_example.jsonl')


def short(completions, **columns):
  """Returns minus the length of each completion, in characters."""
  return [-float(len(text)) for text in completions]


GRPO = schema.Stage(
  # What is learned: answers that the reward functions prefer.
  envs={
    'data': schema.EnvEntry(
      env=schema.Rows(path=str(EXAMPLE), eval_fraction=0.1),
      algorithm=schema.Grpo(),
      sampler=schema.Policy(temperature=1.0, max_tokens=512),
      group_size=8,
    )
  },
  # How answers are decoded.
  rollout=schema.Rollout(slots=None, prefill_rows=16, prefill_tokens=64),
  # How it trains.
  steps=200,
  batch=schema.Batch(prompts_per_step=32, row_tokens=1024),
  loss=schema.Loss(rl=schema.Clip(low=0.2, high=0.28)),
  optim=schema.Optim(
    lr=1e-6, schedule='constant', warmup_steps=5, weight_decay=0.0, beta2=0.99
  ),
  # Evaluation.
  eval=schema.Eval(
    every=50, prompts=100, samples=1, suite=common.ENGLISH_SUITE
  ),
)


def get_config(argument: str = ''):
  own = arguments.parse_own(argument, rewards=True, data=False)
  config = common.run_from(own.folder, {'grpo': GRPO}, own.preset)
  entry = config.grpo.envs.data
  common.name_rows(entry.env, own)
  # Evaluated and sampled answers have one limit, unless eval.max_tokens is set.
  config.grpo.eval.max_tokens = entry.sampler.get_oneway_ref('max_tokens')
  if own.data is None:
    entry.env.path = ''  # is refused, unless other environments replace `data`
  set_rewards(entry, own.rewards)
  if 'lora' in own.words:
    common.use_lora(config.grpo, lr=1e-5)
  if 'tiny' in own.words:
    shrink(config)
  common.count_epochs(config.grpo, entry.env, own)
  return config


def set_rewards(
  entry: ml_collections.ConfigDict, rewards: dict[str, schema.RewardFn]
) -> None:
  """Sets the rewards of an environment."""
  with entry.rewards.unlocked():
    for name, reward in rewards.items():
      entry.rewards[name] = machinery.node(reward)


def shrink(config: ml_collections.ConfigDict) -> None:
  """Sets sizes that run in seconds, and what the argument left out."""
  entry = config.grpo.envs.data
  entry.env.path = entry.env.path or str(EXAMPLE)
  if not entry.rewards:
    short = {'short': schema.RewardFn(fn='configs.grpo:short')}
    set_rewards(entry, short)
  common.shrink_training(config.grpo, steps=2, prompts=2, row_tokens=512)
  common.shrink_slots(config.grpo)
  entry.sampler.max_tokens = 8
  entry.group_size = 2
  config.grpo.eval.prompts = 2
