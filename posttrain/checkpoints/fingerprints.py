"""What tells weights from others, without reading a run's arrays."""

import dataclasses
import json
import pathlib

from posttrain.checkpoints import store, weights
from posttrain.data import sources


def of_weights(folder: str) -> str:
  """Returns a hash of what a folder's weights are; reads no array of a run.

  That of the model is part of it, and of what a correction corrects.

  Args:
    folder: of `weights.find`.
  """
  model = dataclasses.asdict(weights.model(folder))
  parts = [json.dumps(model, sort_keys=True)]
  if weights.is_run(folder):
    parts.append(json.dumps(store.read_sums(folder), sort_keys=True))
    corrects = weights.adapter_options(folder)
  else:
    every = pathlib.Path(folder)  # a PEFT adapter is its options as well
    files = [*every.glob('*.safetensors'), *every.glob('adapter_config.json')]
    parts += [sources.file_fingerprint(file) for file in sorted(files)]
    corrects = weights.is_peft(folder)
  if corrects:
    parts.append(of_weights(weights.start(folder)))
  return sources.fingerprint(*(part.encode() for part in parts))
