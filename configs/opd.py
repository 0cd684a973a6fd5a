r"""On-policy distillation of a teacher of yours into a model of yours.

    python -m posttrain.main --workdir=WORK \
        --config=configs/opd.py:DIR,PROMPTS.jsonl,teacher=TEACHER

DIR is a HuggingFace directory (Llama 3, Qwen 2, 2.5 or 3, Gemma 2 or 3 text),
OWNER/NAME in the hub's cache, or the workdir of another run: model, weights,
tokenizer, chat template and stop tokens come from it. A line of PROMPTS.jsonl
has `prompt`, a string or a list of messages; .parquet, .arrow and .csv files
and TFDS data sets (`tfds:NAME`) as well.

TEACHER is such a directory or workdir, or the address of a server that scores
prompts, `http://127.0.0.1:8000/v1` (`python -m posttrain.serve`), with `#NAME`
at its end where it serves several models. It has the policy's tokens. Its
logprobs of the answers that the policy samples are the credit; no reward is
read.

A tenth of the prompts is held out, or a second file names the held-out ones:
`eval/teacher_kl/data` is the KL of the policy to the teacher on an answer to
each, in nats per token. `epochs=3` and `lora` are as in configs/grpo.py.

`:tiny` runs every part on rows_example.jsonl, on bytes and random weights,
with the initial weights as the teacher, and learns nothing; with
`DIR,PROMPTS.jsonl,...` before it, on those.
"""

import pathlib

import ml_collections

from configs import arguments, common, machinery
from posttrain import schema

EXAMPLE = pathlib.Path(__file__).with_name('rows_example.jsonl')

OPD = schema.Stage(
  # What is learned: the teacher's distribution, on answers of the policy.
  envs={
    'data': schema.EnvEntry(
      env=schema.Rows(path=str(EXAMPLE), eval_fraction=0.1),
      algorithm=schema.Opd(reference='init'),
      sampler=schema.Policy(temperature=1.0, max_tokens=512),
    )
  },
  # How answers are decoded.
  rollout=schema.Rollout(slots=None, prefill_rows=16, prefill_tokens=64),
  # How it trains.
  steps=200,
  batch=schema.Batch(prompts_per_step=64, row_tokens=1024),
  optim=schema.Optim(
    lr=1e-6, schedule='constant', warmup_steps=5, weight_decay=0.0, beta2=0.99
  ),
  # Evaluation.
  eval=schema.Eval(
    every=50,
    prompts=100,
    samples=1,
    teacher_kl=True,
    suite=common.ENGLISH_SUITE,
  ),
)


def get_config(argument: str = ''):
  own = arguments.parse_own(argument, teacher=True)
  config = common.run_from(own.folder, {'opd': OPD}, own.preset)
  entry = config.opd.envs.data
  common.name_rows(entry.env, own)
  config.opd.eval.max_tokens = entry.sampler.get_oneway_ref('max_tokens')
  if isinstance(own.teacher, str):
    entry.algorithm.reference = own.teacher
  elif own.teacher is not None:
    with entry.algorithm.ignore_type():
      entry.algorithm.reference = machinery.node(own.teacher)
  if 'lora' in own.words:
    common.use_lora(config.opd, lr=1e-5)
  if 'tiny' in own.words:
    shrink(config)
  common.count_epochs(config.opd, entry.env, own)
  return config


def shrink(config: ml_collections.ConfigDict) -> None:
  """Sets sizes that run in seconds."""
  common.shrink_training(config.opd, steps=2, prompts=2, row_tokens=512)
  common.shrink_slots(config.opd)
  config.opd.envs.data.sampler.max_tokens = 8
  config.opd.eval.prompts = 2
