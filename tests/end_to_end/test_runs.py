"""Runs of more than one stage or environment, and that every key is read."""

import collections
import dataclasses
import json
import sys
import types
import typing

import pytest

from configs import machinery
from posttrain import config, main, schema, sharding
from posttrain.config import checks
from posttrain.envs import registry
from posttrain.metrics import statistics, writers
from posttrain.models import rope, transformer
from posttrain.pipeline import pair_data
from posttrain.pipeline import tokens as token_pipeline
from posttrain.rollout import calls, endpoints, env_calls, grading, remote
from posttrain.stage import job
from posttrain.training import objectives
from posttrain.util import preemption
from tests import fixtures, toys
from tests.rollout import test_pairing
from tests.training import test_objectives

ROWS = [
  {'prompt': 'Say yes.', 'completion': 'yes'},
  {
    'messages': [
      {'role': 'system', 'content': 'Be brief.'},
      {'role': 'user', 'content': 'Say no.'},
      {'role': 'assistant', 'content': 'no'},
    ]
  },
]


def _arithmetic(ops=('+',), **options):
  env = schema.Arithmetic(ops=ops, train_tasks=50, eval_tasks=4)
  return schema.EnvEntry(env=env, **options)


def _stage(envs, **options):
  return schema.Stage(
    envs=envs,
    batch=schema.Batch(
      prompts_per_step=4, row_tokens=64, micro_batch_tokens=128
    ),
    eval=schema.Eval(every=2, prompts=4, samples=2, max_tokens=8),
    rollout=schema.Rollout(slots=8, prefill_rows=4),
    **options,
  )


def _write(path, rows):
  path.write_text('\n'.join(map(json.dumps, rows)))
  return str(path)


def _rows(workdir):
  rows = writers.read(str(workdir / 'metrics.jsonl'))
  return [
    {k: v for k, v in row.items() if not k.startswith(('time/', 'memory/'))}
    for row in rows
  ]


@pytest.fixture(scope='module')
def mixed(tmp_path_factory):
  """(run, rows): two environments in each of two stages, undisturbed."""
  folder = tmp_path_factory.mktemp('mixed')
  path = _write(folder / 'rows.jsonl', ROWS)
  rows = schema.Rows(path=path, eval_path=path)
  envs = {'sums': _arithmetic(), 'chat': schema.EnvEntry(env=rows, ratio=3.0)}
  run = toys.run(
    {
      'warm': _stage(envs, steps=2),
      'main': _stage(envs, steps=4, init='stage:warm'),
    }
  )
  main.train(run, str(folder / 'run'))
  return run, _rows(folder / 'run')


def test_environments_mix_in_one_batch(mixed):
  run, rows = mixed
  envs, seen = run.stages['main'].envs, set()
  for row in rows:
    here = {name for name in envs if f'nll/{name}' in row}
    assert here == {name for name in envs if row.get(f'tokens/ce/{name}')}
    shares = sum(row[f'loss/ce/{name}'] for name in here)
    assert shares == pytest.approx(row.get('loss/ce', 0), rel=1e-5)
    # Nothing of components that have no member.
    assert not any(key.startswith(('tokens/r', 'loss/r')) for key in row)
    seen |= here
  assert seen == set(envs)
  assert 'eval/pass_rate/sums' in row
  # Rows are not graded: there is no rate, which is not a rate of zero.
  assert 'eval/pass_rate/chat' not in row and 'eval/length/chat' in row


def _job(**attributes):
  """A stand-in for a job that has nothing but a pipeline."""
  return types.SimpleNamespace(
    sampling=types.SimpleNamespace(pipeline=Pipeline()),
    logbook=types.SimpleNamespace(write_errors=lambda *_: None),
    prefetched=None,
    **attributes,
  )


class Pipeline:
  """Counts what is taken of it."""

  can_prefetch, taken, error = True, 0, None

  def get_state(self):
    return self.taken

  def set_state(self, state):
    self.taken = state

  def __next__(self):
    self.taken += 1
    if self.error:
      raise self.error


@pytest.mark.parametrize('can_prefetch', [True, False])
def test_the_next_batch_is_prefetched_unless_it_needs_a_model(can_prefetch):
  this = _job(steps=3)
  pipeline = this.sampling.pipeline
  pipeline.can_prefetch = can_prefetch
  for step in (2, 3):  # the last step
    job.Job.prefetch(this, step)
    assert pipeline.taken == can_prefetch


