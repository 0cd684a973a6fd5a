"""Options of the model, its presets, its adapter and its tokenizer."""

import dataclasses
import datetime
import functools
import json
from typing import Annotated, Any

from posttrain.schema import bounds

MAX_RANK = 2**16  # beyond any matrix that an adapter corrects


class Lora(bounds.Options):
  """Trains a low-rank correction of frozen weights (arXiv 2106.09685)."""

  # Rank of the correction; 0 = no correction, all weights train.
  rank: Annotated[int, bounds.within(0, MAX_RANK)] = 0
  # The correction is multiplied by alpha / rank.
  alpha: bounds.Positive = 32.0
  # Multiplies by alpha / sqrt(rank) instead (rsLoRA, arXiv 2312.03732).
  rslora: bool = False
  # Trains the norm of each column beside its direction (DoRA, arXiv
  # 2402.09353); targets must leave experts out.
  dora: bool = False
  # How the frozen weights are held: 'float' = in the compute dtype; 'int8', of
  # layers' matrices, with a scale per column; 'int4', with one per column of
  # every 32 rows. Embedding, head, norms and routers stay. Matrices of a
  # HuggingFace directory are quantized one by one while they are read.
  base: Annotated[str, bounds.one_of('float', 'int8', 'int4')] = 'float'
  # What decodes: 'merged' = base and correction as one matrix, in the compute
  # dtype; 'factors' = the base as it is held, with the correction beside it, as
  # in training; 'auto' = 'factors' with a quantized base, else 'merged'.
  decode: Annotated[str, bounds.one_of('auto', 'merged', 'factors')] = 'auto'
  # Regex searched in the paths of the layers' matrices, which are corrected if
  # it matches. Paths are layers/attention/q/kernel (k, v, o) and
  # layers/mlp/up/kernel (gate, down), or layers/experts/up/kernel, one matrix
  # per expert, and layers/experts/shared/up/kernel. The default matches all of
  # them, but not those of the weights, layers/experts/router/kernel and
  # layers/experts/shared_gate/kernel, nor head/kernel, which a model has unless
  # its head is the embedding's table.
  targets: bounds.Regex = r'^layers/(?!experts/(router|shared_gate)/).*/kernel$'


# Bounds of a model's options: far beyond any model, and small enough that a
# check, an estimate or a list of its tensors takes milliseconds.
MAX_LAYERS = 10_000
MAX_SIZE = 2**24  # of a dimension of a weight
MAX_PARAMETERS = 10**13
LARGE = 10**8  # parameters, see `Model.is_large`
MAX_TOKENS = 2**31 - 1  # positions are int32
ATTENTION = ('auto', 'xla', 'pallas', 'cudnn', 'interpret')
REMAT = ('none', 'attention', 'block', 'auto')


Size = Annotated[int, bounds.within(1, MAX_SIZE)]
Factor = Annotated[float, bounds.within(1e-3, 1e6)]


ROUTES = ('own', 'record', 'replay')
# Fields of a model that are no property of its weights.
FREE = ('attention', 'routes', 'ragged')
UNSAVED = ('dtype', 'remat', 'rope_length', *FREE)  # by HuggingFace
ROPE_KINDS = (
  'none',
  'linear',
  'llama3',
  'yarn',
  'dynamic',
  'longrope',
  'proportional',
)


