"""HuggingFace directories, read and written, against transformers."""

import copy
import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors

from posttrain import schema, scoring
from posttrain.decode import engines, requests
from posttrain.models import hf, hf_config, lora, peft, transformer

pytestmark = pytest.mark.gate

LLAMA3 = {
  'rope_type': 'llama3',
  'rope_theta': 100.0,
  'factor': 8.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 16,
}
LINEAR = {'rope_type': 'linear', 'rope_theta': 500.0, 'factor': 4.0}
PLAIN = {'rope_type': 'default', 'rope_theta': 5000.0}
YARN = {
  'rope_type': 'yarn',
  'rope_theta': 100.0,
  'factor': 4.0,
  'original_max_position_embeddings': 8,
  'beta_fast': 2.0,
}
LONGROPE = {
  'rope_type': 'longrope',
  'rope_theta': 100.0,
  'short_factor': [1.0, 1.1, 1.3],
  'long_factor': [1.0, 2.0, 3.5],
}
# With a larger range or a smaller epsilon a head's output may be all but 0,
# which its norm magnifies: transformers' own two forms then differ by more than
# 2e-4, and its gradients in float32 by 4e-4 from those in float64.
HYBRID = {
  'initializer_range': 0.2,
  'rms_norm_eps': 1e-3,
  'head_dim': 16,
  'num_attention_heads': 3,
  'num_key_value_heads': 1,
  'linear_num_key_heads': 2,
  'linear_num_value_heads': 6,
  'linear_key_head_dim': 8,
  'linear_value_head_dim': 12,
  'rope_parameters': {**PLAIN, 'partial_rotary_factor': 0.5},
}
CASES = {
  'llama3-rope': ('Llama', {'rope_parameters': LLAMA3, 'head_dim': 24}),
  'llama-linear-tied-mha': (
    'Llama',
    {
      'rope_parameters': LINEAR,
      'tie_word_embeddings': True,
      'num_key_value_heads': 4,
    },
  ),
  'qwen2': ('Qwen2', {'rope_parameters': PLAIN}),
  'qwen2-window-tied': (
    'Qwen2',
    {
      'use_sliding_window': True,
      'sliding_window': 5,
      'max_window_layers': 1,
      'tie_word_embeddings': True,
    },
  ),
  'llama-bias-dynamic': (
    'Llama',
    {
      'rope_parameters': {**LINEAR, 'rope_type': 'dynamic'},
      'max_position_embeddings': 16,
      'hidden_act': 'gelu_pytorch_tanh',
      'attention_bias': True,
      'mlp_bias': True,
    },
  ),
  'llama-longrope': (
    'Llama',
    {
      'rope_parameters': {
        **LONGROPE,
        'factor': 4.0,
        'original_max_position_embeddings': 100,
      },
      'head_dim': 6,
      'num_attention_heads': 3,
      'num_key_value_heads': 3,
      'hidden_size': 36,
    },
  ),
  'mistral': ('Mistral', {'sliding_window': None, 'head_dim': 12}),
  'mistral-window-yarn': (
    'Mistral',
    {'sliding_window': 5, 'rope_parameters': {**YARN, 'truncate': False}},
  ),
  'ministral3': (
    'Ministral3',
    {
      'head_dim': 12,
      'num_attention_heads': 3,
      'num_key_value_heads': 1,
      'rope_parameters': {
        **YARN,
        'mscale': 1.0,
        'mscale_all_dim': 0.5,
        'llama_4_scaling_beta': 0.3,
      },
    },
  ),
  'smollm3': (
    'SmolLM3',
    {'no_rope_layer_interval': 2, 'rope_parameters': LINEAR},
  ),
  'smollm3-window-bias': (
    'SmolLM3',
    {
      'no_rope_layers': [0, 1, 0],
      'layer_types': ['sliding_attention'] * 2 + ['full_attention'],
      'use_sliding_window': True,
      'sliding_window': 4,
      'attention_bias': True,
      'mlp_bias': True,
      'tie_word_embeddings': False,
    },
  ),
  'granite': (
    'Granite',
    {
      'embedding_multiplier': 3.0,
      'residual_multiplier': 0.4,
      'attention_multiplier': 0.2,
      'logits_scaling': 1.5,
      'attention_bias': True,
      'tie_word_embeddings': True,
    },
  ),
  'granite-plain': (
    'Granite',
    {
      'hidden_size': 36,
      'num_attention_heads': 6,
      'num_key_value_heads': 3,
      'mlp_bias': True,
    },
  ),
  'phi3': (
    'Phi3',
    {
      'hidden_size': 24,
      'num_attention_heads': 3,
      'num_key_value_heads': 1,
      'partial_rotary_factor': 0.75,
      'original_max_position_embeddings': 8,
      'max_position_embeddings': 64,
      'rope_parameters': {**LONGROPE, 'partial_rotary_factor': 0.75},
      'tie_word_embeddings': True,
    },
  ),
  'phi3-short-window': (
    'Phi3',
    {
      'hidden_size': 24,
      'original_max_position_embeddings': 100,
      'max_position_embeddings': 400,
      'rope_parameters': LONGROPE,
      'sliding_window': 5,
    },
  ),
  'olmo2': ('Olmo2', {'num_key_value_heads': 4, 'rope_parameters': PLAIN}),
  'olmo2-bias-tied': (
    'Olmo2',
    {
      'hidden_size': 36,
      'num_attention_heads': 3,
      'num_key_value_heads': 1,
      'attention_bias': True,
      'tie_word_embeddings': True,
    },
  ),
  'olmo3': (
    'Olmo3',
    {
      'num_hidden_layers': 5,
      'sliding_window': 4,
      'rope_parameters': {
        'full_attention': YARN,
        'sliding_attention': {'rope_type': 'default', 'rope_theta': 5e5},
      },
    },
  ),
  'qwen3-yarn-bias': (
    'Qwen3',
    {
      'head_dim': 12,
      'rope_parameters': {**YARN, 'attention_factor': 1.3},
      'attention_bias': True,
    },
  ),
  'qwen3': ('Qwen3', {'head_dim': 16, 'num_key_value_heads': 1}),
  'qwen3-tied': (
    'Qwen3',
    {
      'rope_parameters': PLAIN,
      'head_dim': 8,
      'tie_word_embeddings': True,
      'initializer_range': 0.5,
    },
  ),
  'gemma2': (
    'Gemma2',
    {
      'attn_logit_softcapping': 5.0,
      'final_logit_softcapping': 3.0,
      'sliding_window': 4,
      'query_pre_attn_scalar': 20,
      'head_dim': 16,
    },
  ),
  'gemma3': (
    'Gemma3',
    {
      'num_hidden_layers': 7,
      'sliding_window': 4,
      'head_dim': 16,
      'query_pre_attn_scalar': 24,
      'rope_parameters': {'full_attention': LINEAR, 'sliding_attention': PLAIN},
    },
  ),
  'gemma3-all-full-untied': (
    'Gemma3',
    {
      'layer_types': ['full_attention'] * 3,
      'sliding_window': 4096,
      'head_dim': 16,
      'query_pre_attn_scalar': 8,
      'tie_word_embeddings': False,
    },
  ),
  'qwen3-moe': (
    'Qwen3Moe',
    {
      'num_hidden_layers': 4,
      'num_experts': 7,
      'num_experts_per_tok': 3,
      'moe_intermediate_size': 20,
      'norm_topk_prob': True,
      'mlp_only_layers': [1, 3],
      'head_dim': 12,
    },
  ),
  'qwen3-moe-sums-below-1': (
    'Qwen3Moe',
    {
      'num_experts': 8,
      'num_experts_per_tok': 2,
      'moe_intermediate_size': 24,
      'head_dim': 16,
    },
  ),
  'olmoe': (
    'Olmoe',
    {'num_experts': 6, 'num_experts_per_tok': 3, 'intermediate_size': 20},
  ),
  'gpt-oss': (
    'GptOss',
    {
      'num_local_experts': 5,
      'num_experts_per_tok': 2,
      'intermediate_size': 20,
      'head_dim': 12,
      'num_attention_heads': 6,
      'sliding_window': 5,
      'rope_parameters': {**YARN, 'truncate': False},
    },
  ),
  'gpt-oss-defaults': (
    'GptOss',
    {
      'num_local_experts': 4,
      'num_experts_per_tok': 3,
      'intermediate_size': 32,
      'head_dim': 16,
      'num_hidden_layers': 4,
      'sliding_window': 3,
      'swiglu_limit': 1.5,
      'layer_types': ['full_attention', 'sliding_attention'] * 2,
      'rms_norm_eps': 1e-6,
    },
  ),
  'mixtral': (
    'Mixtral',
    {'num_local_experts': 5, 'num_experts_per_tok': 2, 'head_dim': 10},
  ),
}
GEMMA4_ROPE = {
  'full_attention': {
    'rope_type': 'proportional',
    'rope_theta': 1000.0,
    'partial_rotary_factor': 0.3,
  },
  'sliding_attention': PLAIN,
}
GEMMA4 = {
  'pad_token_id': 159,  # transformers reads it if there are other towers
  'sliding_window': 4,
  'head_dim': 12,
  'global_head_dim': 20,
  'vocab_size_per_layer_input': 160,
  'hidden_size_per_layer_input': 6,
  'final_logit_softcapping': 3.0,
  'rope_parameters': GEMMA4_ROPE,
}
CASES |= {
  'gemma4-shared': (
    'Gemma4',
    {
      **GEMMA4,
      'num_hidden_layers': 5,
      'num_kv_shared_layers': 2,
      'use_double_wide_mlp': True,
      'layer_types': ['sliding_attention'] * 2
      + ['full_attention', 'sliding_attention', 'full_attention'],
      'num_attention_heads': 3,
      'num_key_value_heads': 1,
    },
  ),
  'gemma4': (
    'Gemma4',
    {
      **GEMMA4,
      'num_hidden_layers': 6,
      'global_head_dim': 10,
      'hidden_size_per_layer_input': 0,
      'attention_k_eq_v': True,
      'num_key_value_heads': 4,
      'num_global_key_value_heads': 2,
      'layer_types': ['sliding_attention'] * 2
      + ['full_attention', 'sliding_attention', 'sliding_attention']
      + ['full_attention'],
      'tie_word_embeddings': False,
      'attention_bias': True,
    },
  ),
  'qwen3.5': ('Qwen3_5', {**HYBRID, 'num_hidden_layers': 4}),
  'qwen3.5-tied': (
    'Qwen3_5',
    {
      **HYBRID,
      'hidden_size': 24,
      'head_dim': 32,
      'num_key_value_heads': 3,
      'linear_num_key_heads': 3,
      'linear_num_value_heads': 3,
      'layer_types': ['full_attention', 'linear_attention', 'linear_attention'],
      'rope_parameters': PLAIN,
      'tie_word_embeddings': True,
    },
  ),
  'qwen3-next': (
    'Qwen3Next',
    {**HYBRID, 'num_hidden_layers': 4, 'num_experts': 0},
  ),
  'qwen3-next-experts': (
    'Qwen3Next',
    {
      **HYBRID,
      'num_hidden_layers': 5,
      'layer_types': ['linear_attention'] * 2
      + ['full_attention', 'linear_attention', 'full_attention'],
      'mlp_only_layers': [1, 2],
      'num_experts': 5,
      'num_experts_per_tok': 2,
      'moe_intermediate_size': 20,
      'shared_expert_intermediate_size': 12,
      'norm_topk_prob': False,
    },
  ),
  'qwen3.5-moe': (
    'Qwen3_5Moe',
    {
      **HYBRID,
      'num_hidden_layers': 4,
      'num_experts': 6,
      'num_experts_per_tok': 3,
      'moe_intermediate_size': 12,
      'shared_expert_intermediate_size': 20,
    },
  ),
}
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
# The programs of a case are compiled for the first of them.
seeds = pytest.mark.parametrize('seed', [0, *map(slow, (1, 2))])
# Whose wavelengths change in transformers while an answer grows.
UNSTEADY = {'llama-bias-dynamic', 'phi3'}
# Of most families one; the gate has all.
QUICK = (
  *('qwen3', 'qwen3-moe', 'qwen3.5', 'llama3-rope', 'mixtral', 'gemma2'),
  *('gemma3', 'gemma4', 'olmo3', 'phi3', 'granite-plain', 'gpt-oss'),
  *('ministral3', 'smollm3', 'qwen2', 'mistral', 'olmo2'),
)


