"""Conversations to imitate -> token ids, the assistant turns as `sampled`."""

from collections.abc import Sequence

from posttrain import types
from posttrain.chat import messages as forms
from posttrain.chat import renderer as chat


def render(
  renderer: chat.Renderer, messages: Sequence[types.Message], given: int = 0
) -> list[chat.Rendered]:
  """Renders a demonstration, with the assistant turns marked as `sampled`.

  A turn is `sampled` from after its generation prompt up to and including its
  eos. If the template rewrites earlier turns, a new sample begins, in which the
  earlier turns are rendered anew and not `sampled`. Messages after the last
  assistant turn are left out.

  Args:
    renderer: renders the messages.
    messages: the conversation.
    given: number of leading messages that are not to be imitated.

  Returns:
    The samples; each assistant turn is `sampled` in exactly one.

  Raises:
    ValueError: as `Renderer.render` and `Renderer.append_turn`.
  """
  samples, done = [chat.EMPTY], 0
  for index, message in enumerate(messages):
    forms.check(message, f'messages[{index}]')
    if message['role'] != 'assistant' or index < given:
      continue
    try:
      opened = renderer.extend(
        samples[-1],
        messages[:done],
        messages[done:index],
        add_generation_prompt=True,
      )
    except chat.Rewritten:
      samples.append(chat.EMPTY)
      opened = renderer.render(messages[:index], add_generation_prompt=True)
    samples[-1] = renderer.append_turn(opened, tuple(messages[: index + 1]))
    done = index + 1
  return samples if done else []