class RopeScaling(bounds.Options):
  """Stretches RoPE for contexts longer than those of pretraining."""

  # 'none'; 'linear': multiplies all wavelengths by factor (Chen et al., arXiv
  # 2306.15595); 'llama3': multiplies the long wavelengths only (Llama 3.1,
  # arXiv 2407.21783); 'yarn': likewise, by its bounds (Peng et al., arXiv
  # 2309.00071); 'dynamic': a larger rope_theta, by model.rope_length;
  # 'longrope': multiplies each wavelength by a factor of its own, of a list
  # for short or for long sequences, by model.rope_length (Ding et al., arXiv
  # 2402.13753); 'proportional': as linear, and model.partial_rotary is a share
  # of the pairs, whose wavelengths are those of a whole head (Gemma 4).
  kind: Annotated[str, bounds.one_of(*ROPE_KINDS)] = 'none'
  # Factor of the wavelengths, or of the context length.
  factor: Factor = 1.0
  # Context length in pretraining, in tokens; linear reads none.
  original_length: Annotated[int, bounds.within(1, MAX_TOKENS)] = 8192
  # llama3: wavelengths above original_length / low_frequency are multiplied by
  # the whole factor.
  low_frequency: Factor = 1.0
  # llama3: wavelengths below original_length / high_frequency are unchanged;
  # between the two bounds, the factor is interpolated.
  high_frequency: Factor = 4.0
  # yarn: wavelengths that fit this often or more into original_length are
  # unchanged.
  fast_turns: Factor = 32.0
  # yarn: wavelengths that fit this often or less are multiplied by the factor;
  # between the two bounds, over the pairs of a head, it is interpolated.
  slow_turns: Factor = 1.0
  # yarn: rounds the bounds to whole pairs.
  truncate: bool = True
  # yarn, longrope: factor of what RoPE rotates, in queries and keys; None =
  # 0.1 ln(factor) + 1, or sqrt(1 + ln(factor) / ln(original_length)).
  attention_factor: Annotated[float | None, bounds.within(1e-3, 1e6)] = None
  # longrope: factors of the wavelengths, one for each pair of a head, of runs
  # whose model.rope_length is at most original_length.
  short_factors: tuple[float, ...] = ()
  # longrope: those of the other runs.
  long_factors: tuple[float, ...] = ()

  def __post_init__(self):
    super().__post_init__()
    bounds.require(
      self.kind != 'llama3' or self.low_frequency < self.high_frequency,
      'high_frequency',
      f'exceed low_frequency={self.low_frequency}',
      self.high_frequency,
    )


class Delta(bounds.Options):
  """Sizes of the gated DeltaNet in delta layers (arXiv 2412.06464)."""

  # Number of heads of queries and keys; divides value_heads.
  key_heads: Size = 2
  # Number of heads of values, each with a state [key_dim, value_dim].
  value_heads: Size = 4
  # Size of a query and of a key.
  key_dim: Size = 32
  # Size of a value.
  value_dim: Size = 32
  # Tokens that the short convolution reads, its own included.
  conv_width: Annotated[int, bounds.within(2, 16)] = 4

  def __post_init__(self):
    super().__post_init__()
    bounds.require(
      self.value_heads % self.key_heads == 0,
      'key_heads',
      f'divide value_heads={self.value_heads}',
      self.key_heads,
    )


class Experts(bounds.Options):
  """A mixture of experts in place of the MLP (arXiv 1701.06538)."""

  # Number of experts; 0 = none.
  count: Annotated[int, bounds.within(0, 2**15)] = 0
  # Number of experts of a token; at most count.
  per_token: Size = 2
  # Hidden width of an expert's gated MLP.
  mlp_dim: Size = 64
  # The weights of a token's experts sum to 1; else they are their probabilities
  # among all experts.
  normalize: bool = True
  # Hidden width of an MLP that each token visits besides, weighted by a sigmoid
  # of its own (Qwen3.5-MoE, Qwen3-Next); 0 = none.
  shared_dim: Annotated[int, bounds.within(0, MAX_SIZE)] = 0
  # Biases of the experts and of the router (gpt-oss).
  bias: bool = False
  # Bound c of an expert's gate and up, whose product is then min(gate, c)
  # sigmoid(1.702 gate) (1 + up) in place of gate sigmoid(gate) up; None = none.
  clamp: Annotated[float | None, bounds.within(1e-3, 1e6)] = None

  def __post_init__(self):
    super().__post_init__()
    bounds.require(
      not self.count or self.per_token <= self.count,
      'per_token',
      f'be at most count={self.count}',
      self.per_token,
    )


