"""Messages -> token ids, with role, content and sampled attribution.

1. A template renders a conversation as text; `templates.pieces` splits it by
   role, content and scaffold.
2. Each piece is tokenized once and on its own: later turns cannot change
   earlier ids, whatever the tokenizer merges.
3. A template may render earlier turns differently once others follow (those of
   reasoning models drop thoughts). Then `extend` raises `Rewritten`, and the
   conversation continues as a new sample.

A HuggingFace directory is read (`resolve`) and written (`write`) too; the run's
config overrides it:

    tokenizer.json                               the tokenizer
    tokenizer_config.json                        its special tokens by role
    chat_template.jinja, or in tokenizer_config  the chat template, if any
    generation_config.json, or config.json       the tokens that end a turn

Axes: T tokens.
"""

import contextlib
import copy
import dataclasses
import functools
import hashlib
import json
import logging
import pathlib
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np

from posttrain import schema, types
from posttrain.chat import templates, tokenizers, tool_calls
from posttrain.util import disk, errors, watchdog

_SPECIAL = (
  'bos_token eos_token unk_token sep_token pad_token cls_token mask_token'
).split()
# What to do about a directory without a tokenizer.json, for errors.
NO_TOKENIZER = (
  'copy tokenizer.json and tokenizer_config.json from the directory of the '
  'model that it was made from; where that has a tokenizer.model or vocab.json '
  'alone, AutoTokenizer of the package transformers reads it and saves these '
  'files'
)
# Fields of messages whose text would be missing where nothing reads them.
MEANINGS = frozenset(
  'tool_calls function_call reasoning_content reasoning thinking refusal '
  'images image audio videos train training loss thought tools'.split()
)
_MOST_TOOLS = 64  # sets of tools whose renderers are kept
# Other names of roles, most of them those of ShareGPT.
_ROLES = {
  'human': 'user',
  'gpt': 'assistant',
  'observation': 'tool',
  'developer': 'system',
}


class Rewritten(ValueError):
  """A template that renders earlier turns differently after later ones."""


@dataclasses.dataclass(frozen=True)
class Rendered:
  """Token ids of a conversation; every array is [T]."""

  ids: np.ndarray  # i32
  roles: np.ndarray  # i8, index into types.ROLES
  is_content: np.ndarray  # bool, False on template scaffold
  sampled: np.ndarray  # bool, tokens sampled by the policy, or demonstrated
  messages: np.ndarray  # i32, index of the message; -1 = sampled, or a header
  text: str = ''  # the text of the ids, without a completion at the end
  # Whether the last assistant turn is not closed: the ids end in a generation
  # prompt, or in a completion after one.
  open: bool = False
  # The content that an open turn continues, and whether the turn's header opens
  # a thought.
  given: str = ''
  thinking: bool = False

  def __len__(self) -> int:
    return len(self.ids)

  @property
  def ends_in_completion(self) -> bool:
    """Whether sampled ids follow the generation prompt."""
    return self.open and len(self) > 0 and bool(self.sampled[-1])


EMPTY = Rendered(
  *(np.zeros(0, x) for x in (np.int32, np.int8, bool, bool, np.int32))
)


@functools.cache  # once per message
def note(text: str) -> None:
  """Logs what was read in a way that a user may not expect."""
  logging.getLogger('absl').warning('%s', text)


def normalize(
  messages: Sequence[Any], place: str = 'messages'
) -> types.Messages:
  """Returns messages in the one form that templates get.

  The forms of OpenAI's API become that of templates: `arguments` of calls as
  JSON text are an object, a content is '' beside calls where it is null or
  absent, a list of text parts is their text, and the role developer is system;
  `from` and `value`, as in ShareGPT, are role and content.
  Fields that are null, and an empty list of calls, are left out.

  Args:
    messages: mappings with a role of `types.ROLES` and a content.
    place: their name in errors, such as 'rows.jsonl:3: messages'.

  Raises:
    ValueError: a message has another form.
  """
  return tuple(_normal(x, f'{place}[{i}]') for i, x in enumerate(messages))


