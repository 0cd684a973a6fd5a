"""Tinker's messages in the terms of this code base.

The types of requests and responses, and their protobuf, are those of the SDK
(`pip install 'posttrain[tinker]'`). `read` parses a body, `data` and `sampling`
check what the SDK's types leave open, and `gradient_result` and `sample_result`
write the two results that are protobuf. A feature that this server does not
have is refused by name, with status 422: of other statuses the SDK retries 400.

Axes: T tokens, A alternatives.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from tinker import types
from tinker.proto import tinker_public_pb2

from posttrain import schema
from posttrain.checkpoints import policies
from posttrain.decode import requests, schedule
from posttrain.serve import protocol, worker
from posttrain.training import trainer
from posttrain.util import errors

# JSON bodies; forward_backward is protobuf.
TYPES = {
  'create_session': types.CreateSessionRequest,
  'create_sampling_session': types.CreateSamplingSessionRequest,
  'create_model': types.CreateModelRequest,
  'optim_step': types.OptimStepRequest,
  'save_weights': types.SaveWeightsRequest,
  'save_weights_for_sampler': types.SaveWeightsForSamplerRequest,
  'save_weights_external': types.SaveWeightsExternalRequest,
  'load_weights': types.LoadWeightsRequest,
  'asample': types.SampleRequest,
  'get_info': types.GetInfoRequest,
  'retrieve_future': types.FutureRetrieveRequest,
  'session_heartbeat': types.SessionHeartbeatRequest,
}
FULL = ':full'  # ends the name of a base model all of whose weights are trained
_DTYPES = {
  tinker_public_pb2.DTYPE_FLOAT32: np.float32,
  tinker_public_pb2.DTYPE_INT64: np.int64,
  tinker_public_pb2.DTYPE_INT32: np.int32,
}
_NAME = re.compile(r'(?!\.)[\w.-]{1,128}', re.ASCII)


class Sampling(NamedTuple):
  """A prompt to continue, and to score."""

  requests: list[requests.Request]  # one per sample; without ids
  stops: tuple[str, ...]
  scores: bool  # whether logprobs of the prompt are returned
  top: int  # alternatives per token of the prompt


def require(ok: Any, name: str, must: str, got: Any) -> None:
  """Raises Refused, with 422, unless a field's value is right."""
  if not ok:
    raise protocol.Refused(
      422, f'{name} must {must}: got {errors.quote(got)}', name
    )


def read(verb: str, body: bytes) -> Any:
  """Parses the body of a route as the SDK's type.

  Raises:
    Refused: with 422.
  """
  if verb == 'forward_backward':
    try:
      return tinker_public_pb2.ForwardBackwardRequest.FromString(body)
    except Exception as error:  # protobuf's own kind
      require(False, 'the body', 'be a ForwardBackwardRequest', error)
  try:
    return TYPES[verb].model_validate_json(body)
  except ValueError as error:  # pydantic's
    first = error.errors()[0]  # type: ignore[attr-defined]
    name = '.'.join(map(str, first['loc'])) or 'the body'
    require(False, name, f'be valid: {first["msg"]}', first['input'])
    raise


def place(request: Any) -> tuple[str, int]:
  """Returns the model or sampling session of a request, and its number there.

  Raises:
    Refused: the request has none.
  """
  if getattr(request, 'model_seq_id', None) is not None:
    return f'{request.session_id}:train:{request.model_seq_id}', 0
  number, is_sample = request.seq_id, isinstance(request, types.SampleRequest)
  ok = number is not None and number >= 1 - is_sample
  require(ok, 'seq_id', f'be >= {1 - is_sample}', number)
  owner = request.sampling_session_id if is_sample else request.model_id
  return owner, number


def check_name(name: str | None) -> None:
  """Raises Refused unless a checkpoint's name can be a folder's."""
  must = 'be letters, digits, ".", "_" and "-", and not begin with "."'
  require(name and _NAME.fullmatch(name), 'path', must, name)


def seed(*parts: Any) -> int:
  """Returns a number below 2**63 that depends on the parts alone."""
  digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
  return int.from_bytes(digest) >> 1


