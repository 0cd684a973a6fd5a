"""`generate`: answers of a trained policy."""

import json
import shutil

import numpy as np
import pytest

from posttrain import generate, main, schema, scoring
from posttrain.checkpoints import policies, store
from posttrain.models import transformer
from tests import fixtures

RECIPE = [
  '--config=configs/arithmetic_sft.py:tiny',
  '--config.compilation_cache=None',
  '--config.sft.optim.warmup_steps=0',
  '--config.sft.eval.every=None',
  '--config.sft.eval.prompts=1',
  '--config.sft.eval.samples=0',
  '--config.sft.rollout.slots=2',
]
QUESTION = 'What is 1 + 2?'
IDS = fixtures.RENDERER.render(
  [{'role': 'user', 'content': QUESTION}], add_generation_prompt=True
).ids.tolist()


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  """The workdir of a run of six steps, with averaged weights."""
  path = tmp_path_factory.mktemp('run')
  argv = [
    *RECIPE,
    f'--workdir={path}',
    '--config.sft.steps=6',
    '--config.sft.optim.average=0.5',
  ]
  assert main.main(argv) == 0
  return path


@pytest.fixture
def generate_json(workdir, capsys):
  """A function that returns the JSON object of --json."""

  def run(*argv, path=workdir):
    capsys.readouterr()
    assert generate.main([f'--checkpoint={path}', '--json', *argv]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])

  return run


def test_greedy_is_the_argmax_of_a_full_forward(generate_json, workdir):
  """Logprobs are those of the averaged weights at temperature 1."""
  answer = generate_json(f'--prompt={QUESTION}', '--max_tokens=12')
  assert answer['prompt_ids'] == IDS
  like = transformer.shapes(fixtures.MODEL)
  params = store.restore_params(str(workdir), like, average=True)
  whole = IDS + answer['ids']
  score = scoring.Scorer(fixtures.MODEL, 1, 64, reads='logprobs_and_top')
  (scored,) = score(params, [np.array(whole)], [np.ones(len(whole))])
  logprobs, is_top = scored[len(IDS) :].T
  np.testing.assert_allclose(answer['logprobs'], logprobs, atol=1e-5)
  assert is_top.all()
  assert answer['text'] == fixtures.RENDERER.tokenizer.decode(answer['ids'])
  stopped = answer['ids'][-1] == fixtures.RENDERER.tokenizer.eos_id
  assert answer['stop_reason'] == ('eos' if stopped else 'max_tokens')


def test_prompt_and_prompt_ids_give_the_same_answer(generate_json, workdir):
  ids = f'--prompt_ids={",".join(map(str, IDS))}'
  step = workdir / 'checkpoints' / 'sft' / '6'
  answer = generate_json(f'--prompt={QUESTION}', '--max_tokens=4')
  for path in (workdir, step.parent, step):
    assert generate_json(ids, '--max_tokens=4', path=path) == answer


def test_equal_seeds_give_equal_answers(generate_json):
  few = ('--prompt=x', '--max_tokens=12')
  hot = (*few, '--temperature=1.5')
  answers = [generate_json(*hot, f'--seed={seed}')['ids'] for seed in (0, 1)]
  assert generate_json(*hot)['ids'] == answers[0] != answers[1]
  # Each of these options leaves only the most likely token.
  greedy = generate_json(*few)['ids']
  for option in ('--top_k=1', '--top_p=1e-6', '--min_p=0.999'):
    assert generate_json(*hot, option)['ids'] == greedy


@pytest.mark.parametrize(
  ('argv', 'message'),
  [
    (['--checkpoint=/no/such', '--prompt=x'], "'/no/such'"),
    (['--prompt=x'], '--checkpoint'),
    (['--checkpoint=.'], '--prompt=TEXT'),
    (['--checkpoint=.', '--prompt=x', '--top_p=0'], 'top_p'),
  ],
)
def test_a_mistake_is_one_line_and_exit_code_2(capsys, argv, message):
  assert generate.main(argv) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith('error: ') and message in line


def test_ids_must_be_in_the_vocabulary(workdir, capsys):
  assert generate.main([f'--checkpoint={workdir}', '--prompt_ids=264']) == 2
  assert '--prompt_ids must be in [0, 264)' in capsys.readouterr().err


def test_a_changed_tokenizer_or_a_damaged_checkpoint_is_refused(
  workdir, tmp_path, monkeypatch, capsys
):
  copy = shutil.copytree(workdir, tmp_path / 'copy')
  argv = [f'--checkpoint={copy}', '--prompt=x']
  with monkeypatch.context() as patch:
    renderer = policies.rendering.load(schema.Tokenizer())
    renderer.fingerprint = 'f' * 64
    patch.setattr(policies.rendering, 'load', lambda _: renderer)
    assert generate.main(argv) == 2
  assert 'its fingerprint is ffffffffffff' in capsys.readouterr().err
  for path in (copy / 'checkpoints' / 'sft' / '6' / 'state').rglob('*'):
    if path.is_file():
      path.write_bytes(path.read_bytes()[:-20])
  assert generate.main(argv) == 2
  assert 'must be a sound checkpoint' in capsys.readouterr().err
