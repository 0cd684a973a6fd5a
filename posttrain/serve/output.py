"""The JSON objects of a response, in OpenAI's form, else in vLLM's.

Logprobs are in nats, of the distribution before truncation, at the request's
temperature (at 1 if that is 0): those of sampled tokens come from sampling,
those of prompts from a forward over the whole prompt.
"""

import secrets
import time
from collections.abc import Sequence
from typing import Any

import posttrain
from posttrain.checkpoints import policies
from posttrain.serve import detokenizer, protocol, token_logprobs

FINGERPRINT = f'posttrain-{posttrain.__version__}'


class Writer:
  """Writes the response to one request."""

  def __init__(
    self, request: protocol.ApiRequest, policy: policies.Policy, name: str
  ):
    """Draws the response's id, and records its time.

    Args:
      request: the parsed request.
      policy: the model.
      name: the model's name.
    """
    self._request, self._policy, self._name = request, policy, name
    kind = 'chatcmpl' if request.chat else 'cmpl'
    self._id = f'{kind}-{secrets.token_hex(12)}'
    self._created = int(time.time())
    self._token_texts: dict[int, str] = {}

  def whole(
    self,
    choices: Sequence[detokenizer.Detokenizer],
    prompt_scores: Sequence[token_logprobs.TokenLogprobs | None],
    choice_scores: Sequence[token_logprobs.TokenLogprobs | None],
  ) -> dict[str, Any]:
    """Returns the response without streaming.

    Args:
      choices: prompt by prompt.
      prompt_scores: one per prompt; None = not scored.
      choice_scores: one per choice, prompt included; None = not scored.
    """
    request, chat = self._request, self._request.chat
    body = self._envelope('chat.completion' if chat else 'text_completion')
    body['choices'] = [
      (self._chat_choice if chat else self._completion)(
        index, choice, prompt_scores[index // request.n], choice_scores[index]
      )
      for index, choice in enumerate(choices)
    ]
    if chat and request.return_token_ids:
      body['prompt_token_ids'] = request.prompts[0].ids.tolist()
    if chat and request.prompt_logprobs is not None:
      body['prompt_logprobs'] = self._prompt_logprobs(0, prompt_scores[0])
    body['usage'] = self.usage(choices)
    return body

  def usage(self, choices: Sequence[detokenizer.Detokenizer]) -> dict[str, int]:
    """Returns token counts; a prompt counts once, whatever n is."""
    prompt = sum(len(prompt.ids) for prompt in self._request.prompts)
    sampled = sum(len(choice.ids) for choice in choices)
    return {
      'prompt_tokens': prompt,
      'completion_tokens': sampled,
      'total_tokens': prompt + sampled,
    }

  def first(self, index: int) -> dict[str, Any] | None:
    """Returns the chunk that opens a choice; None if there is none."""
    request = self._request
    prompt = request.prompts[index // request.n]
    if request.chat:
      delta = {'role': 'assistant', 'content': ''}
      chunk = self._chunk(index, {'delta': delta})
    elif request.echo or request.return_token_ids:
      chunk = self._chunk(index, {'text': prompt.text if request.echo else ''})
    else:
      return None
    if request.return_token_ids:
      parent = chunk if request.chat else chunk['choices'][0]
      parent['prompt_token_ids'] = prompt.ids.tolist()
    return chunk

  def more(
    self, index: int, choice: detokenizer.Detokenizer, text: str, start: int
  ) -> dict[str, Any]:
    """Returns the chunk of new text, and of the tokens from `start` on."""
    fields: dict[str, Any] = {'text': text}
    if self._request.chat:
      fields = {'delta': {'content': text} if text else {}}
    if self._request.logprobs is not None:
      tokens = (choice.ids[start:], choice.logprobs[start:])
      fields['logprobs'] = (
        self._chat_logprobs(*tokens, None)
        if self._request.chat
        else self._completion_logprobs(*tokens, None, 0)
      )
    if self._request.return_token_ids:
      fields['token_ids'] = choice.ids[start:]
    return self._chunk(index, fields, choice)

  def last(self, choices: Sequence[detokenizer.Detokenizer]) -> dict[str, Any]:
    """Returns the chunk of token counts, without a choice."""
    return {**self._chunk(0, {}), 'choices': [], 'usage': self.usage(choices)}

  def _envelope(self, kind: str) -> dict[str, Any]:
    return {
      'id': self._id,
      'object': kind,
      'created': self._created,
      'model': self._name,
      'system_fingerprint': FINGERPRINT,
    }

  def _chunk(
    self, index, fields, choice: detokenizer.Detokenizer | None = None
  ):
    kind = 'chat.completion.chunk' if self._request.chat else 'text_completion'
    body = {
      'index': index,
      'logprobs': None,
      **fields,
      'finish_reason': choice and choice.finish,
    }
    chunk = {**self._envelope(kind), 'choices': [body]}
    return {**chunk, 'usage': None} if self._request.include_usage else chunk

  def _choice(
    self, index: int, choice: detokenizer.Detokenizer
  ) -> dict[str, Any]:
    stops = choice.ids[-1:] if choice.finish == 'stop' else []
    body = {
      'index': index,
      'logprobs': None,
      'finish_reason': choice.finish,
      # As in vLLM: the string, or the token, that ended the choice.
      'stop_reason': choice.stop or next(iter(stops), None),
    }
    if self._request.return_token_ids:
      body['token_ids'] = choice.ids
    return body

  def _chat_choice(
    self, index, choice, prompt_scores, choice_scores
  ) -> dict[str, Any]:
    del prompt_scores  # part of the response, not of a choice
    body = self._choice(index, choice)
    body['message'] = {
      'role': 'assistant',
      'content': choice.text,
      'refusal': None,
    }
    if self._request.logprobs is not None:
      body['logprobs'] = self._chat_logprobs(
        choice.ids,
        choice.logprobs,
        self._alternatives(choice_scores, choice, index),
      )
    return body

  def _completion(
    self, index, choice, prompt_scores, choice_scores
  ) -> dict[str, Any]:
    request = self._request
    prompt = request.prompts[index // request.n]
    body = self._choice(index, choice)
    body['text'] = prompt.text + choice.text if request.echo else choice.text
    if request.return_token_ids:
      body['prompt_token_ids'] = prompt.ids.tolist()
    if request.prompt_logprobs is not None:
      body['prompt_logprobs'] = self._prompt_logprobs(
        index // request.n, prompt_scores
      )
    if request.logprobs is None:
      return body
    ids, logprobs = list(choice.ids), list(choice.logprobs)
    tops = self._alternatives(choice_scores, choice, index)
    if request.echo:
      ids = prompt.ids.tolist() + ids
      logprobs = [None, *prompt_scores.logprobs[1:].tolist(), *logprobs]
      if tops is not None:
        before = _tops(prompt_scores, request.logprobs, 0, len(prompt.ids))
        tops = [None, *before[1:], *tops]
    body['logprobs'] = self._completion_logprobs(ids, logprobs, tops, 0)
    return body

  def _alternatives(
    self,
    choice_scores: token_logprobs.TokenLogprobs | None,
    choice: detokenizer.Detokenizer,
    index: int,
  ):
    """Returns [(id, logprob), ...] per sampled token; None = not requested."""
    if not self._request.logprobs:
      return None
    if choice_scores is None:
      return []
    start = len(self._request.prompts[index // self._request.n].ids)
    end = start + len(choice.ids)
    return _tops(choice_scores, self._request.logprobs, start, end)

  def _token_name(self, token: int) -> str:
    if self._request.tokens_as_ids:
      return f'token_id:{token}'
    return self._text_of(token)

  def _text_of(self, token: int) -> str:
    text = self._token_texts.get(token)
    if text is None:
      text = self._token_texts[token] = text_of(self._policy, token)
    return text

  def _completion_logprobs(
    self, ids, logprobs, tops, offset: int
  ) -> dict[str, Any]:
    """Returns the `logprobs` of completions; offsets are into the text."""
    names = [self._token_name(token) for token in ids]
    offsets = []
    for token in ids:
      offsets.append(offset)
      offset += len(self._text_of(token))
    top_logprobs = None
    if tops is not None:
      top_logprobs = [
        entry and {self._token_name(i): x for i, x in [*entry, (token, own)]}
        for token, own, entry in zip(ids, logprobs, tops, strict=True)
      ]
    return {
      'tokens': names,
      'token_logprobs': logprobs,
      'top_logprobs': top_logprobs,
      'text_offset': offsets,
    }

  def _chat_logprobs(self, ids, logprobs, tops) -> dict[str, Any]:
    """Returns the `logprobs` of chat completions."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
      text = self._text_of(token)
      data = None if '\ufffd' in text else list(text.encode())
      name = self._token_name(token)
      return {'token': name, 'logprob': logprob, 'bytes': data}

    tops = [[]] * len(ids) if tops is None else tops
    return {
      'refusal': None,
      'content': [
        {**entry(token, own), 'top_logprobs': [entry(*x) for x in top]}
        for token, own, top in zip(ids, logprobs, tops, strict=True)
      ],
    }

  def _prompt_logprobs(self, index: int, prompt_scores) -> list[Any]:
    """Returns vLLM's form: each token's entry, and those of the likeliest."""
    ids = self._request.prompts[index].ids.tolist()
    tops = _tops(prompt_scores, self._request.prompt_logprobs, 0, len(ids))
    logprobs, ranks = prompt_scores.logprobs, prompt_scores.ranks
    rows: list[Any] = [None]
    for place in range(1, len(ids)):
      own = (ids[place], float(logprobs[place]), int(ranks[place]))
      top = [(*x, rank) for rank, x in enumerate(tops[place], 1)]
      rows.append(
        {
          str(token): {
            'logprob': logprob,
            'rank': rank,
            'decoded_token': self._text_of(token),
          }
          for token, logprob, rank in [*top, own]
        }
      )
    return rows


def text_of(policy: policies.Policy, token: int) -> str:
  """Returns the text of a single token; the name of a special token."""
  text = policy.text([token])
  if text or policy.renderer is None:
    return text
  try:
    return policy.renderer.tokenizer.text(token) or ''
  except IndexError:  # the model has more rows than the tokenizer tokens
    return ''


def _tops(
  scored: token_logprobs.TokenLogprobs, count: int, start: int, end: int
):
  """Returns [(id, logprob), ...] of the likeliest tokens, per place."""
  pairs = zip(
    scored.top_ids[start:end, :count].tolist(),
    scored.top_logprobs[start:end, :count].tolist(),
    strict=True,
  )
  return [list(zip(*pair, strict=True)) for pair in pairs]
