"""Text settings of a HuggingFace directory: tokenizer, template, stop tokens.

    tokenizer.json                               the tokenizer
    tokenizer_config.json                        its special tokens by role
    chat_template.jinja, or in tokenizer_config  the chat template, if any
    generation_config.json, or config.json       the tokens that end a turn

The run's config overrides the directory.
"""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any, Protocol

from posttrain import schema
from posttrain.chat import templates, tokenizers
from posttrain.util import disk

_SPECIAL = (
  'bos_token',
  'eos_token',
  'unk_token',
  'sep_token',
  'pad_token',
  'cls_token',
  'mask_token',
)
# What to do about a directory without a tokenizer.json, for errors.
NO_TOKENIZER = (
  'AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) of the package '
  'transformers writes one from other formats; a directory without any needs '
  'the files of the model that it was made from'
)
_MARK = '\uf8ffanswer\uf8ff'


@dataclasses.dataclass(frozen=True)
class TextSettings:
  """The arguments of a renderer."""

  tokenizer: schema.Tokenizer  # names a file, with eos and pad resolved
  template: str | None  # None = the built-in one
  stop_ids: tuple[int, ...] = ()  # besides eos
  variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def resolve(cfg: schema.Tokenizer) -> TextSettings:
  """Reads the settings of the config and of the directory that it may name.

  Eos is the one of the directory's stop tokens with which its template closes
  an assistant turn; without a template, the directory's eos_token.

  Raises:
    ValueError: a file is missing or has another form; names it.
  """
  variables = disk.parse_json(
    cfg.template_variables, 'config.tokenizer.template_variables'
  )
  template = None
  if cfg.chat_template is not None:
    path = pathlib.Path(cfg.chat_template).expanduser()
    if not path.is_file():
      raise ValueError(
        'config.tokenizer.chat_template must name an existing file: got '
        f"{cfg.chat_template!r}; None means the directory's template, or the "
        'built-in one'
      )
    template = _text(path)
  folder = cfg.path and pathlib.Path(cfg.path).expanduser()
  if not folder or not folder.is_dir():
    _check_read(template, variables)
    return TextSettings(cfg, template, (), variables)
  file = folder / 'tokenizer.json'
  if not file.is_file():
    raise ValueError(
      f'config.tokenizer.path must hold a tokenizer.json: got {cfg.path!r}, '
      f'which has none (other formats are not read); {NO_TOKENIZER}'
    )
  metadata = _json(folder / 'tokenizer_config.json')
  special = _special(folder / 'tokenizer_config.json', metadata)
  template = template or _template(folder, metadata)
  _check_read(template, variables)
  variables = {**special, **variables}
  stops = stop_ids(folder)
  eos, pad = cfg.eos, cfg.pad
  if eos is None:
    eos = _closing(template, variables, file, stops)
  if pad is None and special.get('pad_token') != eos:
    pad = special.get('pad_token')
  tokenizer = dataclasses.replace(cfg, path=str(file), eos=eos, pad=pad)
  return TextSettings(tokenizer, template, stops, variables)


class Renderer(Protocol):
  """The attributes of `rendering.Renderer` that `write` reads."""

  tokenizer: tokenizers.Tokenizer
  template: str | None
  stop_ids: tuple[int, ...]
  variables: Mapping[str, Any]


def write(renderer: Renderer, folder: str | pathlib.Path) -> None:
  """Writes the files by which other tools render as a renderer does.

  Leaves a directory that has equivalent files unchanged. Sets the template's
  variables in its first lines, except `today`: other tools have a clock.

  Args:
    renderer: the renderer.
    folder: an existing folder.
  """
  folder, tokenizer = pathlib.Path(folder), renderer.tokenizer
  variables = renderer.variables
  file = folder / 'tokenizer.json'
  if file.is_file() and file.read_bytes() == tokenizer.content:
    old = resolve(schema.Tokenizer(path=str(folder)))
    if renderer.template is not None and (
      (old.template, old.tokenizer.eos, dict(old.variables))
      == (renderer.template, tokenizer.eos, dict(variables))
    ):
      return
  values = {k: v for k, v in variables.items() if k not in (*_SPECIAL, 'today')}
  template = renderer.template
  if template is None:  # its bos is the tokenizer's
    template = templates.BUILT_IN_JINJA
    values = {'bos_token': tokenizer.bos, 'eos_token': tokenizer.eos}
  head = ''
  for name, value in values.items():
    literal = 'none' if value is None else json.dumps(value, ensure_ascii=False)
    head += f'{{% set {name} = {literal} %}}\n'
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
  """Raises ValueError for a variable that the template does not read."""
  reads = set()
  if template is not None:
    reads = set(templates.Jinja(template, {}).reads)
  reads |= {'today'} if 'strftime_now' in reads else set()
  for name in variables.keys() - reads:
    raise ValueError(
      'config.tokenizer.template_variables must be some that the chat '
      f'template reads: got {name!r:.200}, expected some of '
      f'{sorted(reads)!r:.200}'
    )