def some(*quick, without=()):
  """Returns all cases, of which all but a few are left to the gate."""
  rest = [x for x in CASES if x not in {*quick, *without}]
  return [*quick, *map(slow, rest)]


@functools.cache
def make_peer(case, seed=0):
  """Builds a random transformers model, with noise on norms and biases."""
  torch = pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')
  family, options = CASES[case]
  config = family + 'Text' * family.startswith(('Gemma3', 'Gemma4', 'Qwen3_5'))
  cfg = getattr(transformers, f'{config}Config')(
    **{
      'vocab_size': 160,
      'hidden_size': 32,
      'num_hidden_layers': 3,
      'num_attention_heads': 4,
      'num_key_value_heads': 2,
      'intermediate_size': 64,
      'rms_norm_eps': 1e-5,
      'initializer_range': 0.3,
      'pad_token_id': None,
      'bos_token_id': None,
      'eos_token_id': None,
      'attn_implementation': 'eager',
      **copy.deepcopy(options),  # transformers writes into it
    }
  )
  torch.manual_seed(seed)
  peer = getattr(transformers, f'{family}ForCausalLM')(cfg).eval()
  for value in peer.parameters():
    if value.ndim == 1:
      value.data += 0.2 * torch.randn_like(value)
  for name, value in peer.named_buffers():
    if name.endswith('layer_scalar'):
      value.data += 0.2 * torch.randn_like(value)
  if family in ('Gemma2', 'Gemma3', 'Gemma4', 'Granite', 'SmolLM3'):
    # Else a random model with a tied head would repeat its last token for ever.
    small = 0.3 if family == 'Gemma4' else 0.02
    peer.get_input_embeddings().weight.data *= small
  return peer


