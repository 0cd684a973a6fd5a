"""The plan of a stage, which a run prints before it.

It has batch sizes, parameters, memory and communication. It is printed by
`--dry_run` and, in short, at the start of a run, below a head with devices,
host, versions and seed; quoted when the device runs out of memory. Bytes are
per device. Nothing is compiled:

    arrays      that have a name are counted exactly, from shapes and sharding
                rules: state, gradients, inputs that layers keep, cache, view
    work        of one layer and of the head is one measured term, see `_work`
    transfers   follow from the placement; XLA may fuse, split or reorder them
"""

import dataclasses
import functools
import math
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from posttrain import machine, schema, sharding, tree
from posttrain.decode import schedule
from posttrain.evaluation import comparison
from posttrain.models import delta, layers, lora, transformer
from posttrain.stage import learner

Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh

# Bytes per token of `types.Batch`: ten arrays of the sample, three of packing;
# three of trees; and six with a critic, with its values, returns, advantages.
BATCH_TOKEN_BYTES, TREE_BYTES, VALUE_BYTES = 12 * 4 + 1, 3 * 4, 6 * 4
# Copies of an MLP's activations that one layer's backward pass, and a forward
# pass without one, hold at a time, with everything else that has no name here.
# Fitted to programs that jax 0.10.2 compiled for H100. The planned bytes of a
# program are those of the compiler less `ERROR[0]` or plus `ERROR[1]` of them
# at most (`tests/stage/test_plan.py`). XLA for a CPU needs more, because it
# stores bfloat16 as float32.
BACKWARD, FORWARD = 8, 4
ERROR = 0.1, 0.25
_LOGITS = 4  # copies of the logits while a token is drawn


@dataclasses.dataclass(frozen=True)
class Transfer:
  """A kind of collective in one update of one micro-batch.

  `device_bytes` are those of the operand or result, the larger of both, in the
  dtype that travels, of all `count` collectives.
  """

  what: str
  kind: str
  axis: str
  count: int
  device_bytes: int


@dataclasses.dataclass(frozen=True)
class Load:
  """What a stage's data and the run add to its options.

  Attributes:
    group_sizes: samples per task, by environment.
    micro_batches: micro-batches of a step, at most.
    references: parameters of the models held beside the policy.
    players: number of frozen models that sample, assumed to be of the policy's
      shape.
    hosts: the processes of the run, one per host.
    sampler: the devices that sample and score; None = the learner's.
    has_samplers: whether other processes decode with the policy.
    uses_policy: whether batches depend on the policy's weights.
    tasks: tasks to train on and held-out ones, by environment.
    prompt_tokens: tokens of a prompt that are stored once for its group.
  """

  group_sizes: Mapping[str, int]
  micro_batches: int = 1
  references: int = 0
  players: int = 0
  hosts: int = 1
  sampler: Mesh | None = None
  has_samplers: bool = False
  uses_policy: bool = True
  tasks: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
  prompt_tokens: int = 0

  @property
  def group_size(self) -> int:
    """Samples of the largest group."""
    return max(self.group_sizes.values(), default=1)


