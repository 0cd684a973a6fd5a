"""Misspelt names: near ones are found, and far ones are never named."""

import dataclasses
import random
import string

import pytest

from posttrain import schema
from posttrain.util import spelling

NODES = [x for x in vars(schema).values() if dataclasses.is_dataclass(x)]
# Words that a user may try, and options of other libraries, none of which is a
# misspelt option of ours.
FAR = """
  accelerator adam adapter advantage alg amp backend best_of bf16 bos bucket
  budget_tokens cache_dir callbacks clip_ratio cuda data dataset deepspeed
  device dropout early_stopping ema epoch epochs epsilon flash fp16
  gamma_decay gpus grad_clip hidden_size hub kl_coef learning_rate
  load_in_4bit log_dir logger max_epochs max_length_tokens min_tokens
  min_turns momentum nodes num_generations num_turns offload optimizer packing
  pipeline precision push_to_hub queue quantize resume save_first save_steps
  seeds_per_task shuffle size stop_words system teacher top_k top_p use_cache
  val_files verbose vllm wandb workers_per_node x zero
""".split()


def _edited(name, draw):
  kind, i = draw.randrange(4), draw.randrange(len(name))
  letter = draw.choice(string.ascii_lowercase)
  if kind == 0:
    return name[:i] + letter + name[i:]
  if kind == 1:
    return name[:i] + name[i + 1 :]
  if kind == 2:
    return name[:i] + letter + name[i + 1 :]
  return name[:i] + name[i : i + 2][::-1] + name[i + 2 :]


def test_one_wrong_letter_is_understood_and_never_misunderstood():
  draw, counts = random.Random(0), {'right': 0, 'silent': 0}
  for node in NODES:
    names = [field.name for field in dataclasses.fields(node)]
    for name in names:
      for _ in range(3):
        typo = _edited(name, draw)
        hints = spelling.near(typo, names)
        if typo not in names:
          assert not hints or name in hints, (typo, hints)
          counts['right' if hints else 'silent'] += 1
  # The rest are names of up to three letters, and words of one.
  assert counts['right'] > 15 * counts['silent'] > 0


@pytest.mark.parametrize('name', FAR)
def test_far_words_have_no_hint(name):
  for node in NODES:
    names = [field.name for field in dataclasses.fields(node)]
    if name not in names:
      assert spelling.near(name, names) == [], (node, name)


@pytest.mark.parametrize(
  ('name', 'known', 'hints'),
  [
    ('lrr', ('lr', 'rl', 'low'), ['lr']),
    ('eos', ('eps', 'ks'), []),
    ('min_tokens', ('max_tokens',), []),
    ('warmup', ('warmup_steps', 'eps'), ['warmup_steps']),
    ('template', ('chat_template', 'template_variables'), []),
    ('steps_warmup', ('warmup_steps', 'steps'), ['warmup_steps']),
    ('Row-Tokens', ('row_tokens', 'joined_rows'), ['row_tokens']),
    ('rowtokens', ('row_tokens',), ['row_tokens']),
    ('wieght_deacy', ('weight_decay', 'no_decay'), ['weight_decay']),
    ('beta', ('beta1', 'beta2', 'eps'), ['beta1', 'beta2']),
    ('', ('a',), []),
  ],
)
def test_examples(name, known, hints):
  assert spelling.near(name, known) == hints


def test_edits_are_counted():
  assert spelling.edits('', 'abc') == 3
  assert spelling.edits('abc', 'abc') == 0
  assert spelling.edits('abcd', 'acbd') == 1
  assert spelling.edits('kitten', 'sitting') == 3


def test_a_hint_names_what_is_meant_and_what_is_there():
  known = ('prompt', 'completion', 'label')
  for names, hint in (
    (['promt', 'id'], "; did you mean prompt instead of 'promt'?"),
    (
      ['promt', 'Completion', 'label'],
      "; did you mean prompt instead of 'promt', completion instead of "
      "'Completion'?",
    ),
    (['prompt', 'prompts', 'question'], ''),  # the right name is there, too
    (['x' * 10**6, ''], ''),
    ([], ''),
  ):
    assert spelling.hint(names, known) == hint
