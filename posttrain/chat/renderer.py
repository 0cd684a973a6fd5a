"""Messages -> token ids, with role, content and sampled attribution.

1. A template makes text of a conversation; `layout` cuts it into pieces by
   author, content and scaffold.
2. Each piece is tokenized on its own and never again: what a later turn adds
   cannot change an earlier id, whatever the tokenizer merges.
3. A template may show earlier turns otherwise once others follow (reasoning
   models' forget thoughts). Nothing is appended then: `extend` raises
   `Rewritten`, and the conversation goes on as a new sample.

Axes: T tokens.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from posttrain import schema, types
from posttrain.chat import layout, pretrained, templates, tokenizers
from posttrain.chat import messages as forms
from posttrain.chat import rendered as tokens

Rewritten = layout.Rewritten
EMPTY, Rendered = tokens.EMPTY, tokens.Rendered


def load(cfg: schema.Tokenizer) -> 'Renderer':
  """Makes tokenizer and template of the config.

  Raises:
    ValueError: see `tokenizers.load` and `pretrained.resolve`.
  """
  found = pretrained.resolve(cfg)
  return Renderer(
    tokenizers.load(found.tokenizer),
    found.template,
    found.stop_ids,
    found.variables,
  )


def check_fingerprint(ours: str, theirs: str, what: str, where: str) -> None:
  """Refuses to read a checkpoint's ids as other texts.

  Args:
    ours, theirs: fingerprints of the renderer at hand, and of the checkpoint's.
    what, where: name in the error where ours is from, and the checkpoint.
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
    self,
    tokenizer: tokenizers.Tokenizer,
    template: str | None = None,
    stop_ids: Sequence[int] = (),
    variables: Mapping[str, Any] | None = None,
  ):
    """Makes a renderer.

    Args:
      tokenizer: its eos ends assistant turns.
      template: source of a Jinja chat template; None = built in.
      stop_ids: tokens that end a turn besides eos.
      variables: what a Jinja template is shown; None = bos and eos.
    """
    self.tokenizer, self.template = tokenizer, template
    self.variables = variables or {}
    self.stop_ids = tuple(dict.fromkeys((tokenizer.eos_id, *stop_ids)))
    names = {'bos_token': tokenizer.bos, 'eos_token': tokenizer.eos}
    # sha256, hex: two equal ones render equal messages to equal ids.
    self.fingerprint = _fingerprint(
      tokenizer.fingerprint, template, self.stop_ids[1:], self.variables
    )
    self.rows = tokenizer.vocab_size
    self._stops = tuple(filter(None, map(tokenizer.text, self.stop_ids)))
    self._template: layout.Template = (
      templates.BuiltIn(tokenizer.bos, tokenizer.eos)
      if template is None
      else templates.Jinja(template, {**names, **self.variables})
    )

  def fit(self, rows: int) -> None:
    """Renders for a model with so many rows of embeddings.

    A tokenizer may have more special tokens than a model that shares it
    (Gemma 3's text models have no row for images): they are refused where they
    are used.

    Raises:
      ValueError: the model cannot hold the text of the tokenizer.
    """
    needed = max(self.tokenizer.text_size, *(i + 1 for i in self.stop_ids))
    if rows < needed:
      raise ValueError(
        f"config.model.vocab_size must hold the tokenizer's {needed} tokens: "
        f'got {rows}'
      )
    self.rows = rows

  def render(
    self,
    messages: Sequence[types.Message],
    *,
    add_generation_prompt: bool = False,
  ) -> Rendered:
    """Renders a whole conversation as the template shows it; all is given.

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
    self,
    rendered: Rendered,
    messages: Sequence[types.Message],
    new: Sequence[types.Message],
    *,
    add_generation_prompt: bool = False,
  ) -> Rendered:
    """Appends what `new` adds; the ids already there stay as they are.

    `extend(render(a), a, b) == render(a + b)`, also when `render(a)` ends in
    a generation prompt and b begins with the assistant's turn; unless the
    template rewrites a.

    Args:
      rendered: what stands for `messages`. Where it ends in sampled ids
        (`append`), the last of `messages` is that assistant turn; it is
        closed first, with an unsampled eos if it was cut off.
      messages: the turns that `rendered` covers.
      new: the turns to append.
      add_generation_prompt: append the header of an assistant turn.

    Raises:
      Rewritten: with `new`, the template shows `messages` otherwise.
      ValueError: as `render`.
    """
    messages, start = (*messages, *new), len(messages)
    for index, message in enumerate(messages[start:], start):
      forms.check(message, f'messages[{index}]')
    if rendered.open and not rendered.spoken and not new:
      return rendered
    text = self._template.text(messages, add_generation_prompt)
    skip = self._covered(rendered, messages[:start], text)
    if skip is None:
      raise Rewritten(
        'config.tokenizer.chat_template must keep earlier turns as they '
        f'were: got {text!r} for {len(messages)} messages, expected it to '
        f'begin with {rendered.text!r}'
      )
    return self._encode(
      [rendered],
      layout.pieces(
        self._template,
        messages,
        text,
        prompt=add_generation_prompt,
        start=start,
        skip=skip,
      ),
      text,
      open=add_generation_prompt,
    )

  def append(self, rendered: Rendered, ids: Sequence[int]) -> Rendered:
    """Appends ids that were sampled after a generation prompt, verbatim."""
    assert rendered.open, 'sampled ids follow a generation prompt'
    ids = np.asarray(ids, np.int32)
    content = np.ones(len(ids), bool)
    for stop in self.stop_ids:  # a few: `np.isin` takes ten times as long
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

  def demonstrate(
    self, messages: Sequence[types.Message], given: int = 0
  ) -> list[Rendered]:
    """Renders what is to be imitated: assistant turns, each in one sample.

    Such a turn is `sampled` from behind its generation prompt up to and with
    its eos. A template that rewrites earlier turns begins another sample,
    whose earlier turns are as it shows them then, and given. What follows the
    last assistant turn is left out.

    Args:
      messages: the conversation.
      given: so many messages are only given.

    Raises:
      ValueError: as `render`; or the template gives a turn another header
        than its generation prompt, or closes it without a stop token.
    """
    samples, done = [EMPTY], 0
    for index, message in enumerate(messages):
      forms.check(message, f'messages[{index}]')
      if message['role'] != 'assistant' or index < given:
        continue
      try:
        opened = self.extend(
          samples[-1],
          messages[:done],
          messages[done:index],
          add_generation_prompt=True,
        )
      except Rewritten:
        samples.append(EMPTY)
        opened = self.render(messages[:index], add_generation_prompt=True)
      samples[-1] = self._say(opened, tuple(messages[: index + 1]))
      done = index + 1
    return samples if done else []

  def _say(self, opened: Rendered, messages: types.Messages) -> Rendered:
    """Appends the last message, as a turn that the policy would sample."""
    text, start = self._template.text(messages), len(opened.text)
    if not text.startswith(opened.text):
      raise ValueError(
        'config.tokenizer.chat_template must open an assistant turn as it '
        f'prompts for one: got {text!r}, expected it to begin with '
        f'{opened.text!r}; such a template cannot be imitated'
      )
    begin, end = layout.span(self._template, messages, len(messages) - 1, text)
    begin, end = max(begin or start, start), max(end or start, start)
    ends = [
      text.index(stop, end) + len(stop)
      for stop in self._stops
      if stop in text[end:]
    ]
    if not ends:
      raise ValueError(
        'config.tokenizer.chat_template must close an assistant turn with '
        f'config.tokenizer.eos: got {text[end:]!r}, expected one of '
        f'{self._stops} in it'
      )
    over = min(ends)
    return self._encode(
      [opened],
      [
        layout.Piece(text[start:begin], 'assistant', sampled=True),
        layout.Piece(text[begin:end], 'assistant', True, sampled=True),
        layout.Piece(text[end:over], 'assistant', sampled=True),
        layout.Piece(text[over:], 'assistant'),
      ],
      text,
      open=False,
    )

  def _covered(
    self, rendered: Rendered, messages: types.Messages, text: str
  ) -> int | None:
    """Characters of the text that the ids stand for; None = it is another.

    Sampled ids stand for their text; a template may show it with other space
    around it.
    """
    start, rest = len(rendered.text), text[len(rendered.text) :]
    if not text.startswith(rendered.text):
      return None
    if not rendered.spoken:
      return start
    content, space = messages[-1]['content'], len(rest) - len(rest.lstrip())
    for lead, said in (
      (0, content),
      (0, content.strip()),
      (space, content.strip()),
    ):
      end = start + lead + len(said)
      if not rest.startswith(said, lead):
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
    scaffold, content = self.tokenizer.encode_scaffold, self.tokenizer.encode
    found = [
      (content if piece.is_content else scaffold)(piece.text)
      for piece in pieces
    ]
    for piece, ids in zip(pieces, found, strict=True):
      if max(ids, default=0) >= self.rows:
        raise ValueError(
          'messages must be made of tokens that the model has rows for: got '
          f'{self.tokenizer.text(max(ids))!r} in {piece.text!r}'
        )
    new = tokens.lay(pieces, found)
    return tokens.join([*before, new], text, open=open)


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
