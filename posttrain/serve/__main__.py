"""The server command: serves a trained policy over the OpenAI-compatible API.

    python -m posttrain.serve --checkpoint=runs/arithmetic --port=8000
    python -m posttrain.serve --checkpoint=runs/arithmetic --host=0.0.0.0 \\
        --api_key_env=POSTTRAIN_KEY
    python -m posttrain.serve --sampler --port=8001
    python -m posttrain.serve --train --checkpoint=DIRECTORY --workdir=service

The endpoints are /v1/completions, /v1/chat/completions, /v1/models and /health;
a reward model has /pooling in place of completions.
With --train it is a training service for clients of Tinker's SDK, in --workdir.
With --sampler it decodes for a run of `posttrain.main --samplers`, which sends
model, sizes and weights.
One line on stdout gives the address when the server is ready. The console
script `posttrain-serve` is this command.

The default host is reachable from this machine only. For another --host a key
must be set with --api_key_env, unless --no_auth says that none is needed.

Exit codes: 0 stopped by SIGTERM, 1 the machine failed, 2 the command line
is wrong, 130 interrupted.
"""

import contextlib
import dataclasses
import gc
import os
import pathlib
import signal
import sys
from collections.abc import Sequence
from typing import Any

from posttrain.config import names
from posttrain.util import commands, disk

SWITCH = 5e-4  # seconds between two turns of a Python thread


@dataclasses.dataclass
class Flags:
  """The command line."""

  checkpoint: str = commands.flag(
    '',
    commands.CHECKPOINT,
    value='PATH',
    if_absent='required without --sampler',
  )
  train: bool = commands.flag(
    False,
    "Trains and samples as clients of Tinker's SDK ask; --checkpoint is the "
    'base model.',
  )
  workdir: str = commands.flag(
    '',
    'The folder of --train, with its journal and checkpoints; the same command '
    'goes on in it.',
    value='PATH',
    if_absent='required with --train',
  )
  sampler: bool = commands.flag(
    False,
    'Decodes for a run, whose learner sends the model, the sizes and the '
    'weights; other flags than those of address and key have no effect.',
  )
  port: int = commands.flag(
    8000, 'The port; 0 takes a free one.', least=0, most=65535
  )
  host: str = commands.flag('127.0.0.1', 'The address to bind.', value='HOST')
  served_name: str = commands.flag(
    '',
    "The model's name in requests.",
    value='NAME',
    if_absent="the checkpoint folder's name",
  )
  slots: int = commands.flag(16, 'Sequences decoded at a time.', least=1)
  max_model_len: int = commands.flag(
    2048, 'Longest prompt plus answer, in tokens.', least=2
  )
  chunk: int = commands.flag(
    8,
    'Tokens decoded between two checks for new and cancelled requests.',
    least=1,
  )
  api_key_env: str = commands.flag(
    '',
    'The environment variable with the key that every request must carry.',
    value='VARIABLE',
    if_absent='none; needs --no_auth where --host is not this machine',
  )
  no_auth: bool = commands.flag(
    False, 'Serves without a key to whoever reaches --host.'
  )
  allowed_hosts: str = commands.flag(
    '',
    'Names besides those of this machine that the Host header may have, with '
    'commas; for a proxy in front of the server.',
    value='NAMES',
    if_absent='none; where other machines reach --host, any name will do',
  )
  max_queue: int = commands.flag(
    256, 'Sequences that may wait; further requests get status 429.', least=0
  )
  max_body_bytes: int = commands.flag(
    8 * 2**20, 'Largest body of a request, in bytes.', least=1
  )
  template_variables: str = commands.flag(
    '{}',
    'Variables of the chat template, a JSON object; for directories, as a run '
    'has its own.',
    value='JSON',
  )
  tool_format: str = commands.flag(
    'auto',
    "How the policy writes calls of tools: as its template, 'auto', or as in "
    "training; 'text' = calls are not read, as in rows with tools.",
    choices=('auto', 'hermes', 'llama3', 'plain', 'text'),
  )
  compilation_cache: str | None = commands.compilation_cache()

  def __post_init__(self):
    if bool(self.checkpoint) == self.sampler:
      raise ValueError(
        'one of --checkpoint=PATH and --sampler must be given: got '
        f'{"both" if self.sampler else "none"}'
      )
    if self.train != bool(self.workdir) or self.train and self.sampler:
      raise ValueError(
        '--workdir must be given with --train, and only with it, and not with '
        f'--sampler: got {self.workdir!r}'
      )
    if self.no_auth and self.api_key_env:
      raise ValueError(
        '--no_auth must be left out where --api_key_env is given'
      )


