"""Hostile rows, preferences and caches of pairs, read in this process."""

import json
import logging
import pathlib
import time

import numpy as np

from experiments.trials import base
from posttrain.data import preferences, row_files
from posttrain.stage import pairs
from posttrain.util import exits

DEEP = '[' * 100_000 + ']' * 100_000
LONG = 'x' * 4_000_000
GOOD = '{"prompt": "a", "completion": "b"}\n'


def refused(read, path: pathlib.Path, lines: list[str]) -> str:
  """Checks that each line, the second of its file, is named in one line."""
  begin, longest = time.monotonic(), 0
  for line in lines:
    path.write_text(line, encoding='utf-8', errors='surrogateescape')
    try:
      read(path)
    except ValueError as error:
      message = str(error)
      assert message.startswith(f'{path}:'), message[:300]
      assert message.isprintable() and len(message) < 1000, message[:300]
      longest = max(longest, len(message))
    else:
      raise AssertionError(f'read: {line[:200]}')
  seconds = time.monotonic() - begin
  return (
    f'{len(lines)} refused by file and line, at most {longest} characters, '
    f'{seconds:.1f} s'
  )


@base.trial('rows', 'a hostile row is one short line that names it')
def hostile(scratch: base.Scratch) -> str:
  values = (DEEP, f'"{LONG}"', f'["{LONG}"]', f'{{"a": "{LONG}"}}', '7', 'null')
  columns = [
    f'{GOOD}{{"{a}": {value}, "{b}": "y"}}'
    for value in values
    for a, b in (('prompt', 'completion'), ('completion', 'prompt'))
    if value != f'"{LONG}"'
  ]
  columns += [f'{GOOD}{{"messages": {value}}}' for value in values]
  numbers = ('NaN', '-Infinity', '1e999', '9' * 400, '9' * 10**6, '[[1e400]]')
  columns += [f'{GOOD[:-2]}, "level": {x}}}' for x in numbers]
  whole = (DEEP, f'"{LONG}"', LONG, '{', '[1]', '\x00', '\udcff', '{"a": 1')
  columns += [GOOD + x for x in whole]
  columns += [
    f'{{"prompt": "a", "prompt": "b", "completion": "{LONG}"}}',
    f'{{"{LONG}": 1}}',
    '{"prompt": "\\ud800", "completion": "b"}',
    f'{{"messages": [{{"role": "{LONG}", "content": ""}}]}}',
    f'{{"messages": [{{"role": "user", "content": ["{LONG}"]}}]}}',
  ]
  return refused(row_files.read, scratch.folder / 'rows.jsonl', columns)


@base.trial('rows', 'a hostile preference is one short line that names it')
def hostile_pairs(scratch: base.Scratch) -> str:
  pair = '{"prompt": "a", "chosen": "b", "rejected": "c", "margin": '
  margins = ('9' * 400, '1e999', 'NaN', '1e39', '-1e7', 'true', f'"{LONG}"')
  lines = [f'{pair}{margin}}}' for margin in (*margins, DEEP)]
  lines += [
    f'{{"prompt": "a", "chosen": "{LONG}", "rejected": "{LONG}"}}',
    f'{{"prompt": "a", "completion": "b", "label": "{LONG}"}}',
    f'{{"chosen": "{LONG}", "rejected": ["{LONG}"]}}',
    f'{{"prompt": {DEEP}, "chosen": "b", "rejected": "c"}}',
  ]
  return refused(preferences.read, scratch.folder / 'pairs.jsonl', lines)


@base.trial('rows', 'a recipe that names hostile rows ends in one line')
def command(scratch: base.Scratch) -> str:
  path = scratch.folder / 'rows.jsonl'
  path.write_text(f'{GOOD}{{"messages": "{LONG}"}}')
  env = json.dumps({'type': 'rows', 'path': str(path)})
  done = base.command(
    'posttrain.main',
    *scratch.tiny(scratch.folder / 'run', '--dry_run'),
    f'--config.sft.envs.arithmetic.env={env}',
  )
  base.expect_line(done, exits.USAGE, f'{path}:2: messages must be a list')
  return f'exit {done.code}: a line of {len(done.last)} characters'


@base.trial('rows', 'a damaged cache of pairs is made again, with a warning')
def caches(scratch: base.Scratch) -> str:
  path, key = scratch.folder / 'x.npz', {'model': 'a'}
  sound = {'key': np.str_(json.dumps(key)), 'logprobs': np.zeros(2)}
  contents = [
    sound | {'key': np.str_(DEEP)},
    sound | {'key': np.str_('[]')},
    sound | {'key': np.zeros(2)},
    sound | {'logprobs': np.full(2, np.nan)},
    sound | {'logprobs': np.zeros(())},
    sound | {'logprobs': np.zeros((2, 2))},
    sound | {'logprobs': np.array(['x', 'y'])},
    {},
  ]
  for number, arrays in enumerate(contents):
    with path.open('wb') as file:
      np.savez(file, **arrays)
    assert rescored(path, key), f'content {number} was used'
  with path.open('wb') as file:
    np.savez(file, **sound)
  whole, rng = path.read_bytes(), np.random.default_rng(0)
  scored = 0
  for _ in range(300):  # any byte
    data = bytearray(whole)
    data[rng.integers(len(data))] ^= 1 << rng.integers(8)
    path.write_bytes(data)
    scored += rescored(path, key)
  names = ('model.jsonl', 'model_of.json')
  pairs_file, key_file = (scratch.folder / name for name in names)
  for text in (DEEP, '[]', '{', '7', ''):
    pairs_file.write_text('old')
    key_file.write_text(text)
    pairs.write_pairs({'train': str(pairs_file)}, str(key_file), key, nothing)
    assert pairs_file.read_text() == ''
  return (
    f'{len(contents)} damaged contents scored again; of 300 flipped bits '
    f'{scored} were noticed, and the others changed no number; 5 damaged keys'
  )


def nothing(split: str) -> list[preferences.Preference]:
  """Makes no pairs."""
  del split
  return []


def rescored(path: pathlib.Path, key: dict[str, str]) -> bool:
  """Returns whether a cache of reference logprobs is scored anew."""
  calls = []
  logger = logging.getLogger('absl')
  level = logger.level
  logger.setLevel(logging.ERROR)
  try:
    values = pairs.cached(
      str(path), key, lambda x: calls.append(x) or [1.0, 2.0], 'ab'
    )
  finally:
    logger.setLevel(level)
  assert values.tolist() == ([1.0, 2.0] if calls else [0.0, 0.0]), values
  return bool(calls)
