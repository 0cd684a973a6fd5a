"""`config.json` of a HuggingFace directory <-> `schema.Model`.

1. `read` reads the keys that change a model's function as transformers does,
   in the formats of its versions 4 and 5: a family's defaults, and none of the
   keys that the family does not read. It refuses values that our models do not
   support.
2. `write` builds the keys that transformers needs, and checks that `read`
   returns the same model from them.
"""

import dataclasses
import pathlib
from typing import Any

from posttrain import schema
from posttrain.models import hf_rope
from posttrain.util import foreign, json_files

# Fields that do not change a model's function.
_OURS = ('dtype', 'remat', 'attention')


@dataclasses.dataclass(frozen=True)
class _Family:
  """The settings that a `model_type` implies."""

  architecture: str
  fixed: dict[str, Any]  # fields of schema.Model
  absent: dict[str, Any]  # values of missing keys
  windows: str  # how keys name the local layers: see `_local_layers`
  divides: bool = True  # transformers wants heads to divide hidden_size

  @property
  def is_gemma(self) -> bool:
    return 'norm_offset' in self.fixed


_GEMMA = {
  'norm_offset': True,
  'post_norms': True,
  'scale_embeddings': True,
  'activation': 'gelu',
}
_QWEN_ABSENT = {
  'num_key_value_heads': 32,
  'sliding_window': 4096,
  'max_window_layers': 28,
}
_GEMMA_ABSENT = {
  'num_key_value_heads': 4,
  'head_dim': 256,
  'query_pre_attn_scalar': 256,
  'sliding_window': 4096,
  'tie_word_embeddings': True,
  'hidden_activation': 'gelu_pytorch_tanh',
}
_FAMILIES = {
  'llama': _Family('LlamaForCausalLM', {}, {}, 'none'),
  'qwen2': _Family(
    'Qwen2ForCausalLM', {'qkv_bias': True}, _QWEN_ABSENT, 'upper', divides=False
  ),
  'qwen3': _Family(
    'Qwen3ForCausalLM',
    {'qk_norm': True},
    {**_QWEN_ABSENT, 'head_dim': 128},
    'upper',
    divides=False,
  ),
  'gemma2': _Family(
    'Gemma2ForCausalLM',
    _GEMMA,
    {
      **_GEMMA_ABSENT,
      'attn_logit_softcapping': 50.0,
      'final_logit_softcapping': 30.0,
    },
    'alternate',
  ),
  'gemma3_text': _Family(
    'Gemma3ForCausalLM',
    {**_GEMMA, 'qk_norm': True},
    {**_GEMMA_ABSENT, 'sliding_window_pattern': 6},
    'pattern',
  ),
}
_ACTIVATIONS = {'silu': 'silu', 'gelu_pytorch_tanh': 'gelu'}
# Keys of which only one value is supported.
_PLAIN = {
  'attention_bias': False,
  'mlp_bias': False,
  'use_bidirectional_attention': False,
  'quantization_config': None,
  'partial_rotary_factor': 1.0,
  'is_causal': True,
  'per_layer_config': None,
  'transformers_weights': None,
}
# Our fields, by the keys from which they are read.
_KEYS = {
  'layers': 'num_hidden_layers',
  'embed_dim': 'hidden_size',
  'heads': 'num_attention_heads',
  'kv_heads': 'num_key_value_heads',
  'mlp_dim': 'intermediate_size',
  'norm_eps': 'rms_norm_eps',
  'tied_head': 'tie_word_embeddings',
  'window': 'sliding_window',
  'query_scale': 'query_pre_attn_scalar',
  'attention_softcap': 'attn_logit_softcapping',
  'logit_softcap': 'final_logit_softcapping',
  'local_rope_theta': 'rope_theta of local layers',
}


def read(folder: str | pathlib.Path) -> schema.Model:
  """Returns the model that a directory's `config.json` describes.

  `dtype`, `remat` and `attention`, which the file does not determine, have
  their defaults.

  Raises:
    ValueError: the file is missing or no JSON, the architecture is unknown, or
      a key is missing or has an unsupported value.
  """
  path = pathlib.Path(folder) / 'config.json'
  if not path.is_file():
    hint = 'name the directory of a HuggingFace model'
    if (path.parent / 'adapter_config.json').is_file():
      hint = (
        'it is an adapter: name the directory of its base model, and the '
        "adapter as the stage's init, as in --config=sft:BASE,data.jsonl,lora "
        f'--config.init={folder}'
      )
    raise ValueError(f'{folder} must hold a config.json: got none; {hint}')
  text = json_files.read_object(path)
  try:
    return _parse(text)
  except schema.FieldError as error:
    key = _KEYS.get(error.field, error.field)
    key = '' if key == error.field else f'{key}: '
    raise ValueError(f'{path}: {key}{error}') from error
  except hf_rope.Unsupported as error:
    raise ValueError(f'{path}: {error}') from error