PARSER = commands.Parser(Flags, __doc__, names.flag)


def serve(options: Flags) -> int:
  """Serves until a signal arrives; returns the exit code.

  Raises:
    ValueError: the flags are wrong, the address cannot be bound, or the
      checkpoint cannot be served.
  """
  # Until the server installs its own handler: while the model is loaded.
  signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
  key = commands.api_key('--api_key_env', options.api_key_env)
  extra = 'tinker' if options.train else 'serve'
  try:
    from posttrain import compilation, schema
    from posttrain.checkpoints import policies
    from posttrain.serve import app, sampler, worker
    from posttrain.util import memory

    if options.train:
      from posttrain.serve import training, training_routes
  except ModuleNotFoundError as error:
    if error.name not in ('starlette', 'uvicorn', 'tinker'):
      raise
    raise ValueError(
      f'the package {error.name} must be installed to serve: got none; '
      f"pip install 'posttrain[{extra}]'"
    ) from error
  with contextlib.ExitStack() as stack:
    listening = stack.enter_context(
      contextlib.closing(app.bind(options.host, options.port))
    )
    hosts = app.own_hosts(listening, options.allowed_hosts.split(','))
    if key is None and not (app.is_loopback(listening) or options.no_auth):
      raise ValueError(
        '--api_key_env must name the variable of a key where --host can be '
        f'reached from other machines: got none for {options.host!r}; or set '
        '--no_auth'
      )
    memory.keep_freed_memory()
    if options.sampler:
      compilation.enable_compilation_cache(
        options.compilation_cache or schema.Run.compilation_cache
      )
      decoder = sampler.Sampler()
      print(f'sampler at {app.address(listening)}', flush=True)
      server = app.Server(decoder.application(key, hosts), decoder)
      server.run(sockets=[listening])
      # It may be decoding, which nothing but the end of the process stops.
      os._exit(server.code)
    policy = policies.load(
      options.checkpoint,
      text=options.train,
      reward=not options.train,
      initial=options.train,
      variables=options.template_variables,
      cache=options.compilation_cache,
    )
    folder = pathlib.Path(options.checkpoint).expanduser().resolve()
    engine: Any = worker.Worker(
      policy,
      options.served_name or folder.name,
      slots=options.slots,
      capacity=options.max_model_len,
      chunk=options.chunk,
      max_jobs=options.slots + options.max_queue,
      tool_format=options.tool_format,
      exact=options.train,
    )
    make, what, path = app.make, f'serving {engine.name!r}', '/v1'
    if options.train:
      workdir = pathlib.Path(options.workdir).expanduser().resolve()
      workdir.mkdir(parents=True, exist_ok=True)
      stack.enter_context(disk.lock(str(workdir), '--workdir'))
      make, path = training_routes.make, ''
      what = f'training {engine.name!r}'
      engine = training.Service(engine, workdir)
    application = make(
      engine, api_key=key, hosts=hosts, max_body_bytes=options.max_body_bytes
    )
    engine.start()
    # The collector holds up all threads: it need not look at these again.
    gc.freeze()
    # The event loop waits so long for a busy thread at every system call.
    sys.setswitchinterval(SWITCH)
    print(f'{what} at {app.address(listening)}{path}', flush=True)
    server = app.Server(application, engine)
    server.run(sockets=[listening])
    if not engine.stop(app.LEAVE):
      # It may be compiling, which nothing but the end of the process stops.
      sys.stdout.flush()
      sys.stderr.flush()
      os._exit(server.code)
  return server.code


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns the exit code. `argv=None`: the process's."""
  return PARSER.run(serve, argv)


if __name__ == '__main__':
  sys.exit(main())