def test_an_error_while_prefetching_is_raised_when_the_batch_is_due():
  this = _job(steps=3)
  this.sampling.pipeline.error = ValueError('row 7')
  job.Job.prefetch(this, 2)
  assert this.prefetched is None and this.sampling.pipeline.taken == 0
  with pytest.raises(ValueError, match='row 7'):
    job.Job.next_item(this, 3, None, None)


@pytest.mark.parametrize(
  'error',
  [
    endpoints.EndpointError('away'),
    statistics.TooManyErrors('x', ('a',)),
    calls.TooManyThreads('x'),
    env_calls.EnvError('x'),
  ],
)
@pytest.mark.parametrize('requested', [False, True])
def test_failures_from_outside_cost_no_step(error, requested):
  """The step before is saved, with the pipeline as it was before it."""
  saved, written = [], []

  this = _job(
    name='main',
    step=2,
    saves_at=lambda step: step == 4,
    save=lambda *args: saved.append(args),
  )
  this.sampling.pipeline.error = error
  this.logbook.write_errors = lambda *args: written.append(args)
  stop = preemption.Signal()
  if requested:
    stop.request()
  # A server that is closed by the request has not failed.
  ended = requested and isinstance(error, endpoints.EndpointError)
  for step in (3, 5, 6):  # the start's, one that is saved already, another
    assert saved == []
    with pytest.raises(preemption.Preempted if ended else type(error)):
      job.Job.next_item(this, step, 'state', stop)
  assert saved == [(5, 'state', 2)]
  steps = [(step, ('a',)) for step in (3, 5, 6)]
  assert written == (steps if hasattr(error, 'errors') else [])


def test_the_ratio_decides_how_often_an_environment_comes():
  envs = {'a': _arithmetic(), 'b': _arithmetic(ratio=3.0)}
  data = token_pipeline.TokenData(
    _stage(envs), registry.make_all(envs), fixtures.RENDERER, seed=0
  )
  pipeline = token_pipeline.TokenPipeline(data)
  counts = collections.Counter()
  for _ in range(100):
    batch = next(pipeline).batch
    starts = (batch.positions == 0) & (batch.segment_ids > 0)
    counts.update(batch.env_ids[starts].tolist())
  assert sum(counts.values()) == 400
  assert 0.19 < counts[0] / 400 < 0.31  # 0.25, and 0.0217 is one sigma


def test_two_stages_in_order_and_resumed_in_the_second(mixed, tmp_path):
  run, rows = mixed
  steps = [(row['stage'], row['step']) for row in rows]
  assert steps == [('warm', i) for i in range(3)] + [
    ('main', i) for i in range(5)
  ]

  with pytest.MonkeyPatch.context() as patch:
    toys.stop_at(patch, 2, 'main')
    with pytest.raises(preemption.Preempted, match='stage main, step 2'):
      main.train(run, str(tmp_path / 'cut'))
  main.train(run, str(tmp_path / 'cut'))
  assert _rows(tmp_path / 'cut') == rows


