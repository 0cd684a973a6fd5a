"""Tinker's messages in the terms of this code base.

The types of requests and responses, and their protobuf, are those of the SDK
(`pip install 'posttrain[tinker]'`). `read` parses a body, `data` and `sampling`
check what the SDK's types leave open, and `gradient_result` and `sample_result`
write the two results that are protobuf. A feature that this server does not
have is refused by name.

Axes: T tokens, A alternatives.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tinker import types
from tinker.proto import tinker_public_pb2
from tinker.types import topk_logprobs

from posttrain import schema
from posttrain.decode import requests
from posttrain.serve import call, protocol, worker
from posttrain.training import trainer

# JSON bodies that are kept; forward_backward is protobuf.
TYPES = {
  'create_sampling_session': types.CreateSamplingSessionRequest,
  'create_model': types.CreateModelRequest,
  'optim_step': types.OptimStepRequest,
  'save_weights': types.SaveWeightsRequest,
  'save_weights_for_sampler': types.SaveWeightsForSamplerRequest,
  'save_weights_external': types.SaveWeightsExternalRequest,
  'load_weights': types.LoadWeightsRequest,
  'asample': types.SampleRequest,
}
FULL = ':full'  # ends the name of a base model all of whose weights are trained
_DTYPES = {
  tinker_public_pb2.DTYPE_FLOAT32: np.float32,
  tinker_public_pb2.DTYPE_INT64: np.int64,
}
_STOP_REASONS = {
  'stop': tinker_public_pb2.STOP_REASON_STOP,
  'length': tinker_public_pb2.STOP_REASON_LENGTH,
}
_INPUTS = {'target_tokens', 'weights', 'logprobs', 'advantages'}
# Fields that are not served, with the value that has no effect.
_NEUTRAL = {
  'topk_sample_logprobs': 0,
  'target_prompt_logprobs': None,
  'prompt_alt_tokens_k': 0,
  'prompt_logprobs_last_n': None,
  'kind': 'snapshot',
  'age_encryption_recipients': None,
}


def read(verb: str, body: bytes) -> Any:
  """Parses the body of a route as the SDK's type.

  Raises:
    ValueError, DecodeError: the body is malformed.
  """
  if verb == 'forward_backward':
    return tinker_public_pb2.ForwardBackwardRequest.FromString(body)
  return TYPES[verb].model_validate_json(body)


def place(request: Any) -> tuple[str, int]:
  """Returns whose request it is, and its number there.

  That is a model, a sampling session, or the sampling sessions of a session.

  Raises:
    Refused: the request has no number.
  """
  if isinstance(request, types.CreateSamplingSessionRequest):
    return f'{request.session_id}:sample', request.sampling_session_seq_id
  if getattr(request, 'model_seq_id', None) is not None:
    return f'{request.session_id}:train:{request.model_seq_id}', 0
  is_sample = isinstance(request, types.SampleRequest)
  number, first = request.seq_id or 0, 1 - is_sample
  protocol.require(number >= first, 'seq_id', f'be >= {first}', number)
  owner = request.sampling_session_id if is_sample else request.model_id
  return owner, number


def check_served(request: Any) -> None:
  """Refuses the fields and the optimizers that are not served."""
  for name, neutral in _NEUTRAL.items():
    value = getattr(request, name, neutral)
    must = f'be {neutral!r}: another value is not served'
    protocol.require(value == neutral, name, must, value)
  for name in ('optim_params', 'optimizer_config'):
    kind = getattr(getattr(request, name, None), 'type', 'adamw')
    protocol.require(kind == 'adamw', name, "be of 'adamw'", kind)


def seed(*parts: Any) -> int:
  """Returns a number below 2**63 that depends on the parts alone."""
  return random.Random(repr(parts)).getrandbits(63)


def data(
  request: Any, served: worker.Worker
) -> tuple[list[trainer.Datum], schema.RlLoss | None]:
  """Returns the checked data of forward_backward, and the loss's options.

  Args:
    request: a ForwardBackwardRequest.
    served: the base model, and the limits.

  Raises:
    ValueError: a datum or the loss is wrong.
  """
  numbers = {
    k: x.text or x.number for k, x in request.loss_fn_config_v2.items()
  }
  result = []
  for i, datum in enumerate(request.data):
    where, given = f'data[{i}]', datum.loss_fn_inputs
    ok = {'target_tokens'} <= set(given) <= _INPUTS
    must = f'be target_tokens, and others of {sorted(_INPUTS)}'
    protocol.require(ok, f'{where}.loss_fn_inputs', must, [*given])
    chunks = datum.model_input
    ok = all(x.WhichOneof('chunk') == 'encoded_text' for x in chunks)
    protocol.require(ok, f'{where}.model_input', 'be of tokens', 'others')
    ids = b''.join(x.encoded_text.tokens for x in chunks)
    # Sparse tensors have no dense values, and others too many.
    arrays = {
      k: np.frombuffer(x.dense, _DTYPES[x.dtype]) for k, x in given.items()
    }
    targets = arrays.pop('target_tokens')
    new = trainer.Datum(np.frombuffer(ids, np.int32), targets, **arrays)
    size = len(new.ids)
    protocol.require_fit(
      size <= served.capacity, where, f'{size} tokens', served.capacity
    )
    result.append(new)
  return result, trainer.check(
    result, request.loss_fn, numbers, served.policy.model.vocab_size
  )


def sampling(
  request: types.SampleRequest, served: worker.Worker
) -> tuple[list[requests.Request], tuple[str, ...]]:
  """Returns a request's sequences to sample, without ids, and its stop texts.

  Args:
    request: its types are checked.
    served: the base model, and the limits.

  Raises:
    ValueError: it does not fit the model, or is not served.
  """
  ids = protocol.token_ids(request.prompt.to_ints(), 'prompt', served)
  params, count = request.sampling_params, request.num_samples
  protocol.require(1 <= count <= 1024, 'num_samples', 'be in [1, 1024]', count)
  left = served.capacity - len(ids)
  most = left if params.max_tokens is None else min(params.max_tokens, left)
  got = f'{most} tokens after a prompt of {len(ids)}'
  protocol.require_fit(most > 0, 'max_tokens', got, served.capacity)
  stop = [params.stop] if isinstance(params.stop, str) else params.stop
  stops, stop_ids = protocol.stops(
    [x for x in stop or () if isinstance(x, str)],
    [x for x in stop or () if isinstance(x, int)],
    # An empty list disables the end of the model's turn, too.
    served.policy.stop_ids if stop is None or stop else (),
    served,
  )
  top, limit = request.topk_prompt_logprobs, worker.MAX_ALTERNATIVES
  must = f'be in [0, {limit}]'
  protocol.require(0 <= top <= limit, 'topk_prompt_logprobs', must, top)
  source = request.sampling_session_id, request.seq_id
  if params.seed is not None:
    source = (params.seed,)
  law = requests.Sampling(
    params.temperature, max(params.top_k, 0), params.top_p
  )
  sequences = [
    requests.Request(0, ids, most, stop_ids, law, key=seed(*source, index))
    for index in range(count)
  ]
  return sequences, stops


def gradient_result(
  logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]
) -> bytes:
  """Writes the result of forward_backward; logprobs: f32[T] per datum."""
  ends = np.cumsum([0, *(x.nbytes for x in logprobs)], dtype=np.int64)
  field = tinker_public_pb2.BatchedTensor(
    data=b''.join(x.tobytes() for x in logprobs),
    offsets=ends.tobytes(),
    dtype=tinker_public_pb2.DTYPE_FLOAT32,
  )
  record = tinker_public_pb2.ArrayRecord(
    num_datums=len(logprobs), fields={'logprobs': field}
  )
  return tinker_public_pb2.ForwardBackwardOutput(
    loss_fn_output_type='ArrayRecord', loss_fn_outputs=[record], metrics=metrics
  ).SerializeToString()


def sample_result(
  texts: Sequence[call.Detokenizer],
  request: types.SampleRequest,
  scores: worker.TokenLogprobs | None = None,
) -> bytes:
  """Writes the result of sampling.

  Args:
    texts: the samples, which have ended.
    request: the request.
    scores: those of the prompt; None = not requested.
  """
  result = tinker_public_pb2.SampleResponse(
    sequences=[
      tinker_public_pb2.SampledSequence(
        tokens=np.array(x.ids, np.int32).tobytes(),
        logprobs=np.array(x.logprobs, np.float32).tobytes(),
        stop_reason=_STOP_REASONS[x.finish],
      )
      for x in texts
    ]
  )
  if scores is not None:
    logprobs, top = scores.logprobs, request.topk_prompt_logprobs
    logprobs[0] = np.nan  # no token precedes it
    if request.prompt_logprobs:
      result.prompt_logprobs = logprobs.tobytes()
    if top:
      ids, values = scores.top_ids[:, :top], scores.top_logprobs[:, :top]
      # The SDK's mark of a token without alternatives.
      ids[0], values[0] = 0, topk_logprobs.MASK_LOGPROB
      result.topk_prompt_logprobs.CopyFrom(
        tinker_public_pb2.TopkLogprobs(
          token_ids=ids.tobytes(),
          logprobs=values.tobytes(),
          k=top,
          length=len(ids),
        )
      )
  return result.SerializeToString()
