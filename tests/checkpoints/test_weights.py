"""Weights by path: HuggingFace directories, runs with LoRA, PEFT adapters."""

import dataclasses
import json
import math
import re
import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

from posttrain import evaluate, export, generate, main, schema, tree
from posttrain.chat import rendering
from posttrain.checkpoints import store, weights
from posttrain.metrics import writers
from posttrain.models import hf, hf_config, lora, peft, transformer
from posttrain.stage import build, preflight
from posttrain.util import preemption
from tests import fixtures, toys

MODEL = dataclasses.replace(fixtures.MODEL, layers=2, qk_norm=True)
LORA = schema.Lora(rank=3, alpha=6.0, targets='attention/[qo]/|mlp/up')
IDS = '1,2,3,4'
SUITE = ('What is 1 + 2?', 'Say hello, and nothing else.')


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A HuggingFace directory of random weights, with a tokenizer."""
  path = tmp_path_factory.mktemp('published') / 'model'
  params = fixtures.params(MODEL, 3)
  hf.save(params, MODEL, path, dtype='float32')
  rendering.write(fixtures.RENDERER, path)
  return path


def stage(init, **options):
  entry = schema.EnvEntry(
    env=schema.Arithmetic(train_tasks=50, eval_tasks=4),
    **options.pop('entry', {}),
  )
  return schema.Stage(
    init=init,
    steps=3,
    envs={'sums': entry},
    batch=schema.Batch(
      prompts_per_step=4, row_tokens=64, micro_batch_tokens=128
    ),
    optim=schema.Optim(lr=3e-2, schedule='constant', weight_decay=0.0),
    eval=schema.Eval(prompts=4, samples=2, max_tokens=12, suite=SUITE),
    rollout=schema.Rollout(slots=8, prefill_rows=4),
    **options,
  )


def options(folder):
  grpo = {
    'algorithm': schema.Grpo(kl_beta=0.1, prune_zero_advantage=False),
    'sampler': schema.Policy(max_tokens=12),
    'group_size': 2,
  }
  return schema.Run(
    model=hf_config.read(folder),
    tokenizer=schema.Tokenizer(path=str(folder)),
    compilation_cache=None,
    metrics=schema.Metrics(progress=False),
    checkpoint=schema.Checkpoint(every=2),
    stages={
      'sft': stage(str(folder), lora=LORA),
      'grpo': stage('stage:sft', lora=LORA, entry=grpo),
    },
  )


def rows(workdir):
  return [
    {k: v for k, v in row.items() if not k.startswith(('time/', 'memory/'))}
    for row in writers.read(str(workdir / 'metrics.jsonl'))
  ]


@pytest.fixture(scope='module')
def workdir(folder, tmp_path_factory):
  path = tmp_path_factory.mktemp('run')
  main.train(options(folder), str(path))
  return path


def ask(path, capsys, *argv):
  argv = [f'--checkpoint={path}', '--json', '--max_tokens=6', *argv]
  assert generate.main(argv) == 0, capsys.readouterr().err
  return json.loads(capsys.readouterr().out.splitlines()[-1])


def weights_at(path):
  like = transformer.shapes(MODEL)
  return weights.load(weights.find(str(path)), like)


def close(a, b, atol=1e-6):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol), a, b)


def test_a_checkpoint_of_a_lora_stage_holds_only_the_adapter(folder, workdir):
  host = store.read_host(str(workdir / 'checkpoints/sft'))
  assert host['start'] == str(folder.resolve())
  adapter, stored = weights.adapter(str(workdir / 'checkpoints/sft/3'))
  assert stored == LORA
  assert {path.rsplit('/', 2)[0] for path in tree.flat(adapter)} == {
    'layers/attention/q',
    'layers/attention/o',
    'layers/mlp/up',
  }
  # Weights and moments; the size of Orbax's files varies.
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
    step = reader.metadata(workdir / 'checkpoints/sft/3/state')
  saved = tree.flat(step.item_metadata.tree)
  size = sum(math.prod(x.shape) for x in saved.values())
  assert size < transformer.num_params(MODEL) / 2
  expected = lora.merge(
    lora.Base(hf.load(folder, MODEL), lora.scale(LORA)).attach(adapter)
  )
  close(weights_at(workdir / 'checkpoints/sft'), expected)


def test_the_next_stage_starts_from_the_merged_weights(workdir):
  before, after = (
    (workdir / f'rollouts/{name}.jsonl').read_text().splitlines()
    for name in ('sft_eval_000003', 'grpo_eval_000000')
  )
  assert before == after and len(before) == 4
  host = store.read_host(str(workdir))
  assert (host['stage'], host['start']) == ('grpo', 'checkpoints/sft/3')
  after, before = (
    weights_at(workdir / f'checkpoints/{x}') for x in ('grpo', 'sft')
  )
  adapted = tree.flat(
    jax.tree.map(lambda a, b: abs(a - b).max(), after, before)
  )
  assert adapted['layers/attention/q/kernel'] > 1e-4
  assert adapted['layers/attention/v/kernel'] == 0 == adapted['embed/table']


def test_lora_logprobs_agree_and_kl_starts_at_zero(workdir):
  steps = [row for row in rows(workdir) if 'mismatch/abs_mean' in row]
  assert len(steps) == 3
  assert all(row['mismatch/abs_mean'] < 1e-5 for row in steps)
  first, *others = [abs(row['ref_kl/kl']) for row in steps]
  assert first < 1e-7 < min(others)


def test_the_init_reference_shares_the_base_weights(folder, tmp_path):
  cfg = options(folder)
  grpo = dataclasses.replace(cfg.stages['grpo'], init=str(folder))
  (tmp_path / 'rollouts').mkdir()
  stage = preflight.make(
    preflight.resolve(dataclasses.replace(cfg, stages={'a': grpo})), 'a'
  )
  made = build.make(stage, str(tmp_path), 0, preemption.Signal())
  base = made.learner.base.params
  for other in (
    made.sampling.scorers.model('init').params,
    lora.whole(made.learner.state.params, made.learner.base),
  ):
    assert other['embed']['table'] is base['embed']['table']
  made.close()


def evaluated(capsys, *argv):
  """Returns the JSON object after the printed lines."""
  assert evaluate.main(argv) == 0
  return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_evaluate_repeats_the_last_evaluation_of_the_run(
  workdir, tmp_path, capsys
):
  answers = tmp_path / 'answers.jsonl'
  values = evaluated(capsys, f'--checkpoint={workdir}', f'--answers={answers}')
  suite, last = values.pop('suite'), rows(workdir)[-1]
  assert values == {k: v for k, v in last.items() if k.startswith('eval/')}
  written = (workdir / 'rollouts/grpo_eval_000003.jsonl').read_text()
  assert answers.read_text() == written
  saved = str(workdir / 'rollouts/grpo_suite_000003.jsonl')
  assert suite == writers.read(saved)


def test_against_must_name_the_same_model(workdir, tmp_path, capsys):
  other = dataclasses.replace(MODEL, layers=1)
  hf.save(fixtures.params(other), other, tmp_path / 'hf')
  rendering.write(fixtures.RENDERER, tmp_path / 'hf')
  argv = [f'--checkpoint={workdir}', f'--against={tmp_path / "hf"}']
  assert evaluate.main(argv) == 2
  assert 'layers is 1' in capsys.readouterr().err


@pytest.mark.slow
def test_an_interrupted_lora_run_resumes_bitwise(
  folder, workdir, tmp_path, monkeypatch
):
  with monkeypatch.context() as patch:
    toys.stop_at(patch, 2, 'grpo')
    with pytest.raises(preemption.Preempted, match='stage grpo, step 2'):
      main.train(options(folder), str(tmp_path))
  main.train(options(folder), str(tmp_path))
  assert rows(tmp_path) == rows(workdir)
  jax.tree.map(
    np.testing.assert_array_equal, weights_at(tmp_path), weights_at(workdir)
  )


def test_exported_directories_answer_as_the_checkpoint(
  folder, workdir, tmp_path, capsys
):
  """Merged, and as an adapter of the stage's start."""
  step = workdir / 'checkpoints/sft'
  expected = ask(step, capsys, '--prompt=What is 1 + 2?')
  for name, flags in (('hf', []), ('peft', ['--format=peft'])):
    argv = [f'--checkpoint={step}', f'--folder={tmp_path / name}', *flags]
    assert export.main(argv) == 0
    answer = ask(tmp_path / name, capsys, '--prompt=What is 1 + 2?')
    assert answer['ids'] == expected['ids']
    np.testing.assert_allclose(
      answer['logprobs'], expected['logprobs'], atol=1e-5
    )
    close(weights_at(tmp_path / name), weights_at(step))
    card = (tmp_path / name / 'README.md').read_text()
    assert f'base_model: {folder.name}\n' in card
  assert export.main(argv) == 2
  assert f'{tmp_path / "peft"} must ' in capsys.readouterr().err
  # A PEFT adapter is merged on export as well.
  argv = [f'--checkpoint={tmp_path / "peft"}', f'--folder={tmp_path / "again"}']
  assert export.main(argv) == 0
  close(weights_at(tmp_path / 'again'), weights_at(step))