def experts_are_joined(path):
  """Rewrites a directory's experts as published ones are: as one tensor."""
  tensors, joined = tensors_of(path), {}
  for name in [x for x in tensors if '.experts.0.gate_proj' in x]:
    stem, parts = name.partition('0.gate_proj')[0], []
    count = sum(x.startswith(stem) and 'gate_proj' in x for x in tensors)
    for i in range(count):
      gate, up, down = (
        tensors.pop(f'{stem}{i}.{x}_proj.weight')
        for x in ('gate', 'up', 'down')
      )
      parts.append((np.concatenate([gate, up]), down))
    both, down = (np.stack(x) for x in zip(*parts, strict=True))
    joined |= {f'{stem}gate_up_proj': both, f'{stem}down_proj': down}
  safetensors.save_file(tensors | joined, path / 'model.safetensors')


def load_peer(path):
  transformers = pytest.importorskip('transformers')
  return transformers.AutoModelForCausalLM.from_pretrained(
    path, attn_implementation='eager'
  ).eval()


def assert_peers_agree(ours, theirs):
  """The bits of torch's sums depend on where weights lie in memory."""
  ids, _ = rows()
  np.testing.assert_allclose(
    peer_logits(ours, ids), peer_logits(theirs, ids), rtol=0, atol=1e-4
  )


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Returns a function that saves a case's model and returns the folder."""
  root = tmp_path_factory.mktemp('hf')

  def get(case, seed=0):
    path = root / f'{case}-{seed}'
    if not path.exists():
      make_peer(case, seed).save_pretrained(path)
    return path

  return get


