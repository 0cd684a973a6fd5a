"""Our works against transformers and TRL, and against another checkout.

    pip install torch transformers trl
    python -m experiments.benchmarks.peers --shape=S --threads=1 --repeats=5
    python -m experiments.benchmarks.peers --works=grpo,gsm8k,dpo --base=DIR
    python -m experiments.benchmarks.peers --works=sql --checkpoint=RUN

The same work by all, turn by turn, each in a process of its own, in float32 on
the CPU. `--base` names a checkout whose posttrain does our work too. One JSON
line per implementation, as of `experiments.benchmarks`, and one of the matrix
product of XLA and of torch. `ratio` is theirs over ours, and `base_ratio` that
of the base, by the medians of CPU time; without TRL it is left out.

    decode    64 prompts of 32 tokens, 128 new ones each: `generate` with
              sampling
    train     64 rows of 160 tokens, cross-entropy, AdamW, micro-batches of 4
              rows
    grpo      8 prompts of 32 tokens, 8 samples of 32 for each, all of which
              train: TRL's GRPOTrainer with transformers' `generate`; the CPU
              seconds of rollout, scoring and update
    gsm8k     the same with 128 + 128 tokens; gsm8k_kl with a reference,
              without TRL, which reads one from a folder
    dpo       16 pairs of 32 prompt and 32 answer tokens, reference logprobs
              computed beforehand: TRL's DPOTrainer
    sql       a step of configs/sql.py, stage `grpo`, of the policy of RUN, a
              workdir after SFT, whose weights stay as they are; without TRL
"""

import functools
import importlib.util
import pathlib
import tempfile
import threading
import time

import numpy as np

from experiments.benchmarks import sizes, timing

DECODED, PROMPT, NEW = 64, 32, 128  # of `decode`


def main() -> None:
  """Prints the rows of all works."""
  names = ','.join(name for name in WORK if name != 'sql')
  parser = timing.parser(
    __doc__, threads=1, repeats=5, works=names, base='', checkpoint=''
  )
  parser.add_argument('--shape', choices=('S', 'M'), default='S')
  args = parser.parse_args()
  timing.set_threads(args.threads)
  timing.emit_box()
  has_peers = importlib.util.find_spec('torch') is not None
  if has_peers:
    clock = timing.Clock(timing.apart(lambda: torch_matmul(args.threads)))
    timing.alternate({'torch': clock}, args.repeats)
    timing.emit_matmul(clock, 'torch_matmul', args.threads)
  for name in args.works.split(','):
    args.bench = f'peers_{name}'
    shape = sizes.SHAPES[args.shape]
    amount, unit, ours, theirs = WORK[name]
    with tempfile.TemporaryDirectory() as root:
      folders = {'base': args.base}
      works = {'ours': ours, **({'base': ours} if args.base else {})}
      if has_peers and theirs is not None:
        works['theirs'] = theirs
      makers = {}
      for impl, make in works.items():
        folder = pathlib.Path(root, impl)
        folder.mkdir()
        makers[impl] = functools.partial(make, args, shape, str(folder))
      clocks = timing.compare(args, makers, amount, unit, folders)
    ratios = {
      key: timing.rounded(clocks[impl].median('cpu') / ours_cpu)
      for ours_cpu in [clocks['ours'].median('cpu')]
      for impl, key in (('theirs', 'ratio'), ('base', 'base_ratio'))
      if impl in clocks
    }
    timing.emit(bench=args.bench, **ratios)


def torch_matmul(threads: int) -> timing.Work:
  """Returns eight matrix products of 1024 x 1024 by torch."""
  import torch

  torch.set_num_threads(threads)
  matrix = torch.randn(1024, 1024)

  def work():
    for _ in range(8):
      matrix @ matrix

  return work


def llama(shape):
  """Returns a Llama of transformers with the sizes of `plain_jax`."""
  import transformers

  config = transformers.LlamaConfig(
    vocab_size=shape.vocab_size,
    hidden_size=shape.embed_dim,
    intermediate_size=shape.mlp_dim,
    num_hidden_layers=shape.layers,
    num_attention_heads=shape.heads,
    num_key_value_heads=shape.kv_heads,
    head_dim=shape.head_dim,
    max_position_embeddings=256,
    tie_word_embeddings=True,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
  )
  return transformers.LlamaForCausalLM(config)