def test_exporting_an_adapter_of_a_later_stage_needs_like(
  folder, workdir, tmp_path, capsys
):
  out, base = tmp_path / 'adapter', tmp_path / 'base'
  argv = [f'--checkpoint={workdir}', f'--folder={out}', '--format=peft']
  for more, message in (
    ([], '--like must name the base'),
    ([f'--like={folder}'], 'differs'),  # the base of another stage
  ):
    assert export.main([*argv, *more]) == 2
    assert message in capsys.readouterr().err and not out.exists()
  before = [f'--checkpoint={workdir}/checkpoints/sft', f'--folder={base}']
  assert export.main(before) == 0
  assert export.main([*argv, f'--like={base}']) == 0
  close(weights_at(out), weights_at(workdir))


def test_an_adapter_is_refused_if_its_base_weights_changed(
  folder, workdir, tmp_path, monkeypatch
):
  """A LoRA step whose base directory is overwritten, then deleted."""
  base, step = tmp_path / 'base', str(workdir / 'checkpoints/sft/3')
  params = hf.load(folder, MODEL)
  params['layers']['mlp']['up']['kernel'] *= 1.01
  hf.save(params, MODEL, base, dtype='float32')
  read = store.read_host
  theirs = weights.read(step).renderer()
  assert read(step)['base']['sums'].keys() == tree.flat(params).keys()
  monkeypatch.setattr(
    store, 'read_host', lambda path: {**read(path), 'start': str(base)}
  )
  with pytest.raises(ValueError, match='mlp/up/kernel has changed since'):
    weights_at(step)
  shutil.rmtree(base)
  with pytest.raises(ValueError, match='base must hold the weights that'):
    weights.check(step, MODEL, theirs)


