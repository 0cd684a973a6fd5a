"""The objects of an answer, in OpenAI's form, and vLLM's where that has none.

Logprobs are in nats, of the law before truncation, at the request's
temperature (at 1 where that is 0): of drawn tokens as they were drawn, of
prompts by a forward over all of it.
"""

import secrets
import time
from collections.abc import Sequence
from typing import Any

import posttrain
from posttrain.checkpoints import policies
from posttrain.serve import laws, protocol, speech

FINGERPRINT = f'posttrain-{posttrain.__version__}'


class Writer:
  """Writes what came of one request."""

  def __init__(self, ask: protocol.Ask, policy: policies.Policy, name: str):
    """Args: ask: the request; policy: whose; name: of the model."""
    self._ask, self._policy, self._name = ask, policy, name
    self._id = f'{"chatcmpl" if ask.chat else "cmpl"}-{secrets.token_hex(12)}'
    self._created = int(time.time())

  def whole(
    self,
    said: Sequence[speech.Speech],
    read: Sequence[laws.Law | None],
    tops: Sequence[laws.Law | None],
  ) -> dict[str, Any]:
    """Returns the answer.

    Args:
      said: of each choice, prompt by prompt.
      read: of each prompt, if it was scored.
      tops: of each choice, prompt included, if alternatives are asked for.
    """
    ask, chat = self._ask, self._ask.chat
    answer = self._envelope('chat.completion' if chat else 'text_completion')
    answer['choices'] = [
      (self._turn if chat else self._completion)(
        index, one, read[index // ask.n], tops[index]
      )
      for index, one in enumerate(said)
    ]
    if chat and ask.return_token_ids:
      answer['prompt_token_ids'] = ask.prompts[0].ids.tolist()
    if chat and ask.prompt_logprobs is not None:
      answer['prompt_logprobs'] = self._prompt_logprobs(0, read[0])
    answer['usage'] = self.usage(said)
    return answer

  def usage(self, said: Sequence[speech.Speech]) -> dict[str, int]:
    """Counts tokens; a prompt counts once, whatever n is."""
    prompt = sum(len(prompt.ids) for prompt in self._ask.prompts)
    drawn = sum(len(one.ids) for one in said)
    return {
      'prompt_tokens': prompt,
      'completion_tokens': drawn,
      'total_tokens': prompt + drawn,
    }

  def first(self, index: int) -> dict[str, Any] | None:
    """The chunk that opens a choice; None where there is none."""
    ask, prompt = self._ask, self._ask.prompts[index // self._ask.n]
    if ask.chat:
      delta = {'role': 'assistant', 'content': ''}
      opened = self._chunk(index, {'delta': delta})
    elif ask.echo or ask.return_token_ids:
      opened = self._chunk(index, {'text': prompt.text if ask.echo else ''})
    else:
      return None
    if ask.return_token_ids:
      where = opened if ask.chat else opened['choices'][0]
      where['prompt_token_ids'] = prompt.ids.tolist()
    return opened

  def more(
    self, index: int, one: speech.Speech, text: str, start: int
  ) -> dict[str, Any]:
    """The chunk of new text, and of the tokens from `start` on."""
    body: dict[str, Any] = {'text': text}
    if self._ask.chat:
      body = {'delta': {'content': text} if text else {}}
    if self._ask.logprobs is not None:
      entries = (one.ids[start:], one.logprobs[start:])
      body['logprobs'] = (
        self._chat_logprobs(*entries, None)
        if self._ask.chat
        else self._legacy(*entries, None, 0)
      )
    if self._ask.return_token_ids:
      body['token_ids'] = one.ids[start:]
    return self._chunk(index, body, one)

  def last(self, said: Sequence[speech.Speech]) -> dict[str, Any]:
    """The chunk of counts, without a choice."""
    return {**self._chunk(0, {}), 'choices': [], 'usage': self.usage(said)}

  def _envelope(self, kind: str) -> dict[str, Any]:
    return {
      'id': self._id,
      'object': kind,
      'created': self._created,
      'model': self._name,
      'system_fingerprint': FINGERPRINT,
    }

  def _chunk(self, index, body, one: speech.Speech | None = None):
    kind = 'chat.completion.chunk' if self._ask.chat else 'text_completion'
    choice = {
      'index': index,
      'logprobs': None,
      **body,
      'finish_reason': one and one.finish,
    }
    chunk = {**self._envelope(kind), 'choices': [choice]}
    return {**chunk, 'usage': None} if self._ask.include_usage else chunk

  def _choice(self, index: int, one: speech.Speech) -> dict[str, Any]:
    stops = one.ids[-1:] if one.finish == 'stop' else []
    choice = {
      'index': index,
      'logprobs': None,
      'finish_reason': one.finish,
      # As vLLM has it: the string, or the token, that ended it.
      'stop_reason': one.stop or next(iter(stops), None),
    }
    if self._ask.return_token_ids:
      choice['token_ids'] = one.ids
    return choice

  def _turn(self, index, one, read, top) -> dict[str, Any]:
    choice = self._choice(index, one)
    choice['message'] = {
      'role': 'assistant',
      'content': one.text,
      'refusal': None,
    }
    if self._ask.logprobs is not None:
      choice['logprobs'] = self._chat_logprobs(
        one.ids, one.logprobs, self._alternatives(top, one, index)
      )
    return choice

  def _completion(self, index, one, read, top) -> dict[str, Any]:
    ask, prompt = self._ask, self._ask.prompts[index // self._ask.n]
    choice = self._choice(index, one)
    choice['text'] = prompt.text + one.text if ask.echo else one.text
    if ask.return_token_ids:
      choice['prompt_token_ids'] = prompt.ids.tolist()
    if ask.prompt_logprobs is not None:
      choice['prompt_logprobs'] = self._prompt_logprobs(index // ask.n, read)
    if ask.logprobs is None:
      return choice
    ids, logprobs = list(one.ids), list(one.logprobs)
    tops = self._alternatives(top, one, index)
    if ask.echo:
      ids = prompt.ids.tolist() + ids
      logprobs = [None, *read.logprobs[1:].tolist(), *logprobs]
      if tops is not None:
        before = _tops(read, ask.logprobs, 0, len(prompt.ids))
        tops = [None, *before[1:], *tops]
    choice['logprobs'] = self._legacy(ids, logprobs, tops, 0)
    return choice

  def _alternatives(self, top, one: speech.Speech, index: int):
    """Of what a choice has drawn: [(id, logprob), ...] per token, or None."""
    if not self._ask.logprobs:
      return None
    if top is None:
      return []
    start = len(self._ask.prompts[index // self._ask.n].ids)
    return _tops(top, self._ask.logprobs, start, start + len(one.ids))

  def _name_of(self, token: int) -> str:
    if self._ask.tokens_as_ids:
      return f'token_id:{token}'
    return text_of(self._policy, token)

  def _legacy(self, ids, logprobs, tops, offset: int) -> dict[str, Any]:
    """The `logprobs` of completions; offsets are into the choice's text."""
    names = [self._name_of(token) for token in ids]
    offsets = []
    for token in ids:
      offsets.append(offset)
      offset += len(text_of(self._policy, token))
    beside = None
    if tops is not None:
      beside = [
        entry and {self._name_of(i): x for i, x in [*entry, (token, own)]}
        for token, own, entry in zip(ids, logprobs, tops, strict=True)
      ]
    return {
      'tokens': names,
      'token_logprobs': logprobs,
      'top_logprobs': beside,
      'text_offset': offsets,
    }

  def _chat_logprobs(self, ids, logprobs, tops) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
      text = text_of(self._policy, token)
      whole = None if '\ufffd' in text else list(text.encode())
      return {'token': self._name_of(token), 'logprob': logprob, 'bytes': whole}

    tops = [[]] * len(ids) if tops is None else tops
    return {
      'refusal': None,
      'content': [
        {**entry(token, own), 'top_logprobs': [entry(*x) for x in some]}
        for token, own, some in zip(ids, logprobs, tops, strict=True)
      ],
    }

  def _prompt_logprobs(self, prompt: int, read: laws.Law) -> list[Any]:
    """vLLM's form: the token's own entry, and the likeliest ones'."""
    ids = self._ask.prompts[prompt].ids.tolist()
    tops = _tops(read, self._ask.prompt_logprobs, 0, len(ids))
    rows: list[Any] = [None]
    for place in range(1, len(ids)):
      own = (ids[place], float(read.logprobs[place]), int(read.ranks[place]))
      some = [(*x, rank) for rank, x in enumerate(tops[place], 1)]
      rows.append(
        {
          str(token): {
            'logprob': logprob,
            'rank': rank,
            'decoded_token': text_of(self._policy, token),
          }
          for token, logprob, rank in [*some, own]
        }
      )
    return rows


def text_of(policy: policies.Policy, token: int) -> str:
  """A token alone: its text, or its name if it is special."""
  text = policy.text([token])
  if text or policy.renderer is None:
    return text
  try:
    return policy.renderer.tokenizer.text(token) or ''
  except IndexError:  # a row of the model that no token has
    return ''


def _tops(law: laws.Law, count: int, start: int, end: int):
  """[(id, logprob), ...] of the likeliest tokens, per place."""
  pairs = zip(
    law.top_ids[start:end, :count].tolist(),
    law.top_logprobs[start:end, :count].tolist(),
    strict=True,
  )
  return [list(zip(*pair, strict=True)) for pair in pairs]
