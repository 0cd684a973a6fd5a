"""Questions that the start solves sometimes: asked, chosen, written.

Rows are GSM8K's (`question`, `answer`), so that `envs.gsm8k` asks and grades
exactly the questions of a file.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from posttrain import schema
from posttrain.envs import registry
from posttrain.metrics import writers
from posttrain.util import files, json_files

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Choice:
  """How questions are chosen.

  Fields:
    questions: number of questions that are kept.
    candidates: number of training questions that the start answers.
    samples: number of its answers to each, at temperature 1.
    low: lowest pass rate of a question that is kept, itself included.
    high: highest pass rate, itself included.
  """

  questions: int
  candidates: int
  samples: int
  low: float
  high: float


def make(
  entry: schema.EnvEntry,
  seed: int,
  start: str,
  stage: str,
  choice: Choice,
  folder: str,
) -> str:
  """Returns the path of the chosen questions; makes the file if it is absent.

  Args:
    entry: the environment whose training questions are the candidates; its
      answers are numbers.
    seed: seed of its training questions.
    start: a workdir, whose weights answer.
    stage: the stage of these weights.
    choice: the numbers.
    folder: where questions.jsonl is written, with candidates.jsonl and
      answers.jsonl, from which it is made, and choice.json.

  Raises:
    ValueError: too few candidates have such a pass rate, or the folder has
      questions of another choice.
  """
  path = os.path.join(folder, 'questions.jsonl')
  numbers = os.path.join(folder, 'choice.json')
  if os.path.exists(path):
    old = json_files.read_object(numbers)
    if old != dataclasses.asdict(choice):
      raise ValueError(
        f'--workdir must be new for another choice of questions: got {folder}, '
        f'whose questions are of {old}'
      )
    return path
  tasks = os.path.join(folder, 'candidates.jsonl')
  answers = os.path.join(folder, 'answers.jsonl')
  rows = candidates(entry, seed, choice.candidates)
  write_jsonl(tasks, rows)
  nodes = {'questions': {'env': dataclasses.asdict(env(tasks))}}
  words = [
    *(sys.executable, '-m', 'posttrain.evaluate', f'--checkpoint={start}'),
    *('--trust_config', f'--answers={answers}'),
    f'--config.{stage}.envs={json.dumps(nodes)}',
    f'--config.{stage}.eval.prompts={len(rows)}',
    f'--config.{stage}.eval.samples={choice.samples}',
  ]
  subprocess.run(words, check=True, stdout=sys.stderr)
  chosen = choose(rows, writers.read(answers), choice.low, choice.high)
  if len(chosen) < choice.questions:
    raise ValueError(
      f'--questions must be at most {len(chosen)}, the candidates whose pass '
      f'rate is in [{choice.low}, {choice.high}]: got {choice.questions}; '
      'raise --candidates'
    )
  with files.replacing(numbers) as file:
    json.dump(dataclasses.asdict(choice), file)
  write_jsonl(path, chosen[: choice.questions])
  return path


def candidates(
  entry: schema.EnvEntry, seed: int, count: int
) -> list[dict[str, Any]]:
  """Returns the first training questions of an environment, as rows."""
  source = registry.make('questions', entry.env).source('train', seed)
  return [
    {
      'question': task.prompt[-1]['content'],
      'answer': f'#### {task.answer}',
      'id': task.id,
    }
    for task in source.take(count)
  ]


def choose(
  rows: Iterable[Row], answers: Iterable[Row], low: float, high: float
) -> list[dict[str, Any]]:
  """Returns the rows whose answers are right often enough, with `pass_rate`.

  Args:
    rows: questions.
    answers: of each row, the line that `posttrain.evaluate --answers` writes.
    low: lowest share of sampled answers that are right, itself included.
    high: highest share, itself included.
  """
  rated = [
    {**row, 'pass_rate': statistics.fmean(answer['sampled'])}
    for row, answer in zip(rows, answers, strict=True)
  ]
  return [row for row in rated if low <= row['pass_rate'] <= high]


def env(path: str) -> schema.Gsm8k:
  """Returns the environment of a file of questions, the same in both splits."""
  return schema.Gsm8k(path=path, eval_path=path, instruction='', lenient=False)


def write_jsonl(path: str, rows: Iterable[Row]) -> None:
  """Writes rows as lines of JSON."""
  with files.replacing(path) as file:
    file.writelines(f'{json.dumps(row)}\n' for row in rows)