def check(folder: str, tokenizer: tokenizers.Tokenizer) -> None:
  """Checks a directory's tokenizer.json, if it has one, against a tokenizer.

  Raises:
    ValueError: the files differ.
  """
  file = pathlib.Path(folder) / 'tokenizer.json'
  if not file.is_file():
    return
  digest = hashlib.sha256(file.read_bytes()).hexdigest()
  if digest != tokenizer.digest:
    raise ValueError(
      f'config.tokenizer.path must name the tokenizer of {folder}, with which '
      'its weights were trained: got another one; '
      f'--config.tokenizer.path={folder} sets it, and its template'
    )


def _closing(
  template: str | None,
  variables: Mapping[str, Any],
  file: pathlib.Path,
  stops: tuple[int, ...],
) -> str | None:
  """Returns the token that closes an assistant turn; None if unknown.

  It is a stop token, if the template has one after an answer; otherwise the
  first special token there (a base model may have a chat template, but end its
  texts with another token).
  """
  added = disk.read_json_object(file).get('added_tokens') or []
  ends = [token['content'] for token in added if token['id'] in stops]
  eos = variables.get('eos_token')
  ends = [*ends, eos] if eos else ends
  if template is None:
    return eos or next(iter(ends), None)
  question = {'role': 'user', 'content': 'question'}
  answer = {'role': 'assistant', 'content': _MARK}
  try:
    text = templates.Jinja(template, variables).text((question, answer))
  except ValueError:  # rendering will raise it again
    return next(iter(ends), None)
  rest = text.partition(_MARK)[2]
  special = [token['content'] for token in added if token['special']]
  for candidates in (ends, special):
    positions = {rest.index(x): x for x in candidates if x in rest}
    if positions:
      return positions[min(positions)]
  return next(iter(ends), None)


def _template(folder: pathlib.Path, metadata: Mapping[str, Any]) -> str | None:
  file = folder / 'chat_template.jinja'
  if file.is_file():
    return _text(file)
  template = _json(folder / 'chat_template.json').get('chat_template')
  template = template or metadata.get('chat_template')
  if isinstance(template, list):
    by_name = {
      entry['name']: entry.get('template')
      for entry in template
      if isinstance(entry, dict) and isinstance(entry.get('name'), str)
    }
    if 'default' not in by_name:
      raise ValueError(
        f'{folder}/tokenizer_config.json must have a chat template named '
        f"'default': got {sorted(by_name)!r:.200}; set "
        'config.tokenizer.chat_template'
      )
    template = by_name['default']
  if template is not None and not isinstance(template, str):
    raise ValueError(
      f'{folder}/tokenizer_config.json: chat_template must be a text: got '
      f'{template!r:.200}'
    )
  return template


def stop_ids(folder: str | pathlib.Path) -> tuple[int, ...]:
  """Returns the stop tokens of a directory; () if unknown."""
  for name in ('generation_config.json', 'config.json'):
    path = pathlib.Path(folder) / name
    value = _json(path).get('eos_token_id')
    if value is None:
      continue
    ids = value if isinstance(value, list) else [value]
    if not all(type(i) is int and 0 <= i < 2**31 for i in ids):
      raise ValueError(
        f'{path}: eos_token_id must be a token id, or a list of them: got '
        f'{value!r:.200}'
      )
    return tuple(ids)
  return ()


def _special(path: pathlib.Path, metadata: Mapping[str, Any]) -> dict[str, str]:
  """Returns special tokens by role, such as eos_token."""
  by_role = {}
  for role in _SPECIAL:
    value = metadata.get(role)
    value = value.get('content') if isinstance(value, Mapping) else value
    if value is not None and not isinstance(value, str):
      raise ValueError(
        f'{path}: {role} must be a text: got {metadata[role]!r:.200}'
      )
    by_role |= {role: value} if value else {}
  return by_role


def _text(path: pathlib.Path) -> str:
  """Returns the text of a template's file."""
  try:
    return path.read_text('utf-8')
  except UnicodeDecodeError as error:
    raise ValueError(
      f'config.tokenizer.chat_template must be a text file: got {path}; {error}'
    ) from error


def _json(path: pathlib.Path) -> dict[str, Any]:
  """Reads the JSON object in a file; {} if there is no file."""
  return disk.read_json_object(path) if path.is_file() else {}