def write(cfg: schema.Model) -> dict[str, Any]:
  """Returns the `config.json` of a model, with `vocab_size` resolved.

  Raises:
    ValueError: no architecture of HuggingFace's computes this model.
  """
  text = _unparse(cfg)
  family = _FAMILIES[text['model_type']]
  if family.divides and cfg.embed_dim % cfg.heads:
    raise ValueError(
      f'model.heads must divide embed_dim={cfg.embed_dim} to be written as a '
      f'{family.architecture}, which transformers loads: got {cfg.heads}'
    )
  ours = {name: getattr(cfg, name) for name in _OURS}
  parsed = dataclasses.replace(_parse(text), **ours)
  if not cfg.local_layers:  # nothing reads their base
    parsed = dataclasses.replace(parsed, local_rope_theta=cfg.local_rope_theta)
  for field in dataclasses.fields(cfg):
    ours, theirs = getattr(cfg, field.name), getattr(parsed, field.name)
    if ours != theirs:
      raise ValueError(
        f'model.{field.name} must be {theirs!r} to be written as a '
        f'{text["architectures"][0]}: got {ours!r}'
      )
  return text


def differing(a: schema.Model, b: schema.Model) -> list[str]:
  """Returns the names of the fields that differ, except those of `_OURS`."""
  names = [field.name for field in dataclasses.fields(schema.Model)]
  return [
    name
    for name in names
    if name not in _OURS and getattr(a, name) != getattr(b, name)
  ]


def _parse(text: dict[str, Any]) -> schema.Model:
  family = _family(text)
  for key, value in _PLAIN.items():
    if text.get(key) not in (None, value):
      got = foreign.quote(text[key])
      raise hf_rope.Unsupported(f'{key} must be {value!r}: got {got}')
  c = {**family.absent, **text}

  def get(key):
    if c.get(key) is None:
      raise hf_rope.Unsupported(f'{key} must be given: got none')
    return c[key]

  activation = get('hidden_activation' if family.is_gemma else 'hidden_act')
  _check_activation(activation, c['model_type'], family)
  heads, width = get('num_attention_heads'), get('hidden_size')
  kv_heads, head_dim = c.get('num_key_value_heads'), c.get('head_dim')
  if head_dim is None and all(type(x) is int and x > 0 for x in (heads, width)):
    head_dim = width // heads
  model = schema.Model(
    vocab_size=get('vocab_size'),
    layers=get('num_hidden_layers'),
    embed_dim=width,
    heads=heads,
    kv_heads=heads if kv_heads is None else kv_heads,
    head_dim=0 if head_dim is None else head_dim,
    mlp_dim=get('intermediate_size'),
    norm_eps=get('rms_norm_eps'),
    tied_head=c.get('tie_word_embeddings', False),
    **_scores(c, family),
    **hf_rope.read(c, two_bases=family.windows == 'pattern'),
    **family.fixed,
  )
  # The layers are counted by now: a list of them is short.
  local = _local_layers(c, model.layers, family.windows)
  window = get('sliding_window') if local else None
  return dataclasses.replace(model, local_layers=local, window=window)


def _scores(c, family: _Family) -> dict[str, Any]:
  """Returns the scale of attention scores and the caps, which Gemma has."""
  if not family.is_gemma:
    return {}
  return {
    'query_scale': hf_rope.as_float(c['query_pre_attn_scalar']),
    # Gemma 3 has the key as well, but transformers does not read it there.
    'attention_softcap': c['attn_logit_softcapping']
    if family.windows == 'alternate'
    else None,
    'logit_softcap': c.get('final_logit_softcapping'),
  }


def _family(text: dict[str, Any]) -> _Family:
  """Returns the family of `model_type` and `architectures`."""
  name, architectures = text.get('model_type'), text.get('architectures')
  family = _FAMILIES.get(name) if isinstance(name, str) else None
  named = architectures is None or (
    isinstance(architectures, list)
    and family is not None
    and family.architecture in architectures
  )
  if family is None or not named:
    raise hf_rope.Unsupported(
      'model_type must be one of '
      f'{ {name: f.architecture for name, f in _FAMILIES.items()} }: got '
      f'{foreign.quote(name)}, architectures {foreign.quote(architectures)}'
    )
  return family


def _check_activation(name: Any, model_type: str, family: _Family) -> None:
  expected = family.fixed.get('activation', 'silu')
  if not isinstance(name, str) or _ACTIVATIONS.get(name) != expected:
    raise hf_rope.Unsupported(
      f'the activation of a {model_type} must be {expected!r}: got '
      f'{foreign.quote(name)}'
    )