class Model(bounds.Options):
  """A decoder-only transformer of the Llama, Qwen, Gemma, ... families."""

  # Number of rows of the embedding table; None = the tokenizer's size.
  vocab_size: Annotated[int | None, bounds.within(2, MAX_SIZE)] = None
  # Number of blocks of attention and MLP.
  layers: Annotated[int, bounds.within(1, MAX_LAYERS)] = 3
  # Width of the residual stream.
  embed_dim: Size = 128
  # Number of query heads.
  heads: Size = 4
  # Number of key and value heads (grouped-query attention); divides heads.
  kv_heads: Size = 2
  # Size of each head; even, because RoPE rotates pairs.
  head_dim: Size = 32
  # Size of each head in layers that are not local (Gemma 4); None = head_dim in
  # all layers.
  global_head_dim: Annotated[int | None, bounds.within(1, MAX_SIZE)] = None
  # Number of key and value heads in these layers; None = kv_heads.
  global_kv_heads: Annotated[int | None, bounds.within(1, MAX_SIZE)] = None
  # In these layers values are keys, before norms and RoPE (Gemma 4).
  keys_as_values: bool = False
  # The last layers attend to the keys and values of the last layer before them
  # that has its own and is local, or not, as they are (Gemma 4); 0 = none.
  shared_kv_layers: Annotated[int, bounds.within(0, MAX_LAYERS)] = 0
  # MLPs of these layers are twice as wide (Gemma 4).
  double_mlp: bool = False
  # Width of the embeddings that each layer has of its own, which a gate of its
  # output multiplies (Gemma 4); 0 = none.
  layer_embed_dim: Annotated[int, bounds.within(0, MAX_SIZE)] = 0
  # A factor of each layer's output, which does not train (Gemma 4).
  layer_scalars: bool = False
  # Hidden width of the gated MLP.
  mlp_dim: Size = 384
  # Experts in place of the MLP, see dense_layers.
  experts: Experts = Experts()
  # Indices (from 0) of layers with an MLP in a model with experts.
  dense_layers: tuple[int, ...] = ()
  # Activation of the MLP's gate: 'silu', or 'gelu' with tanh (Gemma).
  activation: Annotated[str, bounds.one_of('silu', 'gelu')] = 'silu'
  # Base of the RoPE wavelengths; larger = longer contexts.
  rope_theta: Annotated[float, bounds.within(1, 1e12)] = 10_000.0
  # Indices (from 0) of layers with a gated DeltaNet in place of attention
  # (Qwen3.5, Qwen3-Next); () = none, and at least one layer has attention.
  delta_layers: tuple[int, ...] = ()
  # Sizes of these layers.
  delta: Delta = Delta()
  # Scaling of the wavelengths, except in layers with local_rope_theta.
  rope_scaling: RopeScaling = RopeScaling()
  # Tokens of the longest sequence, by which rope_scaling of kind 'dynamic' or
  # 'longrope' chooses the wavelengths; None = original_length. It holds for
  # all sequences of a run: keys in the cache are rotated when they are written,
  # so a sequence cannot change its wavelengths while it grows, and training
  # must rotate as sampling has. (transformers chooses by the longest sequence
  # of each call.) No property of the weights.
  rope_length: Annotated[int | None, bounds.within(1, MAX_TOKENS)] = None
  # Share of each head that RoPE rotates, from its beginning.
  partial_rotary: Annotated[float, bounds.within(1e-3, 1)] = 1.0
  # Indices of layers without RoPE (SmolLM3); () = none.
  nope_layers: tuple[int, ...] = ()
  # Queries at position p are multiplied by 1 + query_beta ln(1 + floor(p /
  # rope_scaling.original_length)) (Llama 4, Ministral 3); 0 = by 1.
  query_beta: Annotated[float, bounds.within(0, 1e3)] = 0.0
  # Indices (from 0) of layers that attend to the last `window` tokens only;
  # () = none.
  local_layers: tuple[int, ...] = ()
  # Number of tokens that a local layer attends to, the query's included.
  window: Annotated[int | None, bounds.within(1, MAX_TOKENS)] = None
  # rope_theta of local layers (Gemma 3); None = rope_theta, with its scaling.
  local_rope_theta: Annotated[float | None, bounds.within(1, 1e12)] = None
  # Added to the mean square in every RMSNorm.
  norm_eps: Annotated[float, bounds.within(1e-12, 1)] = 1e-6
  # Every RMSNorm multiplies by 1 + its weight, not by its weight (Gemma).
  norm_offset: bool = False
  # RMSNorms on the inputs of attention and MLP; all but OLMo 2 and 3 have them.
  pre_norms: bool = True
  # RMSNorms on the outputs of attention and MLP (Gemma 2, OLMo 2).
  post_norms: bool = False
  # RMSNorm on queries and keys, per head (Qwen3).
  qk_norm: bool = False
  # With qk_norm: over all heads together, before they are split (OLMo 2).
  wide_qk_norm: bool = False
  # RMSNorm on values, per head, without weights (Gemma 4).
  v_norm: bool = False
  # Biases on the q, k and v projections (Qwen2).
  qkv_bias: bool = False
  # Multiplies attention's outputs by the sigmoid of a projection of its inputs,
  # whose weights are in q, after each head's (Qwen3.5).
  attention_gate: bool = False
  # A logit of each head that takes part in attention's softmax, and has no
  # value (gpt-oss).
  attention_sinks: bool = False
  # Bias on the projection of attention's output.
  output_bias: bool = False
  # Biases of the MLP.
  mlp_bias: bool = False
  # Factor of embeddings (Granite).
  embedding_multiplier: Factor = 1.0
  # Factor of the outputs of attention and MLP (Granite).
  residual_multiplier: Factor = 1.0
  # Logits are divided by this (Granite).
  logit_divisor: Factor = 1.0
  # Attention scores are multiplied by this; None = by query_scale (Granite).
  attention_multiplier: Annotated[float | None, bounds.within(1e-6, 1e3)] = None
  # Attention scores are divided by the root of this; None = head_dim.
  query_scale: Annotated[float | None, bounds.within(1e-3, 1e6)] = None
  # Cap c of attention scores s: c tanh(s / c) (Gemma 2); None = no cap.
  attention_softcap: Annotated[float | None, bounds.within(1e-3, 1e6)] = None
  # Cap of logits, by the same formula; None = no cap.
  logit_softcap: Annotated[float | None, bounds.within(1e-3, 1e6)] = None
  # Multiplies embeddings by the root of embed_dim (Gemma).
  scale_embeddings: bool = False
  # The output head is the embedding table.
  tied_head: bool = True
  # Compute dtype: 'float32'; 'bfloat16'; or 'auto' = bfloat16, but float32
  # where computing is slow, on a CPU with 100M parameters or more, because it
  # is faster there. Master weights and logits are float32.
  dtype: Annotated[str, bounds.one_of('float32', 'bfloat16', 'auto')] = (
    'float32'
  )
  # Recomputation in the backward pass: 'none' = elementwise operations only
  # (norms, RoPE, SwiGLU; matrix products are kept), 'attention' = every layer
  # from its input, except attention, whose outputs are kept, 'block' = every
  # layer from its input, 'auto' = 'block', but 'none' where computing is slow.
  remat: Annotated[str, bounds.one_of(*REMAT)] = 'none'
  # Implementation of attention: 'auto' = the Pallas kernels on a GPU or TPU
  # where they support the model, else XLA; 'xla'; 'pallas' = the kernels, or an
  # error; 'cudnn' = cuDNN on a GPU in bfloat16, without attention_softcap, for
  # training and scoring (it reads a mask of all tokens of a row times all;
  # decoding is as with 'auto'); 'interpret' = the kernels for GPUs on any
  # device, slow, for tests. No property of the weights: it may differ when a
  # run is resumed, and from that of other weights.
  attention: Annotated[str, bounds.one_of(*ATTENTION)] = 'auto'
  # Experts of the tokens that a policy samples, prompts included: 'own' = each
  # forward pass chooses; 'record' = the sampler's choices stay with the tokens,
  # and router/flipped is the share that the train step would change; 'replay' =
  # the train step computes with them, and weights them by its own router
  # (arXiv 2510.11370). No property of the weights.
  routes: Annotated[str, bounds.one_of(*ROUTES)] = 'own'
  # Sends tokens over `mesh.expert` to the devices of their experts alone, by
  # ragged_all_to_all, not to all devices of the axis; on a CPU, which lacks it,
  # to all. It saves traffic where the axis has many devices for each expert of
  # a token, and no memory. No property of the weights.
  ragged: bool = False

  def __post_init__(self):
    super().__post_init__()
    every, local = range(self.layers), {*self.local_layers}
    for field, ok, must in (
      (
        'kv_heads',
        self.heads % self.kv_heads == 0,
        f'divide heads={self.heads}',
      ),
      ('head_dim', self.head_dim % 2 == 0, 'be even (RoPE rotates pairs)'),
      (
        'global_head_dim',
        self.global_head_dim is None
        or (
          self.global_head_dim % 2 == 0
          and not self.delta_layers
          and self.rope_scaling.kind == 'proportional'
          and self.local_rope_theta is not None
        ),
        "be even, with local_rope_theta and rope_scaling of 'proportional', "
        'and without delta_layers',
      ),
      (
        'global_kv_heads',
        self.heads % (self.global_kv_heads or 1) == 0,
        f'divide heads={self.heads}',
      ),
      (
        'shared_kv_layers',
        not self.shared_kv_layers
        or self.global_head_dim is not None
        and not self.experts.count
        and {i in local for i in every}
        == {i in local for i in range(self.own_kv_layers)},
        'leave local and global layers with keys and values of their own, in a '
        'model with global_head_dim and without experts',
      ),
      (
        'partial_rotary',
        self.rotary_dim > 0 and self.rotary_dim % 2 == 0,
        f'rotate an even part of head_dim={self.head_dim}',
      ),
      (
        'rope_scaling',
        self.rope_scaling.kind != 'longrope'
        or len(self.rope_scaling.short_factors)
        == len(self.rope_scaling.long_factors)
        == self.rotary_dim // 2,
        f'have {self.rotary_dim // 2} short_factors and as many long_factors',
      ),
      (
        'wide_qk_norm',
        self.qk_norm or not self.wide_qk_norm,
        'come with qk_norm',
      ),
      (
        'logit_softcap',
        self.logit_softcap is None or self.logit_divisor == 1,
        'be None with a logit_divisor',
      ),
      (
        'layers',
        self.matrix_parameters <= MAX_PARAMETERS,
        f'give at most {MAX_PARAMETERS:,} parameters with the other sizes',
      ),
      *(
        (
          name,
          {*indices} <= {*every} and len(indices) <= self.layers,
          f'be in [0, layers={self.layers}), each once',
        )
        for name, indices in (
          ('local_layers', self.local_layers),
          ('nope_layers', self.nope_layers),
        )
      ),
      (
        'delta_layers',
        {*self.delta_layers} < {*every}
        and not {*self.delta_layers} & local
        and len(set(self.delta_layers)) == len(self.delta_layers),
        f'be some of [0, layers={self.layers}) but not all, each once, and no '
        'local ones',
      ),
      (
        'dense_layers',
        set(self.dense_layers)
        < set(range(self.layers if self.experts.count else 1))
        and len(set(self.dense_layers)) == len(self.dense_layers),
        f'be some of [0, layers={self.layers}) but not all, each once, of a '
        'model with experts',
      ),
      (
        'activation',
        self.activation == 'silu' or not self.experts.count,
        "be 'silu' with experts",
      ),
      (
        'attention',
        self.attention != 'cudnn' or not self.attention_sinks,
        "not be 'cudnn' with attention_sinks",
      ),
      (
        'routes',
        self.routes == 'own' or self.experts.count > 0,
        "be 'own' without experts",
      ),
      (
        'window',
        bool(self.local_layers) == (self.window is not None),
        'be set if and only if local_layers is',
      ),
    ):
      bounds.require(ok, field, must, getattr(self, field))

  @property
  def matrix_parameters(self) -> int:
    """The number of weights in matrices; a vocabulary of None counts 0."""
    vocab_size = self.vocab_size or 0
    tables = vocab_size * (1 if self.tied_head else 2)
    delta, count = self.delta, len(self.delta_layers)
    inner = delta.value_heads * (3 * delta.value_dim + 2)
    inner += 2 * delta.key_heads * delta.key_dim
    mixers, local = count * inner, {*self.local_layers}
    for i in {*range(self.layers)} - {*self.delta_layers}:
      kv_heads, size = self.kv_sizes(i not in local)
      mixers += (2 + self.attention_gate) * self.heads * size
      if i < self.own_kv_layers:
        shares = self.keys_as_values and i not in local
        mixers += (2 - shares) * kv_heads * size
    experts, count = self.experts, self.expert_layers
    doubled = self.double_mlp * self.shared_kv_layers
    widths = (self.layers - count + doubled) * 3 * self.mlp_dim
    widths += count * experts.count * (3 * experts.mlp_dim + 1)
    shared = experts.shared_dim
    widths += count * (3 * shared + (shared > 0))
    own = self.layers * self.layer_embed_dim
    widths += 3 * own
    return self.embed_dim * (tables + mixers + widths) + vocab_size * own

  @property
  def serves_trees(self) -> bool:
    """Whether rows may be prefix trees, see `Batch.trees`."""
    return self.attention != 'cudnn' and not self.delta_layers

  @property
  def rotary_dim(self) -> int:
    """The numbers of a head that RoPE rotates."""
    size = int(self.kv_sizes(True)[1] * self.partial_rotary)
    # A share of the pairs, rounded down.
    return size - size % 2 * (self.rope_scaling.kind == 'proportional')

  def kv_sizes(self, is_global: bool) -> tuple[int, int]:
    """Returns the number of kv heads of a layer, and the size of a head."""
    if is_global and self.global_head_dim is not None:
      return self.global_kv_heads or self.kv_heads, self.global_head_dim
    return self.kv_heads, self.head_dim

  @property
  def own_kv_layers(self) -> int:
    """The number of layers with keys and values of their own."""
    return self.layers - self.shared_kv_layers

  @property
  def expert_layers(self) -> int:
    """The number of layers with experts."""
    return self.layers - len(self.dense_layers) if self.experts.count else 0

  @property
  def is_large(self) -> bool:
    """Whether a CPU needs long for a step, or an answer."""
    return self.matrix_parameters >= LARGE

  @classmethod
  def from_json(cls, values: Any) -> 'Model':
    """Builds the model of a checkpoint's JSON; missing keys are defaults.

    Raises:
      FieldError: a key is unknown, or has another type or an invalid value.
    """
    try:
      scaling = RopeScaling(**_tuples(values.get('rope_scaling', {})))
      delta = Delta(**values.get('delta', {}))
      experts = Experts(**values.get('experts', {}))
      nodes = {'rope_scaling': scaling, 'delta': delta, 'experts': experts}
      return cls(**{**_tuples(values), **nodes})
    except (AttributeError, TypeError) as error:
      must = 'be an object with keys of the schema only'
      raise bounds.FieldError('model', must, values, str(error)) from None


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
  lists = {name: tuple(x) for name, x in values.items() if isinstance(x, list)}
  return {**values, **lists}


