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
from typing import Any

import numpy as np

from posttrain import processes, schema, types
from posttrain.data import preferences, sources
from posttrain.pipeline import pair_data
from posttrain.rollout import calls, pairing
from posttrain.stage import models
from posttrain.util import disk, errors


def pipeline(
  own: models.Models, decoder: Any, state: Any
) -> pair_data.PairPipeline:
  """Builds the pipeline of a stage on pairs: makes, reads and scores them.

  Args:
    own: the stage's models; those used here are released on return.
    decoder: unused: a stage on pairs trains without it.
    state: the restored pipeline's; None = the stage begins.

  Raises:
    ValueError: there are no pairs, or none that fit.
    TooManyErrors: too many environments failed.
  """
  del decoder
  components, workdir, name = (
    own.components,
    own.load.workdir,
    own.components.name,
  )
  data = components.data
  assert isinstance(data, pair_data.PairData), data
  splits, cfg, seed = data.splits, components.stage.pairs, components.cfg.seed
  # 1. The pairs; those of an earlier start are kept, if it was the same.
  if splits is None:
    assert isinstance(cfg, schema.MadePairs), cfg
    paths = made_files(cfg, workdir, name)
    exist = processes.on(0, lambda: all(map(os.path.exists, paths.values())))
    if state is None or not exist:
      # The tasks, and the options of their sampling.
      envs = {
        name: [
          entry.ratio,
          dataclasses.asdict(entry.env),
          *(data.envs[name].source(x, seed).get_state() for x in paths),
        ]
        for name, entry in components.stage.envs.items()
        if entry.ratio
      }
      recipe = json.dumps([seed, dataclasses.asdict(cfg), envs], sort_keys=True)
      key = {
        'model': _fingerprint(own, 'init'),
        'tokenizer': components.renderer.fingerprint,
        'recipe': sources.fingerprint(recipe.encode()),
      }
      key_path = os.path.join(workdir, 'pairs', f'{name}_of.json')
      write_pairs(paths, key_path, key, functools.partial(_make, own))
    splits = data.split(*map(preferences.read, paths.values()))
  print(f'stage {name}: {splits.summary}', file=sys.stderr)
  # 2. The logprobs of their answers.
  for reference in data.references:
    key = {
      'dataset': splits.fingerprint,
      'model': _fingerprint(own, reference),
      'tokenizer': components.renderer.fingerprint,
    }

    def score(samples, reference=reference) -> list[float]:
      print(
        f'scoring {len(samples)} answers under {reference}', file=sys.stderr
      )
      with contextlib.closing(own.make_references()) as scorer:
        try:
          scored = scorer(reference, samples)
        except calls.EndpointError:
          own.stop.check('the reference logprobs of pairs')
          raise
      return answer_logprobs(scored, samples)

    path = os.path.join(workdir, 'pairs', f'{name}_reference.npz')
    logprobs = cached(path, key, score, splits.samples)
    splits = splits.with_ref_logprobs(iter(logprobs))
  pipeline = pair_data.PairPipeline(data, splits)
  if state is not None:
    pipeline.set_state(state)
  return pipeline


def made_files(
  cfg: schema.MadePairs, workdir: str, stage: str
) -> dict[str, str]:
  """Returns the path of each split's file of pairs, in the workdir."""
  folder = os.path.join(workdir, 'pairs')
  paths = {'train': os.path.join(folder, f'{stage}.jsonl')}
  if cfg.eval_prompts is not None:
    paths['eval'] = os.path.join(folder, f'{stage}_eval.jsonl')
  return paths


def write_pairs(
  paths: dict[str, str],
  key_path: str,
  key: dict[str, str],
  make: Callable[[str], Sequence[preferences.Preference]],
) -> None:
  """Writes the pairs of each split, unless files with the same key exist.

  Args:
    paths: split -> path of its JSONL.
    key_path: JSON file of the key.
    key: entry -> hash of everything that the pairs depend on.
    make: returns the pairs of a split.
  """

  def missing() -> list[str]:
    existing = [x for x in paths.values() if os.path.exists(x)]
    old: dict[str, str] = {}
    with contextlib.suppress(ValueError):  # missing or damaged
      old = disk.read_json_object(key_path)
    changed = _changed(old, key)
    if existing and changed:
      logging.getLogger('absl').warning(
        '%s is stale: the %s has changed; the pairs are made again',
        existing[0],
        changed,
      )
      for path in existing:
        os.remove(path)
    return [k for k, path in paths.items() if not os.path.exists(path)]

  def write(split: str, pairs: Sequence[preferences.Preference]) -> None:
    os.makedirs(os.path.dirname(key_path), exist_ok=True)
    with disk.replacing(key_path) as file:
      json.dump(key, file)
    preferences.write(paths[split], pairs)

  for split in processes.on(0, missing):
    pairs = make(split)
    processes.on(0, functools.partial(write, split, pairs))


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

  def read() -> np.ndarray | None:
    if not os.path.exists(path):
      return None
    try:
      with open(path, 'rb') as file, np.load(file) as arrays:
        stored, old = arrays['logprobs'], json.loads(str(arrays['key']))
      stale = _changed(old, key)
      if not stale and np.isfinite(stored).sum() == len(samples):
        return stored
      why = f'the {stale or "number of answers"} has changed'
    except Exception as error:  # zipfile, zlib and numpy have many
      why = errors.describe(error)
    logging.getLogger('absl').warning(
      '%s is stale: %s; the reference scores again', path, why
    )
    return None

  logprobs = processes.on(0, read)
  if logprobs is not None:
    return logprobs
  scored = np.asarray(score(samples), np.float32)

  def write() -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with disk.replacing(path, 'xb') as file:
      np.savez(file, logprobs=scored, key=np.str_(json.dumps(key)))

  processes.on(0, write)
  return scored


def _make(own: models.Models, split: str) -> list[preferences.Preference]:
  """Returns pairs of answers that the stage's initial model gives."""
  components, base = own.components, own.base
  stage = components.stage
  assert isinstance(stage.pairs, schema.MadePairs), stage.pairs
  decoder = models.make_engine(components)
  decoder.set_params(own.load.init() if base is None else base.params, 0)
  pairs, count = pairing.make(
    {k: env for k, env in components.data.envs.items() if stage.envs[k].ratio},
    models.make_driver(components, decoder),
    stage.pairs,
    components.cfg.seed,
    stage.rollout.max_error_share,
    split,
  )
  print(f'made {count.line()}, {split} split', file=sys.stderr)
  return pairs


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


def _fingerprint(own: models.Models, reference: schema.Reference) -> str:
  """Returns the identity of a reference: hash, dtype, frozen or not."""
  if isinstance(reference, schema.Endpoint):
    return f'{reference.name} behind a server'  # at any address
  components = own.components
  weights = own.load.fingerprint(reference)
  frozen = ', frozen' if components.stage.lora.rank else ''
  return f'{weights} in {components.model.dtype}{frozen}'
