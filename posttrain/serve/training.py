"""A training service: models that clients train and sample, on one device.

1. `accept` checks a request, stores it in the journal, and returns the id of
   its future. A model's requests run in the order of their numbers, those of
   several sessions in turn, and so those of a session's models.
2. One thread owns the device. Between two chunks of decoding it carries out one
   request of a model.
3. Requests to sample the same weights decode together; when those have ended,
   the next weights get the engine. What a request draws depends on its sampling
   session and number alone, or on its seed, and its bits on no other request.
4. A save is a folder that all commands read. After the process was killed,
   `start` loads each model's last save that no gradient preceded, and carries
   out again what followed.

A folder of a service holds `journal.db`, and a save as `models/MODEL/NUMBER`
with the number of the request.
"""

import collections
import dataclasses
import itertools
import logging
import os
import pathlib
import shutil
import threading
import time
from collections.abc import Callable
from typing import Any

from tinker import types

from posttrain import schema, sharding
from posttrain.checkpoints import policies
from posttrain.decode import engines
from posttrain.models import peft
from posttrain.serve import call, journal, protocol, wire, worker
from posttrain.training import optim, trainer
from posttrain.util import errors

JSON, PROTOBUF = 'application/json', 'application/x-protobuf'
POLICIES_KEPT = 3  # those to sample from that stay in memory
UNNAMED_KEPT = 8  # unnamed checkpoints of a model
KINDS = {  # of checkpoints, by the request that writes them
  'save_weights': 'weights',
  'save_weights_for_sampler': 'sampler_weights',
  'save_weights_external': 'external_weights',
}


@dataclasses.dataclass(eq=False)
class Job:
  """An accepted request."""

  row: journal.Row
  request: Any  # of the SDK's type; None = it was refused
  checked: Any = None  # what the check has made of it


@dataclasses.dataclass(eq=False)
class Model:
  """A trained model."""

  id: str
  base: str  # the name that the client gave
  lora: schema.Lora | None  # None = all weights
  metadata: dict[str, str] | None
  trainer: Any = None  # None until its first request runs
  next: int = 0  # the number of the request to run next
  waiting: dict[int, Job] = dataclasses.field(default_factory=dict)
  has_gradient: bool = False
  used: float = dataclasses.field(default_factory=time.time)


@dataclasses.dataclass(eq=False)
class Checkpoint:
  """Saved weights."""

  path: str  # tinker://MODEL/KIND/NAME
  folder: pathlib.Path
  model: Model
  metadata: dict[str, str] | None
  is_listed: bool  # not the unnamed weights of a sampling session


@dataclasses.dataclass(eq=False)
class _Sequence:
  """A sample in the engine."""

  job: Job
  index: int
  text: call.Detokenizer


