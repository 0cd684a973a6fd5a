"""The server command: serves a trained policy over the OpenAI-compatible API.

    python -m posttrain.serve --checkpoint=runs/arithmetic --port=8000
    python -m posttrain.serve --checkpoint=runs/arithmetic --host=0.0.0.0 \\
        --api_key_env=POSTTRAIN_KEY

The endpoints are /v1/completions, /v1/chat/completions, /v1/models and /health.
One line on stdout gives the address when the server is ready. The console
script `posttrain-serve` is this command.

The default host is reachable from this machine only. Set --api_key_env before
binding another --host.

Exit codes: 0 stopped by SIGTERM, 2 the command line is wrong, 130 interrupted.
"""

import contextlib
import dataclasses
import os
import pathlib
import signal
import sys
from collections.abc import Sequence

from posttrain.util import flags as flags_lib


@dataclasses.dataclass
class Flags:
  """The command line."""

  checkpoint: str = flags_lib.required('PATH', flags_lib.CHECKPOINT)
  port: int = flags_lib.flag(
    8000, 'The port; 0 takes a free one.', least=0, most=65535
  )
  host: str = flags_lib.flag('127.0.0.1', 'The address to bind.', value='HOST')
  name: str = flags_lib.flag(
    '',
    "The model's name in requests.",
    value='NAME',
    if_absent="the checkpoint folder's name",
  )
  slots: int = flags_lib.flag(16, 'Sequences decoded at a time.', least=1)
  max_model_len: int = flags_lib.flag(
    2048, 'Longest prompt plus answer, in tokens.', least=2
  )
  chunk: int = flags_lib.flag(
    8,
    'Tokens decoded between two checks for new and cancelled requests.',
    least=1,
  )
  api_key_env: str = flags_lib.flag(
    '',
    'The environment variable with the key that every request must carry.',
    value='VARIABLE',
    if_absent='none, requests need no key',
  )
  max_queue: int = flags_lib.flag(
    256, 'Sequences that may wait; further requests get status 429.', least=0
  )
  max_body_bytes: int = flags_lib.flag(
    8 * 2**20, 'Largest body of a request, in bytes.', least=1
  )
  template_variables: str = flags_lib.flag(
    '{}',
    'Variables of the chat template, a JSON object; for directories, as a run '
    'has its own.',
    value='JSON',
  )


PARSER = flags_lib.Parser(Flags, __doc__)


def api_key(flags: Flags) -> str | None:
  """Returns the key in the environment variable; None without the flag.

  Raises:
    ValueError: the variable is not set.
  """
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
  """Serves until a signal arrives; returns the exit code.

  Raises:
    ValueError: the flags are wrong, the address cannot be bound, or the
      checkpoint cannot be served.
  """
  # Until the server installs its own handler: while the model is loaded.
  signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
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
    application = app.make(
      served, worker, api_key=key, max_body_bytes=flags.max_body_bytes
    )
    print(
      f'serving {served.name!r} at {server.address(listening)}/v1', flush=True
    )
    code = server.Server(application, worker).serve_on(listening)
  if not worker.stop(server.LEAVE):
    # It may be compiling, which nothing but the end of the process stops.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
  return code


def load(flags: Flags):
  """Returns the served policy (`texts.Served`) and its started worker."""
  from posttrain.checkpoints import policies
  from posttrain.serve import texts, worker
  from posttrain.util import memory

  memory.keep_freed_memory()
  policy = policies.load(
    flags.checkpoint, text=False, variables=flags.template_variables
  )
  folder = pathlib.Path(flags.checkpoint).expanduser().resolve()
  max_jobs = flags.slots + flags.max_queue
  engine_worker = worker.Worker(
    policy,
    slots=flags.slots,
    capacity=flags.max_model_len,
    chunk=flags.chunk,
    max_jobs=max_jobs,
  )
  engine_worker.start()
  served = texts.Served(
    policy, flags.name or folder.name, flags.max_model_len, max_jobs
  )
  return served, engine_worker


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns the exit code. `argv=None`: the process's."""
  return PARSER.run(serve, argv)


if __name__ == '__main__':
  sys.exit(main())