def _normal(message: Any, place: str) -> types.Message:
  if not isinstance(message, Mapping):
    raise ValueError(
      f'{place} must have a role and a content: got {message!r:.200}'
    )
  message = {key: x for key, x in message.items() if x is not None}
  if {'from', 'value'} <= message.keys() and 'role' not in message:
    message |= {'role': message.pop('from'), 'content': message.pop('value')}
    note('`from` and `value` of messages are read as role and content')
  role, content = message.get('role'), message.get('content')
  role = _ROLES.get(str(role), role)
  if role not in types.ROLES:
    raise ValueError(
      f'{place}.role must be one of {types.ROLES}, where calls are an '
      f"assistant's tool_calls: got {role!r:.200}"
    )
  calls = message.pop('tool_calls', None)
  if calls:
    calls = calls if isinstance(calls, list | tuple) else [calls]
    message['tool_calls'] = [
      _normal_call(x, f'{place}.tool_calls[{i}]') for i, x in enumerate(calls)
    ]
    content = '' if content is None else content
  if isinstance(content, list | tuple):
    with contextlib.suppress(AttributeError, TypeError, KeyError):
      if all('text' in part.get('type', 'text') for part in content):
        content = ''.join(part['text'] for part in content)
  if not isinstance(content, str):
    raise ValueError(
      f'{place}.content must be a string, or parts of text: got '
      f'{content!r:.200}'
    )
  if message.get('weight', 0) not in (0, role == 'assistant'):
    raise ValueError(
      f'{place}.weight must be 0, or 1 in a turn of the assistant: got '
      f'{message["weight"]!r:.200}'
    )
  return {**message, 'role': role, 'content': content}


def _normal_call(call: Any, place: str) -> Mapping[str, Any]:
  """Returns a call whose arguments are an object."""
  try:
    function = dict(call.get('function', call))
    arguments = function.get('arguments') or {}
    if isinstance(arguments, str):
      arguments = disk.parse_json(arguments, 'arguments')
    function |= {'arguments': dict(arguments), 'name': function['name']}
  except (AttributeError, KeyError, TypeError, ValueError):
    raise ValueError(
      f'{place} must be {{"type": "function", "function": {{"name": ..., '
      f'"arguments": {{...}}}}}}: got {call!r:.200}'
    ) from None
  return {**call, 'function': function} if 'function' in call else function


def load(cfg: schema.Tokenizer) -> 'Renderer':
  """Builds the renderer of the config.

  Raises:
    ValueError: see `tokenizers.load` and `resolve`.
  """
  tokenizer, *settings = resolve(cfg)
  return Renderer(tokenizers.load(tokenizer), *settings)


def check_variables(
  variables: Mapping[str, Any],
  reads: Set[str],
  place: str = 'chat_template_kwargs',
) -> None:
  """Raises ValueError for variables that the template does not read as such."""
  reads = reads - {'messages', 'tools', 'add_generation_prompt'}  # of every row
  if unread := variables.keys() - reads:
    raise ValueError(
      f'{place} must be some that the chat template reads: got '
      f'{sorted(unread)!r:.200}, expected some of {sorted(reads)!r:.200}'
    )


def check_fingerprint(ours: str, theirs: str, what: str, where: str) -> None:
  """Checks that a renderer is that of a checkpoint.

  Args:
    ours: the renderer's fingerprint.
    theirs: the checkpoint's fingerprint.
    what: name of the renderer in the error.
    where: name of the checkpoint in the error.

  Raises:
    ValueError: the fingerprints differ.
  """
  if ours != theirs:
    raise ValueError(
      f'{what} must be what {where} was trained with, template included: '
      f'its fingerprint is {ours[:12]}, expected {theirs[:12]}, so tokens or '
      'template differ; use the same ones, or another checkpoint'
    )


