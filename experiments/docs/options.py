"""The page of all options, from the dataclasses of the schema.

1. `meanings` reads the comment above each field.
2. `sections` walks from `schema.Run` to every class, with its dotted path.
3. `page` writes a table per class.
"""

import ast
import dataclasses
import inspect
import re
import sys
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any

from posttrain import schema
from posttrain.schema import bounds

HEAD = """# Options

Every key of a config: its type, its default, what it means and which values
are allowed. A key is changed on the command line by its dotted path, with the
stage's name for `STAGE` and the environment's for `ENV`, as
`--config.grpo.optim.lr=1e-4`; a node with a `type` by a name or a JSON object,
which replaces the whole node
(`--config.grpo.envs.sums.algorithm='{"type": "rloo", "kl_beta": 0.01}'`).
`--config.NAME=None` sets None. Requirements that span several options are
checked before anything is compiled, and the error names the key and the values
it allows.

This page is generated from the comments in `posttrain/schema/`; see
[runs.md](runs.md) for how configs are used.

## The keys that one changes first

| key | meaning |
|---|---|
| `seed` | of weights, tasks and sampling |
| `STAGE.steps` | batches to train on |
| `STAGE.optim.lr` | peak learning rate |
| `STAGE.optim.warmup_steps` | updates until it is reached |
| `STAGE.batch.prompts_per_step` | tasks, rows or pairs in a step |
| `STAGE.batch.row_tokens` | longest sample that trains |
| `STAGE.batch.micro_batch_tokens` | smaller = less memory |
| `STAGE.updates_per_rollout` | optimizer updates per batch |
| `STAGE.lora.rank` | a low-rank correction instead of all weights |
| `STAGE.envs.ENV.group_size` | answers to each question |
| `STAGE.envs.ENV.sampler.max_tokens` | longest answer in training |
| `STAGE.envs.ENV.algorithm.kl_beta` | weight of the KL penalty |
| `STAGE.rollout.slots` | sequences that are decoded together |
| `STAGE.eval.every` | steps between evaluations |
| `STAGE.eval.prompts` | held-out tasks |
| `STAGE.eval.max_tokens` | longest answer in evaluation |
| `STAGE.eval.best` | the metric that chooses the weights |
| `model.dtype` | `float32` or `bfloat16` |
| `model.remat` | `block` = less memory, more time |
| `mesh.fsdp` | devices that share weights and batch |
| `checkpoint.every` | steps between saves |
"""


@dataclasses.dataclass(frozen=True)
class Section:
  """A class of options, and where a config has it."""

  options: type
  path: str  # '' = the config itself
  kind: str | None  # the value of `type`, of a node of a union


def sections() -> list[Section]:
  """Returns the classes in the order of the page, each once."""
  seen: dict[type, Section] = {}

  def visit(options: type, path: str, kind: str | None) -> None:
    if options in seen:
      return
    seen[options] = Section(options, path, kind)
    for field, hint in _hints(options).items():
      name = f'{path}.{field}' if path else field
      for child, suffix in _nodes(hint, field):
        place = f'{name}.{suffix}' if suffix else name
        # A stage's node has its own name.
        place = place.removeprefix('stages.')
        visit(child, place, _kind(child))

  visit(schema.Run, '', None)
  return list(seen.values())


# Field -> what the reader's name of one of its nodes stands for, else NAME.
_CHOSEN = {'envs': 'ENV', 'roles': 'ROLE', 'stages': 'STAGE'}


def _nodes(hint: Any, field: str) -> Iterator[tuple[type, str]]:
  """Yields the dataclasses of an annotation, with a key where it is a dict."""
  if dataclasses.is_dataclass(hint):
    assert isinstance(hint, type)
    yield hint, ''
  elif typing.get_origin(hint) is dict:
    for child in typing.get_args(hint):
      for node, _ in _nodes(child, field):
        yield node, _CHOSEN.get(field, 'NAME')
  elif isinstance(hint, types.UnionType):
    for child in typing.get_args(hint):
      yield from _nodes(child, field)