def words(shape, rng):
  """Returns a function of random texts, and a tokenizer of a token per word."""
  import tokenizers
  import transformers

  # Special tokens are cut out of words: none of them begins one.
  special = '<pad>', '<bos>', '<eos>', '<unk>'
  names = *special, *(f't{i}' for i in range(4, shape.vocab_size))
  vocabulary = {name: i for i, name in enumerate(names)}
  model = tokenizers.models.WordLevel(vocabulary, unk_token='<unk>')
  tokenizer = tokenizers.Tokenizer(model)
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()

  def text(count: int) -> str:
    ids = rng.integers(4, shape.vocab_size, count)
    return ''.join(f't{i} ' for i in ids)

  return text, transformers.PreTrainedTokenizerFast(
    tokenizer_object=tokenizer,
    pad_token='<pad>',
    bos_token='<bos>',
    eos_token='<eos>',
    unk_token='<unk>',
  )


def watch(model, figures: dict[str, float], phase: list[str]) -> None:
  """Counts a model's positions under the last name of `phase`."""

  def count(module, args, kwargs):
    ids = kwargs['input_ids'] if 'input_ids' in kwargs else args[0]
    name = f'{phase[-1]}_computed'
    figures[name] = figures.get(name, 0) + ids.numel()

  model.register_forward_pre_hook(count, with_kwargs=True)


def our_decode(args, shape, folder: str) -> timing.Work:
  from experiments.benchmarks import works

  return works.generate(
    works.model(shape),
    sizes.random_ids(shape.vocab_size, DECODED, PROMPT),
    NEW,
    capacity=PROMPT + NEW,
    prefill_rows=32,
    prefill_tokens=PROMPT,
  )


def their_decode(args, shape, folder: str) -> timing.Work:
  import torch

  torch.set_num_threads(args.threads)
  model = llama(shape).eval()
  ids = sizes.random_ids(shape.vocab_size, DECODED, PROMPT)
  ids = torch.tensor(ids, dtype=torch.long)

  @torch.inference_mode()
  def work():
    out = model.generate(
      ids,
      attention_mask=torch.ones_like(ids),
      do_sample=True,
      top_k=0,
      min_new_tokens=NEW,
      max_new_tokens=NEW,
    )
    assert out.shape[1] == ids.shape[1] + NEW

  return work


def our_train(args, shape, folder: str) -> timing.Work:
  from experiments.benchmarks import works

  ids = sizes.random_ids(shape.vocab_size, sizes.ROWS, sizes.TOKENS)
  batch = works.make_batch(ids, sizes.TRAIN_ROWS)
  return works.update(works.model(shape), batch)


