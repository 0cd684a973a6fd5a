"""`make_pairs`: preference pairs from a policy or from GSM8K's solutions."""

import json
import re

import pytest

from posttrain import main, make_pairs, schema
from posttrain.checkpoints import weights
from posttrain.data import preferences
from posttrain.stage import from_checkpoint, preflight
from tests.envs import test_gsm8k


@pytest.mark.parametrize(
  ('argv', 'message'),
  [
    (['--output=x'], '--checkpoint=PATH or --gsm8k=FILE'),
    (['--output=x', '--checkpoint=b', '--samples=1'], 'samples must'),
    (['--output=x', '--checkpoint=/nowhere'], '/nowhere'),
  ],
)
def test_a_mistake_is_one_line_and_exit_code_2(argv, message, capsys):
  assert make_pairs.main(argv) == 2
  err = capsys.readouterr().err
  assert err.count('\n') == 1 and re.search(message, err)


def test_an_unwritable_output_is_refused_before_sampling(tmp_path, capsys):
  (tmp_path / 'file').write_text('x')
  output = tmp_path / 'file' / 'x.jsonl'
  assert make_pairs.main([f'--output={output}', '--gsm8k=/nowhere']) == 1
  assert str(output.parent) in capsys.readouterr().err


def test_gsm8k_solutions_become_pairs(tmp_path, capsys):
  file = test_gsm8k.write(tmp_path / 's.jsonl', test_gsm8k.SOLUTIONS)
  output = tmp_path / 'pairs.jsonl'
  assert make_pairs.main([f'--gsm8k={file}', f'--output={output}']) == 0
  assert '2 pairs of 1 questions' in capsys.readouterr().out
  assert len(preferences.read(output)) == 2


def test_capacity_fits_the_longest_sampled_question(tmp_path, monkeypatch):
  """Training questions may be longer than those of evaluations."""
  train, held_out = (
    test_gsm8k.write(
      tmp_path / f'{length}.jsonl',
      {'question': 'x' * length, 'answer': 'So.\n#### 2'},
    )
    for length in (300, 5)
  )
  env = schema.Gsm8k(path=train, eval_path=held_out)
  stage = schema.Stage(
    envs={'words': schema.EnvEntry(env=env)}, eval=schema.Eval(max_tokens=50)
  )
  run = schema.Run(model=schema.PRESETS['tiny'], stages={'sft': stage})
  flags = make_pairs.Flags(
    output=str(tmp_path / 'x'), checkpoint='y', prompts=1
  )

  def player(run, name, folder, longest):
    made = preflight.make(preflight.resolve(run), name, longest)
    raise RuntimeError(f'capacity {made.capacity}')

  monkeypatch.setattr(weights, 'find', lambda path: path)
  monkeypatch.setattr(
    from_checkpoint, 'stage_of', lambda *_, **__: (run, 'sft')
  )
  monkeypatch.setattr(from_checkpoint, 'player', player)
  with pytest.raises(RuntimeError, match='capacity (3[5-9]|4)'):
    make_pairs.make(flags)


def test_answers_of_a_policy_become_pairs(tmp_path, capsys):
  env = {
    'type': 'arithmetic',
    'ops': ['+'],
    'max_operand': 4,
    'worked': False,
    'train_tasks': 15,
    'eval_tasks': 4,
  }
  train = [
    '--config=configs/arithmetic_sft.py:tiny',
    f'--workdir={tmp_path}',
    f'--config.sft.envs.arithmetic.env={json.dumps(env)}',
    '--config.sft.steps=40',
    '--config.sft.optim.lr=1e-2',
    '--config.compilation_cache=None',
  ]
  assert main.main(train) == 0
  output = tmp_path / 'pairs.jsonl'
  argv = [
    f'--checkpoint={tmp_path}',
    f'--output={output}',
    '--prompts=10',
    '--max_tokens=16',
    '--config.compilation_cache=None',
  ]
  assert make_pairs.main(argv) == 0
  first = output.read_bytes()
  assert ' pairs of 10 tasks with 80 answers' in capsys.readouterr().out
  for pair in preferences.read(output):
    right, wrong = (x[0]['content'] for x in (pair.chosen, pair.rejected))
    total = sum(map(int, pair.info['id'].split('+')))
    assert right == f'\\boxed{{{total}}}' != wrong
  assert make_pairs.main([*argv, '--seed=1']) == 0
  assert output.read_bytes() != first