def _hints(options: type) -> dict[str, Any]:
  hints = typing.get_type_hints(options)
  return {f.name: hints[f.name] for f in dataclasses.fields(options)}


def _kind(options: type) -> str | None:
  for field in dataclasses.fields(options):
    if field.name == 'type':
      return field.default
  return None


def meanings(module: types.ModuleType) -> dict[tuple[str, str], str]:
  """Returns (class, field) -> the comment above the field, on one line."""
  source = inspect.getsource(module)
  lines, texts = source.splitlines(), {}
  for node in ast.parse(source).body:
    for item in getattr(node, 'body', ()):
      if isinstance(item, ast.AnnAssign) and isinstance(node, ast.ClassDef):
        comment, row = [], item.lineno - 2
        while (text := lines[row].strip()).startswith('#'):
          comment.insert(0, text.removeprefix('#').strip())
          row -= 1
        texts[node.name, ast.unparse(item.target)] = ' '.join(comment)
  return texts


def page() -> str:
  """Returns the page, as Markdown."""
  parts, texts = [HEAD], {}
  for section in sections():
    for owner in section.options.__mro__[:-1]:
      texts |= meanings(sys.modules[owner.__module__])
  for section in sections():
    kind = f', type `{section.kind}`' if section.kind else ''
    parts.append(f'## `{section.path}`{kind}' if section.path else '## The run')
    summary = (inspect.getdoc(section.options) or '').split('\n\n')[0]
    parts += [summary.replace('\n', ' '), _table(section.options, texts)]
  return '\n\n'.join(part.strip() for part in parts) + '\n'


def _table(options: type, texts: dict[tuple[str, str], str]) -> str:
  rows = ['| key | type | default | meaning |', '|---|---|---|---|']
  owners = [x.__name__ for x in options.__mro__]
  hints = typing.get_type_hints(options, include_extras=True)
  for field in dataclasses.fields(options):
    if field.name == 'type':
      continue
    meaning = next(filter(None, (texts.get((x, field.name)) for x in owners)))
    hint = hints[field.name]
    cells = f'`{field.name}`', _type(hint), _default(field), _prose(meaning)
    rows.append(f'| {" | ".join(cells)} |')
  return '\n'.join(rows) if len(rows) > 2 else 'No options.'


def _prose(text: str) -> str:
  """Escapes what Markdown would read as markup, outside of code."""
  parts = text.split('`')
  parts[::2] = [re.sub(r'([|<_])', r'\\\1', part) for part in parts[::2]]
  return '`'.join(parts)


def _type(hint: Any) -> str:
  if dataclasses.is_dataclass(hint):
    return 'node'
  if typing.get_origin(hint) is Annotated:
    marks = [x.must.removeprefix('be ') for x in bounds.rules(hint)]
    return _prose(', '.join([_type(typing.get_args(hint)[0]), *marks]))
  if isinstance(hint, types.UnionType):
    names = [_type(child) for child in typing.get_args(hint)]
    return ' or '.join(dict.fromkeys(names))
  origin, args = typing.get_origin(hint), typing.get_args(hint)
  if origin is tuple:
    return f'tuple of {_type(args[0])}'
  if origin is dict:
    return f'dict of {_type(args[1])}'
  names = {types.NoneType: 'None', Any: 'any'}
  return names.get(hint) or hint.__name__


def _default(field: dataclasses.Field) -> str:
  value = field.default
  if value is dataclasses.MISSING:
    assert field.default_factory is not dataclasses.MISSING
    value = field.default_factory()
  if isinstance(value, dict) and value:
    return f'`{sorted(value)[0]}`'
  if dataclasses.is_dataclass(value):
    kind = _kind(type(value))  # type: ignore[arg-type]
    return f'`{kind}`' if kind else 'its defaults'
  text = repr(value).replace('|', '\\|').replace('\n', ' ')
  return f'`{text}`'
