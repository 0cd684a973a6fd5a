"""What a HuggingFace directory says of its text: tokens, template, stops.

    tokenizer.json                               the tokenizer
    tokenizer_config.json                        its special tokens by role
    chat_template.jinja, or in tokenizer_config  the chat template, if any
    generation_config.json, or config.json       the tokens that end a turn

What the config says goes before what the directory says.
"""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from posttrain import schema
from posttrain.chat import templates, tokenizers

_SPECIAL = (
  'bos_token',
  'eos_token',
  'unk_token',
  'sep_token',
  'pad_token',
  'cls_token',
  'mask_token',
)
_MARK = '\uf8ffanswer\uf8ff'


@dataclasses.dataclass(frozen=True)
class Text:
  """What a renderer is made of."""

  tokenizer: schema.Tokenizer  # a file, with eos and pad told
  template: str | None  # None = the built-in one
  stop_ids: tuple[int, ...] = ()  # besides eos
  variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def resolve(cfg: schema.Tokenizer) -> Text:
  """Finds what the config and, if it names one, the directory say.

  Eos is, of the tokens that the directory lets a turn end with, the one with
  which its template closes an assistant turn; without a template, its
  eos_token.

  Raises:
    ValueError: a file is missing or has another form; names it.
  """
  variables = json.loads(cfg.template_variables)
  template = None
  if cfg.chat_template is not None:
    template = _template_file(cfg.chat_template)
  folder = cfg.path and pathlib.Path(cfg.path).expanduser()
  if not folder or not folder.is_dir():
    _check_read(template, variables)
    return Text(cfg, template, (), variables)
  file = folder / 'tokenizer.json'
  if not file.is_file():
    raise ValueError(
      f'config.tokenizer.path must hold a tokenizer.json: got {cfg.path!r}, '
      'which has none (other formats are not read)'
    )
  about = _json(folder / 'tokenizer_config.json')
  special = _special(folder / 'tokenizer_config.json', about)
  template = template or _template(folder, about)
  _check_read(template, variables)
  variables = {**special, **variables}
  stops = stop_ids(folder)
  eos, pad = cfg.eos, cfg.pad
  if eos is None:
    eos = _closing(template, variables, file, stops)
  if pad is None and special.get('pad_token') != eos:
    pad = special.get('pad_token')
  told = dataclasses.replace(cfg, path=str(file), eos=eos, pad=pad)
  return Text(told, template, stops, variables)


def write(renderer, folder: str | pathlib.Path) -> None:
  """Writes what makes a directory speak as a renderer does.

  A directory that does so already is left as it is. Variables of the template
  are set at its head, but for the day: other tools have a clock.

  Args:
    renderer: a `renderer.Renderer`.
    folder: an existing one.
  """
  folder, tokenizer = pathlib.Path(folder), renderer.tokenizer
  variables = renderer.variables
  file = folder / 'tokenizer.json'
  if file.is_file() and file.read_bytes() == tokenizer.content:
    found = resolve(schema.Tokenizer(path=str(folder)))
    if renderer.template is not None and (
      (found.template, found.tokenizer.eos, dict(found.variables))
      == (renderer.template, tokenizer.eos, dict(variables))
    ):
      return
  given = {k: v for k, v in variables.items() if k not in (*_SPECIAL, 'today')}
  template = renderer.template
  if template is None:  # its bos is what the tokenizer begins a text with
    template = templates.BUILT_IN_JINJA
    given = {'bos_token': tokenizer.bos, 'eos_token': tokenizer.eos}
  head = ''.join(
    f'{{% set {name} = {_literal(value)} %}}\n' for name, value in given.items()
  )
  file.write_bytes(tokenizer.content)
  (folder / 'chat_template.jinja').write_text(head + template)
  pad = tokenizer.text(tokenizer.pad_id)
  pad = {'pad_token': pad} if tokenizer.special_id(pad) is not None else {}
  _update(
    folder / 'tokenizer_config.json',
    {
      'tokenizer_class': 'PreTrainedTokenizerFast',
      **_json(folder / 'tokenizer_config.json'),
      **pad,
      'bos_token': variables.get('bos_token', tokenizer.bos) or None,
      'eos_token': variables.get('eos_token', tokenizer.eos),
      'chat_template': head + template,
    },
  )
  _update(
    folder / 'generation_config.json', {'eos_token_id': list(renderer.stop_ids)}
  )


def _update(path: pathlib.Path, values: dict[str, Any]) -> None:
  path.write_text(json.dumps({**_json(path), **values}, indent=2))


