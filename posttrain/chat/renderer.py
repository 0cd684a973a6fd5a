"""Messages -> token ids, with role, content and sampled attribution.

1. A template turns the message at an index into a `Turn` of text pieces:
   header, lead, content, end, tail.
2. Each piece is tokenized on its own and never again: what a later turn adds
   cannot change an earlier id, whatever the tokenizer merges.
3. `sampled` marks what the policy would say: from behind the header of an
   assistant turn up to and with its eos.

Axes: T tokens.
"""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from posttrain import schema, types
from posttrain.chat import jinja, tokenizers
from posttrain.chat import messages as forms

# The built-in template, for every role. {end} is the tokenizer's eos; the
# markers are single ids where the tokenizer has them as special tokens (the
# byte tokenizer does), and ordinary text where not. A conversation begins
# with the tokenizer's bos, where there is one.
TEMPLATE = '<|{role}|>{content}{end}'


@dataclasses.dataclass(frozen=True)
class Rendered:
  """Token ids of a conversation; every array is [T]."""

  ids: np.ndarray  # i32
  roles: np.ndarray  # i8, index into types.ROLES
  is_content: np.ndarray  # bool, False on template scaffold
  sampled: np.ndarray  # bool, what the policy would sample
  # The last assistant turn is not closed: a generation prompt comes last, or
  # sampled ids follow it.
  open: bool = False

  def __len__(self) -> int:
    return len(self.ids)


EMPTY = Rendered(
    np.zeros(0, np.int32), np.zeros(0, np.int8), np.zeros(0, bool),
    np.zeros(0, bool),
)


class Template(Protocol):
  """Turns messages into text pieces."""

  def turn(self, messages: types.Messages, index: int) -> jinja.Turn:
    """Returns what `messages[index]` adds to those before it."""

  def prompt(self, messages: types.Messages) -> str:
    """Returns the header of an assistant turn that follows `messages`."""


def load(cfg: schema.Tokenizer) -> 'Renderer':
  """Makes tokenizer and template of the config.

  Raises:
    ValueError: see `tokenizers.load`; or the template file is missing.
  """
  tokenizer = tokenizers.load(cfg)
  if cfg.chat_template is None:
    return Renderer(tokenizer)
  path = pathlib.Path(cfg.chat_template).expanduser()
  if not path.is_file():
    raise ValueError(
        'config.tokenizer.chat_template must name an existing file: got '
        f'{cfg.chat_template!r}; None means the built-in template'
    )
  return Renderer(tokenizer, path.read_text())


def check_fingerprint(ours: str, theirs: str, what: str, where: str) -> None:
  """Refuses to read a checkpoint's ids as other texts.

  Args:
    ours: fingerprint of the renderer that is at hand.
    theirs: of the one that the checkpoint was trained with.
    what: names where ours is from: a config key, say.
    where: names the checkpoint.

  Raises:
    ValueError: they differ.
  """
  if ours != theirs:
    raise ValueError(
        f'{what} must be what {where} was trained with, template included: '
        f'its fingerprint is {ours[:12]}, expected {theirs[:12]}; put the old '
        'files back, or use another checkpoint'
    )


