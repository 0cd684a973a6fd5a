"""Model cards: the README.md of an exported directory.

1. Front matter in YAML, as the HuggingFace hub reads it.
2. How each stage trained the weights, from the options in its checkpoint.
3. What was measured at the exported step, from WORKDIR/metrics.jsonl.
4. The versions that exported, and the command that trains anew.

Names come from configs of other people. YAML is written by its library; in
Markdown each name is a code span, in which nothing is markup. Of a path only
the last part is shown.
"""

import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from posttrain import machine
from posttrain.checkpoints import weights
from posttrain.data import row_files
from posttrain.metrics import estimates, writers
from posttrain.util import disk, errors, hub

FILE, BASE_FILE = 'README.md', 'BASE_README.md'
_LIBRARIES = {'hf': 'transformers', 'peft': 'peft'}
_LONGEST = 120  # characters of a name
_ON_PAIRS = ('preference', 'ranking')  # kinds of stages
_WITHOUT_RL = ('sft', 'opd', 'opsd')  # algorithms that do not use `loss.rl`
# Metrics left out of the card.
_LEFT_OUT = re.compile('eval/(errors|stop)/')


def write(folder: str, exported: str | pathlib.Path, form: str) -> None:
  """Writes the card of exported weights.

  The card that came with the files of a base model describes other weights, and
  is kept as BASE_README.md.

  Args:
    folder: the folder that the weights are from, see `weights.find`.
    exported: the folder that holds them now.
    form: 'hf' or 'peft'.
  """
  path = pathlib.Path(exported) / FILE
  if path.exists():
    os.replace(path, path.with_name(BASE_FILE))
  with disk.replacing(path) as file:
    file.write(text(folder, form))


def text(folder: str, form: str) -> str:
  """Returns the card of weights; arguments as `write`."""
  chain = weights.chain(folder)
  all_read = [weights.read(x) for x in chain[::-1] if x != 'random']
  runs = [x for x in all_read if x.kind == 'run']
  origin = None if chain[-1] == 'random' else chain[-1]
  lines = [
    '---',
    yaml.safe_dump(
      _front_matter(runs, origin, form), sort_keys=False, allow_unicode=True
    ).rstrip('\n'),
    '# license: yours to fill in; that of the base model may bind you',
    '---',
    '',
    '# Model card',
    '',
    _summary(runs, origin, form),
    '',
  ]
  for run in runs:
    lines += _stage(run.host)
  if runs and runs[-1].folder == folder:
    lines += _evaluation(folder)
  return '\n'.join([*lines, *_reproduction(runs), ''])


def _front_matter(
  runs: list[weights.Checkpoint], origin: str | None, form: str
) -> dict[str, Any]:
  matter: dict[str, Any] = {'library_name': _LIBRARIES[form]}
  if origin is not None:
    matter['base_model'] = _name(origin)
    is_adapter = form == 'peft'
    matter['base_model_relation'] = 'adapter' if is_adapter else 'finetune'
  stages = [run.host['stage'] for run in runs]
  has_lora = any(run.is_adapter for run in runs)
  tags = ['posttrain', *stages, *(['lora'] if has_lora else [])]
  matter['pipeline_tag'] = 'text-generation'
  matter['tags'] = [errors.text(x, _LONGEST) for x in dict.fromkeys(tags)]
  return matter


def _summary(
  runs: list[weights.Checkpoint], origin: str | None, form: str
) -> str:
  what = 'A LoRA adapter' if form == 'peft' else 'A language model'
  start = 'random weights' if origin is None else _span(_name(origin))
  if commit := hub.commit(origin or ''):
    start += f' at commit {_span(commit)}'
  stages = len(runs)
  trained = f', trained in {stages} stage{"s" if stages != 1 else ""}'
  return (
    f'{what} that started from {start}{trained if runs else ""} with posttrain.'
  )


def _stage(host: Mapping[str, Any]) -> list[str]:
  """Returns the section of a stage: its options that matter most."""
  name = host['stage']
  options = host['config'][name]
  optim, batch = options['optim'], _node(options, 'batch')
  lora = _node(options, 'lora')
  rows = [
    ('kind', _span(options.get('kind', 'tokens'))),
    ('steps', _span(host.get('step'))),
    *(_pairs(options) if options.get('kind') in _ON_PAIRS else _envs(options)),
    (
      'optimizer',
      f'learning rate {_span(optim.get("lr"))}, schedule '
      f'{_span(optim.get("schedule"))}, weight decay '
      f'{_span(optim.get("weight_decay"))}',
    ),
    (
      'batch',
      f'{_span(batch.get("prompts_per_step"))} tasks or pairs per step, in '
      f'rows of {_span(batch.get("row_tokens"))} tokens',
    ),
    (
      'trained weights',
      f'LoRA of rank {_span(lora["rank"])}' if lora.get('rank') else 'all',
    ),
    ('dtype', _span(host['model'].get('dtype'))),
    ('seed', _span(host['config'].get('seed'))),
  ]
  if optim.get('average') is not None:
    rows.append(('exported weights', 'the moving average'))
  return [
    f'## Stage {_span(name)}',
    '',
    '| option | value |',
    '|---|---|',
    *(f'| {key} | {value} |' for key, value in rows if value),
    '',
  ]


