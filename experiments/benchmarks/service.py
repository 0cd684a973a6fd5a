"""The training service under Tinker's clients: learning, cost, several clients.

    python -m experiments.benchmarks.service start --workdir=DIR
    python -m experiments.benchmarks.service rise --workdir=DIR --python=PYTHON
    python -m experiments.benchmarks.service recipes --workdir=DIR \\
        --python=PYTHON
    python -m experiments.benchmarks.service cost --workdir=DIR
    python -m experiments.benchmarks.service clients --workdir=DIR

PYTHON is the interpreter of an environment with `tinker==0.38.0` and
`tinker-cookbook[math-rl]==0.5.8`; ours needs `posttrain[tinker]`. One JSON line
per result.

start    SFT of the preset `small` on sums, in the cookbook's prompt format, and
         its export: the base model of `rise` and `recipes`
rise     the cookbook's `math_rl.train env=arithmetic` by several clients, one
         after the other. The sums of a step are the same for all; each client
         has its own draws and initial adapter. The rise is the mean reward of
         the last steps over that of the first. With a learning rate of 0 it is
         the part of it that the sums themselves make
recipes  five recipes of the cookbook, ten steps each
cost     CPU seconds of a step of RL: of the service's process, and of a process
         whose loop is ours, the same samples and updates, bit by bit
clients  one client alone, one with 8 models alone, both at a time: updates per
         second, and the same bits
"""

import concurrent.futures
import contextlib
import itertools
import json
import multiprocessing
import os
import pathlib
import statistics
import subprocess
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.benchmarks import serve, sizes, timing

NAME = 'Qwen/Qwen3-8B-Base'  # of the model in requests
SHOT = 'User: What is 4 + 5?\n\nAssistant: 9\n\n'  # the cookbook's example
# Rows of `start`, the largest operand, the share of answers with a mistake.
ROWS, LARGEST, MISTAKES = 40_000, 100, 0.3
ENDS = 3  # steps at each end of a run whose rewards are compared
RANK, RATE = 32, 1e-4  # of adapters; the rank is the cookbook's default
# Of a step of `cost`, and of one of `clients`.
STEP, SMALL_STEP = sizes.STEPS['grpo'], sizes.Step(prompts=2, group=4)
MODELS = 8  # of the client with several
RECIPES = {
  'chat_sl.train': (
    'dataset={data}/conversations.jsonl',
    'batch_size=8',
    'max_length=256',
  ),
  'math_rl.train': ('env=arithmetic', 'groups_per_batch=8', 'max_tokens=56'),
  'preference.shorter.train': ('batch_size=4', 'group_size=4', 'max_tokens=32'),
  'multiplayer_rl.guess_number.train': (
    'batch_size=2',
    'group_size=2',
    'max_tokens=4',
    'eval_every=0',  # an evaluation has more episodes than ten steps
  ),
  'prompt_distillation.train': (
    'file_path={data}/conversations.jsonl',
    'batch_size=8',
    'max_length=256',
  ),
}
METRICS = 'env/all/reward/total', 'train_mean_nll', 'test/nll'
# A sequence and its logprobs, nats: i32[T], f32[T].
Sample = tuple[np.ndarray, np.ndarray]


def main() -> None:
  """Runs the command."""
  parser = timing.parser(
    __doc__, python='', repeats=5, steps=20, seeds=5, rate=1e-3, sft_steps=300
  )
  runs = {x.__name__: x for x in (start, rise, recipes, cost, clients)}
  parser.add_argument('bench', choices=runs)
  parser.add_argument('--workdir', required=True, type=pathlib.Path)
  args = parser.parse_args()
  args.workdir = args.workdir.absolute()
  args.workdir.mkdir(parents=True, exist_ok=True)
  os.environ |= {'TINKER_API_KEY': 'tml-any', 'TINKER_TELEMETRY': '0'}
  timing.set_threads(1)
  timing.emit_box()
  runs[args.bench](args)


def start(args) -> None:
  """Trains the base model."""
  from posttrain import api
  from posttrain import main as program
  from posttrain.envs import arithmetic

  data, rng = args.workdir / 'sums.jsonl', np.random.default_rng(0)
  with data.open('w') as file:
    for _ in range(ROWS):
      a, b = rng.integers(0, LARGEST + 1, 2).tolist()
      mistake = int(rng.integers(1, 4) * rng.choice([-1, 1]))
      mistake *= rng.random() < MISTAKES
      answer = arithmetic.demonstrate(a, '+', b, worked=True, mistake=mistake)
      prompt = f'{SHOT}User: What is {a} + {b}?\n\nAssistant:'
      row = {'prompt': prompt, 'completion': f' {answer}\n\nUser:'}
      file.write(json.dumps(row) + '\n')
  options = {
    'tokenizer.chat_template': 'raw',
    'sft.steps': args.sft_steps,
    'sft.batch.prompts_per_step': 64,
    'sft.batch.row_tokens': 256,
    'sft.optim.lr': 3e-3,
    'sft.eval.every': None,
    'sft.eval.max_tokens': 16,
  }
  run = program.load(
    f'sft:small,{data}', [(k, f'{x}') for k, x in options.items()]
  )
  program.train(run, str(args.workdir / 'sft'))
  api.export(str(args.workdir / 'sft'), str(args.workdir / serve.NAME))