def _large(
  vocab_size: int,
  layers: int,
  embed_dim: int,
  heads: int,
  kv_heads: int,
  mlp_dim: int,
  *,
  head_dim: int = 128,
  tied_head: bool = False,
  **options: Any,
) -> Model:
  """Returns a model as it is trained on accelerators."""
  return Model(
    vocab_size=vocab_size,
    layers=layers,
    embed_dim=embed_dim,
    heads=heads,
    kv_heads=kv_heads,
    head_dim=head_dim,
    mlp_dim=mlp_dim,
    tied_head=tied_head,
    dtype='bfloat16',
    remat='block',
    **options,
  )


# Dense Qwen3, arXiv 2505.09388.
_qwen3 = functools.partial(
  _large, 151_936, kv_heads=8, rope_theta=1e6, qk_norm=True
)
# Llama 3.1, arXiv 2407.21783, for contexts of 128k tokens.
_llama3 = functools.partial(
  _large,
  128_256,
  kv_heads=8,
  rope_theta=5e5,
  rope_scaling=RopeScaling(kind='llama3', factor=8.0),
  norm_eps=1e-5,
)


# Qwen3.5's text: three layers of DeltaNet, then one of attention.
def _qwen3_5(layers: int, *sizes: int, value_heads: int, **options: Any):
  return _large(
    248_320,
    layers,
    *sizes,
    head_dim=256,
    partial_rotary=0.25,
    rope_theta=1e7,
    attention_gate=True,
    qk_norm=True,
    norm_offset=True,
    delta_layers=tuple(i for i in range(layers) if i % 4 != 3),
    delta=Delta(16, value_heads, 128, 128),
    **options,
  )