def _pairs(options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
  """Yields rows of the pairs and their loss."""
  pairs, losses = _node(options, 'pairs'), _node(options, 'loss')
  path = pairs.get('path')
  shown = _name(path) if isinstance(path, str) else pairs.get('type')
  yield 'pairs', _span(shown)
  if options.get('kind') == 'preference':
    yield 'loss', _span(_node(losses, 'preference').get('type'))
  else:
    yield 'loss', 'Bradley-Terry'


def _envs(options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
  """Yields rows of environments: their data, algorithm, loss and rewards."""
  envs, losses = _node(options, 'envs'), _node(options, 'loss')
  for name in envs:
    entry = _node(envs, name)
    env, kind = _node(entry, 'env'), _node(entry, 'algorithm').get('type')
    parts = [_span(env.get('type'))]
    if isinstance(env.get('path'), str):
      parts.append(f'of {_span(_name(env["path"]))}')
    parts.append(f'with the algorithm {_span(kind)}')
    if kind not in _WITHOUT_RL:
      loss = _node(losses, 'rl').get('type')
      parts.append(f'and the loss {_span(loss)}')
      parts.append(f'in groups of {_span(entry.get("group_size"))}')
    if rewards := _node(entry, 'rewards'):
      parts.append(f'on the rewards {", ".join(map(_span, rewards))}')
    yield f'environment {_span(name)}', ' '.join(parts)


def _evaluation(folder: str) -> list[str]:
  """Returns the section of the numbers that were measured at a step."""
  host = weights.read(folder).host
  row = _measured(folder, host)
  keys = [
    key
    for key, value in row.items()
    if key.startswith('eval/')
    and isinstance(value, int | float)
    and not estimates.is_bound(key, row)
    and not _LEFT_OUT.match(key)
  ]
  head = [f'## Held-out evaluation at step {_span(host.get("step"))}', '']
  if not keys:
    return [
      *head,
      'Not measured at this step; `python -m posttrain.evaluate` does so.',
      '',
    ]
  lines = [*head, '| metric | value | 95 % interval |', '|---|---|---|']
  for key in keys:
    name, _, env = key.rpartition('/')
    ends = [row.get(f'{name}{side}/{env}') for side in estimates.BOUNDS]
    numbers = [x for x in ends if isinstance(x, int | float)]
    interval = ' to '.join(f'{x:.4g}' for x in numbers)
    interval = interval if len(numbers) == 2 else ''
    lines.append(f'| {_span(key)} | {row[key]:.4g} | {interval} |')
  has_intervals = not all(line.endswith('|  |') for line in lines)
  return [*lines, '', *(['Intervals are over tasks.', ''] * has_intervals)]


def _measured(folder: str, host: Mapping[str, Any]) -> Mapping[str, Any]:
  """Returns the row of a step in metrics.jsonl; {} without one."""
  path = pathlib.Path(folder).parents[2] / 'metrics.jsonl'
  try:
    rows = writers.read_metrics(str(path))
  except ValueError:  # the weights do not need it
    return {}
  place = host['stage'], host.get('step')
  mine = [row for row in rows if (row['stage'], row['step']) == place]
  return mine[-1] if mine else {}


def _reproduction(runs: list[str]) -> list[str]:
  versions = machine.versions('posttrain', 'jax', 'flax')
  names = ', '.join(map(' '.join, versions.items()))
  lines = ['## Reproduction', '', f'Exported with {names}.']
  if runs:
    lines += [
      "The run's config.json has all options; with it, and the data, the run "
      'is repeated by',
      '',
      '```bash',
      'python -m posttrain.main --config=config.json --workdir=repeated',
      '```',
    ]
  return lines


def _node(options: Mapping[str, Any], name: str) -> Mapping[str, Any]:
  value = options.get(name)
  return value if isinstance(value, dict) else {}


def _name(path: str) -> str:
  """Returns what may be shown of a path: an id, a data set or a last part."""
  if row_files.is_tfds(path):
    return errors.text(path, _LONGEST)
  name = hub.id_of(path) or re.split(r'[/\\]', path.rstrip('/\\'))[-1]
  return errors.text(name, _LONGEST)


def _span(value: Any) -> str:
  """Returns a value as a code span, within a table or outside of one."""
  shown = errors.text(value, _LONGEST).replace('`', "'").replace('|', '¦')
  return f'`{shown or " "}`'