@contextlib.contextmanager
def serving(
  folder: pathlib.Path, work: str, *words: str
) -> Iterator[serve.Server]:
  """Serves the model `folder/serve.NAME` in a process of its own."""
  own = f'--workdir={folder / work}', f'--served_name={NAME}'
  server = serve.Server(folder, '--train', *own, *words)
  try:
    yield server
  finally:
    server.stop()


def cook(
  args, server: serve.Server, module: str, log: str, *words: str
) -> list[dict]:
  """Runs a recipe of the cookbook; returns the rows of its metrics.jsonl."""
  name = args.workdir / NAME
  if not name.exists():  # where clients look for the tokenizer
    name.parent.mkdir(exist_ok=True)
    name.symlink_to(args.workdir / serve.NAME)
  folder = args.workdir / log
  env = {k: x for k, x in os.environ.items() if k != 'PYTHONPATH'}
  env |= {'TINKER_BASE_URL': f'{server.url}', 'HF_HUB_OFFLINE': '1'}
  own = f'model_name={NAME}', 'renderer_name=role_colon', f'log_path={folder}'
  command = [
    args.python,
    '-m',
    f'tinker_cookbook.recipes.{module}',
    *own,
    *words,
  ]
  with (args.workdir / 'clients.log').open('a') as file:
    subprocess.run(
      command, check=True, cwd=args.workdir, env=env, stdout=file, stderr=file
    )
  return [
    json.loads(x) for x in (folder / 'metrics.jsonl').read_text().splitlines()
  ]


def rise(args) -> None:
  """Measures what recipes of the cookbook learn."""
  from experiments.benchmarks import learning

  words = 'env=arithmetic', 'max_tokens=56', 'groups_per_batch=16'
  words += 'group_size=8', f'max_steps={args.steps}'
  with serving(
    args.workdir, 'rise', '--slots=128', '--max_model_len=136'
  ) as server:
    for rate in (args.rate, 0.0):
      rises = []
      for seed in range(args.seeds):
        begin, cpu = time.time(), server.cpu_seconds()
        rows = cook(
          args,
          server,
          'math_rl.train',
          f'rise_{rate:g}_{seed}',
          *words,
          f'learning_rate={rate}',
        )
        rows = [x for x in rows if 'env/all/correct' in x]
        series = [
          [x[f'env/all/{name}'] for x in rows]
          for name in ('reward/total', 'correct')
        ]
        ends = [
          (statistics.fmean(x[:ENDS]), statistics.fmean(x[-ENDS:]))
          for x in series
        ]
        rises.append([last - first for first, last in ends])
        timing.emit(
          bench='rise',
          learning_rate=rate,
          seed=seed,
          steps=len(rows),
          reward=[timing.rounded(x) for x in ends[0]],
          correct=[timing.rounded(x) for x in ends[1]],
          wall_s=timing.rounded(time.time() - begin),
          service_cpu_s=timing.rounded(server.cpu_seconds() - cpu),
        )
      intervals = [learning.interval(x) for x in zip(*rises, strict=True)]
      timing.emit(
        bench='rise',
        learning_rate=rate,
        seeds=args.seeds,
        reward_rise_and_half_width=[timing.rounded(x) for x in intervals[0]],
        correct_rise_and_half_width=[timing.rounded(x) for x in intervals[1]],
      )


def recipes(args) -> None:
  """Runs the recipes of the cookbook."""
  code = 'import tinker_cookbook as x; print(*x.__path__)'
  done = subprocess.run(
    [args.python, '-c', code], check=True, capture_output=True, text=True
  )
  data = pathlib.Path(done.stdout.strip()) / 'example_data'
  with serving(
    args.workdir, 'recipes', '--slots=16', '--max_model_len=1536'
  ) as server:
    for module, options in RECIPES.items():
      words = [x.format(data=data) for x in options]
      begin, cpu = time.time(), server.cpu_seconds()
      rows = cook(args, server, module, module, *words, 'max_steps=10')
      timing.emit(
        bench='recipes',
        recipe=module,
        options=options,
        steps=len({x['step'] for x in rows}),
        last={k: x for k, x in rows[-1].items() if k in METRICS},
        wall_s=timing.rounded(time.time() - begin),
        service_cpu_s=timing.rounded(server.cpu_seconds() - cpu),
      )