class Renderer:
  """Renders conversations with one tokenizer and one template."""

  def __init__(
      self, tokenizer: tokenizers.Tokenizer, template: str | None = None
  ):
    """Args: template: source of a Jinja chat template; None = `TEMPLATE`."""
    self.tokenizer = tokenizer
    # sha256, hex: two equal ones render equal messages to equal ids.
    self.fingerprint = _fingerprint(tokenizer.fingerprint, template)
    self.stop_ids = (tokenizer.eos_id,)
    self._template: Template = (
        _BuiltIn(tokenizer) if template is None
        else jinja.Jinja(template, tokenizer.bos, tokenizer.eos)
    )

  def render(
      self, messages: Sequence[types.Message], *,
      add_generation_prompt: bool = False,
  ) -> Rendered:
    """Renders a whole conversation.

    Args:
      messages: the turns; roles of `types.ROLES`, contents of type str.
      add_generation_prompt: append the header of an assistant turn.

    Raises:
      ValueError: a message has another form, or the template refuses.
    """
    return self.extend(
        EMPTY, (), messages, add_generation_prompt=add_generation_prompt
    )

  def extend(
      self, rendered: Rendered, messages: Sequence[types.Message],
      new: Sequence[types.Message], *, add_generation_prompt: bool = False,
  ) -> Rendered:
    """Appends what `new` adds; the ids already there stay as they are.

    `extend(render(a), a, b) == render(a + b)`, also when `render(a)` ends in
    a generation prompt and b begins with the assistant's turn.

    Args:
      rendered: what stands for `messages`. Where it ends in sampled ids
        (`append`), the last of `messages` is that assistant turn; it is
        closed first, with an unsampled eos if it was cut off.
      messages: the turns that `rendered` covers.
      new: the turns to append.
      add_generation_prompt: append the header of an assistant turn.
    """
    messages, start = (*messages, *new), len(messages)
    for index, message in enumerate(messages[start:], start):
      forms.check(message, f'messages[{index}]')
    cut = rendered.open and len(rendered) > 0 and rendered.sampled[-1]
    pieces = [rendered]
    if cut:
      turn = self._template.turn(messages, start - 1)
      if rendered.ids[-1] not in self.stop_ids:
        pieces.append(self._piece(turn.end, 'assistant'))
      pieces.append(self._piece(turn.tail, 'assistant'))
    for index in range(start, len(messages)):
      pieces += self._turn(
          messages, index,
          opened=rendered.open and not cut and index == start,
      )
    still_open = rendered.open and not cut and not new
    if add_generation_prompt and not still_open:
      header = self._template.prompt(messages)
      pieces.append(self._piece(header, 'assistant'))
    return _join(pieces, open=add_generation_prompt or still_open)

  def append(self, rendered: Rendered, ids: Sequence[int]) -> Rendered:
    """Appends ids that were sampled after a generation prompt, verbatim."""
    assert rendered.open, 'sampled ids follow a generation prompt'
    ids = np.asarray(ids, np.int32)
    return _join([rendered, Rendered(
        ids=ids,
        roles=np.full(len(ids), types.ROLES.index('assistant'), np.int8),
        is_content=~np.isin(ids, self.stop_ids),
        sampled=np.ones(len(ids), bool),
    )], open=True)

  def _turn(self, messages, index: int, *, opened: bool) -> list[Rendered]:
    """Tokenizes one turn; `opened` = its header is already there."""
    turn, role = self._template.turn(messages, index), messages[index]['role']
    says = role == 'assistant'
    assert says or not opened, 'an assistant turn follows its header'
    return [
        self._piece('' if opened else turn.header, role),
        self._piece(turn.lead, role, sampled=says),
        self._piece(turn.content, role, sampled=says, is_content=True),
        self._piece(turn.end, role, sampled=says),
        self._piece(turn.tail, role),
    ]

  def _piece(
      self, text: str, role: str, *, sampled: bool = False,
      is_content: bool = False,
  ) -> Rendered:
    encode = (
        self.tokenizer.encode if is_content else self.tokenizer.encode_scaffold
    )
    ids = np.asarray(encode(text), np.int32)
    return Rendered(
        ids=ids,
        roles=np.full(len(ids), types.ROLES.index(role), np.int8),
        is_content=np.full(len(ids), is_content),
        sampled=np.full(len(ids), sampled),
    )


class _BuiltIn:
  """`TEMPLATE`, as text pieces."""

  def __init__(self, tokenizer: tokenizers.Tokenizer):
    self._bos, self._end = tokenizer.bos, tokenizer.eos

  def turn(self, messages: types.Messages, index: int) -> jinja.Turn:
    message = messages[index]
    if message.get('tool_calls'):
      raise ValueError(
          f'messages[{index}] must be plain text under the built-in template: '
          'got tool_calls; write the call into content, or set '
          'config.tokenizer.chat_template'
      )
    return jinja.Turn(
        header=self._header(message['role'], first=index == 0),
        content=message['content'],
        end=TEMPLATE.partition('{content}')[2].format(end=self._end),
    )

  def prompt(self, messages: types.Messages) -> str:
    return self._header('assistant', first=not messages)

  def _header(self, role: str, *, first: bool) -> str:
    header = TEMPLATE.partition('{content}')[0].format(role=role)
    return self._bos + header if first else header


def _fingerprint(tokenizer: str, template: str | None) -> str:
  kind, text = ('built-in', TEMPLATE) if template is None else (
      'jinja', template
  )
  parts = json.dumps([tokenizer, kind, text])
  return hashlib.sha256(parts.encode()).hexdigest()


def _join(pieces: Sequence[Rendered], *, open: bool) -> Rendered:
  return Rendered(*(
      np.concatenate([getattr(piece, field) for piece in pieces])
      for field in ('ids', 'roles', 'is_content', 'sampled')
  ), open=open)