def _check_read(template: str | None, variables: Mapping[str, Any]) -> None:
  """Refuses variables that a template does not look at."""
  reads = set()
  if template is not None:
    reads = set(templates.Jinja(template, {}).reads)
  reads |= {'today'} if 'strftime_now' in reads else set()
  for name in variables.keys() - reads:
    raise ValueError(
      'config.tokenizer.template_variables must be some that the chat '
      f'template reads: got {name!r}, expected some of {sorted(reads)}'
    )


def _literal(value: Any) -> str:
  """A JSON value as Jinja writes it."""
  return 'none' if value is None else json.dumps(value, ensure_ascii=False)


def check(folder: str, tokenizer: tokenizers.Tokenizer) -> None:
  """Refuses a directory whose tokens are others; one without says nothing.

  Raises:
    ValueError: its tokenizer.json is another file.
  """
  file = pathlib.Path(folder) / 'tokenizer.json'
  if not file.is_file():
    return
  digest = hashlib.sha256(file.read_bytes()).hexdigest()
  if digest != tokenizer.digest:
    raise ValueError(
      f'config.tokenizer.path must name the tokenizer of {folder}, whose '
      'tokens its weights know: it is another one; '
      f'--config.tokenizer.path={folder} takes it, and its template'
    )


def _closing(
  template: str | None,
  variables: Mapping[str, Any],
  file: pathlib.Path,
  stops: tuple[int, ...],
) -> str | None:
  """The token that closes an assistant turn; None if nothing is known.

  One of those that end a generation, if the template sets one behind an
  answer; else the first special token there (a base model may have a chat
  template, but end its texts with something else).
  """
  added = _json(file).get('added_tokens') or []
  ends = [x['content'] for x in added if x['id'] in stops]
  eos = variables.get('eos_token')
  ends = [*ends, eos] if eos else ends
  if template is None:
    return eos or next(iter(ends), None)
  question = {'role': 'user', 'content': 'question'}
  answer = {'role': 'assistant', 'content': _MARK}
  try:
    text = templates.Jinja(template, variables).text((question, answer))
  except ValueError:  # it says so again, to who renders
    return next(iter(ends), None)
  rest = text.partition(_MARK)[2]
  special = [x['content'] for x in added if x.get('special')]
  for known in (ends, special):
    found = {rest.index(x): x for x in known if x in rest}
    if found:
      return found[min(found)]
  return next(iter(ends), None)


def _template_file(name: str) -> str:
  path = pathlib.Path(name).expanduser()
  if not path.is_file():
    raise ValueError(
      'config.tokenizer.chat_template must name an existing file: got '
      f'{name!r}; None means that of the directory, or the built-in one'
    )
  return path.read_text()


def _template(folder: pathlib.Path, about: Mapping[str, Any]) -> str | None:
  file = folder / 'chat_template.jinja'
  if file.is_file():
    return file.read_text()
  found = _json(folder / 'chat_template.json').get('chat_template')
  found = found or about.get('chat_template')
  if not isinstance(found, list):
    return found
  named = {entry['name']: entry['template'] for entry in found}
  if 'default' not in named:
    raise ValueError(
      f'{folder}/tokenizer_config.json must have a chat template named '
      f"'default': got {sorted(named)}; set config.tokenizer.chat_template"
    )
  return named['default']


def stop_ids(folder: str | pathlib.Path) -> tuple[int, ...]:
  """What generation may end with: nothing known is ()."""
  for name in ('generation_config.json', 'config.json'):
    path = pathlib.Path(folder) / name
    found = _json(path).get('eos_token_id')
    if found is None:
      continue
    ids = found if isinstance(found, list) else [found]
    if not all(type(i) is int and i >= 0 for i in ids):
      raise ValueError(
        f'{path}: eos_token_id must be a token id, or a list of them: got '
        f'{found!r}'
      )
    return tuple(ids)
  return ()


def _special(path: pathlib.Path, about: Mapping[str, Any]) -> dict[str, str]:
  """Special tokens by their roles."""
  found = {}
  for role in _SPECIAL:
    value = about.get(role)
    value = value.get('content') if isinstance(value, Mapping) else value
    if value is not None and not isinstance(value, str):
      raise ValueError(f'{path}: {role} must be a text: got {about[role]!r}')
    found |= {role: value} if value else {}
  return found


def _json(path: pathlib.Path) -> dict[str, Any]:
  """The object in a file; {} where there is none."""
  if not path.is_file():
    return {}
  try:
    found = json.loads(path.read_text())
  except json.JSONDecodeError as error:
    raise ValueError(f'{path} must be JSON: {error}') from error
  if not isinstance(found, dict):
    raise ValueError(f'{path} must hold a JSON object: got {found!r:.60}')
  return found