def lora(config: types.LoraConfig) -> schema.Lora:
  """Returns the options of an adapter.

  Raises:
    ValueError: the rank is out of bounds, or nothing is trained.
  """
  # The head is never corrected: `train_unembed`, the SDK's default, is ignored.
  return trainer.lora_options(
    config.rank, attention=config.train_attn, mlp=config.train_mlp
  )


def data(
  request: Any, policy: policies.Policy, capacity: int
) -> tuple[list[trainer.Datum], dict[str, float]]:
  """Returns the data of forward_backward, and the loss's numbers.

  Args:
    request: a ForwardBackwardRequest.
    policy: the base model.
    capacity: the most tokens of a datum.

  Raises:
    Refused, ValueError: a datum or the loss is wrong.
  """
  loss, numbers = request.loss_fn, dict(request.loss_fn_config)
  texts = [k for k, x in request.loss_fn_config_v2.items() if x.text]
  require(not texts, 'loss_fn_config', 'have numbers as values', texts)
  require(request.data, 'data', 'not be empty', [])
  result = []
  options = trainer.loss_options(loss, **numbers)
  names = {'target_tokens', 'weights'}
  if options is not None:
    names = {'target_tokens', 'logprobs', 'advantages'}
  for i, datum in enumerate(request.data):
    where, given = f'data[{i}]', datum.loss_fn_inputs
    must = f'be {", ".join(sorted(names))} for {loss}'
    require(set(given) == names, f'{where}.loss_fn_inputs', must, [*given])
    chunks = datum.model_input
    ok = all(x.WhichOneof('chunk') == 'encoded_text' for x in chunks)
    require(ok, f'{where}.model_input', 'be of tokens', 'other chunks')
    ids = b''.join(x.encoded_text.tokens for x in chunks)
    arrays = {k: _vector(x, f'{where}.{k}') for k, x in given.items()}
    targets = arrays.pop('target_tokens').astype(np.int32)
    arrays = {k: x.astype(np.float32) for k, x in arrays.items()}
    new = trainer.Datum(np.frombuffer(ids, np.int32), targets, **arrays)
    trainer.check(new, where, policy.model.vocab_size, options)
    must = f'have at most {capacity} tokens (--max_model_len)'
    require(len(new.ids) <= capacity, where, must, len(new.ids))
    result.append(new)
  return result, numbers


def _vector(tensor: Any, name: str) -> np.ndarray:
  ok = tensor.WhichOneof('encoding') == 'dense' and len(tensor.shape) < 2
  dtype = _DTYPES.get(tensor.dtype)
  require(ok and dtype, name, 'be a dense vector', 'another kind of tensor')
  return np.frombuffer(tensor.dense, dtype)


