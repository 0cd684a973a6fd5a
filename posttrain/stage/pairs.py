"""What a stage on pairs needs before its first step; one model at a time.

1. Its pairs, unless a file has them: answers of the model that it begins with,
   in WORKDIR/pairs/<stage>.jsonl, to held-out questions in <stage>_eval.jsonl.
2. What the reference says of all their answers, in
   WORKDIR/pairs/<stage>_reference.npz, so that it is not held while the stage
   trains.

Both are kept with what they were made of, and made again where that is
something else by now; pairs only as long as the stage has not been saved.
"""

import dataclasses
import functools
import json
import logging
import os
import pathlib
import sys
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from posttrain import schema, types
from posttrain.checkpoints import fingerprints
from posttrain.data import preferences, sources
from posttrain.pipeline import pairs as pair_pipeline
from posttrain.rollout import driver, pairing
from posttrain.rollout import references as refs
from posttrain.rollout.endpoint import client
from posttrain.stage import models as stage_models
from posttrain.util import preemption


def prepare(
  cfg: schema.Run,
  name: str,
  built,
  load: refs.Loader,
  base: Any,
  workdir: str,
  stop: preemption.Signal,
  fresh: bool,
) -> None:
  """Completes a stage's `choice_pipeline`; does nothing for another.

  Args:
    cfg: the whole run's options.
    name: of the stage.
    built: its parts.
    load: of `connect.loader`.
    base: the frozen weights, with LoRA.
    workdir: of the run.
    stop: ends waits for servers.
    fresh: it begins now, and does not go on from a checkpoint.

  Raises:
    ValueError: there are no pairs to be had, or none that fit.
    TooManyErrors: of environments.
  """
  stage, choices = cfg.stages[name], built.pipeline
  if not isinstance(choices, pair_pipeline.PairPipeline):
    return
  folder = os.path.join(workdir, 'pairs')
  if isinstance(stage.pairs, schema.MadePairs):
    files = {'train': os.path.join(folder, f'{name}.jsonl')}
    if stage.pairs.eval_prompts is not None:
      files['eval'] = os.path.join(folder, f'{name}_eval.jsonl')
    if fresh or not all(map(os.path.exists, files.values())):
      made_of(
        files,
        os.path.join(folder, f'{name}_of.json'),
        {
          'model': _fingerprint(cfg, name, built, load, workdir, 'init'),
          'tokenizer': built.renderer.fingerprint,
          'recipe': _recipe(cfg, stage, built, files),
        },
        functools.partial(_make, cfg, stage, built, load, base),
      )
    choices.open(*map(preferences.read, files.values()))
  print(f'stage {name}: {choices.line}', file=sys.stderr)
  for reference in choices.references:
    key = {
      'dataset': choices.fingerprint,
      'model': _fingerprint(cfg, name, built, load, workdir, reference),
      'tokenizer': built.renderer.fingerprint,
    }
    cache = os.path.join(folder, f'{name}_reference.npz')
    choices.score(
      functools.partial(
        cached,
        cache,
        key,
        functools.partial(_score, built, load, base, stop, reference),
      )
    )


def made_of(
  files: dict[str, str],
  of: str,
  key: dict[str, str],
  make: Callable[[str], Sequence[preferences.Preference]],
) -> None:
  """Writes pairs, unless those are there that are made of what `key` says.

  Args:
    files: split -> path of its JSONL.
    of: JSON: what they were made of, by name.
    key: what they shall be made of.
    make: those of a split.
  """
  known, there = _known(of), [x for x in files.values() if os.path.exists(x)]
  stale = _stale(known, key)
  if there and stale:
    logging.getLogger('absl').warning(
      '%s is stale: the %s is another by now; the pairs are made again',
      there[0],
      stale,
    )
    for path in there:
      os.remove(path)
  for split, path in files.items():
    if os.path.exists(path):
      continue
    made = make(split)
    os.makedirs(os.path.dirname(of), exist_ok=True)
    pathlib.Path(of).write_text(json.dumps(key))
    preferences.write(path, made)


def _known(of: str) -> dict[str, str]:
  """What pairs were made of; a file that is gone or damaged says nothing."""
  try:
    return json.loads(pathlib.Path(of).read_text())
  except (OSError, ValueError):
    return {}


