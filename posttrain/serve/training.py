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
from posttrain.checkpoints import policies, weights
from posttrain.decode import engines
from posttrain.models import peft
from posttrain.serve import call, journal, protocol, wire, worker
from posttrain.training import optim, trainer
from posttrain.util import errors

JSON, PROTOBUF = 'application/json', 'application/x-protobuf'
GATHER = 0.1  # seconds that the first request to sample may wait for others
POLICIES_KEPT = 3  # those to sample from that stay in memory
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
  turn: int = -1  # of its last request, counted over all
  used: float = dataclasses.field(default_factory=time.time)


@dataclasses.dataclass(eq=False)
class Checkpoint:
  """Saved weights."""

  path: str  # tinker://MODEL/KIND/NAME
  folder: pathlib.Path
  model: Model
  saved: float
  metadata: dict[str, str] | None
  is_listed: bool  # not the unnamed weights of a sampling session
  used: float = dataclasses.field(default_factory=time.time)


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
    self.sessions: dict[str, types.CreateSessionRequest] = {}
    self.finished: set[str] = set()  # of the sessions
    self.models: dict[str, Model] = {}
    self.samplers: dict[str, tuple[str, str]] = {}  # (base, path; '' = none)
    self.checkpoints: dict[str, Checkpoint] = {}
    self.pending: set[str] = set()  # ids of requests that have not finished
    self._to_sample: dict[str, list[Job]] = {}  # by the path of the weights
    self._stopped = False
    # Of the device's thread.
    self._policies: dict[str, policies.Policy] = {}  # the last used last
    self._drawing: dict[int, _Sequence] = {}
    self._results: dict[Job, list[Any]] = {}
    self._turns: dict[str, int] = {}  # of sessions, as `Model.turn`
    self._drawn_path, self._ids = '', itertools.count()
    self._to_score: collections.deque[Job] = collections.deque()
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
      point = self._journal.point(model.id)
      if point >= 0 and _session_of(model.id) not in self.finished:
        folder = self._folder_of(model.id, point)
        model.trainer = self._open(model.lora, folder, True)
        model.next = point + 1
        for number in [x for x in model.waiting if x <= point]:
          self.pending.discard(model.waiting.pop(number).row.id)
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
    verb, has_owner = row.verb, row.owner in {**self.models, **self.samplers}
    if row.number and not has_owner or verb == 'asample' and row.kind:
      return
    request = None
    try:
      if verb in ('delete', 'finish'):
        self._end(row)
      elif verb == 'create_session':
        self.sessions[row.id] = wire.read(verb, row.body)
      elif verb == 'create_sampling_session':
        self.samplers[row.id] = self._source(wire.read(verb, row.body))
      elif verb == 'refused':
        self._enqueue(Job(row, None))
      else:
        request = wire.read(verb, row.body)
        self._enqueue(Job(row, request, self._check(verb, request)))
    except protocol.Refused:  # it names a checkpoint that was deleted since
      if row.number:
        self._enqueue(Job(row, None))
    if verb in KINDS and row.kind:
      self._register(row, request)

  # --- requests, in any thread ------------------------------------------------

  def open_session(self, body: bytes) -> str:
    """Returns the id of a new session."""
    request = wire.read('create_session', body)
    with self._changed:
      id = f'session-{len(self.sessions)}'
      self.sessions[id] = request
    self._journal.accept(journal.Row(id, '', 0, 'create_session', body, None))
    return id

  def open_sampler(self, body: bytes) -> str:
    """Returns the id of a sampling session of a base model or a checkpoint."""
    verb = 'create_sampling_session'
    request = wire.read(verb, body)
    self.session(request.session_id)
    id = f'{request.session_id}:sample:{request.sampling_session_seq_id}'
    self.samplers[id] = self._source(request)
    self._journal.accept(journal.Row(id, '', 0, verb, body, None))
    return id

  def _source(self, request: Any) -> tuple[str, str]:
    """Returns (base model, path of a checkpoint or '') of a sampler."""
    if request.model_path is None:
      self._check_base(request.base_model)
      return request.base_model, ''
    checkpoint = self.checkpoint(request.model_path)
    return checkpoint.model.base, checkpoint.path

  def session(self, id: str) -> types.CreateSessionRequest:
    """Returns a session; raises Refused, with 404, or 410 if it is over."""
    session = _find(self.sessions, id, 'session_id')
    if id in self.finished:
      raise protocol.Refused(410, f'session_id must be open: {id} is finished')
    return session

  def model(self, id: str) -> Model:
    """Returns a model; raises Refused, with 404."""
    return _find(self.models, id, 'model_id')

  def sampler(self, id: str) -> tuple[str, str]:
    """Returns (base, path) of a sampling session; raises Refused, with 404."""
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
    row = journal.Row(f'{owner}:{number}', owner, number, verb, body, None)
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
    self.pending.add(row.id)
    if self._journal.accept(row):
      self._enqueue(job)
    return _future(row.id, request)

  def result(self, id: str) -> tuple[str, bytes] | None:
    """Returns (content type, body) of a future; None = not finished.

    Raises:
      Refused: with 404; there is no such request, or its time is over.
    """
    if id in self.pending:
      return None
    try:
      return self._journal.result(id)
    except KeyError as error:
      raise protocol.Refused(
        404, f'request_id must be of a kept request: got {errors.quote(id)}'
      ) from error

  def end(self, verb: str, id: str) -> None:
    """Finishes a session, or deletes a checkpoint.

    Args:
      verb: 'finish' or 'delete'.
      id: of the session, or the checkpoint's path.
    """
    key = f'{verb}:{id}:{time.time()}'
    row = journal.Row(key, '', 0, verb, id.encode(), None)
    self._journal.accept(row)
    self._end(row)

  def _end(self, row: journal.Row) -> None:
    if row.verb == 'delete':
      self.checkpoints.pop(row.body.decode(), None)
      return
    session = row.body.decode()
    self.finished.add(session)
    with self._changed:
      for model in self.models.values():
        if _session_of(model.id) == session:
          model.trainer, model.waiting = None, {}
          for saved in list(self.checkpoints.values()):
            if saved.model is model and not saved.is_listed:
              del self.checkpoints[saved.path]

  def _check_base(self, name: str | None) -> None:
    names = (self.name, self.name + wire.FULL)
    wire.require(name in names, 'base_model', f'be one of {names}', name)

  def _check(self, verb: str, request: Any) -> Any:
    """Returns what the check of a request has made of it."""
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
        path = self.samplers[row.owner][1]
        self._to_sample.setdefault(path, []).append(job)
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
      if row.kind is None:
        self.pending.add(row.id)
      self._changed.notify_all()

  # --- the device's thread ----------------------------------------------------

  def _run(self) -> None:
    while True:
      with self._changed:
        while not self._stopped and not (
          self._drawing
          or self._to_score
          or self._to_sample
          or any(x.next in x.waiting for x in self.models.values())
        ):
          self._changed.wait()
        if self._stopped:
          return
        ready = [x for x in self.models.values() if x.next in x.waiting]
        model = min(ready, key=self._last_turn, default=None)
        if model is not None:
          self._turns[_session_of(model.id)] = model.turn = next(self._ids)
          job = model.waiting.pop(model.next)
        if self._to_sample and not self._drawing:
          # Those that are on their way decode with the first from the start.
          end = time.monotonic() + GATHER
          while self._changed.wait(GATHER / 10) and time.monotonic() < end:
            pass
        path, jobs = self._drawn_path, []
        others = self._to_sample.keys() - {path}
        if not self._drawing and others:
          path = next(x for x in self._to_sample if x in others)
        if not self._drawing or not others:
          jobs = self._to_sample.pop(path, [])
      if model is not None:
        self._try(self._step, job, model)
        model.next += 1
      try:
        self._submit(path, jobs)
        if self._to_score:
          job = self._to_score.popleft()
          self._try(self._score, job)
        self._decode()
      except Exception as error:  # any: no client may wait for ever
        for job in {*jobs, *self._results}:
          self._fail(job, error)
        self._drawing, self._results, self._engine = {}, {}, None
        self._to_score.clear()

  def _last_turn(self, model: Model) -> tuple[int, int]:
    """Returns when a model's session, and the model, had their last turn."""
    return self._turns.get(_session_of(model.id), -1), model.turn

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
    self.pending.discard(job.row.id)
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
      folder.stat().st_mtime if folder.exists() else 0.0,
      getattr(request, 'user_metadata', None),
      name is not None,
    )
    self.checkpoints[saved.path] = saved
    if not saved.is_listed:
      self.samplers[_sampler_of(model, request)] = model.base, saved.path
    return saved

  def _save(self, model: Model, job: Job) -> None:
    request, verb = job.request, job.row.verb
    path = f'tinker://{model.id}/{KINDS[verb]}/{request.path}'
    if path in self.checkpoints:
      if not getattr(request, 'overwrite', False):
        raise ValueError(f'path must be new: got {path}, which exists')
      del self.checkpoints[path]
    self._write(model, job)
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
      self._keep(saved.path, model.trainer.policy())
    self._finish(job, result, not (model.has_gradient or is_external))
    self._sweep(model)

  def _write(self, model: Model, job: Job) -> None:
    """Writes a model into the folder of a request, all or nothing."""
    folder = self._folder_of(model.id, job.row.number)
    part = folder.with_name('unfinished')
    for old in (part, folder):  # of a process that was killed
      shutil.rmtree(old, ignore_errors=True)
    part.parent.mkdir(parents=True, exist_ok=True)
    model.trainer.save(str(part))
    if job.row.verb == 'save_weights_external':
      self._export(model, part)
    os.rename(part, folder)

  def _sweep(self, model: Model) -> None:
    """Deletes what is not needed any more."""
    self._journal.trim()
    for old in list(self.checkpoints.values()):
      if not old.is_listed and old.used < time.time() - journal.KEPT:
        del self.checkpoints[old.path]
    last = self._folder_of(model.id, self._journal.point(model.id))
    kept = {last, *(x.folder for x in self.checkpoints.values())}
    for folder in last.parent.iterdir():
      if folder not in kept:
        shutil.rmtree(folder)

  def _export(self, model: Model, folder: pathlib.Path) -> None:
    """Replaces saved weights by the adapter in PEFT's form."""
    if model.lora is None:
      raise ValueError(
        f'save_weights_external must be of a LoRA: got {model.base}, all '
        'weights; python -m posttrain.export reads its checkpoints'
      )
    adapter = weights.adapter(str(folder), average=True)
    exported = folder.with_name('exported')
    shutil.rmtree(exported, ignore_errors=True)
    peft.save(*adapter, self.policy.model, str(exported), self.name)
    shutil.rmtree(folder)
    os.rename(exported, folder)

  def _keep(self, path: str, policy: policies.Policy) -> policies.Policy:
    self._policies.pop(path, None)
    self._policies[path] = policy
    while len(self._policies) > POLICIES_KEPT:
      del self._policies[next(iter(self._policies))]
    return policy

  def _policy(self, path: str) -> policies.Policy:
    """Returns the policy of a checkpoint; '' = the base model."""
    if not path:
      return self.policy
    saved = self.checkpoint(path)
    saved.used = time.time()
    if path in self._policies:
      return self._keep(path, self._policies[path])
    loaded = self._open(saved.model.lora, saved.folder, False)
    return self._keep(path, loaded.policy())

  def _submit(self, path: str, jobs: list[Job]) -> None:
    """Gives requests of the same weights to the engine."""
    if not jobs:
      return
    if self._engine is None:
      self._engine = engines.Engine(
        self.policy.model, self._options, sharding.one_device()
      )
      self._engine.take_free_slots()
      self._drawn_path = None
    if path != self._drawn_path:
      try:
        params = self._policy(path).params
      except protocol.Refused as error:  # the checkpoint was deleted
        for job in jobs:
          self._fail(job, error)
        return
      self._engine.set_params(params, 0)
      self._drawn_path = path
    for job in jobs:
      wanted = job.checked
      self._results[job] = [None] * len(wanted.requests)
      decode = self.policy.text if wanted.stops else lambda _: ''
      for index, request in enumerate(wanted.requests):
        id = next(self._ids)
        self._engine.submit(dataclasses.replace(request, id=id))
        text = call.Detokenizer(decode, wanted.stops)
        self._drawing[id] = _Sequence(job, index, text)
      if wanted.scores or wanted.top:
        self._results[job].append(None)
        self._to_score.append(job)

  def _score(self, job: Job) -> None:
    if job not in self._results:
      return
    policy = self._policy(self.samplers[job.row.owner][1])
    ids = job.checked.requests[0].ids
    [scores] = worker.score(
      policy, [worker.ScoreJob(lambda *_: None, 0, ids, 1.0)]
    )
    self._results[job][-1] = scores
    self._complete(job)

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
    text = drawn.text
    if drawn.job in self._results:
      self._results[drawn.job][drawn.index] = (
        text.ids,
        text.logprobs,
        text.finish == 'stop',
      )
      self._complete(drawn.job)
    return True

  def _complete(self, job: Job) -> None:
    """Finishes a request to sample once all its parts are there."""
    results = self._results[job]
    if any(x is None for x in results):
      return
    del self._results[job]
    count = len(job.checked.requests)
    scores = results[count] if len(results) > count else None
    self._finish(job, wire.sample_result(results[:count], job.checked, scores))


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