@dataclasses.dataclass(frozen=True)
class Plan:
  """The resolved sizes of one stage. Bytes are per device."""

  stage: str
  cfg: schema.Stage  # its options, batch sizes included
  mesh: dict[str, int]  # devices per axis
  load: Load
  parameters: int
  trained: int  # those that train; with LoRA the adapter's
  # Weights, moments, average, EMA and snapshots, frozen weights.
  state_bytes: int
  slots: int  # sequences decoded at a time; 0 = the stage decodes nothing
  slot_tokens: int  # capacity of a slot
  slot_bytes: int  # its keys, values and recurrent states
  decode_bytes: int  # KV cache of the slots, and the decode view
  sleep_bytes: int  # those of them that are freed during an update
  reference_bytes: int  # weights of references held beside the policy
  past_bytes: int  # copies of the policy to sample with, see `_past_bytes`
  update_bytes: int  # batch, gradients, activations and work of an update
  # Work of prefill, decoding or scoring, the largest; 0 without slots.
  rollout_bytes: int
  # The same in an evaluation, with its cache beside that of held episodes.
  eval_bytes: int
  dtype: str  # of products
  weights: Any  # those that train, and frozen ones, as ShapeDtypeStructs
  transfers: Sequence[Transfer]

  @property
  def total_bytes(self) -> int:
    """Returns the largest number of bytes at a time.

    Decode view and references stay during an update, and so does the cache
    unless `rollout.sleep` frees it. If the sampler has devices of its own, the
    number is that of the learner's.
    """
    update = self.update_bytes - self.sleep_bytes
    if self.load.sampler is not None:
      return self.state_bytes + update
    update += self.rollout_bytes if self.in_thread else 0
    return self.state_bytes + self._held_bytes + max(update, self.eval_bytes)

  @property
  def sampler_bytes(self) -> int:
    """Returns the largest number of bytes of a sampler's own device, else 0."""
    own = self.load.sampler is not None
    return self._held_bytes + self.eval_bytes if own else 0

  @property
  def in_thread(self) -> bool:
    """Whether a thread samples beside the updates, see `pipeline.ahead`.

    Two threads that launch collectives on the same devices would wait for each
    other for ever.
    """
    load, rollout = self.load, self.cfg.rollout
    alone = load.sampler is not None or math.prod(self.mesh.values()) == 1
    lags = load.uses_policy and rollout.max_lag > 0
    return lags and not rollout.in_turns and alone and load.hosts == 1

  @property
  def _held_bytes(self) -> int:
    return self.past_bytes + self.decode_bytes + self.reference_bytes

  def lines(self) -> list[str]:
    """Returns the lines of a readable table."""
    low, high = (f'{100 * x:.0f}' for x in ERROR)
    update = size(self.update_bytes)
    if self.sleep_bytes:
      freed = size(self.sleep_bytes)
      update += f', less {freed} of cache that rollout.sleep frees'
    count, groups, cfg = self.load.hosts, self.load.group_sizes, self.cfg
    batch, optim = cfg.batch, cfg.optim
    sampler = dict(self.load.sampler.shape) if self.load.sampler else {}
    devices = math.prod(self.mesh.values()) // count
    hosts = f'{count}' if count > 1 else ''
    if hosts and self.slots:
      hosts += f', each of which decodes {self.slots // count} slots on '
      hosts += f'{devices} devices, which must hold the model'
    rows = {
      'tasks': '; '.join(
        f'{name}: {train:,}, and {held_out:,} held out'
        for name, (train, held_out) in self.load.tasks.items()
      ),
      'prompts_per_step': batch.prompts_per_step,
      'group_size': ', '.join(f'{k}: {v}' for k, v in groups.items()),
      '  samples per step': batch.prompts_per_step * max(groups.values()),
      'micro_batch_tokens': f'{batch.micro_batch_tokens}'
      f'{", or as few as a step needs" * bool(batch.fit)}',
      '  rows x tokens': f'{batch.packed_rows} x {batch.packed_tokens}',
      'trees': self._shared(),
      'rollout.slots': self.slots,
      '  tokens each': self.slots and self.slot_tokens,
      '  cached bytes each': self.slots and size(self.slot_bytes),
      '  of a prompt, stored once': self.load.prompt_tokens
      or 'none: only groups of kind=tokens with prompts above prefill_tokens'
      * cfg.rollout.shared_prompts,
      'steps': cfg.steps,
      '  epochs': ', '.join(
        f'{cfg.steps * batch.prompts_per_step / train:.3g}'
        for train, _ in self.load.tasks.values()
        if train and len(self.load.tasks) == 1
      ),
      'learning rate': f'{optim.lr:g}, {optim.schedule}',
      '  warmup_steps': optim.warmup_steps,
      '  final_lr_fraction': optim.final_lr_fraction,
      'mesh': ', '.join(f'{k} {v}' for k, v in self.mesh.items()),
      'mesh.sampler': ', '.join(f'{k} {v}' for k, v in sampler.items()),
      'processes': hosts,
      'parameters': f'{self.parameters:,}',
      '  that train': f'{self.trained:,}',
      'computes in': self.dtype,
      'memory per device': f'{size(self.total_bytes)} (on a GPU -{low} to '
      f'+{high} % of what XLA needs), the sum of',
      '  training state': size(self.state_bytes),
      '  update': update,
      'per sampler device': sampler
      and f'{size(self.sampler_bytes)}, the sum of',
      '  policies': self.past_bytes and size(self.past_bytes),
      '  decoding': self.slots and size(self.decode_bytes),
      '  references': size(self.reference_bytes),
      '  rollout': self.slots
      and size(self.rollout_bytes)
      + ', not beside the update' * (not sampler and not self.in_thread),
      '  evaluation': self.eval_bytes > self.rollout_bytes
      and f'{size(self.eval_bytes)}, not beside update and rollout',
    }
    return [f'stage {self.stage}', *_rows(rows)]

  def _shared(self) -> str:
    """Returns what trees save: of samples of `row_tokens`, the longest ones."""
    model, several = self.cfg.model, self.load.group_size > 1
    if not self.cfg.batch.trees:
      whole = several and model is not None and not model.serves_trees
      return 'none; the model reads rows of whole samples alone' * whole
    if self.cfg.kind != 'tokens':
      return 'the answers of a pair share its prompt'
    row, shares = self.cfg.batch.row_tokens, []
    for entry in self.cfg.envs.values():
      if entry.ratio and not isinstance(entry.sampler, schema.Dataset):
        prompt = max(row - entry.sampler.max_tokens, 0) / row
        shares.append(prompt * (1 - 1 / entry.group_size))
    return (
      'the samples of a group share its prompt, at most '
      f'{max(shares, default=0.0):.0%} of the tokens'
    )

  def details(self) -> list[str]:
    """Returns the lines of the tables: weights, and what is communicated."""
    dtypes = {'float32': 'f32', 'bfloat16': 'bf16'}
    weights = [
      (
        path,
        f'{dtypes.get(str(x.dtype), x.dtype)}[{", ".join(map(str, x.shape))}]',
        f'({", ".join("-" if a is None else str(a) for a in x.sharding.spec)})',
        size(device_bytes(x)),
      )
      for part in self.weights
      for path, x in tree.flat(part).items()
    ]
    transfers = [
      (x.what, f'{x.count} x {x.kind}', x.axis, size(x.device_bytes))
      for x in self.transfers
    ]
    if transfers:
      total = sum(x.device_bytes for x in self.transfers)
      transfers.append(('total', '', '', size(total)))
    return [
      f'weights of stage {self.stage}: shape, splitting axes, size per device',
      *_indented(weights),
      'communication of one update of one micro-batch, per device',
      *(_indented(transfers) or ['  none: one device']),
    ]