class Renderer:
  """A tokenizer and a template, which render conversations."""

  def __init__(
    self,
    tokenizer: tokenizers.Tokenizer,
    template: str | None = None,
    stop_ids: Sequence[int] = (),
    variables: Mapping[str, Any] | None = None,
  ):
    """Compiles the template.

    Args:
      tokenizer: its eos ends assistant turns.
      template: source of a Jinja chat template; None = the built-in one.
      stop_ids: tokens that end a turn besides eos.
      variables: variables of a Jinja template, besides bos and eos.
    """
    self.tokenizer, self.template = tokenizer, template
    self.variables = variables or {}
    self.stop_ids = tuple(dict.fromkeys((tokenizer.eos_id, *stop_ids)))
    names = {'bos_token': tokenizer.bos, 'eos_token': tokenizer.eos}
    # sha256, hex; equal fingerprints render equal messages to equal ids.
    parts = [tokenizer.fingerprint, 'jinja', template]
    if template is None:
      parts[1:] = 'built-in', templates.BUILT_IN
    if self.stop_ids[1:] or self.variables:
      variables = dict(sorted(self.variables.items()))
      parts += [list(self.stop_ids[1:]), variables]
    self.fingerprint = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    self.embedding_rows = tokenizer.vocab_size
    # The last whole conversation and its ids: a group has one prompt.
    self._last: tuple[tuple[str, bool, bool], Rendered] | None = None
    # How calls are written after `with_tools`, and its renderers.
    self.style: tool_calls.Style | None = None
    self._with_tools: dict[str, Renderer] = {}
    self._stops = tuple(filter(None, map(tokenizer.text, self.stop_ids)))
    self._template: templates.Template = (
      templates.BuiltIn(tokenizer.bos, tokenizer.eos)
      if template is None
      else templates.Jinja(template, {**names, **self.variables})
    )
    # The fields of messages that are read.
    self.fields = {'role', 'content', *self._template.fields}

  def with_embedding_rows(self, rows: int) -> 'Renderer':
    """Returns a renderer for a model with so many embedding rows.

    A tokenizer may have more special tokens than the model (Gemma 3's text
    models have no row for images): messages with them are refused.

    Raises:
      ValueError: the rows do not cover the tokenizer's plain text.
    """
    needed = max(self.tokenizer.text_size, *(i + 1 for i in self.stop_ids))
    if rows < needed:
      raise ValueError(
        f'config.tokenizer.path must be that of the model: it has {needed} '
        f'tokens, but config.model.vocab_size={rows}; where it is not set, the '
        "tokenizer of the model's directory is used"
      )
    renderer = copy.copy(self)
    renderer.embedding_rows, renderer._last = rows, None
    renderer._with_tools = {}
    return renderer

  def of(self, task: Any) -> 'Renderer':
    """Returns the renderer of the `tools` and `variables` of a task or pair."""
    return self.with_tools(task.tools, task.variables)

  def with_tools(
    self,
    described: types.Tools | None,
    variables: Mapping[str, Any] | None = None,
  ) -> 'Renderer':
    """Returns a renderer whose template describes tools.

    Its `style` says how the policy calls them; its fingerprint is the same.

    Args:
      described: the tools; None = none.
      variables: further variables of the template, such as enable_thinking.

    Raises:
      ValueError: see `tool_calls.make_template`; or the template does not read
        a variable.
    """
    if described is None and not variables:
      return self
    key = repr((described, variables))
    renderer = self._with_tools.get(key)  # once: the server has threads
    if renderer is None:
      renderer = copy.copy(self)
      renderer._last = None
      if variables:
        check_variables(variables, self._template.reads)
        renderer._template = self._template.with_variables(variables)
      if described is not None:
        renderer._template, renderer.style = tool_calls.make_template(
          renderer._template, self.tokenizer.bos, self._stops, described
        )
      if len(self._with_tools) == _MOST_TOOLS:
        self._with_tools.clear()
      self._with_tools[key] = renderer
    return renderer

  def render(
    self, messages: Sequence[types.Message], **options: bool
  ) -> Rendered:
    """Renders a whole conversation; no token of it is `sampled`.

    Args:
      messages: the turns; roles of `types.ROLES`, contents of type str.
      **options: as of `extend`.

    Raises:
      ValueError: a message has another form, or the template raises an error.
    """
    return self.extend(EMPTY, (), messages, **options)

  def extend(
    self,
    rendered: Rendered,
    messages: Sequence[types.Message],
    new: Sequence[types.Message],
    *,
    add_generation_prompt: bool = False,
    continue_final_message: bool = True,
  ) -> Rendered:
    """Appends the ids of new messages; leaves the ids before unchanged.

    `extend(render(a), a, b) == render(a + b)`, also if `render(a)` ends in a
    generation prompt and b begins with the assistant's turn; unless the
    template rewrites a.

    Args:
      rendered: the ids of `messages`. If it ends in a completion (`append`),
        the last of `messages` is that assistant turn; it is closed first, with
        an unsampled eos if it was truncated.
      messages: the turns that `rendered` covers, in normal form.
      new: the turns to append.
      add_generation_prompt: whether to append the header of an assistant turn.
      continue_final_message: whether an assistant turn at the end of `new` is
        left open instead, so that it is continued; not one of white space.

    Raises:
      Rewritten: with `new`, the template renders `messages` differently.
      ValueError: as `render`.
    """
    messages, start = (*messages, *self.normalize(new)), len(messages)
    if rendered.open and not rendered.ends_in_completion and not new:
      return rendered
    key = None
    if rendered is EMPTY and not start:
      key = repr(messages), add_generation_prompt, continue_final_message
      last = self._last  # once: the server has threads
      if last and last[0] == key:
        return last[1]
    continued = (
      add_generation_prompt
      and continue_final_message
      and types.begins_turn(messages[start:])
    )
    prompt = add_generation_prompt and not continued
    text = self._template.text(messages, prompt)
    skip = self._covered(rendered, messages[:start], text)
    if skip is None:
      raise Rewritten(
        'config.tokenizer.chat_template must keep earlier turns as they '
        f'were: got {text!r:.200} for {len(messages)} messages, '
        f'expected it to begin with {rendered.text!r:.200}'
      )
    pieces = templates.pieces(
      self._template,
      messages,
      text,
      prompt=prompt,
      start=start,
      skip=skip,
      closed=not rendered.open,
    )
    given, header = '', pieces[-1].text
    if continued:  # without what follows the content
      text = text.removesuffix(''.join(piece.text for piece in pieces[-2:]))
      *_, (header, *_), (given, *_) = pieces = pieces[:-2]
    if '</think>' in header and given.lstrip().startswith(tool_calls.THOUGHT):
      # Templates put an empty thought before it, but not once it is closed.
      *before, last = messages
      closed = (*before, {**last, 'content': f'{given}</think>'})
      opened = self.extend(
        rendered, messages[:start], before[start:], add_generation_prompt=True
      )
      shown = opened.text + given
      if self._template.text(closed).startswith(shown):
        piece = templates.Piece(given, 'assistant', True, message=len(before))
        return self._encode(opened, [piece], shown, open=True, given=given)
    result = self._encode(
      rendered,
      pieces,
      text,
      open=add_generation_prompt,
      given=given,
      thinking=header.rfind(tool_calls.THOUGHT) > header.rfind('</think>'),
    )
    if key:
      self._last = key, result
    return result

  def append(self, rendered: Rendered, ids: Sequence[int]) -> Rendered:
    """Appends ids that were sampled after a generation prompt, verbatim."""
    assert rendered.open, 'sampled ids follow a generation prompt'
    ids = np.asarray(ids, np.int32)
    content = np.ones(len(ids), bool)
    for stop in self.stop_ids:  # few; `np.isin` takes ten times as long
      content &= ids != stop
    return _join(
      rendered,
      dataclasses.replace(
        rendered,
        ids=ids,
        roles=np.full(len(ids), types.ROLES.index('assistant'), np.int8),
        is_content=content,
        sampled=np.ones(len(ids), bool),
        messages=np.full(len(ids), -1, np.int32),
      ),
    )

  def demonstrate(
    self, messages: Sequence[types.Message], given: int = 0
  ) -> list[Rendered]:
    """Renders a demonstration, with the assistant turns marked as `sampled`.

    A turn is `sampled` from after its generation prompt up to and including its
    eos; one that continues the last given message, from after that; none whose
    `weight` is 0. If the template rewrites earlier turns, a new sample begins,
    in which the earlier turns are rendered anew and not `sampled`. Messages
    after the last such turn are left out.

    Args:
      messages: the conversation.
      given: number of leading messages that are not to be imitated.

    Returns:
      The samples; each assistant turn is `sampled` in exactly one.

    Raises:
      ValueError: as `render`; or the template opens an assistant turn with
        another header than its generation prompt, or closes it without a stop
        token.
    """
    samples, done, history = [EMPTY], 0, ()
    for index, message in enumerate(self.normalize(messages)):
      is_turn = message['role'] == 'assistant' and message.get('weight', 1)
      if index < given or not is_turn:
        history = (*history, message)
        continue
      options = {
        'add_generation_prompt': True,
        'continue_final_message': index == given,
      }
      try:
        opened = self.extend(
          samples[-1], history[:done], history[done:], **options
        )
      except Rewritten:
        samples.append(EMPTY)
        opened = self.render(history, **options)
      history = (
        add_turn(history, message) if index == given else (*history, message)
      )
      samples[-1] = self._append_turn(opened, history)
      done = len(history)
    return samples if done else []

  def normalize(
    self, messages: Sequence[Any], known: Sequence[str] | None = None
  ) -> types.Messages:
    """Returns normal messages; refuses fields that the template drops.

    Args:
      messages: as of the function `normalize`.
      known: names of fields that it may drop; None = all but `MEANINGS`.
    """
    messages = normalize(messages)
    for index, message in enumerate(messages):
      unread = message.keys() - self.fields
      for name in MEANINGS & unread if known is None else unread - {*known}:
        if message[name] not in ('', [], {}):
          raise ValueError(
            f'messages[{index}].{name} must be read by the chat template, '
            f'which drops it: got {errors.quote(message[name])}; write it as '
            'text in `content` and leave it out, or name the file of a '
            'template that reads it: config.tokenizer.chat_template=FILE'
          )
    return messages

  def _append_turn(
    self, opened: Rendered, messages: types.Messages
  ) -> Rendered:
    """Appends the last of the messages as if it were sampled after `opened`."""
    text, start = self._template.text(messages), len(opened.text)
    if not text.startswith(opened.text):
      raise ValueError(
        'config.tokenizer.chat_template must open an assistant turn with its '
        f'generation prompt: got {text!r:.200}, expected it to begin with '
        f'{opened.text!r:.200}; demonstrations need another template'
      )
    last = len(messages) - 1
    span = templates.span(self._template, messages, last, text)
    begin, end = (max(place, start) for place in span or (start, start))
    ends = [
      text.index(stop, end) + len(stop)
      for stop in self._stops
      if stop in text[end:]
    ]
    if not ends:
      raise ValueError(
        'config.tokenizer.chat_template must close an assistant turn with '
        f'config.tokenizer.eos: got {text[end:]!r:.200}, expected one of '
        f'{self._stops} in it'
      )
    after = min(ends)
    pieces = [
      templates.Piece(text[start:begin], 'assistant', sampled=True),
      templates.Piece(text[begin:end], 'assistant', True, sampled=True),
      templates.Piece(text[end:after], 'assistant', sampled=True),
      templates.Piece(text[after:], 'assistant'),
    ]
    return self._encode(opened, pieces, text)

  def _covered(
    self, rendered: Rendered, messages: types.Messages, text: str
  ) -> int | None:
    """Returns how much of the text the ids cover, None if it differs.

    Sampled ids cover their own text; a template may render it with other
    whitespace around it.
    """
    start, rest = len(rendered.text), text[len(rendered.text) :]
    if not text.startswith(rendered.text):
      return None
    if not rendered.ends_in_completion:
      return start
    content = messages[-1]['content'][len(rendered.given) :]
    space = len(rest) - len(rest.lstrip())
    for lead, completion in (
      (0, content),
      (0, content.strip()),
      (space, content.strip()),
    ):
      end = start + lead + len(completion)
      if not rest.startswith(completion, lead):
        continue
      if rendered.ids[-1] not in self.stop_ids:
        return end
      for stop in self._stops:
        if text.startswith(stop, end):
          return end + len(stop)
    return None

  def _encode(
    self,
    before: Rendered,
    pieces: Sequence[templates.Piece],
    text: str,
    **turn: Any,
  ) -> Rendered:
    """Tokenizes pieces, each on its own, and appends them.

    Args:
      before: the ids before them.
      pieces: the pieces.
      text: the text of all ids.
      **turn: fields of an open turn.
    """
    watchdog.progress()  # data sets are rendered in loops of unknown length
    tokenizer, piece_ids = self.tokenizer, []
    for piece in pieces:
      encode = (
        tokenizer.encode if piece.is_content else tokenizer.encode_scaffold
      )
      piece_ids.append(encode(piece.text))
      if max(piece_ids[-1], default=0) >= self.embedding_rows:
        raise ValueError(
          'messages must consist of tokens that the model has rows for: got '
          f'{tokenizer.text(max(piece_ids[-1]))!r} in {piece.text!r:.200}'
        )
    lengths = [len(ids) for ids in piece_ids]

    # One array for all: a turn has many pieces of a few tokens each.
    def spread(values, dtype) -> np.ndarray:
      return np.repeat(np.array(list(values), dtype), lengths)

    new = Rendered(
      ids=np.array([i for ids in piece_ids for i in ids], np.int32),
      roles=spread((types.ROLES.index(p.role) for p in pieces), np.int8),
      is_content=spread((p.is_content for p in pieces), bool),
      sampled=spread((p.sampled for p in pieces), bool),
      messages=spread((p.message for p in pieces), np.int32),
      text=text,
      **turn,
    )
    return _join(before, new)


