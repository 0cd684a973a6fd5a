"""Hostile and damaged configs of models and adapters; see `model_weights`.

Most of it in this process: reading them is what every command does first.
"""

import dataclasses
import json
import pathlib
import re
import time
from collections.abc import Callable

import jax
import numpy as np
from safetensors import numpy as safetensors

from experiments.trials import base
from posttrain import schema
from posttrain.chat import pretrained
from posttrain.chat import renderer as chat
from posttrain.checkpoints import weight_folders, weights
from posttrain.config import load as config
from posttrain.models import hf, hf_config, hf_files, lora, peft, transformer
from posttrain.util import exits

RENDERER = chat.load(schema.Tokenizer())
MODEL = schema.Model(
  vocab_size=RENDERER.tokenizer.vocab_size,
  layers=2,
  embed_dim=32,
  heads=2,
  kv_heads=1,
  head_dim=16,
  mlp_dim=64,
  qk_norm=True,
)
GEMMA = dataclasses.replace(
  MODEL,
  norm_offset=True,
  post_norms=True,
  scale_embeddings=True,
  activation='gelu',
  query_scale=16.0,
)
DEEP = '{"a": ' * 100_000 + '1' + '}' * 100_000
SINGLE = hf_files.SINGLE
HEAD, TABLE = hf_files.HEAD, hf_files.TABLE


def directory(
  scratch: base.Scratch, cfg: schema.Model = MODEL, name: str = 'model'
) -> pathlib.Path:
  """Returns a new HuggingFace directory of random weights."""
  path = scratch.folder / name
  params = transformer.init(jax.random.key(0), cfg)
  hf.save(params, cfg, path, dtype='float32')
  pretrained.write(RENDERER, path)
  return path


def edited(path: pathlib.Path, change: Callable[[dict], object]) -> None:
  """Rewrites the tensors of a safetensors file."""
  tensors = safetensors.load_file(path)
  change(tensors)
  safetensors.save_file(tensors, path)


def other_head(tensors: dict) -> None:
  """Adds a head that differs from the table that it is tied to."""
  tensors[HEAD] = tensors[TABLE] * 2


def expect_refused(read: Callable[[], object], place: object, what: object):
  """Checks for a ValueError of one short line that names the place."""
  try:
    read()
  except ValueError as error:
    message = str(error)
    assert str(place) in message, f'{what}: {place} is not in {message[:400]}'
    assert message.isprintable() and len(message) < 1500, message[:400]
    return message
  raise AssertionError(f'not refused: {str(what)[:300]}')


CONFIGS: list[tuple[str, object]] = [
  ('num_hidden_layers', 10**9),
  ('num_hidden_layers', 10**400),
  ('num_hidden_layers', -1),
  ('num_hidden_layers', 2.5),
  ('num_hidden_layers', [2]),
  ('vocab_size', 10**12),
  ('vocab_size', 0),
  ('hidden_size', 2**40),
  ('intermediate_size', '64'),
  ('num_attention_heads', 0),
  ('num_attention_heads', -4),
  ('num_key_value_heads', 0),
  ('head_dim', 10**9),
  ('head_dim', 7),
  ('rms_norm_eps', float('nan')),
  ('rms_norm_eps', 0),
  ('rms_norm_eps', 10**400),
  ('rope_theta', float('inf')),
  ('rope_theta', -1),
  ('rope_theta', 'many'),
  ('rope_scaling', {'rope_type': 'linear', 'factor': 1e300}),
  ('rope_scaling', {'rope_type': 'linear', 'factor': float('nan')}),
  ('rope_scaling', {'rope_type': ['linear']}),
  ('rope_scaling', 'x' * 10**6),
  ('layer_types', ['x' * 10**6]),
  ('layer_types', 'full_attention'),
  ('tie_word_embeddings', 'false'),
  ('use_sliding_window', 'x'),
  ('model_type', 'x' * 10**6),
  ('model_type', {}),
  ('architectures', 7),
  ('hidden_act', 'x' * 10**6),
  ('hidden_act', []),
  ('per_layer_config', {'0': {'mlp_dim': 3}}),
  ('is_causal', False),
]


@base.trial(
  'models', 'an impossible config.json is one line that names the key'
)
def configs(scratch: base.Scratch) -> str:
  folder = directory(scratch)
  file, slowest = folder / 'config.json', 0.0
  whole = json.loads(file.read_text())
  for key, value in CONFIGS:
    file.write_text(json.dumps(whole | {key: value}))
    begin = time.monotonic()
    message = expect_refused(lambda: hf_config.read(folder), file, key)
    slowest = max(slowest, time.monotonic() - begin)
    named = {'hidden_act': 'activation', 'rope_scaling': 'rope_'}.get(key, key)
    assert named in message, f'{named} is not in {message[:400]}'
  large = {'num_hidden_layers': 10_000, 'hidden_size': 2**20}
  texts = [json.dumps(whole | large | {'intermediate_size': 2**22})]
  texts += [DEEP, '[' * 10**5, '[]', '7', '', '{', '{"a": 1, "a": 2}', '\udcff']
  texts += ['{"vocab_size": ' + '9' * 10**6 + '}']
  for text in texts:
    file.write_text(text, errors='surrogateescape')
    expect_refused(lambda: hf_config.read(folder), file, text[:80])
    if text is not texts[0]:  # the others are no JSON, or no object
      expect_refused(lambda: weight_folders.find(str(folder)), file, text[:80])
  return (
    f'{len(CONFIGS)} keys and {len(texts)} texts refused by name, the slowest '
    f'after {slowest * 1000:.0f} ms'
  )


