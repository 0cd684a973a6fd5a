"""Resume of a stored workdir that an earlier version wrote.

`workdir_c39822c.tar.xz` is the workdir, without its report, of commit c39822c
with Python 3.11, jax 0.10.2, flax 0.12.8, optax 0.2.8 and orbax-checkpoint
0.12.8, on a CPU:

    ENV='{"type": "reverse_text", "alphabet": "ab", "min_length": 1,
          "max_length": 2, "train_tasks": 3, "eval_tasks": 1}'
    python -m posttrain.main --config=configs/arithmetic.py:tiny \\
      --workdir=DIR --config.compilation_cache=None \\
      --config.metrics.progress=False \\
      --config.checkpoint.keep_last=1 \\
      --config.model.embed_dim=8 --config.model.head_dim=8 \\
      --config.model.mlp_dim=16 --config.model.tied_head=True \\
      --config.sft.envs.arithmetic.env="$ENV" --config.sft.steps=20 \\
      --config.sft.optim.warmup_steps=0 --config.sft.optim.lr=0.03 \\
      --config.sft.eval.prompts=1 --config.sft.eval.samples=0 \\
      --config.grpo.envs.arithmetic.env="$ENV" --config.grpo.steps=3 \\
      --config.grpo.envs.arithmetic.algorithm.kl_beta=0.1 \\
      --config.grpo.envs.arithmetic.algorithm.reference=ema:0.5 \\
      --config.grpo.envs.arithmetic.sampler.max_tokens=12 \\
      --config.grpo.optim.warmup_steps=0 --config.grpo.eval.prompts=1 \\
      --config.grpo.eval.samples=0 --config.grpo.eval.every=None
    tar -C DIR --exclude=./report.html -cJf workdir_c39822c.tar.xz .

Stage `sft` is complete; stage `grpo` resumes at step 3 and runs to step 4. Its
state holds parameters, their average, and an `ema:0.5` reference. Only values
that the archive holds are compared, so the test passes on every machine.
"""

import contextlib
import io
import json
import pathlib
import tarfile
from typing import Any, NamedTuple

import pytest

from posttrain import generate, main, tree
from posttrain.training import step as train_step

ARCHIVE = pathlib.Path(__file__).parent / 'workdir_c39822c.tar.xz'
STEP = 3  # the stored step of stage grpo


class Resumed(NamedTuple):
  """The stored workdir after one more step, and what it held before."""

  workdir: pathlib.Path
  code: int
  metrics: bytes  # metrics.jsonl in the archive
  sums: dict[str, int]  # checksums in the archive, by path in the state
  states: list[dict[str, int]]  # the same of the state before each update
  answer: dict[str, Any]  # of `generate`, from the stored step


@pytest.fixture(scope='module')
def resumed(tmp_path_factory):
  workdir = tmp_path_factory.mktemp('resumed')
  with tarfile.open(ARCHIVE) as archive:
    archive.extractall(workdir, filter='data')
  metrics = (workdir / 'metrics.jsonl').read_bytes()
  step = workdir / 'checkpoints' / 'grpo' / str(STEP)
  record = json.loads((step / 'host' / 'metadata').read_text())
  states = []

  class Recorded(train_step.TrainStep):
    def __call__(self, state, batch):
      states.append(tree.checksums(state))
      return super().__call__(state, batch)

  with contextlib.redirect_stdout(io.StringIO()) as output:
    argv = [f'--checkpoint={step}', '--json', '--prompt=ab', '--max_tokens=3']
    assert generate.main(argv) == 0
  answer = json.loads(output.getvalue().splitlines()[-1])
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(train_step, 'TrainStep', Recorded)
    code = main.main(
      [
        f'--config={workdir}/config.json',
        f'--workdir={workdir}',
        f'--config.grpo.steps={STEP + 1}',
      ]
    )
  return Resumed(workdir, code, metrics, record['state_sums'], states, answer)


def test_the_run_resumes_at_the_stored_step(resumed):
  assert resumed.code == 0
  rows = (resumed.workdir / 'metrics.jsonl').read_text().splitlines()
  old = resumed.metrics.decode().splitlines()
  (row,) = map(json.loads, rows[len(old) :])
  assert (row['stage'], row['step']) == ('grpo', STEP + 1)
  assert len(resumed.states) == 1
  saved = resumed.workdir / 'checkpoints'
  assert sorted(p.relative_to(saved).as_posix() for p in saved.glob('*/*')) == [
    'grpo/4',
    'sft/20',
  ]


def test_every_restored_array_has_its_stored_bits(resumed):
  """Paths included: copies of the policy are stored under `late/`."""
  assert resumed.states[0] == resumed.sums
  for kind in ('params', 'average', 'late/ema:0.5', 'opt_state'):
    assert any(path.startswith(f'{kind}/') for path in resumed.sums), kind
  path = 'embed/table'
  copies = {
    resumed.sums[f'{kind}/{path}']
    for kind in ('params', 'average', 'late/ema:0.5')
  }
  assert len(copies) == 3  # the three copies differ


def test_metrics_before_the_resume_are_kept(resumed):
  assert resumed.metrics.count(b'\n') == 25
  metrics = (resumed.workdir / 'metrics.jsonl').read_bytes()
  assert metrics.startswith(resumed.metrics)


def test_generate_answers_from_the_stored_step(resumed):
  assert 1 <= len(resumed.answer['ids']) <= 3
  assert len(resumed.answer['logprobs']) == len(resumed.answer['ids'])
  assert resumed.answer['stop_reason'] in ('eos', 'max_tokens')