def add_turn(messages: types.Messages, turn: types.Message) -> types.Messages:
  """Returns a conversation with one more turn, or the last one continued."""
  if turn['role'] != 'assistant' or not types.begins_turn(messages):
    return (*messages, turn)
  *before, begun = messages
  content = begun['content'] + turn['content']
  return (*before, {**begun, **turn, 'content': content})


def _join(before: Rendered, after: Rendered) -> Rendered:
  """Concatenates tokens; `text` and `open` are those of `after`."""
  fields = ('ids', 'roles', 'is_content', 'sampled', 'messages')
  arrays = (
    np.concatenate([getattr(before, x), getattr(after, x)]) for x in fields
  )
  return dataclasses.replace(after, **dict(zip(fields, arrays, strict=True)))


def resolve(
  cfg: schema.Tokenizer,
) -> tuple[schema.Tokenizer, str | None, tuple[int, ...], dict[str, Any]]:
  """Reads the settings of the config and of the directory that it may name.

  Eos is the one of the directory's stop tokens with which its template closes
  an assistant turn; without a template, the directory's eos_token.

  Returns:
    The tokenizer, which names a file, with eos and pad; the template's source,
    None = the built-in one; the stop tokens besides eos; and the variables of
    the template.

  Raises:
    ValueError: a file is missing or has another form; names it.
  """
  own = disk.parse_json(
    cfg.template_variables, 'config.tokenizer.template_variables'
  )
  template, special, stops = None, {}, ()
  if cfg.chat_template == 'raw':
    template = templates.RAW
  elif cfg.chat_template is not None:
    try:
      template = pathlib.Path(cfg.chat_template).expanduser().read_text('utf-8')
    except (OSError, UnicodeDecodeError) as error:
      raise ValueError(
        'config.tokenizer.chat_template must name a text file, or be None for '
        "the directory's or the built-in one, or be 'raw': got "
        f'{cfg.chat_template!r}; '
        f'{error}'
      ) from error
  folder = pathlib.Path(cfg.path or '').expanduser()
  file, is_folder = folder / 'tokenizer.json', cfg.path and folder.is_dir()
  if is_folder:
    if not file.is_file():
      raise ValueError(
        f'config.tokenizer.path must hold a tokenizer.json: got {cfg.path!r}, '
        f'which has none (other formats are not read); {NO_TOKENIZER}'
      )
    metadata, stops = _json(folder / 'tokenizer_config.json'), stop_ids(folder)
    for role in _SPECIAL:
      value = metadata.get(role)
      value = value.get('content') if isinstance(value, Mapping) else value
      special |= {role: value} if value else {}
    if not template and (folder / 'chat_template.jinja').is_file():
      template = (folder / 'chat_template.jinja').read_text('utf-8')
    elif not template:
      older = _json(folder / 'chat_template.json')
      template = (metadata | older).get('chat_template')
    if isinstance(template, list):
      by_name = {x['name']: x['template'] for x in template}
      if 'default' not in by_name:
        raise ValueError(
          f'{folder}/tokenizer_config.json must have a chat template named '
          f"'default': got {sorted(by_name)!r:.200}; set "
          'config.tokenizer.chat_template'
        )
      template = by_name['default']
    if template is None:
      logging.getLogger('absl').warning(
        '%s has no chat template: the built-in one, %s, is used, and exported; '
        "config.tokenizer.chat_template sets a file with another, or 'raw'",
        cfg.path,
        templates.BUILT_IN,
      )
  reads = set() if template is None else templates.Jinja(template, {}).reads
  check_variables(own, reads, 'config.tokenizer.template_variables')
  variables = {**special, **own}
  if is_folder:
    eos, pad = cfg.eos, cfg.pad
    if eos is None:
      eos = _closing(template, variables, file, stops)
    if pad is None and special.get('pad_token') != eos:
      pad = special.get('pad_token')
    cfg = dataclasses.replace(cfg, path=str(file), eos=eos, pad=pad)
  return cfg, template, stops, variables


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
  answer = {'role': 'assistant', 'content': templates.MARK}
  jinja = templates.Jinja(template, variables)
  # '' if the template refuses them: then rendering will raise it again.
  text = templates.rendered(jinja, templates.QUESTION, answer)
  rest = text.partition(templates.MARK)[2]
  special = [token['content'] for token in added if token['special']]
  for candidates in (ends, special):
    positions = {rest.index(x): x for x in candidates if x in rest}
    if positions:
      return positions[min(positions)]
  return next(iter(ends), None)