def head(
  seed: int, devices: tuple[str | None, int, int] | None = None
) -> list[str]:
  """Returns the first lines of a run's plan: where it runs, and with what.

  Args:
    seed: the run's seed.
    devices: the planned ones, see `preflight.check`; None = those here.
  """
  versions = machine.versions('posttrain', 'jax', 'python')
  kind, count, hosts = devices or (None, None, None)
  planned = ' (planned)' if devices else ''
  rows = {
    'device': machine.devices(kind, count, hosts) + planned,
    'host': socket.gethostname(),
    'versions': ', '.join(map(' '.join, versions.items())),
    'seed': f'{seed}',
  }
  return ['run', *_rows(rows)]


def slot_tokens(longest: int, backend: str) -> int:
  """Returns a slot's capacity: whole tiles of a backend's decode kernel.

  A cache of another length would be padded, and copied, at every token.
  """
  tile = 128 if backend == 'tpu' else 16
  return -(-longest // tile) * tile


def size(count: float) -> str:
  """Returns a number of bytes with its unit."""
  for unit in ('B', 'KiB', 'MiB'):
    if count < 1024:
      return f'{count:.0f} {unit}'
    count /= 1024
  return f'{count:.1f} GiB'


def device_bytes(like: Any) -> int:
  """Returns the bytes per device of ShapeDtypeStructs with shardings."""
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(like)
  )