def test_an_adapter_on_an_adapter_loads_as_it_was_trained(folder, tmp_path):
  """A bfloat16 run on float32 files rounds the weights that it begins with."""
  narrow, start = dataclasses.replace(MODEL, dtype='bfloat16'), str(folder)
  shapes, rng = transformer.shapes(MODEL), np.random.default_rng(0)
  half = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, 'bfloat16'), shapes
  )
  adapter = jax.tree.map(
    lambda x: np.float32(rng.standard_normal(x.shape) / 99),
    lora.shapes(LORA, shapes),
  )
  for name in ('a', 'b'):
    base = weights.load(weights.find(start), half)
    stage = {'lora': dataclasses.asdict(LORA), 'optim': {}, 'eval': {}}
    host = {
      'stage': name,
      'config': {name: stage},
      'model': dataclasses.asdict(narrow),
      'start': start,
      'base': weights.base_sums(base),
    }
    start = str(tmp_path / 'checkpoints' / name)
    saver = store.Checkpointer(start, schema.Checkpoint())
    saver.save(1, {'params': adapter}, host)
    saver.close()
  stored = weights.load_start(weights.find(start), shapes)
  assert jax.tree.leaves(stored)[0].dtype == 'float32'
  jax.tree.map(np.testing.assert_array_equal, stored, base)
  weights.load(weights.find(start), shapes)  # checks the sums of its base


