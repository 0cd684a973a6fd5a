"""A training service: models that clients train and sample, on one device.

1. `accept` checks a request, stores it in the journal, and returns the id of
   its future. A model's requests run in the order of their numbers, those of
   several sessions in turn, and so those of a session's models.
2. One thread carries out the requests of models. Samples are drawn beside it
   by the worker of the server of completions. What a request draws depends on
   its sampling session and number alone, or on its seed, and its bits on no
   other request.
3. A save is a folder that all commands read. After the process was killed,
   `start` loads each model's last save that no gradient preceded, and carries
   out again what followed.

A folder of a service holds `journal.db`, and a save as `models/MODEL/NUMBER`
with the number of the request.
"""

import collections
import dataclasses
import json
import logging
import os
import pathlib
import shutil
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from tinker import types

from posttrain import schema
from posttrain.checkpoints import policies
from posttrain.models import peft
from posttrain.serve import call, journal, protocol, wire, worker
from posttrain.training import optim, trainer

JSON, PROTOBUF = 'application/json', 'application/x-protobuf'
POLICIES_KEPT = 3  # those to sample from that stay in memory
UNNAMED_KEPT = 8  # unnamed checkpoints of a model
KINDS = {  # of checkpoints, by the request that writes them
  'save_weights': 'weights',
  'save_weights_for_sampler': 'sampler_weights',
  'save_weights_external': 'external_weights',
}


class Job(NamedTuple):
  """An accepted request."""

  row: journal.Row
  request: Any = None  # of the SDK's type; None = it was refused
  checked: Any = None  # what the check has made of it


@dataclasses.dataclass(eq=False)
class Model:
  """A trained model."""

  id: str
  base: str  # the name of its base model
  lora: schema.Lora | None  # None = all weights
  metadata: dict[str, str] | None
  trainer: Any = None  # None until its first request runs
  next: int = 0  # the number of the request to run next
  waiting: dict[int, Job] = dataclasses.field(default_factory=dict)
  unnamed: list['Checkpoint'] = dataclasses.field(default_factory=list)
  has_gradient: bool = False
  used: float = 0.0  # when its last turn was


@dataclasses.dataclass(eq=False)
class Checkpoint:
  """Saved weights."""

  path: str  # tinker://MODEL/KIND/NAME
  folder: pathlib.Path
  model: Model
  request: Any  # the one that saved them


