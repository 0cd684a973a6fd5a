"""From the schema's dataclasses to the ConfigDict that a recipe returns.

Every key of the schema exists in the result, once, with its default; the
result is locked, so a misspelt key is an error and not a new key.
"""

import dataclasses
import os
import types
import typing

from ml_collections import config_dict

from posttrain import schema
from posttrain.models import hf_config


def get_config(run: schema.Run) -> config_dict.ConfigDict:
  """Returns the locked ConfigDict of a run.

  `run.stages` becomes the tuple `stages` (names, in order) and one subtree
  per stage under its own name.
  """
  config = _node(run)
  del config['stages']
  config['stages'] = tuple(run.stages)
  for name, stage in run.stages.items():
    if name in config:
      raise ValueError(
        f'a stage must not be named like a shared key: got {name!r}'
      )
    config[name] = _node(stage)
  return config.lock()


def words(argument: str, known: tuple[str, ...]) -> tuple[str | None, set[str]]:
  """Reads `DIR`, `WORD` or `DIR,WORD,WORD` behind a recipe's name.

  Returns:
    The directory, None if none is named, and the words.
  """
  parts = argument.split(',')
  folder = None if parts[0] in known else parts.pop(0)
  there = folder and os.path.isdir(os.path.expanduser(folder))
  bare = folder is None and 'lora' not in parts  # that corrects a directory's
  if set(parts) - set(known) or not (there or bare):
    raise ValueError(
      'the argument behind the recipe must be a HuggingFace directory that '
      f'exists, then words of {known}, as in FILE:DIR,lora: got {argument!r}'
    )
  return folder, set(parts)


def pretrained(folder: str | None) -> tuple[schema.Model, schema.Tokenizer]:
  """Model and tokenizer of a HuggingFace directory; None = tiny, on bytes."""
  if folder is None:
    return schema.PRESETS['tiny'], schema.Tokenizer()
  model = hf_config.read(os.path.expanduser(folder))
  model = dataclasses.replace(model, dtype='bfloat16', remat='block')
  return model, schema.Tokenizer(path=folder)


def arithmetic_sft(tiny: bool, sums: bool = False) -> schema.Stage:
  """The first rung of the ladder: by example, of a teacher who errs.

  Sampled, two-digit arithmetic is then right less than half of the time; the
  tiny one's questions are so easy that some of its answers are right as well.
  `sums` are additions up to 49: few enough facts for a small reward model,
  which has to find out by itself where an answer errs.
  """
  env = schema.Arithmetic(
    ops=('+', '-'), max_operand=99, mistakes=0.3, eval_tasks=1000
  )
  if sums:
    env = dataclasses.replace(
      env, ops=('+',), max_operand=49, train_tasks=1950, eval_tasks=450
    )
  if tiny:
    env = schema.Arithmetic(
      ops=('+',), max_operand=4, worked=False, train_tasks=15, eval_tasks=4
    )
  return schema.Stage(
    init='random',
    steps=40 if tiny else 120 if sums else 220,
    envs={'arithmetic': schema.EnvEntry(env=env)},
    batch=schema.Batch(
      prompts_per_step=8 if tiny else 64,
      row_tokens=64,
      micro_batch_tokens=256 if tiny else 1024,
    ),
    optim=schema.Optim(
      lr=1e-2 if tiny else 2e-3, schedule='cosine', warmup_steps=10
    ),
    rollout=schema.Rollout(
      slots=16 if tiny else 512, prefill_rows=8 if tiny else 64
    ),
    eval=schema.Eval(
      prompts=4 if tiny else env.eval_tasks,
      samples=2 if tiny else 1,
      max_tokens=16 if tiny else 40,
    ),
  )


def arithmetic_reward_model(tiny: bool, sft: schema.Stage) -> schema.Stage:
  """What an answer is worth: of two, the right one more."""
  return schema.Stage(
    kind='ranking',
    init='stage:sft',
    steps=10 if tiny else 1400,
    envs=questions(sft),
    pairs=schema.MadePairs(
      prompts=15 if tiny else 1950,
      samples=8 if tiny else 16,
      per_prompt=1 if tiny else 6,
      max_tokens=16 if tiny else 40,
      eval_prompts=None if tiny else 450,
    ),
    batch=schema.Batch(
      prompts_per_step=8 if tiny else 32,
      row_tokens=120,
      micro_batch_tokens=480 if tiny else 1920,
    ),
    # What it knows of sums as a language model is what it judges by.
    loss=schema.Loss(ranking=schema.Ranking(center_coef=0.01, lm_coef=1.0)),
    optim=schema.Optim(
      lr=1e-3, schedule='cosine', warmup_steps=5 if tiny else 20
    ),
    rollout=sft.rollout,
    eval=schema.Eval(every=5 if tiny else 200),
  )


def questions(stage: schema.Stage) -> dict[str, schema.EnvEntry]:
  """The environments of a stage, for one on pairs: they ask, and grade."""
  return {
    name: schema.EnvEntry(env=entry.env) for name, entry in stage.envs.items()
  }


def _node(node) -> config_dict.ConfigDict:
  """One dataclass as a ConfigDict; None becomes a typed placeholder."""
  hints = typing.get_type_hints(type(node))
  config = config_dict.ConfigDict()
  for field in dataclasses.fields(node):
    value = getattr(node, field.name)
    if value is None:
      config[field.name] = config_dict.placeholder(_type(hints[field.name]))
    elif dataclasses.is_dataclass(value):
      config[field.name] = _node(value)
    elif isinstance(value, dict):
      config[field.name] = config_dict.ConfigDict(
        {
          key: _node(child) if dataclasses.is_dataclass(child) else child
          for key, child in value.items()
        }
      )
    else:
      config[field.name] = value
  return config


def _type(hint) -> type:
  """The type that an optional field takes when it is set."""
  assert isinstance(hint, types.UnionType), hint
  kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
  plain = [kind for kind in kinds if not dataclasses.is_dataclass(kind)]
  return plain[0] if plain else config_dict.ConfigDict