@pytest.mark.gate
@pytest.mark.slow
def test_every_key_is_read(tmp_path, monkeypatch):
  """A recording config: what nothing reads must not be declared."""
  long = {'prompt': 'Say it.', 'completion': 'a' * 100}
  path = _write(tmp_path / 'rows.jsonl', (*ROWS, long))
  problem = {'question': 'Two?', 'answer': 'So.\n#### 2'}
  problems = _write(tmp_path / 'problems.jsonl', [problem])
  classes = [*filter(dataclasses.is_dataclass, vars(schema).values())]
  read = collections.defaultdict(set)
  for kind in classes:
    monkeypatch.setattr(kind, '__getattribute__', _recorder(kind, read))
  rows = schema.Rows(path=path, eval_path=path)
  cut = schema.Dataset(too_long='truncate')
  envs = {
    'chat': schema.EnvEntry(env=rows, sampler=cut),
    'sums': _arithmetic(ops=('+', 'x')),
    'words': schema.EnvEntry(
      env=schema.Gsm8k(path=problems, eval_path=problems, instruction='Box it.')
    ),
    'play': _arithmetic(
      algorithm=schema.Grpo(kl_beta=0.1),
      group_size=2,
      sampler=schema.Policy(max_tokens=8),
    ),
  }
  stage = _stage(envs, steps=2, optim=schema.Optim(average=0.9))
  play = dataclasses.replace(
    envs['play'], curriculum=schema.Curriculum(), replay=schema.Replay()
  )
  pairs = [
    {'prompt': f'q{i}', 'chosen': 'yes', 'rejected': 'no'} for i in range(9)
  ]
  preferred = _write(tmp_path / 'pairs.jsonl', pairs)
  on_pairs = dataclasses.replace(
    stage,
    kind='preference',
    init='stage:warm',
    envs={},
    pairs=schema.PairFile(path=preferred, eval_fraction=0.3),
  )
  run = toys.run(
    {
      'warm': dataclasses.replace(stage, envs={**envs, 'play': play}),
      'main': dataclasses.replace(
        stage,
        init='stage:warm',
        envs={
          **envs,
          'play': dataclasses.replace(envs['play'], algorithm=schema.Ppo()),
        },
        critic=schema.Critic(kind='head', warmup_steps=1),
        loss=schema.Loss(rl=schema.Clip()),
        lora=schema.Lora(rank=2),
        rollout=dataclasses.replace(
          stage.rollout, max_lag=1, in_flight=True, keep_cache=True
        ),
        eval=dataclasses.replace(
          stage.eval,
          prompts=3,
          best='eval/reward/sums',
          best_prompts=1,
          patience=9,
        ),
      ),
    }
  )
  model = dataclasses.replace(
    run.model,
    local_layers=(0,),
    window=4,
    local_rope_theta=100.0,
    rope_scaling=schema.RopeScaling('llama3', 2.0),
  )
  exporting = schema.Metrics(progress=False, export_tokens=2)
  node = machinery.config_dict(
    dataclasses.replace(run, model=model, metrics=exporting)
  )
  run = config.build(node)
  checks.check(run)
  main.train(
    dataclasses.replace(run, compilation_cache=str(tmp_path / 'cache')),
    str(tmp_path / 'run'),
  )
  _ask_the_rest(path, str(tmp_path / 'sql'))
  answers = [test_pairing.RIGHT, test_pairing.WRONG]
  made, _, _ = test_pairing.make(answers, prompts=6)
  test_pairing.make(answers, split='eval', eval_prompts=2)
  from_answers = dataclasses.replace(
    on_pairs,
    pairs=schema.MadePairs(eval_fraction=0.2),
    envs={'sums': _arithmetic()},
  )
  data = pair_data.PairData(from_answers, {}, fixtures.RENDERER, 0)
  pair_data.PairPipeline(data, data.split(made))
  objectives.TYPES['ranking'](run.model, (), schema.Loss())
  for kind in typing.get_args(schema.PreferenceLoss):
    loss = schema.Loss(preference=kind())
    objectives.TYPES['preference'](run.model, (), loss)
    data = pair_data.PairData(
      dataclasses.replace(on_pairs, loss=loss), {}, fixtures.RENDERER, 0
    )
    assert len(data.references) == (kind is not schema.SimPo)
  # Losses that no stage of it has; one type's reading of a shared option is
  # that of all.
  test_objectives.test_every_type_reads_its_options(monkeypatch)
  types_of_rl = typing.get_args(schema.RlLoss)
  shared = set().union(*(read[kind] for kind in types_of_rl))
  for kind in types_of_rl:
    read[kind] |= shared & set(kind.__mro__[1].__annotations__)
  # Devices of a sampler, which are not here.
  with pytest.raises(ValueError, match='config.mesh.sampler'):
    sharding.make_meshes(schema.Mesh(sampler=schema.SamplerMesh()), 1)
  # Workers in Ray, none of which starts here.
  remote.Remote(stage.rollout, {}, start=lambda make, calls: None)
  unread = {
    f'{kind.__name__}.{field.name}'
    for kind in classes
    for field in dataclasses.fields(kind)
    # `config.build` itself reads the tag that tells node types apart.
    if field.name not in read[kind] | {'type'}
  }
  assert not unread