class Service:
  """The models of one folder, and the thread that trains them."""

  def __init__(self, served: worker.Worker, folder: pathlib.Path):
    """Opens the folder's journal.

    Args:
      served: samples and scores, `exact`; not started. Its policy is the base
        model.
      folder: an existing folder, locked by the caller.
    """
    self.served = served
    self._base = f'{served.name} of {served.policy.folder}'
    # Called in any thread when a request has finished.
    self.notify: Callable[[], None] = lambda: None
    self._folder = folder
    self._journal = journal.Journal(str(folder / 'journal.db'))
    self._changed = threading.Condition()  # guards what follows
    self.sessions: dict[str, float | None] = {}  # last turns; None = finished
    self.models: dict[str, Model] = {}
    # Of sampling sessions; None = the base model's weights.
    self.samplers: dict[str, Checkpoint | None] = {}
    self.checkpoints: dict[str, Checkpoint] = {}
    self._stopped = False
    # The last ones to sample from, of checkpoints.
    self._policies = collections.deque(maxlen=POLICIES_KEPT)
    self._opening = threading.Lock()  # so that a policy is opened once
    self.verbs = {  # of models
      'create_model': self._create,
      'load_weights': self._load,
      'forward_backward': self._gradient,
      'optim_step': self._update,
      **dict.fromkeys(KINDS, self._save),
    }
    self._thread = threading.Thread(target=self._run, daemon=True)

  def start(self) -> None:
    """Carries out again what the journal asks for, and starts the threads."""
    rows = self._journal.rows()
    over = {row.owner for row in rows if row.verb == 'finish'}
    for row in rows:
      if row.verb != 'forward_backward' or _session_of(row.owner) not in over:
        self._restore(row)
    for model in self.models.values():
      points = [
        number
        for number, job in model.waiting.items()
        if job.row.point and self._folder_of(job.row).exists()
      ]
      if points:
        point = max(points)
        folder = self._folder_of(model.waiting[point].row)
        model.trainer, model.next = self._open(model, folder), point + 1
        model.waiting = {k: x for k, x in model.waiting.items() if k > point}
    self.checkpoints = {  # others were deleted since, or never written
      path: x for path, x in self.checkpoints.items() if x.folder.exists()
    }
    self.served.start()
    self._thread.start()

  def stop(self, wait: float) -> bool:
    """Ends the threads; False if one runs on after `wait` s."""
    with self._changed:
      self._stopped = True
      self._changed.notify_all()
    self._thread.join(wait)
    return self.served.stop(wait) and not self._thread.is_alive()

  def _restore(self, row: journal.Row) -> None:
    """Takes a row of the journal."""
    job = Job(row)
    if row.verb == 'asample' and row.kind:
      return
    try:
      if row.body:
        request = wire.read(row.verb, row.body)
        job = Job(row, request, self._check(row, request))
    except ValueError as error:  # what it names was deleted since
      if row.verb == 'forward_backward':  # what follows it would differ
        text = f'--max_model_len and the base must be as before: {error}'
        raise ValueError(text) from error
      if row.verb == 'asample':
        self._fail(row, error)
      if row.owner not in self.models:
        return
    self._enqueue(job)
    if row.verb in KINDS and row.kind and job.request:
      self._register(job)

  # --- requests, in any thread ------------------------------------------------

  def open_session(self) -> str:
    """Returns the id of a new session."""
    with self._changed:
      id = f'session-{len(self.sessions)}'
      self._add(Job(journal.Row(id, self._base, 0, 'create_session', b'')))
    return id

  def finish_session(self, id: str) -> None:
    """Ends a session; its models and unnamed checkpoints go."""
    find(self.sessions, id)
    self._add(Job(journal.Row(f'finish:{id}', id, 0, 'finish', b'')))

  def session(self, id: str) -> None:
    """Raises Refused, with 404, or 410 if the session is over."""
    if find(self.sessions, id) is None:
      raise protocol.Refused(410, f'session_id must be open: {id} is finished')

  def accept(self, verb: str, body: bytes) -> types.UntypedAPIFuture:
    """Takes a request, once; returns its future.

    Raises:
      ValueError: it is malformed, or names what does not exist.
    """
    request = wire.read(verb, body)
    owner, number = wire.place(request)
    row = journal.Row(f'{owner}:{number}', owner, number, verb, body)
    self.session(_session_of(owner))
    try:
      job = Job(row, request, self._check(row, request))
    except ValueError:
      if owner in self.models:  # the next number must not wait for it
        self._add(Job(row._replace(verb='refused', body=b'')))
      raise
    self._add(job)
    names = [
      f'{row.id}:{index}' for index in range(getattr(request, 'num_samples', 0))
    ]
    return types.UntypedAPIFuture(request_id=row.id, sample_sequence_ids=names)

  def result(self, id: str) -> tuple[str | None, bytes | None]:
    """Returns (content type, body) of a future; None each if not finished.

    Raises:
      Refused: with 404; there is no such request.
    """
    result = self._journal.result(id)
    return find({} if result is None else {id: result}, id)

  def delete(self, saved: Checkpoint) -> None:
    """Deletes a checkpoint."""
    shutil.rmtree(saved.folder, ignore_errors=True)
    self.checkpoints.pop(saved.path, None)

  def _check(self, row: journal.Row, request: Any) -> Any:
    """Returns what the check of a request has made of it.

    Raises:
      ValueError: it is refused.
    """
    verb = row.verb
    wire.check_served(request)
    if verb == 'asample':
      jobs = wire.sampling(request, self.served)
      return jobs, self._policy(find(self.samplers, row.owner))
    if verb == 'create_sampling_session' and request.model_path is not None:
      return find(self.checkpoints, request.model_path)
    if verb in ('create_sampling_session', 'create_model'):
      names = self.served.name, self.served.name + wire.FULL
      given, must = request.base_model, f'be one of {names}'
      protocol.require(given in names, 'base_model', must, given)
    if verb in self.verbs and row.number:
      model = find(self.models, row.owner)
      if verb == 'save_weights_external':
        protocol.require(model.lora, 'model_id', 'be of a LoRA', model.base)
    if verb == 'forward_backward':
      return wire.data(request, self.served)
    if verb == 'load_weights':
      return find(self.checkpoints, request.path)
    if verb in KINDS:
      name = request.path or row.number
      path = f'tinker://{row.owner}/{KINDS[verb]}/{name}'
      types.ParsedCheckpointTinkerPath.from_tinker_path(path)  # or ValueError
      return path
    if verb == 'create_model' and not request.base_model.endswith(wire.FULL):
      config = request.lora_config
      return trainer.lora_options(
        config.rank,
        attention=config.train_attn,
        mlp=config.train_mlp,
        head=config.train_unembed,
      )
    return None

  def _add(self, job: Job) -> None:
    """Takes a request if it is new."""
    if self._journal.accept(job.row):
      self._enqueue(job)

  def _enqueue(self, job: Job) -> None:
    """Takes a request of the journal."""
    row, request, checked = job
    with self._changed:
      if row.verb == 'create_session':
        if row.owner != self._base:
          raise ValueError(
            f'--workdir must be one with {self._base}: got {row.owner}'
          )
        self.sessions[row.id] = 0.0
      elif row.verb == 'finish':
        self.sessions[row.owner] = None
        for model in self.models.values():
          if _session_of(model.id) == row.owner:
            model.trainer, model.waiting = None, {}
            for saved in model.unnamed:
              self.delete(saved)
      elif row.verb == 'create_sampling_session':
        self.samplers[row.id] = checked
      elif row.verb == 'asample':
        self._sample(job)
      elif self.sessions[_session_of(row.owner)] is not None:
        if row.number == 0:
          lora = checked
          if row.verb == 'load_weights':
            lora = checked.model.lora
          base = self.served.name + wire.FULL * (lora is None)
          self.models[row.owner] = Model(
            row.owner, base, lora, request.user_metadata
          )
        if model := self.models.get(row.owner):
          model.waiting[row.number] = job
      self._changed.notify_all()

  # --- the thread of models ---------------------------------------------------

  def _run(self) -> None:
    while True:
      with self._changed:
        while not self._stopped and not (
          ready := [x for x in self.models.values() if x.next in x.waiting]
        ):
          self._changed.wait()
        if self._stopped:
          return
        model = min(  # the session, and its model, with the oldest last turn
          ready, key=lambda x: (self.sessions[_session_of(x.id)], x.used)
        )
        model.used = self.sessions[_session_of(model.id)] = time.time()
        job = model.waiting.pop(model.next)
      row = job.row
      try:
        if job.request is None:
          raise protocol.Refused(422, 'the request was malformed')
        if row.kind is None or row.verb not in KINDS:
          result = self.verbs[row.verb](model, job)
          is_export = row.verb == 'save_weights_external'
          point = not (model.has_gradient or is_export)
          self._finish(row, result, point=point)
      except Exception as error:  # any: no client may wait for ever
        self._fail(row, error)
      model.next += 1

  def _fail(self, row: journal.Row, error: Exception) -> None:
    """Ends a request with an error, of the user or of the server."""
    text, category = f'{error}', types.RequestErrorCategory.User
    if not isinstance(error, ValueError):
      logging.getLogger('absl').error('a request failed', exc_info=error)
      text = f"the server failed; see the server's log: {text}"
      category = types.RequestErrorCategory.Server
    result = types.RequestFailedResponse(error=text, category=category)
    # A model needs its first request, and another might succeed next time.
    self._finish(row, result, again=row.number == 0)

  def _finish(self, row: journal.Row, result: Any, **options: bool) -> None:
    """Stores a result: protobuf bytes, or a type of the SDK."""
    kind = PROTOBUF
    if not isinstance(result, bytes):
      # NaN stays: a norm may be no number, and the SDK refuses null.
      kind, result = JSON, json.dumps(result.model_dump()).encode()
    self._journal.finish(row.id, kind, result, **options)
    self.notify()

  def _create(self, model: Model, job: Job) -> Any:
    seed = job.request.lora_config.seed
    seed = wire.seed(model.id if seed is None else seed) % 2**31
    model.trainer = trainer.Trainer(
      self.served.policy, adapter=model.lora, seed=seed
    )
    return types.CreateModelResponse(model_id=model.id)

  def _open(
    self, model: Model, folder: pathlib.Path, optimizer: bool = True
  ) -> trainer.Trainer:
    """Returns a trainer like that of a model, with saved weights."""
    loaded = trainer.Trainer(self.served.policy, adapter=model.lora)
    loaded.load(str(folder), optimizer=optimizer)
    return loaded

  def _load(self, model: Model, job: Job) -> Any:
    model.trainer = self._open(model, job.checked.folder, job.request.optimizer)
    model.has_gradient = False
    # A save of its own, for when the other one is deleted.
    self._write(model, job.row)
    return types.LoadWeightsResponse(path=job.request.path, model_id=model.id)

  def _gradient(self, model: Model, job: Job) -> bytes:
    backward = not job.request.forward_only
    result = model.trainer.run(*job.checked, backward=backward)
    model.has_gradient |= backward
    return wire.gradient_result(*result)

  def _update(self, model: Model, job: Job) -> Any:
    numbers = optim.Adam(**job.request.optim_params.model_dump())
    metrics = model.trainer.optim_step(numbers)
    model.has_gradient = False
    return types.OptimStepResponse(metrics=metrics)

  def _save(self, model: Model, job: Job) -> Any:
    path, old = job.checked, self.checkpoints.get(job.checked)
    if old and not getattr(job.request, 'overwrite', False):
      raise ValueError(f'path must be new: got {path}, which exists')
    self._write(model, job.row)
    if old:
      self.delete(old)
    saved = self._register(job)
    if job.row.verb == 'save_weights_for_sampler':
      self._policies.append((saved, model.trainer.policy()))
    # It has what the SDK reads of the results of all three kinds.
    return types.SaveWeightsForSamplerResponseInternal(
      path=path, sampling_session_id=_sampler_of(job)
    )

  def _register(self, job: Job) -> Checkpoint:
    """Lists a checkpoint, and makes the sampler of an unnamed one."""
    row, request, path = job
    model, folder = self.models[row.owner], self._folder_of(row)
    self.checkpoints[path] = saved = Checkpoint(path, folder, model, request)
    if request.path is None:
      self.samplers[_sampler_of(job)] = saved
      model.unnamed.append(saved)
      if len(model.unnamed) > UNNAMED_KEPT:
        self.delete(model.unnamed.pop(0))
    return saved

  def _folder_of(self, row: journal.Row) -> pathlib.Path:
    return self._folder / 'models' / row.owner / str(row.number)

  def _write(self, model: Model, row: journal.Row) -> None:
    """Writes a model into the folder of a request, all or nothing."""
    folder = self._folder_of(row)
    part = folder.with_name('unfinished')
    for old in (part, folder):  # of a process that was killed
      shutil.rmtree(old, ignore_errors=True)
    if row.verb == 'save_weights_external':
      base, adapter = self.served, model.trainer.params
      peft.save(adapter, model.lora, base.policy.model, part, base.name)
    else:
      model.trainer.save(str(part))
    os.rename(part, folder)

  # --- samples ----------------------------------------------------------------

  def _policy(self, source: Checkpoint | None) -> policies.Policy:
    """Returns the policy of a checkpoint; None = the base model."""
    with self._opening:
      kept = {None: self.served.policy, **dict(self._policies)}
      if source not in kept:
        opened = self._open(source.model, source.folder, optimizer=False)
        kept[source] = opened.policy()
        self._policies.append((source, kept[source]))
      return kept[source]

  def _sample(self, accepted: Job) -> None:
    """Gives the jobs of a request to the worker."""
    row, request, ((sequences, stops), policy) = accepted
    texts, scores = [], []

    def notify(job: worker.Job, event: worker.Event) -> None:
      """Takes a result; in the threads of the worker."""
      if isinstance(event, worker.Failed):
        if not self._stopped:
          self._fail(row, RuntimeError(event.message))
        return
      if isinstance(event, worker.TokenLogprobs):
        scores.append(event)
      else:
        text = texts[job.index]
        text.append(event.ids, event.logprobs, event.stop_reason)
        if text.finish is None:
          return
        self.served.drop([job])
      left.discard(job)
      if not left:
        self._finish(row, wire.sample_result(texts, request, *scores))

    jobs: list[worker.Job] = []
    for index, x in enumerate(sequences):
      texts.append(call.Detokenizer(policy.text, stops))
      jobs.append(worker.SampleJob(notify, index, policy, x, bool(stops)))
    if request.prompt_logprobs or request.topk_prompt_logprobs:
      jobs.append(worker.ScoreJob(notify, 0, policy, sequences[0].ids, 1.0))
    left = set(jobs)
    self.served.accept(jobs, more=True)


def _session_of(id: str) -> str:
  return id.partition(':')[0]


def _sampler_of(job: Job) -> str:
  """Returns the id of the sampling session that unnamed weights open."""
  number = getattr(job.request, 'sampling_session_seq_id', None)
  return f'{_session_of(job.row.owner)}:sample:{number}'


def find(items: dict[str, Any], id: str) -> Any:
  """Returns the item of an id; raises Refused, with 404."""
  if id not in items:
    raise protocol.Refused(404, f'the id must be known: got {id!r}')
  return items[id]
