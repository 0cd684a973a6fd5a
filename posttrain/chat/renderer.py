"""Messages -> token ids, with role, content and sampled attribution.

1. A template renders a conversation as text; `layout` splits it into pieces by
   role, content and scaffold.
2. Each piece is tokenized once and on its own: later turns cannot change
   earlier ids, whatever the tokenizer merges.
3. A template may render earlier turns differently once others follow (those of
   reasoning models drop thoughts). Then `extend` raises `Rewritten`, and the
   conversation continues as a new sample.

Axes: T tokens.
"""

import copy
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from posttrain import schema, types
from posttrain.chat import (
  layout,
  meter,
  pretrained,
  spans,
  templates,
  tokenizers,
  tool_templates,
)
from posttrain.chat import messages as forms
from posttrain.chat import rendered as tokens
from posttrain.util import foreign, watchdog

Rewritten = layout.Rewritten
EMPTY, Rendered = tokens.EMPTY, tokens.Rendered
_MOST_TOOLS = 64  # sets of tools whose renderers are kept


def load(cfg: schema.Tokenizer) -> 'Renderer':
  """Builds the renderer of the config.

  Raises:
    ValueError: see `tokenizers.load` and `pretrained.resolve`.
  """
  settings = pretrained.resolve(cfg)
  return Renderer(
    tokenizers.load(settings.tokenizer),
    settings.template,
    settings.stop_ids,
    settings.variables,
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
      f'its fingerprint is {ours[:12]}, expected {theirs[:12]}; put the old '
      'files back, or use another checkpoint'
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
    self.fingerprint = _fingerprint(
      tokenizer.fingerprint, template, self.stop_ids[1:], self.variables
    )
    self.embedding_rows = tokenizer.vocab_size
    # The last whole conversation and its ids: a group has one prompt.
    self._last: tuple[tuple[str, bool], Rendered] | None = None
    # How calls are written after `with_tools`, and its renderers.
    self.style: tool_templates.Style | None = None
    self._with_tools: dict[str, Renderer] = {}
    self._stops = tuple(filter(None, map(tokenizer.text, self.stop_ids)))
    self._template: templates.BuiltIn | spans.Template = (
      templates.BuiltIn(tokenizer.bos, tokenizer.eos)
      if template is None
      else templates.Jinja(template, {**names, **self.variables})
    )

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
        f"config.model.vocab_size must hold the tokenizer's {needed} tokens: "
        f'got {rows}'
      )
    renderer = copy.copy(self)
    renderer.embedding_rows, renderer._last = rows, None
    renderer._with_tools = {}
    return renderer

  def with_tools(self, tools: types.Tools | None) -> 'Renderer':
    """Returns a renderer whose template tells of tools, see `tool_templates`.

    Its `style` says how the policy calls them; its fingerprint is the same.

    Raises:
      ValueError: see `tool_templates.make`.
    """
    if tools is None:
      return self
    key = repr(tools)
    if key not in self._with_tools:
      renderer = copy.copy(self)
      renderer._last = None
      renderer._template, renderer.style = tool_templates.make(
        self._template, self.tokenizer.bos, self._stops, tools
      )
      if len(self._with_tools) == _MOST_TOOLS:
        self._with_tools.clear()
      self._with_tools[key] = renderer
    return self._with_tools[key]

  def render(
    self,
    messages: Sequence[types.Message],
    *,
    add_generation_prompt: bool = False,
  ) -> Rendered:
    """Renders a whole conversation; no token of it is `sampled`.

    Args:
      messages: the turns; roles of `types.ROLES`, contents of type str.
      add_generation_prompt: whether to append the header of an assistant turn.

    Raises:
      ValueError: a message has another form, or the template raises an error.
    """
    return self.extend(
      EMPTY, (), messages, add_generation_prompt=add_generation_prompt
    )

  def extend(
    self,
    rendered: Rendered,
    messages: Sequence[types.Message],
    new: Sequence[types.Message],
    *,
    add_generation_prompt: bool = False,
  ) -> Rendered:
    """Appends the ids of new messages; leaves the ids before unchanged.

    `extend(render(a), a, b) == render(a + b)`, also if `render(a)` ends in a
    generation prompt and b begins with the assistant's turn; unless the
    template rewrites a.

    Args:
      rendered: the ids of `messages`. If it ends in a completion (`append`),
        the last of `messages` is that assistant turn; it is closed first, with
        an unsampled eos if it was truncated.
      messages: the turns that `rendered` covers.
      new: the turns to append.
      add_generation_prompt: whether to append the header of an assistant turn.

    Raises:
      Rewritten: with `new`, the template renders `messages` differently.
      ValueError: as `render`.
    """
    messages, start = (*messages, *new), len(messages)
    for index, message in enumerate(messages[start:], start):
      forms.check(message, f'messages[{index}]')
    if rendered.open and not rendered.ends_in_completion and not new:
      return rendered
    key = None
    if rendered is EMPTY and not start:
      key = repr(messages), add_generation_prompt
      if (last := self._last) and last[0] == key:
        return last[1]
    with meter.chat(len(messages), meter.CHAT):
      args = rendered, messages, start, add_generation_prompt
      result = self._extended(*args)
    if key:
      self._last = key, result
    return result

  def prompt(
    self,
    messages: Sequence[types.Message],
    cancelled: Callable[[], bool] | None = None,
  ) -> Rendered:
    """Renders a conversation of a client, with a generation prompt.

    The ids are those of `render`, by work that is linear in the messages, much
    less than `render` may do; the rest of the attribution is not exact.

    Args:
      messages: as of `render`.
      cancelled: returns whether the result is no longer wanted.

    Raises:
      ValueError: as `render`; or the ids would take more work.
    """
    for index, message in enumerate(messages):
      forms.check(message, f'messages[{index}]')
    with meter.chat(len(messages), meter.SERVED, cancelled):
      try:
        return self._extended(EMPTY, tuple(messages), 0, True, served=True)
      except meter.Limit as error:  # between two renderings
        raise ValueError(f'messages cannot be rendered: {error}') from error

  def _extended(
    self,
    rendered: Rendered,
    messages: types.Messages,
    start: int,
    add_generation_prompt: bool,
    served: bool = False,
  ) -> Rendered:
    """Appends the ids of the messages from `start` on."""
    text = self._text(rendered, messages, start, add_generation_prompt)
    skip = self._covered(rendered, messages[:start], text)
    if skip is None:
      raise Rewritten(
        'config.tokenizer.chat_template must keep earlier turns as they '
        f'were: got {foreign.quote(text)} for {len(messages)} messages, '
        f'expected it to begin with {foreign.quote(rendered.text)}'
      )
    options = {'prompt': add_generation_prompt, 'start': start, 'skip': skip}
    if isinstance(self._template, templates.BuiltIn):
      pieces = self._template.pieces(messages, text, **options)
    else:
      pieces = layout.pieces(
        self._template,
        messages,
        text,
        closed=not rendered.open,
        limits=spans.SERVING if served else spans.TRAINING,
        encode=self._encode_scaffold if served else None,
        **options,
      )
    return self._encode([rendered], pieces, text, open=add_generation_prompt)

  def _text(
    self, rendered: Rendered, messages: types.Messages, start: int, prompt: bool
  ) -> str:
    """Renders messages, of which `rendered` covers those before `start`."""
    if isinstance(self._template, templates.BuiltIn):
      start -= rendered.ends_in_completion  # its text is only in the messages
      return self._template.extended(
        rendered.text, messages, start, opened=rendered.open, prompt=prompt
      )
    return self._template.text(messages, prompt)

  def append(self, rendered: Rendered, ids: Sequence[int]) -> Rendered:
    """Appends ids that were sampled after a generation prompt, verbatim."""
    assert rendered.open, 'sampled ids follow a generation prompt'
    ids = np.asarray(ids, np.int32)
    content = np.ones(len(ids), bool)
    for stop in self.stop_ids:  # few; `np.isin` takes ten times as long
      content &= ids != stop
    return tokens.join(
      [
        rendered,
        Rendered(
          ids=ids,
          roles=np.full(len(ids), types.ROLES.index('assistant'), np.int8),
          is_content=content,
          sampled=np.ones(len(ids), bool),
          messages=np.full(len(ids), -1, np.int32),
        ),
      ],
      rendered.text,
      open=True,
    )

  def append_turn(self, opened: Rendered, messages: types.Messages) -> Rendered:
    """Appends an assistant turn as if it were sampled; see `demonstrations`.

    Args:
      opened: the ids of the messages before, with a generation prompt.
      messages: the conversation, which ends in that turn.

    Raises:
      ValueError: the template opens the turn with another header than its
        generation prompt, or closes it without a stop token.
    """
    text = self._text(opened, messages, len(messages) - 1, False)
    start = len(opened.text)
    if not text.startswith(opened.text):
      raise ValueError(
        'config.tokenizer.chat_template must open an assistant turn with its '
        f'generation prompt: got {foreign.quote(text)}, expected it to begin '
        f'with {foreign.quote(opened.text)}; demonstrations need another '
        'template'
      )
    if isinstance(self._template, templates.BuiltIn):
      begin, end = self._template.last_span(messages, text)
    else:
      begin, end = spans.one(self._template, messages, len(messages) - 1, text)
    begin, end = max(begin or start, start), max(end or start, start)
    after = self._end_of_stop(text, end)
    return self._encode(
      [opened],
      [
        layout.Piece(text[start:begin], 'assistant', sampled=True),
        layout.Piece(text[begin:end], 'assistant', True, sampled=True),
        layout.Piece(text[end:after], 'assistant', sampled=True),
        layout.Piece(text[after:], 'assistant'),
      ],
      text,
      open=False,
    )

  def _end_of_stop(self, text: str, start: int) -> int:
    """Returns the end of the first stop token from `start` on."""
    ends = [
      text.index(stop, start) + len(stop)
      for stop in self._stops
      if stop in text[start:]
    ]
    if not ends:
      raise ValueError(
        'config.tokenizer.chat_template must close an assistant turn with '
        f'config.tokenizer.eos: got {foreign.quote(text[start:])}, expected '
        f'one of {self._stops} in it'
      )
    return min(ends)

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
    content, space = messages[-1]['content'], len(rest) - len(rest.lstrip())
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
    before: list[Rendered],
    pieces: Sequence[layout.Piece],
    text: str,
    *,
    open: bool,
  ) -> Rendered:
    """Tokenizes pieces, each on its own, and appends them."""
    watchdog.progress()  # data sets are rendered in loops of unknown length
    piece_ids = [
      (self._encode_content if piece.is_content else self._encode_scaffold)(
        piece.text
      )
      for piece in pieces
    ]
    for piece, ids in zip(pieces, piece_ids, strict=True):
      if max(ids, default=0) >= self.embedding_rows:
        raise ValueError(
          'messages must consist of tokens that the model has rows for: got '
          f'{self.tokenizer.text(max(ids))!r} in {foreign.quote(piece.text)}'
        )
    new = tokens.from_pieces(pieces, piece_ids)
    return tokens.join([*before, new], text, open=open)

  def _encode_content(self, text: str) -> Sequence[int]:
    meter.check_caller()
    return self.tokenizer.encode(text)

  def _encode_scaffold(self, text: str) -> Sequence[int]:
    meter.check_caller()
    return self.tokenizer.encode_scaffold(text)


def _fingerprint(
  tokenizer: str,
  template: str | None,
  stop_ids: Sequence[int],
  variables: Mapping[str, Any],
) -> str:
  parts = [tokenizer, 'jinja', template]
  if template is None:
    parts = [tokenizer, 'built-in', templates.BUILT_IN]
  if stop_ids or variables:
    parts += [list(stop_ids), dict(sorted(variables.items()))]
  return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
