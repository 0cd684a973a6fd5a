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
    'bos_token', 'eos_token', 'unk_token', 'sep_token', 'pad_token',
    'cls_token', 'mask_token',
)  # fmt: skip
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
    return Text(cfg, template, (), variables)
  file = folder / 'tokenizer.json'
  if not file.is_file():
    raise ValueError(
        f'config.tokenizer.path must hold a tokenizer.json: got {cfg.path!r}, '
        'which has none (other formats are not read)'
    )
  about = _json(folder / 'tokenizer_config.json')
  special = {k: _token(about[k]) for k in _SPECIAL if about.get(k)}
  template = template or _template(folder, about)
  variables = {**special, **variables}
  stops = _stop_ids(folder)
  eos, pad = cfg.eos, cfg.pad
  if eos is None:
    eos = _closing(template, variables, _texts(file, stops))
  if pad is None and special.get('pad_token') != eos:
    pad = special.get('pad_token')
  told = dataclasses.replace(cfg, path=str(file), eos=eos, pad=pad)
  return Text(told, template, stops, variables)


def write(renderer, folder: str | pathlib.Path) -> None:
  """Writes what makes a directory speak as a renderer does.

  A directory that has the same tokens, template and stops already is left as
  it is.

  Args:
    renderer: a `renderer.Renderer`.
    folder: an existing one.
  """
  folder, tokenizer = pathlib.Path(folder), renderer.tokenizer
  template = renderer.template or templates.BUILT_IN_JINJA
  file = folder / 'tokenizer.json'
  if file.is_file() and file.read_bytes() == tokenizer.content:
    found = resolve(schema.Tokenizer(path=str(folder)))
    if found.template == renderer.template and (
        found.tokenizer.eos == tokenizer.eos
    ):
      return
  file.write_bytes(tokenizer.content)
  (folder / 'chat_template.jinja').write_text(template)
  about = _json(folder / 'tokenizer_config.json')
  about = {'tokenizer_class': 'PreTrainedTokenizerFast', **about} | {
      'eos_token': tokenizer.eos, 'pad_token': tokenizer.text(tokenizer.pad_id),
      'bos_token': tokenizer.bos or None,
  }  # fmt: skip
  (folder / 'tokenizer_config.json').write_text(json.dumps(about, indent=2))
  stops = _json(folder / 'generation_config.json') | {
      'eos_token_id': list(renderer.stop_ids), 'pad_token_id': tokenizer.pad_id
  }
  (folder / 'generation_config.json').write_text(json.dumps(stops, indent=2))


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


def _closing(template, variables, stops: list[str]) -> str | None:
  """The token that closes an assistant turn; None if that is not known."""
  eos = variables.get('eos_token')
  if template is None:
    return eos or next(iter(stops), None)
  question = {'role': 'user', 'content': 'question'}
  answer = {'role': 'assistant', 'content': _MARK}
  text = templates.Jinja(template, variables).text((question, answer))
  rest = text.partition(_MARK)[2]
  stops = [stop for stop in (*stops, eos) if stop and stop in rest]
  found = {rest.index(stop): stop for stop in stops}
  return found[min(found)] if found else None


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


def _stop_ids(folder: pathlib.Path) -> tuple[int, ...]:
  """What generation may end with: nothing known is ()."""
  for name in ('generation_config.json', 'config.json'):
    found = _json(folder / name).get('eos_token_id')
    if found is not None:
      return tuple(found) if isinstance(found, list) else (found,)
  return ()


def _texts(file: pathlib.Path, ids: tuple[int, ...]) -> list[str]:
  """Added tokens by their ids, as the tokenizer file spells them."""
  added = {x['id']: x['content'] for x in _json(file)['added_tokens']}
  return [added[i] for i in ids if i in added]


def _token(value: Any) -> str:
  return value['content'] if isinstance(value, Mapping) else value


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
