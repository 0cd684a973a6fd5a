"""Content hashes of weights; for a run, from stored checksums only."""

import dataclasses
import json
import pathlib

from posttrain import schema
from posttrain.checkpoints import reading, weight_folders
from posttrain.data import sources


def of_model(cfg: schema.Model) -> str:
  """Returns a model's options as text, without the kind of its attention."""
  options = dataclasses.asdict(cfg)
  del options['attention']
  return json.dumps(options, sort_keys=True)


def of_weights(folder: str) -> str:
  """Returns the content hash of a weights folder, with its model's options.

  For a run it uses stored checksums instead of reading arrays. For an adapter
  it includes the hash of the base weights.

  Args:
    folder: a folder from `weight_folders.find`.
  """
  parts = [of_model(weight_folders.model(folder))]
  if weight_folders.is_run(folder):
    averaged = weight_folders.selects(folder)
    sums = reading.read_sums(folder, averaged)
    parts.append(json.dumps(sums, sort_keys=True))
    is_adapter = weight_folders.adapter_options(folder) is not None
  else:
    path = pathlib.Path(folder)  # PEFT adapters differ by their options too
    files = [*path.glob('*.safetensors'), *path.glob('adapter_config.json')]
    parts += [sources.file_fingerprint(file) for file in sorted(files)]
    is_adapter = weight_folders.is_peft(folder)
  if is_adapter:
    parts.append(of_weights(weight_folders.start(folder)))
  return sources.fingerprint(*(part.encode() for part in parts))
