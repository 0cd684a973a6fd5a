"""Our decoding, train step and GRPO step against transformers and TRL.

    pip install torch transformers trl
    python -m experiments.benchmarks.peers --shape=S --threads=1 --repeats=5

The same work by both, turn by turn in one process, in float32 on the CPU; one
JSON line per implementation, and one of the matrix product of XLA and of torch.
`ratio` is ours over theirs, by the medians of CPU time.

    decode  64 prompts of 32 tokens, 128 new ones each: `generate` with sampling
    train   64 rows of 160 tokens, cross-entropy, AdamW, micro-batches of 4 rows
    grpo    the step of `grpo`, all rows live: TRL's GRPOTrainer with
            transformers' `generate`, micro-batches of 16 rows
"""

import tempfile
import threading

import numpy as np

from experiments.benchmarks import plain_jax, timing, works

DECODED, PROMPT, NEW = 64, 32, 128  # of `decode`
STEPS = 10_000  # more than a trainer is asked for


def main() -> None:
  """Prints the rows of all works."""
  parser = timing.parser(__doc__, threads=1, repeats=5)
  parser.add_argument('--shape', choices=('S', 'M'), default='S')
  args = parser.parse_args()
  timing.set_threads(args.threads)
  import torch

  torch.set_num_threads(args.threads)
  matrix = torch.randn(1024, 1024)

  def product():
    for _ in range(8):
      matrix @ matrix

  timing.emit_matmul(timing.Clock(product), 'torch_matmul', args.threads)
  for work in WORK:
    args.bench = f'peers_{work}'
    with tempfile.TemporaryDirectory() as folder:
      shape = plain_jax.SHAPES[args.shape]
      amount, unit, ours, theirs = WORK[work](shape, folder)
      both = {'ours': lambda x=ours: x, 'theirs': lambda x=theirs: x}
      clocks = timing.compare(args, both, amount, unit)
    ratio = clocks['theirs'].median_cpu / clocks['ours'].median_cpu
    timing.emit(bench=args.bench, ratio=timing.rounded(ratio))


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
  """Returns a function of random texts, and a tokenizer of t0, t1, ..."""
  import tokenizers
  import transformers

  vocabulary = {f't{i}': i for i in range(shape.vocab_size)}
  model = tokenizers.models.WordLevel(vocabulary, unk_token='t3')
  tokenizer = tokenizers.Tokenizer(model)
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()

  def text(count: int) -> str:
    ids = rng.integers(4, shape.vocab_size, count)
    return ''.join(f't{i} ' for i in ids)

  return text, transformers.PreTrainedTokenizerFast(
    tokenizer_object=tokenizer,
    pad_token='t0',
    bos_token='t1',
    eos_token='t2',
    unk_token='t3',
  )


def decode_works(shape, folder: str) -> tuple:
  """Returns amount, unit and both works of `decode`."""
  import torch

  del folder
  model = llama(shape).eval()
  ids = works.random_ids(shape, DECODED, PROMPT)
  theirs_ids = torch.tensor(ids, dtype=torch.long)

  @torch.inference_mode()
  def theirs():
    out = model.generate(
      theirs_ids,
      attention_mask=torch.ones_like(theirs_ids),
      do_sample=True,
      top_k=0,
      min_new_tokens=NEW,
      max_new_tokens=NEW,
    )
    assert out.shape[1] == ids.shape[1] + NEW

  ours = works.generate(
    shape,
    ids,
    NEW,
    capacity=PROMPT + NEW,
    prefill_rows=32,
    prefill_tokens=PROMPT,
  )
  return DECODED * NEW, 'tokens', ours, theirs


def train_works(shape, folder: str) -> tuple:
  """Returns amount, unit and both works of `train`."""
  import torch

  del folder
  model, rows = llama(shape).train(), works.TRAIN_ROWS
  optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
  ids = works.random_ids(shape, plain_jax.ROWS, plain_jax.TOKENS)
  micro_batches = torch.tensor(ids, dtype=torch.long).split(rows)

  def theirs():
    for micro in micro_batches:
      loss = model(input_ids=micro, labels=micro).loss
      (loss / len(micro_batches)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

  ours = works.update(shape, works.make_batch(ids, rows))
  return ids.size, 'tokens', ours, theirs


def grpo_works(shape, folder: str) -> tuple:
  """Returns amount, unit and both works of `grpo`."""
  import datasets
  import trl

  text, tokenizer = words(shape, np.random.default_rng(0))
  prompts = [text(works.PROMPT) for _ in range(works.PROMPTS)]
  rows = works.PROMPTS * works.GROUP
  trainer = trl.GRPOTrainer(
    llama(shape),
    lambda completions, **_: [works.reward(x.encode()) for x in completions],
    trl.GRPOConfig(
      output_dir=folder,
      use_cpu=True,
      bf16=False,
      gradient_checkpointing=False,
      max_steps=STEPS,
      logging_steps=STEPS,
      save_strategy='no',
      report_to='none',
      disable_tqdm=True,
      dataloader_pin_memory=False,
      per_device_train_batch_size=works.MICRO_ROWS,
      gradient_accumulation_steps=rows // works.MICRO_ROWS,
      num_generations=works.GROUP,
      max_completion_length=works.NEW,
      generation_kwargs={'min_new_tokens': works.NEW},
      learning_rate=1e-4,
    ),
    train_dataset=datasets.Dataset.from_dict({'prompt': prompts}),
    processing_class=tokenizer,
  )
  return 1, 'steps', works.grpo(shape, tied=0), steps_of(trainer)


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


WORK = {'decode': decode_works, 'train': train_works, 'grpo': grpo_works}


if __name__ == '__main__':
  main()