def stop_ids(folder: str | pathlib.Path) -> tuple[int, ...]:
  """Returns the stop tokens of a directory; () if unknown."""
  for name in ('generation_config.json', 'config.json'):
    path = pathlib.Path(folder) / name
    value = _json(path).get('eos_token_id')
    if value is None:
      continue
    ids = value if isinstance(value, list) else [value]
    if not all(type(i) is int for i in ids):
      raise ValueError(
        f'{path}: eos_token_id must be a token id, or a list of them: got '
        f'{value!r:.200}'
      )
    return tuple(ids)
  return ()


def check_tokenizer(folder: str, tokenizer: tokenizers.Tokenizer) -> None:
  """Raises ValueError if a directory has the file of another tokenizer."""
  file = pathlib.Path(folder) / 'tokenizer.json'
  if file.is_file() and file.read_bytes() != tokenizer.content:
    raise ValueError(
      f'the tokenizer of {folder} must be that of the run, '
      f'config.tokenizer.path: got another one; a teacher, reference or reward '
      'model reads the tokens of the model that trains, one by one, so take '
      'one with the same tokenizer.json; where it is itself the model that '
      f'trains, --config.tokenizer.path={folder} sets it, and its template'
    )


def write(renderer: 'Renderer', folder: str | pathlib.Path) -> None:
  """Writes the files by which other tools render as a renderer does.

  Leaves a directory that has equivalent files unchanged. Sets the template's
  variables in its first lines, except `today`: other tools have a clock.

  Args:
    renderer: the renderer.
    folder: an existing folder.
  """
  folder, tokenizer = pathlib.Path(folder), renderer.tokenizer
  template, variables = renderer.template, renderer.variables
  file, metadata = folder / 'tokenizer.json', folder / 'tokenizer_config.json'
  if template and file.is_file() and file.read_bytes() == tokenizer.content:
    old, theirs, _, read = resolve(schema.Tokenizer(path=str(folder)))
    if (theirs, old.eos, read) == (template, tokenizer.eos, variables):
      return
  values = {k: v for k, v in variables.items() if k not in (*_SPECIAL, 'today')}
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
  stops = folder / 'generation_config.json'
  for path, fields in {
    metadata: {
      'tokenizer_class': 'PreTrainedTokenizerFast',
      **_json(metadata),
      **pad,
      'bos_token': variables.get('bos_token', tokenizer.bos) or None,
      'eos_token': variables.get('eos_token', tokenizer.eos),
      'chat_template': head + template,
    },
    stops: {**_json(stops), 'eos_token_id': list(renderer.stop_ids)},
  }.items():
    path.write_text(json.dumps(fields, indent=2))


def _json(path: pathlib.Path) -> dict[str, Any]:
  """Reads the JSON object in a file; {} if there is no file."""
  return disk.read_json_object(path) if path.is_file() else {}