# --- our own clients ----------------------------------------------------------


def learn(
  number: int,
  size: sizes.Step,
  sample: Callable[[np.ndarray, Sequence[int]], Sequence[Sequence[Sample]]],
  update: Callable[[list[dict[str, np.ndarray]]], list[np.ndarray]],
) -> bytes:
  """Does a step of RL; returns the bytes of all that was computed.

  Args:
    number: of the step.
    size: of the step.
    sample: prompts i32[N, T], their seeds -> a group of completions each.
    update: sequences with target_tokens, logprobs and advantages -> arrays.
  """
  prompts = sizes.random_ids(256, size.prompts, size.prompt)
  seeds = [number * size.prompts + i for i in range(size.prompts)]
  groups = sample(prompts, seeds)
  data, results = [], []
  for prompt, group in zip(prompts, groups, strict=True):
    rewards = np.array([sizes.reward(ids.tobytes()) for ids, _ in group])
    for (ids, logprobs), credit in zip(
      group, rewards - rewards.mean(), strict=True
    ):
      whole = np.concatenate([prompt, ids]).astype(np.int32)
      before = np.zeros(size.prompt - 1, np.float32)
      own = np.full(len(ids), credit, np.float32)
      data.append(
        {
          'ids': whole[:-1],
          'target_tokens': whole[1:],
          'logprobs': np.concatenate([before, logprobs]),
          'advantages': np.concatenate([before, own]),
        }
      )
      results += [whole, logprobs]
  results += update(data)
  return b''.join(np.asarray(x).tobytes() for x in results)


class Remote:
  """A model of a service, through the SDK."""

  def __init__(self, service: Any, seed: int):
    model = service.create_lora_training_client(NAME, rank=RANK, seed=seed)
    self._model = model.result()

  def learn(self, number: int, size: sizes.Step) -> bytes:
    """Does a step, see `learn`."""
    from tinker import types

    def sample(prompts, seeds):
      sampler = self._model.save_weights_and_get_sampling_client().result()
      futures = [
        sampler.sample(
          types.ModelInput.from_ints(ids.tolist()),
          size.group,
          types.SamplingParams(max_tokens=size.new, seed=seed),
        )
        for ids, seed in zip(prompts, seeds, strict=True)
      ]
      return [
        [(x.tokens_np, x.logprobs_np) for x in future.result().sequences]
        for future in futures
      ]

    def update(data):
      gradient = self._model.forward_backward(
        [
          types.Datum(
            model_input=types.ModelInput.from_ints(x['ids'].tolist()),
            loss_fn_inputs={k: v.tolist() for k, v in x.items() if k != 'ids'},
          )
          for x in data
        ],
        'importance_sampling',
      )
      done = self._model.optim_step(types.AdamParams(learning_rate=RATE))
      logprobs = [
        x['logprobs'].to_numpy() for x in gradient.result().loss_fn_outputs
      ]
      return [*logprobs, _values(done.result().metrics)]

    return learn(number, size, sample, update)


def in_process(folder: pathlib.Path, size: sizes.Step) -> timing.Work:
  """Returns a step in a loop of ours, as `Remote` does it."""
  from posttrain import api, sharding
  from posttrain.decode import engines, requests
  from posttrain.serve import wire
  from posttrain.training import optim, trainer

  mine = api.trainer(
    str(folder),
    adapter=trainer.lora_options(RANK, head=True),
    seed=wire.seed(0) % 2**31,
  )
  options = engines.Options(
    size.prompts * size.group,
    size.length,
    8,
    prefill_rows=1,
    prefill_tokens=64,
    exact=True,
  )
  model = mine.base.model
  engine = engines.Engine(model, options, sharding.one_device())
  engine.take_free_slots()
  numbers = itertools.count()

  def sample(prompts, seeds):
    engine.set_params(mine.policy().params, 0)
    asked = [
      requests.Request(
        index * size.group + i,
        ids,
        size.new,
        mine.base.stop_ids,
        requests.Sampling(1.0),
        key=wire.seed(seed, i),
      )
      for index, (ids, seed) in enumerate(zip(prompts, seeds, strict=True))
      for i in range(size.group)
    ]
    done = [(x.ids, x.logprobs) for x in engine.generate(asked)]
    return [done[i : i + size.group] for i in range(0, len(done), size.group)]

  def update(data):
    logprobs, _ = mine.forward_backward(
      [
        trainer.Datum(
          x['ids'],
          x['target_tokens'],
          logprobs=x['logprobs'],
          advantages=x['advantages'],
        )
        for x in data
      ],
      'importance_sampling',
    )
    metrics = mine.optim_step(optim.Adam(learning_rate=RATE))
    return [*logprobs, _values(metrics)]

  def work():
    crc = zlib.crc32(learn(next(numbers), size, sample, update))
    return lambda: {'crc': crc}

  return work


