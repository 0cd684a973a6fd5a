"""Options of the model and its tokenizer, and the named presets."""

import dataclasses

from posttrain.schema import base


@dataclasses.dataclass(frozen=True)
class Model:
  """A decoder-only transformer of the Llama, Qwen2 or Qwen3 shape."""

  # Rows of the embedding table; None = the tokenizer's size.
  vocab_size: int | None = None
  # Blocks of attention and MLP.
  layers: int = 3
  # Width of the residual stream.
  embed_dim: int = 128
  # Query heads.
  heads: int = 4
  # Key/value heads (grouped-query attention); divides heads.
  kv_heads: int = 2
  # Size of every head; even, because RoPE turns pairs.
  head_dim: int = 32
  # Hidden width of the SwiGLU MLP.
  mlp_dim: int = 384
  # Base of the RoPE wavelengths; larger = longer contexts.
  rope_theta: float = 10_000.0
  # Added to the mean square in every RMSNorm.
  norm_eps: float = 1e-6
  # RMSNorm on queries and keys, per head (Qwen3).
  qk_norm: bool = False
  # Biases on the q, k and v projections (Qwen2).
  qkv_bias: bool = False
  # The output head is the embedding table.
  tied_head: bool = True
  # Compute dtype: float32 or bfloat16. Master weights and logits are float32.
  dtype: str = 'float32'
  # What the backward pass redoes: 'none' = elementwise work only (norms, RoPE,
  # SwiGLU; matrix products are kept), 'block' = every layer from its input.
  remat: str = 'none'

  def __post_init__(self):
    base.require_positive(
        self, 'layers', 'embed_dim', 'heads', 'kv_heads', 'head_dim',
        'mlp_dim', 'rope_theta', 'norm_eps',
    )
    base.require(
        self.vocab_size is None or self.vocab_size > 1,
        'vocab_size', 'be None or > 1', self.vocab_size,
    )
    base.require(
        self.heads % self.kv_heads == 0, 'kv_heads',
        f'divide heads={self.heads}', self.kv_heads,
    )
    base.require(
        self.head_dim % 2 == 0, 'head_dim', 'be even (RoPE turns pairs)',
        self.head_dim,
    )
    base.require_choice(self, 'dtype', ('float32', 'bfloat16'))
    base.require_choice(self, 'remat', ('none', 'block'))


# `--config.model=NAME` replaces the whole node by one of these.
PRESETS = {
    'tiny': Model(
        layers=1, embed_dim=32, heads=2, kv_heads=1, head_dim=16, mlp_dim=64
    ),
    'small': Model(),
    'qwen3_0p6b': Model(
        vocab_size=151_936, layers=28, embed_dim=1024, heads=16, kv_heads=8,
        head_dim=128, mlp_dim=3072, rope_theta=1e6, qk_norm=True,
        dtype='bfloat16', remat='block',
    ),
    'qwen3_1p7b': Model(
        vocab_size=151_936, layers=28, embed_dim=2048, heads=16, kv_heads=8,
        head_dim=128, mlp_dim=6144, rope_theta=1e6, qk_norm=True,
        dtype='bfloat16', remat='block',
    ),
}


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """Bytes by default, or any HuggingFace `tokenizer.json`."""

  # Path of a tokenizer.json; None = the byte tokenizer, which needs no file.
  path: str | None = None
  # Path of a Jinja chat template; None = the built-in template.
  chat_template: str | None = None
  # The token that ends an assistant turn; None = the tokenizer's own
  # (the byte tokenizer's <|end|>; a tokenizer.json must be told).
  eos: str | None = None
  # The token that fills the rest of a packed row, never eos; None = the
  # tokenizer's own, else any id but eos.
  pad: str | None = None