# OLMo 2 and 3.
_olmo = functools.partial(
  _large,
  rope_theta=5e5,
  pre_norms=False,
  post_norms=True,
  qk_norm=True,
  wide_qk_norm=True,
)
# Gemma 2 and 3.
_gemma = functools.partial(
  _large,
  head_dim=256,
  tied_head=True,
  activation='gelu',
  norm_offset=True,
  post_norms=True,
  scale_embeddings=True,
  query_scale=256.0,
)
# Models by name: `--config.model=NAME` replaces the whole node.
PRESETS = {
  'tiny': Model(
    layers=1, embed_dim=32, heads=2, kv_heads=1, head_dim=16, mlp_dim=64
  ),
  'small': Model(),
  'qwen3_0p6b': _qwen3(28, 1024, 16, mlp_dim=3072, tied_head=True),
  'qwen3_1p7b': _qwen3(28, 2048, 16, mlp_dim=6144, tied_head=True),
  'qwen3_4b': _qwen3(36, 2560, 32, mlp_dim=9728, tied_head=True),
  'qwen3_8b': _qwen3(36, 4096, 32, mlp_dim=12_288, tied_head=False),
  'qwen3_14b': _qwen3(40, 5120, 40, mlp_dim=17_408, tied_head=False),
  'qwen3_32b': _qwen3(64, 5120, 64, mlp_dim=25_600, tied_head=False),
  'qwen3_30b_a3b': dataclasses.replace(
    _qwen3(48, 2048, 32, mlp_dim=6144, tied_head=False),
    kv_heads=4,
    experts=Experts(count=128, per_token=8, mlp_dim=768),
  ),
  'qwen3_5_0p8b': _qwen3_5(
    24, 1024, 8, 2, 3584, value_heads=16, tied_head=True
  ),
  'qwen3_5_4b': _qwen3_5(32, 2560, 16, 4, 9216, value_heads=32, tied_head=True),
  'qwen3_5_9b': _qwen3_5(32, 4096, 16, 4, 12_288, value_heads=32),
  'qwen3_5_35b_a3b': _qwen3_5(
    40,
    2048,
    16,
    2,
    512,
    value_heads=32,
    experts=Experts(count=256, per_token=8, mlp_dim=512, shared_dim=512),
  ),
  'mixtral_8x7b': _large(
    32_000,
    32,
    4096,
    32,
    8,
    14_336,
    rope_theta=1e6,
    norm_eps=1e-5,
    experts=Experts(count=8, mlp_dim=14_336),
  ),
  'olmoe_1b_7b': _large(
    50_304,
    16,
    2048,
    16,
    16,
    1024,
    norm_eps=1e-5,
    qk_norm=True,
    wide_qk_norm=True,
    experts=Experts(count=64, per_token=8, mlp_dim=1024, normalize=False),
  ),
  'gpt_oss_20b': _large(
    201_088,
    24,
    2880,
    64,
    8,
    2880,
    head_dim=64,
    rope_theta=150_000.0,
    rope_scaling=RopeScaling(
      'yarn', 32.0, original_length=4096, truncate=False
    ),
    norm_eps=1e-5,
    local_layers=tuple(range(0, 24, 2)),
    window=128,
    attention_sinks=True,
    qkv_bias=True,
    output_bias=True,
    experts=Experts(count=32, per_token=4, mlp_dim=2880, bias=True, clamp=7.0),
  ),
  'qwen2_5_0p5b': _large(
    151_936,
    24,
    896,
    14,
    2,
    4864,
    head_dim=64,
    tied_head=True,
    rope_theta=1e6,
    qkv_bias=True,
  ),
  'llama3_8b': _llama3(32, 4096, 32, mlp_dim=14_336),
  'llama3_70b': _llama3(80, 8192, 64, mlp_dim=28_672),
  'mistral_7b': _large(
    32_768, 32, 4096, 32, 8, 14_336, rope_theta=1e6, norm_eps=1e-5
  ),
  'ministral3_3b': _large(
    131_072,
    26,
    3072,
    32,
    8,
    9216,
    tied_head=True,
    rope_theta=1e6,
    norm_eps=1e-5,
    query_beta=0.1,
    rope_scaling=RopeScaling(
      'yarn', 16.0, original_length=16_384, attention_factor=1.0
    ),
  ),
  'smollm3_3b': _large(
    128_256,
    36,
    2048,
    16,
    4,
    11_008,
    tied_head=True,
    rope_theta=5e6,
    nope_layers=tuple(range(3, 36, 4)),
  ),
  'granite3_2b': _large(
    49_159,
    40,
    2048,
    32,
    8,
    8192,
    head_dim=64,
    tied_head=True,
    rope_theta=1e7,
    norm_eps=1e-5,
    embedding_multiplier=12.0,
    residual_multiplier=0.22,
    attention_multiplier=0.015625,
    logit_divisor=8.0,
  ),
  'olmo2_1b': _olmo(100_352, 16, 2048, 16, 16, 8192),
  'olmo3_7b': _olmo(
    100_278,
    32,
    4096,
    32,
    32,
    11_008,
    rope_scaling=RopeScaling('yarn', 8.0, original_length=8192),
    local_rope_theta=5e5,
    local_layers=tuple(i for i in range(32) if i % 4 != 3),
    window=4096,
  ),
  'gemma2_2b': _gemma(
    256_000,
    26,
    2304,
    8,
    4,
    9216,
    local_layers=tuple(range(0, 26, 2)),
    window=4096,
    attention_softcap=50.0,
    logit_softcap=30.0,
  ),
  'gemma3_1b': _gemma(
    262_144,
    26,
    1152,
    4,
    1,
    6912,
    qk_norm=True,
    rope_theta=1e6,
    local_rope_theta=10_000.0,
    local_layers=tuple(i for i in range(26) if i % 6 != 5),
    window=512,
  ),
  'gemma4_e2b': _gemma(
    262_144,
    35,
    1536,
    8,
    1,
    6144,
    norm_offset=False,
    qk_norm=True,
    v_norm=True,
    query_scale=1.0,
    global_head_dim=512,
    shared_kv_layers=20,
    double_mlp=True,
    layer_embed_dim=256,
    layer_scalars=True,
    rope_theta=1e6,
    rope_scaling=RopeScaling('proportional'),
    partial_rotary=0.25,
    local_rope_theta=10_000.0,
    local_layers=tuple(i for i in range(35) if i % 5 != 4),
    window=512,
    logit_softcap=30.0,
  ),
  'phi3_mini': _large(
    32_064,
    32,
    3072,
    32,
    32,
    8192,
    head_dim=96,
    norm_eps=1e-5,
    local_layers=tuple(range(32)),
    window=2047,
  ),
}