def _local_layers(c, layers: int, windows: str) -> tuple[int, ...]:
  """Returns the indices of the layers with a sliding window.

  Args:
    c: the config.
    layers: their number.
    windows: 'none': there are none, whatever the keys; 'upper': those from
      `max_window_layers` on, if `use_sliding_window`; 'alternate': every
      second one is not local; 'pattern': every `sliding_window_pattern`-th one
      is not local. A list in `layer_types` precedes the last three.
  """
  if windows == 'none':
    return ()
  used = windows != 'upper' or (
    _flag(c, 'use_sliding_window') and c['sliding_window'] is not None
  )
  kinds = c.get('layer_types')
  if kinds is not None:
    local = _named_layers(kinds, layers)
    if any(local) and not used:
      raise hf_rope.Unsupported(
        'use_sliding_window and sliding_window must be set where layer_types '
        'names sliding_attention: got none'
      )
  elif windows == 'upper':
    first = _count(c, 'max_window_layers', 0)
    local = [used and i >= first for i in range(layers)]
  else:
    pattern = 2
    if windows == 'pattern':
      pattern = _count(c, 'sliding_window_pattern', 1)
    local = [(i + 1) % pattern != 0 for i in range(layers)]
  return tuple(i for i, is_local in enumerate(local) if is_local)


def _named_layers(kinds: Any, layers: int) -> list[bool]:
  """Returns whether each layer of `layer_types` is local."""
  names = ('full_attention', 'sliding_attention')
  ok = isinstance(kinds, list) and len(kinds) == layers
  if not ok or any(kind not in names for kind in kinds):
    raise hf_rope.Unsupported(
      f'layer_types must name full_attention or sliding_attention for each of '
      f'{layers} layers: got {foreign.quote(kinds)}'
    )
  return [kind == 'sliding_attention' for kind in kinds]


def _flag(c, key: str) -> bool:
  """Returns the value of a key that is true or false; missing = false."""
  value = c.get(key, False)
  if not isinstance(value, bool):
    raise hf_rope.Unsupported(
      f'{key} must be true or false: got {foreign.quote(value)}'
    )
  return value


def _count(c, key: str, least: int) -> int:
  """Returns the value of a key that is an integer of at least `least`."""
  value = c[key]
  if type(value) is not int or value < least:
    raise hf_rope.Unsupported(
      f'{key} must be an integer of at least {least}: got '
      f'{foreign.quote(value)}'
    )
  return value


def _unparse(cfg: schema.Model) -> dict[str, Any]:
  """Returns `config.json` in the format of version 4, which all tools read."""
  name, family = _matching_family(cfg)
  activations = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
  activation = activations[cfg.activation]
  text = {
    'architectures': [family.architecture],
    'model_type': name,
    'vocab_size': cfg.vocab_size,
    'num_hidden_layers': cfg.layers,
    'hidden_size': cfg.embed_dim,
    'intermediate_size': cfg.mlp_dim,
    'num_attention_heads': cfg.heads,
    'num_key_value_heads': cfg.kv_heads,
    'head_dim': cfg.head_dim,
    'rms_norm_eps': cfg.norm_eps,
    'tie_word_embeddings': cfg.tied_head,
    'rope_theta': cfg.rope_theta,
    'rope_scaling': hf_rope.write(cfg.rope_scaling),
    'hidden_act': activation,
  }
  if family.is_gemma:
    text |= {'hidden_activation': activation, **_gemma_keys(cfg)}
  if family.is_gemma or cfg.local_layers:
    text |= _window_keys(cfg, family)
  return text


def _matching_family(cfg: schema.Model) -> tuple[str, _Family]:
  """Returns the `model_type`, and its family, with the model's features."""
  features = {
    name: getattr(cfg, name)
    for name in {key for f in _FAMILIES.values() for key in f.fixed}
  }
  off = {**dict.fromkeys(features, False), 'activation': 'silu'}
  for name, family in _FAMILIES.items():
    if {**off, **family.fixed} == features:
      return name, family
  raise ValueError(
    'model must be of one architecture to be written as a HuggingFace '
    f'directory: got a mixture, {features}'
  )


def _gemma_keys(cfg: schema.Model) -> dict[str, Any]:
  keys = {
    'query_pre_attn_scalar': int(cfg.query_scale or cfg.head_dim),
    'attn_logit_softcapping': cfg.attention_softcap,
    'final_logit_softcapping': cfg.logit_softcap,
  }
  if cfg.local_rope_theta is not None:
    keys['rope_local_base_freq'] = cfg.local_rope_theta
  return keys


def _window_keys(cfg: schema.Model, family: _Family) -> dict[str, Any]:
  return {
    # Of a Gemma, transformers wants one even if no layer uses it.
    'sliding_window': cfg.window or family.absent.get('sliding_window'),
    'use_sliding_window': True,
    'layer_types': [
      'sliding_attention' if i in cfg.local_layers else 'full_attention'
      for i in range(cfg.layers)
    ],
  }