def sampling(
  request: types.SampleRequest, policy: policies.Policy, capacity: int
) -> Sampling:
  """Returns a request's sequences to sample, and what to score.

  Args:
    request: its types are checked.
    policy: the base model.
    capacity: tokens of a sequence.

  Raises:
    Refused, ValueError: it does not fit the model, or is not served.
  """
  for name in (
    'topk_sample_logprobs',
    'target_prompt_logprobs',
    'prompt_alt_tokens_k',
    'prompt_logprobs_last_n',
    'record_stability_info',
  ):
    value = getattr(request, name)
    require(not value, name, 'be left out: it is not served', value)
  ids, size = request.prompt.to_ints(), policy.model.vocab_size
  ok = ids and all(0 <= x < size for x in ids)
  require(ok, 'prompt', f'have some ids, in [0, {size})', ids)
  must = f'leave space in the context of {capacity} tokens (--max_model_len)'
  require(len(ids) < capacity, 'prompt', must, len(ids))
  params, count = request.sampling_params, request.num_samples
  require(1 <= count <= 1024, 'num_samples', 'be in [1, 1024]', count)
  left = capacity - len(ids)
  most = left if params.max_tokens is None else min(params.max_tokens, left)
  require(most > 0, 'sampling_params.max_tokens', 'be >= 1', most)
  stop = [params.stop] if isinstance(params.stop, str) else params.stop
  stops = tuple(x for x in stop or () if isinstance(x, str))
  # An empty list disables the end of the model's turn, too.
  own = policy.stop_ids if stop is None or stop else ()
  given = (x for x in stop or () if isinstance(x, int))
  stop_ids = tuple(dict.fromkeys((*own, *given)))
  ok = all(stops) and len(stops) <= protocol.STOPS
  ok = ok and len(stop_ids) <= schedule.STOP_IDS
  ok = ok and not (stops and policy.renderer is None)
  must = (
    f'be at most {protocol.STOPS} texts, of a model with a tokenizer, or '
    f"{schedule.STOP_IDS} ids, with the model's own"
  )
  require(ok, 'sampling_params.stop', must, params.stop)
  top, limit = request.topk_prompt_logprobs, worker.MAX_ALTERNATIVES
  ok = 0 <= top <= limit
  require(ok, 'topk_prompt_logprobs', f'be in [0, {limit}]', top)
  source = (request.sampling_session_id, request.seq_id)
  if params.seed is not None:
    source = (params.seed,)
  law = requests.Sampling(
    params.temperature, max(params.top_k, 0), params.top_p
  )
  return Sampling(
    [
      requests.Request(
        0,
        np.asarray(ids, np.int32),
        most,
        stop_ids,
        law,
        key=seed(*source, index),
      )
      for index in range(count)
    ],
    stops,
    bool(request.prompt_logprobs),
    top,
  )


def gradient_result(
  logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]
) -> bytes:
  """Writes the result of forward_backward; logprobs: f32[T] per datum."""
  ends = np.cumsum([0, *(4 * len(x) for x in logprobs)], dtype=np.int64)
  joined = np.concatenate(logprobs).astype(np.float32)
  field = tinker_public_pb2.BatchedTensor(
    data=joined.tobytes(),
    offsets=ends.tobytes(),
    dtype=tinker_public_pb2.DTYPE_FLOAT32,
  )
  record = tinker_public_pb2.ArrayRecord(
    num_datums=len(logprobs), fields={'logprobs': field}
  )
  return tinker_public_pb2.ForwardBackwardOutput(
    loss_fn_output_type='ArrayRecord',
    loss_fn_outputs=[record],
    metrics={name: float(value) for name, value in metrics.items()},
  ).SerializeToString(deterministic=True)


def sample_result(
  sequences: Sequence[tuple[Sequence[int], Sequence[float], bool]],
  asked: Sampling,
  scores: worker.TokenLogprobs | None,
) -> bytes:
  """Writes the result of sampling.

  Args:
    sequences: (ids, logprobs, whether it stopped before max_tokens).
    asked: the request.
    scores: of the prompt; None = not requested.
  """
  result = tinker_public_pb2.SampleResponse(
    sequences=[
      tinker_public_pb2.SampledSequence(
        tokens=np.asarray(ids, np.int32).tobytes(),
        logprobs=np.asarray(logprobs, np.float32).tobytes(),
        stop_reason=tinker_public_pb2.STOP_REASON_STOP
        if stopped
        else tinker_public_pb2.STOP_REASON_LENGTH,
      )
      for ids, logprobs, stopped in sequences
    ]
  )
  if scores is not None:
    logprobs = scores.logprobs.astype(np.float32)
    logprobs[0] = np.nan  # no token precedes it
    if asked.scores:
      result.prompt_logprobs = logprobs.tobytes()
    if asked.top:
      ids = scores.top_ids[:, : asked.top].astype(np.int32)
      values = scores.top_logprobs[:, : asked.top].astype(np.float32)
      # The SDK's mark of a token without alternatives.
      ids[0], values[0] = 0, -99999.0
      result.topk_prompt_logprobs.CopyFrom(
        tinker_public_pb2.TopkLogprobs(
          token_ids=ids.tobytes(),
          logprobs=values.tobytes(),
          k=asked.top,
          length=len(ids),
        )
      )
  return result.SerializeToString(deterministic=True)