def read(path):
  cfg = hf_config.read(path)
  return cfg, hf.load(path, cfg)


def tensors_of(path):
  files = sorted(path.glob('*.safetensors'))
  return {k: v for f in files for k, v in safetensors.load_file(f).items()}


def rows(length=24):
  rng = np.random.default_rng(0)
  ids = rng.integers(0, 48, (2, length)).astype(np.int32)
  return ids, np.tile(np.arange(length, dtype=np.int32), (2, 1))


@functools.partial(jax.jit, static_argnames='cfg')
def logits(params, cfg, ids, positions):
  hidden, _ = transformer.trunk(params, cfg, ids, positions, jnp.ones_like(ids))
  return scoring.next_logits(params, cfg, hidden)


def peer_logits(peer, ids):
  torch = pytest.importorskip('torch')
  with torch.no_grad():
    return peer(torch.tensor(ids).long()).logits.numpy()


# Keys that transformers ignores in a family, replaces by a default, or reads
# from another place: (case, changed keys, whether logits stay the same).
PATTERN = {'layer_types': None, 'sliding_window_pattern': 3}
KEYS = {
  'gemma3-cap': ('gemma3', {'attn_logit_softcapping': 2.0}, True),
  'gemma2-cap': ('gemma2', {'attn_logit_softcapping': 2.0}, False),
  'gemma3-logits': ('gemma3', {'final_logit_softcapping': 2.0}, False),
  'gemma2-pattern': ('gemma2', PATTERN, True),
  'gemma3-pattern': ('gemma3', PATTERN, False),
  'llama-ignored': (
    'llama3-rope',
    {
      'attn_logit_softcapping': 2.0,
      'final_logit_softcapping': 2.0,
      'layer_types': ['sliding_attention'] * 3,
      'sliding_window': 2,
      'use_sliding_window': True,
      'sliding_window_pattern': 2,
    },
    True,
  ),
  'qwen-window-unused': (
    'qwen3',
    {'layer_types': None, 'sliding_window': 2, 'max_window_layers': 0},
    True,
  ),
  'qwen-window-default': (
    'qwen2-window-tied',
    {'layer_types': None, 'max_window_layers': 28},
    False,
  ),
  'gemma3-version-4': (
    'gemma3',
    {
      'rope_parameters': None,
      'rope_theta': 500.0,
      'rope_scaling': {'rope_type': 'linear', 'factor': 4.0},
      'rope_local_base_freq': 5000.0,
    },
    True,
  ),
  'olmo3-version-4': (
    'olmo3',
    {'rope_parameters': None, 'rope_theta': 100.0, 'rope_scaling': YARN},
    True,
  ),
  'olmo3-window': ('olmo3', {'sliding_window': 3}, False),
  'phi3-su': (
    'phi3',
    {
      'rope_parameters': None,
      'rope_theta': 100.0,
      'rope_scaling': {
        **LONGROPE,
        'rope_type': 'su',
        'original_max_position_embeddings': 8,
      },
    },
    True,
  ),
  'phi3-attention-factor': (
    'phi3',
    {'rope_scaling': {**LONGROPE, 'attention_factor': 1.5}},
    False,
  ),
  'smollm3-layers': ('smollm3', {'no_rope_layers': [0, 1, 1]}, False),
  'gemma3-default-bases': (
    'gemma3',
    {'rope_parameters': {'full_attention': LINEAR}},
    False,
  ),
}


