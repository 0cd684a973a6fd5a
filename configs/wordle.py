r"""SFT, then GRPO, on wordle; more sampled games are solved, not greedy ones.

    python -m posttrain.main --config=configs/wordle.py --workdir=DIR

A secret word is to be found in six guesses, with feedback. 679 words, a fifth
of which are secret in evaluation alone. Demonstrations are games of a random
guesser whose guesses agree with all feedback. GRPO's reward is the published
sum: 1 and 1 / guesses for the secret, else 0.2 per G and 0.1 per Y of the last
guess, 0.2 if every guess can be read; a game is correct if it is solved.

Expected, seed 0: SFT ends at step 200, the first evaluation of 0.05 or more
(0.004, 0.043, 0.055 of 512 games at steps 100, 150, 200; 0.074 of as many on 32
other secrets), after 142 CPU seconds on two cores of an AMD EPYC beside much
other work. GRPO, on the 96 secrets that are none of training or the rule:
sampled pass rate 0.047, then 0.114; greedy 0.125, then 0.135; any of 16 games
0.323, then 0.510; 344 CPU seconds. Its start is just below the rule there.

Tried: bytes alone, so that a mark follows its letter, 64 games per step: 0.023
  at step 200, 0.044 at step 300. There 0.80 of the second guesses are words,
  but 0.40 avoid all letters marked X and 0.15 agree with all feedback; of the
  ids per marked letter, at step 200, 0.21, 0.64 and 0.33. GRPO from a start of
  0.029 ended at 0.030.
A consistent guesser solves all of 128 secrets, in 3.58 guesses in the mean; six
fixed guesses solve six of the 679 words (`experiments.benchmarks.controls`).

`wordle.py:DIR` is for a HuggingFace directory. Published, from a pretrained
model: 0, then some 0.60 of the games, reward 0.2, then 1.5, 100 steps
(prime-rl's examples/basic/wordle).

`:random`, `:rejection` and `:sft` are controls of GRPO from the same start, see
`configs.common.ARMS`. `:retention` measures sums, which SFT then teaches too.
`:tiny` runs every part and learns nothing.

Compared over five seeds on each of two starts that know sums, 40 steps of 32 x
8 games or as many CPU seconds, each arm at the best of four learning rates, on
64 secrets (docs/results.md):

                        wordle, sampled    wordle, greedy     sums, greedy
  GRPO at lr 4e-4       0.055 -> 0.099     0.117 -> 0.097     0.875 -> 0.866
  rejection sampling    0.055 -> 0.109     0.117 -> 0.142     0.875 -> 0.864
  SFT for as long       0.055 -> 0.192     0.117 -> 0.267     0.875 -> 0.022
  random rewards        0.055 -> 0.025     0.117 -> 0.042     0.875 -> 0.872
"""

import dataclasses
import pathlib

import ml_collections

from configs import common, machinery
from posttrain import schema

# Bytes, and an id for each letter with its mark, as `cX`: so each letter of a
# guess has one distance to the marked letters of its place.
TOKENIZER = schema.Tokenizer(
  path=str(pathlib.Path(__file__).with_name('wordle_tokenizer.json')),
  eos='<|end|>',
)

# What is learned: 679 words, of which 128 are never secret in training.
ENV = schema.Wordle(
  style='compact', reward='published', train_tasks=40_000, eval_tasks=128
)
ENTRY = schema.EnvEntry(env=ENV)

# How episodes are decoded and measured, in both stages.
ROLLOUT = schema.Rollout(slots=256, prefill_rows=64, prefill_tokens=16, chunk=4)
EVAL = schema.Eval(
  prompts=96,
  samples=4,
  max_tokens=6,
  max_episode_tokens=90,
  suite=('wordle', 'crane', 'hello'),
)
BATCH = schema.Batch(
  prompts_per_step=64, row_tokens=96, micro_batch_tokens=2304
)

# Stage 1: SFT on games of a consistent guesser, up to the first evaluation with
# a sampled pass rate of 0.05.
SFT = schema.Stage(
  envs={'wordle': ENTRY},
  rollout=ROLLOUT,
  steps=1000,
  batch=dataclasses.replace(BATCH, prompts_per_step=32),
  optim=schema.Optim(lr=2e-3, schedule='constant', warmup_steps=20),
  eval=dataclasses.replace(
    EVAL,
    skip=64,
    prompts=32,
    samples=16,
    every=50,
    best='eval/sampled_pass_rate/wordle',
    best_prompts=32,
    stop_at=0.05,
  ),
)

# Stage 2: GRPO.
GRPO = schema.Stage(
  init='stage:sft',
  envs={
    'wordle': dataclasses.replace(
      ENTRY,
      algorithm=schema.Grpo(),
      sampler=schema.Policy(
        temperature=1.0, max_tokens=6, max_episode_tokens=90
      ),
      group_size=8,
    )
  },
  rollout=ROLLOUT,
  steps=40,
  batch=BATCH,
  loss=schema.Loss(rl=schema.Clip(low=0.2, high=0.28)),
  optim=schema.Optim(
    lr=4e-4, schedule='linear', warmup_steps=5, beta2=0.99, weight_decay=0.0
  ),
  eval=dataclasses.replace(EVAL, samples=16, every=20),
)


def get_config(argument: str = '') -> ml_collections.ConfigDict:
  stages = {'sft': SFT, 'grpo': GRPO}
  config, folder = common.published_task(argument, stages, 512, 4096)
  if not folder:
    config.tokenizer = machinery.node(TOKENIZER)
  for name in config.stages if folder else ():
    config[name].envs.wordle.env.style = 'verbose'
  return config
