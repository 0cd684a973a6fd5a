"""Programs of clusters (sbatch, kubectl, gcloud), and names that they take."""

import hashlib
import re
import shutil
import subprocess
from collections.abc import Sequence

from experiments.launch import jobs as jobs_lib
from posttrain.util import errors


def run(place: str, command: Sequence[str], text: str | None = None) -> None:
  """Runs a program that submits; its output goes to this one's.

  Args:
    place: the value of --on, for errors.
    command: the program and its arguments.
    text: the command's standard input; None = an empty one.

  Raises:
    ValueError: the program is not installed.
    RuntimeError: it has failed.
  """
  if shutil.which(command[0]) is None:
    raise ValueError(
      f'--on={place} must have the program {command[0]}: it is not installed '
      'here; call this where it is, or use --dry_run'
    )
  stdin = subprocess.DEVNULL if text is None else None
  done = subprocess.run(command, text=True, input=text, stdin=stdin)
  if done.returncode:
    raise RuntimeError(
      f'{command[0]} must accept what is submitted: got exit code '
      f'{done.returncode} from {errors.text(" ".join(command[:3]))}; its own '
      'message is above'
    )


def run_name(job: jobs_lib.Job, title: str, longest: int) -> str:
  """Returns a cluster's name of a run: lower-case letters, digits and dashes.

  A name that had to be changed ends with a digest.

  Args:
    job: the job.
    title: the name of its launch.
    longest: the most characters.
  """
  text = f'{title}-{job.name}' if job.swept else job.name
  plain = re.sub(r'[^a-z0-9]+', '-', text.lower()).strip('-')
  if plain == text and len(plain) <= longest and plain[:1].isalpha():
    return plain
  digest = hashlib.sha256(text.encode()).hexdigest()[:6]
  plain = plain if plain[:1].isalpha() else f'run-{plain}'
  return plain[: longest - 7].strip('-') + f'-{digest}'