@pytest.mark.parametrize('name', KEYS)
def test_keys_mean_what_they_mean_in_transformers(name, folder, tmp_path):
  """Both change, or neither does; and ours is what the logits say."""
  case, change, same = KEYS[name]
  path = tmp_path / 'changed'
  shutil.copytree(folder(case), path)
  file = path / 'config.json'
  file.write_text(json.dumps(json.loads(file.read_text()) | change))
  peer = load_peer(path)
  ids, _ = rows()
  ours, theirs = hf_config.read(path), peer_logits(peer, ids)
  expected = peer_logits(make_peer(case), ids)
  assert (ours == hf_config.read(folder(case))) is same
  assert (theirs == expected).all() == same
  # Written from ours in the format of version 4, it is the same model.
  file.write_text(json.dumps(hf_config.write(ours)))
  written = load_peer(path)
  np.testing.assert_array_equal(peer_logits(written, ids), theirs)


def loss_and_logits(params, cfg, ids, positions):
  """Of the mean loss of the tokens that have a prediction."""
  ones = jnp.ones_like(ids)
  hidden, _ = transformer.trunk(params, cfg, ids, positions, ones)
  temperatures = jnp.ones(ids.shape)
  logprobs, _ = scoring.score_hidden(
    params, cfg, hidden, ids, positions, ones, temperatures
  )
  logits = scoring.next_logits(params, cfg, hidden)
  return -logprobs.sum() / (ids.size - len(ids)), logits


forward = jax.jit(loss_and_logits, static_argnames='cfg')
gradients = jax.jit(
  jax.grad(loss_and_logits, has_aux=True), static_argnames='cfg'
)


def step_of(case, seed, folder):
  """Returns our arguments, a copy of the peer, and its outputs."""
  torch = pytest.importorskip('torch')
  cfg, params = read(folder(case, seed))
  ids, positions = rows()
  # transformers chooses wavelengths by the length of the rows.
  cfg = dataclasses.replace(cfg, rope_length=ids.shape[1])
  peer, tokens = copy.deepcopy(make_peer(case, seed)), torch.tensor(ids).long()
  return (params, cfg, ids, positions), peer, peer(tokens, labels=tokens)