@base.trial(
  'models', 'an impossible model option is one line that names the key'
)
def overrides(scratch: base.Scratch) -> str:
  cases = [
    ('layers', '1000000000'),
    ('layers', '9' * 400),
    ('vocab_size', '1000000000000'),
    ('heads', '0'),
    ('kv_heads', '-1'),
    ('embed_dim', '1099511627776'),
    ('norm_eps', 'nan'),
    ('rope_theta', '1e999'),
    ('rope_scaling.factor', '1e300'),
    ('query_scale', '1e-300'),
    ('local_layers', '(1000000000,)'),
    ('window', '1000000000000'),
  ]
  for key, value in cases:
    node = config.load(base.TINY)

    def read(node=node, key=key, value=value):
      config.override(node, f'model.{key}', value)
      config.build(node)

    expect_refused(read, f'config.model.{key}', f'{key}={value}')
  done = base.command(
    'posttrain.main',
    *scratch.tiny(scratch.folder / 'run', '--dry_run'),
    '--config.model.mlp_dim=16000000',
    '--config.model.embed_dim=16000000',
    '--config.model.layers=9999',
  )
  base.expect_line(done, exits.USAGE, 'config.model.layers', 'parameters')
  return f'{len(cases)} refused in process, one as a command: exit {done.code}'


@base.trial('models', "a hostile adapter's config is one line that names it")
def adapters(scratch: base.Scratch) -> str:
  folder, path = directory(scratch), scratch.folder / 'adapter'
  options = schema.Lora(rank=2, targets='mlp/up')
  drawn = lora.init(jax.random.key(1), options, transformer.shapes(MODEL))
  peft.save(drawn, options, MODEL, path, str(folder))
  file, like = path / peft.CONFIG, transformer.shapes(MODEL)
  whole = json.loads(file.read_text())
  changes = [
    {'r': 10**12},
    {'r': 0},
    {'r': 2.5},
    {'r': 10**400},
    {'lora_alpha': 10**400},
    {'lora_alpha': float('nan')},
    {'lora_alpha': '2'},
    {'use_rslora': 'yes'},
    {'peft_type': ['LORA']},
    {'use_dora': 'x' * 10**6},
    {'x' * 10**6: 1},
    {'base_model_name_or_path': 7},
    {'base_model_name_or_path': 'x' * 5000},
    {'base_model_name_or_path': 'a\0b'},
    {'base_model_name_or_path': '~nobody/x'},
    {'base_model_name_or_path': str(path)},
  ]
  texts = [json.dumps(whole | x) for x in changes]
  texts += [DEEP, '[]', '7', '{', '', '{"r": 1, "r": 2}']
  for text in texts:
    file.write_text(text)
    expect_refused(lambda: weights.load(str(path), like), file, text[:200])
  return f'{len(texts)} configs refused by name'


@base.trial('models', 'configs mean to us what they mean to transformers')
def parity(scratch: base.Scratch) -> str:
  try:
    import torch
    import transformers
  except ImportError:
    return 'transformers is not installed; nothing was compared'
  full = dataclasses.replace(GEMMA, qk_norm=True)
  folder = directory(scratch, full, 'gemma3')

  def logits() -> np.ndarray:
    peer = transformers.AutoModelForCausalLM.from_pretrained(
      folder, attn_implementation='eager'
    ).eval()
    with torch.no_grad():
      return peer(torch.arange(24)[None]).logits.numpy()

  expected, file = logits(), folder / 'config.json'
  text = json.loads(file.read_text())
  file.write_text(json.dumps(text | {'attn_logit_softcapping': 0.5}))
  assert (logits() == expected).all(), 'transformers reads the cap'
  assert hf_config.read(folder).attention_softcap is None
  # A tied head of other values: transformers 5 uses it, 4 did not.
  edited(folder / SINGLE, other_head)
  message = expect_refused(lambda: hf.check(folder, full), HEAD, 'tied head')
  tied = logits()
  file.write_text(json.dumps(text | {'tie_word_embeddings': False}))
  untied = hf_config.read(folder)
  assert hf.check(folder, untied) and not untied.tied_head
  off = np.abs(logits() - expected).max() / np.abs(expected).max()
  used = 'uses' if (tied == logits()).all() else 'drops'
  words = re.search('set tie_word.*used?', message)
  return (
    f'Gemma 3 without local layers loads; its score cap is ignored by both; '
    f'transformers {transformers.__version__} {used} a tied head of other '
    f'values ({100 * off:.0f} % apart), which we refuse: {words and words[0]}'
  )
