"""A model of useful size on a CPU: SFT, GRPO and DPO with LoRA, a few steps.

    python -m experiments.benchmarks.laptop --workdir=DIR [--kind=sft]

The shape of Qwen3-0.6B with its 151,936 tokens, random weights, `posttrain`'s
own choices for sizes and dtype. One JSON line per kind: seconds until the first
step begins, those of the steps after the first, positions computed per token
needed, and peak memory of the process.

    sft     8 chats of about 67 tokens a step
    grpo    4 prompts, 4 answers of 64 tokens for each
    dpo     4 pairs of about 130 tokens
"""

import dataclasses
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

import jax

from experiments.benchmarks import timing
from posttrain import main as program
from posttrain import schema
from posttrain.chat import rendering
from posttrain.metrics import writers
from posttrain.models import hf, transformer

TEXT = 'What do bees make in spring, and why? '  # on bytes
ROWS = {
  'sft': {'prompt': TEXT[:30], 'completion': TEXT[:30]},
  'grpo': {'prompt': TEXT},
  'dpo': {'prompt': TEXT[:30], 'chosen': TEXT[:28], 'rejected': TEXT[5:28]},
}
BATCH = {'sft': 8, 'grpo': 4, 'dpo': 4}
FEW = {'envs.data.group_size': 4, 'envs.data.sampler.max_tokens': 64}


def main(argv=None) -> None:
  """Runs the command."""
  parser = timing.parser(__doc__, kind='', steps=3, model='qwen3_0p6b')
  parser.add_argument('--workdir', required=True)
  args = parser.parse_args(argv)
  folder = os.path.join(args.workdir, 'model')
  if not os.path.exists(folder):
    write_model(args.model, folder)
  if args.kind:
    timing.emit(**measure(args.kind, folder, args))
    return
  for kind in ROWS:  # a process each, for its seconds and its memory
    own = [f'--{key}={value}' for key, value in vars(args).items() if value]
    module = [sys.executable, '-m', 'experiments.benchmarks.laptop']
    subprocess.run([*module, *own, f'--kind={kind}'], check=True)


def write_model(name: str, folder: str) -> None:
  """Writes random weights of a preset, on bytes, as a HuggingFace directory."""
  renderer = rendering.load(schema.Tokenizer())
  cfg = schema.PRESETS[name]
  size = cfg.vocab_size or renderer.tokenizer.vocab_size
  cfg = dataclasses.replace(cfg, vocab_size=size)
  params = transformer.init(jax.random.key(0), cfg)
  hf.save(params, cfg, folder, dtype='bfloat16')
  rendering.write(renderer, folder)


def measure(kind: str, folder: str, args) -> dict:
  """Returns the figures of a kind, of a run that trains a folder's model."""
  workdir = os.path.join(args.workdir, kind)
  with tempfile.NamedTemporaryFile('w', suffix='.jsonl') as file:
    for index in range(40):
      row = {k: f'{index} {text}' for k, text in ROWS[kind].items()}
      file.write(json.dumps(row) + '\n')
    file.flush()
    reward = ',configs.grpo:short' if kind == 'grpo' else ''
    options = {
      f'{kind}.steps': args.steps,
      f'{kind}.batch.prompts_per_step': BATCH[kind],
      f'{kind}.optim.warmup_steps': 0,
      f'{kind}.eval.every': None,
      **({f'grpo.{k}': x for k, x in FEW.items()} if reward else {}),
    }
    run = program.load(
      f'{kind}:{folder},{file.name}{reward},lora',
      [(key, str(value)) for key, value in options.items()],
    )
    start = time.time()
    program.train(run, workdir)
  rows = writers.read(os.path.join(workdir, 'metrics.jsonl'))
  steps = [row for row in rows if row['step']]
  seconds = [
    row['time/rollout'] + row['time/update'] for row in steps[1:] or steps
  ]
  return {
    'bench': f'laptop_{kind}',
    'first_step_s': timing.rounded(rows[0]['time/elapsed']),
    'step_s': timing.rounded(statistics.median(seconds)),
    'positions_per_token': timing.rounded(
      statistics.mean(1 / row['batch/fill'] for row in steps)
    ),
    'peak_gib': timing.rounded(
      resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    ),
    'wall_s': timing.rounded(time.time() - start),
  }


if __name__ == '__main__':
  main()
