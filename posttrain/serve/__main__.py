"""Serves a trained policy over the OpenAI-compatible API.

    python -m posttrain.serve --checkpoint=PATH [--port=8000]
        [--host=127.0.0.1] [--name=NAME] [--slots=16] [--max_model_len=2048]
        [--chunk=8] [--api_key_env=VARIABLE] [--max_queue=256]
        [--max_body_bytes=8388608] [--template_variables=JSON]

PATH is as for posttrain.generate: a run's workdir, one of its
checkpoints/<stage> folders, or one step's; or a HuggingFace or PEFT directory.

/v1/completions, /v1/chat/completions, /v1/models and /health are answered at
http://HOST:PORT; one line says so when it is ready (--port=0 takes any free
port, and the line tells which). Only this machine can reach 127.0.0.1; before
you give another --host, name by --api_key_env the environment variable with
the key that every request must bear.

--name is what clients call the model (default: the folder's name). --slots
sequences are decoded at a time, --chunk tokens between two looks at who came
and went; --max_queue more may wait, and who comes then is told to come later
(429). --max_model_len is of prompt and answer together, in tokens.
--template_variables are shown to a directory's chat template.

Exit codes: 0 told to stop by SIGTERM, 2 the command is wrong, 130 interrupted.
"""

import contextlib
import dataclasses
import os
import pathlib
import signal
import sys
from collections.abc import Sequence

from posttrain.util import errors


@dataclasses.dataclass
class Flags:
  """The command line."""

  checkpoint: str = ''
  port: int = 8000
  host: str = '127.0.0.1'
  name: str = ''
  slots: int = 16
  max_model_len: int = 2048
  chunk: int = 8
  api_key_env: str = ''
  max_queue: int = 256
  max_body_bytes: int = 8 * 2**20
  template_variables: str = '{}'


_LEAST = {
  'port': 0,
  'slots': 1,
  'max_model_len': 2,
  'chunk': 1,
  'max_queue': 0,
  'max_body_bytes': 1,
}


def parse(argv: Sequence[str]) -> Flags:
  """Reads the command line; ValueError names the argument that is wrong."""
  flags = Flags()
  kinds = {field.name: field.type for field in dataclasses.fields(Flags)}
  for argument in argv:
    name, equals, text = argument.removeprefix('--').partition('=')
    if not argument.startswith('--') or name not in kinds or not equals:
      expected = ', '.join(f'--{known}=...' for known in kinds)
      raise ValueError(f'arguments must be {expected}: got {argument!r}')
    try:
      setattr(flags, name, kinds[name](text))
    except ValueError:
      raise ValueError(
        f'--{name} must be a whole number: got {text!r}'
      ) from None
  if not flags.checkpoint:
    raise ValueError('--checkpoint=PATH must be given')
  for name, least in _LEAST.items():
    if getattr(flags, name) < least:
      raise ValueError(
        f'--{name} must be at least {least}: got {getattr(flags, name)}'
      )
  if flags.port > 65535:
    raise ValueError(f'--port must be at most 65535: got {flags.port}')
  return flags


def api_key(flags: Flags) -> str | None:
  """The key that the environment holds; None where none is asked for."""
  if not flags.api_key_env:
    return None
  key = os.environ.get(flags.api_key_env)
  if not key:
    raise ValueError(
      '--api_key_env must name an environment variable that holds a key: '
      f'got {flags.api_key_env!r}, which is not set'
    )
  return key


def serve(flags: Flags) -> int:
  """Serves until a signal comes; returns the exit code.

  Raises:
    ValueError: the command is wrong, or what it names cannot be served.
  """
  key = api_key(flags)
  try:
    from posttrain.serve import app, server
  except ModuleNotFoundError as error:
    if error.name not in ('starlette', 'uvicorn'):
      raise
    raise ValueError(
      f'the package {error.name} must be installed to serve: got none; '
      "pip install 'posttrain[serve]'"
    ) from error
  with contextlib.closing(server.bind(flags.host, flags.port)) as listening:
    served, worker = load(flags)
    made = app.make(
      served, worker, api_key=key, max_body_bytes=flags.max_body_bytes
    )
    print(
      f'serving {served.name!r} at {server.address(listening)}/v1', flush=True
    )
    code = server.Server(made, worker).serve_on(listening)
  if not worker.stop(server.LEAVE):
    # It compiles, maybe, and that cannot be stopped otherwise.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
  return code


def load(flags: Flags):
  """Returns (`texts.Served`, a `worker.Worker` that has been started)."""
  from posttrain.checkpoints import policies
  from posttrain.serve import texts, worker
  from posttrain.util import memory

  memory.keep_freed_memory()
  policy = policies.load(
    flags.checkpoint, text=False, variables=flags.template_variables
  )
  folder = pathlib.Path(flags.checkpoint).expanduser().resolve()
  room = flags.slots + flags.max_queue
  owner = worker.Worker(
    policy,
    slots=flags.slots,
    capacity=flags.max_model_len,
    chunk=flags.chunk,
    room=room,
  )
  owner.start()
  return texts.Served(
    policy, flags.name or folder.name, flags.max_model_len, room
  ), owner


def main(argv: Sequence[str]) -> int:
  """Returns the exit code."""
  if '--help' in argv:
    print(__doc__)
    return 0
  # Until the server has its own handler: while the model is loaded.
  signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
  try:
    return serve(parse(argv))
  except KeyboardInterrupt:
    return 130
  except ValueError as error:
    return errors.report(error)


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
