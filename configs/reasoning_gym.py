r"""SFT, then GRPO, on words spelled backward; known sums lose 0.10, greedy.

    pip install -e '.[reasoning-gym]'
    python -m posttrain.main --config=configs/reasoning_gym.py --workdir=DIR

`spell_backward` with its defaults: words of 3 to 10 letters, which the package
draws. It scores an answer by the share of letters in their places, in either
case; the answer is correct if all are.

Expected, on 500 unseen words, seed 0: sampled pass rate 0.278 after SFT (which
ends at step 140, the first evaluation of 0.2 or more), 0.735 after GRPO; greedy
0.542, then 0.810; any of 16 answers 0.724, then 0.886. Two cores of an AMD EPYC
beside much other work: some 350 CPU seconds. Of the 57 words with a capital 54
are wrong, of the others 41. Nothing grades what comes after an answer, and a
fifth of the greedy ones then run on to the limit (`eval/truncated`).

`reasoning_gym.py:DIR` is for a HuggingFace directory. Another task:
`--config.grpo.envs.reasoning_gym.env.dataset` (and of the stage `sft`, where it
has answers to show). No figure of this task is published.

`:random`, `:rejection` and `:sft` are controls of GRPO from the same start, see
`configs.common.ARMS`. `:retention` measures sums, which SFT then teaches too.
`:tiny` runs every part and learns nothing.

Compared over five seeds on each of two starts that know sums, in equal CPU
seconds, each arm at the best of four learning rates (docs/results.md):

                        words, sampled      sums, greedy
  GRPO at lr 8e-4       0.307 -> 0.671      0.843 -> 0.746
  rejection sampling    0.307 -> 0.832      0.843 -> 0.711
  SFT for as long       0.307 -> 0.908      0.843 -> 0.029
  random rewards        0.307 -> 0.024      0.843 -> 0.834
"""

import dataclasses

import ml_collections

from configs import common, reverse
from posttrain import schema

# What is learned: words of 3 to 10 letters, spelled backward. The package draws
# and scores them.
ENV = schema.ReasoningGym(
  dataset='spell_backward', instruction='', train_tasks=60_000, eval_tasks=1000
)
ENTRY = schema.EnvEntry(env=ENV)

# Lengths, and what is asked of every evaluation; the rest is as in reverse.py.
BATCH = schema.Batch(
  prompts_per_step=64, row_tokens=128, micro_batch_tokens=2048
)
SUITE = (
  'Spell this word backward (example: sun -> nus): abc',
  'Spell this word backward (example: sun -> nus): posttraining',
  'Hello.',
)

# Stage 1: SFT, up to the first evaluation with a sampled pass rate of 0.2.
SFT = dataclasses.replace(
  reverse.SFT,
  envs={'reasoning_gym': ENTRY},
  batch=BATCH,
  eval=dataclasses.replace(
    reverse.SFT.eval,
    max_tokens=32,
    suite=SUITE,
    every=10,
    best='eval/sampled_pass_rate/reasoning_gym',
  ),
)

# Stage 2: GRPO.
GRPO = dataclasses.replace(
  reverse.GRPO,
  envs={
    'reasoning_gym': dataclasses.replace(
      ENTRY,
      algorithm=schema.Grpo(),
      sampler=schema.Policy(temperature=1.0, max_tokens=32),
      group_size=8,
    )
  },
  batch=BATCH,
  eval=dataclasses.replace(reverse.GRPO.eval, max_tokens=32, suite=SUITE),
)


def get_config(argument: str = '') -> ml_collections.ConfigDict:
  stages = {'sft': SFT, 'grpo': GRPO}
  config, folder = common.published_task(argument, stages, 512, 1024)
  for name in config.stages if folder else ():
    env = config[name].envs.reasoning_gym.env
    env.instruction = schema.ReasoningGym.instruction
  return config
