"""Pairs of a stage: made and scored before it trains, one model at a time.

1. Pairs, unless a file has them: answers of the stage's initial model to
   training tasks, in WORKDIR/pairs/<stage>.jsonl, and to held-out tasks in
   <stage>_eval.jsonl.
2. The reference's logprob of every answer, in
   WORKDIR/pairs/<stage>_reference.npz, so that the reference is not held while
   the stage trains.

Both are cached with a key of everything they depend on, and made again if the
key changes. Once the stage has a checkpoint, its pairs are kept.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence

import numpy as np

from posttrain import processes, schema, types
from posttrain.data import preferences, sources
from posttrain.pipeline import pairs as pair_pipeline
from posttrain.rollout import calls, pairing
from posttrain.stage import components as components_lib
from posttrain.stage import models as stage_models
from posttrain.util import disk, errors


def pipeline(
  models: stage_models.Models, data: pair_pipeline.PairData, fresh: bool
) -> pair_pipeline.PairPipeline:
  """Builds the pipeline of a stage on pairs: makes, reads and scores them.

  Args:
    models: the stage's models; those used here are released on return.
    data: the stage's data.
    fresh: whether the stage has no checkpoint.

  Raises:
    ValueError: there are no pairs, or none that fit.
    TooManyErrors: too many environments failed.
  """
  components = models.components
  splits = data.splits or data.split(*_made(models, fresh))
  print(f'stage {components.name}: {splits.summary}', file=sys.stderr)
  for reference in data.references:
    key = {
      'dataset': splits.fingerprint,
      'model': _fingerprint(models, reference),
      'tokenizer': components.renderer.fingerprint,
    }
    logprobs = cached(
      os.path.join(_folder(models), f'{components.name}_reference.npz'),
      key,
      functools.partial(_score, models, reference),
      splits.samples,
    )
    splits = splits.with_ref_logprobs(iter(logprobs))
  return pair_pipeline.PairPipeline(data, splits)


def made_files(
  cfg: schema.MadePairs, workdir: str, stage: str
) -> dict[str, str]:
  """Returns the path of each split's file of pairs, in the workdir."""
  folder = os.path.join(workdir, 'pairs')
  files = {'train': os.path.join(folder, f'{stage}.jsonl')}
  if cfg.eval_prompts is not None:
    files['eval'] = os.path.join(folder, f'{stage}_eval.jsonl')
  return files


def _folder(models: stage_models.Models) -> str:
  return os.path.join(models.load.workdir, 'pairs')


def _made(
  models: stage_models.Models, fresh: bool
) -> list[Sequence[preferences.Preference]]:
  """Returns the pairs of each split, made now or by an earlier start."""
  components, folder = models.components, _folder(models)
  name, cfg = components.name, components.stage.pairs
  assert isinstance(cfg, schema.MadePairs), cfg
  files = made_files(cfg, models.load.workdir, name)
  exist = processes.on(0, lambda: all(map(os.path.exists, files.values())))
  if fresh or not exist:
    write_pairs(
      files,
      os.path.join(folder, f'{name}_of.json'),
      {
        'model': _fingerprint(models, 'init'),
        'tokenizer': components.renderer.fingerprint,
        'recipe': _recipe(components, tuple(files)),
      },
      functools.partial(_make, models),
    )
  return [preferences.read(path) for path in files.values()]


def write_pairs(
  files: dict[str, str],
  key_path: str,
  key: dict[str, str],
  make: Callable[[str], Sequence[preferences.Preference]],
) -> None:
  """Writes the pairs of each split, unless files with the same key exist.

  Args:
    files: split -> path of its JSONL.
    key_path: JSON file of the key.
    key: entry -> hash of everything that the pairs depend on.
    make: returns the pairs of a split.
  """

  def missing() -> list[str]:
    existing = [x for x in files.values() if os.path.exists(x)]
    changed = _changed(_read_key(key_path), key)
    if existing and changed:
      logging.getLogger('absl').warning(
        '%s is stale: the %s has changed; the pairs are made again',
        existing[0],
        changed,
      )
      for path in existing:
        os.remove(path)
    return [k for k, path in files.items() if not os.path.exists(path)]

  def write(split: str, pairs: Sequence[preferences.Preference]) -> None:
    os.makedirs(os.path.dirname(key_path), exist_ok=True)
    with disk.replacing(key_path) as file:
      json.dump(key, file)
    preferences.write(files[split], pairs)

  for split in processes.on(0, missing):
    pairs = make(split)
    processes.on(0, functools.partial(write, split, pairs))


def _read_key(path: str) -> dict[str, str]:
  """Returns the key of existing pairs; {} if its file is gone or damaged."""
  try:
    return disk.read_json_object(path)
  except ValueError:
    return {}