def assert_logits_equal(logits, outputs):
  expected = outputs.logits.detach().numpy()
  assert np.abs(logits - expected).max() <= 2e-4 * np.abs(expected).max()


# The test of gradients compares logits of all.
@pytest.mark.parametrize('case', QUICK)
def test_logits_and_losses_equal_those_of_torch(case, folder):
  ours, _, outputs = step_of(case, 0, folder)
  loss, logits = forward(*ours)
  assert_logits_equal(logits, outputs)
  np.testing.assert_allclose(loss, outputs.loss.item(), rtol=1e-4)


@seeds
@pytest.mark.parametrize('case', some('qwen3', 'gemma3', 'qwen3.5-tied'))
def test_gradients_equal_those_of_torch(case, seed, folder, tmp_path):
  (params, cfg, *batch), peer, outputs = step_of(case, seed, folder)
  outputs.loss.backward()
  grads, logits = gradients(params, cfg, *batch)
  assert_logits_equal(logits, outputs)
  # Written as if they were weights.
  ours, theirs = tmp_path / 'ours', tmp_path / 'theirs'
  hf.save(grads, cfg, ours, like=folder(case, seed))
  for weight in peer.parameters():
    weight.data = weight.grad
  for name, value in peer.named_buffers():
    if name.endswith('layer_scalar'):
      value.zero_()
  peer.save_pretrained(theirs)
  ours, theirs = tensors_of(ours), tensors_of(theirs)
  assert theirs.keys() == ours.keys()
  largest = max(np.abs(x).max() for x in theirs.values())
  for name, x in theirs.items():
    np.testing.assert_allclose(ours[name], x, atol=1e-4 * largest)


@seeds
@pytest.mark.parametrize('case', some('qwen3', 'gemma2', without=UNSTEADY))
def test_greedy_answers_equal_those_of_transformers(case, seed, folder):
  torch = pytest.importorskip('torch')
  cfg, params = read(folder(case, seed))
  prompts, new = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [7, 8]], 64
  options = engines.Options(
    slots=2, capacity=128, prefill_rows=2, prefill_tokens=8
  )
  ours = engines.Engine(cfg, options)
  ours.set_params(params, 0)
  answers = ours.generate(
    [
      requests.Request(
        id=i,
        ids=np.array(prompt, np.int32),
        max_tokens=new,
        sampling=requests.Sampling(temperature=0.0),
      )
      for i, prompt in enumerate(prompts)
    ]
  )
  for prompt, answer in zip(prompts, answers, strict=True):
    with torch.no_grad():
      expected = make_peer(case, seed).generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=new
      )
    tokens = expected[0, len(prompt) :].tolist()
    assert answer.ids.tolist() == tokens
    # Random ones of these repeat themselves, and others with another seed.
    if seed or case.startswith(('olmo2', 'qwen3-moe-sums')):
      continue
    # They are really different: no loop of up to 16 tokens at the end.
    assert len(set(tokens)) >= 16
    assert all(tokens[32 + n :] != tokens[32:-n] for n in range(1, 17))


@pytest.mark.parametrize(
  ('case', 'keeps_config'), [('qwen3', True), ('llama3-rope', False)]
)
def test_a_reward_model_is_a_sequence_classification(
  case, keeps_config, folder, tmp_path
):
  torch = pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')
  path, out = folder(case), tmp_path / 'saved'
  cfg, params = read(path)
  kernel = jax.random.normal(jax.random.key(0), (cfg.embed_dim,))
  params = {**transformer.add_reward(params), 'reward': {'kernel': kernel}}
  like = path if keeps_config else None
  ids, positions = rows()
  pad = next(i for i in range(cfg.vocab_size) if i not in ids)
  hf.save(params, cfg, out, like=like, dtype='float32', pad_id=pad)
  peer = transformers.AutoModelForSequenceClassification.from_pretrained(out)
  hidden, _ = transformer.trunk(params, cfg, ids, positions, np.ones_like(ids))
  ours = transformer.rewards(params, hidden)[:, -1]
  with torch.no_grad():
    padded = np.pad(ids, ((0, 0), (0, 3)), constant_values=pad)
    theirs = peer(torch.tensor(padded).long()).logits[:, 0]
  np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-4)
  assert 'lm_head.weight' not in tensors_of(out)


