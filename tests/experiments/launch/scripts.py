"""Running the scripts of clusters here, with stand-ins for their programs."""

import os
import pathlib
import stat

from experiments.launch import jobs, options

# Values that a shell, YAML or Kubernetes could read as something else.
NASTY = (
  'two words',
  "it's",
  '$HOME and ${HOME}',
  '$(echo no) `echo no` $$(HOME) $$ $',
  'back\\slash \\n',
  'say "hi" * ? [a] ~ ! # & ; | < >',
  'a: b, - c, %YAML',
  ' ends with a space ',
  'two\nlines',
  '{"type": "grpo", "kl_beta": 0.1}',
  '',
)


def nasty_job(hosts=1, swept=()):
  """Returns a job with a nasty value under each of many keys."""
  values = tuple((f'k{i}', text) for i, text in enumerate(NASTY))
  return jobs.Job('x', 'a b.py', values, swept, "/data/it's $x", hosts)


def make(on, **fields):
  """Returns options that need no command line."""
  given = {'config': 'a b.py', 'workdir': '/data/lr', **fields}
  return options.Options(on=on, **given)


def program(folder, name, text):
  """Writes a shell program into a folder of programs."""
  path = pathlib.Path(folder) / name
  path.write_text(f'#!/bin/bash\n{text}\n')
  path.chmod(path.stat().st_mode | stat.S_IXUSR)


def words(path):
  """Returns the arguments that a stand-in has written, each with a NUL."""
  return path.read_bytes().decode().split('\0')[:-1]


def environment(folder, **variables):
  """Returns the variables of a script; programs come from the folder first."""
  path = f'{folder}{os.pathsep}{os.environ["PATH"]}'
  return {'PATH': path, 'HOME': str(folder), **variables}