def their_train(args, shape, folder: str) -> timing.Work:
  import torch

  torch.set_num_threads(args.threads)
  model = llama(shape).train()
  optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
  ids = sizes.random_ids(shape.vocab_size, sizes.ROWS, sizes.TOKENS)
  ids = torch.tensor(ids, dtype=torch.long)
  micro_batches = ids.split(sizes.TRAIN_ROWS)

  def work():
    for micro in micro_batches:
      loss = model(input_ids=micro, labels=micro).loss
      (loss / len(micro_batches)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

  return work


def our_grpo(args, shape, folder: str) -> timing.Work:
  from experiments.benchmarks import works

  name = args.bench.removeprefix('peers_')
  return works.grpo(works.model(shape), sizes.STEPS[name], folder)


def their_grpo(args, shape, folder: str) -> timing.Work:
  import datasets
  import torch
  import trl

  torch.set_num_threads(args.threads)
  size = sizes.STEPS[args.bench.removeprefix('peers_')]
  text, tokenizer = words(shape, np.random.default_rng(0))
  prompts = [text(size.prompt) for _ in range(size.prompts)]
  trainer = trl.GRPOTrainer(
    llama(shape),
    lambda completions, **_: [sizes.reward(x.encode()) for x in completions],
    trl.GRPOConfig(
      **options(folder),
      per_device_train_batch_size=size.micro_rows,
      gradient_accumulation_steps=size.prompts * size.group // size.micro_rows,
      num_generations=size.group,
      max_completion_length=size.new,
      generation_kwargs={'min_new_tokens': size.new},
      learning_rate=1e-4,
      beta=size.kl_beta,
    ),
    train_dataset=datasets.Dataset.from_dict({'prompt': prompts}),
    processing_class=tokenizer,
  )
  figures, phase = {}, ['update']

  def timed(name, method):
    """Returns a method of the trainer as a phase: where gradients are off."""

    def call(*args, **kwargs):
      if torch.is_grad_enabled() and name == 'scoring':
        return method(*args, **kwargs)
      phase.append(name)
      start = time.process_time()
      result = method(*args, **kwargs)
      spent = time.process_time() - start
      figures[f'{name}_s'] = figures.get(f'{name}_s', 0) + spent
      phase.pop()
      return result

    return call

  trainer._generate = timed('rollout', trainer._generate)
  trainer._get_per_token_logps_and_entropies = timed(
    'scoring', trainer._get_per_token_logps_and_entropies
  )
  for model in filter(None, (trainer.model, trainer.ref_model)):
    watch(model, figures, phase)
  step = steps_of(trainer)

  def work():
    figures.clear()
    start = time.process_time()
    step()
    spent = time.process_time() - start
    others = sum(x for key, x in figures.items() if key.endswith('_s'))
    return lambda: {**figures, 'update_s': spent - others}

  return work


def our_dpo(args, shape, folder: str) -> timing.Work:
  from experiments.benchmarks import works

  return works.dpo(works.model(shape), folder)


def their_dpo(args, shape, folder: str) -> timing.Work:
  import datasets
  import torch
  import trl

  torch.set_num_threads(args.threads)
  text, tokenizer = words(shape, np.random.default_rng(0))
  lengths = dict.fromkeys(('prompt', 'chosen', 'rejected'), sizes.PAIR_TOKENS)
  # An end of text follows each answer.
  lengths |= {k: n - 1 for k, n in lengths.items() if k != 'prompt'}
  rows = [
    {name: text(count) for name, count in lengths.items()}
    for _ in range(sizes.PAIRS)
  ]
  trainer = trl.DPOTrainer(
    llama(shape),
    args=trl.DPOConfig(
      **options(folder),
      per_device_train_batch_size=sizes.PAIRS,
      precompute_ref_log_probs=True,
      learning_rate=1e-5,
    ),
    train_dataset=datasets.Dataset.from_list(rows),
    processing_class=tokenizer,
  )
  figures = {}
  watch(trainer.model, figures, ['update'])
  step = steps_of(trainer)

  def work():
    figures.clear()
    step()
    return lambda: dict(figures)

  return work


def our_sql(args, shape, folder: str) -> timing.Work:
  from experiments.benchmarks import works
  from posttrain import main as program

  chosen = {
    'init': args.checkpoint,
    'optim.lr': 1e-30,  # the policy, and so its episodes, stay
    'steps': sizes.STEP_COUNT,
  }
  overrides = [(f'grpo.{key}', str(value)) for key, value in chosen.items()]
  return works.run(program.load('configs/sql.py', overrides), 'grpo', folder)


def options(folder: str) -> dict:
  """Returns the options of every trainer of TRL."""
  return {
    'output_dir': folder,
    'use_cpu': True,
    'bf16': False,
    'gradient_checkpointing': False,
    'max_steps': sizes.STEP_COUNT,
    'logging_steps': sizes.STEP_COUNT,
    'save_strategy': 'no',
    'report_to': 'none',
    'disable_tqdm': True,
    'dataloader_pin_memory': False,
  }


def steps_of(trainer):
  """Returns a function that runs the next step of a trainer.

  Its loop runs in a thread of its own, which waits between two steps.
  """
  import transformers

  go, done = threading.Semaphore(0), threading.Semaphore(0)
  errors: list[BaseException] = []

  class Wait(transformers.TrainerCallback):
    """Waits at the end of every step."""

    def on_step_end(self, *args, **kwargs):
      done.release()
      go.acquire()

  def loop():
    go.acquire()
    try:
      trainer.train()
    except BaseException as error:
      errors.append(error)
      done.release()

  trainer.add_callback(Wait())
  threading.Thread(target=loop, daemon=True).start()

  def step():
    go.release()
    done.acquire()
    if errors:
      raise errors[0]

  return step


# Name -> amount, unit, and what builds our work and theirs from (args, shape,
# an empty folder).
WORK = {
  'decode': (DECODED * NEW, 'tokens', our_decode, their_decode),
  'train': (sizes.ROWS * sizes.TOKENS, 'tokens', our_train, their_train),
  'grpo': (1, 'steps', our_grpo, their_grpo),
  'gsm8k': (1, 'steps', our_grpo, their_grpo),
  'gsm8k_kl': (1, 'steps', our_grpo, None),
  'dpo': (1, 'steps', our_dpo, their_dpo),
  'sql': (1, 'steps', our_sql, None),
}


if __name__ == '__main__':
  main()