def _values(metrics: Mapping[str, float]) -> np.ndarray:
  return np.array([metrics[name] for name in sorted(metrics)])


def write_model(folder: pathlib.Path) -> None:
  """Writes random weights of shape S, on bytes, as a HuggingFace directory."""
  import jax

  from experiments.benchmarks import works
  from posttrain import schema
  from posttrain.chat import rendering
  from posttrain.models import hf, transformer

  cfg = works.model(sizes.SHAPES['S'])
  params = transformer.init(jax.random.key(0), cfg)
  hf.save(params, cfg, str(folder), dtype='float32')
  rendering.write(rendering.load(schema.Tokenizer()), str(folder))


def shape_s(args) -> pathlib.Path:
  """Returns the folder whose `serve.NAME` is a model of shape S."""
  folder = args.workdir / 'S'
  if not folder.exists():  # jax stays out of this process, which forks
    context = multiprocessing.get_context('fork')
    process = context.Process(target=write_model, args=[folder / serve.NAME])
    process.start()
    process.join()
  return folder


def cost(args) -> None:
  """Compares CPU seconds of the service and of a loop of ours."""
  folder = shape_s(args)
  local = timing.apart(lambda: in_process(folder / serve.NAME, STEP))
  slots, length = STEP.prompts * STEP.group, STEP.length
  with serving(
    folder, 'cost', f'--slots={slots}', f'--max_model_len={length}'
  ) as server:
    import tinker

    model = Remote(tinker.ServiceClient(base_url=f'{server.url}'), 0)
    numbers = itertools.count()

    def remote():
      begin = server.cpu_seconds()
      crc = zlib.crc32(model.learn(next(numbers), STEP))
      cpu = server.cpu_seconds() - begin
      return lambda: {'cpu': cpu, 'crc': crc}

    clocks = {
      'service': timing.Clock(remote),
      'in_process': timing.Clock(local),
    }
    for clock in clocks.values():
      clock.run()  # compiles
    timing.alternate(clocks, args.repeats)
  for name, clock in clocks.items():
    timing.emit(
      bench='cost',
      impl=name,
      shape='S',
      cpu_seconds=timing.rounded(clock.median('cpu')),
      each=[timing.rounded(x) for x in clock.cpu],
      wall=timing.rounded(clock.median('wall')),
    )
  both = clocks.values()
  service, ours = (x.median('cpu') for x in both)
  timing.emit(
    bench='cost',
    ratio=timing.rounded(service / ours),
    same_bits=len({tuple(y['crc'] for y in x.rows) for x in both}) == 1,
  )


def clients(args) -> None:
  """Measures one client, one with several models, and both."""
  folder = shape_s(args)
  size = SMALL_STEP
  slots = size.prompts * size.group
  updates = args.steps // MODELS * MODELS  # of each client

  def drive(server, models: int) -> tuple[int, float, float]:
    """Returns (checksum of all numbers, begin and end of its steps)."""
    import tinker

    service = tinker.ServiceClient(base_url=f'{server.url}')
    own = [Remote(service, seed) for seed in range(models)]

    def steps(model):
      return [model.learn(i, size) for i in range(updates // models)]

    begin = time.time()
    with concurrent.futures.ThreadPoolExecutor(models) as pool:
      crc = zlib.crc32(b''.join(itertools.chain(*pool.map(steps, own))))
    end = time.time()
    service.close('success').result()
    return crc, begin, end

  with serving(
    folder, 'clients', f'--slots={slots}', f'--max_model_len={size.length}'
  ) as server:
    kinds = {'one': (1,), 'eight': (MODELS,), 'both': (1, MODELS)}
    rows = {name: [] for name in kinds}
    drive(server, 1)  # compiles
    for _ in range(args.repeats):
      for name, models in kinds.items():
        cpu = server.cpu_seconds()
        with concurrent.futures.ThreadPoolExecutor(len(models)) as pool:
          done = [*pool.map(lambda x: drive(server, x), models)]
        crcs, begins, ends = zip(*done, strict=True)
        rows[name].append(
          {
            'crcs': crcs,
            'rate': updates * len(models) / (max(ends) - min(begins)),
            'cpu': (server.cpu_seconds() - cpu) / updates / len(models),
          }
        )
  for name, own in rows.items():
    timing.emit(
      bench='clients',
      clients=name,
      updates_per_s=timing.rounded(statistics.median(x['rate'] for x in own)),
      cpu_s_per_update=timing.rounded(statistics.median(x['cpu'] for x in own)),
    )
  one, eight, both = ({x['crcs'] for x in own} for own in rows.values())
  timing.emit(
    bench='clients',
    same_bits=len(both) == 1 and both == {(*x, *y) for x in one for y in eight},
    tokens_of_an_update=slots * size.length,
  )


if __name__ == '__main__':
  main()