@pytest.mark.parametrize('case', some(*QUICK))
def test_load_then_save_is_bitwise_and_read_by_transformers(
  case, folder, tmp_path
):
  path, out = folder(case), tmp_path / 'saved'
  cfg, params = read(path)
  hf.save(params, cfg, out, like=path, shard_bytes=20_000)
  index = json.loads((out / hf.INDEX).read_text())
  assert len(set(index['weight_map'].values())) > 1
  before, after = tensors_of(path), tensors_of(out)
  assert before.keys() == after.keys()
  for name in before:
    np.testing.assert_array_equal(before[name], after[name], strict=True)
  ours, theirs = ((x / 'config.json').read_text() for x in (out, path))
  assert ours == theirs
  assert_peers_agree(load_peer(out), make_peer(case))


QWEN_VISION = {
  'depth': 1,
  'hidden_size': 16,
  'intermediate_size': 16,
  'num_heads': 2,
  'out_hidden_size': 32,
  'num_position_embeddings': 16,
}
GEMMA_VISION = {
  'hidden_size': 16,
  'intermediate_size': 16,
  'num_hidden_layers': 1,
  'num_attention_heads': 2,
  'num_key_value_heads': 2,
  'head_dim': 8,
  'position_embedding_size': 16,
}
PIXTRAL = {
  'model_type': 'pixtral',
  'hidden_size': 16,
  'intermediate_size': 16,
  'num_hidden_layers': 1,
  'num_attention_heads': 2,
  'head_dim': 8,
  'image_size': 16,
  'patch_size': 4,
}


@pytest.mark.parametrize(
  ('case', 'family', 'vision'),
  [
    ('qwen3.5', 'Qwen3_5', QWEN_VISION),
    slow('qwen3.5-moe', 'Qwen3_5Moe', QWEN_VISION),
    ('ministral3', 'Mistral3', PIXTRAL),
    slow('gemma4', 'Gemma4', GEMMA_VISION),
  ],
)
def test_a_model_with_a_vision_tower_keeps_it(case, family, vision, tmp_path):
  """The text's part of a nested config trains, all else is written again."""
  torch = pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')
  text = make_peer(case).config
  torch.manual_seed(0)
  config = getattr(transformers, f'{family}Config')
  peer = getattr(transformers, f'{family}ForConditionalGeneration')(
    config(text_config=text, vision_config=vision)
  ).eval()
  path, out, alone = (tmp_path / name for name in ('a', 'b', 'c'))
  peer.save_pretrained(path)
  cfg, params = read(path)
  ids, positions = rows()
  expected = peer_logits(peer, ids)
  ours = logits(params, cfg, ids, positions)
  assert np.abs(ours - expected).max() <= 2e-4 * np.abs(expected).max()
  hf.save(params, cfg, out, like=path)
  before, after = tensors_of(path), tensors_of(out)
  assert any('vis' in name for name in before)
  assert before.keys() == after.keys()
  for name in before:
    np.testing.assert_array_equal(before[name], after[name], strict=True)
  hf.save(params, cfg, alone, dtype='float32')
  np.testing.assert_allclose(
    peer_logits(load_peer(alone), ids), expected, atol=1e-5
  )
  # An adapter has the names of the nested config, too.
  options = schema.Lora(rank=2, targets='attention/q/kernel$')
  adapter = lora.init(jax.random.key(0), options, params)
  peft.save(adapter, options, cfg, tmp_path / 'adapter', str(path))
  loaded, _ = peft.load(tmp_path / 'adapter', cfg, str(path))
  jax.tree.map(np.testing.assert_array_equal, loaded, adapter)
  if family in ('Qwen3_5Moe', 'Gemma4'):
    return  # transformers has no class
  # A reward model is one of the text.
  kernel = jax.random.normal(jax.random.key(0), (cfg.embed_dim,))
  reward = {**transformer.add_reward(params), 'reward': {'kernel': kernel}}
  saved, pad = tmp_path / 'reward', cfg.vocab_size - 1
  hf.save(reward, cfg, saved, like=path, dtype='float32', pad_id=pad)
  peer = transformers.AutoModelForSequenceClassification.from_pretrained(saved)
  assert peer.config.architectures == [type(peer).__name__]
  hidden, _ = transformer.trunk(reward, cfg, ids, positions, np.ones_like(ids))
  with torch.no_grad():
    theirs = peer(torch.tensor(ids).long()).logits[:, 0]
  ours = transformer.rewards(reward, hidden)[:, -1]
  np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-4)