def _ask_the_rest(path, folder):
  """What no environment of the run has, and other environments."""
  from posttrain.envs.sql import __main__ as exporter
  from tests.algorithms import test_table, two_turns
  from tests.envs.adapters import every_option
  from tests.rollout.endpoint import servers

  every_option.read_options()
  model, factors = fixtures.MODEL, (2.0,) * (fixtures.MODEL.head_dim // 2)
  for kind in ('llama3', 'yarn', 'longrope'):
    scaling = schema.RopeScaling(
      kind, 2.0, short_factors=factors, long_factors=factors
    )
    for length in (1, 10**6):
      rope.frequencies(
        dataclasses.replace(model, rope_scaling=scaling, rope_length=length),
        False,
      )
  transformer.shapes(
    dataclasses.replace(model, experts=schema.Experts(count=2))
  )
  exporter.export(exporter.Flags(folder, databases=2))
  files = schema.SqlFiles(
    questions=f'{folder}/questions.json', databases=f'{folder}/database'
  )
  for data in (schema.SqlSynth(), files):
    env = registry.make('a', schema.Sql(data=data))
    task = next(env.source('train', 0))
    env.source('eval', 0)
    episode = env.make(task)
    for turn in ('DESCRIBE x', f'ANSWER {task.answer}'):
      episode.step(turn, False)
    episode.close()
  custom = schema.CustomEnv(import_path='tests.envs.echoes:Echo')
  rows = schema.Rows(path=path, eval_fraction=0.5)
  words = schema.Wordle(train_tasks=9, eval_tasks=9)
  others = (
    schema.ReverseText(),
    schema.AlphabetSort(),
    schema.Countdown(),
    words,
  )
  for cfg in (*others, custom, rows):
    env = registry.make('a', cfg)
    for split in ('train', 'eval'):
      episode = env.make(next(env.source(split, 0)))
      episode.step('', False)
      episode.grade()
  priced = (
    schema.Grpo(length_penalty=penalty)
    for penalty in (schema.Efficiency(), schema.Linear(), schema.Overlong())
  )
  filtered = schema.Echo(
    filter=schema.EchoFilter(f'{test_table.CREDITS}:all_but', {'ids': [6]})
  )
  rows = (row.cfg for row in test_table.ROWS.values())
  for cfg in (*rows, *priced, filtered):
    made = toys.environment(test_table.entry(cfg), 64)
    two_turns.finalize(
      made.algorithm, [two_turns.group(1.0, 0.0)], two_turns.Scorer()
    )
  frozen = schema.EnvEntry(sampler=schema.Frozen(model='init'))
  made = toys.environment(frozen, 64, 'a')
  made.sampler.spec(two_turns.TASK, 0)
  made.check()
  assert made.references == {'init': 'envs.a.sampler.model'}
  fn = 'tests.rollout.judged:slow'
  tried = schema.EnvEntry(
    algorithm=schema.Grpo(),
    group_size=2,
    sampler=schema.Policy(max_tokens=8),
    rewards={'f': schema.RewardFn(fn)},
  )
  toys.environment(tried, 64, 'a').check()
  rewards = {'x': schema.RewardFn('tests.rollout.judged:slow', judge='init')}
  rewards['y'] = schema.RewardFn(model='stage:rm')
  result = grading.Result([1.0])
  made = grading.Rewards(
    'a',
    rewards,
    judge=lambda name: None,
    reward_model=lambda name: lambda rollouts: result,
  )
  made(two_turns.group(1.0))
  isolated = schema.RewardFn('tests.rollout.judged:slow', isolate=True)
  grading.Rewards('a', {'z': isolated})  # starts no process yet
  endpoint = servers.connect(servers.Server())
  endpoint.check(fixtures.RENDERER)
  endpoint.close()


def _recorder(kind, read):
  """Notes who reads a field, unless that is the config's own machinery."""
  ours = ('posttrain.schema', 'posttrain.config', 'posttrain.stage.plan')
  ours += ('configs', 'dataclasses', 'copy', 'tests', 'test_')

  def get(self, name):
    reader = sys._getframe(1).f_globals.get('__name__', '')
    if not reader.startswith(ours):
      fields = (field.name for field in dataclasses.fields(kind))
      read[kind].update(fields if name == '__dict__' else [name])
    return object.__getattribute__(self, name)

  return get