class Service:
  """The models of one folder, and the thread that owns the device."""

  def __init__(
    self,
    policy: policies.Policy,
    name: str,
    folder: pathlib.Path,
    *,
    slots: int,
    capacity: int,
    chunk: int,
  ):
    """Opens the folder's journal.

    Args:
      policy: the base model.
      name: its public name.
      folder: an existing folder, locked by the caller.
      slots: sequences decoded at a time.
      capacity: tokens of a sequence.
      chunk: tokens decoded between two requests of models.
    """
    self.policy, self.name, self.capacity = policy, name, capacity
    # Called in the device's thread when a request has finished.
    self.notify: Callable[[], None] = lambda: None
    self._folder = folder
    self._journal = journal.Journal(str(folder / 'journal.db'))
    self._options = engines.Options(
      slots, capacity, chunk, prefill_rows=1, prefill_tokens=64, exact=True
    )
    self._engine: Any = None
    self._changed = threading.Condition()  # guards what follows
    self.sessions: dict[str, bool] = {}  # whether they are open
    self.models: dict[str, Model] = {}
    # Of sampling sessions; None = the base model's weights.
    self.samplers: dict[str, Checkpoint | None] = {}
    self.checkpoints: dict[str, Checkpoint] = {}
    self._to_sample: dict[Checkpoint | None, list[Job]] = {}  # by weights
    self._stopped = False
    # Of the device's thread.
    self._policies: dict[Checkpoint, policies.Policy] = {}  # last used last
    self._drawing: dict[int, _Sequence] = {}
    self._results: dict[Job, list[Any]] = {}
    self._turns = collections.Counter()  # the last ones of sessions and models
    self._drawn: Checkpoint | None = None  # whose weights the engine has
    self._ids = itertools.count(1)
    self._run_verb = {
      'create_model': self._create,
      'load_weights': self._load,
      'forward_backward': self._gradient,
      'optim_step': self._update,
      **dict.fromkeys(KINDS, self._save),
    }
    self._thread = threading.Thread(target=self._run, daemon=True)

  def start(self) -> None:
    """Carries out again what the journal asks for, and starts the thread."""
    for row in self._journal.rows():
      self._restore(row)
    for model in self.models.values():
      points = self._journal.points(model.id)
      folders = {x: self._folder_of(model.id, x) for x in points}
      kept = [x for x in points if folders[x].exists()]
      if kept and self.sessions[_session_of(model.id)]:
        point = max(kept)
        model.trainer = self._open(model.lora, folders[point], True)
        model.next = point + 1
        model.waiting = {k: x for k, x in model.waiting.items() if k > point}
    for saved in list(self.checkpoints.values()):
      if not saved.folder.exists():  # deleted since, or never written
        del self.checkpoints[saved.path]
    self._thread.start()

  def stop(self, wait: float) -> bool:
    """Ends the thread after its request; False if it runs on after `wait` s."""
    with self._changed:
      self._stopped = True
      self._changed.notify_all()
    self._thread.join(wait)
    return not self._thread.is_alive()

  def _restore(self, row: journal.Row) -> None:
    """Takes a row of the journal."""
    verb, request = row.verb, None
    owners = self.samplers if verb == 'asample' else self.models
    if verb == 'asample' and row.kind:
      return
    try:
      if verb == 'finish':
        self._finish_session(row.owner)
      elif verb == 'delete':
        self._delete(self._folder_of(row.owner, row.number))
      elif verb == 'create_session':
        self.sessions[row.id] = True
      elif verb == 'create_sampling_session':
        self.samplers[row.id] = self._source(wire.read(verb, row.body))
      elif verb == 'refused':
        raise protocol.Refused(422, 'the request was malformed')
      else:
        request = wire.read(verb, row.body)
        if row.number or verb == 'asample':
          _find(owners, row.owner, 'owner')
        self._enqueue(Job(row, request, self._check(verb, request)))
    except protocol.Refused as error:  # what it names was deleted since
      if row.owner in self.models and row.number:
        self._enqueue(Job(row, None))
      elif verb == 'asample':
        self._fail(Job(row, None), error)
    if verb in KINDS and row.kind and row.owner in self.models:
      self._register(row, request)

  # --- requests, in any thread ------------------------------------------------

  def open_session(self, body: bytes) -> str:
    """Returns the id of a new session."""
    with self._changed:
      id = f'session-{len(self.sessions)}'
      self.sessions[id] = True
    self._journal.accept(journal.Row(id, '', 0, 'create_session', body))
    return id

  def open_sampler(self, body: bytes) -> str:
    """Returns the id of a sampling session of a base model or a checkpoint."""
    verb = 'create_sampling_session'
    request = wire.read(verb, body)
    self.session(request.session_id)
    id = f'{request.session_id}:sample:{request.sampling_session_seq_id}'
    self.samplers[id] = self._source(request)
    self._journal.accept(journal.Row(id, '', 0, verb, body))
    return id

  def _source(self, request: Any) -> Checkpoint | None:
    if request.model_path is not None:
      return self.checkpoint(request.model_path)
    self._check_base(request.base_model)
    return None

  def session(self, id: str) -> None:
    """Raises Refused, with 404, or 410 if the session is over."""
    if not _find(self.sessions, id, 'session_id'):
      raise protocol.Refused(410, f'session_id must be open: {id} is finished')

  def model(self, id: str) -> Model:
    """Returns a model; raises Refused, with 404."""
    return _find(self.models, id, 'model_id')

  def sampler(self, id: str) -> Checkpoint | None:
    """Returns what a sampling session reads; raises Refused, with 404."""
    return _find(self.samplers, id, 'sampling_session_id')

  def checkpoint(self, path: str) -> Checkpoint:
    """Returns a checkpoint; raises Refused, with 404."""
    return _find(self.checkpoints, path, 'path')

  def accept(self, verb: str, body: bytes) -> types.UntypedAPIFuture:
    """Takes a request; a second one of its number returns the first's future.

    Raises:
      Refused: it is malformed, or names what does not exist.
    """
    request = wire.read(verb, body)
    owner, number = wire.place(request)
    row = journal.Row(f'{owner}:{number}', owner, number, verb, body)
    if self._journal.has(row.id):
      return _future(row.id, request)
    if verb == 'asample':
      self.sampler(owner)
    elif number:
      self.model(owner)
    self.session(_session_of(owner))
    try:
      job = Job(row, request, self._check(verb, request))
    except protocol.Refused:
      if number and verb != 'asample':  # the next number must not wait for it
        row = row._replace(verb='refused', body=b'')
        if self._journal.accept(row):
          self._enqueue(Job(row, None))
      raise
    if self._journal.accept(row):
      self._enqueue(job)
    return _future(row.id, request)

  def result(self, id: str) -> tuple[str, bytes] | None:
    """Returns (content type, body) of a future; None = not finished.

    Raises:
      Refused: with 404; there is no such request.
    """
    try:
      return self._journal.result(id)
    except KeyError as error:
      raise protocol.Refused(
        404, f'request_id must be of a kept request: got {errors.quote(id)}'
      ) from error

  def finish_session(self, id: str) -> None:
    """Ends a session; its models and unnamed checkpoints go."""
    self.session(id)
    self._journal.accept(journal.Row(f'finish:{id}', id, 0, 'finish', b''))
    self._finish_session(id)

  def _finish_session(self, id: str) -> None:
    with self._changed:
      self.sessions[id] = False
      for model in self.models.values():
        if _session_of(model.id) == id:
          model.trainer, model.waiting = None, {}
          self._drop_unnamed(model, 0)

  def delete(self, path: str) -> None:
    """Deletes a checkpoint."""
    folder = self.checkpoint(path).folder
    owner, number = folder.parent.name, int(folder.name)
    id = f'delete:{owner}:{number}'
    self._journal.accept(journal.Row(id, owner, number, 'delete', b''))
    self._delete(folder)

  def _delete(self, folder: pathlib.Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for saved in list(self.checkpoints.values()):
      if saved.folder == folder:
        del self.checkpoints[saved.path]

  def _drop_unnamed(self, model: Model, kept: int) -> None:
    """Deletes the unnamed checkpoints of a model, apart from the last ones."""
    own = [x for x in list(self.checkpoints.values()) if x.model is model]
    unnamed = [x for x in own if not x.is_listed]
    for old in unnamed[: max(len(unnamed) - kept, 0)]:
      self._delete(old.folder)

  def _check_base(self, name: str | None) -> None:
    names = (self.name, self.name + wire.FULL)
    wire.require(name in names, 'base_model', f'be one of {names}', name)

  def _check(self, verb: str, request: Any) -> Any:
    """Returns what the check of a request has made of it."""
    try:
      return self._checked(verb, request)
    except ValueError as error:
      raise protocol.Refused(422, f'{error}') from error

  def _checked(self, verb: str, request: Any) -> Any:
    if verb == 'forward_backward':
      return wire.data(request, self.policy, self.capacity)
    if verb == 'asample':
      return wire.sampling(request, self.policy, self.capacity)
    name = 'optim_params' if verb == 'optim_step' else 'optimizer_config'
    given = getattr(request, name, None)
    kinds = types.AdamParams, types.AdamOptimizerConfig, type(None)
    wire.require(isinstance(given, kinds), name, "be of 'adamw'", given)
    if verb == 'create_model':
      self._check_base(request.base_model)
      if request.base_model.endswith(wire.FULL):
        return None
      must = f'be given, or the base model {self.name + wire.FULL!r}'
      wire.require(request.lora_config, 'lora_config', must, None)
      return wire.lora(request.lora_config)
    if verb == 'load_weights':
      return self.checkpoint(request.path)
    if verb in KINDS:
      named = verb != 'save_weights_for_sampler' or request.path is not None
      if named:
        wire.check_name(request.path)
      else:
        ok = request.sampling_session_seq_id is not None
        wire.require(ok, 'path', 'be given', None)
      kind = getattr(request, 'kind', 'snapshot')
      wire.require(kind == 'snapshot', 'kind', "be 'snapshot'", kind)
      keys = getattr(request, 'age_encryption_recipients', None)
      wire.require(not keys, 'age_encryption_recipients', 'be left out', keys)
    return None

  def _enqueue(self, job: Job) -> None:
    """Queues a request, and makes the model of a first one."""
    row = job.row
    with self._changed:
      if row.verb == 'asample':
        source = self.samplers[row.owner]
        self._to_sample.setdefault(source, []).append(job)
      else:
        if row.number == 0:
          base, lora = job.request.base_model, job.checked
          if row.verb == 'load_weights':
            base = base or job.checked.model.base
            lora = job.checked.model.lora
          self.models[row.owner] = Model(
            row.owner, base, lora, job.request.user_metadata
          )
        model = self.models[row.owner]
        model.waiting[row.number], model.used = job, time.time()
      self._changed.notify_all()

  # --- the device's thread ----------------------------------------------------

  def _run(self) -> None:
    while True:
      with self._changed:
        while not self._stopped and not (
          self._drawing
          or self._to_sample
          or any(x.next in x.waiting for x in self.models.values())
        ):
          self._changed.wait()
        if self._stopped:
          return
        ready = [x for x in self.models.values() if x.next in x.waiting]
        model = min(ready, key=self._last_turn, default=None)
        if model is not None:
          for id in (_session_of(model.id), model.id):
            self._turns[id] = next(self._ids)
          job = model.waiting.pop(model.next)
        source, jobs = next(iter(self._to_sample), None), []
        if not self._drawing or source is self._drawn:
          jobs = self._to_sample.pop(source, [])
      if model is not None:
        self._try(self._step, job, model)
        model.next += 1
      try:
        self._submit(source, jobs)
        self._decode()
      except Exception as error:  # any: no client may wait for ever
        for job in {*jobs, *self._results}:
          self._fail(job, error)
        self._drawing, self._results, self._engine = {}, {}, None

  def _last_turn(self, model: Model) -> tuple[int, int]:
    """Returns when a model's session, and the model, had their last turn."""
    return self._turns[_session_of(model.id)], self._turns[model.id]

  def _try(self, run: Callable[..., None], job: Job, *model: Model) -> None:
    try:
      run(job, *model)
    except Exception as error:  # any: no client may wait for ever
      self._fail(job, error)

  def _fail(self, job: Job, error: Exception) -> None:
    """Ends a request with an error, of the user or of the server."""
    is_user = isinstance(error, ValueError | protocol.Refused)
    text, category = errors.text(error, 600), types.RequestErrorCategory.User
    if not is_user:
      logging.getLogger('absl').error('a request failed', exc_info=error)
      text = f"the server failed; see the server's log: {text}"
      category = types.RequestErrorCategory.Server
    self._results.pop(job, None)
    self._finish(
      job, types.RequestFailedResponse(error=text, category=category)
    )

  def _finish(self, job: Job, result: Any, point: bool = False) -> None:
    """Stores a result: protobuf bytes, or a type of the SDK."""
    kind = PROTOBUF
    if not isinstance(result, bytes):
      kind, result = JSON, result.model_dump_json().encode()
    self._journal.finish(job.row.id, kind, result, point)
    self.notify()

  def _step(self, job: Job, model: Model) -> None:
    """Carries out a request of a model."""
    if job.request is None:
      raise protocol.Refused(422, 'the request was malformed')
    if model.trainer is None and job.row.number:
      raise ValueError(f'{model.id} was not created; its first request failed')
    if job.row.kind is None or job.row.verb not in KINDS:
      self._run_verb[job.row.verb](model, job)

  def _create(self, model: Model, job: Job) -> None:
    config = job.request.lora_config
    seed = config.seed if config and config.seed is not None else model.id
    model.trainer = trainer.Trainer(
      self.policy, adapter=model.lora, seed=wire.seed(seed) % 2**31
    )
    self._finish(job, types.CreateModelResponse(model_id=model.id))

  def _open(
    self, lora: schema.Lora | None, folder: pathlib.Path, optimizer: bool
  ) -> Any:
    """Returns a trainer with saved weights."""
    loaded = trainer.Trainer(self.policy, adapter=lora)
    loaded.load(str(folder), optimizer=optimizer)
    return loaded

  def _load(self, model: Model, job: Job) -> None:
    saved = job.checked
    if saved.model.lora != model.lora:
      raise ValueError(
        f'path must be of a model with {model.lora}: got {saved.model.lora}'
      )
    model.trainer = self._open(model.lora, saved.folder, job.request.optimizer)
    model.has_gradient = False
    # A save of its own, for when the other one is deleted.
    self._write(model, job)
    result = types.LoadWeightsResponse(
      path=saved.path, model_id=model.id, type='load_weights'
    )
    self._finish(job, result, True)

  def _gradient(self, model: Model, job: Job) -> None:
    request, (data, options) = job.request, job.checked
    if request.forward_only:
      if job.row.kind is not None:
        return
      run = model.trainer.forward
    else:
      run = model.trainer.forward_backward
    logprobs, metrics = run(data, request.loss_fn, **options)
    model.has_gradient |= not request.forward_only
    self._finish(job, wire.gradient_result(logprobs, metrics))

  def _update(self, model: Model, job: Job) -> None:
    numbers = optim.Adam(**job.request.optim_params.model_dump())
    metrics = model.trainer.optim_step(numbers)
    model.has_gradient = False
    self._finish(job, types.OptimStepResponse(metrics=metrics))

  def _folder_of(self, model: str, number: int) -> pathlib.Path:
    return self._folder / 'models' / model / str(number)

  def _register(self, row: journal.Row, request: Any) -> Checkpoint:
    """Lists a checkpoint, and makes the sampler of an unnamed one."""
    model, name = self.models[row.owner], request.path
    path = f'tinker://{model.id}/{KINDS[row.verb]}/{name or row.number}'
    folder = self._folder_of(model.id, row.number)
    if not folder.exists() and path in self.checkpoints:
      return self.checkpoints[path]  # the save failed: there was one
    saved = Checkpoint(
      path,
      folder,
      model,
      getattr(request, 'user_metadata', None),
      name is not None,
    )
    self.checkpoints[saved.path] = saved
    if not saved.is_listed:
      self.samplers[_sampler_of(model, request)] = saved
    return saved

  def _save(self, model: Model, job: Job) -> None:
    request, verb = job.request, job.row.verb
    path = f'tinker://{model.id}/{KINDS[verb]}/{request.path}'
    old = self.checkpoints.get(path)
    if old and not getattr(request, 'overwrite', False):
      raise ValueError(f'path must be new: got {path}, which exists')
    self._write(model, job)
    if old:
      self._delete(old.folder)
    saved = self._register(job.row, request)
    if is_external := verb == 'save_weights_external':
      result = types.SaveWeightsExternalResponseInternal(path=saved.path)
    elif verb == 'save_weights':
      result = types.SaveWeightsResponse(path=saved.path, type=verb)
    else:
      result = types.SaveWeightsForSamplerResponseInternal(
        path=saved.path,
        sampling_session_id=_sampler_of(model, request),
        type=verb,
      )
      self._keep(saved, model.trainer.policy())
      self._drop_unnamed(model, UNNAMED_KEPT)
    self._finish(job, result, not (model.has_gradient or is_external))

  def _write(self, model: Model, job: Job) -> None:
    """Writes a model into the folder of a request, all or nothing."""
    folder = self._folder_of(model.id, job.row.number)
    part = folder.with_name('unfinished')
    for old in (part, folder):  # of a process that was killed
      shutil.rmtree(old, ignore_errors=True)
    part.parent.mkdir(parents=True, exist_ok=True)
    if job.row.verb != 'save_weights_external':
      model.trainer.save(str(part))
    elif model.lora is None:
      raise ValueError(
        f'save_weights_external must be of a LoRA: got {model.base}, all '
        'weights; python -m posttrain.export reads its checkpoints'
      )
    else:
      adapter = model.trainer.params
      peft.save(adapter, model.lora, self.policy.model, str(part), self.name)
    os.rename(part, folder)

  def _keep(self, source: Checkpoint, policy: policies.Policy) -> None:
    self._policies[source] = policy
    while len(self._policies) > POLICIES_KEPT:
      del self._policies[next(iter(self._policies))]

  def _policy(self, source: Checkpoint | None) -> policies.Policy:
    """Returns the policy of a checkpoint; None = the base model."""
    if source is None:
      return self.policy
    policy = self._policies.pop(source, None)
    if policy is None:
      policy = self._open(source.model.lora, source.folder, False).policy()
    self._keep(source, policy)
    return policy

  def _submit(self, source: Checkpoint | None, jobs: list[Job]) -> None:
    """Gives requests of the same weights to the engine."""
    if not jobs:
      return
    if self._engine is None:
      self._engine = engines.Engine(
        self.policy.model, self._options, sharding.one_device()
      )
      self._engine.take_free_slots()
      self._engine.set_params(self.policy.params, 0)
      self._drawn = None
    if source is not self._drawn:
      self._engine.set_params(self._policy(source).params, 0)
      self._drawn = source
    for job in jobs:
      wanted = job.checked
      self._results[job] = [None] * len(wanted.requests)
      decode = self.policy.text if wanted.stops else lambda _: ''
      for index, request in enumerate(wanted.requests):
        id = next(self._ids)
        self._engine.submit(dataclasses.replace(request, id=id))
        text = call.Detokenizer(decode, wanted.stops)
        self._drawing[id] = _Sequence(job, index, text)

  def _decode(self) -> None:
    """Decodes a chunk, and ends the requests that are complete."""
    if not self._drawing:
      return
    for done in self._engine.step():
      self._append(done.id, done.ids, done.logprobs, done.stop_reason)
    if any(x.job.checked.stops for x in self._drawing.values()):
      for id, (ids, logprobs, _) in self._engine.partial().items():
        if self._append(id, ids, logprobs, None):
          self._engine.cancel(id)

  def _append(self, id: int, ids, logprobs, reason: str | None) -> bool:
    """Appends the tokens of a sequence; returns whether it has ended."""
    drawn = self._drawing[id]
    new = slice(len(drawn.text.ids), None)
    drawn.text.append(ids[new].tolist(), logprobs[new].tolist(), reason)
    if drawn.text.finish is None:
      return False
    del self._drawing[id]
    job, text = drawn.job, drawn.text
    results = self._results[job]
    results[drawn.index] = text.ids, text.logprobs, text.finish == 'stop'
    if all(results):
      self._try(self._complete, job)
    return True

  def _complete(self, job: Job) -> None:
    """Finishes a request all of whose samples are there."""
    wanted, scores = job.checked, None
    if wanted.scores or wanted.top:
      ids = wanted.requests[0].ids
      prompt = worker.ScoreJob(lambda *_: None, 0, ids, 1.0)
      [scores] = worker.score(self._policy(self._drawn), [prompt])
    result = wire.sample_result(self._results[job], wanted, scores)
    del self._results[job]
    self._finish(job, result)


def _session_of(id: str) -> str:
  return id.partition(':')[0]


def _sampler_of(model: Model, request: Any) -> str:
  """Returns the id of the sampling session that unnamed weights open."""
  return f'{_session_of(model.id)}:sample:{request.sampling_session_seq_id}'


def _future(id: str, request: Any) -> types.UntypedAPIFuture:
  names = None
  if isinstance(request, types.SampleRequest):
    names = [f'{id}:{index}' for index in range(request.num_samples)]
  return types.UntypedAPIFuture(request_id=id, sample_sequence_ids=names)


def _find(items: dict[str, Any], id: str, name: str) -> Any:
  if id not in items:
    raise protocol.Refused(
      404, f'{name} must exist: got {errors.quote(id)}', name
    )
  return items[id]