def _stale(known: dict[str, str], key: dict[str, str]) -> str:
  """Names what is not as it was; '' = nothing."""
  return ' and the '.join(k for k in key if known.get(k) != key[k])


def cached(
  path: str,
  key: dict[str, str],
  score: Callable[[Sequence[types.Sample]], Sequence[float]],
  samples: Sequence[types.Sample],
) -> np.ndarray:
  """Returns what is kept in a file, if it was made of what `key` says.

  Args:
    path: an npz.
    key: what the numbers depend on, by name.
    score: makes the numbers that are kept from then on.
    samples: that are scored.
  """
  known = _read(path)
  if known is not None:
    stale = _stale(known[0], key)
    if not stale and len(known[1]) == len(samples):
      return known[1]
    logging.getLogger('absl').warning(
      '%s is stale: the %s is another by now; the reference is asked again',
      path,
      stale or 'number of answers',
    )
  values = np.float32(score(samples))
  os.makedirs(os.path.dirname(path), exist_ok=True)
  with open(path + '.tmp', 'wb') as file:
    np.savez(file, logprobs=values, key=np.str_(json.dumps(key)))
  os.replace(path + '.tmp', path)
  return values


def _read(path: str) -> tuple[dict[str, str], np.ndarray] | None:
  if not os.path.exists(path):
    return None
  try:
    with open(path, 'rb') as file, np.load(file) as found:
      return json.loads(str(found['key'])), found['logprobs']
  except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
    logging.getLogger('absl').warning(
      '%s cannot be read (%s); the reference is asked again', path, error
    )
    return None


def _make(
  cfg, stage, built, load: refs.Loader, base, split: str
) -> list[preferences.Preference]:
  """Asks the model that the stage begins with."""
  engine = stage_models.engine(cfg, stage, built)
  engine.set_params(load.init() if base is None else base.params, 0)
  pairs, count = pairing.make(
    {k: env for k, env in built.envs.items() if stage.envs[k].ratio},
    driver.Driver(engine, built.renderer, built.capacity, stage.rollout),
    stage.pairs,
    cfg.seed,
    stage.rollout.max_errors,
    split,
  )
  print(f'made {count.line()}, {split} split', file=sys.stderr)
  return pairs


def _score(
  built,
  load,
  base,
  stop,
  reference: schema.Reference,
  samples: Sequence[types.Sample],
) -> list[float]:
  """Log probability of each answer behind its prompt, nats."""
  print(f'asking {reference} about {len(samples)} answers', file=sys.stderr)
  models = stage_models.references(built, load, base, stop)
  try:
    scored = models(reference, samples)
  except client.EndpointError:
    stop.check('what the reference says of pairs')
    raise
  finally:
    models.close()
  return [
    float(np.sum(logprobs[sample.mask], dtype=np.float64))
    for logprobs, sample in zip(scored, samples, strict=True)
  ]


def _recipe(cfg: schema.Run, stage: schema.Stage, built, splits) -> str:
  """What tells questions, and how they are asked, from others."""
  envs = {
    name: [
      entry.ratio,
      dataclasses.asdict(entry.env),
      *(
        built.envs[name].source(split, cfg.seed).get_state() for split in splits
      ),
    ]
    for name, entry in stage.envs.items()
    if entry.ratio
  }
  said = [cfg.seed, dataclasses.asdict(stage.pairs), envs]
  return sources.fingerprint(json.dumps(said, sort_keys=True).encode())


def _fingerprint(
  cfg: schema.Run,
  name: str,
  built,
  load: refs.Loader,
  workdir: str,
  reference: schema.Reference,
) -> str:
  """What tells a reference from another, and how it is computed."""
  if isinstance(reference, schema.Endpoint):
    return f'{reference.name} behind a server'  # wherever that is by now
  folder = load.folders[reference]
  if folder == 'random':
    model = json.dumps(dataclasses.asdict(built.model), sort_keys=True)
    found = sources.fingerprint(f'random {cfg.seed} {model}'.encode())
  else:
    found = fingerprints.of_weights(os.path.join(workdir, folder))
  frozen = ', frozen' if cfg.stages[name].lora.rank else ''
  return f'{found} in {built.model.dtype}{frozen}'