def test_a_directory_without_a_tokenizer_takes_prompt_ids(
  folder, tmp_path, capsys
):
  bare = shutil.copytree(folder, tmp_path / 'bare')
  for file in ('tokenizer.json', 'tokenizer_config.json'):
    (bare / file).unlink()
  answer = ask(bare, capsys, f'--prompt_ids={IDS}')
  expected = ask(folder, capsys, f'--prompt_ids={IDS}')
  assert answer['ids'] == expected['ids']
  assert generate.main([f'--checkpoint={bare}', '--prompt=hi']) == 2
  assert f'text: got {str(bare)!r}' in capsys.readouterr().err


def check(run):
  preflight.check(preflight.resolve(run))


def test_preflight_refuses_another_model_or_tokenizer(folder, tmp_path):
  content = json.loads((folder / 'tokenizer.json').read_text())
  content['added_tokens'][0]['content'] = '<|padding|>'
  other = tmp_path / 'tokenizer.json'
  other.write_text(json.dumps(content))
  cfg = options(folder)
  # The same tokens under another name.
  check(dataclasses.replace(cfg, tokenizer=schema.Tokenizer()))
  tokenizer = schema.Tokenizer(path=str(other), eos='<|end|>')
  model = dataclasses.replace(MODEL, rope_theta=5e5)
  for change, message in (
    ({'model': model}, 'its rope_theta is 10000.0'),
    ({'tokenizer': tokenizer}, 'of the run, config.tokenizer.path: '),
  ):
    with pytest.raises(ValueError, match=f'^config.sft.init must .*{message}'):
      check(dataclasses.replace(cfg, **change))


def tensors(path):
  return safetensors.numpy.load_file(path / peft.WEIGHTS)


def edited(folder, tmp_path, change, file='model.safetensors'):
  """Returns a copy of a directory, with its tensors changed."""
  path = shutil.copytree(folder, tmp_path / folder.name)
  tensors = safetensors.numpy.load_file(path / file)
  change(tensors)
  safetensors.numpy.save_file(tensors, path / file)
  return path


@pytest.fixture(scope='module')
def published(workdir, tmp_path_factory):
  path = tmp_path_factory.mktemp('adapter') / 'ours'
  step = workdir / 'checkpoints/sft'
  argv = [f'--checkpoint={step}', f'--folder={path}', '--format=peft']
  assert export.main(argv) == 0
  return path


def configured(published, tmp_path, **change):
  """Returns a copy of an adapter with another config."""
  path = shutil.copytree(published, tmp_path / 'ours')
  config = json.loads((path / peft.CONFIG).read_text())
  (path / peft.CONFIG).write_text(json.dumps(config | change))
  return path


