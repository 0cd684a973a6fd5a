"""Hostile and damaged model directories, adapters and weights of a run.

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
from posttrain import schema, tree
from posttrain.chat import pretrained
from posttrain.chat import renderer as chat
from posttrain.checkpoints import store, weight_folders, weights
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
SINGLE, INDEX = hf_files.SINGLE, hf_files.INDEX
UP = 'model.layers.1.mlp.up_proj.weight'
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


def mutations(whole: bytes, count: int) -> list[bytes]:
  """Returns a file with a few bytes of its length and header changed."""
  rng = np.random.default_rng(0)
  size = 8 + int.from_bytes(whole[:8], 'little')
  files = []
  for _ in range(count):
    data = bytearray(whole)
    for _ in range(rng.integers(1, 4)):
      data[rng.integers(size)] = rng.integers(256)
    files.append(bytes(data[: rng.integers(8, len(data))]))
    files.append(bytes(data))
  return files


@base.trial(
  'models', 'a hostile weights file or index is one line that names it'
)
def files(scratch: base.Scratch) -> str:
  folder = directory(scratch)
  file, index = folder / SINGLE, folder / INDEX
  whole = file.read_bytes()
  header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], 'little')])
  overlap = header | {UP: header[UP] | {'data_offsets': [0, 8192]}}
  texts = [DEEP.encode(), b'[]', b'x', json.dumps(overlap).encode()]
  contents = [len(x).to_bytes(8, 'little') + x + whole for x in texts]
  contents += [b'', b'x', (2**63).to_bytes(8, 'little'), bytes(100), whole[:-1]]
  for content in contents:
    file.write_bytes(content)
    expect_refused(lambda: hf.check(folder, MODEL), file, content[:80])
  fuzzed, refused = mutations(whole, 500), 0
  for content in fuzzed:  # some change only white space
    file.write_bytes(content)
    try:
      hf.check(folder, MODEL)
    except ValueError as error:
      assert str(error).isprintable() and len(str(error)) < 1500, error
      refused += 1
  file.unlink()
  names = ['/etc/passwd', '../x.safetensors', 'a/b.safetensors', '..', '', 7]
  names += [None, [], 'x' * 5000 + '.safetensors', 'a\0.safetensors', 'x.bin']
  maps = [{'weight_map': {'x': name}} for name in names]
  for text in (DEEP, '[]', '{', '{}', *map(json.dumps, maps)):
    index.write_text(text)
    expect_refused(lambda: hf.check(folder, MODEL), index, text[:80])
  return (
    f'{len(contents)} headers and {len(names) + 4} indexes refused by name; '
    f'{refused} of {len(fuzzed)} changed headers refused, no traceback'
  )


WEIGHTS = {
  'a missing tensor': (lambda t: t.pop(UP), f'must hold tensor {UP}'),
  'an unknown tensor': (lambda t: t.update(x=np.ones(2)), 'x must belong'),
  'another shape': (
    lambda t: t.update({UP: t[UP][:-1]}),
    f'{UP} must have shape',
  ),
  'another dtype': (
    lambda t: t.update({UP: t[UP].astype('i4')}),
    f'{UP} must be of dtype',
  ),
  'another head': (lambda t: t.update({HEAD: t[TABLE] * 2}), 'must equal'),
}


@base.trial('models', '--dry_run looks at the headers of weights')
def dry_run(scratch: base.Scratch) -> str:
  folder = directory(scratch)
  sound = (folder / SINGLE).read_bytes()
  for what, (change, words) in WEIGHTS.items():
    (folder / SINGLE).write_bytes(sound)
    edited(folder / SINGLE, change)
    message = expect_refused(
      lambda: weights.check(str(folder), MODEL, folder_renderer(folder)),
      folder,
      what,
    )
    assert words in message, message
  run = scratch.folder / 'run'
  done = base.command('posttrain.main', *trains(scratch, run, folder))
  base.expect_line(done, exits.USAGE, 'config.sft.init', 'must equal')
  assert not run.exists(), 'the dry run left a workdir'
  return f'{base.words(list(WEIGHTS))}: named; {done.seconds:.0f} s, exit 2'


def folder_renderer(folder: pathlib.Path) -> chat.Renderer:
  """Returns the renderer of a HuggingFace directory."""
  return chat.load(schema.Tokenizer(path=str(folder)))


def trains(
  scratch: base.Scratch, run: pathlib.Path, folder: pathlib.Path
) -> list[str]:
  """Returns arguments of a dry run that starts from a directory."""
  names = ('model', 'tokenizer.path', 'sft.init')
  options = [f'--config.{name}={folder}' for name in names]
  return scratch.tiny(run, *options, '--dry_run')


@base.trial('models', 'weights with NaN or infinity are refused by tensor')
def not_finite(scratch: base.Scratch) -> str:
  folder, like = directory(scratch), transformer.shapes(MODEL)
  adapter = scratch.folder / 'adapter'
  options = schema.Lora(rank=2, targets='mlp/up')
  drawn = lora.init(jax.random.key(1), options, like)
  peft.save(drawn, options, MODEL, adapter, str(folder))
  weights.load(str(adapter), like)
  name = next(iter(safetensors.load_file(adapter / peft.WEIGHTS)))
  bad = (np.nan, np.inf, -np.inf)
  sound = (adapter / peft.WEIGHTS).read_bytes()
  for value in bad:
    (adapter / peft.WEIGHTS).write_bytes(sound)
    edited(adapter / peft.WEIGHTS, spoil(name, value))
    expect_refused(lambda: weights.load(str(adapter), like), name, value)
    edited(folder / SINGLE, spoil(UP, value))
    expect_refused(lambda: weights.load(str(folder), like), UP, value)
  step = spoiled_run(scratch)
  for argv in (
    ('posttrain.generate', f'--checkpoint={step}', '--prompt=1'),
    (
      'posttrain.main',
      *scratch.tiny(scratch.folder / 'next', f'--config.sft.init={step}'),
    ),
  ):
    done = base.command(*argv)
    base.expect_line(done, exits.USAGE, 'finite', 'layers/mlp/up/kernel')
  return (
    f'{len(bad)} values in a directory and in an adapter, and one in a run for '
    f'generate and for init: {done.last[:160]}'
  )


def spoil(name: str, value: float) -> Callable[[dict], None]:
  """Returns a change of one number of a tensor."""

  def change(tensors: dict) -> None:
    tensors[name].reshape(-1)[-1] = value

  return change


def spoiled_run(scratch: base.Scratch) -> pathlib.Path:
  """Returns a step of a run with one NaN, and sound checksums."""
  source = weight_folders.find(str(scratch.finished_run() / 'checkpoints/sft'))
  host = store.read_host(source)
  like = transformer.shapes(schema.Model.from_json(host['model']))
  params = tree.flat(store.restore_params(source, like))
  path = 'layers/mlp/up/kernel'
  params[path] = params[path].at[-1, -1, -1].set(np.nan)
  whole = jax.tree.unflatten(jax.tree.structure(like), params.values())
  folder = scratch.folder / 'spoiled/checkpoints/sft'
  saver = store.Checkpointer(str(folder), schema.Checkpoint())
  saver.save(4, {'params': whole}, host)
  saver.close()
  return folder / '4'


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
  edited(folder / SINGLE, WEIGHTS['another head'][0])
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