def _changed(old: dict[str, str], new: dict[str, str]) -> str:
  """Returns the names of the key entries that changed, '' if none."""
  return ' and the '.join(k for k in new if old.get(k) != new[k])


def cached(
  path: str,
  key: dict[str, str],
  score: Callable[[Sequence[types.Sample]], Sequence[float]],
  samples: Sequence[types.Sample],
) -> np.ndarray:
  """Returns the logprobs of a file, or scores the samples and writes it.

  Args:
    path: npz file of the logprobs and their key.
    key: entry -> hash of everything that the logprobs depend on.
    score: returns the logprob of each sample, nats.
    samples: answers with their prompts.

  Returns:
    f32[len(samples)], nats.
  """
  cache = processes.on(0, lambda: _read_cache(path))
  if cache is not None:
    old_key, logprobs = cache
    changed = _changed(old_key, key)
    if not changed and logprobs.shape == (len(samples),):
      return logprobs
    logging.getLogger('absl').warning(
      '%s is stale: the %s has changed; the reference scores again',
      path,
      changed or 'number of answers',
    )
  logprobs = np.asarray(score(samples), np.float32)

  def write() -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with disk.replacing(path, 'xb') as file:
      np.savez(file, logprobs=logprobs, key=np.str_(json.dumps(key)))

  processes.on(0, write)
  return logprobs


def _read_cache(path: str) -> tuple[dict[str, str], np.ndarray] | None:
  if not os.path.exists(path):
    return None
  try:
    with open(path, 'rb') as file, np.load(file) as arrays:
      logprobs = np.asarray(arrays['logprobs'], np.float32)
      key = disk.parse_json(str(arrays['key']), f'the key in {path}')
    if not isinstance(key, dict) or not np.isfinite(logprobs).all():
      raise ValueError('it must hold a key and finite logprobs')
    return key, logprobs
  except Exception as error:  # zipfile, zlib and numpy have many
    logging.getLogger('absl').warning(
      '%s cannot be read (%s); the reference scores again',
      path,
      errors.describe(error),
    )
    return None


def _make(
  models: stage_models.Models, split: str
) -> list[preferences.Preference]:
  """Returns pairs of answers that the stage's initial model gives."""
  components, base = models.components, models.base
  stage = components.stage
  assert isinstance(stage.pairs, schema.MadePairs), stage.pairs
  engine = stage_models.engine(components)
  engine.set_params(models.load.init() if base is None else base.params, 0)
  pairs, count = pairing.make(
    {k: env for k, env in components.data.envs.items() if stage.envs[k].ratio},
    stage_models.driver(components, engine),
    stage.pairs,
    components.cfg.seed,
    stage.rollout.max_errors,
    split,
  )
  print(f'made {count.line()}, {split} split', file=sys.stderr)
  return pairs


def _score(
  models: stage_models.Models,
  reference: schema.Reference,
  samples: Sequence[types.Sample],
) -> list[float]:
  """Returns the log probability of each answer after its prompt, nats."""
  print(f'scoring {len(samples)} answers under {reference}', file=sys.stderr)
  with contextlib.closing(models.references()) as references:
    try:
      scored = references(reference, samples)
    except calls.EndpointError:
      models.stop.check('the reference logprobs of pairs')
      raise
  return answer_logprobs(scored, samples)


def answer_logprobs(
  logprobs: Sequence[np.ndarray], samples: Sequence[types.Sample]
) -> list[float]:
  """Returns the log probability of each answer after its prompt, nats.

  Args:
    logprobs: f32[T] of each sample's tokens, nats.
    samples: answers with their prompts.
  """
  return [
    float(np.sum(own[sample.mask], dtype=np.float64))
    for own, sample in zip(logprobs, samples, strict=True)
  ]


def _recipe(
  components: components_lib.Components, splits: Sequence[str]
) -> str:
  """Returns a hash of the tasks and the options of their sampling."""
  seed, stage = components.cfg.seed, components.stage
  envs = {
    name: [
      entry.ratio,
      dataclasses.asdict(entry.env),
      *(
        components.data.envs[name].source(split, seed).get_state()
        for split in splits
      ),
    ]
    for name, entry in stage.envs.items()
    if entry.ratio
  }
  options = [seed, dataclasses.asdict(stage.pairs), envs]
  return sources.fingerprint(json.dumps(options, sort_keys=True).encode())


def _fingerprint(
  models: stage_models.Models, reference: schema.Reference
) -> str:
  """Returns the identity of a reference: hash, dtype, frozen or not."""
  if isinstance(reference, schema.Endpoint):
    return f'{reference.name} behind a server'  # at any address
  components = models.components
  weights = models.load.fingerprint(reference)
  frozen = ', frozen' if components.stage.lora.rank else ''
  return f'{weights} in {components.model.dtype}{frozen}'
