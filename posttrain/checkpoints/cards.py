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

import jinja2
import yaml

from posttrain import machine
from posttrain.checkpoints import weights
from posttrain.data import row_files
from posttrain.metrics import estimates, writers
from posttrain.util import disk, errors, hub

FILE, BASE_FILE = 'README.md', 'BASE_README.md'
_LONGEST = 120  # characters of a name
_WITHOUT_RL = ('sft', 'opd', 'opsd')  # algorithms that do not use `loss.rl`
# Metrics left out of the card.
_LEFT_OUT = re.compile('eval/(errors|stop)/')
# `span` is the filter that makes a code span, within a table or outside of one.
_TEMPLATE = """\
---
{{ matter }}# license: yours to fill in; that of the base model may bind you
---

# Model card

{{ 'A LoRA adapter' if is_adapter else 'A language model' }} that started from
{%- if base %} {{ base | span }}{% else %} random weights{% endif %}
{%- if commit %} at commit {{ commit | span }}{% endif %}
{%- if stages %}, trained in {{ stages | length }} stage
{{- 's' if stages | length > 1 }}{% endif %} with posttrain.

{% for name, rows in stages %}
## Stage {{ name | span }}

| option | value |
|---|---|
{% for key, value in rows if value %}
| {{ key }} | {{ value }} |
{% endfor %}

{% endfor %}
{% if step is not none %}
## Held-out evaluation at step {{ step | span }}

{% if measured %}
| metric | value | 95 % interval |
|---|---|---|
{% for key, value, interval in measured %}
| {{ key | span }} | {{ value }} | {{ interval }} |
{% endfor %}

{% if measured | selectattr(2) | list %}
Intervals are over tasks.

{% endif %}
{% else %}
Not measured at this step; `python -m posttrain.evaluate` does so.

{% endif %}
{% endif %}
## Reproduction

Exported with {{ versions }}.
{% if stages %}
The run's config.json has all options; with it, and the data, the run is
repeated by

```bash
python -m posttrain.main --config=config.json --workdir=repeated
```
{% endif %}
"""


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
  origin = '' if chain[-1] == 'random' else chain[-1]
  is_adapter = form == 'peft'
  matter = {'library_name': 'peft' if is_adapter else 'transformers'}
  if origin:
    matter['base_model'] = _name(origin)
    matter['base_model_relation'] = 'adapter' if is_adapter else 'finetune'
  stages = [run.host['stage'] for run in runs]
  lora = ['lora'] if any(run.is_adapter for run in runs) else []
  tags = dict.fromkeys(['posttrain', *stages, *lora])
  matter['pipeline_tag'] = 'text-generation'
  matter['tags'] = [errors.text(x, _LONGEST) for x in tags]
  versions = machine.versions('posttrain', 'jax', 'flax')
  is_run = runs and runs[-1].folder == folder
  environment = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True)
  environment.filters['span'] = _span
  return environment.from_string(_TEMPLATE).render(
    matter=yaml.safe_dump(matter, sort_keys=False, allow_unicode=True),
    is_adapter=is_adapter,
    base=_name(origin) if origin else '',
    commit=hub.commit(origin),
    stages=[(run.host['stage'], list(_options(run.host))) for run in runs],
    step=runs[-1].host.get('step') if is_run else None,
    measured=_measured(folder, runs[-1].host) if is_run else [],
    versions=', '.join(map(' '.join, versions.items())),
  )


def _options(host: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
  """Yields the options of a stage that matter most: (name, value)."""
  options = host['config'][host['stage']]
  optim, batch, lora, losses, pairs, envs = (
    options.get(name) or {}
    for name in ('optim', 'batch', 'lora', 'loss', 'pairs', 'envs')
  )
  kind = options.get('kind', 'tokens')
  yield 'kind', _span(kind)
  yield 'steps', _span(host.get('step'))
  if kind != 'tokens':
    path, loss = pairs.get('path'), losses['preference'].get('type')
    yield 'pairs', _span(_name(path) if path else pairs.get('type'))
    yield 'loss', _span(loss) if kind == 'preference' else 'Bradley-Terry'
    envs = {}
  for name, entry in envs.items():
    env, algorithm = entry['env'], entry['algorithm']['type']
    text = _span(env['type'])
    if env.get('path'):
      text += f' of {_span(_name(env["path"]))}'
    text += f' with the algorithm {_span(algorithm)}'
    if algorithm not in _WITHOUT_RL:
      text += f' and the loss {_span(losses["rl"].get("type"))}'
      text += f' in groups of {_span(entry.get("group_size"))}'
    if rewards := entry.get('rewards'):
      text += f' on the rewards {", ".join(map(_span, rewards))}'
    yield f'environment {_span(name)}', text
  yield (
    'optimizer',
    f'learning rate {_span(optim.get("lr"))}, schedule '
    f'{_span(optim.get("schedule"))}, weight decay '
    f'{_span(optim.get("weight_decay"))}',
  )
  yield (
    'batch',
    f'{_span(batch.get("prompts_per_step"))} tasks or pairs per step, in rows '
    f'of {_span(batch.get("row_tokens"))} tokens',
  )
  rank = lora.get('rank')
  yield 'trained weights', f'LoRA of rank {_span(rank)}' if rank else 'all'
  yield 'dtype', _span(host['model'].get('dtype'))
  yield 'seed', _span(host['config'].get('seed'))
  if optim.get('average') is not None:
    yield 'exported weights', 'the moving average'


def _measured(
  folder: str, host: Mapping[str, Any]
) -> list[tuple[str, str, str]]:
  """Returns (metric, value, interval) of a step, from metrics.jsonl."""
  path = pathlib.Path(folder).parents[2] / 'metrics.jsonl'
  try:
    rows = writers.read_metrics(str(path))
  except ValueError:  # the weights do not need it
    rows = []
  place = host['stage'], host.get('step')
  row = next((x for x in rows[::-1] if (x['stage'], x['step']) == place), {})
  measured = []
  for key, value in row.items():
    is_shown = key.startswith('eval/') and not _LEFT_OUT.match(key)
    is_shown &= isinstance(value, int | float)
    if is_shown and not estimates.is_bound(key, row):
      measured.append((key, *estimates.formatted(row, key, '{:.4g}')))
  return measured


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