def make(
  spec: learner.LearnerSpec, model: schema.Model, slot_tokens: int, load: Load
) -> Plan:
  """Resolves the sizes of a stage; allocates nothing.

  Args:
    spec: what the stage trains; its devices need not exist.
    model: the model's options with the vocabulary resolved.
    slot_tokens: tokens that a slot holds.
    load: what its data and the run add.
  """
  stage, mesh = spec.cfg, spec.mesh
  batch, rollout = stage.batch, stage.rollout
  state, whole = spec.state_like, spec.weights_like
  frozen = whole if stage.lora.rank else None
  # The cache of an engine that nothing uses is never allocated: it is used by
  # the policy, or by the model that answers to make pairs.
  makes_pairs = isinstance(stage.pairs, schema.MadePairs)
  decodes = spec.objective.generates_text or makes_pairs
  cache = each = view = work = other = 0
  decoders = load.players + (not load.has_samplers)
  sampler = mesh if load.sampler is None else load.sampler
  if decodes:
    host, slots = sampler, rollout.slot_count // load.hosts
    if load.hosts > 1:  # each decodes alone
      devices = math.prod(mesh.shape.values()) // load.hosts
      own = schema.Mesh(
        tensor=mesh.shape[sharding.TENSOR], expert=mesh.shape[sharding.EXPERT]
      )
      host = sharding.abstract_mesh(own, devices)
    ways, mixers = sharding.batch_ways(host), layers.cached_mixers(model)
    token, dense = (
      [cached_token_bytes(model, host, x, dtype) for x in mixers if x]
      for dtype in (rollout.cache_dtype, 'auto')
    )
    all_layers, token, dense = sum(token), max(token), max(dense)
    # The slots: cache, drawn ids and their logprobs.
    tokens = load.prompt_tokens
    prompts = schedule.Store.make(slots, ways, tokens, load.group_size)
    stored = prompts.count // ways * tokens if prompts else 0
    each = (slot_tokens - tokens) * all_layers + state_bytes(model, host)
    cache = slots // ways * (slot_tokens * (4 + 4) + each)
    cache += stored * all_layers
    view = _view_bytes(spec, model, host)
    # Scoring a micro-batch, on all devices together.
    scored = _local_tokens(mesh, batch) * mesh.shape[sharding.SEQUENCE]
    scored //= sampler.shape[sharding.SEQUENCE]
    work = _work(model, sampler, scored, FORWARD)
    if sampler.shape[sharding.FSDP] > 1:  # all layers are cast before the first
      for x in jax.tree.leaves(_on(sampler, whole['layers'])):
        if x.dtype.itemsize > 1:  # quantized ones are gathered as they are
          work += _width(model) * device_bytes(x) // x.dtype.itemsize
    # Prefill, and drawing a token.
    rows = -(-min(rollout.prefill_rows, slots) // ways)
    prefill = _work(model, host, rows * rollout.prefill_tokens, FORWARD)
    prefill += rows * slot_tokens * token * (1 + bool(tokens))
    if token < dense:
      prefill += rows * slot_tokens * dense
    logits = _LOGITS * 4 * _head(model, host) // model.embed_dim
    if decoders:
      # Decoding reads a copy of the prompts.
      decoding = slots // ways * logits + stored * all_layers
      if token < dense:  # XLA dequantizes a layer, our kernels do not
        decoding += slots // ways * slot_tokens * dense
      work = max(work, prefill, decoding)
    if load.uses_policy and rollout.in_flight and rollout.keep_cache:
      other = cache
  policy = transformer.shapes(model)
  past, handed_over = _past_bytes(spec, model.dtype, frozen, load)
  transfers = _transfers(model, mesh, batch, state.params, frozen)
  if handed_over:
    what = 'policy, per step'
    transfers += [Transfer(what, 'copy', 'sampler', 1, handed_over)]
  # Whole rows, of which the model has a piece.
  local = load.micro_batches * _local_tokens(mesh, batch)
  local *= mesh.shape[sharding.SEQUENCE]
  return Plan(
    stage=spec.name,
    cfg=stage,
    mesh=dict(mesh.shape),
    load=load,
    parameters=_numbers(policy),
    trained=_numbers(state.params),
    state_bytes=device_bytes((state, frozen)),
    slots=rollout.slot_count if decodes else 0,
    slot_tokens=slot_tokens,
    slot_bytes=each,
    decode_bytes=decoders * (view + cache),
    sleep_bytes=cache if rollout.sleep and sampler is mesh else 0,
    reference_bytes=load.references
    * device_bytes(_on(sampler, policy))
    // _numbers(policy),
    past_bytes=past,
    update_bytes=local
    * (
      BATCH_TOKEN_BYTES
      + TREE_BYTES * bool(batch.trees)
      + VALUE_BYTES * (stage.critic.kind != 'none')
    )
    + _update_bytes(model, mesh, batch, state.params, whole, frozen),
    rollout_bytes=work,
    eval_bytes=work + other,
    dtype=model.dtype,
    weights=(state.params, frozen),
    transfers=transfers,
  )


def _on(mesh: Mesh, params: Any) -> Any:
  return sharding.placed(params, transformer.SHARDING_RULES, mesh)


def _past_bytes(
  spec: learner.LearnerSpec, dtype: str, frozen: Any, load: Load
) -> tuple[int, int]:
  """Returns the bytes of the policies that sample, beside the training state.

  A policy has its EMAs and snapshots with it. With `rollout.max_lag` they are
  the past versions, their matrices in the compute dtype, and the newest one. A
  sampler's own devices hold one more, as a new one comes before the oldest one
  goes, and frozen weights. Elsewhere it comes while nothing is updated. Without
  batches that depend on the policy an evaluation alone has one.

  Returns:
    (bytes of all versions, bytes that a step copies to a sampler's devices)
  """
  weights, lag = learner.weights_of(spec.state_like), spec.cfg.rollout.max_lag
  lag *= load.uses_policy
  if lag:
    cast = functools.partial(lora.cast_matrices, dtype=dtype)
    weights = jax.eval_shape(cast, weights)
  each = device_bytes(_on(load.sampler or spec.mesh, weights))
  if load.sampler is None:
    return (lag + 1) * each if lag else 0, 0
  held = (lag + 1) * each + device_bytes(_on(load.sampler, frozen))
  return (held + each, each) if load.uses_policy else (held, 0)


def _numbers(like: Any) -> int:
  return sum(math.prod(x.shape) for x in jax.tree.leaves(like))


def _local_tokens(mesh: Mesh, batch: schema.Batch) -> int:
  """Returns the tokens of a micro-batch on one device."""
  return batch.tokens_per_micro_batch // sharding.batch_ways(mesh)


def _width(model: schema.Model) -> int:
  """Returns the bytes of a number in the compute dtype."""
  return 2 if model.dtype == 'bfloat16' else 4


def _split(size: int, ways: int) -> int:
  return size // ways if size % ways == 0 else size


def _head(model: schema.Model, mesh: Mesh) -> int:
  """Returns the numbers of the head's columns on a device, whole in D."""
  assert model.vocab_size is not None, 'the vocabulary must be resolved'
  columns = _split(model.vocab_size, mesh.shape[sharding.TENSOR])
  return columns * model.embed_dim


def _work(model: schema.Model, mesh: Mesh, tokens: int, copies: int) -> int:
  """Returns the bytes of a layer's work on some tokens: the measured term."""
  tensor, sizes = mesh.shape[sharding.TENSOR], model.delta
  feeds = {feed for _, feed in layers.kinds(model)}
  widths = (layers.mlp_width(model, x) for x in feeds if x != 'experts')
  columns = max(widths, default=0) // tensor
  if 'experts' in feeds:  # of all tokens that the device's experts may get
    choices = mesh.shape[sharding.EXPERT] * model.experts.per_token
    own = model.experts.mlp_dim // tensor + model.embed_dim // 2
    columns = max(columns, choices * own)
  work = copies * tokens * columns * _width(model)
  # XLA makes room for the sums of a period's delta layers before the first one.
  period, _ = layers.periods(model)['layers']
  count = sum(mixer == 'delta' for mixer, _ in period)
  values = sizes.value_heads * (sizes.key_dim + sizes.value_dim)
  each = 2 * copies * (2 * sizes.key_heads * sizes.key_dim + values)
  if copies == BACKWARD and mesh.shape[sharding.SEQUENCE] > 1:
    each += 4 * values * sizes.key_dim // delta.CHUNK  # states after all chunks
  sums = tokens * each // tensor * (count + 1)
  return max(work, sums) if count else work


def _update_bytes(
  model: schema.Model,
  mesh: Mesh,
  batch: schema.Batch,
  params: Any,
  whole: Any,
  frozen: Any,
) -> int:
  """Returns the bytes of an update beside the state and the batch."""
  width, fsdp = _width(model), mesh.shape[sharding.FSDP]
  local, tensor = _local_tokens(mesh, batch), mesh.shape[sharding.TENSOR]
  if batch.reduce_gradients == 'update' and mesh.size > 1:
    # Whole over fsdp: the sum of the gradients in float32; the weights and a
    # micro-batch's gradients, those of the layers in the compute dtype; and
    # frozen weights, beside the device's part of them.
    deep = _numbers(params['layers'])
    held = (4 + 2 * width) * deep + 2 * 4 * (_numbers(params) - deep)
    held += width * _numbers(frozen) if fsdp > 1 else 0
  else:
    # The sum of the gradients, and those of a micro-batch.
    held = 2 * device_bytes(params)
    if fsdp > 1:  # XLA transposes `o` and `down`, or their gradients
      held += sum(
        device_bytes(x)
        for path, x in tree.flat(whole).items()
        if path.endswith(('/o/kernel', '/down/kernel'))
      )
  kept = sum(_kept_bytes(model, mesh, *kind) for kind in layers.kinds(model))
  if 'layers' in params.get('critic', {}):
    kept *= 2
  gradient = (4 if frozen is None else width) * _head(model, mesh)
  work = _work(model, mesh, local, BACKWARD)
  size = max(len(period) for period, _ in layers.periods(model).values())
  if size > 1:
    # The period's weights in the compute dtype.
    numbers = _numbers(whole['layers']) * size // model.layers
    work += width * numbers // (fsdp * tensor)
  # A layer's experts, whole over fsdp, and their gradients.
  experts = 3 * model.experts.count * model.experts.mlp_dim * model.embed_dim
  work += 3 * width * experts // (mesh.shape[sharding.EXPERT] * tensor)
  return held + local * kept + gradient + work


def _kept_bytes(model: schema.Model, mesh: Mesh, mixer: str, ff: str) -> int:
  """Returns the bytes of a token that a layer keeps for the backward pass.

  They are those of its input, and as `remat` says the results of attention, or
  of all products.
  """
  tensor, sums, sizes = mesh.shape[sharding.TENSOR], 0, model.delta
  stream = _width(model) * (model.embed_dim + model.layer_embed_dim)
  heads, size = model.kv_sizes(mixer.startswith('global_'))
  queries = model.heads * size
  if model.remat == 'block' or (model.remat, mixer) == ('attention', 'delta'):
    return stream
  if mixer == 'delta':
    products = 2 * sizes.key_heads * sizes.key_dim
    products += 2 * sizes.value_heads * (sizes.value_dim + 1)
  else:
    products, sums = queries, 4 * model.heads
  if model.remat == 'attention':
    return stream + (_width(model) * products + sums) // tensor
  if mixer != 'delta':
    keys = 0 if 'query_' in mixer else heads * size
    products = (products + keys) * (3 if model.qk_norm else 2)
    # Of the row.
    products += 2 * heads * size * (mesh.shape[sharding.SEQUENCE] - 1)
    products += model.attention_gate * queries
  if ff != 'experts':
    products += 2 * layers.mlp_width(model, ff)
  else:  # of all tokens that the device's experts may get
    choices = mesh.shape[sharding.EXPERT] * model.experts.per_token
    products += choices * (2 * model.experts.mlp_dim + tensor * model.embed_dim)
  return 2 * stream + (_width(model) * products + sums) // tensor


def _view_bytes(
  spec: learner.LearnerSpec, model: schema.Model, mesh: Mesh
) -> int:
  """Returns the bytes of the decode view, which only `tensor` splits."""
  params, _ = transformer.split_critic(spec.state_like.params)
  whole = lora.whole(params, spec.base(lambda: spec.weights_like))
  # Without their places, which are those of the learner.
  whole = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), whole)
  kinds = layers.kinds(model)
  counts = {kinds.index(kind): kinds.count(kind) for kind in kinds}
  make = functools.partial(transformer.decode_view, cfg=model, only=[*counts])
  like = jax.eval_shape(make, whole)
  view = sharding.placed(like, transformer.VIEW_RULES, mesh)
  first = zip(view['layers'], counts.values(), strict=True)
  return device_bytes(view) + sum(
    (count - 1) * device_bytes(layer) for layer, count in first
  )