# A JSON object; `today` is a date.
Variables = Annotated[
  str,
  bounds.readable(
    'be a JSON object, whose "today" is a date such as "2025-01-31"',
    lambda text: datetime.date.fromisoformat(
      json.loads(text).get('today', '2025-01-31')
    ),
  ),
]


class Tokenizer(bounds.Options):
  """The byte tokenizer, or a HuggingFace `tokenizer.json`."""

  # Path of a tokenizer.json, or of a HuggingFace directory with one; None = the
  # byte tokenizer, which has no file.
  path: bounds.FolderOrNone = None
  # Path of a Jinja chat template; None = the directory's, or the built-in one;
  # 'raw' = the contents alone, each answer with eos after it, for base models.
  chat_template: bounds.FileOrNone = None
  # Variables of the template besides messages and special tokens: a JSON
  # object, such as {"enable_thinking": false}; "today" is the date, such as
  # "2025-01-31", for templates that print one.
  template_variables: Variables = '{}'
  # Token that ends an assistant turn; None = the tokenizer's own (<|end|> of
  # the byte tokenizer, or the end of turn of the directory's template).
  # Required for a tokenizer.json without a directory.
  eos: str | None = None
  # Token that pads packed rows, not eos; None = the tokenizer's own, else any
  # id except eos.
  pad: str | None = None