@pytest.mark.filterwarnings('ignore::FutureWarning')  # of both libraries
@pytest.mark.parametrize('rslora', [False, True])
def test_peft_loads_ours_and_we_load_theirs(
  folder, published, tmp_path, rslora
):
  torch = pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')
  theirs = pytest.importorskip('peft')
  ours = configured(published, tmp_path, use_rslora=rslora)

  def fresh():
    return transformers.AutoModelForCausalLM.from_pretrained(
      folder, dtype=torch.float32
    )

  adapted = theirs.get_peft_model(
    fresh(),
    theirs.LoraConfig(
      r=LORA.rank,
      lora_alpha=LORA.alpha,
      use_rslora=rslora,
      target_modules=['q_proj', 'o_proj', 'up_proj'],
      task_type='CAUSAL_LM',
    ),
  )
  for name, x in adapted.named_parameters():
    if 'lora_B' in name:
      torch.nn.init.normal_(x, std=0.1)
  adapted.save_pretrained(tmp_path / 'theirs')
  shapes = (
    {name: (x.shape, x.dtype) for name, x in tensors(path).items()}
    for path in (ours, tmp_path / 'theirs')
  )
  assert next(shapes) == next(shapes)
  ids = np.arange(24).reshape(1, 24) * 5 % 250
  for path in (ours, tmp_path / 'theirs'):
    model = theirs.PeftModel.from_pretrained(fresh(), path).eval()
    with torch.no_grad():
      expected = model(torch.tensor(ids)).logits.numpy()
    hidden, _ = transformer.trunk(
      weights_at(path),
      MODEL,
      ids.astype(np.int32),
      np.arange(24, dtype=np.int32)[None],
      np.ones((1, 24), np.int32),
    )
    weight, _ = transformer.head(weights_at(path), MODEL)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(hidden @ weight, expected, atol=2e-4 * scale)


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'use_qalora': True}, 'use_qalora must .* True'),
    ({'lora_alpha': float('nan')}, 'alpha must .* nan'),
    ({'r': 4}, r'must have .*\(4, 32\).*got \(3, 32\)'),
    (
      {'base_model_name_or_path': 'Qwen/Qwen3'},
      'base_model_name_or_path must .*hf download Qwen/Qwen3',
    ),
  ],
)
def test_adapters_that_are_not_plain_lora_are_refused(
  published, tmp_path, change, message
):
  path = configured(published, tmp_path, **change)
  with pytest.raises(ValueError, match=message):
    weights_at(path)
  with pytest.raises(ValueError, match=message):  # before anything is read
    weights.check(weights.find(str(path)), MODEL, fixtures.RENDERER)


def test_weights_that_are_not_finite_are_named(
  folder, published, workdir, tmp_path, monkeypatch
):
  """Of a HuggingFace and a PEFT directory, and of a run's adapter."""
  for path, file in ((folder, 'model.safetensors'), (published, peft.WEIGHTS)):
    name = next(iter(safetensors.numpy.load_file(path / file)))
    bad = edited(path, tmp_path, lambda t, x=name: t[x].fill(np.nan), file)
    with pytest.raises(ValueError, match=f'{re.escape(name)} must be finite'):
      weights_at(bad)
  restore = store.restore_params

  def damaged(*args, **kwargs):
    params = restore(*args, **kwargs)
    kernel = params['layers']['mlp']['up']['kernel']
    kernel['b'] = kernel['b'].at[-1, -1, -1].set(np.nan)
    return params

  monkeypatch.setattr(store, 'restore_params', damaged)
  with pytest.raises(ValueError, match='finite weights: .* layers/mlp/up/kern'):
    weights_at(workdir / 'checkpoints/sft')


def test_a_dry_run_looks_at_the_headers_of_weights(folder, tmp_path):
  base = edited(folder, tmp_path, lambda tensors: tensors.popitem())
  message = '^config.sft.init must name a model.*must hold all tensors'
  with pytest.raises(ValueError, match=message):
    check(options(base))


def test_a_dry_run_looks_at_the_arrays_of_a_run(workdir, monkeypatch):
  """The shapes of an adapter, and of the base that it was trained on."""
  step = str(workdir / 'checkpoints/sft/3')
  checkpoint = weights.read(step)
  weights.check(step, MODEL, checkpoint.renderer())
  other = dataclasses.replace(LORA, rank=4)
  other = dataclasses.replace(checkpoint, adapter=other)
  monkeypatch.setattr(weights, 'read', lambda folder: other)
  with pytest.raises(ValueError, match=r'got float32\[2, 32, 3\] at'):
    weights.check(step, MODEL, checkpoint.renderer())