def test_experts_that_are_one_tensor_are_read_and_written(folder, tmp_path):
  path, out = tmp_path / 'joined', tmp_path / 'out'
  shutil.copytree(folder('qwen3.5-moe'), path)
  experts_are_joined(path)
  cfg, params = read(path)
  _, expected = read(folder('qwen3.5-moe'))
  jax.tree.map(np.testing.assert_array_equal, params, expected)
  hf.save(params, cfg, out, like=path)
  before, after = tensors_of(path), tensors_of(out)
  assert before.keys() == after.keys()
  for name in before:
    np.testing.assert_array_equal(before[name], after[name], strict=True)
  assert_peers_agree(load_peer(out), make_peer('qwen3.5-moe'))


def test_mxfp4_is_read_as_transformers_reads_it(folder, tmp_path):
  torch = pytest.importorskip('torch')
  mxfp4 = pytest.importorskip('transformers.integrations.mxfp4')
  path, out = tmp_path / 'packed', tmp_path / 'out'
  shutil.copytree(folder('gpt-oss-defaults'), path)
  tensors, rng = tensors_of(path), np.random.default_rng(0)
  expected = {}
  for name in [x for x in tensors if x.endswith(('gate_up_proj', 'down_proj'))]:
    count, inputs, outputs = tensors.pop(name).shape
    groups = count, outputs, inputs // 32
    blocks = rng.integers(0, 256, (*groups, 16)).astype(np.uint8)
    scales = rng.integers(110, 135, groups).astype(np.uint8)
    tensors |= {f'{name}_blocks': blocks, f'{name}_scales': scales}
    expected[name] = mxfp4.convert_moe_packed_tensors(
      torch.tensor(blocks), torch.tensor(scales)
    )
  safetensors.save_file(tensors, path / 'model.safetensors')
  file = path / 'config.json'
  config = json.loads(file.read_text())
  config['quantization_config'] = {'quant_method': 'mxfp4'}
  file.write_text(json.dumps(config))
  cfg, params = read(path)
  hf.save(params, cfg, out, like=path)
  after = tensors_of(out)
  assert after.keys() == make_peer('gpt-oss-defaults').state_dict().keys()
  for name, value in expected.items():
    assert after[name].dtype == 'bfloat16'
    np.testing.assert_array_equal(
      after[name].astype(np.float32), value.float().numpy()
    )
  ids, positions = rows()
  ours = logits(params, cfg, ids, positions)
  theirs = peer_logits(load_peer(out).float(), ids)
  assert np.abs(ours - theirs).max() <= 2e-4 * np.abs(theirs).max()


@pytest.mark.filterwarnings('ignore:.is_gradient_checkpointing')
@pytest.mark.parametrize(
  ('case', 'kinds'),
  [
    slow('qwen3.5', {}),
    ('qwen3.5', {'dora': True}),
    ('qwen3', {'rslora': True}),
    slow('qwen3', {'rslora': True, 'dora': True}),
  ],
)
def test_an_adapter_computes_what_it_does_in_peft(
  case, kinds, folder, tmp_path
):
  """Queries, keys and values of a hybrid have another order in the file."""
  peft_library = pytest.importorskip('peft')
  path = folder(case)
  cfg, params = read(path)
  options = schema.Lora(
    rank=3, targets=r'((delta|attention)/.*|^head)/kernel$', **kinds
  )
  adapter = lora.init(jax.random.key(0), options, params)
  adapter = jax.tree.map(
    lambda x: 0.3 * jax.random.normal(jax.random.key(1), x.shape), adapter
  )
  peft.save(adapter, options, cfg, tmp_path / 'adapter', str(path))
  loaded, read_options = peft.load(tmp_path / 'adapter', cfg)
  jax.tree.map(np.testing.assert_array_equal, loaded, adapter)
  assert (read_options.rslora, read_options.dora) == (
    options.rslora,
    options.dora,
  )
  peer = peft_library.PeftModel.from_pretrained(
    load_peer(path), tmp_path / 'adapter'
  )
  ids, positions = rows()
  expected = peer_logits(peer, ids)
  whole = lora.Base(params, lora.scale(options)).attach(adapter)
  ours = logits(whole, cfg, ids, positions)
  assert np.abs(ours - expected).max() <= 2e-4 * np.abs(expected).max()
