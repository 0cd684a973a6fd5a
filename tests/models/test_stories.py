"""Trained weights: the published text of llama2.c's smallest model.

Skipped where POSTTRAIN_DATA, the folder with stories260K/, is unset.
"""

import json
import math
import os
import pathlib

import numpy as np
import pytest
from safetensors import numpy as safetensors

from posttrain.decode import engines, requests
from posttrain.models import hf, hf_config

DATA = os.environ.get('POSTTRAIN_DATA')
CONFIG = {
  'model_type': 'llama',
  'architectures': ['LlamaForCausalLM'],
  'vocab_size': 512,
  'hidden_size': 64,
  'intermediate_size': 172,
  'num_hidden_layers': 5,
  'num_attention_heads': 8,
  'num_key_value_heads': 4,
  'max_position_embeddings': 512,
  'hidden_act': 'silu',
  'rms_norm_eps': 1e-5,
  'rope_theta': 10_000.0,
  'tie_word_embeddings': True,
}
LAYER = 'model.layers.{}.'
NORM = LAYER + 'input_layernorm.weight'
# In the order of the file, where each is stacked over layers.
SHAPES = {
  'model.embed_tokens.weight': (512, 64),
  NORM: (64,),
  LAYER + 'self_attn.q_proj.weight': (64, 64),
  LAYER + 'self_attn.k_proj.weight': (32, 64),
  LAYER + 'self_attn.v_proj.weight': (32, 64),
  LAYER + 'self_attn.o_proj.weight': (64, 64),
  LAYER + 'post_attention_layernorm.weight': (64,),
  LAYER + 'mlp.gate_proj.weight': (172, 64),
  LAYER + 'mlp.down_proj.weight': (64, 172),
  LAYER + 'mlp.up_proj.weight': (172, 64),
  'model.norm.weight': (64,),
}
BOS = 1
# What `run stories260K.bin -t 0.0 -n 200` of llama2.c prints (its test_all.py).
TEXT = """\
Once upon a time, there was a little girl named Lily. She loved to play \
outside in the park. One day, she saw a big, red ball. She wanted to play \
with it, but it was too high.
Lily's mom said, "Lily, let's go to the park." Lily was sad and didn't know \
what to do. She said, "I want to play with your ball, but I can't find it."
Lily was sad and didn't know what to do. She said, "I'm sorry, Lily. I didn't \
know what to do."
Lily didn't want to help her mom, so she"""


def write(source: pathlib.Path, folder: pathlib.Path) -> None:
  """Writes llama2.c's file, i32[7] and f32s, as a HuggingFace directory."""
  numbers, start, tensors = np.fromfile(source, '<f4', offset=28), 0, {}
  for name, shape in SHAPES.items():
    for layer in range(5 if '{}' in name else 1):
      end = start + math.prod(shape)
      x = numbers[start:end].reshape(shape)
      if 'q_proj' in name or 'k_proj' in name:
        # The file's RoPE turns neighbors, HuggingFace's turns the two halves.
        x = x.reshape(-1, 4, 2, 64).swapaxes(1, 2).reshape(shape)
      tensors[name.format(layer)] = np.ascontiguousarray(x)
      start = end
  assert len(numbers) - start == 2 * 512 * 4  # RoPE's tables
  safetensors.save_file(tensors, folder / 'model.safetensors')
  (folder / 'config.json').write_text(json.dumps(CONFIG))


def pieces(path: pathlib.Path) -> list[bytes]:
  """Reads the vocabulary: i32 longest, then f32 score, i32 count, bytes."""
  raw, start, found = path.read_bytes(), 4, []
  while start < len(raw):
    count = int.from_bytes(raw[start + 4 : start + 8], 'little')
    found.append(raw[start + 8 : start + 8 + count])
    start += 8 + count
  return found


@pytest.mark.gate
@pytest.mark.slow
@pytest.mark.skipif(DATA is None, reason='POSTTRAIN_DATA is unset')
def test_trained_weights_tell_the_published_story(tmp_path):
  folder = pathlib.Path(DATA) / 'stories260K'
  write(folder / 'stories260K.bin', tmp_path)
  cfg = hf_config.read(tmp_path)
  engine = engines.Engine(
    cfg, engines.Options(slots=1, capacity=256, prefill_tokens=8)
  )
  engine.set_params(hf.load(tmp_path, cfg), 0)
  [answer] = engine.generate(
    [
      requests.Request(
        id=0,
        ids=np.array([BOS], np.int32),
        max_tokens=200,
        sampling=requests.Sampling(temperature=0.0),
      )
    ]
  )
  words = pieces(folder / 'tok512.bin')
  text = b''.join(words[i] for i in answer.ids).replace(b'<0x0A>', b'\n')
  assert text.decode().strip() == TEXT