def cached_token_bytes(
  model: schema.Model, mesh: Mesh, mixer: str = 'attention', dtype: str = 'auto'
) -> int:
  """Returns the bytes of a token's key and value in a layer of a kind."""
  heads, size = model.kv_sizes(mixer.startswith('global_'))
  heads = _split(heads, mesh.shape[sharding.TENSOR])
  return 2 * heads * (size + 4 if dtype == 'int8' else _width(model) * size)


def state_bytes(model: schema.Model, mesh: Mesh) -> int:
  """Returns the bytes of a sequence's recurrent states, however long it is."""
  make = functools.partial(transformer.empty_recurrent, model, 1)
  leaves = jax.tree.leaves(jax.eval_shape(make))
  tensor = mesh.shape[sharding.TENSOR]
  return sum(
    x.dtype.itemsize * x.size // x.shape[1] * _split(x.shape[1], tensor)
    for x in leaves
  )


def _transfers(
  model: schema.Model, mesh: Mesh, batch: schema.Batch, params: Any, frozen: Any
) -> list[Transfer]:
  """Returns what the devices exchange in one update of one micro-batch.

  Layers are gathered over fsdp in the compute dtype, forward and backward, and
  the head once; their gradients are reduced, the head's in float32. The
  embedding is not gathered: each device looks up its columns for the tokens of
  all. With LoRA only the adapter has gradients. Over tensor the activations
  are summed. Over sequence the row's keys and values are gathered, and what a
  delta layer's pieces make of a state. With `reduce_gradients='update'` weights
  and gradients travel once per update.
  """
  width, depth, transfers = _width(model), model.layers, list[Transfer]()

  def add(what, kind, count, size, *axes):
    split = ' and '.join(x for x in axes if mesh.shape[x] > 1)
    if split and size:
      transfers.append(Transfer(what, kind, split, count, size))

  once, local = batch.reduce_gradients == 'update', _local_tokens(mesh, batch)
  tables = _head(model, mesh) * (1 if model.tied_head else 2)
  own = model.layers * model.layer_embed_dim
  tables += _head(model, mesh) // model.embed_dim * own
  trained, others = _by_fsdp(params['layers'])
  adapts = frozen is not None
  leaves = jax.tree.leaves(frozen['layers']) if adapts else []
  base = [x for x in leaves if sharding.FSDP in x.sharding.spec]
  gathered = mesh.shape[sharding.FSDP] * device_bytes(base) + width * trained
  if once:
    weights = gathered + (width if adapts else 4) * tables
    gradient, count, end = 4 * trained, 1, ', per update'
    gradient += 0 if adapts else 4 * tables
    add('weights' + end, 'all-gather', 1, weights, 'fsdp')
  else:
    gradient, count, end = width * trained, depth, ''
    head, passes = _head(model, mesh), 1 if adapts else 2
    lookup = passes * local * (model.embed_dim + own) * width
    add('layers, forward', 'all-gather', depth, gathered, 'fsdp')
    add('layers, backward', 'all-gather', depth, gathered, 'fsdp')
    add('head', 'all-gather', 1, width * head, 'fsdp')
    add('embedded tokens', 'all-to-all', passes, lookup, 'fsdp')
    if not adapts:
      add('head, gradient', 'reduce-scatter', 1, 4 * head, 'fsdp')
  what = 'adapter, gradient' if adapts else 'gradients'
  add(what + end, 'reduce-scatter', count, gradient, 'fsdp')
  # The tokens are gathered again to compute gradients, as are these.
  expert = mesh.shape[sharding.EXPERT]
  experts = sum(ff == 'experts' for _, ff in layers.kinds(model))
  size = experts * expert * local * model.embed_dim * width
  add('tokens of experts', 'all-gather', 3 * experts, 3 * size, 'expert')
  add('results of experts', 'reduce-scatter', 2 * experts, 2 * size, 'expert')
  # Of whole rows, and again to compute gradients.
  passes, sequence = 1 + (model.remat != 'none'), mesh.shape[sharding.SEQUENCE]
  tokens, deltas = sequence * local, len(model.delta_layers)
  keys = tokens * sum(
    cached_token_bytes(model, mesh, mixer)
    for mixer, _ in layers.kinds(model)
    if mixer != 'delta'
  )
  sizes, tensor = model.delta, mesh.shape[sharding.TENSOR]
  state = sizes.key_dim * (sizes.key_dim + sizes.value_dim)
  state *= 4 * sizes.value_heads // tensor
  states = deltas * sequence * tokens // batch.packed_tokens * state
  for name, number, size in (
    ('keys, values', 2 * (depth - deltas), keys),
    ('states', deltas, states),
  ):
    add(name, 'all-gather', passes * number, passes * size, 'sequence')
    name += ', gradient'
    add(name, 'reduce-scatter', number, size, 'sequence')
  own = 0
  if expert > 1:  # a device has all tokens of its experts
    leaves = jax.tree.leaves(params['layers'])
    leaves = [x for x in leaves if sharding.EXPERT in x.sharding.spec]
    own = width * _by_fsdp(leaves)[0]
  if not (adapts or once):
    gradient, count = gradient + 4 * tables, depth + 2
  both, fsdp = ('data', 'sequence'), mesh.shape[sharding.FSDP]
  add(what + end, 'all-reduce', count, own // fsdp, *both)
  rest = (gradient - own) // fsdp
  add(what + end, 'all-reduce', count, rest, *both, 'expert')
  if adapts:
    count, size = 1 if once else depth, (4 if once else width) * others
    what += ', unsplit' + end
    add(what, 'all-reduce', count, size, *sharding.BATCH_AXES)
  stream = local * model.embed_dim
  # The MLP's sum is not needed again where a layer is recomputed.
  forward = 2 * depth + (model.remat != 'none') * depth
  backward = 5 * depth  # of the inputs of q, k, v, gate and up
  columns = 0  # of x A, forward and recomputed, or of its gradient
  for path, x in tree.flat(params if adapts else {}).items():
    if sharding.TENSOR in x.sharding.spec:
      a = path.endswith('/a')
      columns += 2 * x.shape[0] * x.shape[-1] if a else math.prod(x.shape[:2])
  for name, count, size in (
    ('embedded tokens', 1, 4 * stream),
    ('activations, forward', forward, forward * width * stream),
    ('activations, backward', backward, backward * width * stream),
    ('hidden states, gradient', 1, 4 * stream),
    ('logits, sums of a token', 2, 4 * 4 * local),
    ('products with A', depth, columns * local * width),
  ):
    add(name, 'all-reduce', count, size, 'tensor')
  return transfers


def _by_fsdp(params: Any) -> tuple[int, int]:
  """Returns the numbers of layers on a device, whole over `fsdp`.

  Returns:
    (those that fsdp splits, those that it does not; norms are left out)
  """
  split = other = 0
  for x in jax.tree.leaves(params):
    numbers = math.prod(x.sharding.shard_shape(x.shape))
    if sharding.FSDP in x.sharding.spec:
      split += numbers * x.sharding.mesh.shape[sharding.FSDP]
    else:
      other += numbers
  return split, other


def _rows(rows: Mapping[str, Any]) -> list[str]:
  """Returns a line per entry that is neither 0 nor empty."""
  return [f'  {name:<20} {value}' for name, value in rows.items() if value]


def _indented(rows: Sequence[Sequence[str]]) -> list[str]:
  """Returns the lines of a table whose last column is aligned on the right."""
  return [f'  {line}' for line in comparison.layout(rows, 3)]
